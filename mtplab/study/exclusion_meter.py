"""What a set of exclusions costs: the target's KL and the draft's acceptance length, against the model in BF16.

One model is loaded; a set's model shares with it whatever both treat alike. Everything measured is kept, so that a
search that was stopped goes on where it was. Knows nothing of which sets are worth a look.
"""

from __future__ import annotations

import copy
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mtplab.config import MAX_DEPTH
from mtplab.errors import ConfigError
from mtplab.models.cache_fit import check_cache
from mtplab.study.interval import jackknife, without_one
from mtplab.study.module_groups import ModuleGroup, module_groups, never_fp8
from mtplab.study.point import digest_of
from mtplab.study.prompts import calibration_ids

__all__ = ["Change", "ExclusionMeter", "Measured", "kl_change", "length_change", "relative_loss"]

SCHEMA = 2  # 1 let a quantised cache write the texts of KL


class Change(NamedTuple):
    """A difference and half its 95 % interval over prompts or texts (None where it cannot be told)."""

    value: float
    error: float | None

    @classmethod
    def of(cls, sums: Sequence[float] | np.ndarray, sizes: Sequence[float]) -> Change:
        """The ratio of two sums over prompts or texts, each given by its parts."""
        return cls(float(sum(sums) / sum(sizes)), jackknife(without_one(sums, sizes)))

    @property
    def upper(self) -> float:
        """Where its interval ends above; the value itself where there is none."""
        return self.value + (self.error or 0.0)

    @property
    def within_chance(self) -> bool:
        """Whether zero lies in the interval; without one nothing is shown. No change at all has an error of 0."""
        return self.error is None or abs(self.value) <= self.error

    def __str__(self) -> str:
        if self.value == 0 and not self.error:
            return "0"
        return f"{self.value:+.3g}" + (f" ± {self.error:.2g}" if self.error is not None else "")


@dataclass(frozen=True)
class Measured:
    """One set of exclusions, measured.

    `excluded` are modules kept in BF16, by their names on disk. `nbytes` are all weights' as planned. By text: `kl`
    (summed over its tokens, nats), `agreed` (positions whose likeliest token is the BF16 model's) and `judged`
    tokens. By prompt, at the meter's depth: `tokens` that rounds emitted, and `rounds`.
    """

    excluded: tuple[str, ...]
    nbytes: int
    kl: tuple[float, ...]
    agreed: tuple[int, ...]
    judged: tuple[int, ...]
    tokens: tuple[float, ...]
    rounds: tuple[float, ...]
    seconds: float

    @property
    def mean_kl(self) -> Change:
        """KL(BF16 ‖ this target), nats per token, and its ±."""
        return Change.of(self.kl, self.judged)

    @property
    def top1_agreement(self) -> float:
        """Share of positions with the BF16 model's likeliest token."""
        return sum(self.agreed) / sum(self.judged)

    @property
    def length(self) -> Change:
        """Acceptance length, tokens per round, and its ±."""
        return Change.of(self.tokens, self.rounds)


def kl_change(one: Measured, other: Measured) -> Change:
    """KL of `one` less that of `other`, compared text by text."""
    errors = jackknife(without_one(one.kl, one.judged) - without_one(other.kl, other.judged))
    return Change(one.mean_kl.value - other.mean_kl.value, errors)


def length_change(one: Measured, other: Measured) -> Change:
    """Acceptance length of `one` less that of `other`, compared prompt by prompt."""
    errors = jackknife(without_one(one.tokens, one.rounds) - without_one(other.tokens, other.rounds))
    return Change(one.length.value - other.length.value, errors)


def relative_loss(one: Measured, reference: Measured) -> Change:
    """The share of the reference's acceptance length that `one` loses, compared prompt by prompt."""
    ratios = without_one(one.tokens, one.rounds) / without_one(reference.tokens, reference.rounds)
    return Change(1.0 - one.length.value / reference.length.value, jackknife(ratios))


class ExclusionMeter:
    """Measures sets of exclusions of one BF16 checkpoint on one set of prompts.

    Args:
        checkpoint: its folder.
        groups, keep: see `module_groups`.
        prompts: strings or lists of ids; the bundled ones, two of each domain, if None.
        depth: draft tokens per round, 1 to 16, at which acceptance is taken (greedy decoding).
        max_new_tokens: per prompt, for acceptance and for the texts that KL is taken over, which the BF16 model
            writes at temperature 1 from the same prompts.
        seed: of those texts.
        quant_policy: of the KV cache, in every measurement but the reference of KL and its texts.
        exact: arithmetic in which no row depends on another; acceptance is then `generate`'s own.
        results: a folder where every measurement is kept and read back from; None keeps them in memory only.
        cancel: an event; once set, what is being measured raises Cancelled.

    Raises ConfigError and CheckpointError as `load_model` and `trace` do, and for a checkpoint without a draft head.
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        groups: str | Sequence[str] = "fused",
        keep: Sequence[str] = (),
        prompts: Any = None,
        depth: int = 3,
        max_new_tokens: int = 32,
        seed: int = 0,
        quant_policy: str | int = "none",
        device: str = "cpu",
        exact: bool = True,
        results: str | os.PathLike[str] | None = None,
        cancel: threading.Event | None = None,
    ) -> None:
        from mtplab.checkpoint import open_checkpoint
        from mtplab.models import load_model
        from mtplab.study.prompts import load_prompts

        opened = open_checkpoint(checkpoint)
        self.groups = module_groups(opened, groups, keep)
        if type(depth) is not int or not 1 <= depth <= MAX_DEPTH:
            raise ConfigError(f"depth is {depth!r:.60}; expected a whole number from 1 to {MAX_DEPTH}")
        if type(max_new_tokens) is not int or max_new_tokens < 2:
            raise ConfigError(
                f"max_new_tokens is {max_new_tokens!r:.60}; expected a whole number of at least 2: the first token "
                "belongs to no round"
            )
        found = load_prompts(prompts) if prompts is not None else load_prompts().narrowed(limit=2)
        self.model = load_model(checkpoint, device=device, quant_policy=quant_policy, exact=exact)
        if self.model.draft is None:
            raise ConfigError(f"{checkpoint}: there is no MTP head whose acceptance could be measured")
        for part in ("target", "draft"):
            check_cache(self.model.checkpoint, self.model.config, self.model.policy(part), part)
        self.prompts = [list(ids) for ids in found.encoded(self.model.encode)]
        # a calibrated cache takes its scales from the bundled prompts
        self.calibration = calibration_ids([self.model.engine.quant_policy], self.model.encode)
        self.depth, self.max_new_tokens, self.seed = depth, max_new_tokens, seed
        self.cancel = cancel
        self.measured: dict[frozenset[str], Measured] = {}
        self.computed = 0
        plan = self.model.checkpoint.plan(exclude="none", model_format="fp8")
        self.modules = {m.name: m.part for m in plan.modules if m.weight == "fp8"}
        grouped = {name for group in self.groups for name in group.modules}
        self.fixed = frozenset(keep) | {name for name in self.modules.keys() - grouped if never_fp8(name)}
        self._last = self.model
        self._outputs: dict[frozenset[str], Any] = {}
        self._results = None if results is None else Path(results)
        self._file = self._kept_in()

    def over(self, prompts: Any, seed: int | None = None) -> ExclusionMeter:
        """A meter of the same model, groups and settings over other prompts, and texts of another seed: to look again
        at what one set of prompts made look good."""
        from mtplab.study.prompts import load_prompts

        other = copy.copy(self)
        for name in ("all_fp8", "bf16", "published", "texts", "_reference"):
            other.__dict__.pop(name, None)
        other.prompts = [list(ids) for ids in load_prompts(prompts).encoded(self.model.encode)]
        other.seed = self.seed if seed is None else seed
        other.measured, other.computed, other._outputs = {}, 0, {}
        other._file = other._kept_in()
        return other

    @cached_property
    def all_fp8(self) -> Measured:
        """Nothing excluded but what is kept in every set."""
        return self.measure(())

    @cached_property
    def bf16(self) -> Measured:
        """Everything excluded, the checkpoint as it is: what the others are compared with. Its KL is 0."""
        return self._of(set(self.modules))

    @cached_property
    def published(self) -> Measured:
        """What FP8 releases keep in BF16 (`exclusions.PUBLISHED`)."""
        plan = self.model.checkpoint.plan(exclude="published", model_format="fp8").by_name
        return self._of({name for name in self.modules if plan[name].weight != "fp8"})

    def measure(self, kept: Iterable[ModuleGroup | str]) -> Measured:
        """The set that keeps these groups, or modules by name, in BF16, and quantises all others. Raises Cancelled."""
        names = {name for each in kept for name in ((each,) if isinstance(each, str) else each.modules)}
        return self._of(names | self.fixed)

    def alone(self, group: ModuleGroup) -> Measured:
        """The set that quantises this group, and nothing else. Raises Cancelled."""
        return self._of(set(self.modules) - set(group.modules))

    def _of(self, excluded: set[str]) -> Measured:
        unknown = excluded - self.modules.keys()
        if unknown:
            raise ConfigError(f"{min(unknown)!r} is no linear module of the checkpoint; expected names as on disk")
        key = frozenset(excluded)
        return self.measured.get(key) or self._measure(key)

    def _measure(self, excluded: frozenset[str]) -> Measured:
        from mtplab.decode import Cancelled
        from mtplab.decode.threads import model_threads, running_with

        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled("cancelled between two measurements")
        began = time.perf_counter()
        with running_with(model_threads(self.model)):
            # from the last one: most sets differ from it in a module or two
            self._last = model = self._last.with_exclusions(sorted(excluded) or "none", model_format="fp8")
            kl, agreed = self._quality(model, excluded)
            tokens, rounds = self._acceptance(model, excluded)
        seconds = round(time.perf_counter() - began, 4)
        nbytes = model.plan.loaded_nbytes()
        found = Measured(tuple(sorted(excluded)), nbytes, kl, agreed, self._judged, tokens, rounds, seconds)
        self.computed += 1
        self._keep(excluded, found)
        return found

    @cached_property
    def texts(self) -> list[list[int]]:
        from mtplab.study.quality import own_texts

        return own_texts(self.model, self.prompts, self.max_new_tokens, self.seed)

    @cached_property
    def _reference(self) -> Any:
        from mtplab.study.quality import read_if_kept

        return read_if_kept(self.model, self.texts, self.model.engine.exact)

    @property
    def _judged(self) -> tuple[int, ...]:
        return tuple(len(text) - len(prompt) for text, prompt in zip(self.texts, self.prompts, strict=True))

    def _quality(self, model: Any, excluded: frozenset[str]) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """(KL, agreements) by text. A set that differs from one measured before in the draft only has the same."""
        from mtplab.study.quality import quality

        mine = self._of_target(excluded)
        for key, other in self.measured.items():
            if self._of_target(key) == mine:
                return other.kl, other.agreed
        skip = [len(prompt) - 1 for prompt in self.prompts]
        exact, texts = self.model.engine.exact, self.calibration
        found = quality(model, self.texts, self._reference, skip=skip, exact=exact, calibration=texts)
        count = len(self.prompts)
        agreed = np.bincount(found.text, found.agrees, count)
        return tuple(np.bincount(found.text, found.kl, count).tolist()), tuple(int(n) for n in agreed)

    def _of_target(self, excluded: frozenset[str]) -> frozenset[str]:
        return frozenset(name for name in excluded if self.modules[name] != "draft")

    def _acceptance(self, model: Any, excluded: frozenset[str]) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(tokens, rounds) by prompt. Drafts of one target share its output."""
        from mtplab.decode.settings import resolve_run
        from mtplab.study.trace import decoded, traced

        asked = resolve_run(
            model,
            self.prompts,
            self.depth,
            max_new_tokens=self.max_new_tokens,
            ignore_eos=True,
            cancel=self.cancel,
            calibration=self.calibration,
        )
        mine = self._of_target(excluded)
        if mine not in self._outputs:
            # drafts are compared under a target that is all BF16 or all FP8, or the one looked at last
            ends = (frozenset(), self._of_target(frozenset(self.modules)))
            self._outputs = {key: value for key, value in self._outputs.items() if key in ends}
            self._outputs[mine] = decoded(model, asked, cancel=self.cancel)[0]
        found = traced(model, asked, ("",) * len(self.prompts), self._outputs[mine], cancel=self.cancel)
        counts = found.acceptance().counts(self.depth)
        return tuple(counts.emitted.tolist()), tuple(counts.rounds.tolist())

    # what is kept: a line of JSON per set, appended whole; a line that a killed process left half is not read

    def _kept_in(self) -> Path | None:
        if self._results is None:
            return None
        from mtplab.study.identity import checkpoint_identity
        from mtplab.study.store import results_folder

        facts = {
            "schema": SCHEMA,
            "checkpoint": checkpoint_identity(self.model.checkpoint),
            "prompts": self.prompts,
            "depth": self.depth,
            "max_new_tokens": self.max_new_tokens,
            "seed": self.seed,
            "quant_policy": self.model.policy("target").name,
            "device": self.model.device.type,
            "exact": self.model.engine.exact and self.model.can_be_exact,
            "calibration": self.calibration,
        }
        self.settings_hash = digest_of(facts)
        folder = results_folder(self._results)
        file = folder / f"exclusions-{self.settings_hash[:16]}.jsonl"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = file.read_bytes().split(b"\n") if file.exists() else []
        except OSError as problem:
            raise ConfigError(f"{file}: cannot be read ({problem.strerror}); give another folder") from None
        for line in lines:
            found = _parsed(line, self.settings_hash, len(self.prompts))
            if found is not None:
                self.measured[found[0]] = found[1]
        return file

    def _keep(self, key: frozenset[str], found: Measured) -> None:
        self.measured[key] = found
        if self._file is None:
            return
        record = {"settings": self.settings_hash, "set": digest_of(sorted(key))} | asdict(found)
        # the newline in front ends what a killed process may have left; one write, so that two processes do not mix
        line = b"\n" + json.dumps(record, allow_nan=False).encode("ascii") + b"\n"
        try:
            with self._file.open("ab", buffering=0) as file:
                file.write(line)
                os.fsync(file.fileno())
        except OSError as problem:
            raise ConfigError(f"{self._file}: cannot be written ({problem.strerror}); give another folder") from None


def _parsed(line: bytes, settings: str, prompts: int) -> tuple[frozenset[str], Measured] | None:
    try:
        record = json.loads(line)
        if record.pop("settings") != settings:
            return None
        digest = record.pop("set")
        found = Measured(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})
        key = frozenset(found.excluded)
        whole = {len(part) for part in (found.kl, found.agreed, found.judged, found.tokens, found.rounds)} == {prompts}
        return (key, found) if whole and digest_of(sorted(key)) == digest else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
