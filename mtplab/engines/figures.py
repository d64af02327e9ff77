"""A server's figures: its Prometheus text read, an engine's names translated, and the difference of two looks.

The text comes from a server that may be anything: it is bounded before it gets here, and what is no exposition is an
error. Knows engines only by the names in a `Figures`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from mtplab.engines.engine import Figures, Name
from mtplab.errors import MtplabError, printable

__all__ = ["FiguresFull", "FiguresReset", "Look", "Samples", "label_of", "look", "positions_of", "samples_of"]

#: name -> (labels, value) of each sample of that name
Samples = Mapping[str, list[tuple[dict[str, str], float]]]


_STARTED = "process_start_time_seconds"
# characters that are parsed: a server of 64 ranks shows a tenth of it
_MOST, _LONGEST = 4_000_000, 20_000


class FiguresReset(MtplabError):
    """A counter is less than it was: the server started anew in between."""


class FiguresFull(MtplabError):
    """A counter is more than the server writes all digits of: nothing can be counted on it until it starts anew."""


@dataclass(frozen=True)
class Look:
    """An engine's figures at one moment, cumulative since the server's start; None where it exports none. `busy`:
    requests under way or waiting. `started`: when the server's process began, in seconds since 1970."""

    rounds: int | None
    drafted: int | None
    accepted: int | None
    per_position: tuple[int, ...] | None
    requests: int | None
    prompt_tokens: int | None
    generation_tokens: int | None
    busy: int | None
    started: float | None

    def since(self, before: Look) -> Look:
        """What was counted between two looks; `busy` and `started` as they are now.

        Raises FiguresReset where a counter went down or the process is another.
        """
        if None not in (self.started, before.started) and not _same(self.started, before.started):
            raise FiguresReset("the server's process is another than before: it started anew in between")

        def less(name: str) -> int | None:
            now, then = getattr(self, name), getattr(before, name)
            if now is None:
                if then:
                    raise FiguresReset(f"the server's count of {name} is gone: it started anew in between")
                return None
            # a counter appears with its first event
            if now < (then or 0):
                raise FiguresReset(
                    f"the server's count of {name} fell from {then} to {now}: it started anew in between"
                )
            return now - (then or 0)

        # so does a position
        places, (now, then) = None, (each.per_position or () for each in (self, before))
        if any(a < b for a, b in itertools.zip_longest(now, then, fillvalue=0)):
            raise FiguresReset("the server's counts by position fell: it started anew in between")
        if self.per_position is not None:
            places = tuple(a - b for a, b in zip(now, (*then, *(0,) * len(now)), strict=False))
        names = ("rounds", "drafted", "accepted", "requests", "prompt_tokens", "generation_tokens")
        return Look(**{name: less(name) for name in names}, per_position=places, busy=self.busy, started=self.started)


def _same(now: float, then: float) -> bool:
    """Whether two times are of one process; some servers write them with few digits."""
    return abs(now - then) < 1.0


def samples_of(text: str, prefixes: tuple[str, ...] = ("",)) -> Samples:
    """The samples of a Prometheus text exposition whose names begin with these, and when its process began; what else a
    server shows, histograms above all, is much and not wanted. Raises MtplabError for what is none, or too much."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    wanted = (*prefixes, _STARTED)
    lines = [line for line in text.split("\n") if line.startswith(wanted) and "_bucket{" not in line[:200]]
    if sum(map(len, lines)) > _MOST or any(len(line) > _LONGEST for line in lines):
        raise MtplabError(f"its metrics are more than {_MOST} characters, or {_LONGEST} in a line; expected far less")
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as problem:
        raise MtplabError(f"its metrics are no Prometheus text ({printable(str(problem))[:80]})") from None
    return found


def look(figures: Figures, samples: Samples) -> Look:
    """An engine's figures among a server's samples. Raises FiguresFull for a count that is not written with all its
    digits, MtplabError for one that is none."""

    def total(name: Name | None) -> int | None:
        return _total(samples, name, figures.digits)

    places = None
    if figures.positions is not None:
        by_position = _by_label(samples, *figures.positions, figures.digits)
        places = tuple(by_position.get(j, 0) for j in range(max(by_position) + 1)) if by_position else None
    gauges = [total(name) for name in figures.busy]
    return Look(
        rounds=total(figures.rounds),
        drafted=total(figures.drafted),
        accepted=total(figures.accepted),
        per_position=places,
        requests=total(figures.requests),
        prompt_tokens=total(figures.prompt_tokens),
        generation_tokens=total(figures.generation_tokens),
        busy=None if None in gauges or not gauges else sum(gauges),
        started=_started(samples),
    )


def positions_of(samples: Samples, figures: Figures) -> int | None:
    """How many positions a server counts, which is its depth where it counts all from the start; None where none."""
    if figures.positions is None:
        return None
    found = _by_label(samples, *figures.positions, None)
    return max(found) + 1 if found else None


def label_of(samples: Samples, name: str, label: str) -> str | None:
    """A label's value where all samples of a name agree on it."""
    values = {labels.get(label) for labels, _ in samples.get(name, [])}
    return values.pop() if len(values) == 1 else None


def _total(samples: Samples, name: Name | None, digits: int | None) -> int | None:
    """The sum over ranks and reasons; None where there is no such sample."""
    if name is None:
        return None
    if isinstance(name, str):
        values = [value for _, value in samples.get(name, [])]
        return _whole(values, name, digits) if values else None
    name, label, wanted = name
    values = [value for labels, value in samples.get(name, []) if labels.get(label) == wanted]
    return _whole(values, name, digits) if values else None


def _by_label(samples: Samples, name: str, label: str, digits: int | None) -> dict[int, int]:
    groups: dict[int, list[float]] = {}
    for labels, value in samples.get(name, []):
        place = labels.get(label, "")
        if not (place.isascii() and place.isdigit()) or len(place) > 2:
            raise MtplabError(f"its {name} has {label} {printable(place)[:20]!r}; expected a number below 100")
        groups.setdefault(int(place), []).append(value)
    return {place: _whole(values, name, digits) for place, values in groups.items()}


def _whole(values: Iterable[float], name: str, digits: int | None) -> int:
    values = list(values)
    for value in values:
        if not 0 <= value < 2**53 or value != int(value):
            raise MtplabError(f"its {name} is {value}; expected a count")
        if digits is not None and value >= 10**digits:
            raise FiguresFull(
                f"its {name} is {value:g}, written with {digits} digits only: what is counted between two looks at it "
                "cannot be known"
            )
    return int(math.fsum(values))


def _started(samples: Samples) -> float | None:
    found = samples.get(_STARTED, [])
    return found[0][1] if len(found) == 1 and math.isfinite(found[0][1]) else None
