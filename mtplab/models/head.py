"""The MTP head: what drafts are made with, one module for all of them or one for each.

A module maps a hidden state and a token's embedding to a hidden state of its own, from which the target's vocabulary
head reads a draft. Slot t of a sequence belongs to token t; h⁰(t) is the target's hidden state there.

**One module** is used again for every draft. Slot t holds (h⁰(t), token t + 1) and gives draft 1, token t + 2. For the
next draft the head goes on to slot t + 1, with its own output in place of the target's hidden state there and the draft
as its token, and so on. One cache serves all of it; what was imagined is written again with the target's hidden states.

**A module per depth** is DeepSeek-V3's definition (arXiv 2412.19437, equations 21 to 23), which MiMo-V2, Step-3.5 and
Inkling share: step j is module j over *all* slots, causally, each at its own position:

    hʲ(t) = module_j(hʲ⁻¹(t), embedding of token t + j), attending to what step j made of slots 0 … t

and hʲ(t) gives draft j, token t + j + 1. Every step has a cache of its own, whose entry at slot s is made of token
s + j. It is true once that token is known: at the slots just before a round begins it is a draft, and was another draft
the round before. So a round reads the last slots again at every step: those that were accepted and as many before them
as drafts follow the first. vLLM does so too (`MultiModuleMTPSpeculator`, pull requests 48892 and 50062: it keeps the
target's hidden states and tokens of the last k − 1 slots); SGLang leaves the entries that a rejection made stale,
unless SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX is set (`multi_layer_eagle_worker_v2.py`). Read again, the caches depend on the
text alone, not on how rounds cut it.

Past the last module, step j takes the weights of module j mod n, as vLLM's `spec_step_idx % num_mtp_layers` does, and
still a cache of its own: the recursion goes on. In vLLM it would share the cache of the module whose weights it takes,
and overwrite its entries. Nothing is trained there.

Whether a step reads hʲ⁻¹ or h⁰ again is the family's: SGLang chains Step-3.5 and Inkling, and gives MiMo-V2's modules
the target's hidden state (`chain_mtp_hidden_states`); vLLM chains what a module gives.

Knows nothing of rounds: who runs it says which slots are read, and with what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.models.cache import KVCache
from mtplab.models.layers import DecoderLayer
from mtplab.models.norm import RMSNorm
from mtplab.models.part import Part
from mtplab.models.passes import Pass
from mtplab.quant.linear import PackedLinear

__all__ = ["DraftModule", "Head"]


@dataclass
class DraftModule(Part):
    """norm both inputs → fc → one decoder layer → norm → vocabulary head. Modules may share any of these."""

    norm_embedding: RMSNorm
    norm_hidden: RMSNorm
    fc: PackedLinear  # [hidden, 2·hidden]
    layer: DecoderLayer
    norm: RMSNorm
    embedding: Tensor  # [v, hidden], the target's unless the file holds another
    head: PackedLinear | None  # [v, hidden], None for the target's


@dataclass
class Head:
    """The modules, in the order of the drafts. Steps count from 0 here: step 0 makes the first draft."""

    modules: list[DraftModule]
    vocabulary: PackedLinear  # the target's head [v, hidden]
    chained: bool = True  # a module per depth reads what the one before gave, not the target's hidden state again
    hidden_first: bool = False  # the hidden state's half of fc's input comes before the embedding's
    first_masked: bool = False  # zeros stand in place of the embedding at position 0

    @property
    def per_depth(self) -> bool:
        """Whether each draft has a module of its own, and so a cache (`ModelConfig.draft_caches`)."""
        return len(self.modules) > 1

    def linears(self) -> Iterator[PackedLinear]:
        """Every linear layer once, but the vocabulary head where it is the target's."""
        yield from {id(each): each for module in self.modules for each in module.linears()}.values()

    def embed(self, tokens: Tensor, positions: Tensor, step: int = 0) -> Tensor:
        """tokens and the slots they are read at, of one shape → that shape and [hidden]."""
        found = F.embedding(tokens, self._at(step).embedding)
        return found.masked_fill((positions == 0).unsqueeze(-1), 0.0) if self.first_masked else found

    def __call__(self, embedded: Tensor, hidden: Tensor, run: Pass, cache: KVCache, step: int = 0) -> Tensor:
        """embedded, hidden [padded rows, hidden] → the head's own hidden, before its norm."""
        module = self._at(step)
        both = module.norm_embedding(embedded), module.norm_hidden(hidden)
        return module.layer(module.fc(torch.cat(both[::-1] if self.hidden_first else both, dim=-1))[0], run, cache)

    def normed(self, hidden: Tensor, step: int = 0) -> Tensor:
        """The module's norm: what the vocabulary head reads, and the next step by default."""
        return self._at(step).norm(hidden)

    def logits(self, normed: Tensor, step: int = 0) -> Tensor:
        """[m, hidden] after the module's norm → [m, v]."""
        return (self._at(step).head or self.vocabulary)(normed)[0]

    def _at(self, step: int) -> DraftModule:
        return self.modules[step % len(self.modules)]
