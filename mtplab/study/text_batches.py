"""Texts side by side in one pass that reads them as prompts, and which of its rows are judged.

Knows nothing of what is made of the pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mtplab.decode.settings import token_ids
from mtplab.errors import ConfigError
from mtplab.models import Model
from mtplab.models.attend import KEY_BLOCK
from mtplab.models.delta_rule import CHUNK
from mtplab.models.passes import Pass, PassMaker
from mtplab.models.rows import round_up
from mtplab.quant.policy import resolve_policy

__all__ = ["TextBatch", "check_texts", "text_batches"]


@dataclass(frozen=True)
class TextBatch:
    """A pass over b texts whose m rows are their tokens, one text behind the other.

    `owner` [m] is each row's text; `judged` the rows that predict a judged token; `slots` those of the draft's slots
    that do: slot s holds the hidden state of token s and the embedding of s + 1, for token s + 2. `before` are the
    places among `judged` of the rows at which the target predicts what those slots do.
    """

    model: Model
    run: Pass
    tokens: Tensor  # [b, t] int64
    following: Tensor  # [m] the token after each row's
    owner: Tensor
    judged: Tensor
    slots: Tensor
    before: Tensor
    capacity: int

    def target(self, target: Any) -> Tensor:
        """Hidden states [m, hidden] of every token by a target of this model's shape, before the final norm."""
        caches = self.model.target_caches(self.run.batch, self.capacity, resolve_policy("none"))
        return target(self.tokens, self.run, caches)

    def draft(self, draft: Any, given: Tensor) -> Tensor:
        """Draft 1: the head's hidden states [slots, hidden] after its norm, by what the target gives it [m, hidden]."""
        positions = self.run.positions.flatten()[self.run.places]
        embedded = draft.embed(self.following, positions)
        (cache,) = self.model.draft_caches(1, self.run.batch, self.capacity, resolve_policy("none"))
        return draft.normed(draft(embedded, given, self.run, cache)[self.slots])


def text_batches(
    model: Model, texts: Sequence[Sequence[int]], skips: Sequence[int], row_bytes: int, room: int = 512 << 20
) -> Iterator[TextBatch]:
    """Batches of texts, in order, of which each row takes `row_bytes`; as many texts as fit into `room`, one at least.

    texts: lists of ids; judged are the tokens after the first `skips[i]` + 1 of text i. Tensors are made in the mode
    of whoever asks for the next batch: outside inference mode, where a backward pass is to follow.
    """
    first = 0
    while first < len(texts):
        last = first + 1
        while last < len(texts) and max(map(len, texts[first : last + 1])) * (last + 1 - first) * row_bytes <= room:
            last += 1
        yield _batch(model, texts[first:last], skips[first:last])
        first = last


def check_texts(model: Model, texts: Sequence[Sequence[int]], skips: Sequence[int]) -> None:
    """Raise ConfigError for a text in which no slot of a draft is judged, or that is not of the model's ids."""
    for number, (text, skip) in enumerate(zip(texts, skips, strict=True)):
        if len(text) < skip + 3:
            raise ConfigError(f"text {number} has {len(text)} tokens, {skip} of them skipped; expected 3 after those")
    token_ids(model, list(texts), "texts", "text")


def _batch(model: Model, texts: Sequence[Sequence[int]], skips: Sequence[int]) -> TextBatch:
    device = model.device
    lengths = torch.tensor([len(text) for text in texts], device=device)
    width = round_up(int(lengths.max()), CHUNK)
    capacity = round_up(width, KEY_BLOCK)
    ids = torch.zeros(len(texts), width + 1, dtype=torch.int64)
    for row, text in enumerate(texts):
        ids[row, : len(text)] = torch.tensor(text)
    ids = ids.to(device)
    positions = torch.arange(width, device=device).expand(len(texts), -1)
    run = PassMaker(model.config, capacity, model.dtype, device).make(positions, width, False, lengths)
    assert run.places is not None
    owner, at = run.places // width, run.places % width
    left = lengths[owner] - at  # tokens from a row's own to the end of its text
    judged = ((at >= torch.tensor(skips, device=device)[owner]) & (left > 1)).nonzero()[:, 0]
    slots = judged[left[judged] > 2]
    before = torch.searchsorted(judged, slots + 1)
    return TextBatch(model, run, ids[:, :width], ids[owner, at + 1], owner, judged, slots, before, capacity)
