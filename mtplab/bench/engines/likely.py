"""Rounds that an engine's counts allow, where it tells how many drafts were accepted and not in which round.

Of all ways through a text that part from our head's drafts at near-ties alone, one with the engine's counts and the
fewest such places. Where there is none, its counts cannot have come about. Knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["emitted_of_counts"]


def emitted_of_counts(hits: np.ndarray, ties: np.ndarray, per_position: Sequence[int]) -> list[int] | None:
    """Tokens that each round emitted, for one prompt of which draft j was accepted in `per_position[j − 1]` rounds.

    Args:
        hits: [s, k] bool, whether draft j is the text's token, in every slot that a round may begin at.
        ties: [s, k] bool, whether that is a near-tie, which may go either way.

    None where no way has these counts.
    """
    slots, wanted = len(hits), tuple(per_position)
    # slot -> counts so far -> (places that part from ours, the slot before, its counts)
    reached: list[dict[tuple[int, ...], tuple[int, int, tuple[int, ...]]]] = [{} for _ in range(slots + 1)]
    reached[0][(0,) * len(wanted)] = (0, -1, ())
    for at in range(slots):
        ways = _ways(hits[at], ties[at], len(wanted), slots - at) if reached[at] else []
        for counts, (parted, *_) in reached[at].items():
            for accepted, parts in ways:
                after = tuple(n + (j < accepted) for j, n in enumerate(counts))
                if any(a > b for a, b in zip(after, wanted, strict=True)):
                    continue
                ahead = reached[at + accepted + 1]
                if after not in ahead or ahead[after][0] > parted + parts:
                    ahead[after] = parted + parts, at, counts
    if wanted not in reached[slots]:
        return None
    emitted, at, counts = [], slots, wanted
    while at:
        _, before, counts_before = reached[at][counts]
        emitted.append(at - before)
        at, counts = before, counts_before
    return emitted[::-1]


def _ways(hits: np.ndarray, ties: np.ndarray, depth: int, left: int) -> list[tuple[int, bool]]:
    """(drafts accepted, whether that is not ours) that a round may have which has `left` tokens to give."""
    ours = min(int(hits[:depth].sum()), left - 1)  # hits are whole from the left
    found = [(ours, False)]
    for j in range(ours):  # a hit that was not accepted
        if ties[j]:
            found.append((j, True))
    most = min(depth, left - 1)
    if ours < most and ties[ours]:
        # what follows a miss that was accepted is not known of our head
        found += [(accepted, True) for accepted in range(ours + 1, most + 1)]
    return found
