"""One engine's look at one checkpoint: what it builds, where the file holds something else, and what comes of it.

Runs an engine's description (`base.Engine`); knows no engine itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.checkpoint.lenses.base import (
    LOAD_ERROR,
    LOSSY,
    SILENT,
    UNKNOWN,
    Consequence,
    Disagreement,
    Engine,
    Family,
    Fixed,
    Method,
    Verdict,
    View,
    family_of,
)
from mtplab.checkpoint.lenses.matching import RULES, Rule, Targets, Unit
from mtplab.checkpoint.lenses.names import Asked, Shaped, units_of
from mtplab.checkpoint.lenses.scales import Fault, fault_of
from mtplab.checkpoint.names import normalised
from mtplab.checkpoint.strict_json import shown

__all__ = ["Look", "exclusion_list", "judge"]

JUDGED, REFUSED, NOT_KNOWN = "judged", "refused", "not known"
_DIFFER = ("fp8", "plain", "error")
_STOPPED = Consequence(LOAD_ERROR, "loading stops there")


@dataclass(frozen=True)
class Look:
    """What one engine makes of a checkpoint. `status`: judged, refused (it does not load it) or not known."""

    engine: str
    version: str
    method: str
    status: str
    summary: str
    verdicts: tuple[Verdict, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    notes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def worst(self) -> str:
        """The gravest outcome: "load error", "silent", "lossy", "not known", or "right"."""
        if self.status == REFUSED:
            return LOAD_ERROR
        outcomes = {item.outcome for item in self.disagreements}
        if self.status == NOT_KNOWN:
            outcomes.add(UNKNOWN)
        for outcome in (LOAD_ERROR, SILENT, LOSSY, UNKNOWN):
            if outcome in outcomes:
                return outcome
        return "right"

    @property
    def unknown(self) -> int:
        """How many linear modules were not judged."""
        return sum(verdict.built == "unknown" for verdict in self.verdicts)

    def counts(self) -> dict[str, int]:
        """Linear modules by how they are built."""
        return dict(Counter(verdict.built for verdict in self.verdicts))

    def to_dict(self, verdicts: bool = False) -> dict[str, Any]:
        """For JSON; every module's verdict only with `verdicts`."""
        made: dict[str, Any] = {
            "engine": self.engine,
            "version": self.version,
            "method": self.method,
            "status": self.status,
            "worst": self.worst,
            "summary": self.summary,
            "counts": self.counts(),
            "disagreements": [
                {
                    "modules": list(item.modules),
                    "built": item.built,
                    "stored": item.stored,
                    "outcome": item.outcome,
                    "cause": item.cause,
                    "sentence": item.sentence,
                }
                for item in self.disagreements
            ],
            "notes": list(self.notes),
            "sources": list(self.sources),
        }
        if verdicts:
            made["verdicts"] = [item._asdict() for item in self.verdicts]
        return made


def exclusion_list(method: Method, content: dict[str, Any]) -> tuple[list[str] | None, str]:
    """(entries, where they stand) as the engine takes them from the config; (None, "") where there is no list."""
    found: list[str] | None = None
    where: list[str] = []
    alone = method.alone and method.alone in content
    for key in method.keys:
        if alone and key.partition(".")[0] != method.alone:
            continue
        value: Any = content
        for step in key.split("."):
            value = value.get(step) if isinstance(value, dict) else None
        if not isinstance(value, list) or (not value and method.skip_empty):
            continue
        found = [*(found or []), *(item for item in value if isinstance(item, str))]
        where.append(key)
        if not method.combine:
            break
    return found, " and ".join(where)


def judge(
    engine: Engine, modules: Sequence[Shaped], name: str, content: dict[str, Any], config: dict[str, Any]
) -> Look:
    """The engine's look at these modules under a config whose quant_method is `name`."""
    variant = _variant(name, content)
    method = engine.methods.get(variant.split(" ")[0])
    if method is not None and variant == "modelopt mixed":
        why = "goes by quantized_layers in a file of mixed precision, which this lens does not read"
        return _whole(engine, name, NOT_KNOWN, why, (method.source,))
    if method is None:
        if engine.unread_built == "plain":
            plain = f"it does not read {name}: {engine.unread}"
            return _Judge(engine, _unread(engine), name, content, config, modules, plain).look()
        return _whole(engine, name, REFUSED, f"does not read {shown(name)}: {engine.unread}", ())
    why = method.unknown or (method.unsure(content) if method.unsure is not None else None)
    if why:
        return _whole(engine, name, NOT_KNOWN, why, (method.source,))
    reason = method.refuses(content) if method.refuses is not None else None
    if reason is not None:
        return _whole(engine, name, REFUSED, f"refuses the config: {reason}", (method.source,))
    return _Judge(engine, method, variant, content, config, modules).look()


def _unread(engine: Engine) -> Method:
    """Of an engine that goes on without quantisation: no list counts."""
    return Method(rule="full name", keys=(), reads="", source=engine.sources[0])


def _whole(engine: Engine, name: str, status: str, why: str, sources: tuple[str, ...]) -> Look:
    summary = f"{engine.name} {engine.version} {why}."
    return Look(engine.name, engine.version, name, status, summary, sources=sources or engine.sources)


class _Judge:
    def __init__(
        self,
        engine: Engine,
        method: Method,
        name: str,
        content: dict[str, Any],
        config: dict[str, Any],
        modules: Sequence[Shaped],
        all_plain: str = "",
    ) -> None:
        self._engine, self._method, self._name, self._content = engine, method, name, content
        self._all_plain = all_plain  # why everything is built plain, where it is
        kind, text_only = family_of(config)
        key = f"{kind} text" if text_only and f"{kind} text" in engine.families else kind
        self._family: Family = engine.families.get(key, engine.families[""])
        self._modules = modules
        listed, self._where = exclusion_list(method, content)
        self._listed = listed or []
        entries = list(method.default) if listed is None else list(listed)
        if method.prepare is not None:
            entries = method.prepare(entries, content)
        if self._family.entries is not None:
            entries = self._family.entries(entries, name)
        self._nothing = f"{self._where} does not cover it" if listed is not None else "there is no exclusion list"
        self._rule: Rule = RULES[method.rule]([*entries, *method.added], f"{engine.name}: {self._where or name}")
        self._targets: Targets | None = None
        if method.untargeted:
            self._targets = Targets(_targets(content), f"{engine.name}: config_groups", method.class_parts)
        self._scale = method.scale(content) if method.scale is not None and self._family.scales else ""
        self._answers: dict[Unit, tuple[str, str, str]] = {}
        self._others: dict[str, list[str]] | None = None

    def look(self) -> Look:
        verdicts: list[Verdict] = []
        groups: dict[Any, list[tuple[View, Verdict]]] = {}
        for group in self._modules:
            self._judge(group, verdicts, groups)
        disagreements = tuple(self._disagreement(found, key[-1]) for key, found in groups.items())
        notes = [self._family.note] if self._family.note else []
        notes += [f"the entry {shown(entry)} is no pattern: {said}" for entry, said in self._rule.broken.items()]
        return Look(
            self._engine.name,
            self._engine.version,
            self._name,
            JUDGED,
            self._summary(verdicts, disagreements),
            tuple(verdicts),
            disagreements,
            (*notes, *self._engine.warnings),
            (self._method.source, *self._engine.sources),
        )

    def _judge(self, group: Shaped, verdicts: list[Verdict], groups: dict[Any, list[tuple[View, Verdict]]]) -> None:
        """Verdicts on the modules of one shape; those that differ from the file also go to `groups`, by unit."""
        asked, fixed = self._plan(group.shape, group.part)
        answers: dict[tuple[str, ...], tuple[str, str, str]] = {}
        depth = asked.depth
        for view, numbers in group.members:
            key = numbers[:depth]
            found = answers.get(key)
            if found is None:
                found = answers[key] = self._answer(asked, fixed, numbers)
            built, by, runtime = found
            stored = "fp8" if view.stored_fp8 else "plain"
            if built == "as stored":
                built = stored
            verdict = Verdict(view.name, built, by, runtime)
            verdicts.append(verdict)
            fault = None
            if self._scale and built == stored:
                fault = fault_of(view, built, self._scale)
            if fault is not None or (built != stored and built in _DIFFER):
                scale = built != "error" and view.has_scale
                groups.setdefault((built, asked.unit, scale, fault), []).append((view, verdict))

    def _answer(self, asked: Asked, fixed: Fixed | None, numbers: tuple[str, ...]) -> tuple[str, str, str]:
        unit = asked.at(numbers)
        if fixed is not None:
            return fixed.built, fixed.why, unit.name
        if unit not in self._answers:
            self._answers[unit] = (*self._ask(unit), unit.name)
        return self._answers[unit]

    def _plan(self, shape: str, part: str) -> tuple[Asked, Fixed | None]:
        """How modules of a shape are asked for, and what is settled of them whatever the list says."""
        asked = units_of(shape, self._family.renames, self._family.fused)
        if self._all_plain:
            return asked, Fixed("", "plain", self._all_plain)
        if part == "head" and not self._method.head:
            return asked, Fixed("", "plain", "the output head is never built quantised under this method")
        for fixed in self._family.fixed:
            here = self._name in (fixed.methods or (self._name,)) and part in (fixed.parts or (part,))
            if here and re.search(fixed.names, shape):
                return asked, fixed
        return asked, None

    def _ask(self, unit: Unit) -> tuple[str, str]:
        answer = self._rule.answer(unit)
        if answer.excluded is None:
            return "error", answer.by
        if answer.excluded:
            return "plain", answer.by
        if self._rule.broken:
            return "unknown", "an entry of the list cannot be run"
        if self._targets is not None and self._targets.find(unit) is None:
            return self._method.untargeted, "no target of config_groups covers it"
        return "fp8", self._nothing

    def _disagreement(self, found: list[tuple[View, Verdict]], fault: Fault | None) -> Disagreement:
        view, verdict = found[0]
        which = shown(view.name) if len(found) == 1 else f"{len(found)} modules ({shown(view.name)} first)"
        if fault is not None:
            consequence, cause = fault.consequence, f"builds {which} {fault.because}"
        elif verdict.built == "error":
            consequence = _STOPPED
            cause = f"stops at {which}, because {verdict.by}"
        elif verdict.built == "fp8":
            consequence = self._consequence(verdict.built, view.has_scale)
            because = self._missed(view.name, verdict.runtime_name, verdict.by)
            cause = f"builds {which} in FP8, which the file holds unquantised, because {because}"
        else:
            consequence = self._consequence(verdict.built, view.has_scale)
            because = verdict.by if " " in verdict.by else f"the entry {shown(verdict.by)} covers it"
            bare = "" if view.has_scale else " without a scale"
            cause = f"builds {which} unquantised, which the file holds in FP8{bare}, because {because}"
        return Disagreement(
            self._engine.name,
            tuple(item.name for item, _ in found),
            verdict.built,
            "fp8" if view.stored_fp8 else "plain",
            consequence.outcome,
            cause,
            f"{self._engine.name} {cause}: {consequence.clause}.",
        )

    def _consequence(self, built: str, has_scale: bool) -> Consequence:
        if built == "fp8":
            own = self._method.fp8_for_plain
            return (own(self._content) if callable(own) else own) or self._engine.fp8_for_plain
        if not has_scale:
            return Consequence(SILENT, "there is no scale to miss, and the raw codes are taken for weights")
        return self._family.plain_for_fp8 or self._engine.plain_for_fp8

    def _missed(self, name: str, asked: str, by: str) -> str:
        """Why no entry covers a module, and which entry seems to mean it."""
        if by != self._nothing:
            return by
        meant = next((entry for entry in self._meaning(name)), None)
        if meant is None:
            return by
        called = "" if asked == name else f" and asks for {shown(asked)}"
        return f"it {self._method.reads}{called}, so the entry {shown(meant)} does not cover it"

    def _meaning(self, name: str) -> Iterable[str]:
        """Entries that a reader would take to mean the module: its name, its end or what lies above, roots alike."""
        if self._others is None:
            self._others = {}
            for entry in self._listed:
                bare = normalised(entry.removeprefix("re:").removeprefix("*").removesuffix("*").strip("."))
                self._others.setdefault(bare, []).append(entry)
        parts = normalised(name).split(".")
        pieces = [".".join(parts[i:]) for i in range(len(parts))]
        pieces += [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]
        return [entry for piece in pieces for entry in self._others.get(piece, ())]

    def _summary(self, verdicts: Sequence[Verdict], disagreements: Sequence[Disagreement]) -> str:
        name = f"{self._engine.name} {self._engine.version}"
        counts = Counter(verdict.built for verdict in verdicts)
        unknown, ignored = counts["unknown"], counts["ignored"]
        rest = f"; {ignored} it does not load" if ignored else ""
        rest += f"; {unknown} not known" if unknown else ""
        if not disagreements:
            judged = len(verdicts) - unknown - ignored
            return f"{name} builds {judged} of {len(verdicts)} linear modules, as the file holds them{rest}."
        gravest = min(disagreements, key=lambda item: _GRAVITY[item.outcome])
        count = sum(len(item.modules) for item in disagreements)
        differ = "1 module differs" if count == 1 else f"{count} modules differ"
        return f"{name}: {_OUTCOMES[gravest.outcome]}, {differ}{rest}. {gravest.sentence}"


_GRAVITY = {LOAD_ERROR: 0, SILENT: 1, LOSSY: 2, UNKNOWN: 3}
_OUTCOMES = {
    LOAD_ERROR: "does not load",
    SILENT: "loads and is silently wrong",
    LOSSY: "loads with a loss of precision",
    UNKNOWN: "builds other than stored, with what result is not known",
}


def _targets(content: dict[str, Any]) -> list[str]:
    """The targets of all config groups."""
    groups = content.get("config_groups")
    found: list[str] = []
    for group in groups.values() if isinstance(groups, dict) else ():
        targets = group.get("targets") if isinstance(group, dict) else None
        found += [item for item in targets if isinstance(item, str)] if isinstance(targets, list) else []
    return found


def _variant(name: str, content: dict[str, Any]) -> str:
    """ModelOpt's FP4 and mixed files go their own ways under one quant_method."""
    inner = content.get("quantization")
    algorithm = str((inner if isinstance(inner, dict) else content).get("quant_algo", "")).upper()
    if not name.startswith("modelopt"):
        return name
    return "modelopt mixed" if "MIXED" in algorithm else "modelopt fp4" if "FP4" in algorithm else "modelopt"
