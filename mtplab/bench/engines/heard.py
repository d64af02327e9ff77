"""What a sweep asked of one server at one depth and what it was answered: kept whole, written small, read back.

Enough of it to serve the same sweep again without the engine. Knows engines by their descriptions alone, and nothing
of models.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtplab.engines.client import Exchange
from mtplab.engines.engine import Answer, Engine
from mtplab.engines.figures import Look, look, samples_of
from mtplab.errors import MtplabError

__all__ = ["Ear", "Heard"]

# of an answer, what nobody reads and is long
_LEFT_OUT = ("generation_settings", "prompt")


@dataclass
class Heard:
    """`about`: answers by path, as (status, text). `completions`: (body, answer) in the order they came. `looks`: the
    last text of its metrics after that many completions."""

    depth: int
    about: dict[str, tuple[int, str]] = field(default_factory=dict)
    completions: list[tuple[Mapping[str, Any], Any]] = field(default_factory=list)
    looks: dict[int, str] = field(default_factory=dict)

    def answers(self, engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Each prompt's, by the engine's description. Raises MtplabError where one was not answered just once."""
        found = {tuple(body["prompt"]): given for body, given in self.completions}
        if len(found) != len(self.completions) or found.keys() != {tuple(ids) for ids in prompts}:
            raise MtplabError(
                f"{engine.title}, depth {self.depth}: {len(self.completions)} completions of {len(found)} prompts were "
                f"heard; expected one of each of {len(prompts)}"
            )
        return [engine.answer(found[tuple(ids)], self.depth) for ids in prompts]

    def counted(self, engine: Engine) -> Look:
        """What the server counted from first to last."""
        first, last = (look(engine.figures, samples_of(self.looks[n])) for n in (0, max(self.looks)))
        return last.since(first)

    def to_json(self, engine: Engine, unsaid: Mapping[str, str]) -> dict[str, Any]:
        """To be kept: metrics without the families that nobody reads, and each key of `unsaid` (a path of a machine)
        written as its value."""
        kept = [
            (body, {k: v for k, v in given.items() if k not in _LEFT_OUT}) for body, given in self.completions
        ]
        looks = {str(n): _told(engine, text) for n, text in self.looks.items()}
        text = json.dumps({"depth": self.depth, "about": self.about, "completions": kept, "looks": looks})
        for path, word in unsaid.items():
            text = text.replace(path, word)
        return json.loads(text)

    @classmethod
    def from_json(cls, kept: Mapping[str, Any]) -> Heard:
        """What `to_json` made."""
        return cls(
            kept["depth"],
            {path: tuple(each) for path, each in kept["about"].items()},
            [tuple(each) for each in kept["completions"]],
            {int(n): text for n, text in kept["looks"].items()},
        )


class Ear:
    """Sorts what is overheard: one depth after the other, each ended by `turn`. Called in one thread at a time."""

    def __init__(self, engine: Engine, depths: Sequence[int]):
        self.engine, self._left = engine, list(depths)
        self.heard: list[Heard] = []
        self.address: str | None = None
        self.asking = True  # else what is heard is somebody's who gets to know the server
        self._open()

    def _open(self) -> None:
        if self._left:
            self.heard.append(Heard(self._left.pop(0)))

    def __call__(self, exchange: Exchange) -> None:
        now = self.heard[-1]
        self.address = exchange.address
        if exchange.body is not None:
            if exchange.status == 200:
                now.completions.append((exchange.body, json.loads(exchange.text)))
        elif exchange.path != self.engine.metrics_path:
            now.about[exchange.path] = exchange.status, exchange.text
        elif self.asking and exchange.status == 200:
            now.looks[len(now.completions)] = exchange.text

    def turn(self) -> None:
        """The next depth begins."""
        self._open()


def _told(engine: Engine, text: str) -> str:
    """The lines of the families that the engine's description reads, with those that say of which type they are."""
    figures = dataclasses.asdict(engine.figures).values()
    named = [name for each in figures for name in (each if isinstance(each, list | tuple) else [each])]
    names = [each for each in named if isinstance(each, str) and each.startswith(engine.prefixes)]
    stems = {name.removesuffix("_total") for name in [*names, "process_start_time_seconds"]}
    kept = []
    for line in text.splitlines():
        name = line.removeprefix("# TYPE ").partition(" ")[0].partition("{")[0]
        if name.removesuffix("_total") in stems or name.endswith("_info"):
            kept.append(line)
    return "\n".join(kept) + "\n"
