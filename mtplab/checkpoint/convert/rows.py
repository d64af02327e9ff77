"""Rows of a tensor out of its file, from any thread: bytes as stored, or values of codes.

Knows where bytes lie; nothing of what is made of them.
"""

from __future__ import annotations

import math

import torch

from mtplab.checkpoint import TensorInfo
from mtplab.checkpoint.convert.encode import scratch
from mtplab.checkpoint.pairing import Pair
from mtplab.checkpoint.strict_json import shown
from mtplab.checkpoint.tensor_file import TensorFile
from mtplab.checkpoint.values import TORCH_DTYPES, row_scales
from mtplab.errors import CheckpointError
from mtplab.kernels.fp8_reference import dequantize_block, has_nan_codes

__all__ = ["Shard", "matrix"]


def matrix(info: TensorInfo) -> tuple[int, int, int]:
    """(rows, columns, bytes of a row), all axes but the last taken together; fewer than two axes are one row."""
    *lead, k = info.shape or (1,)
    rows = math.prod(lead)
    return rows, k, info.nbytes // max(1, rows)


class Shard(TensorFile):
    """One source file, open for reading. A context."""

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
