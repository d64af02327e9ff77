"""How a KV cache is stored: one object per `quant_policy`, used by the runner and the memory account alike.

Names and numbers are lmdeploy's (`QuantPolicy` in lmdeploy/messages.py); vLLM's and SGLang's dtype names are aliases.
Knows nothing of models or caches: a policy encodes rows of heads and reads them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.quant.kv_codec import Codec


@dataclass(frozen=True)
class QuantPolicy:
    """One way of storing K and V. `bits` per element; `meta` = numbers kept beside each head's row (scale, zero)."""

    name: str
    number: int
    bits: int | None
    meta: int
    summary: str

    @property
    def codec(self) -> Codec:
        """The encoder and reader of this policy (imports torch)."""
        from mtplab.quant.kv_codec import CODECS

        return CODECS[self.name]

    def bytes_per_token(self, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        """Bytes that one token's K and V take in one layer: codes plus scales and zeros.

        `dtype_bytes` is the size of the checkpoint's dtype, in which scales and zeros are kept, and unquantised values
        are counted (a run in another compute dtype holds them in that).
        """
        bits = dtype_bytes * 8 if self.bits is None else self.bits
        return 2 * kv_heads * (head_dim * bits // 8 + self.meta * dtype_bytes)

    def __str__(self) -> str:
        return self.name


POLICIES: dict[str, QuantPolicy] = {
    p.name: p
    for p in (
        QuantPolicy("none", 0, None, 0, "unquantised"),
        QuantPolicy("int4", 4, 4, 2, "asymmetric 4 bit, per token and KV head"),
        QuantPolicy("int8", 8, 8, 2, "asymmetric 8 bit, per token and KV head"),
        QuantPolicy("fp8_e4m3", 16, 8, 0, "E4M3, scale 1"),
        QuantPolicy("fp8_e5m2", 17, 8, 0, "E5M2, scale 1"),
    )
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
    """The policy meant by a name, an alias, lmdeploy's number or a policy itself. Raises ConfigError otherwise."""
    if isinstance(policy, QuantPolicy):
        return policy
    if isinstance(policy, int) and not isinstance(policy, bool):
        found = next((p for p in POLICIES.values() if p.number == policy), None)
    else:
        text = policy.strip().lower() if isinstance(policy, str) else ""
        found = POLICIES.get(_ALIASES.get(text, text))
        if found is None and text.isdigit():
            return resolve_policy(int(text))
    if found is None:
        known = ", ".join(f"{p.name} ({p.number})" for p in POLICIES.values())
        raise ConfigError(
            f"unknown quant_policy {policy!r}; expected one of {known}, or an alias: {', '.join(_ALIASES)}"
        )
    return found
