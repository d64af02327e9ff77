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

COLUMNS = ("engine", "version", "outcome", "built FP8", "built plain", "other", "otherwise than stored")

# what "right" does not say
SCOPE = "Judged by names and exclusion lists alone: tensor layouts, block sizes and kernels are not looked at."


def lenses() -> tuple[Engine, ...]:
    """The engines whose reading of a quantisation config is described here, with versions and sources."""
    return _ENGINES


@dataclass(frozen=True)
class Looks:
    """Every engine's look at one checkpoint, and `sentence`, which compares them."""

    looks: tuple[Look, ...]
    sentence: str

    def __getitem__(self, engine: str) -> Look:
        """The look of one engine, by its name."""
        return next(item for item in self.looks if item.engine == engine)

    def rows(self) -> list[tuple[str, ...]]:
        """A row of COLUMNS for each engine: how many linear modules it builds how, and otherwise than stored."""
        rows = []
        for item in self.looks:
            counts = item.counts()
            other = sum(count for built, count in counts.items() if built not in ("fp8", "plain"))
            differ = sum(len(found.modules) for found in item.disagreements)
            numbers = (counts.get("fp8", 0), counts.get("plain", 0), other, differ)
            rows.append((item.engine, item.version, item.worst, *map(str, numbers)))
        return rows

    def to_dict(self, verdicts: bool = False) -> dict[str, Any]:
        """For JSON; every module's verdict only with `verdicts`."""
        return {"sentence": self.sentence, "scope": SCOPE, "engines": [item.to_dict(verdicts) for item in self.looks]}

    def __str__(self) -> str:
        lines = aligned(COLUMNS, self.rows())
        return "\n".join([*lines, "", self.sentence, SCOPE, *(f"- {item.summary}" for item in self.looks)])


def look(views: Iterable[View], method: str, content: dict[str, Any], config: dict[str, Any]) -> Looks:
    """What each engine would build by its list, and where the file holds something else.

    `views` are the checkpoint's modules as stored; only linear ones are judged. `content` is its quantisation config
    with quant_method `method` (ModelOpt's hf_quant_config.json as it stands), `config` its config.json.
    """
    modules = shaped(views)
    made = tuple(judge(engine, modules, method, content, config) for engine in _ENGINES)
    return Looks(made, _sentence(made))


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
