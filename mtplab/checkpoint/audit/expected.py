"""Which modules, of which shapes, a config.json asks for, for families whose layers are named and sized alike.

Sources: transformers' modeling files of the model types named below (5.24.0), and the releases' own names. Knows sizes
and names only; a family that is not here, or a config that leaves a size out, asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

__all__ = ["expected_modules"]

Shape = tuple[int, ...]
Named = Iterator[tuple[str, Shape]]
# experts of all layers, one by one, are 72,000 of a trillion parameters; a misprinted count would fill the memory
_MOST = 400_000


def expected_modules(text: dict[str, Any], heads: int) -> dict[str, Shape]:
    """Module (normalised) → shape of its weight, as config.json's text part asks for; {} where it cannot be told, or
    where it asks for more than any model has.

    `heads`: layers of the MTP head that are on disk.
    """
    family = _FAMILIES.get(str(text.get("model_type")))
    if family is None:
        return {}
    try:
        size = _Sizes(text)
        found = {"model.embed_tokens": (size.vocab_size, size.hidden_size)} | dict(islice(family(size, heads), _MOST))
    except _Unsaid:
        return {}
    return found if len(found) < _MOST else {}


class _Unsaid(Exception):
    """A size that config.json does not give as a whole number."""


class _Sizes:
    """A config's sizes by name; asking for one that is not there raises _Unsaid."""

    def __init__(self, text: dict[str, Any]) -> None:
        self._text = text

    def __getattr__(self, name: str) -> int:
        value = self._text.get(name)
        if type(value) is not int or not 0 < value < 1 << 24:
            raise _Unsaid(name)
        return value

    def kinds(self, count: int) -> list[str]:
        """`layer_types`, one a layer; Qwen3-Next says at which interval attention stands instead."""
        given = self._text.get("layer_types")
        if given is None and "full_attention_interval" in self._text:
            every = self.full_attention_interval
            return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
        if not isinstance(given, list) or len(given) != count:
            raise _Unsaid("layer_types")
        return [str(kind) for kind in given]

    def count(self, name: str) -> int:
        """A size that may be 0."""
        return 0 if self._text.get(name) in (0, None) else getattr(self, name)

    def flag(self, name: str) -> bool:
        return self._text.get(name) is True

    @property
    def head(self) -> int:
        return self.head_dim if "head_dim" in self._text else self.hidden_size // self.num_attention_heads


def _attention(c: _Sizes, at: str, gated: bool = False) -> Named:
    wide = c.num_attention_heads * c.head
    yield f"{at}.q_proj", (wide * (2 if gated else 1), c.hidden_size)
    for name in ("k_proj", "v_proj"):
        yield f"{at}.{name}", (c.num_key_value_heads * c.head, c.hidden_size)
    yield f"{at}.o_proj", (c.hidden_size, wide)


def _mlp(at: str, hidden: int, inner: int) -> Named:
    yield f"{at}.gate_proj", (inner, hidden)
    yield f"{at}.up_proj", (inner, hidden)
    yield f"{at}.down_proj", (hidden, inner)


def _mixture(c: _Sizes, at: str) -> Named:
    """Experts one by one, as FP8 releases hold them; a stack in their place is for the reader to see."""
    yield f"{at}.gate", (c.num_experts, c.hidden_size)
    yield f"{at}.shared_expert_gate", (1, c.hidden_size)
    yield from _mlp(f"{at}.shared_expert", c.hidden_size, c.shared_expert_intermediate_size)
    for expert in range(c.num_experts):
        yield from _mlp(f"{at}.experts.{expert}", c.hidden_size, c.moe_intermediate_size)


def _norms(c: _Sizes, at: str) -> Named:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{at}.{name}", (c.hidden_size,)


def _llama(c: _Sizes, heads: int) -> Named:
    yield "model.norm", (c.hidden_size,)
    for i in range(c.num_hidden_layers):
        at = f"model.layers.{i}"
        yield from _norms(c, at)
        yield from _attention(c, f"{at}.self_attn")
        yield from _mlp(f"{at}.mlp", c.hidden_size, c.intermediate_size)


def _mimo(c: _Sizes, heads: int) -> Named:
    yield from _llama(c, heads)
    for i in range(heads):
        at = f"model.mtp_layers.{i}"
        yield from _norms(c, at)
        yield from _attention(c, f"{at}.self_attn")
        yield from _mlp(f"{at}.mlp", c.hidden_size, c.intermediate_size)
        yield f"{at}.input_proj", (c.hidden_size, 2 * c.hidden_size)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            yield f"{at}.{name}", (c.hidden_size,)


def _qwen3_5(c: _Sizes, heads: int) -> Named:
    gated = c.flag("attn_output_gate") or "attn_output_gate" not in c._text

    def feed(at: str, number: int) -> Named:
        return _mixture(c, at) if "num_experts" in c._text else _mlp(at, c.hidden_size, c.intermediate_size)

    yield from _hybrid(c, heads, gated, feed, ("qkv", "z", "b", "a"))


def _qwen3_next(c: _Sizes, heads: int) -> Named:
    without = c._text.get("mlp_only_layers") or []
    if not isinstance(without, list):
        raise _Unsaid("mlp_only_layers")
    every = c.count("decoder_sparse_step") or 1

    def feed(at: str, number: int) -> Named:
        if number in without or (number + 1) % every:
            return _mlp(at, c.hidden_size, c.intermediate_size)
        return _mixture(c, at)

    yield from _hybrid(c, heads, True, feed, ("qkvz", "ba"))


def _hybrid(
    c: _Sizes, heads: int, gated: bool, feed: Callable[[str, int], Named], projections: tuple[str, ...]
) -> Named:
    """Layers of the gated delta rule and of attention, each with `feed(prefix, number)`, and a head of the latter."""
    yield "model.norm", (c.hidden_size,)
    for i, kind in enumerate(c.kinds(c.num_hidden_layers)):
        at = f"model.layers.{i}"
        yield from _norms(c, at)
        yield from feed(f"{at}.mlp", i)
        if kind == "full_attention":
            yield from _attention(c, f"{at}.self_attn", gated)
            yield from _head_norms(c, f"{at}.self_attn")
        elif kind == "linear_attention":
            yield from _gated_delta(c, f"{at}.linear_attn", projections)
    if heads:
        yield "mtp.fc", (c.hidden_size, 2 * c.hidden_size)
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            yield f"mtp.{name}", (c.hidden_size,)
    for i in range(heads):
        yield from _norms(c, f"mtp.layers.{i}")
        yield from _attention(c, f"mtp.layers.{i}.self_attn", gated)
        yield from _head_norms(c, f"mtp.layers.{i}.self_attn")
        yield from feed(f"mtp.layers.{i}.mlp", i)


def _head_norms(c: _Sizes, at: str) -> Named:
    for name in ("q_norm", "k_norm"):
        yield f"{at}.{name}", (c.head,)


def _gated_delta(c: _Sizes, at: str, projections: tuple[str, ...]) -> Named:
    keys = c.linear_num_key_heads * c.linear_key_head_dim
    values = c.linear_num_value_heads * c.linear_value_head_dim
    rows = {"q": keys, "k": keys, "v": values, "z": values} | dict.fromkeys("ba", c.linear_num_value_heads)
    for name in projections:
        yield f"{at}.in_proj_{name}", (sum(rows[part] for part in name), c.hidden_size)
    yield f"{at}.out_proj", (c.hidden_size, values)
    yield f"{at}.conv1d", (2 * keys + values, 1, c.linear_conv_kernel_dim)
    yield f"{at}.norm", (c.linear_value_head_dim,)


def _dense_first(c: _Sizes, heads: int, attention: Callable[[str], Named]) -> Named:
    """Layers with `attention(prefix)`, MLPs in the first and experts behind them, and a head of the latter."""
    yield "model.norm", (c.hidden_size,)
    dense = min(c.count("first_k_dense_replace"), c.num_hidden_layers)
    for i in range(c.num_hidden_layers + heads):
        at = f"model.layers.{i}"
        yield from _norms(c, at)
        yield from attention(f"{at}.self_attn")
        if i < dense:
            yield from _mlp(f"{at}.mlp", c.hidden_size, c.intermediate_size)
        else:
            yield from _shared_and_routed(c, f"{at}.mlp")
        if i >= c.num_hidden_layers:
            yield from _behind_head(c, at)


def _deepseek(c: _Sizes, heads: int) -> Named:
    return _dense_first(c, heads, lambda at: _latent_attention(c, at))


def _latent_attention(c: _Sizes, at: str) -> Named:
    rope, nope, nh = c.qk_rope_head_dim, c.qk_nope_head_dim, c.num_attention_heads
    if c.count("q_lora_rank"):
        yield f"{at}.q_a_proj", (c.q_lora_rank, c.hidden_size)
        yield f"{at}.q_a_layernorm", (c.q_lora_rank,)
        yield f"{at}.q_b_proj", (nh * (nope + rope), c.q_lora_rank)
    else:
        yield f"{at}.q_proj", (nh * (nope + rope), c.hidden_size)
    yield f"{at}.kv_a_proj_with_mqa", (c.kv_lora_rank + rope, c.hidden_size)
    yield f"{at}.kv_a_layernorm", (c.kv_lora_rank,)
    yield f"{at}.kv_b_proj", (nh * (nope + c.v_head_dim), c.kv_lora_rank)
    yield f"{at}.o_proj", (c.hidden_size, nh * c.v_head_dim)


def _glm4_moe(c: _Sizes, heads: int) -> Named:
    def attention(at: str) -> Named:
        yield from _attention(c, at)
        if c.flag("use_qk_norm"):
            yield from _head_norms(c, at)

    return _dense_first(c, heads, attention)


def _shared_and_routed(c: _Sizes, at: str) -> Named:
    """DeepSeek-V3's mixture and GLM's: shared experts are one MLP."""
    yield f"{at}.gate", (c.n_routed_experts, c.hidden_size)
    if c.count("n_shared_experts"):
        yield from _mlp(f"{at}.shared_experts", c.hidden_size, c.n_shared_experts * c.moe_intermediate_size)
    for expert in range(c.n_routed_experts):
        yield from _mlp(f"{at}.experts.{expert}", c.hidden_size, c.moe_intermediate_size)


def _behind_head(c: _Sizes, at: str, infix: str = "") -> Named:
    yield f"{at}.eh_proj", (c.hidden_size, 2 * c.hidden_size)
    for name in ("enorm", "hnorm", f"{infix}shared_head.norm"):
        yield f"{at}.{name}", (c.hidden_size,)


def _step(c: _Sizes, heads: int) -> Named:
    text, count = c._text, c.num_hidden_layers + heads
    other, mixtures = text.get("attention_other_setting"), text.get("moe_layers_enum")
    kinds = text.get("layer_types")
    if not (isinstance(other, dict) and isinstance(mixtures, str) and isinstance(kinds, list) and len(kinds) >= count):
        raise _Unsaid("layer_types, moe_layers_enum or attention_other_setting")
    mixed = {each.strip() for each in mixtures.split(",")}
    yield "model.norm", (c.hidden_size,)
    for i, kind in enumerate(kinds[:count]):
        at = f"model.layers.{i}"
        a = _Sizes(text | other if kind == other.get("attention_type") else text)
        a = _Sizes(a._text | {"num_key_value_heads": a.num_attention_groups})
        yield from _norms(c, at)
        yield from _attention(a, f"{at}.self_attn")
        yield from _head_norms(a, f"{at}.self_attn")
        if c.flag("use_head_wise_attn_gate"):
            yield f"{at}.self_attn.g_proj", (a.num_attention_heads, c.hidden_size)
        if str(i) in mixed:
            yield from _stacked(c, at)
        else:
            yield from _mlp(f"{at}.mlp", c.hidden_size, c.intermediate_size)
        if i >= c.num_hidden_layers:
            yield from _behind_head(c, at, "transformer.")


def _stacked(c: _Sizes, at: str) -> Named:
    """Step's mixture, whose releases stack the experts of each projection."""
    yield f"{at}.moe.gate", (c.moe_num_experts, c.hidden_size)
    for name, shape in _mlp(f"{at}.moe", c.hidden_size, c.moe_intermediate_size):
        yield name, (c.moe_num_experts, *shape)
    yield from _mlp(f"{at}.share_expert", c.hidden_size, c.share_expert_dim)


_FAMILIES: dict[str, Callable[[_Sizes, int], Named]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "mimo": _mimo,
    "qwen3_5": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "qwen3_next": _qwen3_next,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4_moe,
    "step3p5": _step,
    "step3p7": _step,
}
