"""JSON out of files nobody vouches for: bounded, duplicate keys refused, every failure a CheckpointError.

Knows nothing of what the JSON means.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from mtplab.checkpoint.sniff import SNIFF_BYTES, foreign_kind
from mtplab.errors import CheckpointError

__all__ = ["load_object", "open_regular", "read_json_object", "shown"]

# the largest config.json or index seen is a few MB; a header may reach 100 MB, the bound safetensors itself
# sets
MAX_JSON_BYTES = 100_000_000
_MARKS = {b"\xef\xbb\xbf": "UTF-8", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def shown(name: object, limit: int = 160) -> str:
    """An untrusted name, quoted, with control characters escaped and cut to `limit` characters."""
    text = str(name)
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return ascii(text) if not text.isprintable() else repr(text)


def open_regular(path: Path, what: str) -> tuple[int, int]:
    """(file descriptor, size) of a regular file, links followed; the caller closes the descriptor.

    Raises CheckpointError, naming `what` the file was to be, where there is none or it is of another kind.
    """
    # without waiting: a pipe that nobody writes to must not hold us up
    flags = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    try:
        fd = os.open(path, flags)
        found = os.fstat(fd)
        if stat.S_ISREG(found.st_mode):
            return fd, found.st_size
        os.close(fd)
        raise CheckpointError(f"{path}: expected {what}, found {_kind(found.st_mode)}.")
    except FileNotFoundError:
        if os.path.islink(path):
            raise CheckpointError(
                f"{path}: expected {what}, found a link to {shown(os.readlink(path))}, which does not exist. "
                "Download the file again: a hub cache's blob is missing."
            ) from None
        raise CheckpointError(f"{path}: expected {what}, found nothing: the file is missing.") from None
    except (OSError, ValueError) as error:
        with suppress(OSError, ValueError):  # a socket cannot even be opened
            if not stat.S_ISREG(mode := os.stat(path).st_mode):
                raise CheckpointError(f"{path}: expected {what}, found {_kind(mode)}.") from None
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: expected {what}, but it cannot be read: {reason}.") from None


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "not a regular file (a pipe, socket or device)"


def load_object(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`. `where` opens every message: the file and the part of it.

    Raises CheckpointError for text that is no UTF-8, no JSON, no object, nested too deep, or has a key twice.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise CheckpointError(
                f"{where}: the key {shown(twice)} occurs twice, expected once: readers disagree which one counts. "
                "Remove one."
            )
        return found

    if not data.strip():
        raise CheckpointError(f"{where}: expected JSON, found {'blanks' if data else 'nothing: the file is empty'}.")
    for mark, encoding in _MARKS.items():
        if data.startswith(mark):
            raise CheckpointError(
                f"{where}: begins with a byte-order mark ({encoding}), expected plain UTF-8: other readers stop there. "
                "Save the file as UTF-8 without a mark."
            )
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{where}: expected UTF-8 text, found byte {error.object[error.start]:#04x} at offset {error.start}."
        ) from None
    except RecursionError:
        raise CheckpointError(f"{where}: expected plain JSON, found brackets nested too deep.") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: expected JSON, found text that is none: {str(error)[:200]}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(value).__name__}.")
    return value


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in the file at `path`, at most 100 MB; `what` names it in messages."""
    fd, size = open_regular(path, what)
    with os.fdopen(fd, "rb") as file:
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: expected {what} of at most {MAX_JSON_BYTES} bytes, found {size}.")
        data = file.read(MAX_JSON_BYTES + 1)
    foreign = foreign_kind(data[:SNIFF_BYTES], json_too=False)
    if foreign is not None:
        raise CheckpointError(f"{path}: expected {what}, found {foreign[0]}. {foreign[1]}")
    return load_object(data, f"{path} ({what})")
