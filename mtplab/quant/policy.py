"""How a KV cache is stored: one object per `quant_policy`, used by the runner and the memory account alike.

A policy has one name, which rows, hashes, options and widgets use:

    int8                          K and V alike
    int8/int4                     K, then V
    fp8_e4m3:calibrated           FP8 with a scale for K and one for V in every layer (`calibrated-head`: in every KV
                                  head), from texts that are given; `:checkpoint` takes the file's own scales
    int8@3+7                      layers 3 and 7 of the target are kept unquantised

Names and numbers are lmdeploy's (`QuantPolicy` in lmdeploy/messages.py); vLLM's and SGLang's dtype names are aliases,
and layers are counted as vLLM's `--kv-cache-dtype-skip-layers` counts them. Knows nothing of models or caches.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    # of a layer: the scales of K and of V, float32 [1] or [h_kv], None where there are none
    Pair = tuple[Tensor | None, Tensor | None]

__all__ = ["GRAMMAR", "POLICIES", "SCALES", "QuantPolicy", "Side", "Storage", "resolve_policy"]

GRAMMAR = "a name, K/V as in int8/int4, scales as in fp8_e4m3:calibrated, layers kept unquantised as in int8@3+7"
SCALES = ("calibrated", "calibrated-head", "checkpoint")


@dataclass(frozen=True)
class Storage:
    """One way of storing rows of K or of V. `bits` per element, None as they are; `meta`: numbers kept beside a row."""

    name: str
    bits: int | None
    meta: int = 0

    @property
    def float8(self) -> bool:
        """Whether codes are FP8 numbers, which a scale may go with."""
        return self.name.startswith("fp8")

    def check_head_dim(self, d: int) -> None:
        """Raises ConfigError where rows of d values cannot be stored so."""
        if self.name == "turboquant" and (d < 4 or d & (d - 1)):
            raise ConfigError(
                f"quant_policy {self.name} rotates rows of a power of two from 4 on, but head_dim is {d}; use int4 or "
                "int8"
            )
        if self.name == "int4" and d % 2:
            raise ConfigError(f"quant_policy {self.name} packs pairs, but head_dim is {d}; use int8")


@dataclass(frozen=True)
class Side:
    """How K, or V, is stored, and where its scales come from (one of SCALES, or None)."""

    storage: Storage
    scales: str | None = None

    def __str__(self) -> str:
        return self.storage.name if self.scales is None else f"{self.storage.name}:{self.scales}"


@dataclass(frozen=True)
class QuantPolicy:
    """A cache policy. `kept`: layers of the target that are not quantised; `scales`: by layer, where there are any
    (`with_scales`), which are no part of what the policy is called."""

    k: Side
    v: Side
    kept: tuple[int, ...] = ()
    scales: Mapping[int, Pair] | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The one text that means this policy."""
        k, v = str(self.k), str(self.v)
        both = k if k == v else f"{k}/{v}"
        return f"{both}@{'+'.join(map(str, self.kept))}" if self.kept else both

    @property
    def sides(self) -> tuple[Side, Side]:
        """K and V."""
        return self.k, self.v

    @property
    def one_storage(self) -> bool:
        """Whether K and V are stored alike, scales aside: their codes then lie in one tensor."""
        return self.k.storage == self.v.storage

    @property
    def quantised(self) -> bool:
        """Whether anything is."""
        return any(side.storage.bits is not None for side in self.sides)

    @property
    def calibrated(self) -> bool:
        """Whether it needs scales that are measured on texts."""
        return any((side.scales or "").startswith("calibrated") for side in self.sides)

    @property
    def summary(self) -> str:
        """What it does, in a few words."""
        words = [_side_words(side, which) for side, which in zip(self.sides, "KV", strict=True)]
        said = words[0] if words[0] == words[1] else f"K {words[0]}; V {words[1]}"
        if self.kept:
            said += f"; layer{'s' * (len(self.kept) > 1)} {', '.join(map(str, self.kept))} unquantised"
        return said

    def at(self, layer: int) -> QuantPolicy:
        """What a layer of the target gets: this without `kept`, or none."""
        if layer in self.kept:
            return POLICIES["none"]
        return replace(self, kept=()) if self.kept else self

    @property
    def everywhere(self) -> QuantPolicy:
        """The same with no layer kept, which a draft that follows its target has: its layers are other ones."""
        return replace(self, kept=())

    def scales_of(self, layer: int) -> Pair:
        """The scales of K and V of a layer. Raises ConfigError where it needs some that nobody has given."""
        found = (self.scales or {}).get(layer, (None, None))
        for side, scale in zip(self.sides, found, strict=True):
            if side.scales and scale is None:
                raise ConfigError(f"quant_policy {self.name} has no {side.scales} scales for layer {layer} here")
        return found

    def with_scales(self, scales: Mapping[int, Pair]) -> QuantPolicy:
        """The same with these scales by layer."""
        return replace(self, scales=scales)

    def bytes_per_token(self, kv_heads: int, head_dim: int, dtype_bytes: int, sides: int = 2) -> int:
        """Bytes that one token's K and V take in one layer that is not kept: codes, and what lies beside each row.

        `sides` 1: one row serves as both (MLA), stored as K is.

        `dtype_bytes` is the size of the checkpoint's dtype, in which scales, zeros and norms are kept, and unquantised
        values are counted (a run in another compute dtype holds them in that). FP8's scales are a layer's, not a
        token's, and are not counted.
        """
        sizes = ((side.storage.bits or dtype_bytes * 8, side.storage.meta) for side in self.sides[:sides])
        return sum(kv_heads * (head_dim * bits // 8 + meta * dtype_bytes) for bits, meta in sizes)

    def __str__(self) -> str:
        return self.name


# (name, lmdeploy's number, K, V)
_TABLE = (
    ("none", 0, Storage("none", None), None),
    ("int4", 4, Storage("int4", 4, 2), None),
    ("int8", 8, Storage("int8", 8, 2), None),
    ("fp8_e4m3", 16, Storage("fp8_e4m3", 8), None),
    ("fp8_e5m2", 17, Storage("fp8_e5m2", 8), None),
    # the norms of the row and of what the centroids leave for K, the row's for V
    ("turboquant", 42, Storage("turboquant", 4, 2), Storage("turboquant", 2, 1)),
)
_STORED = {name: (k, v or k) for name, _, k, v in _TABLE}
_NUMBERS = {number: name for name, number, _, _ in _TABLE}
POLICIES: dict[str, QuantPolicy] = {name: QuantPolicy(Side(k), Side(v)) for name, (k, v) in _STORED.items()}

_WORDS = {
    "none": ("unquantised", "unquantised"),
    "int4": ("asymmetric 4 bit, per token and KV head",) * 2,
    "int8": ("asymmetric 8 bit, per token and KV head",) * 2,
    "fp8_e4m3": ("E4M3",) * 2,
    "fp8_e5m2": ("E5M2",) * 2,
    "turboquant": ("rotated, 3 bit and a sign", "rotated, 2 bit"),
}
_SCALE_WORDS = {
    None: "scale 1",
    "calibrated": "a calibrated scale per layer",
    "calibrated-head": "a calibrated scale per KV head",
    "checkpoint": "the checkpoint's own scales",
}

# vLLM's --kv-cache-dtype and SGLang's --kv-cache-dtype spellings of the same storage
_ALIASES = {
    "auto": "none",
    "bf16": "none",
    "bfloat16": "none",
    "fp8": "fp8_e4m3",
    "fp8e4m3": "fp8_e4m3",
    "fp8_e4m3fn": "fp8_e4m3",
    "fp8e5m2": "fp8_e5m2",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4",
}


def resolve_policy(policy: str | int | QuantPolicy) -> QuantPolicy:
    """The policy meant by a text, an alias, lmdeploy's number or a policy itself; texts that mean the same give the
    same policy. Raises ConfigError otherwise."""
    if isinstance(policy, QuantPolicy):
        return policy
    if isinstance(policy, int) and not isinstance(policy, bool):
        if policy not in _NUMBERS:
            raise _unknown(policy)
        return POLICIES[_NUMBERS[policy]]
    if not isinstance(policy, str):
        raise _unknown(policy)
    text, at, layers = policy.strip().lower().partition("@")
    names = text.split("/")
    if len(names) > 2:
        raise ConfigError(f"quant_policy {policy!r:.60} has {len(names)} parts; expected one, or K/V as in int8/int4")
    sides = [_side(names[0], 0, policy), _side(names[-1], 1, policy)]
    found = QuantPolicy(*sides, _layers(layers, policy) if at else ())
    if found.kept and not found.quantised:
        raise ConfigError(f"quant_policy {policy!r:.60} keeps layers unquantised of a cache that is; use none")
    return found


def _side(text: str, which: int, policy: str) -> Side:
    name, colon, scales = (part.strip() for part in text.partition(":"))
    if re.fullmatch("[0-9]{1,3}", name):
        name = _NUMBERS.get(int(name), name)
    name = _ALIASES.get(name, name)
    if name not in _STORED:
        raise _unknown(policy, name)
    storage = _STORED[name][which]
    if not colon:
        return Side(storage)
    if not storage.float8:
        raise ConfigError(
            f"quant_policy {policy!r:.60} gives {name} scales ({scales!r:.40}); only fp8_e4m3 and fp8_e5m2 take any: "
            f"use {name}"
        )
    if scales not in SCALES:
        known = ", ".join(SCALES)
        raise ConfigError(f"quant_policy {policy!r:.60} asks for scales {scales!r:.40}; expected one of {known}")
    if scales == "checkpoint" and name != "fp8_e4m3":
        raise ConfigError(
            f"quant_policy {policy!r:.60}: a checkpoint's scales are those of E4M3; use fp8_e4m3:checkpoint"
        )
    return Side(storage, scales)


def _layers(text: str, policy: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[0-9]{1,4}(\+[0-9]{1,4})*", text):
        raise ConfigError(
            f"quant_policy {policy!r:.60} keeps layers {text!r:.40}; expected their numbers, as in int8@3+7"
        )
    return tuple(sorted({int(part) for part in text.split("+")}))


def _unknown(policy: object, name: object = None) -> ConfigError:
    known = ", ".join(f"{each} ({number})" for number, each in _NUMBERS.items())
    part = f" (its part {name!r:.40})" if name is not None and name != policy else ""
    other = isinstance(policy, str) and "turboquant_" in policy
    hint = "; vLLM's turboquant_* store other codes and are not among them" if other else ""
    return ConfigError(
        f"unknown quant_policy {_shown(policy)}{part}; expected one of {known}, or an alias: {', '.join(_ALIASES)}; or "
        f"{GRAMMAR.removeprefix('a name, ')}{hint}"
    )


def _shown(value: object) -> str:
    # Python refuses to spell whole numbers of more than 4300 digits
    return f"{value!r:.60}" if not isinstance(value, int) or abs(value) < 1 << 64 else "a number beyond 64 bits"


def _side_words(side: Side, which: str) -> str:
    words = _WORDS[side.storage.name]["KV".index(which)]
    return f"{words}, {_SCALE_WORDS[side.scales]}" if side.storage.float8 else words
