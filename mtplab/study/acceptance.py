"""Counts of speculative rounds, and the numbers that rows and the command line derive from them.

A run's own `AcceptanceStats` gives the same numbers for use in Python, with nan where no round can tell; rows are
JSON, which has none, and say null or 0.

This module does not know where the counts come from (a run, a trace, a file) and does no input or output.
The definitions are those of the serving engines: the bonus token counts towards the acceptance length, the
prompt's first token belongs to no round, tokens cut off by EOS or the budget are not accepted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Counts"]


@dataclass(frozen=True)
class Counts:
    """What happened over `rounds` verifications at one depth.

    `per_position[j-1]` counts the rounds in which drafts 1…j were all accepted (length = depth). Counts are
    integers for a run; a trace at a temperature above 0 gives expectations, hence floats.
    """

    rounds: float
    tokens: float
    drafted: float
    accepted: float
    per_position: tuple[float, ...] = ()

    @classmethod
    def of(cls, stats: Any) -> Counts:
        """From a runner's `AcceptanceStats` (its counters carry vLLM's names)."""
        counters = stats.counters()
        return cls(
            rounds=stats.rounds,
            tokens=stats.emitted,
            drafted=stats.drafted,
            accepted=stats.accepted,
            per_position=tuple(counters["num_accepted_tokens_per_pos"]),
        )

    @classmethod
    def total(cls, parts: Iterable[Counts]) -> Counts:
        """The sum of counts taken at one depth; all must have the same number of positions."""
        parts = list(parts)
        depths = {len(part.per_position) for part in parts}
        assert len(depths) == 1, f"counts of different depths cannot be added: {sorted(depths)}"
        return cls(
            rounds=sum(part.rounds for part in parts),
            tokens=sum(part.tokens for part in parts),
            drafted=sum(part.drafted for part in parts),
            accepted=sum(part.accepted for part in parts),
            per_position=tuple(sum(column) for column in zip(*(p.per_position for p in parts), strict=True)),
        )

    @property
    def acceptance_length(self) -> float | None:
        """Tokens emitted by rounds / rounds, the bonus counted; None when there was no round."""
        return self.tokens / self.rounds if self.rounds else None

    @property
    def shares(self) -> tuple[float, ...]:
        """Per-position acceptance, unconditional: share of rounds in which drafts 1…j were all accepted."""
        return tuple(count / self.rounds if self.rounds else 0.0 for count in self.per_position)

    @property
    def conditional(self) -> tuple[float | None, ...]:
        """Share of rounds in which draft j was accepted, given that 1…j-1 were; None if never."""
        before = (self.rounds, *self.per_position)
        return tuple(count / given if given else None for count, given in zip(self.per_position, before, strict=False))
