"""A tensor's values out of its file: raw, as codes with their scale, or as float32.

The only module of this room that needs torch. Knows where bytes lie and what a checked pair of weight and
scale is; nothing of formats or names.
"""

from __future__ import annotations

from io import FileIO
from pathlib import Path
from typing import NamedTuple

import torch

from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.strict_json import open_regular, shown
from mtplab.errors import CheckpointError
from mtplab.kernels.fp8_reference import dequantize_block, has_nan_codes

__all__ = ["TORCH_DTYPES", "ScaledWeight", "read_dequantized", "read_scaled", "read_tensor"]

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

# Linux reads at most 2 GiB in one call
_READ_AT_MOST = 1 << 30
_BAND_BYTES = 1 << 20


class ScaledWeight(NamedTuple):
    """FP8 codes [n, k] and the float32 multipliers [ceil(n/bm), ceil(k/bn)] of their (bm, bn) blocks."""

    data: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def dequantize(self) -> torch.Tensor:
        """float32 [n, k]: code times scale, rounded once."""
        return dequantize_block(self.data, self.scale, self.block)


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """The tensor as stored, in memory of its own (the file may change or go afterwards).

    Raises CheckpointError where the file has become shorter than its header says, or torch has no such dtype.
    """
    with _File(info.file) as file:
        return file.tensor(info)


def read_scaled(info: TensorInfo, scale_info: TensorInfo, block: tuple[int, int]) -> ScaledWeight:
    """A weight [n, k] and its scale, both checked.

    Raises CheckpointError for a scale that is not finite and positive, and for codes that are NaN.
    """
    scale = _checked(read_tensor(scale_info), scale_info)
    data = read_tensor(info)
    if has_nan_codes(data):
        bad = data.float().isnan()
        raise CheckpointError(
            f"{_where(info)}: {int(bad.sum())} of {data.numel()} FP8 codes are NaN, expected none; the first is at "
            f"{bad.nonzero()[0].tolist()}. The export is damaged; download or quantise again."
        )
    return ScaledWeight(data, scale, block)


def read_dequantized(info: TensorInfo, scale_info: TensorInfo, block: tuple[int, int]) -> torch.Tensor:
    """float32 [n, k]: what `read_scaled(...).dequantize()` gives, read and converted a band of rows at a time.

    A band of codes stays in cache from the file to its values, which saves a third of the time for large weights.
    Raises CheckpointError as `read_scaled` does.
    """
    (n, k), bm = info.shape, block[0]
    blocks = max(1, _BAND_BYTES // max(1, bm * k))  # block rows in a band
    out = _memory(info, (n, k), torch.float32)
    band = torch.empty(min(n, blocks * bm) * k, dtype=torch.uint8)
    with _File(info.file) as file:
        beside = scale_info.file == info.file  # as in most exports: a file is opened once for the pair
        scale = _checked(file.tensor(scale_info) if beside else read_tensor(scale_info), scale_info)
        file.seek_to(info)
        for start in range(0, n, blocks * bm):
            stop = min(n, start + blocks * bm)
            raw = band[: (stop - start) * k]
            file.fill(raw, info)
            codes = raw.view(_torch_dtype(info)).view(-1, k)
            if has_nan_codes(codes):
                read_scaled(info, scale_info, block)  # raises, having counted all of them
            dequantize_block(codes, scale[start // bm : -(-stop // bm)], block, out[start:stop], has_nan=False)
    return out


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


class _File(FileIO):
    """An open safetensors file, from which tensors are read where their headers say they lie."""

    def __init__(self, path: Path):
        descriptor, self.size = open_regular(path, "a safetensors file")
        super().__init__(descriptor)

    def tensor(self, info: TensorInfo) -> torch.Tensor:
        """The tensor as stored."""
        dtype = _torch_dtype(info)
        raw = _memory(info, info.nbytes, torch.uint8)
        self.seek_to(info)
        self.fill(raw, info)
        return raw.view(dtype).view(info.shape)

    def seek_to(self, info: TensorInfo) -> None:
        """Go to the tensor's first byte."""
        if self.size < info.end:
            raise CheckpointError(
                f"{_where(info)} needs bytes {info.start} to {info.end}, the file now has {self.size}: it changed or "
                "was truncated."
            )
        self.seek(info.start)

    def fill(self, raw: torch.Tensor, info: TensorInfo) -> None:
        """Fill `raw` uint8 [n] with the next n bytes, which are the tensor's."""
        view, done = memoryview(raw.numpy()), 0
        try:
            while done < len(view):
                got = self.readinto(view[done : done + _READ_AT_MOST])
                if not got:
                    raise CheckpointError(
                        f"{_where(info)}: expected {info.nbytes} bytes, the file ended before: truncated."
                    )
                done += got
        except OSError as error:
            raise CheckpointError(f"{_where(info)} cannot be read: {error.strerror}.") from None
