"""Views of traced acceptance as lines of numbers: by depth, position, context, domain, under a gate or a schedule.

A view is what a figure, a panel or a frame shows of an `AcceptanceSet`. This room does not know figures
(`mtplab/drawing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mtplab.drawing import drawn
from mtplab.study.bootstrap import ratio_interval
from mtplab.study.frame import frame

if TYPE_CHECKING:
    from mtplab.study.acceptance import Acceptance

__all__ = ["FEW_ROUNDS", "VIEWS", "Choice", "Line", "View", "lines_of"]

#: name → what it shows
VIEWS = {
    "depth": "acceptance length by draft depth",
    "position": "drafts 1…j all accepted, by position",
    "conditional": "draft j accepted given 1…j−1, by position",
    "context": "acceptance length by position in the context",
    "gate": "a gate: stop drafting below a confidence",
    "schedule": "a schedule: another depth from a position on",
}
FEW_ROUNDS = 50  # below that a share says little: at 50 % it is ± 14 points even if rounds were independent
GATES = tuple(step / 10 for step in range(11))
SWITCHES = 9  # positions at which a schedule's line is worked out
BIN = 16  # positions of the context that share a point


@dataclass(frozen=True)
class Line:
    """Points of one temperature and domain (None: all prompts): x, y and the 95 % interval of y, None where unknown.

    `few` marks points over so few rounds that they say little. `least` is the lowest that x may be, where x is an
    upper bound. `kind` is "measured", or "fixed" for the fixed depths that a gate or a schedule is held against;
    `chosen` is the index of the point that the slider stands on.
    """

    temperature: float
    domain: str | None
    x: tuple[float, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]
    few: tuple[bool, ...]
    kind: str = "measured"
    least: tuple[float, ...] | None = None
    chosen: int | None = None
    setting: tuple[float, ...] | None = None  # the gate or the switch of each point
    approximate: bool = False  # of an output that was given (`Trace.approximate`)


@dataclass(frozen=True)
class View:
    """Lines with what stands around them. `share`: y is a share, 0 to 1. `note` says what to know of the numbers."""

    name: str
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    note: str = ""
    share: bool = False

    def to_records(self) -> list[dict[str, Any]]:
        """One dictionary a point: view, kind, temperature, domain, approximate, setting (a gate's or schedule's), x,
        value, low, high, few."""
        found = []
        for line in self.lines:
            settings = line.setting or (None,) * len(line.x)
            for setting, *point in zip(settings, line.x, line.y, line.low, line.high, line.few, strict=True):
                names = ("x", "value", "low", "high", "few")
                about = {"view": self.name, "kind": line.kind, "temperature": line.temperature, "domain": line.domain}
                about |= {"approximate": line.approximate, "setting": setting}
                found.append(about | dict(zip(names, point, strict=True)))
        return found

    def to_frame(self) -> Any:
        """The same as a pandas frame. Raises ConfigError where pandas is not installed."""
        return frame(self.to_records(), "to_records() does")

    def plot(self) -> Any:
        """The view as a picture. Raises ConfigError before `mtplab.report` is imported, which draws it."""
        return drawn(self)


@dataclass(frozen=True)
class Choice:
    """What a view is asked for: depths from `low` to `high`, a gate's confidence, a schedule's switch position."""

    low: int
    high: int
    confidence: float
    switch: int


def lines_of(name: str, found: Acceptance, choice: Choice, domain: str | None) -> list[Line]:
    """The lines of one temperature and domain."""
    return _LINES[name](found, choice, domain)


def _line(found: Acceptance, domain: str | None, x: Sequence[float], sums: Sequence[Any], **more: Any) -> Line:
    """A line from (numerators [p], denominators [p]) for each x."""
    y, low, high, few = [], [], [], []
    for top, bottom in sums:
        total = float(np.sum(bottom))
        span = ratio_interval(top, bottom) or (None, None)
        y.append(float(np.sum(top)) / total if total else None)
        low.append(span[0])
        high.append(span[1])
        few.append(total < FEW_ROUNDS)
    more["approximate"] = found.approximate
    return Line(found.temperature, domain, tuple(x), tuple(y), tuple(low), tuple(high), tuple(few), **more)


def _by_depth(found: Acceptance, choice: Choice, domain: str | None, **more: Any) -> list[Line]:
    depths = range(choice.low, choice.high + 1)
    counts = [found.counts(depth) for depth in depths]
    return [_line(found, domain, tuple(depths), [(each.emitted, each.rounds) for each in counts], **more)]


def _by_position(found: Acceptance, choice: Choice, domain: str | None) -> list[Line]:
    counts = found.counts(choice.high)
    columns = counts.accepted_per_position[:, : choice.high].T
    positions = tuple(range(1, choice.high + 1))
    return [_line(found, domain, positions, [(column, counts.rounds) for column in columns])]


def _conditional(found: Acceptance, choice: Choice, domain: str | None) -> list[Line]:
    counts = found.counts(choice.high)
    columns = [counts.rounds, *counts.accepted_per_position[:, : choice.high].T]
    positions = tuple(range(1, choice.high + 1))
    return [_line(found, domain, positions, list(zip(columns[1:], columns, strict=False)))]


def _by_context(found: Acceptance, choice: Choice, domain: str | None) -> list[Line]:
    edges = range(0, int(found.starts.max(initial=0)) + BIN + 1, BIN)
    parts = [part for part in found.context_counts(choice.high, list(edges)) if part[3].sum() > 0]
    middles = tuple((low + high - 1) / 2 for low, high, *_ in parts)
    return [_line(found, domain, middles, [(tokens, rounds) for *_, tokens, rounds in parts])]


def _gate(found: Acceptance, choice: Choice, domain: str | None) -> list[Line]:
    gates = sorted({*GATES, choice.confidence})
    counts = [found.gate_counts(gate, choice.high) for gate in gates]
    rounds = [float(each.rounds.sum()) or 1.0 for each in counts]
    most = tuple(float(each.drafted.sum()) / n for each, n in zip(counts, rounds, strict=True))
    least = tuple(
        float(found.least_drafted(gate, choice.high).sum()) / n for gate, n in zip(gates, rounds, strict=True)
    )
    more = {"least": least, "chosen": gates.index(choice.confidence), "setting": tuple(gates)}
    gated = _line(found, domain, most, [(each.emitted, each.rounds) for each in counts], **more)
    return [gated, *_by_depth(found, Choice(0, choice.high, 0.0, 0), domain, kind="fixed")]


def _schedule(found: Acceptance, choice: Choice, domain: str | None) -> list[Line]:
    last = int(found.starts.max(initial=0)) + 1
    switches = sorted({*np.linspace(0, last, SWITCHES).round().astype(int).tolist(), min(choice.switch, last)})
    counts = [
        found.schedule_counts(lambda at, switch=switch: np.where(at < switch, choice.low, choice.high))
        for switch in switches
    ]
    drafted = tuple(float(each.drafted.sum()) / (float(each.rounds.sum()) or 1.0) for each in counts)
    more = {"chosen": switches.index(min(choice.switch, last)), "setting": tuple(switches)}
    planned = _line(found, domain, drafted, [(each.emitted, each.rounds) for each in counts], **more)
    return [planned, *_by_depth(found, Choice(choice.low, choice.high, 0.0, 0), domain, kind="fixed")]


_LINES: dict[str, Callable[[Acceptance, Choice, str | None], list[Line]]] = {
    "depth": _by_depth,
    "position": _by_position,
    "conditional": _conditional,
    "context": _by_context,
    "gate": _gate,
    "schedule": _schedule,
}
