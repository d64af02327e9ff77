"""What all engines make of one checkpoint, side by side, as a table, a dictionary and one sentence.

Knows the list of engines; what each does is in the file of its name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mtplab.checkpoint.lenses.base import LOAD_ERROR, LOSSY, SILENT, UNKNOWN, Engine, View
from mtplab.checkpoint.lenses.judge import Look, judge
from mtplab.checkpoint.lenses.lmdeploy import LMDEPLOY
from mtplab.checkpoint.lenses.names import shaped
from mtplab.checkpoint.lenses.sglang import SGLANG
from mtplab.checkpoint.lenses.tensorrt_llm import TENSORRT_LLM
from mtplab.checkpoint.lenses.transformers import TRANSFORMERS
from mtplab.checkpoint.lenses.vllm import VLLM
from mtplab.checkpoint.text_table import aligned

__all__ = ["COLUMNS", "Looks", "lenses", "look"]

_ENGINES = (VLLM, SGLANG, LMDEPLOY, TENSORRT_LLM, TRANSFORMERS)
_WORDS = {
    LOAD_ERROR: "refused by",
    SILENT: "silently wrong in",
    LOSSY: "loses precision in",
    UNKNOWN: "not known for",
}

COLUMNS = ("engine", "version", "by its list", "FP8", "plain", "differ", "not judged", "not loaded", "MTP head")

# what "right" does not say
SCOPE = (
    "Judged by names and exclusion lists, for Qwen3.5 in vLLM also by scales' names: tensor layouts, block sizes and "
    "kernels are not looked at."
)


def lenses() -> tuple[Engine, ...]:
    """The engines whose reading of a quantisation config is described here, with versions and sources."""
    return _ENGINES


@dataclass(frozen=True)
class Looks:
    """Every engine's look at one checkpoint, and `sentence`, which compares them. `drafts`: the head's modules."""

    looks: tuple[Look, ...]
    sentence: str
    drafts: frozenset[str] = frozenset()

    def __getitem__(self, engine: str) -> Look:
        """The look of one engine, by its name."""
        return next(item for item in self.looks if item.engine == engine)

    def rows(self) -> list[tuple[str, ...]]:
        """A row of COLUMNS for each engine: how many linear modules it builds how, and what becomes of the MTP head."""
        rows = []
        for item in self.looks:
            counts = item.counts()
            differ = sum(len(found.modules) for found in item.disagreements)
            numbers = (counts.get("fp8", 0), counts.get("plain", 0), differ, item.unknown, counts.get("ignored", 0))
            rows.append((item.engine, item.version, item.worst, *map(str, numbers), self.head_in(item)))
        return rows

    def head_in(self, item: Look) -> str:
        """What becomes of the MTP head in an engine: "as stored", "otherwise", "not judged", "not loaded", or ""."""
        if not self.drafts:
            return ""
        built = {verdict.built for verdict in item.verdicts if verdict.module in self.drafts}
        if not built:
            return ""
        if any(not self.drafts.isdisjoint(found.modules) for found in item.disagreements):
            return "otherwise"
        if built <= {"ignored"}:
            return "not loaded"
        return "not judged" if "unknown" in built else "as stored"

    def caveats(self) -> list[str]:
        """What "right" does not say, a sentence each: its scope, heads not looked at, names taken as they are."""
        found = [SCOPE]
        heads = {"not loaded": "does not load the MTP head", "not judged": "is not judged on the MTP head"}
        for state, words in heads.items():
            found += [f"{item.engine} {words}." for item in self.looks if self.head_in(item) == state]
        by_note: dict[str, list[str]] = {}
        for item in self.looks:
            for note in item.notes:
                by_note.setdefault(note, []).append(item.engine)
        return found + [f"{_listed(engines)}: {note}." for note, engines in by_note.items()]

    def to_dict(self, verdicts: bool = False) -> dict[str, Any]:
        """For JSON; every module's verdict only with `verdicts`."""
        return {
            "sentence": self.sentence,
            "scope": SCOPE,
            "caveats": self.caveats(),
            "engines": [item.to_dict(verdicts) for item in self.looks],
        }

    def __str__(self) -> str:
        lines = aligned(COLUMNS, self.rows())
        return "\n".join([*lines, "", self.sentence, *self.caveats(), *(f"- {item.summary}" for item in self.looks)])


def look(views: Iterable[View], method: str, content: dict[str, Any], config: dict[str, Any]) -> Looks:
    """What each engine would build by its list, and where the file holds something else.

    `views` are the checkpoint's modules as stored; only linear ones are judged. `content` is its quantisation config
    with quant_method `method` (ModelOpt's hf_quant_config.json as it stands), `config` its config.json.
    """
    views = list(views)
    modules = shaped(views)
    made = tuple(judge(engine, modules, method, content, config) for engine in _ENGINES)
    return Looks(made, _sentence(made), frozenset(view.name for view in views if view.part == "draft"))


def _sentence(looks: tuple[Look, ...]) -> str:
    """`Loads right in A and B; refused by C: …; silently wrong in D: ….`"""
    right = [item.engine for item in looks if item.worst == "right" and not item.unknown]
    clauses = [f"loads right in {_listed(right)}"] if right else []
    for item in looks:
        if item.worst == "right" and item.unknown:
            rest = "1 module is not" if item.unknown == 1 else f"{item.unknown} modules are not"
            clauses.append(f"right as far as is known in {item.engine} ({rest})")
    for outcome, words in _WORDS.items():
        clauses += [f"{words} {item.engine}: {_reason(item)}" for item in looks if item.worst == outcome]
    text = "; ".join(clauses)
    return f"{text[:1].upper()}{text[1:]}."


def _reason(item: Look) -> str:
    """The gravest disagreement's cause, or why the engine was not judged."""
    worst = next((found for found in item.disagreements if found.outcome == item.worst), None)
    if worst is not None:
        return f"it {worst.cause}"
    return "it " + item.summary.rstrip(".").removeprefix(f"{item.engine} {item.version} ")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
