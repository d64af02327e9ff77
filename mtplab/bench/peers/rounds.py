"""Rounds as engines report them, in one language, and where two engines' rounds part.

A round is what one verification emitted. Engines agree on that and on nothing else of the last one, which the budget
cuts: vLLM counts the drafts it accepted before the cut, llama.cpp drafts no more than can still be emitted, mtplab
counts what it emitted. So counts are compared in tokens emitted: of e tokens, e − 1 count as drafts and one as the
bonus, in every round and for every engine. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mtplab.errors import MtplabError

__all__ = ["Counts", "Difference", "counts_of", "differences", "emitted_of_chunks", "emitted_of_steps", "walk"]


@dataclass(frozen=True)
class Counts:
    """Rounds, drafts accepted in them (one less than each emitted), and of how many rounds draft j was accepted."""

    rounds: int
    accepted: int
    per_position: tuple[int, ...]

    def __add__(self, other: Counts) -> Counts:
        places = zip(self.per_position, other.per_position, strict=True)
        return Counts(self.rounds + other.rounds, self.accepted + other.accepted, tuple(a + b for a, b in places))


@dataclass(frozen=True)
class Difference:
    """A draft that one engine accepted and the other did not: `step` of the round that began with token `slot` + 1 of
    a prompt's output (both counted from 0 and 1). `ours`: whether ours was accepted."""

    prompt: int
    slot: int
    step: int
    ours: bool


def emitted_of_steps(accepted: Sequence[int], tokens: int) -> list[int]:
    """Tokens that each round emitted, from accepted drafts counted before the budget's cut, as vLLM does. Raises
    MtplabError where they do not add up to `tokens`, the first of which belongs to no round."""
    left, emitted = tokens - 1, []
    for each in accepted:
        emitted.append(min(each + 1, left))
        left -= emitted[-1]
    if left or 0 in emitted:
        raise MtplabError(f"{len(emitted)} rounds emitted {sum(emitted)} tokens, of {tokens - 1} that came of rounds")
    return emitted


def emitted_of_chunks(chunks: Sequence[Sequence[float]], depth: int, tokens: int) -> list[int]:
    """Tokens that each round emitted, from the chunks of llama.cpp's stream: [token, milliseconds, drafted, accepted]
    so far, which change once a round. Raises MtplabError where rounds cannot be told apart."""
    emitted: list[int] = []
    before = chunks[0]
    for chunk in chunks[1:]:
        if chunk[1] == before[1]:
            continue
        drafted, accepted = int(chunk[2] - before[2]), int(chunk[3] - before[3])
        if drafted > depth:
            raise MtplabError(f"one chunk of the stream holds {drafted} drafts, which is more than a round of {depth}")
        emitted.append(accepted + 1)
        before = chunk
    if sum(emitted) != tokens - 1:
        raise MtplabError(f"{len(emitted)} rounds emitted {sum(emitted)} tokens, of {tokens - 1} that came of rounds")
    return emitted


def walk(hits: np.ndarray, depth: int) -> list[int]:
    """Tokens that each round emits at a depth, from hits [s, k] bool of one prompt's slots (`Trace.hits`)."""
    slots, emitted = len(hits), []
    at = 0
    while at < slots:
        emitted.append(_emits(hits, at, depth))
        at += emitted[-1]
    return emitted


def _emits(hits: np.ndarray, slot: int, depth: int) -> int:
    """Tokens that a round from `slot` emits; hits are whole from the left."""
    return min(int(hits[slot, :depth].sum()) + 1, len(hits) - slot)


def counts_of(emitted: Sequence[int], depth: int) -> Counts:
    """Counts of a prompt's rounds."""
    found = np.asarray(emitted) - 1
    return Counts(len(found), int(found.sum()), tuple(int((found >= j).sum()) for j in range(1, depth + 1)))


def differences(prompt: int, emitted: Sequence[int], hits: np.ndarray, depth: int) -> list[Difference]:
    """Where rounds of the same text part from what `hits` [s, k] say of the slots they began at: the one draft of each
    such round that was accepted here and not there."""
    found, at = [], 0
    for theirs in emitted:
        ours = _emits(hits, at, depth)
        if ours != theirs:
            found.append(Difference(prompt, at, min(ours, theirs), ours > theirs))
        at += theirs
    return found
