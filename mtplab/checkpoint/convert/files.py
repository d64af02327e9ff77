"""The files of a checkpoint that are not weights: which go along, and which are named as staying behind.

Knows names of files only. Code and pickles never go along.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from fnmatch import fnmatchcase
from io import FileIO
from pathlib import Path

from mtplab.checkpoint.config_json import BESIDE_FILES, CONFIG_FILE
from mtplab.checkpoint.strict_json import open_regular
from mtplab.errors import CheckpointError

__all__ = ["copy_beside"]

# what a tokenizer, a processor, a chat template or generation needs, and the licence
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*")
# written anew: config, index, and what tells of the source's quantisation
_OURS = (
    CONFIG_FILE,
    "*.index.json",
    *BESIDE_FILES,
    "quantize_config.json",
    "recipe.json",
)
_FOLDERS = ("additional_chat_templates",)
_LARGEST = 1 << 30  # bytes; nothing of the kinds above is near it


def copy_beside(source: Path, target: Path, shards: Collection[Path]) -> list[str]:
    """Copy what is not weights from one folder to the other, flushed to disk; returns the names of what was left.

    `shards` of `source` are weights whatever they are called, and were written anew.
    Raises CheckpointError for what cannot be read, OSError for what cannot be written.
    """
    left = []
    for path in _listed(source):
        name = path.name
        weights = path in shards or name.endswith(".safetensors")
        if weights or name.startswith(".") or any(fnmatchcase(name, glob) for glob in _OURS):
            continue
        if path.is_dir():
            if name in _FOLDERS:
                left += [f"{name}/{item}" for item in _copy(path, target / name, shards)]
            else:
                left.append(f"{name}/")
        elif not _take(path, target):
            left.append(name)
    return left


def _copy(source: Path, target: Path, shards: Collection[Path]) -> list[str]:
    target.mkdir(exist_ok=True)
    return [path.name for path in _listed(source) if path not in shards and not _take(path, target)]


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: the folder cannot be listed: {error.strerror}.") from None


def _take(path: Path, target: Path) -> bool:
    wanted = any(fnmatchcase(path.name, glob) for glob in _COPIED)
    if not wanted or not path.is_file() or path.name.endswith(".safetensors"):
        return False
    descriptor, size = open_regular(path, "a file to copy")
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        if size > _LARGEST:
            return False
        with open(target / path.name, "wb") as made:
            while part := _part(file, path):
                made.write(part)
            made.flush()
            os.fsync(made.fileno())
    return True


def _part(file: FileIO, path: Path) -> bytes:
    try:
        return file.read(1 << 20) or b""
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
