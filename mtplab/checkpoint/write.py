"""Writing safetensors files: laid out first, filled in any order, whole or not there at all.

Source of the layout: as in `header.py`. Knows nothing of models or quantisation.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from mtplab.checkpoint.header import DTYPE_BITS, MAX_HEADER_BYTES
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["SafetensorsWriter", "data_bytes", "dtype_name", "sync_folder", "write_safetensors"]

_ALIGNMENT = 8
_WRITE_AT_MOST = 1 << 30  # Linux writes less than 2 GiB in one call


class SafetensorsWriter:
    """One file being written: `with SafetensorsWriter(path, layout) as file: file.put(name, tensor)`.

    `layout` gives each tensor's dtype (as safetensors spells it) and shape beforehand, so that one tensor at
    a time needs to be in memory. The file appears under its name, flushed to disk, when the block ends and
    every tensor was put; on any error nothing is left behind.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self._path = Path(path)
        self._layout = dict(layout)
        for name, (dtype, _) in self._layout.items():
            if dtype not in DTYPE_BITS:
                known = ", ".join(DTYPE_BITS)
                raise ConfigError(f"{self._path}: tensor {shown(name)}: unknown dtype {shown(dtype)}; known: {known}.")
        # widest dtypes first, as safetensors itself writes, keeps every tensor aligned to its own size
        order = sorted(self._layout, key=lambda name: (-DTYPE_BITS[self._layout[name][0]], name))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset, self._start = 0, {}
        for name in order:
            dtype, shape = self._layout[name]
            if name == "__metadata__":
                raise ConfigError("a tensor cannot be called '__metadata__': safetensors keeps the name for itself.")
            end = offset + data_bytes(dtype, shape)
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            self._start[name], offset = offset, end
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        if len(text) > MAX_HEADER_BYTES:
            raise ConfigError(f"{self._path}: the header would take {len(text)} bytes, at most {MAX_HEADER_BYTES}.")
        self._data_start, self._size = 8 + len(text), 8 + len(text) + offset
        self._head = len(text).to_bytes(8, "little") + text
        # bytes of each tensor that are still to come
        self._missing = {name: data_bytes(*self._layout[name]) for name in order}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._size

    @property
    def header(self) -> bytes:
        """The file's first bytes, up to where the tensors' begin."""
        return self._head

    def __enter__(self) -> Self:
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
        try:
            self._file = open(self._temporary, "wb", buffering=0)
            try:
                self._write_at(0, memoryview(self._head))
                self._file.truncate(self._size)
            except BaseException:  # `__exit__` is not called then
                self._discard()
                raise
        except (OSError, ValueError) as error:  # a ValueError: a name with a NUL
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{self._path}: cannot be written: {reason}.") from None
        return self

    def _discard(self) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor. Raises ConfigError where it differs from the layout or was put before."""
        expected = self._layout.get(name)
        found = (dtype_name(tensor), tuple(tensor.shape))
        if name not in self._missing or found != expected:
            raise ConfigError(f"{self._path}: tensor {shown(name)}: expected {expected}, found {found}.")
        import torch

        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else None
        self.put_bytes(name, 0, data)

    def put_bytes(self, name: str, offset: int, data: torch.Tensor | None) -> None:
        """Write a part of one tensor: uint8 [bytes] from the tensor's byte `offset` on; None where it has no bytes.

        Threads may write parts side by side; each byte is to be written once. Raises CheckpointError where the file
        cannot be written.
        """
        count = 0 if data is None else data.numel()
        try:
            if data is not None:
                self._write_at(self._data_start + self._start[name] + offset, memoryview(data.numpy()))
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {error.strerror}.") from None
        with self._lock:
            assert count <= self._missing.get(name, -1), name  # nothing is written twice
            self._missing[name] -= count
            if not self._missing[name]:
                del self._missing[name]

    def _write_at(self, position: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            part = data[done : done + _WRITE_AT_MOST]
            if hasattr(os, "pwrite"):
                done += os.pwrite(self._file.fileno(), part, position + done)
                continue
            with self._lock:
                self._file.seek(position + done)
                done += self._file.write(part) or 0

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._missing:
                names = ", ".join(map(shown, sorted(self._missing)[:3]))
                raise ConfigError(f"{self._path}: {len(self._missing)} tensors were never put: {names}.")
            if kind is None:
                os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._temporary, self._path)
                sync_folder(self._path.parent)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot be written: {error.strerror}.") from None
        finally:
            self._discard()


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors to one safetensors file, atomically and flushed to disk; an existing file is replaced.

    Raises ConfigError for a dtype safetensors does not have, CheckpointError where the file cannot be
    written.
    """
    layout = {name: (dtype_name(tensor), tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(path, layout, metadata) as file:
        for name, tensor in tensors.items():
            file.put(name, tensor)


def dtype_name(tensor: torch.Tensor) -> str:
    """The tensor's dtype as safetensors spells it. Raises ConfigError where it has no name for it."""
    from mtplab.checkpoint.values import TORCH_DTYPES

    for name, dtype in TORCH_DTYPES.items():
        if dtype == tensor.dtype:
            return name
    raise ConfigError(f"{tensor.dtype}: safetensors has no such dtype; expected one of {', '.join(TORCH_DTYPES)}.")


def data_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of this safetensors dtype and shape."""
    return DTYPE_BITS[dtype] * math.prod(shape) // 8


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename in it survives a crash, where that is offered."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
