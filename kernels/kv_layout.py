"""How a KV cache lies in memory, and how one is checked before a kernel reads or writes it.

Codes are [2, pages, h_kv, page_size, d'] (K, then V), of any strides but contiguous rows; the integer formats have meta
[2, pages, h_kv, page_size, 2] beside them: scale and zero of each row. Slot p of sequence b is slot p % page_size of
page table[b, p // page_size]. A contiguous cache [2, b, h_kv, capacity, d'] is the case of one page a sequence, with
page_size = capacity and the table [[0], [1], …], which `table_of` makes.

Knows no numerics (`kv_reference.py`) and no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from mtplab.kernels.launch import FLOATS, check, unit_of
from mtplab.kernels.sizes import HEAD_STEP, LARGEST_HEAD

__all__ = [
    "FLOATS", "Format", "check_codes", "check_head", "check_positions", "check_scales", "format_of", "in_units",
    "table_of",
]  # fmt: skip


@dataclass(frozen=True)
class Format:
    """One way of storing a row of d values.

    `levels` is the largest integer code (0: codes are not integers); `packed` says that elements i and i + d/2 share
    byte i, the first in its low half; `top` is the largest FP8 value (0: not FP8).
    """

    name: str
    levels: int = 0
    packed: bool = False
    top: float = 0.0


NONE = Format("none")
INT8 = Format("int8", levels=255)
INT4 = Format("int4", levels=15, packed=True)
# OCP codes on every GPU, gfx942 (whose matrix unit has FNUZ) included: codes become values before they are multiplied,
# and a cache then holds the same bytes wherever it was filled
E4M3 = Format("fp8_e4m3", top=448.0)
E5M2 = Format("fp8_e5m2", top=57344.0)


def format_of(codes: Tensor, meta: Tensor | None, heads: int, d: int) -> Format:
    """The format of a cache for `heads` rows of d values a token, told from its tensors, which are checked.

    uint8 codes are INT8 where rows have d of them and INT4 where d/2; E4M3 and E5M2 are themselves; BF16, FP16 and FP32
    are unquantised. Raises ValueError where shapes, dtypes or strides do not fit each other.
    """
    if d % 2 or not 2 <= d <= LARGEST_HEAD:
        raise ValueError(f"head_dim is {d}; expected an even number from 2 to {LARGEST_HEAD}")
    kinds = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, **dict.fromkeys(FLOATS, NONE)}
    if codes.dtype == torch.uint8:
        found = INT4 if codes.shape[-1] == d // 2 else INT8
    else:
        found = kinds.get(codes.dtype, NONE)
    width = d // 2 if found.packed else d
    check("codes", codes, (2, None, heads, None, width), (torch.uint8, *kinds))
    if not codes.shape[3]:
        raise ValueError(f"codes have shape {list(codes.shape)}; expected pages of at least one slot")
    if codes.stride(-1) != 1:
        raise ValueError(f"codes have strides {list(codes.stride())}; expected 1 in the last dimension")
    if not found.levels:
        if meta is not None:
            raise ValueError(f"meta was given with {codes.dtype} codes; only integer codes have a scale and a zero")
        return found
    if meta is None:
        raise ValueError(f"meta is missing; {found.name} codes need the scale and zero of each row")
    check("meta", meta, (*codes.shape[:-1], 2), FLOATS)
    if meta.stride(-1) != 1:
        raise ValueError(f"meta has strides {list(meta.stride())}; expected 1 in the last dimension")
    return found


def check_head(d: int) -> None:
    """Refuse heads whose rows kernels do not read. Raises ValueError."""
    if d % HEAD_STEP:
        raise ValueError(f"head_dim is {d}; expected a multiple of {HEAD_STEP}")


def check_scales(form: Format, k_scale: float, v_scale: float) -> None:
    """Refuse scales that are not positive numbers, or are given with codes that have none. Raises ValueError."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale != 1.0 and not form.top:
            raise ValueError(f"{name} is {scale} with a cache of {form.name}; only FP8 codes have one scale for all")
        if not 0 < scale < float("inf"):
            raise ValueError(f"{name} is {scale}; expected a positive number")


def check_codes(codes: Tensor, unit: int) -> None:
    """Refuse codes whose rows do not begin where vectors do, multiples of `unit` apart. Raises ValueError."""
    if not _in_units(codes, unit):
        raise ValueError(
            f"codes have strides {list(codes.stride())} at address {codes.data_ptr():#x}; expected multiples of {unit}"
            " elements at a multiple of 16 bytes"
        )


def in_units(x: Tensor, unit: int) -> Tensor:
    """Rows [.., d] as kernels read them: x, or a copy where its strides are no multiples of `unit`."""
    if x.stride(-1) == 1 and _in_units(x, unit):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _in_units(x: Tensor, unit: int) -> bool:
    return unit_of(x.stride()[:-1], x, unit=unit) == unit


def check_positions(positions: Tensor, batch: int, tokens: int) -> None:
    """Refuse positions that are not [b, t] int64. Raises ValueError."""
    check("positions", positions, (batch, tokens), (torch.int64,))


def table_of(table: Tensor | None, codes: Tensor, batch: int) -> Tensor:
    """The table of pages [b, pages of a sequence] int32 to use, which is `table`, checked, where there is one.

    Without one the cache must have a page for each sequence. Raises ValueError. What stands in a table is not looked at
    here: that would have to wait for the GPU.
    """
    if table is None:
        if codes.shape[1] != batch:
            raise ValueError(
                f"codes have {codes.shape[1]} pages for {batch} sequences and no table; expected one page a sequence"
            )
        return _own_pages(batch, codes.device)
    check("table", table, (batch, None), (torch.int32,))
    if table.shape[1] == 0 or table.stride(1) != 1:
        raise ValueError(f"table has shape {list(table.shape)}, strides {list(table.stride())}; expected rows of pages")
    return table


@cache
def _own_pages(batch: int, device: torch.device) -> Tensor:
    """[[0], [1], …], made once: a launch would have to wait for it."""
    with torch.inference_mode(False):
        return torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)
