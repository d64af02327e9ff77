"""The files of a checkpoint that are not weights: which go along, and which are named as staying behind.

Knows names of files only. Code and pickles never go along.
"""

from __future__ import annotations

import shutil
from fnmatch import fnmatchcase
from pathlib import Path

from mtplab.checkpoint.config_json import SEPARATE_FILE

__all__ = ["copy_beside"]

# what a tokenizer, a processor, a chat template or generation needs, and the licence
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "LICENCE*", "NOTICE*")
# written anew: config, index, and what tells of the source's quantisation
_OURS = (
    "config.json",
    "*.index.json",
    SEPARATE_FILE,
    "quantization_config.json",
    "quantize_config.json",
    "recipe.json",
)
_FOLDERS = ("additional_chat_templates",)
_LARGEST = 1 << 30  # bytes; nothing of the kinds above is near it


def copy_beside(source: Path, target: Path) -> list[str]:
    """Copy what is not weights from one folder to the other; returns the names of what was left. Raises OSError."""
    left = []
    for path in sorted(source.iterdir()):
        name = path.name
        if name.startswith(".") or name.endswith(".safetensors") or any(fnmatchcase(name, glob) for glob in _OURS):
            continue
        if path.is_dir():
            if name in _FOLDERS:
                left += [f"{name}/{item}" for item in _copy(path, target / name)]
            else:
                left.append(f"{name}/")
        elif not _take(path, target):
            left.append(name)
    return left


def _copy(source: Path, target: Path) -> list[str]:
    target.mkdir(exist_ok=True)
    return [path.name for path in sorted(source.iterdir()) if not _take(path, target)]


def _take(path: Path, target: Path) -> bool:
    wanted = any(fnmatchcase(path.name, glob) for glob in _COPIED)
    if not wanted or not path.is_file() or path.stat().st_size > _LARGEST:
        return False
    shutil.copyfile(path, target / path.name)
    return True
