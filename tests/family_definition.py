"""What a family's head drafts by the definition in `mtplab/models/head.py`: transformers' decoder layers, put together
as the family's test file says, run over whole texts in one causal pass, with nothing kept between calls.

Every module of a head, with the mask written down here. `family_heads` is the other oracle, apart on purpose: it knows
the families' names itself, leaves masks to transformers' own model, and takes an engine's conventions; of one module.
Knows nothing of how mtplab runs anything. Not a test itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tiny import stacked

__all__ = ["Definition", "HeadModule", "assembled", "oracle_hidden", "weights_of"]


@torch.no_grad()
def oracle_hidden(oracle: PreTrainedModel, ids: list[int], stage: str = "post_norm") -> tuple[Tensor, Tensor]:
    """(hidden [t, h] after the final norm, or before it, logits [t, v]) of one sequence, without a cache."""
    before: list[Tensor] = []
    hook = oracle.get_decoder().norm.register_forward_pre_hook(lambda _, given: before.append(given[0]))
    out = oracle(input_ids=torch.tensor([ids]), output_hidden_states=True)
    hook.remove()
    return (out.hidden_states[-1] if stage == "post_norm" else before[0])[0], out.logits[0]


@dataclass
class HeadModule:
    """One module of a head, of transformers' own: norms, decoder layer and rotation, each with its weights.

    `masked`: zeros stand in place of the embedding at position 0. `head` [v, h] where it is not the target's."""

    norm_embedding: nn.Module
    norm_hidden: nn.Module
    fc: Tensor  # [h, 2h]
    layer: nn.Module
    norm: nn.Module
    rotary: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (x, positions [1, t]) → (cos, sin)
    hidden_first: bool = False
    masked: bool = False
    window: int | None = None
    head: Tensor | None = None

    @torch.no_grad()
    def __call__(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """embedded, hidden [t, h] of slots 0 … t − 1 → hidden [t, h] before the norm, in one causal pass."""
        if self.masked:
            embedded = torch.cat([torch.zeros_like(embedded[:1]), embedded[1:]])
        both = [self.norm_embedding(embedded[None]), self.norm_hidden(hidden[None])]
        x = F.linear(torch.cat(both[::-1] if self.hidden_first else both, -1), self.fc)
        t = x.shape[1]
        slots = torch.arange(t)[None]
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        if self.window is not None:
            seen &= torch.ones(t, t, dtype=torch.bool).triu(1 - self.window)
        mask = torch.zeros(1, 1, t, t).masked_fill(~seen, -torch.inf)
        out = self.layer(x, position_embeddings=self.rotary(x, slots), attention_mask=mask, position_ids=slots)
        return (out if isinstance(out, Tensor) else out[0])[0]


def weights_of(folder: Path, at: str) -> dict[str, Tensor]:
    """Tensors whose names begin so, in float32 and without that beginning, experts stacked as transformers holds them
    in memory."""
    tensors = load_file(folder / "model.safetensors")
    return stacked({name.removeprefix(at): value.float() for name, value in tensors.items() if name.startswith(at)})


def filled(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """The module in float32 with these weights, strictly."""
    module.load_state_dict(weights)
    return module.float().eval()


def assembled(
    weights: dict[str, Tensor], names: Sequence[str], norms: Sequence[nn.Module], layer: nn.Module,
    rotary: Callable, **settings: Any,
) -> HeadModule:  # fmt: skip
    """A head's module of transformers' parts. `names`: of the norms of embedding and hidden state, of the matrix behind
    them and of the last norm; `norms` are those three, and `layer` gets all other weights, strictly."""
    given = [weights.pop(f"{name}.weight") for name in names]
    fc = given.pop(2)
    one, two, last = (filled(norm, {"weight": weight}) for norm, weight in zip(norms, given, strict=True))
    return HeadModule(one, two, fc, filled(layer, weights), last, rotary, **settings)


class Definition:
    """Drafts from the definition in `mtplab/models/head.py`, over whole texts, with nothing kept between calls."""

    def __init__(
        self, oracle: PreTrainedModel, modules: Sequence[HeadModule], draft_hidden: str = "post_norm",
        target_hidden: str = "post_norm",
    ):  # fmt: skip
        self.oracle, self.modules, self.stages = oracle, modules, (target_hidden, draft_hidden)

    @torch.no_grad()
    def drafts(self, text: list[int], depth: int) -> list[Tensor]:
        """Logits [v] of drafts 1 … depth after a text whose last token the target has not read."""
        hidden = oracle_hidden(self.oracle, text[:-1], self.stages[0])[0]
        embed = self.oracle.get_input_embeddings()
        tokens, found, several = list(text), [], len(self.modules) > 1
        for step in range(depth):
            module = self.modules[step % len(self.modules)]
            # with a module per depth the slots stay and the tokens move on
            fed = tokens[1 + step :] if several else tokens[1:]
            out = module(embed(torch.tensor(fed)), hidden)
            normed = module.norm(out)
            last = normed[-1]
            found.append(self.oracle.lm_head(last) if module.head is None else F.linear(last, module.head))
            tokens.append(int(found[-1].argmax()))
            given = normed if self.stages[1] == "post_norm" else out
            hidden = given if several else torch.cat([hidden, given[-1:]])
        return found
