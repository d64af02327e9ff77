"""What a layer keeps between passes: keys and values of the past, or the delta rule's state.

Knows nothing of rounds or acceptance. Layout decision: caches are contiguous, [b, h_kv, capacity, d]. A workbench's
batch and budget are known when a run starts and nothing is swapped or shared, so pages would buy nothing and would
cost a CPU a gather on every read; a paged kernel can address the same storage through a table of runs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from mtplab.quant.policy import QuantPolicy


class KVCache:
    """Keys and values of one attention layer, stored as the policy says and read back before they are attended.

    Codes [2, b, h_kv, capacity, d'] hold K and V; integer policies add meta [2, b, h_kv, capacity, 2] (scale, zero) in
    the checkpoint's dtype. Where codes are not what attention reads, a copy as read back is kept beside them, so that a
    slot is decoded once, when written, and not at every later step; memory accounts count the codes. Kernels read the
    codes: there the copy is only held while a prompt of several segments is read (`holding_values`).
    """

    def __init__(
        self,
        policy: QuantPolicy,
        batch: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        meta_dtype: torch.dtype,
        device: torch.device,
        kernels: bool = False,
    ):
        """`kernels`: decoding reads the codes themselves, so no copy is kept as read back."""
        self.policy, self.codec, self.dtype, self.meta_dtype = policy, policy.codec, dtype, meta_dtype
        self.head_dim = head_dim
        self.live = batch  # sequences that are read, the first ones; `shrink` makes them fewer than there is room for
        shape = (2, batch, kv_heads, capacity)
        self.codes = torch.zeros(
            *shape, self.codec.code_shape(head_dim), dtype=self.codec.code_dtype(dtype), device=device
        )
        self.meta = torch.zeros(*shape, 2, dtype=meta_dtype, device=device) if policy.meta else None
        plain = self.codes.dtype == dtype and policy.meta == 0
        self.values: Tensor | None = self.codes if plain else None
        if not plain and not kernels:
            self.values = self.empty_values()

    @property
    def capacity(self) -> int:
        """Tokens that fit, per sequence."""
        return self.codes.shape[3]

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Store rows [2·r, d] (K first, then V) at flat slots [2·r] (see `slot_index`)."""
        codes, meta = self.codec.encode(rows, self.meta_dtype)
        self._flat(self.codes).index_copy_(0, slots, _movable(codes))
        if self.values is not None and self.values is not self.codes:
            self._flat(self.values).index_copy_(0, slots, self.codec.decode(codes, meta, self.dtype))
        if self.meta is not None:
            self._flat(self.meta).index_copy_(0, slots, meta)

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """K and V [b, h_kv, length, d] of the first `length` slots, as stored."""
        if self.values is not None:
            return self.values[0, : self.live, :, :length], self.values[1, : self.live, :, :length]
        meta = None if self.meta is None else self.meta[:, : self.live, :, :length, :]
        keys, values = self.codec.decode(self.codes[:, : self.live, :, :length, :], meta, self.dtype)
        return keys, values

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
        """Memory for every slot as read back [2, b, h_kv, capacity, d]."""
        return torch.zeros(*self.codes.shape[:4], self.head_dim, dtype=self.dtype, device=self.codes.device)

    def select(self, rows: Tensor) -> None:
        """Keep these sequences of the batch, in this order."""
        plain = self.values is self.codes
        self.codes = _movable(self.codes).index_select(1, rows).view(self.codes.dtype)
        if self.values is not None:
            self.values = self.codes if plain else self.values.index_select(1, rows)
        if self.meta is not None:
            self.meta = self.meta.index_select(1, rows)
        self.live = len(rows)

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
        held = {id(x): x for x in (self.codes, self.values, self.meta) if x is not None}
        for x in map(_movable, held.values()):
            x.index_copy_(1, gaps, x.index_select(1, moved))
        self.live = count
        return order

    @property
    def room(self) -> int:
        """Sequences that there is storage for."""
        return self.codes.shape[1]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one token of one sequence takes here, copies as read back included."""
        held = {id(x): x for x in (self.codes, self.values, self.meta) if x is not None}
        tokens = self.codes.shape[1] * self.capacity
        return sum(x.nbytes for x in held.values()) // tokens

    def fork(self, rows: Tensor, capacity: int) -> KVCache:
        """A cache of its own with these sequences, a row as often as it is named, and the first `capacity` slots."""
        other = copy.copy(self)
        other.live = len(rows)
        plain = self.values is self.codes
        other.codes = _movable(self.codes[..., :capacity, :]).index_select(1, rows).view(self.codes.dtype)
        if self.values is not None:
            other.values = other.codes if plain else self.values[..., :capacity, :].index_select(1, rows)
        if self.meta is not None:
            other.meta = self.meta[..., :capacity, :].index_select(1, rows)
        return other

    @staticmethod
    def _flat(x: Tensor) -> Tensor:
        return _movable(x).view(-1, x.shape[-1])


def _movable(x: Tensor) -> Tensor:
    """FP8 as bytes: torch's index operators know no FP8."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def slot_base(batch: int, kv_heads: int, capacity: int, device: torch.device) -> Tensor:
    """[2, b, 1, h_kv]: the flat index of slot 0 of every sequence's heads, in K and in V."""
    return torch.arange(2 * batch * kv_heads, device=device).mul_(capacity).view(2, batch, 1, kv_heads)


def slot_index(positions: Tensor, base: Tensor) -> Tensor:
    """Flat indices [2·b·t·h_kv] into a cache, for K and then V rows in (b, t, h) order.

    positions [b, t] int64: the slot of each token; base: `slot_base` of the cache's shape.
    """
    return (positions.unsqueeze(-1) + base).flatten()


class DeltaState:
    """State of one gated-delta-rule layer: conv [b, kernel−1, channels] inputs and recurrent [b·heads, dk, dv].

    A pass over t > 1 tokens that may be rejected leaves the state alone and keeps what every prefix would make of it;
    `commit` then takes one prefix per sequence. Nothing of a rejected token survives.
    """

    def __init__(
        self,
        batch: int,
        heads: int,
        dk: int,
        dv: int,
        kernel: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.heads = heads
        self.conv = torch.zeros(batch, kernel - 1, channels, dtype=dtype, device=device)
        self.recurrent = torch.zeros(batch * heads, dk, dv, dtype=torch.float32, device=device)
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
