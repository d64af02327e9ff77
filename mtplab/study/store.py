"""Results on disk: one file per point, written whole or not at all.

This module does not run points. A point's file `<folder>/<hash>.json` holds its config and its rows; it is
replaced atomically as each depth finishes, so a process killed at any moment leaves the depths that were
done. A lock per point (`flock`, which dies with its process) keeps two processes from doing one point
twice. A file that cannot be what its name says is set aside with a warning and computed again. `rows.jsonl`
is an export, made from the point files and remade whenever a sweep ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from mtplab.errors import ConfigError, printable
from mtplab.study.point import PointConfig, digest_of
from mtplab.study.row import ROW_SCHEMA, ResultRow

__all__ = ["FILE_SCHEMA", "PointStore", "is_point_file", "read_rows", "results_folder", "write_atomically"]

# an older mtplab must say that it is too old, and not set the file aside
FILE_SCHEMA = ROW_SCHEMA
_POINT_NAME = re.compile(r"[0-9a-f]{64}\.json")


class PointStore:
    """A results folder. Made on first use; raises `ConfigError` when it cannot be.

    Any number of processes may use one folder at once. Whoever only reads leaves `make` off: nothing is written then.
    """

    def __init__(self, folder: str | Path, make: bool = True):
        self.folder = results_folder(folder)
        if not make:
            return
        try:
            (self.folder / ".locks").mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise ConfigError(
                f"results folder {self.folder}: cannot be made ({problem.strerror}); give another"
            ) from None

    def path(self, point: str) -> Path:
        return self.folder / f"{point}.json"

    def rows(self, point: str, unreadable: Literal["skip", "warn", "set aside"] = "skip") -> dict[int, ResultRow]:
        """depth -> row of a point, errors included; empty when there is none yet.

        An unreadable file counts as none. Only who holds the lock of its rows may ask for it to be set aside:
        anybody else could move a good file that has just taken its place. Raises `ConfigError` for a file
        that a newer mtplab wrote.
        """
        path = self.path(point)
        try:
            raw = path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as problem:
            raise ConfigError(f"{path}: cannot be read ({problem.strerror})") from None
        try:
            return {row.depth: row for row in _parse(raw, point)}
        except _NewerSchema as problem:
            raise ConfigError(
                f"{path}: written by a newer mtplab ({problem}); update mtplab or give another results folder"
            ) from None
        except (ValueError, KeyError, TypeError, RecursionError) as problem:
            reason = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            if unreadable == "set aside":
                self._set_aside(path, raw, reason)
            elif unreadable == "warn":
                warnings.warn(printable(f"{path}: not a readable result ({reason}); left out"), stacklevel=3)
            return {}

    def kept(self, point: str) -> dict[int, ResultRow]:
        """`rows`, an unreadable file being set aside: for who is about to compute what is not there."""
        with self._rows_lock(point):
            return self.rows(point, "set aside")

    def write(self, config: PointConfig, rows: Iterable[ResultRow]) -> None:
        """Puts rows into the point's file, in place of those of their depths; only for who holds the lock of what they
        answer. The depths of a point may be several processes' (an engine's servers): what others have put there since
        stays."""
        with self._rows_lock(config.hash()):
            known = self.rows(config.hash(), "set aside")
            self._replace(config, (known | {row.depth: row for row in rows}).values())

    def _rows_lock(self, point: str) -> contextlib.AbstractContextManager[bool]:
        """Of a point's file itself, held for no longer than reading and writing takes."""
        return self.lock(f"{point}.rows", wait=True)

    def _replace(self, config: PointConfig, rows: Iterable[ResultRow]) -> None:
        ordered = sorted(rows, key=lambda row: row.depth)
        content = {
            "schema": FILE_SCHEMA,
            "hash": config.hash(),
            "config": json.loads(config.canonical()),
            "rows": [json.loads(row.to_json()) for row in ordered],
        }
        write_atomically(self.path(config.hash()), json.dumps(content, allow_nan=False).encode())

    @contextlib.contextmanager
    def lock(self, point: str, wait: bool = False) -> Iterator[bool]:
        """Yields True when this process now owns the point, False when another does (and `wait` is off).

        The lock file stays: removing it would let two processes lock two files of one name.
        """
        try:
            file = (self.folder / ".locks" / point).open("ab")
        except OSError as problem:
            raise ConfigError(
                f"results folder {self.folder}: cannot be written ({problem.strerror}); give another"
            ) from None
        with file:
            held = _lock(file.fileno(), wait)
            try:
                yield held
            finally:
                if held:
                    _unlock(file.fileno())

    def writable(self) -> bool:
        """Whether locks can be taken here; a folder that can only be read still gives its rows."""
        return os.access(self.folder / ".locks", os.W_OK | os.X_OK)

    def points(self) -> list[str]:
        """Hashes of every point file, sorted."""
        return sorted(path.stem for path in self.folder.iterdir() if is_point_file(path.name))

    def export(self) -> Path:
        """Writes `rows.jsonl` anew from the point files and returns its path."""
        with self.lock("rows.jsonl", wait=True):
            lines = [row.to_json() for point in self.points() for _, row in sorted(self.rows(point, "warn").items())]
            target = self.folder / "rows.jsonl"
            write_atomically(target, "".join(line + "\n" for line in lines).encode())
        return target

    def _set_aside(self, path: Path, raw: bytes, reason: str) -> None:
        # named by content: a second look at the same wreck does not pile up copies
        aside = path.with_name(f"{path.name}.corrupt-{hashlib.sha256(raw).hexdigest()[:8]}")
        with contextlib.suppress(FileNotFoundError):
            os.replace(path, aside)
        warnings.warn(
            printable(f"{path}: not a readable result ({reason}); set aside as {aside.name}, to be computed again"),
            stacklevel=3,
        )


def is_point_file(name: str) -> bool:
    """Whether a file of this name in a results folder holds a point's rows."""
    return _POINT_NAME.fullmatch(name) is not None


def results_folder(folder: Any) -> Path:
    """The folder meant. Raises `ConfigError` for what names none."""
    if not isinstance(folder, str | os.PathLike) or not isinstance(os.fspath(folder), str):
        raise ConfigError(f"results is {folder!r:.60}; expected a folder, as a string or a Path")
    if not os.fspath(folder):
        raise ConfigError("the results folder is an empty string; give a folder, or '.' for the current one")
    try:
        possible = b"\0" not in os.fsencode(folder)
    except UnicodeEncodeError:
        possible = False
    if not possible:
        raise ConfigError(f"results folder {os.fspath(folder)!r:.60}: no file system takes this name; give another")
    return Path(folder)


def read_rows(folder: str | Path) -> list[ResultRow]:
    """Every row of a results folder, by point and depth; computes and writes nothing.

    Raises `ConfigError` when there is no such folder.
    """
    if not results_folder(folder).is_dir():
        raise ConfigError(f"{folder}: no such results folder; run a sweep first, or give its folder")
    store = PointStore(folder, make=False)
    return [row for point in store.points() for _, row in sorted(store.rows(point, "warn").items())]


def write_atomically(path: Path, content: bytes) -> None:
    """The file is the old one or the new one, whatever happens in between; durable when this returns.

    One writer at a time (the caller holds a lock), so the temporary name is fixed and a killed writer's
    leftover is simply written over. Raises `ConfigError` when the disk does not take it.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as problem:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise ConfigError(f"{path}: cannot be written ({problem.strerror}); give another folder") from None
    with contextlib.suppress(OSError):  # not every file system lets a folder be synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _NewerSchema(Exception):
    pass


def _parse(raw: bytes, point: str) -> list[ResultRow]:
    content: dict[str, Any] = json.loads(raw)
    if not isinstance(content, dict):
        raise ValueError(f"a JSON {type(content).__name__}, expected an object")
    schema = content.get("schema")
    if isinstance(schema, int) and schema > FILE_SCHEMA:
        raise _NewerSchema(f"schema {schema}, this one reads {FILE_SCHEMA}")
    if schema not in range(1, FILE_SCHEMA + 1) or isinstance(schema, bool):
        raise ValueError(f"schema is {schema!r}, expected 1 to {FILE_SCHEMA}")
    found = digest_of(content["config"])
    if found != point:
        raise ValueError(f"its config hashes to {found[:12]}…, its name says {point[:12]}…")
    rows = [ResultRow.from_json(json.dumps(row)) for row in content["rows"]]
    strangers = {row.point for row in rows} - {point}
    if strangers:
        raise ValueError(f"holds rows of another point, {min(strangers)[:12]}…")
    if len({row.depth for row in rows}) != len(rows):
        raise ValueError("holds one depth twice")
    return rows


def _lock(descriptor: int, wait: bool) -> bool:
    try:
        import fcntl
    except ImportError:  # no flock on this system: one process at a time is the user's to see to
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _unlock(descriptor: int) -> None:
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)
