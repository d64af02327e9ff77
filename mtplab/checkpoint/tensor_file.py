"""A safetensors file open for reading: bytes of its tensors from where their headers say they lie, from any thread.

Knows where bytes lie; nothing of what is made of them.
"""

from __future__ import annotations

import os
import threading
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.strict_json import open_regular, shown
from mtplab.errors import CheckpointError

if TYPE_CHECKING:
    import torch

__all__ = ["TensorFile"]

# Linux reads at most 2 GiB in one call
_READ_AT_MOST = 1 << 30


class TensorFile:
    """One file, opened as a context is entered. Raises CheckpointError where it is none."""

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
        where = f"{info.file}: tensor {shown(info.name)}"
        if self._size < info.end:
            raise CheckpointError(
                f"{where} needs bytes {info.start} to {info.end}, the file now has {self._size}: it changed or was "
                "truncated."
            )
        view, done = memoryview(out.numpy()), 0
        try:
            while done < len(view):
                got = self._read_at(info.start + start + done, view[done : done + _READ_AT_MOST])
                if not got:
                    raise CheckpointError(
                        f"{where}: expected {info.nbytes} bytes, the file ended before: it changed or was truncated."
                    )
                done += got
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error.strerror}.") from None

    def _read_at(self, position: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], position)
        with self._lock:
            self._file.seek(position)
            return self._file.readinto(view) or 0
