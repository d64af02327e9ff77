"""One pass over t tokens of b sequences: everything the layers share, worked out once.

Knows nothing of weights. Positions are absolute; slot p of a cache holds the token at position p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtplab.models.attend import attention_bias, padded_key_length
from mtplab.models.cache import slot_base, slot_index
from mtplab.models.config import ModelConfig
from mtplab.models.rows import pad_rows, row_count


@dataclass(frozen=True)
class Pass:
    """Shapes, rotations, masks and cache slots of one pass.

    Row-wise layers work on the true tokens only, one row each; mixers on [b, t]. `valid` [b] is the number of true
    tokens of each sequence in a prompt segment and `places` where they lie in (b, t) order; both are None when
    decoding, where every token is true. Exact arithmetic works on `padded` rows, the next multiple of 8.
    """

    batch: int
    tokens: int
    exact: bool
    cos: Tensor  # [b, t, 1, rotary]
    sin: Tensor  # [b, t, 1, rotary], the first half negated
    slots: Tensor | None  # [2·b·t·h_kv], None for kernels
    key_length: int
    bias: Tensor | None  # [b, t·group, key_length]
    valid: Tensor | None
    kernels: bool  # decoding, with Triton's kernels
    positions: Tensor  # [b, t]
    longest: int  # one more than the largest position
    most_tokens: int  # of a sequence, in any decoding pass of the run
    places: Tensor | None  # [rows]

    @property
    def rows(self) -> int:
        """True tokens."""
        return self.batch * self.tokens if self.places is None else self.places.shape[0]

    @property
    def padded(self) -> int:
        """Rows of every matrix of the pass."""
        return row_count(self.rows, self.exact)

    def spread(self, x: Tensor) -> Tensor:
        """Rows [m, n] → [b, t, n], zero where there is no token."""
        x = x[: self.rows]
        if self.places is not None:
            x = x.new_zeros(self.batch * self.tokens, x.shape[-1]).index_copy_(0, self.places, x)
        return x.view(self.batch, self.tokens, -1)

    def gather(self, x: Tensor) -> Tensor:
        """[b, t, n] → rows [m, n] of the true tokens, padding rows zero."""
        x = x.flatten(0, 1)
        if self.places is not None:
            x = x.index_select(0, self.places)
        return pad_rows(x, self.padded)


class PassMaker:
    """Makes the passes of one run: holds the rotary table, so that a pass only looks its rows up."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        most_tokens: int = 1,
        kernels: bool = False,
    ):
        """`most_tokens`: of a sequence in any decoding pass; kernels then treat a token alike in all of them.
        `kernels`: decoding passes run Triton's (`choice.decodes_with_kernels`)."""
        self.most_tokens, self.kernels = most_tokens, kernels
        self.config, self.capacity, self.device = config, capacity, device
        half = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=device)
        inverse = 1.0 / (config.rope_theta ** (half / config.rotary_dim))
        angle = torch.arange(capacity, dtype=torch.float32, device=device)[:, None] * inverse
        cos, sin = angle.cos(), angle.sin()
        # x·cos + swap_halves(x)·sin, with the sign of the rotation folded into the table: [capacity, 2, 1, rotary]
        self._rotary = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1).to(dtype).unsqueeze(2)
        self._base: Tensor | None = None
        self._keys = torch.arange(capacity, device=device)
        self._dtype = dtype

    def make(
        self,
        positions: Tensor,
        longest: int,
        exact: bool,
        valid: Tensor | None = None,
        key_length: int | None = None,
        room: int | None = None,
    ) -> Pass:
        """A pass over tokens at `positions` [b, t] int64, the largest of which is `longest` − 1.

        `key_length` overrides how many cache slots are read (compiled steps read whole buckets); `room` is how many
        sequences the cache has storage for, where those are more than b (`KVCache.shrink`).
        """
        b, t = positions.shape
        length = key_length or min(padded_key_length(longest, exact), self.capacity)
        kernels = self.kernels and valid is None  # which find their own way by positions
        bias = slots = None
        # a single query sees every slot that is read, unless whole buckets are
        if not kernels and not (b == 1 and t == 1 and length == longest and key_length is None):
            group = self.config.num_heads // self.config.num_kv_heads
            bias = attention_bias(positions, self._keys[:length], group, self._dtype)
        if not kernels:
            if self._base is None or self._base.shape[1] != (room or b):
                self._base = slot_base(room or b, self.config.num_kv_heads, self.capacity, self.device)
            slots = slot_index(positions, self._base[:, :b])
        cos, sin = self._rotary[positions].unbind(2)
        return Pass(
            batch=b,
            tokens=t,
            exact=exact,
            cos=cos,
            sin=sin,
            slots=slots,
            key_length=length,
            bias=bias,
            valid=valid,
            kernels=kernels,
            positions=positions,
            longest=longest,
            most_tokens=max(self.most_tokens, t),
            places=None if valid is None else (self._keys[:t] < valid[:, None]).flatten().nonzero().flatten(),
        )
