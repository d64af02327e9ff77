"""The target over texts that are given: the logits at every position, under a cache policy.

Passes are those that a run reads its prompts with, segment by segment. Knows nothing of drafts, or of what the logits
are compared with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtplab.decode.runner import SEGMENT
from mtplab.decode.threads import on_device
from mtplab.models import Model
from mtplab.models.attend import KEY_BLOCK
from mtplab.models.cache import KVCache
from mtplab.models.delta_rule import CHUNK
from mtplab.models.passes import PassMaker
from mtplab.models.rows import pad_rows, round_up, row_count
from mtplab.quant.policy import QuantPolicy

__all__ = ["read_texts"]

_LOGIT_BYTES = 128 << 20  # of logits that are in memory at once


@torch.inference_mode()
def read_texts(
    model: Model, texts: Sequence[Sequence[int]], policy: QuantPolicy, exact: bool = False
) -> Iterator[tuple[int, int, Tensor]]:
    """(index of the text, position, logits [t, v] of positions from there on) over all of every text, in order.

    logits[i] are those after reading token position + i. One text at a time; nothing of the model is kept.
    """
    rows = max(CHUNK, min(SEGMENT, _LOGIT_BYTES // (4 * model.config.vocab_size) // CHUNK * CHUNK))
    with on_device(model.device):
        for index, text in enumerate(texts):
            for start, logits in _read(model, text, policy, exact and model.can_be_exact, rows):
                yield index, start, logits


def _read(
    model: Model, text: Sequence[int], policy: QuantPolicy, exact: bool, rows: int
) -> Iterator[tuple[int, Tensor]]:
    width = round_up(len(text), CHUNK)
    capacity = round_up(width, KEY_BLOCK)
    passes = PassMaker(model.config, capacity, model.dtype, model.device)
    caches = model.target_caches(1, capacity, policy)
    ids = torch.zeros(1, width, dtype=torch.int64)
    ids[0, : len(text)] = torch.tensor(text)
    ids = ids.to(model.device)
    for cache in caches:
        if isinstance(cache, KVCache) and cache.values is None:
            cache.values = cache.empty_values()  # every segment reads all that came before
    for start in range(0, width, rows):
        stop = min(start + rows, width)
        valid = torch.tensor([min(max(len(text) - start, 0), stop - start)], device=model.device)
        positions = torch.arange(start, stop, device=model.device)[None]
        run = passes.make(positions, stop, exact, valid)
        hidden = model.target(ids[:, start:stop], run, caches)[: run.rows]
        normed = model.target.normed(pad_rows(hidden, row_count(len(hidden), exact)))
        yield start, model.target.logits(normed)[: len(hidden)]
