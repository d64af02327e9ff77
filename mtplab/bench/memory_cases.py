"""What memory bounds on a GPU, as a round of Qwen3.5-27B does it: quantising, cache, attention, delta rule, drafts.

Each case makes its operands, once it is asked to, counts the bytes that must move, and compares the kernel with torch's
reference on them. Knows nothing of clocks and tables.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mtplab.kernels.acceptance import emit_greedy
from mtplab.kernels.attention import attend_cache
from mtplab.kernels.delta_rule import delta_rule
from mtplab.kernels.kv_write import write_kv
from mtplab.kernels.launch import VARIABLE, target
from mtplab.kernels.quantize import quantize

__all__ = ["MemoryCase", "Sizes", "memory_cases"]

FORMATS = ("none", "int8", "int4", "fp8_e4m3", "fp8_e5m2")
# relative error of a whole output; outputs are BF16 or sums in another order
TOLERANCE = 5e-3


@dataclass(frozen=True)
class Sizes:
    """Of the model and its batch: by default a verification of 3 drafts by Qwen3.5-27B, 32 sequences of 4096 tokens."""

    batch: int = 32
    tokens: int = 4
    length: int = 4096
    hidden: int = 5120
    heads: int = 24
    kv_heads: int = 4
    head_dim: int = 256
    k_heads: int = 16
    v_heads: int = 48
    delta_dim: int = 128
    vocabulary: int = 248_320
    prompt: int = 4096  # rows of a pass that reads a prompt


@dataclass
class MemoryCase:
    """`call` does the work, which the same call does again; its outputs are what it returns or, where it writes to what
    was there before, what `written` says of it."""

    nbytes: float
    call: Callable[[], tuple[Tensor, ...] | None]
    written: Callable[[], tuple[Tensor, ...]] | None = None
    exact: bool = False  # the kernel promises the reference's bits

    def wrong(self) -> str | None:
        """What is wrong with the kernel's outputs; None where nothing is. Two runs must have the same bits, too."""
        got, again = self._outputs(), self._outputs()
        with _reference():
            expected = self._outputs()
        for a, b, c in zip(got, again, expected, strict=True):
            if not torch.equal(_bits(a), _bits(b)):
                return "two runs differ"
            if a.dtype == torch.int64 or self.exact:
                if not torch.equal(_bits(a), _bits(c)):
                    return "other bits than the reference's"
                continue
            a, c = a.float(), c.float()
            error = float((a - c).norm() / c.norm())
            if not error <= TOLERANCE:
                return f"relative error {error:.1e}, at most {TOLERANCE:.0e} is right"
        return None

    def _outputs(self) -> tuple[Tensor, ...]:
        returned = self.call()
        return returned if self.written is None else tuple(x.clone() for x in self.written())


def memory_cases(
    device: torch.device, sizes: Sizes | None = None, seed: int = 0
) -> Iterator[tuple[str, Callable[[], MemoryCase]]]:
    """Each case's name, and the call that makes it: its operands lie on the device only as long as it does, and those
    of a case that is not measured never do."""
    s = sizes or Sizes()
    g = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).bfloat16()

    e4m3 = torch.float8_e4m3fnuz if target(device).e4m3 == "fp8e4b8" else torch.float8_e4m3fn
    for m in (s.batch * s.tokens, s.prompt):
        yield f"quantise [{m}, {s.hidden}]", partial(_quantise, m, s, normal, e4m3)
    for form in FORMATS:
        yield f"write {form}", partial(_write, form, s, normal, device)
        for t in (1, s.tokens):
            yield f"attend {t} over {s.length} in {form}", partial(_attend, form, t, s, normal, device)
    yield f"delta rule, {s.tokens} tokens", partial(_delta, s, normal, g, device)
    yield f"accept {s.tokens - 1} greedy drafts", partial(_accept, s, normal, device)


def _quantise(m: int, s: Sizes, normal: Callable[..., Tensor], e4m3: torch.dtype) -> MemoryCase:
    x = normal(m, s.hidden)
    return MemoryCase(x.numel() * (3 + 4 / 128), lambda: quantize(x, 128, e4m3), exact=True)


def _accept(s: Sizes, normal: Callable[..., Tensor], device: torch.device) -> MemoryCase:
    logits = normal(s.batch, s.tokens, s.vocabulary)
    drafts = torch.zeros(s.batch, s.tokens - 1, dtype=torch.int64, device=device)
    drafts[::2] = logits[::2, :-1].float().argmax(-1)
    return MemoryCase(2 * logits.numel(), lambda: tuple(emit_greedy(drafts, logits)))


def _cache(form: str, s: Sizes, device: torch.device) -> tuple[Tensor, Tensor | None]:
    width = s.head_dim // 2 if form == "int4" else s.head_dim
    dtype = {"none": torch.bfloat16, "int8": torch.uint8, "int4": torch.uint8}.get(
        form, torch.float8_e4m3fn if form == "fp8_e4m3" else torch.float8_e5m2
    )
    shape = (2, s.batch, s.kv_heads, s.length + s.tokens)
    codes = torch.zeros(*shape, width, dtype=dtype, device=device)
    meta = torch.zeros(*shape, 2, dtype=torch.bfloat16, device=device) if form in ("int8", "int4") else None
    return codes, meta


def _row_bytes(codes: Tensor, meta: Tensor | None) -> float:
    return codes.shape[-1] * codes.dtype.itemsize + (4 if meta is not None else 0)


def _write(form: str, s: Sizes, normal: Callable[..., Tensor], device: torch.device) -> MemoryCase:
    codes, meta = _cache(form, s, device)
    k, v = (normal(s.batch, s.tokens, s.kv_heads, s.head_dim) for _ in range(2))
    positions = torch.arange(s.length, s.length + s.tokens, device=device).expand(s.batch, -1)
    rows = 2 * s.batch * s.tokens * s.kv_heads

    new = [x[:, :, :, s.length :] for x in (codes, meta) if x is not None]
    nbytes = rows * (2 * s.head_dim + _row_bytes(codes, meta))
    return MemoryCase(nbytes, lambda: write_kv(k, v, codes, meta, positions), lambda: tuple(new), True)


def _attend(form: str, t: int, s: Sizes, normal: Callable[..., Tensor], device: torch.device) -> MemoryCase:
    codes, meta = _cache(form, s, device)
    chunk = 512
    for start in range(0, s.length, chunk):
        stop = min(s.length, start + chunk)
        k, v = (normal(s.batch, stop - start, s.kv_heads, s.head_dim) for _ in range(2))
        write_kv(k, v, codes, meta, torch.arange(start, stop, device=device).expand(s.batch, -1))
    q = normal(s.batch, t, s.heads, s.head_dim)
    positions = torch.arange(s.length - t, s.length, device=device).expand(s.batch, -1)
    nbytes = 2 * s.batch * s.kv_heads * s.length * _row_bytes(codes, meta)

    def call() -> tuple[Tensor, ...]:
        return (attend_cache(q, codes, meta, positions, longest=s.length),)

    return MemoryCase(nbytes, call)


def _delta(s: Sizes, normal: Callable[..., Tensor], g: torch.Generator, device: torch.device) -> MemoryCase:
    b, t, d = s.batch, s.tokens, s.delta_dim
    q, k = (normal(b, t, s.k_heads, d) for _ in range(2))
    v = normal(b, t, s.v_heads, d)
    decay = -torch.rand(b, t, s.v_heads, generator=g, device=device)
    beta = torch.rand(b, t, s.v_heads, generator=g, device=device)
    state = torch.randn(b * s.v_heads, d, d, generator=g, device=device) * 0.1
    ring = torch.empty(t, *state.shape, device=device)

    outs: list[Tensor] = [v]

    def call() -> None:
        outs[0] = delta_rule(q, k, v, decay, beta, state, ring, normalize=True, scale=d**-0.5)

    return MemoryCase(4 * state.numel() * (1 + t), call, lambda: (outs[0], ring))


@contextmanager
def _reference() -> Iterator[None]:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "reference"
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
