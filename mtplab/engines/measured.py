"""What one measurement on a serving engine gave: counts around its requests, texts, time, and what must be said of it.

Knows no engine and no server: plain numbers, picklable, None where the engine exports nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Counts", "Measured", "Share"]


@dataclass(frozen=True)
class Counts:
    """Of the requests between two looks at an engine's counters, or of one request that it counted itself.

    `tokens`: emitted by rounds, the first of every prompt not among them. `rounds`: verifications, at depth 0 one a
    token. `drafted` and `accepted`: draft tokens as the engine counts them, no bonus among them. `per_position`:
    rounds in which drafts 1…j were all accepted.
    """

    tokens: int
    rounds: int | None
    drafted: int | None
    accepted: int | None
    per_position: tuple[int, ...] | None

    def __add__(self, other: Counts) -> Counts:
        def both(a: int | None, b: int | None) -> int | None:
            return None if a is None or b is None else a + b

        places = None
        if self.per_position is not None and other.per_position is not None:
            places = tuple(a + b for a, b in zip(self.per_position, other.per_position, strict=True))
        return Counts(
            self.tokens + other.tokens,
            both(self.rounds, other.rounds),
            both(self.drafted, other.drafted),
            both(self.accepted, other.accepted),
            places,
        )


@dataclass(frozen=True)
class Share:
    """The part of a measurement that was counted by itself: prompts by their place in the point."""

    prompts: tuple[int, ...]
    counts: Counts


@dataclass(frozen=True)
class Measured:
    """A point at one depth. `shares` cover every prompt once. `outputs` [p][n]: ids of each prompt's text; None where
    the engine gives none. `seconds`: of all requests, prefill and waiting included. `remarks`: what a reader must
    know, such as other traffic. `facts`: of the server, JSON-ready, no address among them."""

    engine: str
    version: str | None
    shares: tuple[Share, ...]
    outputs: tuple[tuple[int, ...], ...] | None
    seconds: float
    remarks: tuple[str, ...] = ()
    facts: dict[str, object] = field(default_factory=dict)
