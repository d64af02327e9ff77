"""What a layer keeps between passes: keys and values of the past, or the delta rule's state.

Knows nothing of rounds or acceptance. Layout decision: caches are contiguous, [b, h_kv, capacity, d]. A workbench's
batch and budget are known when a run starts and nothing is swapped or shared, so pages would buy nothing and would
cost a CPU a gather on every read; a paged kernel can address the same storage through a table of runs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mtplab.models.spec import CacheRows, DeltaSpec
from mtplab.quant.kv_codec import Codec, codec_of
from mtplab.quant.policy import QuantPolicy, Storage

if TYPE_CHECKING:
    from mtplab.quant.policy import Pair


@dataclass
class _Part:
    """Rows stored alike: of K and V, or of one of them where the two differ. Codes [sides, b, h_kv, capacity, d'], and
    meta [sides, b, h_kv, capacity, m] where rows have numbers of their own."""

    codec: Codec
    codes: Tensor
    meta: Tensor | None

    @property
    def held(self) -> list[Tensor]:
        return [self.codes] if self.meta is None else [self.codes, self.meta]

    def encode(self, rows: Tensor, meta_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Rows [sides·r, d] of all heads, the head fastest, as this part keeps them."""
        sides, heads = self.codes.shape[0], self.codes.shape[2]
        return self.codec.encode(rows.view(sides, -1, heads, rows.shape[-1]), meta_dtype)

    def decode(self, live: int, length: int, dtype: torch.dtype) -> Tensor:
        """[sides, b, h_kv, length, d] of what is stored."""
        codes, meta = (
            None if x is None else x[:, :live, :, :length].transpose(2, 3) for x in (self.codes, self.meta)
        )
        return self.codec.decode(codes, meta, dtype).transpose(2, 3)

    def picked(self, rows: Tensor, capacity: int | None = None) -> _Part:
        """These sequences, in this order, and their first `capacity` slots."""
        codes, meta = (None if x is None else x[..., :capacity, :] for x in (_movable(self.codes), self.meta))
        return _Part(
            self.codec,
            codes.index_select(1, rows).view(self.codes.dtype),
            None if meta is None else meta.index_select(1, rows),
        )


class KVCache:
    """Keys and values of one attention layer, stored as the policy says and read back before they are attended.

    Codes [sides, b, h_kv, capacity, d'] hold K and V where both are stored alike, else each has a tensor of its own
    (`parts`); where one row is both (`CacheRows.sides` 1) it is stored once, as K is. Where rows have numbers of their
    own (scale and zero, norms), meta [.., m] in the checkpoint's dtype lies beside them. Where codes are not what
    attention reads, a copy as read back is kept beside them, so that a slot is decoded once, when written, and not at
    every later step; memory accounts count the codes. Kernels read the codes: there the copy is only held while a
    prompt of several segments is read (`holding_values`).
    """

    def __init__(
        self,
        policy: QuantPolicy,
        batch: int,
        rows: CacheRows,
        capacity: int,
        dtype: torch.dtype,
        meta_dtype: torch.dtype,
        device: torch.device,
        kernels: bool = False,
        scales: Pair = (None, None),
    ):
        """`kernels`: decoding reads the codes themselves, so no copy is kept as read back. `scales`: of K and of V,
        float32 [1] or [h_kv], None for 1."""
        self.policy, self.dtype, self.meta_dtype = policy, dtype, meta_dtype
        self.rows = rows
        self.live = batch  # sequences that are read, the first ones; `shrink` makes them fewer than there is room for
        # what kernels multiply codes by
        self.factors = [1.0 if scale is None or scale.numel() > 1 else float(scale) for scale in scales]
        alike = policy.one_storage
        self.parts: list[_Part] = []
        for storage, scale in _stored(policy, scales[: rows.sides], device):
            codec = codec_of(storage, scale)
            shape = (rows.sides if alike else 1, batch, rows.heads, capacity)
            codes = torch.zeros(*shape, codec.code_shape(rows.dim), dtype=codec.code_dtype(dtype), device=device)
            meta = torch.zeros(*shape, storage.meta, dtype=meta_dtype, device=device) if storage.meta else None
            self.parts.append(_Part(codec, codes, meta))
        plain = alike and not policy.quantised
        self.values: Tensor | None = self.codes if plain else None
        if not plain and not kernels:
            self.values = self.empty_values()

    @property
    def codes(self) -> Tensor:
        """[sides, b, h_kv, capacity, d'], where K and V are stored alike."""
        assert len(self.parts) == 1, "K and V are stored apart"
        return self.parts[0].codes

    @property
    def meta(self) -> Tensor | None:
        """[sides, b, h_kv, capacity, m], where K and V are stored alike and rows have numbers of their own."""
        assert len(self.parts) == 1, "K and V are stored apart"
        return self.parts[0].meta

    @property
    def capacity(self) -> int:
        """Tokens that fit, per sequence."""
        return self.parts[0].codes.shape[3]

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store rows [sides·r, d] (K first, then V; the head fastest) at flat slots [sides·r] (see `slot_index`)."""
        share = rows.shape[0] // len(self.parts)
        for index, part in enumerate(self.parts):
            mine = slice(index * share, (index + 1) * share)
            codes, meta = part.encode(rows[mine], self.meta_dtype)
            # a part of V alone begins where K's slots end
            at = slots[mine] - index * math.prod(part.codes.shape[1:4]) if index else slots[mine]
            _flat(part.codes).index_copy_(0, at, _movable(codes).view(share, -1))
            if part.meta is not None:
                _flat(part.meta).index_copy_(0, at, meta.view(share, -1))
            if self.values is not None and self.values is not part.codes:
                back = part.codec.decode(codes, meta, self.dtype)
                _flat(self.values).index_copy_(0, slots[mine], back.reshape(share, -1))

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """K and V [b, h_kv, length, d] of the first `length` slots, as stored: the same tensor twice where one row is
        both."""
        if self.values is not None:
            found = list(self.values[:, : self.live, :, :length])
        else:
            found = [rows for part in self.parts for rows in part.decode(self.live, length, self.dtype)]
        return found[0], found[-1]

    @contextmanager
    def holding_values(self) -> Iterator[None]:
        """Have a copy as read back beside empty codes, as long as this lasts, where there is none of its own."""
        own = self.values is not None
        if not own:
            self.values = self.empty_values()
        try:
            yield
        finally:
            if not own:
                self.values = None

    def empty_values(self) -> Tensor:
        """Memory for every slot as read back [sides, b, h_kv, capacity, d]."""
        codes = self.parts[0].codes
        return torch.zeros(self.rows.sides, *codes.shape[1:4], self.rows.dim, dtype=self.dtype, device=codes.device)

    def select(self, rows: Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        self._take(self, rows, None)

    def shrink(self, rows: Tensor) -> Tensor:
        """Keep these sequences, growing numbers, by moving the last of them into the gaps; the room stays what it was.
        Returns their new order. Where most stay, this copies much less than `select`; kernels do not know of it."""
        count = len(rows)
        order = torch.arange(count, device=rows.device)
        inside = rows[rows < count]
        free = torch.ones(count, dtype=torch.bool, device=rows.device)
        free[inside] = False
        gaps, moved = free.nonzero()[:, 0], rows[len(inside) :]
        order[gaps] = moved
        for x in map(_movable, self._held()):
            x.index_copy_(1, gaps, x.index_select(1, moved))
        self.live = count
        return order

    @property
    def room(self) -> int:
        """Sequences that there is storage for."""
        return self.parts[0].codes.shape[1]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token of one sequence takes here, copies as read back included."""
        return sum(x.nbytes for x in self._held()) // (self.room * self.capacity)

    def fork(self, rows: Tensor, capacity: int) -> KVCache:
        """A cache of its own with these sequences, a row as often as it is named, and the first `capacity` slots."""
        other = copy.copy(self)
        self._take(other, rows, capacity)
        return other

    def _take(self, other: KVCache, rows: Tensor, capacity: int | None) -> None:
        """Give `other`, which may be this one, these sequences of this."""
        plain = self.values is self.parts[0].codes
        values = self.values
        other.parts = [part.picked(rows, capacity) for part in self.parts]
        if values is not None:
            other.values = other.codes if plain else values[..., :capacity, :].index_select(1, rows)
        other.live = len(rows)

    def _held(self) -> list[Tensor]:
        """Every tensor, once."""
        all_of_them = [x for part in self.parts for x in part.held] + ([] if self.values is None else [self.values])
        return list({id(x): x for x in all_of_them}.values())


def _stored(policy: QuantPolicy, scales: Pair, device: torch.device) -> list[tuple[Storage, Tensor | None]]:
    """The storage and the scales of each part of a cache: one for K and V, or one each."""
    if not policy.one_storage:
        return [
            (side.storage, None if scale is None else scale.to(device)[None])
            for side, scale in zip(policy.sides, scales, strict=True)
        ]
    if all(scale is None for scale in scales):
        return [(policy.k.storage, None)]
    given = [torch.ones(1) if scale is None else scale for scale in scales]
    width = max(scale.numel() for scale in given)
    return [(policy.k.storage, torch.stack([scale.to(device).expand(width) for scale in given]))]


def _flat(x: Tensor) -> Tensor:
    return _movable(x).view(-1, x.shape[-1])


def _movable(x: Tensor) -> Tensor:
    """FP8 as bytes: torch's index operators know no FP8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def slot_base(batch: int, kv_heads: int, capacity: int, device: torch.device, sides: int = 2) -> Tensor:
    """[sides, b, 1, h_kv]: the flat index of slot 0 of every sequence's heads, in K and in V."""
    return torch.arange(sides * batch * kv_heads, device=device).mul_(capacity).view(sides, batch, 1, kv_heads)


def slot_index(positions: Tensor, base: Tensor) -> Tensor:
    """Flat indices [sides·b·t·h_kv] into a cache, for K and then V rows in (b, t, h) order.

    positions [b, t] int64: the slot of each token; base: `slot_base` of the cache's shape.
    """
    return (positions.unsqueeze(-1) + base).flatten()


class DeltaState:
    """State of one gated-delta-rule layer: conv [b, kernel−1, channels] inputs and recurrent [b·heads, dk, dv].

    A pass over t > 1 tokens that may be rejected leaves the state alone and keeps what every prefix would make of it;
    `commit` then takes one prefix per sequence. Nothing of a rejected token survives.
    """

    def __init__(self, batch: int, spec: DeltaSpec, dtype: torch.dtype, device: torch.device):
        self.heads = spec.v_heads
        self.conv = torch.zeros(batch, spec.conv_kernel - 1, spec.conv_dim, dtype=dtype, device=device)
        size = (batch * spec.v_heads, spec.k_dim, spec.v_dim)
        self.recurrent = torch.zeros(size, dtype=torch.float32, device=device)
        self._window: Tensor | None = None
        self._steps: Tensor | None = None

    def step_buffer(self, t: int) -> Tensor:
        """Room [t, b·heads, dk, dv] for the recurrent state after each of t tokens."""
        if self._steps is None or self._steps.shape[0] < t or self._steps.shape[1] != self.recurrent.shape[0]:
            self._steps = torch.empty(t, *self.recurrent.shape, dtype=torch.float32, device=self.recurrent.device)
        return self._steps[:t]

    def keep_window(self, window: Tensor) -> None:
        """Remember the convolution's inputs [b, kernel−1+t, channels] of this pass, the old state first."""
        self._window = window

    def commit(self, keep: Tensor, uniform: int | None) -> None:
        """Make the state what it is after the first keep[i] ≥ 1 tokens of the last pass; `uniform` if all are equal."""
        if self._window is None:
            return  # a pass over one token has already moved the state
        width = self.conv.shape[1]
        if uniform is not None:
            self.conv.copy_(self._window[:, uniform : uniform + width])
            # no copy: the next pass reads this slot before it writes any later one, and may write slot 0 in place
            self.recurrent = self._steps[uniform - 1]
        else:
            b = self.conv.shape[0]
            at = keep[:, None] + torch.arange(width, device=keep.device)
            self.conv = self._window[torch.arange(b, device=keep.device)[:, None], at]
            steps = self._steps.view(self._steps.shape[0], b, self.heads, *self._steps.shape[2:])
            self.recurrent = steps[keep - 1, torch.arange(b, device=keep.device)].flatten(0, 1)
        self._window = None

    def select(self, rows: Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        self.conv = self.conv.index_select(0, rows)
        shaped = self.recurrent.view(-1, self.heads, *self.recurrent.shape[1:])
        self.recurrent = shaped.index_select(0, rows).flatten(0, 1)
        self._window = None
        if self._steps is not None:
            steps, self._steps = len(self._steps), None
            self.step_buffer(steps)
