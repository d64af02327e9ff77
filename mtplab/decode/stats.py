"""What a run did: tokens, rounds and acceptance, under the names of the field.

As in vLLM and SGLang, acceptance length counts the bonus and per-position acceptance is unconditional. Unlike vLLM,
which counts a verdict before it looks for the end, tokens cut off by EOS or the budget are not counted as accepted.
The one place where lengths and shares are worked out; where there is nothing to divide by, they are None.
Knows nothing of how tokens came about.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class RoundRecord:
    """One verification of one prompt: `accepted` of `drafted` drafts were emitted, `emitted` tokens in all.

    `position` is that of the first token the round emitted; tokens cut off by EOS or the budget are not counted.
    """

    prompt: int
    position: int
    drafted: int
    accepted: int
    emitted: int


@dataclass(frozen=True)
class AcceptanceStats:
    """Counts of a set of rounds at one depth. The prompt's first token belongs to no round."""

    depth: int
    rounds: int
    drafted: int
    accepted: int
    emitted: int
    accepted_per_position: tuple[int, ...]

    @classmethod
    def of(cls, depth: int, rounds: Iterable[RoundRecord]) -> AcceptanceStats:
        """The counts of these rounds."""
        rounds = list(rounds)
        per_position = [0] * depth
        for record in rounds:
            for j in range(record.accepted):
                per_position[j] += 1
        return cls(
            depth=depth,
            rounds=len(rounds),
            drafted=sum(r.drafted for r in rounds),
            accepted=sum(r.accepted for r in rounds),
            emitted=sum(r.emitted for r in rounds),
            accepted_per_position=tuple(per_position),
        )

    def __add__(self, other: AcceptanceStats) -> AcceptanceStats:
        """The counts of both sets of rounds, which must be of one depth."""
        assert self.depth == other.depth, f"counts of depths {self.depth} and {other.depth} cannot be added"
        positions = zip(self.accepted_per_position, other.accepted_per_position, strict=True)
        return AcceptanceStats(
            depth=self.depth,
            rounds=self.rounds + other.rounds,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            emitted=self.emitted + other.emitted,
            accepted_per_position=tuple(mine + theirs for mine, theirs in positions),
        )

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per round, the bonus counted; None without rounds."""
        return _share(self.emitted, self.rounds)

    @property
    def per_position(self) -> list[float | None]:
        """[j−1]: share of rounds in which drafts 1…j were all accepted; None without rounds."""
        return [_share(n, self.rounds) for n in self.accepted_per_position]

    @property
    def conditional(self) -> list[float | None]:
        """[j−1]: share of rounds in which draft j was accepted, of those in which 1…j−1 were; None without any."""
        before = (self.rounds, *self.accepted_per_position)
        return [_share(n, d) for n, d in zip(self.accepted_per_position, before, strict=False)]

    def counters(self) -> dict[str, int | list[int]]:
        """vLLM's counters (its metrics, less the prefix `vllm:spec_decode_` and the suffix `_total`)."""
        return {
            "num_drafts": self.rounds,
            "num_draft_tokens": self.drafted,
            "num_accepted_tokens": self.accepted,
            "num_accepted_tokens_per_pos": list(self.accepted_per_position),
        }


@dataclass(frozen=True)
class Progress:
    """How far a run is: tokens emitted of those that may be, and batched rounds done."""

    tokens_done: int
    tokens_total: int
    rounds: int


@dataclass
class Generation:
    """Output of `generate`: one entry per prompt, the prompt itself not included; EOS, when produced, comes last.

    `prefill_seconds` is the wall time of the prompts' passes, `decode_seconds` that of the rounds. Making caches and
    texts, and what the caller does in `on_round`, are in neither, only in the call's own `seconds`.
    """

    tokens: list[list[int]]
    texts: list[str]
    rounds: list[RoundRecord]
    depth: int
    seconds: float
    prefill_seconds: float
    decode_seconds: float
    memory: dict
    settings: dict = field(default_factory=dict)

    @property
    def stats(self) -> AcceptanceStats:
        """Acceptance over the whole batch."""
        return AcceptanceStats.of(self.depth, self.rounds)

    @property
    def per_prompt(self) -> list[AcceptanceStats]:
        """Acceptance of each prompt."""
        mine: list[list[RoundRecord]] = [[] for _ in self.tokens]
        for record in self.rounds:
            mine[record.prompt].append(record)
        return [AcceptanceStats.of(self.depth, records) for records in mine]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens emitted by rounds per second of `decode_seconds`; None without rounds."""
        return _share(self.stats.emitted, self.decode_seconds) if self.rounds else None

def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
