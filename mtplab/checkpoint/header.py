"""The header of one safetensors file: read, bounded and checked, without torch and without the data.

Source: "Format" in the safetensors README (github.com/huggingface/safetensors) and its Rust reader's checks:
8 bytes little-endian length, that many bytes of JSON (at most 100 MB), then one buffer which the tensors
cover from end to end with neither holes nor overlaps. Knows nothing of models, shards or quantisation.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from mtplab.checkpoint.sniff import SNIFF_BYTES, foreign_kind
from mtplab.checkpoint.strict_json import load_object, open_regular, shown
from mtplab.errors import CheckpointError

__all__ = [
    "DTYPE_BITS",
    "FP8_DTYPES",
    "MAX_HEADER_BYTES",
    "PLAIN_FLOATS",
    "Header",
    "TensorInfo",
    "read_header",
]

MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64  # torch's own limit
MAX_NAME = 4096  # characters; the longest names of models have some hundred
_MAX_SIZE = 2**63 - 1

DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
FP8_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
# those of weights that are not quantised → as plans spell them
PLAIN_FLOATS = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


class TensorInfo(NamedTuple):
    """One tensor of a file: its storage dtype as safetensors spells it, and where its bytes lie."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int  # byte offset in the file, header included
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return self.end - self.start


class Header(NamedTuple):
    """A file's tensors in the order of their bytes, and its `__metadata__`."""

    file: Path
    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Read and check the header of the safetensors file at `path`; never more than 100 MB of it.

    Raises CheckpointError naming the file, and the tensor where there is one, for everything that does not
    hold.
    """
    fd, size = open_regular(path, "a safetensors file")
    with os.fdopen(fd, "rb") as file:
        head = file.read(SNIFF_BYTES)
        length = _header_length(path, head, size)
        file.seek(8)
        data = file.read(length)
    if len(data) != length:
        raise CheckpointError(f"{path}: expected a header of {length} bytes, the file ended after {len(data)}.")
    content = load_object(data, f"{path} (safetensors header)")
    metadata = _metadata(path, content.pop("__metadata__", {}))
    return Header(path, _tensors(path, content, 8 + length, size), metadata)


def _header_length(path: Path, head: bytes, size: int) -> int:
    foreign = foreign_kind(head)
    if foreign is not None:
        raise CheckpointError(f"{path}: expected a safetensors file, found {foreign[0]}. {foreign[1]}")
    if size < 10:
        raise CheckpointError(
            f"{path}: expected a safetensors file, found {size} bytes: too short for a header. Download it again."
        )
    length = int.from_bytes(head[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: its first 8 bytes give a header of {length} bytes, expected at most {MAX_HEADER_BYTES}: this "
            "is no safetensors file, or a damaged one."
        )
    if length > size - 8:
        raise CheckpointError(
            f"{path}: truncated: the header alone needs {length + 8} bytes, the file has {size}. Download it again."
        )
    if head[8:9] != b"{":
        raise CheckpointError(
            f"{path}: expected the header to begin with '{{', found {head[8:9]!r}: no safetensors file."
        )
    return length


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise CheckpointError(f"{path}: expected __metadata__ to map strings to strings.")
    return value


def _tensors(path: Path, content: dict[str, Any], data_start: int, size: int) -> tuple[TensorInfo, ...]:
    try:
        "".join(content).encode("utf-8")
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: a tensor's name holds half a surrogate pair; expected valid text.") from None
    longest = max(content, key=len, default="")
    if len(longest) > MAX_NAME:
        raise CheckpointError(
            f"{path}: a tensor's name has {len(longest)} characters, expected at most {MAX_NAME}: {shown(longest, 60)}."
        )
    found = [_tensor(path, name, entry, data_start) for name, entry in content.items()]
    found.sort(key=lambda info: (info.start, info.end))
    expected, last = data_start, None
    for info in found:
        if info.start != expected:
            what = "overlaps" if info.start < expected else "leaves a hole after"
            raise CheckpointError(
                f"{path}: tensor {shown(info.name)} {what} {_ended_by(last)}: its data starts at byte {info.start}, "
                f"expected {expected}."
            )
        if info.end > size:
            raise CheckpointError(
                f"{path}: tensor {shown(info.name)} needs bytes {info.start} to {info.end}, the file has {size}: "
                "truncated. Download it again."
            )
        expected, last = info.end, info
    if expected != size:
        raise CheckpointError(
            f"{path}: {size - expected} bytes after the last tensor ({_ended_by(last)}) belong to none: expected the "
            f"file to end at byte {expected}, it has {size}."
        )
    return tuple(found)


def _ended_by(last: TensorInfo | None) -> str:
    return "the header" if last is None else shown(last.name)


def _tensor(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    def refused(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {shown(name)}: {what}")

    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (KeyError, TypeError):
        keys = ", ".join(sorted(map(shown, entry))) if isinstance(entry, dict) else type(entry).__name__
        raise refused(f"expected dtype, shape and data_offsets, found {keys[:200] or 'nothing'}.") from None
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise refused(f"unknown dtype {shown(dtype)}; known: {', '.join(DTYPE_BITS)}.")
    if not _is_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        raise refused(f"expected a shape of at most {MAX_DIMENSIONS} sizes from 0 to 2**63-1, found {shown(shape)}.")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refused(f"expected data_offsets [begin, end], found {shown(offsets)}.")
    begin, end = offsets
    total = bits * math.prod(shape)
    if total > _MAX_SIZE or (total == 0 and math.prod(dim for dim in shape if dim) * bits > _MAX_SIZE):
        raise refused(f"shape {shown(shape)} overflows: expected at most 2**63 - 1 bits.")
    if total != (end - begin) * 8:
        size = total / 8 if total % 8 else total // 8
        raise refused(f"{dtype} of shape {shape} takes {size} bytes, its data_offsets give {end - begin}.")
    return TensorInfo(name, dtype, tuple(shape), path, data_start + begin, data_start + end)


def _is_sizes(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    # a generator would take twice as long, and there are 180 000 of these in a large checkpoint
    for item in value:  # noqa: SIM110
        if type(item) is not int or not 0 <= item <= _MAX_SIZE:
            return False
    return True
