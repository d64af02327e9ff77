"""From what drafts would be accepted at every slot to the rounds that a depth gives: a renewal walk over positions.

A round that begins at a slot emits a + 1 tokens with probability alpha_1 … alpha_a (1 − alpha_{a+1}), and the next one
begins there. One recursion forward over the slots gives the expected counts, exactly, for any depth, also one that
differs from slot to slot. At temperature 0, and whenever drafts are the draft's likeliest tokens, every alpha is 0 or 1
and the expectation is the count itself.

Knows arrays only; nothing of models, prompts or files.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Counts", "expected_counts"]


@dataclass(frozen=True)
class Counts:
    """Expected counts of each prompt, float64: rounds, drafted, accepted, emitted [p] and accepted_per_position [p, k].

    `visits` [p, s] is the probability that a round begins at a slot, `length` [p, s] the tokens it emits on average.
    """

    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray
    accepted_per_position: np.ndarray
    visits: np.ndarray
    length: np.ndarray


def expected_counts(alpha: np.ndarray, slots: np.ndarray, depth: int | np.ndarray) -> Counts:
    """The rounds of a depth over outputs that are given.

    Args:
        alpha: [p, s, k] float64, the probability that draft j (column j − 1) of a round begun at a slot is accepted,
            given that those before it were; in [0, 1].
        slots: [p] int, how many of a prompt's slots there are: its output's tokens less the first.
        depth: draft tokens per round, 0 to k, or [p, s] of them: how many each slot's round drafts.

    A round cut off by the output's end emits what is left, and drafts beyond it are not counted as accepted.
    """
    p, s, k = alpha.shape
    depths = np.broadcast_to(np.asarray(depth), (p, s))
    assert depths.size == 0 or (depths.min() >= 0 and depths.max() <= k), "depths beyond what was traced"
    left = np.maximum(slots[:, None] - np.arange(s), 0)  # tokens that the output still has at each slot
    cap = np.minimum(depths, left)
    column = np.arange(1, k + 1)
    within = column <= cap[..., None]
    # [p, s, k]: probability that drafts 1 … j are all accepted, within the cap
    survive = np.cumprod(np.where(within, alpha, 0.0), axis=-1) if k else np.zeros((p, s, 0))
    reached = np.concatenate([np.ones((p, s, 1)), survive], axis=-1)  # [p, s, k + 1], of a = 0 … k
    stop = reached - np.concatenate([survive, np.zeros((p, s, 1))], axis=-1)  # exactly a were accepted
    emits = np.minimum(np.arange(1, k + 2), left[..., None])  # a + 1, or what is left
    visits = np.zeros((p, s + k + 2))
    if s:
        visits[:, 0] = slots > 0
    for at in range(s):
        # a round that accepted a ends a + 1 further; past the output's end, where that matters no more
        visits[:, at + 1 : at + k + 2] += visits[:, at, None] * stop[:, at]
    begun = visits[:, :s] * (left > 0)
    rounds = begun.sum(1)
    # sums taken in another order may pass each other by a rounding
    per_position = np.minimum.accumulate(
        np.concatenate([rounds[:, None], np.einsum("ps,psk->pk", begun, survive)], axis=1), axis=1
    )[:, 1:]
    return Counts(
        rounds=rounds,
        drafted=(begun * depths).sum(1),
        accepted=per_position.sum(1),
        emitted=np.asarray(slots, dtype=np.float64),
        accepted_per_position=per_position,
        visits=begun,
        length=(stop * emits).sum(-1),
    )
