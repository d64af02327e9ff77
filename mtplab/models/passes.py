"""One pass over t tokens of b sequences: everything the layers share, worked out once.

Knows nothing of weights. Positions are absolute; slot p of a cache holds the token at position p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtplab.models.attend import attention_bias, padded_key_length
from mtplab.models.cache import slot_base, slot_index
from mtplab.models.rotary import rotary_table
from mtplab.models.rows import pad_rows, row_count
from mtplab.models.spec import Geometry, ModelConfig


@dataclass(frozen=True)
class View:
    """What attention layers of one geometry see of a pass."""

    cos: Tensor  # [b, t, 1, rotary]
    sin: Tensor  # [b, t, 1, rotary], negated at the first feature of each pair
    slots: Tensor | None  # [sides·b·t·h_kv], None for kernels
    bias: Tensor | None  # [b, t·group, key_length]


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
    views: tuple[View, ...]  # one for each of the model's geometries
    key_length: int
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
        self.geometries, self.capacity, self.device, self._dtype = config.geometries, capacity, device, dtype
        tables = {each.rotary: rotary_table(each.rotary, capacity, dtype, device) for each in self.geometries}
        self._rotary = [tables[each.rotary] for each in self.geometries]
        self._bases: list[Tensor] = []
        self._keys = torch.arange(capacity, device=device)

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
        # a single query sees every slot that is read, unless whole buckets are
        whole = b == 1 and t == 1 and length == longest and key_length is None
        if not kernels and (not self._bases or self._bases[0].shape[1] != (room or b)):
            shapes = [each.rows for each in self.geometries]
            self._bases = [slot_base(room or b, r.heads, self.capacity, self.device, r.sides) for r in shapes]
        views = []
        for i, geometry in enumerate(self.geometries):
            cos, sin = self._rotary[i][positions].unbind(2)
            views.append(
                View(
                    cos,
                    sin,
                    None if kernels else slot_index(positions, self._bases[i][:, :b]),
                    None if kernels else self._bias(geometry, positions, length, longest, whole),
                )
            )
        return Pass(
            batch=b,
            tokens=t,
            exact=exact,
            views=tuple(views),
            key_length=length,
            valid=valid,
            kernels=kernels,
            positions=positions,
            longest=longest,
            most_tokens=max(self.most_tokens, t),
            places=None if valid is None else (self._keys[:t] < valid[:, None]).flatten().nonzero().flatten(),
        )

    def _bias(self, each: Geometry, positions: Tensor, length: int, longest: int, whole: bool) -> Tensor | None:
        if whole and (each.window is None or longest <= each.window):
            return None
        return attention_bias(positions, self._keys[:length], each.group, self._dtype, each.window)
