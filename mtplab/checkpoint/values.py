"""A tensor's values out of its file: raw, as codes with their scale, or as float32.

The only module of this room that needs torch. Knows where bytes lie and what a checked pair of weight and
scale is; nothing of formats or names.
"""

from __future__ import annotations

from io import FileIO
from typing import NamedTuple

import torch

from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.strict_json import open_regular, shown
from mtplab.errors import CheckpointError
from mtplab.kernels.fp8_reference import dequantize_block, has_nan_codes

__all__ = ["TORCH_DTYPES", "ScaledWeight", "checked_values", "read_tensor"]

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
    dtype = TORCH_DTYPES.get(info.dtype)
    where = f"{info.file}: tensor {shown(info.name)}"
    if dtype is None:
        raise CheckpointError(f"{where} is {info.dtype}: expected a dtype that torch has; it cannot be read as values.")
    fd, size = open_regular(info.file, "a safetensors file")
    with open(fd, "rb", buffering=0) as file:
        if size < info.end:
            raise CheckpointError(
                f"{where} needs bytes {info.start} to {info.end}, the file now has {size}: it changed or was truncated."
            )
        try:
            raw = torch.empty(info.nbytes, dtype=torch.uint8)
        except RuntimeError:
            raise CheckpointError(f"{where} needs {info.nbytes} bytes of memory, more than there is.") from None
        _read_into(file, raw, info, where)
    return raw.view(dtype).view(info.shape)


def _read_into(file: FileIO, raw: torch.Tensor, info: TensorInfo, where: str) -> None:
    view, done = memoryview(raw.numpy()), 0
    try:
        file.seek(info.start)
        while done < info.nbytes:
            got = file.readinto(view[done : done + _READ_AT_MOST])
            if not got:
                raise CheckpointError(f"{where}: expected {info.nbytes} bytes, the file ended after {done}: truncated.")
            done += got
    except OSError as error:
        raise CheckpointError(f"{where} cannot be read: {error.strerror}.") from None


def checked_values(info: TensorInfo, scale_info: TensorInfo, block: tuple[int, int]) -> ScaledWeight:
    """A weight and its scale, both checked.

    Raises CheckpointError for a scale that is not finite and positive, and for codes that are NaN.
    """
    scale = read_tensor(scale_info).float()
    bad = ~(scale.isfinite() & (scale > 0))
    if bool(bad.any()):
        at = bad.nonzero()[0].tolist()
        raise CheckpointError(
            f"{scale_info.file}: tensor {shown(scale_info.name)}: {int(bad.sum())} of {scale.numel()} scales are not "
            f"finite and positive, expected all to be; the first is {scale[tuple(at)].item()} at {at}. The export is "
            "damaged; download or quantise again."
        )
    data = read_tensor(info)
    if has_nan_codes(data):
        bad = data.float().isnan()
        raise CheckpointError(
            f"{info.file}: tensor {shown(info.name)}: {int(bad.sum())} of {data.numel()} FP8 codes are NaN, expected "
            f"none; the first is at {bad.nonzero()[0].tolist()}. The export is damaged; download or quantise again."
        )
    return ScaledWeight(data, scale, block)
