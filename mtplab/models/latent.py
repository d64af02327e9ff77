"""Multi-head latent attention, in its absorbed form: every head attends to one compressed row a token.

A row maps x [m, hidden] to the same shape, as the layers of `layers.py` do. Knows nothing of files, names or rounds.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from mtplab.models.attend import attend
from mtplab.models.cache import KVCache
from mtplab.models.norm import RMSNorm
from mtplab.models.part import Part, Swap, SwapExperts
from mtplab.models.passes import Pass
from mtplab.models.rotary import rotate
from mtplab.models.spec import MlaSpec
from mtplab.quant.headwise import HeadwiseLinear
from mtplab.quant.linear import PackedLinear

__all__ = ["LatentAttention"]


class LatentAttention(Part):
    """DeepSeek-V2's attention (arXiv 2405.04434, equations 9 to 19; transformers' `DeepseekV3Attention`).

    With row c of a past token, head i's key is W_uk,i c and its value W_uv,i c. Neither is made: a query q is taken to
    W_uk,iᵀ q, which meets c itself, and W_uv,i is applied to the weighted sum of the c's. That is always so, for
    prompts too, so that runs and traces give the same bits; engines do it when they decode. kv_b_proj, which holds W_uk
    and W_uv, thus multiplies no row: in FP8 its values are those of its codes, and nothing is rounded before it,
    as in vLLM, whose decoding uses kv_b_proj dequantised (`MLACommonImpl.process_weights_after_loading`). Engines part
    here: vLLM reads prompts with kv_b_proj as a linear layer, whose input is rounded; SGLang decodes with both halves
    in FP8, and rounds what goes into them per tensor (`per_tensor_quant_mla_fp8` and `bmm_fp8`). Neither is computed.

    `inputs` members: q_a_proj [q_rank, hidden], or q_proj [h·q_dim, hidden] where there is no rank; kv_a_proj_with_mqa
    [kv_rank + rope, hidden]. `q_b` [h·q_dim, q_rank], each head's features that do not turn before those that do.
    `view` is its place among the geometries of a pass.
    """

    def __init__(
        self,
        spec: MlaSpec,
        view: int,
        inputs: PackedLinear,
        q_norm: RMSNorm | None,
        q_b: PackedLinear | None,
        kv_norm: RMSNorm,
        kv_b: PackedLinear,
        out: PackedLinear,
    ):
        self.spec, self.view, self.inputs, self.q_norm, self.q_b = spec, view, inputs, q_norm, q_b
        self.kv_norm, self.kv_b, self.out = kv_norm, HeadwiseLinear.of(kv_b, spec.heads, spec.nope_dim), out

    def exchanged(self, swap: Swap, experts: SwapExperts) -> Self:
        """The same with other packed linear layers; kv_b_proj's halves are made again where it is another."""
        made = super().exchanged(swap, experts)
        made.kv_b = HeadwiseLinear.of(made.kv_b, self.spec.heads, self.spec.nope_dim)
        return made

    def __call__(self, residual: Tensor, x: Tensor, run: Pass, cache: KVCache) -> Tensor:
        c, b, t, view = self.spec, run.batch, run.tokens, run.views[self.view]
        q, row = self.inputs(x)
        if self.q_b is not None:
            (q,) = self.q_b(self.q_norm(q))
        still, turning = q.view(-1, c.heads, c.q_dim).tensor_split([c.nope_dim], dim=-1)
        q = torch.cat([self.kv_b.through_keys(still), turning], dim=-1).mul_(c.scale)
        latent, turning = row.tensor_split([c.kv_rank], dim=-1)
        row = torch.cat([self.kv_norm(latent), turning], dim=-1)
        # the row beside the queries, as one more head: both turn alike
        both = run.spread(torch.cat([q.flatten(1), row], dim=-1)).view(b, t, c.heads + 1, c.rows.dim)
        rotate(both[..., c.kv_rank :], view.cos, view.sin, c.rotary.interleaved)
        q, row = torch.split_with_sizes(both, (c.heads, 1), dim=2)
        cache.write(view.slots, row.reshape(-1, c.rows.dim))
        rows, _ = cache.read(run.key_length)
        mixed = attend(q.transpose(1, 2), rows, rows[..., : c.kv_rank], view.bias, run.exact)
        mixed = self.kv_b.through_values(run.gather(mixed).view(-1, c.heads, c.kv_rank))
        return self.out.add_to(residual, mixed.flatten(1))
