"""What a study says, in sentences whose numbers come from its rows.

Knows rows only. Where a comparison cannot be made (a setting is missing), its sentence is left out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from mtplab.report.palette import GREEN
from mtplab.report.rows import Record, as_records, at_temperature
from mtplab.report.text import escape

__all__ = ["Conclusion", "length_error"]

_NOTHING = "There are no finished rows yet."
SMALL_GAIN = 0.05  # tokens per round that a further draft must add to be worth naming


def length_error(record: Record) -> float:
    """Standard error of a row's acceptance length, rounds taken as independent.

    With P(a ≥ j) = per_position[j-1], E[a] = Σ P(a ≥ j) and E[a²] = Σ (2j−1) P(a ≥ j).
    """
    shares = record.get("per_position") or []
    rounds = record.get("rounds") or 0
    if not rounds:
        return math.nan
    mean = sum(shares)
    square = sum((2 * j - 1) * share for j, share in enumerate(shares, 1))
    return math.sqrt(max(0.0, square - mean * mean) / rounds)


class Conclusion:
    """Sentences on depth, cache and exclusions at one temperature, for a reader who wants the upshot.

    Args:
        rows: rows of a sweep, or dicts with the same fields.
        reference: exclusion label and cache policy that the others are compared with; the first row's when None.
    """

    def __init__(self, rows: Any, reference: tuple[str, str] | None = None):
        found = [r for r in as_records(rows) if r.get("error") is None and r.get("acceptance_length") is not None]
        self.records = at_temperature(found)
        if reference is None and self.records:
            first = self.records[0]
            reference = (first["exclude_label"], first["policy_label"])
        self.reference = reference
        self.sentences = [sentence for sentence in (self._depth(), self._cache(), self._exclusions()) if sentence]
        if any("(within chance)" in sentence for sentence in self.sentences):
            self.sentences.append("Within chance: so few rounds cannot tell it from no change; more prompts can.")

    def _line(self, exclude: str, policy: str) -> dict[int, Record]:
        return {
            r["depth"]: r for r in self.records if r.get("exclude_label") == exclude and r["policy_label"] == policy
        }

    def _useful(self) -> tuple[dict[int, Record], int]:
        """The reference line, and the deepest depth that still adds `SMALL_GAIN` tokens over the one before."""
        line = self._line(*self.reference) if self.reference else {}
        depths = sorted(line)
        useful = depths[0] if depths else 0
        for before, depth in itertools.pairwise(depths):
            gain = line[depth]["acceptance_length"] - line[before]["acceptance_length"]
            if gain / (depth - before) < SMALL_GAIN:
                break
            useful = depth
        return line, useful

    def _depth(self) -> str:
        line, useful = self._useful()
        if len(line) < 2:
            return ""
        here, deepest = line[useful], line[max(line)]
        if useful == max(line):
            tail = f"and every draft up to that depth adds at least {SMALL_GAIN} tokens"
        else:
            tail = (
                f"a further draft adds less than {SMALL_GAIN} "
                f"({deepest['acceptance_length']:.2f} at depth {deepest['depth']})"
            )
        return (
            f"With {_weights_words(here)} (KV cache: {_cache_words(here)}), a round gives "
            f"{here['acceptance_length']:.2f} "
            f"tokens at depth {useful} (± {1.96 * length_error(here):.2f} over {here['rounds']} rounds), {tail}."
        )

    def _cache(self) -> str:
        return self._others("KV caches", "policy_label", _cache_words, _kv_bytes, "bytes a token")

    def _exclusions(self) -> str:
        return self._others("exclusions", "exclude_label", _weights_words, _weight_bytes, "weight bytes")

    def _others(self, what: str, key: str, words: Callable, size: Callable, unit: str) -> str:
        """How the reference's line compares with those that differ from it in `key` alone, at the depth that pays."""
        line, useful = self._useful()
        if not line:
            return ""
        base, parts = line[useful], []
        for label in dict.fromkeys(r[key] for r in self.records):
            pair = (label, self.reference[1]) if key == "exclude_label" else (self.reference[0], label)
            other = self._line(*pair).get(useful)
            if other is not None and label != base[key]:
                parts.append(f"{words(other)} {_change(other, base)}" + _share(other, base, size, unit))
        return f"Other {what} at that depth: {'; '.join(parts)}." if parts else ""

    def _repr_html_(self) -> str:
        text = "<br>".join(escape(sentence) for sentence in self.sentences or [_NOTHING])
        return f'<p class="finding" style="border-left:4px solid {GREEN};padding:8px 16px;max-width:50em">{text}</p>'

    def __repr__(self) -> str:
        return " ".join(self.sentences) or _NOTHING


def _change(other: Record, base: Record) -> str:
    """The difference in acceptance length, and whether the rounds there are can tell it from none."""
    change = other["acceptance_length"] - base["acceptance_length"]
    if abs(change) < 0.005:
        return "±0.00"
    within = abs(change) < 1.96 * math.hypot(length_error(other), length_error(base))
    text = f"{change:+.2f}".replace("-", "−")
    return f"{text} (within chance)" if within else text


def _weights_words(record: Record) -> str:
    label = record["exclude_label"]
    words = {"published": "the published exclusions", "*": "everything in BF16", "none": "everything in FP8"}
    return words.get(label, f"{record['weights_label']} kept out of FP8")


def _cache_words(record: Record) -> str:
    return "unquantised" if record["policy_label"] == "none" else str(record["policy_label"])


def _share(other: Record, base: Record, size: Callable[[Record], float], what: str) -> str:
    """` for 53 % of the bytes`, where both rows know their size."""
    return f" for {100 * size(other) / size(base):.0f} % of the {what}" if size(other) and size(base) else ""


def _kv_bytes(record: Record) -> float:
    return record.get("kv_bytes_per_token") or 0


def _weight_bytes(record: Record) -> float:
    return (record.get("target_weight_bytes") or 0) + (record.get("draft_weight_bytes") or 0)
