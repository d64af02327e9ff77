"""What a checkpoint *is*: a content hash that changes when its weights, config or tokenizer change.

This module does not read tensors' values or know their formats, and looks at neither paths nor dates, so a
copied or moved checkpoint keeps its identity. Below 256 MB every byte is hashed (`full:`). Above, reading
everything would cost more than a sweep's first rows, so the headers, the sizes and 4 kB at the start, middle
and end of every tensor are (`sampled:`): enough to tell retrained or requantised weights apart, blind to an
edit that touches only bytes between the samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mtplab.errors import CheckpointError

__all__ = ["FULL_BELOW", "checkpoint_identity", "file_identity"]

FULL_BELOW = 256 * 1024 * 1024  # bytes
SAMPLE = 4096  # bytes
# files beside the weights that change what comes out: architecture, stop tokens, text to ids
BESIDE = ("config.json", "generation_config.json", "tokenizer.json")


def checkpoint_identity(checkpoint: Any, full_below: int = FULL_BELOW) -> str:
    """`full:<sha256>` or `sampled:<sha256>` of an open checkpoint.

    Raises `CheckpointError` when a file cannot be read.
    """
    folder = checkpoint_folder(checkpoint)
    files = sorted({Path(info.file) for info in checkpoint.tensors.values()}, key=lambda path: path.name)
    digest = hashlib.sha256()
    try:
        for name in BESIDE:
            if (folder / name).is_file():
                _add(digest, name, (folder / name).read_bytes())
        sizes = {path: path.stat().st_size for path in files}
        full = sum(sizes.values()) < full_below
        for path in files:
            digest.update(f"\0{path.name}\0{sizes[path]}\0".encode())
            if full:
                _all_bytes(digest.update, path)
        if not full:
            for name, info in sorted(checkpoint.tensors.items()):
                digest.update(f"\0{name}\0{info.dtype}\0{tuple(info.shape)}\0".encode())
                _sampled_bytes(digest.update, info)
    except OSError as problem:
        raise CheckpointError(f"{problem.filename}: cannot be read ({problem.strerror})") from None
    return f"{'full' if full else 'sampled'}:{digest.hexdigest()}"


def file_identity(path: Path, full_below: int = FULL_BELOW) -> str:
    """`full:<sha256>` or, of a larger file, `sampled:<sha256>`: its size and 4 kB at each of 256 places.

    Raises OSError.
    """
    digest, size = hashlib.sha256(), path.stat().st_size
    if size < full_below:
        _all_bytes(digest.update, path)
        return f"full:{digest.hexdigest()}"
    digest.update(f"{size}".encode())
    with path.open("rb") as file:
        for part in range(256):
            file.seek((size - SAMPLE) * part // 255)
            digest.update(file.read(SAMPLE))
    return f"sampled:{digest.hexdigest()}"


def checkpoint_folder(checkpoint: Any) -> Path:
    """The folder with config.json and tokenizer.json, also when the checkpoint was opened by its one file."""
    path = Path(checkpoint.path)
    return path if path.is_dir() else path.parent


def _add(digest: Any, name: str, content: bytes) -> None:
    # lengths keep two files' contents from running into each other
    digest.update(f"\0{name}\0{len(content)}\0".encode())
    digest.update(content)


def _all_bytes(update: Callable[[bytes], None], path: Path) -> None:
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            update(chunk)


def _sampled_bytes(update: Callable[[bytes], None], info: Any) -> None:
    length = info.end - info.start
    middle = info.start + max(0, (length - SAMPLE) // 2)
    last = info.start + max(0, length - SAMPLE)
    with Path(info.file).open("rb") as file:
        for at in sorted({info.start, middle, last}):
            file.seek(at)
            update(file.read(min(SAMPLE, info.end - at)))
