"""The network in its training form: Qwen3.5 dense text model and MTP head, whole sequences, no caches.

Attribute names are the tensor names on disk (`model.layers.0.linear_attn.in_proj_qkv.weight`, `mtp.fc.weight`, ...), so
`state_dict()` is the checkpoint. Follows transformers 5.24 `models/qwen3_5/modeling_qwen3_5.py` for the trunk; the head
is `fc(cat[norm_e(e), norm_h(h)])`, one full-attention layer, `mtp.norm`, the shared output matrix.

Shapes: b batch, t time, h heads, d head dim, n k GEMM, v vocabulary. This module does not know about corpora,
optimisers, files or mtplab.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from gdn import gated_delta_rule
from torch import Tensor, nn

HERE = Path(__file__).parent


def read_config(path: Path = HERE / "config.json") -> SimpleNamespace:
    """The config.json of the bundled model as attributes."""
    return SimpleNamespace(**json.loads(path.read_text()))


class _Matmul16(torch.autograd.Function):
    """y = x @ w.T with BF16 operands and float32 accumulation, forward and backward; float32 in and out."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        x16, w16 = x.bfloat16(), w.bfloat16()
        ctx.save_for_backward(x16, w16)
        return (x16 @ w16.t()).float()

    @staticmethod
    def backward(ctx, grad: Tensor):
        x16, w16 = ctx.saved_tensors
        g16 = grad.bfloat16()
        dx = (g16 @ w16).float() if ctx.needs_input_grad[0] else None
        dw = (g16.t() @ x16).float() if ctx.needs_input_grad[1] else None
        return dx, dw


class Linear(nn.Module):
    """Bias-free linear layer. `Linear.bf16 = True` makes every GEMM of the network BF16 with float32 accumulation."""

    bf16 = False

    def __init__(self, k: int, n: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, k) * 0.02)

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight)


def project(x: Tensor, w: Tensor) -> Tensor:
    """x [..., k] @ w[n, k].T -> [..., n]."""
    if Linear.bf16:
        return _Matmul16.apply(x.reshape(-1, x.shape[-1]), w).view(*x.shape[:-1], w.shape[0])
    return F.linear(x, w)


class Norm(nn.Module):
    """RMSNorm whose stored weight is an offset from one: x / rms(x) * (1 + w)."""

    def __init__(self, n: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(n)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


class GatedNorm(nn.Module):
    """The gated delta rule's output norm: x / rms(x) * w * silu(gate); here the weight is not an offset."""

    def __init__(self, n: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) * F.silu(gate)


class Conv(nn.Module):
    """Holds the depthwise causal convolution's weight [c, 1, 4]; computed as four shifted multiply-adds."""

    def __init__(self, c: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(c, 1, width) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        width, t = self.weight.shape[-1], x.shape[1]
        padded = F.pad(x, (0, 0, width - 1, 0))
        y = sum(padded[:, i : i + t] * self.weight[:, 0, i] for i in range(width))
        return F.silu(y)


class DeltaNet(nn.Module):
    """Gated delta rule layer: [b, t, hidden] -> [b, t, hidden]."""

    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.kh, self.vh = c.linear_num_key_heads, c.linear_num_value_heads
        self.kd, self.vd = c.linear_key_head_dim, c.linear_value_head_dim
        key, value = self.kh * self.kd, self.vh * self.vd
        self.in_proj_qkv = Linear(c.hidden_size, 2 * key + value)
        self.in_proj_z = Linear(c.hidden_size, value)
        self.in_proj_a = Linear(c.hidden_size, self.vh)
        self.in_proj_b = Linear(c.hidden_size, self.vh)
        self.conv1d = Conv(2 * key + value, c.linear_conv_kernel_dim)
        # Step sizes log-uniform over 1e-3 ... 1e-1 and rates over 1 ... 16, as Mamba-2 and FLA start them: memories
        # of ten to a thousand tokens. transformers' own start (dt_bias = 1) forgets within a token.
        step = torch.exp(torch.rand(self.vh) * 4.6 - 6.9)
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.log(torch.rand(self.vh) * 15 + 1))
        self.norm = GatedNorm(self.vd, c.rms_norm_eps)
        self.out_proj = Linear(value, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        key = self.kh * self.kd
        mixed = self.conv1d(self.in_proj_qkv(x))
        q, k, v = mixed.split([key, key, self.vh * self.vd], dim=-1)
        q, k = (y.reshape(b, t, self.kh, self.kd) for y in (q, k))
        beta = F.linear(x, self.in_proj_b.weight).sigmoid()
        g = -self.A_log.exp() * F.softplus(F.linear(x, self.in_proj_a.weight) + self.dt_bias)
        y = gated_delta_rule(q, k, v.reshape(b, t, self.vh, self.vd), g, beta)
        y = self.norm(y, self.in_proj_z(x).view(b, t, self.vh, self.vd))
        return self.out_proj(y.reshape(b, t, -1))


def rope(x: Tensor, position: Tensor, dims: int, theta: float) -> Tensor:
    """Rotate the first `dims` of x [b, t, h, d] by `position` [t] (half-split pairing)."""
    freq = theta ** (-torch.arange(0, dims, 2, dtype=torch.float32) / dims)
    angle = (position.float()[:, None] * freq)[:, None]  # [t, 1, dims/2]
    cos, sin = angle.cos(), angle.sin()
    half = dims // 2
    a, b, rest = x[..., :half], x[..., half:dims], x[..., dims:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class Attention(nn.Module):
    """Gated full attention; `project` and `finish` are apart because the head attends with a mask of its own."""

    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.h, self.kv, self.d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.rope_dims = int(c.head_dim * c.partial_rotary_factor)
        self.theta = c.rope_parameters["rope_theta"]
        self.q_proj = Linear(c.hidden_size, self.h * self.d * 2)
        self.k_proj = Linear(c.hidden_size, self.kv * self.d)
        self.v_proj = Linear(c.hidden_size, self.kv * self.d)
        self.o_proj = Linear(self.h * self.d, c.hidden_size)
        self.q_norm, self.k_norm = Norm(self.d, c.rms_norm_eps), Norm(self.d, c.rms_norm_eps)

    def project(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q [b, h, t, d], k and v [b, kv, t, d], gate [b, t, h*d]."""
        b, t, _ = x.shape
        q, gate = self.q_proj(x).view(b, t, self.h, 2 * self.d).chunk(2, dim=-1)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv, self.d))
        v = self.v_proj(x).view(b, t, self.kv, self.d)
        q = rope(self.q_norm(q), position, self.rope_dims, self.theta)
        k = rope(k, position, self.rope_dims, self.theta)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate.reshape(b, t, -1)

    def finish(self, y: Tensor, gate: Tensor) -> Tensor:
        """y [b, h, t, d] -> [b, t, hidden]."""
        b, _, t, _ = y.shape
        return self.o_proj(y.transpose(1, 2).reshape(b, t, -1) * gate.sigmoid())

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        q, k, v, gate = self.project(x, position)
        k, v = (y.expand(-1, self.h, -1, -1) if self.kv == 1 else y for y in (k, v))
        return self.finish(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), gate)


class MLP(nn.Module):
    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm decoder layer, linear or full attention."""

    def __init__(self, c: SimpleNamespace, kind: str):
        super().__init__()
        self.kind = kind
        if kind == "linear_attention":
            self.linear_attn = DeltaNet(c)
        else:
            self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, position: Tensor) -> Tensor:
        y = self.input_layernorm(x)
        x = x + (self.linear_attn(y) if self.kind == "linear_attention" else self.self_attn(y, position))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.layer_types)
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [b, t] -> final-norm hidden states [b, t, hidden]."""
        x, position = self.embed_tokens(ids), torch.arange(ids.shape[1])
        for layer in self.layers:
            x = layer(x, position)
        return self.norm(x)


class Head(nn.Module):
    """The MTP head, run for several depths over all slots at once with the mask that decoding has."""

    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.pre_fc_norm_embedding = Norm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = Norm(c.hidden_size, c.rms_norm_eps)
        self.fc = Linear(2 * c.hidden_size, c.hidden_size)
        self.layers = nn.ModuleList([Layer(c, "full_attention")])
        self.norm = Norm(c.hidden_size, c.rms_norm_eps)

    def forward(self, hidden: Tensor, embedded: Tensor, depth: int) -> list[Tensor]:
        """Hidden states of each depth.

        `hidden` [b, t, hidden] is the trunk's after its final norm; `embedded` [b, t + depth, hidden] embeds the
        tokens of the same window and `depth` more. Step j (from 1) at slot t reads token t + j and the trunk's
        hidden t (j = 1) or its own output of step j - 1, sits at position t + j - 1, and attends to true slots <= t
        and to its own earlier steps. Its output predicts token t + j + 1.
        """
        layer, t = self.layers[0], hidden.shape[1]
        attn, blocked = layer.self_attn, torch.ones(t, t, dtype=torch.bool).triu(1)
        out: list[Tensor] = []
        chain: list[tuple[Tensor, Tensor]] = []
        for j in range(depth):
            e = embedded[:, j + 1 : j + 1 + t]
            x = self.fc(torch.cat([self.pre_fc_norm_embedding(e), self.pre_fc_norm_hidden(hidden)], dim=-1))
            q, k, v, gate = attn.project(layer.input_layernorm(x), torch.arange(j, j + t))
            if j == 0:
                true_k, true_v = k, v
                y = F.scaled_dot_product_attention(q, *(z.expand(-1, attn.h, -1, -1) for z in (k, v)), is_causal=True)
            else:
                chain.append((k, v))
                scores = (q @ true_k.transpose(-1, -2)).masked_fill(blocked, float("-inf"))
                own = torch.stack([(q * ck).sum(-1) for ck, _ in chain], dim=-1)  # [b, h, t, j]
                weight = (torch.cat([scores, own], dim=-1) * attn.d**-0.5).softmax(-1)
                y = weight[..., :t] @ true_v
                for i, (_, cv) in enumerate(chain):
                    y = y + weight[..., t + i : t + i + 1] * cv
            x = x + attn.finish(y, gate)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = self.norm(x)
            out.append(hidden)
        return out


class Network(nn.Module):
    def __init__(self, c: SimpleNamespace):
        super().__init__()
        self.config = c
        self.model = Trunk(c)
        self.mtp = Head(c)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., v]: the embedding serves as output matrix."""
        return project(hidden, self.model.embed_tokens.weight)
