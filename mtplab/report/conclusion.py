"""What a study says, in sentences whose numbers come from its rows.

Knows rows only. Where a comparison cannot be made (a setting is missing), its sentence is left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from mtplab.quant.policy import resolve_policy
from mtplab.report.findings import Finding, Findings
from mtplab.report.row_sizes import kv_bytes, weight_bytes
from mtplab.report.rows import Record, as_records, at_temperature, besides, weights_label
from mtplab.report.text import human_bytes
from mtplab.study.fields import fact_of, has_length
from mtplab.study.hint import faint_draft, faint_server
from mtplab.study.interval import change_error
from mtplab.study.numbers import NATS
from mtplab.study.soundness import CRITERION, kl_words, sentences
from mtplab.study.speed import ODD, batch_of, by_batch, costs
from mtplab.study.words import cache_words, prompts_words, signed

__all__ = ["PAYS", "Conclusion"]

_NOTHING = "There are no finished rows yet."
PAYS = 1.05  # times plain decoding's speed: below it, a gain is no more than what two runs differ by
CONTEXT = 100  # tokens at which a sequence's memory is given as an example


class Conclusion(Findings):
    """Findings on depth, time, cache and exclusions at one temperature, for a reader who wants the upshot.

    A ± is half a 95 % interval over prompts (`mtplab.study.interval`), and settings are compared prompt by prompt.
    Exclusions and caches are compared within one checkpoint, set of prompts and way of running: the reference's.

    Args:
        rows: rows of a sweep, or dicts with the same fields.
        reference: exclusion label and cache policy that the others are compared with, of the first row that has them;
            the first row's when None.
        timed: rows that were timed by themselves, at one batch or several. Their seconds say what a round costs there;
            their acceptance is not looked at, for it needs more prompts than a small batch has.
    """

    def __init__(self, rows: Any, reference: tuple[str, str] | None = None, timed: Any = ()):
        found = [record for record in as_records(rows) if has_length(record)]
        self.records = at_temperature(found)
        if reference is not None:
            reference = (reference[0], cache_words(resolve_policy(reference[1]).name))
        first = next((r for r in self.records if reference in (None, _setting(r))), None)
        self.reference = reference if first is None else _setting(first)
        self._alike = [] if first is None else [r for r in self.records if besides(r) == besides(first)]
        self._compared: list[bool] = []  # of each comparison, whether chance explains it
        # what a round takes against what it gives, and the depths that are fastest, on this machine at each batch
        judged = (*self._broken(), self._others_left_out(), self._faint(), self._length(), self._quality())
        times = map(self._time_of, (self._alike, *by_batch(at_temperature(as_records(timed)))))
        super().__init__((*judged, *times, self._odd(), self._cache(), self._exclusions(), self._chance()), _NOTHING)

    def _line(self, exclude: str, policy: str) -> dict[int, Record]:
        return {r["depth"]: r for r in self._alike if _setting(r) == (exclude, policy)}

    def _reference_line(self) -> dict[int, Record]:
        return self._line(*self.reference) if self.reference else {}

    def _broken(self) -> list[Finding]:
        """High acceptance over a broken target is no finding about drafts."""
        told = sentences(self.records)
        return [Finding(each, "Broken target") for each in told] + [Finding(f"{CRITERION}.")] * bool(told)

    def _others_left_out(self) -> str:
        """Rows of other checkpoints or prompts are no other exclusions or caches."""
        left = len(self.records) - len(self._alike)
        if not left or not self._alike:
            return ""
        mine = self._alike[0]
        name = ", ".join(str(mine[key]) for key in ("checkpoint", "prompt_set", "method") if mine.get(key))
        return (
            f"Depths, times, caches and exclusions are compared within {name}; {left} row{'s' * (left > 1)} of another "
            "checkpoint, other prompts or another way of running cannot be (mtplab compare puts them side by side)."
        )

    def _quality(self) -> Finding | None:
        """What each setting's target is worth beside the unquantised one."""
        judged = {(r["weights_label"], r["policy_label"]): r for r in self.records if r.get("kl") is not None}
        changed = [r for r in judged.values() if r["kl"] > 0 or r.get("kl_error")]
        if not changed:
            return None
        least, most = (pick(changed, key=lambda r: r["kl"]) for pick in (min, max))
        said, topic = "What quantisation costs the target itself, in KL from the unquantised one", "Quality"
        if most is least:
            return Finding(f"{said}: {_kl(least)}.", topic)
        return Finding(said, topic, (f"{_kl(least)} at least", f"{_kl(most)} at most"))

    def _faint(self) -> Finding:
        """A draft that is hardly ever right is no finding about depth: something is wrong with it."""
        drafted = [r for r in self._reference_line().values() if r["depth"]]
        last = drafted[-1] if drafted else None
        hint = faint_draft if last is None or last.get("engine") is None else faint_server
        said = hint(last["per_position"], last["rounds"]) if last is not None else ""
        return Finding(said, "Drafts that fail")

    def _length(self) -> Finding | None:
        line = self._reference_line()
        if len(line) < 2:
            return None
        deepest = line[max(line)]
        return Finding(
            f"With {_weights(deepest)} (KV cache: {deepest['policy_label']}), a round at depth {deepest['depth']} "
            f"gives {_with_error(deepest)} tokens ({prompts_words(deepest)}, {deepest['rounds']:g} rounds)"
            f"{_growth(line)}.",
            "Depth",
        )

    def _time_of(self, timed: list[Record]) -> Finding | None:
        line = self._reference_line()
        cost = costs(timed, [r["odd_timing"] for r in timed])
        speed = {d: r["acceptance_length"] / cost[d].ratio for d, r in line.items() if d in cost}
        if len(speed) < 2:
            return None
        deepest, best = max(speed), max(speed.values())
        # two runs differ by that much: what is as fast within it is named too
        fast = [depth for depth in sorted(speed) if speed[depth] * PAYS > best]
        plain = [r for r in timed if r["depth"] == 0 and r["odd_timing"] is None]
        rates = [r["tokens_per_second"] for r in plain if r["tokens_per_second"] is not None]
        rate = f" ({median(rates):.0f} tokens per second)" if rates else ""
        by_depth = ", ".join(f"{speed[depth]:.2f} at {depth}" for depth in sorted(speed) if depth)
        settings = cost[deepest].settings
        pays = "Here no depth pays." if 0 in fast else f"Here depth {' or '.join(map(str, fast))} pays most."
        return Finding(
            f"On {_machine(timed[0])}, a round at depth {deepest} takes {cost[deepest].ratio:.1f} times as long as "
            f"one at depth 0 ({f'median of {settings} settings' if settings > 1 else 'one setting'}): to break even it "
            f"would have to give as many tokens, and it gives {line[deepest]['acceptance_length']:.2f}. Speed "
            f"against plain decoding{rate}: {by_depth}. {pays}",
            f"Time at batch {batch_of(timed[0])}",
        )

    def _odd(self) -> Finding | None:
        odd = [r for r in self.records if r["odd_timing"] is not None]
        if not odd:
            return None
        named = "; ".join(f"{r['series']}, depth {r['depth']}: {r['odd_timing']:.2g} times" for r in odd[:3])
        more = f"; and {len(odd) - 3} more" if len(odd) > 3 else ""
        return Finding(
            f"The machine was busy with something else: {len(odd)} of {len(self.records)} rows have seconds per round "
            f"more than {ODD:g} times off the others' trend, and are counted in no speed ({named}{more}).",
            "Odd times",
        )

    def _cache(self) -> Finding | None:
        said = self._others("KV caches", "policy_label", lambda r: r["policy_label"], _kv_share)
        state = next((r["state_bytes"] for r in self._alike if r.get("state_bytes")), 0)
        if said is None or not state:
            return said
        rest = f"The rest is the recurrent state, {human_bytes(state)} a sequence, which no policy touches."
        return replace(said, after=rest)

    def _exclusions(self) -> Finding | None:
        return self._others("exclusions", "exclude_label", _weights, _weight_share)

    def _others(
        self, what: str, key: str, words: Callable, share: Callable[[Record, Record], str]
    ) -> Finding | None:
        """How the reference's line compares with those that differ from it in `key` alone, at the deepest depth."""
        line = self._reference_line()
        if not line:
            return None
        depth = max(line)
        base, parts = line[depth], []
        for label in dict.fromkeys(r[key] for r in self._alike):
            pair = (label, self.reference[1]) if key == "exclude_label" else (self.reference[0], label)
            other = self._line(*pair).get(depth)
            if other is not None and label != base[key]:
                parts.append(f"{words(other)} {self._change(other, base)}{share(other, base)}")
        topic = what[0].upper() + what[1:]
        return Finding(f"Other {what} at depth {depth}", topic, tuple(parts)) if parts else None

    def _change(self, other: Record, base: Record) -> str:
        """The difference in acceptance length, and whether the prompts there are can tell it from none."""
        change = other["acceptance_length"] - base["acceptance_length"]
        found = change_error(other, base)
        if found is None:
            return signed(change)
        if change == 0 and found[0] == 0:
            return "no difference"
        within = abs(change) <= found[0]
        self._compared.append(within)
        return f"{signed(change)} ± {found[0]:.2f}" + (" (within chance)" if within else "")

    def _chance(self) -> Finding | None:
        if not any(r["length_error"] for r in self.records):
            return None
        said = "A ± is half a 95 % interval over prompts; settings are compared prompt by prompt."
        if any(self._compared):
            said += " Within chance: these prompts cannot tell it from no change; more of them can."
        if len(self._compared) > 2 and not all(self._compared):
            said += f" Of {len(self._compared)} comparisons, one in twenty lies outside by chance alone."
        return Finding(said, "Reading ±")


def _setting(record: Record) -> tuple[str | None, str]:
    return record.get("exclude_label"), record["policy_label"]


def _growth(line: dict[int, Record]) -> str:
    """From which depth on the acceptance length grows no further that the prompts can tell."""
    depths = sorted(line)
    grown = [depths[0]]
    for before, depth in itertools.pairwise(depths):
        found = change_error(line[depth], line[before])
        if found is None:
            return ""
        if line[depth]["acceptance_length"] - line[before]["acceptance_length"] <= found[0]:
            break
        grown.append(depth)
    if grown[-1] == depths[-1]:
        change = line[depths[-1]]["acceptance_length"] - line[depths[-2]]["acceptance_length"]
        error, _ = change_error(line[depths[-1]], line[depths[-2]])
        return f", and still grows there ({signed(change)} ± {error:.2f} over depth {depths[-2]})"
    return f"; past depth {grown[-1]} ({_with_error(line[grown[-1]])}) the next depth adds nothing beyond chance"


def _with_error(record: Record) -> str:
    error = record["length_error"]
    return f"{record['acceptance_length']:.2f}" + (f" ± {error:.2f}" if error else "")


def _kl(record: Record) -> str:
    setting = f"{record['weights_label']}, KV cache {record['policy_label']}"
    share = record.get("top1_agreement")
    top1 = "" if share is None else f"; the same likeliest token at {100 * share:.1f} % of positions"
    return f"{kl_words(record)} {NATS} ({setting}{top1})"


def _machine(record: Record) -> str:
    threads, device = fact_of(record, "threads"), fact_of(record, "device") or "this device"
    with_threads = f" with {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    return f"{device}{with_threads} at batch {batch_of(record)}"


def _weights(record: Record) -> str:
    words = weights_label(record)
    whole = {"published": "the published exclusions", "all BF16": "everything in BF16", "all FP8": "everything in FP8"}
    whole |= {"as stored": "the weights as stored", "as served": "the weights as served"}
    if "(draft: " in words:
        return words
    return whole.get(words, f"{words} kept out of FP8")


def _kv_share(other: Record, base: Record) -> str:
    """` for 53 % of the KV bytes …`, where both rows know them, and of all that a sequence holds."""
    mine, theirs = kv_bytes(other), kv_bytes(base)
    if not mine or not theirs:
        return ""
    said = f" for {100 * mine / theirs:.0f} % of the KV bytes as deployed"
    state = base.get("state_bytes") or 0
    if not state:
        return said
    whole = 100 * (state + CONTEXT * mine) / (state + CONTEXT * theirs)
    return f"{said} ({whole:.0f} % of all that {CONTEXT} tokens hold)"


def _weight_share(other: Record, base: Record) -> str:
    mine, theirs = weight_bytes(other), weight_bytes(base)
    return f" for {100 * mine / theirs:.0f} % of the weight bytes" if mine and theirs else ""
