"""The layers that targets and heads are made of: MLP, attention, the gated delta rule, and a decoder layer of them.

A layer maps x [m, hidden] to the same shape, where m = `Pass.padded`: the true tokens of the pass in (b, t) order, then
padding rows, whose content is never read. Knows nothing of files, names or rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.kernels.attention import attend_cache
from mtplab.kernels.conv_update import conv_update
from mtplab.kernels.delta_rule import delta_rule
from mtplab.kernels.kv_write import write_kv
from mtplab.models.attend import attend
from mtplab.models.cache import DeltaState, KVCache
from mtplab.models.delta_rule import delta_rule_chunked, delta_rule_step
from mtplab.models.norm import RMSNorm
from mtplab.models.part import Part
from mtplab.models.passes import Pass
from mtplab.models.rotary import rotate
from mtplab.models.rows import by_element
from mtplab.models.spec import AttentionSpec, DeltaSpec
from mtplab.quant.gating import gated
from mtplab.quant.linear import PackedLinear

# under the root of q's and k's norm (transformers' l2norm and flash-linear-attention's)
L2_EPS = 1e-6


class MLP(Part):
    """down(silu(gate(x)) · up(x)), added to the residual; clamped to `limit` (`quant/gating.py`) before down."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, limit: float | None = None):
        self.gate_up, self.down, self.limit = gate_up, down, limit

    def __call__(self, residual: Tensor, x: Tensor, rows: int) -> Tensor:
        """residual, x [m, hidden] → [m, hidden]; rows past the first `rows` cost less to compute than to cut off."""
        return self.down.add_to(residual, self._mixed(x))

    def alone(self, x: Tensor) -> Tensor:
        """x [m, hidden] → [m, hidden], with no residual."""
        return self.down(self._mixed(x))[0]

    def _mixed(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)
        return gated(gate, up, self.limit)


class Attention(Part):
    """Grouped-query attention: rotary, per-head norms of q and k, a bias and an output gate where the spec says so.

    `qkv` members: q_proj [h·d, hidden] (h·2·d where gated: each head's query and gate side by side), k_proj, v_proj
    [h_kv·d, hidden], and g_proj [h, hidden] where the spec has a gate for each head. The weight of `qk_norm`
    [h + h_kv, d] holds q_norm's times d^-½ and k_norm's, head by head; without norms q is multiplied by d^-½. `view` is
    its place among the geometries of a pass.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        view: int,
        qkv: PackedLinear,
        out: PackedLinear,
        qk_norm: RMSNorm | None,
        biases: tuple[Tensor, Tensor, Tensor] | None,
    ):
        self.spec, self.view, self.qkv, self.out, self.qk_norm, self.biases = spec, view, qkv, out, qk_norm, biases

    def __call__(self, residual: Tensor, x: Tensor, run: Pass, cache: KVCache) -> Tensor:
        c, b, t, view = self.spec, run.batch, run.tokens, run.views[self.view]
        q, k, v, *of_heads = self.qkv(x)
        if self.biases is not None:
            q, k, v = (x + bias for x, bias in zip((q, k, v), self.biases, strict=True))
        gate = None
        q = run.spread(q)
        if c.gated:
            q, gate = q.view(b, t, c.heads, 2 * c.head_dim).chunk(2, dim=-1)
        qk = torch.cat([q.view(b, t, c.heads, c.head_dim), run.spread(k).view(b, t, c.kv_heads, c.head_dim)], dim=2)
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        else:
            qk[:, :, : c.heads].mul_(c.head_dim**-0.5)
        rotate(qk[..., : c.rotary.dim], view.cos, view.sin, c.rotary.interleaved)
        q, k = torch.split_with_sizes(qk, (c.heads, c.kv_heads), dim=2)
        mix = self._with_kernels if run.kernels else self._with_torch
        mixed = mix(q, k, run.spread(v).view(b, t, c.kv_heads, c.head_dim), run, cache)
        if gate is not None:
            mixed = mixed.mul_(by_element(torch.sigmoid, gate.reshape(b, t, -1)))
        for gates in of_heads:
            # of all padded rows: the vectorised and the scalar form differ in the last bit
            opened = run.spread(by_element(torch.sigmoid, gates)).unsqueeze(-1)
            mixed = mixed.view(b, t, c.heads, c.head_dim).mul_(opened).flatten(2)
        return self.out.add_to(residual, run.gather(mixed))

    def _with_torch(self, q: Tensor, k: Tensor, v: Tensor, run: Pass, cache: KVCache) -> Tensor:
        d, view = self.spec.head_dim, run.views[self.view]
        cache.write(view.slots, torch.cat([k.reshape(-1, d), v.reshape(-1, d)]))
        keys, values = cache.read(run.key_length)
        return attend(q.transpose(1, 2), keys, values, view.bias, run.exact)

    def _with_kernels(self, q: Tensor, k: Tensor, v: Tensor, run: Pass, cache: KVCache) -> Tensor:
        of_k, of_v = cache.factors
        write_kv(k, v, cache.codes, cache.meta, run.positions, None, of_k, of_v)
        out = attend_cache(
            q,
            cache.codes,
            cache.meta,
            run.positions,
            scale=1.0,
            k_scale=of_k,
            v_scale=of_v,
            longest=run.longest,
            most_tokens=run.most_tokens,
        )
        return out.flatten(2)


class GatedDelta(Part):
    """The gated-delta-rule mixer: one projection, a short convolution, the recurrence, a gated norm.

    `inputs` members: in_proj_qkv [conv_dim, hidden], in_proj_z [value_dim, hidden], in_proj_b and in_proj_a
    [v_heads, hidden]; where interleaved in_proj_qkvz and in_proj_ba, as long together. conv_weight [kernel, conv_dim];
    minus_a = −exp(A_log) and dt_bias [v_heads] float32; `norm` over dv, whose weight is plain, not 1+w.
    """

    def __init__(
        self,
        spec: DeltaSpec,
        inputs: PackedLinear,
        out: PackedLinear,
        conv_weight: Tensor,
        minus_a: Tensor,
        dt_bias: Tensor,
        norm: RMSNorm,
    ):
        self.spec, self.inputs, self.out = spec, inputs, out
        self.conv_weight, self.minus_a, self.dt_bias, self.norm = conv_weight, minus_a, dt_bias, norm
        # x / √(Σx² + ε), as the delta rule's kernels normalise q and k, with q times dk^-½
        dk = spec.k_dim
        size = torch.full((2, 1, dk), dk**-0.5, device=minus_a.device)
        size[0] /= dk**0.5
        self._qk_norm = RMSNorm(size, L2_EPS / dk)

    def __call__(self, residual: Tensor, x: Tensor, run: Pass, state: DeltaState) -> Tensor:
        qkv, z, beta, a = self._inputs(x)
        # gates of all padded rows, [m, v_heads]: their vectorised and scalar forms differ in the last bit
        beta = by_element(torch.sigmoid, beta.float())
        log_decay = by_element(F.softplus, a.float() + self.dt_bias).mul_(self.minus_a)
        mix = self._with_kernels if run.kernels else self._with_torch
        # out [b, t, v_heads, dv]
        out = mix(run.spread(qkv), log_decay, beta, run, state)
        out = run.gather(self.norm(out).to(x.dtype).flatten(2))
        return self.out.add_to(residual, out * F.silu(z))

    def _inputs(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [m, hidden] → qkv [m, conv_dim], z [m, value_dim], b and a [m, v_heads]."""
        if not self.spec.interleaved:
            return self.inputs(x)
        # outputs are sorted and not the weight's rows: those share scales, in blocks that hold parts of heads
        c, (qkvz, ba) = self.spec, self.inputs(x)
        values = c.value_dim // c.k_heads
        by_head = qkvz.unflatten(-1, (c.k_heads, -1))
        *qkv, z = torch.split_with_sizes(by_head, (c.k_dim, c.k_dim, values, values), dim=-1)
        b, a = ba.unflatten(-1, (c.k_heads, -1)).chunk(2, dim=-1)
        return torch.cat([part.flatten(1) for part in qkv], -1), z.flatten(1), b.flatten(1), a.flatten(1)

    def _with_kernels(self, qkv: Tensor, log_decay: Tensor, beta: Tensor, run: Pass, state: DeltaState) -> Tensor:
        c, b, t = self.spec, run.batch, run.tokens
        window = None
        if t > 1:
            window = qkv.new_empty(b, c.conv_kernel - 1 + t, c.conv_dim)
            state.keep_window(window)
        mixed = conv_update(qkv, state.conv, self.conv_weight, window)
        q, k, v = torch.split_with_sizes(mixed, (c.key_dim, c.key_dim, c.value_dim), dim=-1)
        return delta_rule(
            q.view(b, t, c.k_heads, -1),
            k.view(b, t, c.k_heads, -1),
            v.view(b, t, c.v_heads, -1),
            run.spread(log_decay),
            run.spread(beta),
            state.recurrent,
            state.step_buffer(t) if t > 1 else None,
            normalize=True,
            scale=c.k_dim**-0.5,
            eps=L2_EPS,
        )

    def _with_torch(self, qkv: Tensor, log_decay: Tensor, beta: Tensor, run: Pass, state: DeltaState) -> Tensor:
        window = torch.cat([state.conv, qkv], dim=1)
        q, k, v = self._heads(self._convolve(window, run.tokens))
        mix = self._decode if run.valid is None else self._prompt
        return mix(q, k, v, log_decay, beta, window, run, state)

    def _convolve(self, window: Tensor, t: int) -> Tensor:
        mixed = window[:, :t] * self.conv_weight[0]
        for i in range(1, self.spec.conv_kernel):
            mixed.addcmul_(window[:, i : i + t], self.conv_weight[i])
        return F.silu(mixed, inplace=True)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k [t, b, v_heads, dk] normalised, v [t, b, v_heads, dv], in float32; each token's rows side by side."""
        c = self.spec
        b, t, _ = mixed.shape
        qk, v = torch.split_with_sizes(mixed.float(), (2 * c.key_dim, c.value_dim), dim=-1)
        qk = qk.reshape(b, t, 2, c.k_heads, c.k_dim)
        qk = self._qk_norm(qk)
        # each key head serves consecutive value heads
        shape = (2, t, b, c.k_heads, c.v_heads // c.k_heads, c.k_dim)
        q, k = qk.permute(2, 1, 0, 3, 4).unsqueeze(-2).expand(shape).reshape(2, t, b, c.v_heads, -1)
        return q, k, v.view(b, t, c.v_heads, c.v_dim).transpose(0, 1)

    def _decode(self, q, k, v, log_decay, beta, window, run: Pass, state: DeltaState) -> Tensor:
        c, b, t = self.spec, run.batch, run.tokens
        n = b * c.v_heads
        gates = by_element(torch.exp, log_decay), beta
        decay, beta = (run.spread(x).transpose(0, 1).reshape(t, n, 1, 1) for x in gates)
        q, k, v = (x.reshape(t, n, 1, x.shape[-1]) for x in (q, k, v))
        if t == 1:
            state.conv.copy_(window[:, 1:])
            out = delta_rule_step(q[0], k[0], v[0], decay[0], beta[0], state.recurrent, state.recurrent)
            return out.view(b, 1, c.v_heads, -1)
        state.keep_window(window)
        before, outs = state.recurrent, []
        for i, after in enumerate(state.step_buffer(t)):
            outs.append(delta_rule_step(q[i], k[i], v[i], decay[i], beta[i], before, after))
            before = after
        return torch.stack(outs).view(t, b, c.v_heads, -1).transpose(0, 1)

    def _prompt(self, q, k, v, log_decay, beta, window, run: Pass, state: DeltaState) -> Tensor:
        c, b, t = self.spec, run.batch, run.tokens
        n = b * c.v_heads
        # a token that is not there has beta 0 and decay 1 (`spread` fills zeros): the state passes it unchanged
        beta, log_decay = (run.spread(x).transpose(1, 2).reshape(n, t) for x in (beta, log_decay))
        q, k, v = (x.permute(1, 2, 0, 3).reshape(n, t, -1) for x in (q, k, v))
        out, state.recurrent = delta_rule_chunked(q, k, v, log_decay, beta, state.recurrent)
        at = run.valid[:, None] + torch.arange(state.conv.shape[1], device=q.device)
        state.conv = window[torch.arange(b, device=q.device)[:, None], at]
        return out.view(b, c.v_heads, t, -1).transpose(1, 2)


@dataclass
class DecoderLayer(Part):
    """norm → mixer → residual, norm → MLP → residual."""

    input_norm: RMSNorm
    mixer: Part  # attention of one kind or another, or the delta rule: (residual, x, run, cache) → [m, hidden]
    post_norm: RMSNorm
    mlp: Part  # an MLP or a mixture of experts: (residual, x, rows) → [m, hidden]

    def __call__(self, x: Tensor, run: Pass, cache: KVCache | DeltaState) -> Tensor:
        """x [m, hidden] → the same shape; fills the cache."""
        x = self.mixer(x, self.input_norm(x), run, cache)
        return self.mlp(x, self.post_norm(x), run.rows)
