"""A tensor's values out of its file: raw, as codes with their scale, or as float32.

Beside `convert/`, the only module of this room that needs torch. Knows where bytes lie and what a checked pair of
weight and scale is; nothing of formats or names. FP8 codes are [n, k] or stacked experts [e, n, k]; a block is given by
axis.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.pairing import Pair
from mtplab.checkpoint.strict_json import shown
from mtplab.checkpoint.tensor_file import TensorFile
from mtplab.errors import CheckpointError
from mtplab.kernels.fp8_reference import dequantize_block, has_nan_codes

__all__ = [
    "TORCH_DTYPES",
    "ScaledWeight",
    "dequantized_bands",
    "plain_bands",
    "read_dequantized",
    "read_rows",
    "read_scale",
    "read_scaled",
    "row_scales",
    "read_tensor",
    "unchecked_scale",
]

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}

_BAND_BYTES = 1 << 20
_KEPT_BYTES = 1 << 24  # of one buffer: bands of very wide rows are larger, and rare
_buffers = threading.local()


class ScaledWeight(NamedTuple):
    """FP8 codes [n, k] or [e, n, k], and the float32 multipliers [ceil(n/bm), ceil(k/bn)] of their blocks."""

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, ...]

    def dequantize(self) -> torch.Tensor:
        """float32, of the codes' shape: code times scale, rounded once."""
        if self.data.dim() == 2:
            return dequantize_block(self.data, self.scale, (self.block[0], self.block[1]))
        out = torch.empty(self.data.shape, dtype=torch.float32)
        for expert in range(len(out)):
            scale = self.scale[expert // self.block[0]]
            dequantize_block(self.data[expert], scale, (self.block[1], self.block[2]), out[expert])
        return out


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor as stored, in memory of its own (the file may change or go afterwards).

    Raises CheckpointError where the file has become shorter than its header says, or torch has no such dtype.
    """
    with TensorFile(info.file) as file:
        return _stored(file, info)


def read_rows(info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Rows start to stop of the tensor [n, ...] as stored, read alone. Raises CheckpointError as `read_tensor` does."""
    row = info.nbytes // max(1, info.shape[0])
    begin = info.start + start * row
    part = info._replace(shape=(stop - start, *info.shape[1:]), start=begin, end=begin + (stop - start) * row)
    return read_tensor(part)


def read_scale(pair: Pair) -> torch.Tensor:
    """A weight's multipliers as float32, one value a block: [ceil(n/bm), ceil(k/bn)], experts' with their axis before.

    Raises CheckpointError for one that is not finite and positive.
    """
    return _scale(read_tensor(pair.scale), pair)


def row_scales(pair: Pair, scale: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Of what `read_scale` gives, the multipliers of rows start to stop: [stop - start, ceil(k/bn)].

    Rows are those of the codes with all axes but the last taken together.
    """
    rows, height = torch.arange(start, stop), pair.codes.shape[-2]
    if len(pair.codes.shape) == 3:
        return scale[rows // height // pair.block[0], rows % height // pair.block[1]]
    return scale[rows // pair.block[0]]


def read_scaled(pair: Pair) -> ScaledWeight:
    """A weight and its scale, both checked.

    Raises CheckpointError for a scale that is not finite and positive, and for codes that are NaN.
    """
    scale = read_scale(pair)
    info = pair.codes
    data = read_tensor(info).view(TORCH_DTYPES[pair.dtype])
    if has_nan_codes(data):
        bad = data.float().isnan()
        raise CheckpointError(
            f"{_where(info)}: {int(bad.sum())} of {data.numel()} FP8 codes are NaN, expected none; the first is at "
            f"{bad.nonzero()[0].tolist()}. The export is damaged; download or quantise again."
        )
    return ScaledWeight(data, scale, pair.block)


def read_dequantized(pair: Pair) -> torch.Tensor:
    """float32, of the codes' shape: what `read_scaled(...).dequantize()` gives, a band of rows at a time.

    A band of codes stays in cache from the file to its values, which saves a third of the time for large weights.
    Raises CheckpointError as `read_scaled` does.
    """
    out = _memory(pair.codes, pair.codes.shape, torch.float32)
    rows = out.flatten(0, -2)
    for _ in _bands(pair, rows):
        pass
    return out


def dequantized_bands(pair: Pair, multiple: int = 1) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, row after the last, float32 [rows, k]) one band after the other, in memory that the next one reuses.

    Every band but the last has a `multiple` of rows. Rows are those of the codes [.., k] with all axes but the last
    taken together. Raises as `read_scaled` does.
    """
    yield from _bands(pair, None, multiple)


def plain_bands(info: TensorInfo, multiple: int = 1) -> Iterator[tuple[int, int, torch.Tensor]]:
    """As `dequantized_bands`, of a tensor that is not quantised: its values cast to float32."""
    *lead, k = info.shape or (1,)
    total = math.prod(lead)
    dtype = _torch_dtype(info)
    if dtype.is_complex:
        raise CheckpointError(f"{_where(info)} is complex: expected real values.")
    step = _rows_at_a_time(total, k, multiple)
    width = info.nbytes // max(1, total * k)
    with _scratch(step * k * width) as raw, _scratch(4 * step * k) as memory, TensorFile(info.file) as file:
        own = memory.view(torch.float32).view(step, k)
        for start in range(0, total, step) if step and k else ():
            stop = min(total, start + step)
            part = raw[: (stop - start) * k * width]
            file.fill(info, start * k * width, part)
            yield start, stop, own[: stop - start].copy_(part.view(dtype).view(-1, k))


@contextmanager
def _scratch(nbytes: int) -> Iterator[torch.Tensor]:
    """uint8 [nbytes] of any content, the same memory again for whoever asks next in this thread: buffers made and freed
    for every tensor of a load leave gaps between the tensors that stay, a third of all memory.

    Made outside inference mode, so that both modes may write to it.
    """
    free: list[torch.Tensor] = _buffers.__dict__.setdefault("free", [])
    kept = free.pop() if free else None
    if kept is None or kept.numel() < nbytes:
        with torch.inference_mode(False):
            kept = torch.empty(max(nbytes, 4 * _BAND_BYTES), dtype=torch.uint8)
    try:
        yield kept[:nbytes]
    finally:
        if kept.numel() <= _KEPT_BYTES:
            free.append(kept)


def _rows_at_a_time(total: int, k: int, multiple: int = 1) -> int:
    """How many of `total` rows of k values make a band; 0 where there are none, however wide they claim to be."""
    return min(total, max(1, _BAND_BYTES // max(1, k) // multiple) * multiple)


def _bands(pair: Pair, out: torch.Tensor | None, multiple: int = 1) -> Iterator[tuple[int, int, torch.Tensor]]:
    info = pair.codes
    *lead, k = info.shape
    total = math.prod(lead)
    step = _rows_at_a_time(total, k, multiple)
    with (
        _scratch(step * k) as band,
        _scratch(4 * step * k if out is None else 0) as memory,
        TensorFile(info.file) as file,
    ):
        own = memory.view(torch.float32).view(step, k) if out is None else None
        beside = pair.scale.file == info.file  # as in most exports: a file is opened once for the pair
        scale = _scale(_stored(file, pair.scale) if beside else read_tensor(pair.scale), pair)
        for start in range(0, total, step) if step else ():
            stop = min(total, start + step)
            raw = band[: (stop - start) * k]
            file.fill(info, start * k, raw)
            codes = raw.view(TORCH_DTYPES[pair.dtype]).view(-1, k)
            if has_nan_codes(codes):
                read_scaled(pair)  # raises, having counted all of them
            by_row = row_scales(pair, scale, start, stop)
            values = out[start:stop] if out is not None else own[: stop - start]  # type: ignore[index]
            dequantize_block(codes, by_row, (1, pair.block[-1]), values, has_nan=False)
            yield start, stop, values


def unchecked_scale(pair: Pair) -> torch.Tensor:
    """The scale as float32, one value a block, whatever its values: for an audit that counts those that are wrong."""
    return _as_grid(read_tensor(pair.scale), pair).float()


def _scale(stored: torch.Tensor, pair: Pair) -> torch.Tensor:
    """The scale as float32, one value a block: [ceil(n/bm), ceil(k/bn)], stacked experts' with their axis before."""
    return _checked(_as_grid(stored, pair), pair.scale)


def _as_grid(stored: torch.Tensor, pair: Pair) -> torch.Tensor:
    if stored.dtype == torch.uint8:
        stored = stored.view(torch.float8_e8m0fnu)
    if pair.part:
        stored = stored[tuple(slice(*part) for part in pair.part)]
    grid = tuple(-(-size // block) for size, block in zip(pair.codes.shape, pair.block, strict=True))
    return stored.reshape(grid)


def _checked(scale: torch.Tensor, info: TensorInfo) -> torch.Tensor:
    scale = scale.float()
    low, high = map(float, scale.aminmax()) if scale.numel() else (1.0, 1.0)
    if not (low > 0 and high < float("inf")):  # a NaN makes both NaN
        bad = ~(scale.isfinite() & (scale > 0))
        at = bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{_where(info)}: {int(bad.sum())} of {scale.numel()} scales are not finite and positive, expected all to "
            f"be; the first is {scale[tuple(at)].item()} at {at}. The export is damaged; download or quantise again."
        )
    return scale


def _where(info: TensorInfo) -> str:
    return f"{info.file}: tensor {shown(info.name)}"


def _torch_dtype(info: TensorInfo) -> torch.dtype:
    dtype = TORCH_DTYPES.get(info.dtype)
    if dtype is None:
        raise CheckpointError(
            f"{_where(info)} is {info.dtype}: expected a dtype that torch has; it cannot be read as values."
        )
    return dtype


def _memory(info: TensorInfo, shape: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError:
        raise CheckpointError(
            f"{_where(info)} is {info.dtype} {list(info.shape)}: expected it to fit in memory, it does not."
        ) from None


def _stored(file: TensorFile, info: TensorInfo) -> torch.Tensor:
    """The tensor as stored."""
    dtype = _torch_dtype(info)
    raw = _memory(info, info.nbytes, torch.uint8)
    file.fill(info, 0, raw)
    return raw.view(dtype).view(info.shape)
