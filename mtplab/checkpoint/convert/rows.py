"""Rows of a tensor out of its file, from any thread: bytes as stored, or values of codes.

Knows where bytes lie; nothing of what is made of them.
"""

from __future__ import annotations

import math
import os
import threading
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from mtplab.checkpoint import TensorInfo
from mtplab.checkpoint.convert.encode import scratch
from mtplab.checkpoint.pairing import Pair
from mtplab.checkpoint.strict_json import open_regular, shown
from mtplab.checkpoint.values import TORCH_DTYPES, row_scales
from mtplab.errors import CheckpointError
from mtplab.kernels.fp8_reference import dequantize_block, has_nan_codes

__all__ = ["Shard", "matrix"]

_READ_AT_MOST = 1 << 30


def matrix(info: TensorInfo) -> tuple[int, int, int]:
    """(rows, columns, bytes of a row), all axes but the last taken together; fewer than two axes are one row."""
    *lead, k = info.shape or (1,)
    rows = math.prod(lead)
    return rows, k, info.nbytes // max(1, rows)


class Shard:
    """One source file, open for reading. A context."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        descriptor, self._size = open_regular(self._path, "a safetensors file")
        self._file = FileIO(descriptor)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def fill(self, info: TensorInfo, start: int, out: torch.Tensor) -> None:
        """Fill `out` uint8 [bytes] from the tensor's byte `start` on. Raises CheckpointError where the file ends."""
        view, done = memoryview(out.numpy()), 0
        try:
            while done < len(view):
                got = self._read_at(info.start + start + done, view[done : done + _READ_AT_MOST])
                if not got:
                    raise CheckpointError(
                        f"{info.file}: tensor {shown(info.name)}: expected {info.nbytes} bytes, the file ended before: "
                        "it changed or was truncated."
                    )
                done += got
        except OSError as error:
            raise CheckpointError(f"{info.file}: tensor {shown(info.name)} cannot be read: {error.strerror}.") from None

    def _read_at(self, position: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], position)
        with self._lock:
            self._file.seek(position)
            return self._file.readinto(view) or 0

    def raw(self, info: TensorInfo, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop as stored, [rows, k] of the tensor's dtype, in memory that the thread uses again."""
        _, k, width = matrix(info)
        out = scratch("raw", (stop - start) * width, torch.uint8)
        self.fill(info, start * width, out)
        return out.view(TORCH_DTYPES[info.dtype]).view(stop - start, k)

    def values(self, pair: Pair, scale: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Values of rows start to stop of codes, float32 [rows, k], in memory that the thread uses again.

        `scale` is what `read_scale` gave. Raises CheckpointError for codes that are NaN.
        """
        codes = self.raw(pair.codes, start, stop).view(TORCH_DTYPES[pair.dtype])
        if has_nan_codes(codes):
            bad = codes.float().isnan()
            at = bad.nonzero()[0].tolist()
            raise CheckpointError(
                f"{pair.codes.file}: tensor {shown(pair.codes.name)}: FP8 codes are NaN, expected none; the first is "
                f"at row {start + at[0]}, column {at[1]}. The export is damaged; download or quantise again."
            )
        out = scratch("values", codes.numel(), torch.float32).view(codes.shape)
        return dequantize_block(codes, row_scales(pair, scale, start, stop), (1, pair.block[-1]), out, has_nan=False)
