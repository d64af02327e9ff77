"""Grouped-query attention of one kind for all layers, as most configs have it. No family of its own."""

from __future__ import annotations

from mtplab.models.fields import Fields
from mtplab.models.spec import AttentionSpec, Rotary

__all__ = ["read_attention"]


def read_attention(fields: Fields, turned: float = 1.0, **kind: bool) -> AttentionSpec:
    """Heads, their size and their rotation. `turned`: the share of a head's features that turn where the config says
    none; `kind`: `AttentionSpec`'s norms, gated and bias."""
    theta, share, rope = fields.rope(turned)
    fields.plain_rope(rope)
    heads, hidden = fields.number("num_attention_heads"), fields.number("hidden_size")
    head_dim, kv_heads = fields.number("head_dim", hidden // heads), fields.number("num_key_value_heads", heads)
    fields.multiples(("num_attention_heads", heads, kv_heads))
    return AttentionSpec(heads, kv_heads, head_dim, Rotary(fields.turned(head_dim, share), theta), **kind)
