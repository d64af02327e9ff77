"""What of a conversion is done: kept beside the shards that are written, so that a stopped run can go on.

A run works in `.NAME.partial` beside the folder it is to make: `checkpoint/` holds what is written, `state.json` the
settings, what the source was, and the shards that are finished and flushed. Knows nothing of what is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtplab.checkpoint import Checkpoint
from mtplab.checkpoint.header import MAX_HEADER_BYTES
from mtplab.checkpoint.strict_json import open_regular, read_json_object, shown
from mtplab.checkpoint.write import sync_folder
from mtplab.errors import CheckpointError, ConfigError

__all__ = ["Partial", "check_free", "identity", "write_json"]

_VERSION = 1
_TRIES = 100  # at a lock that runs which end remove


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Flushed to disk, and whole or not there. Raises OSError."""
    temporary = path.with_name(f".{path.name}.new")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def identity(source: Checkpoint) -> dict[str, Any]:
    """What tells that a source is the one it was: where each shard lies, its size, time of change and header; the
    configs' content.

    A change of values that leaves all of that as it was is not seen. Raises CheckpointError for a shard that
    cannot be read.
    """
    shards = {}
    for path in source.files.shards:
        descriptor, _ = open_regular(path, "a safetensors file")
        try:
            with os.fdopen(descriptor, "rb") as file:
                found = os.fstat(file.fileno())
                length = int.from_bytes(head := file.read(8), "little")
                # it may be another file by now, whose first bytes say anything
                digest = hashlib.sha256(head + file.read(min(length, MAX_HEADER_BYTES))).hexdigest()
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from None
        name = path.relative_to(source.files.folder).as_posix()
        # archives give files one time for all: two sources of the same shapes then differ in where they lie
        shards[name] = {
            "file": os.fsencode(os.path.realpath(path)).hex(), "inode": found.st_ino, "size": found.st_size,
            "changed": found.st_mtime_ns, "header": digest,
        }  # fmt: skip
    said = json.dumps([source.config, source.found.content if source.found else None], sort_keys=True)
    return {"config": hashlib.sha256(said.encode()).hexdigest(), **shards}


def check_free(target: Path) -> None:
    """Raises ConfigError where something has the name already. Raises OSError where that cannot be found out."""
    try:
        os.lstat(target)
    except FileNotFoundError:
        return
    raise ConfigError(f"{target}: expected a folder that does not exist yet. Choose another.")


class Partial:
    """The folder of a run that makes `target`. Made by `opened`."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.folder = target.with_name(f".{target.name}.partial")
        self.content = self.folder / "checkpoint"
        self._state = self.folder / "state.json"
        self._said: dict[str, Any] = {}

    @contextmanager
    def opened(self, settings: dict[str, Any], source: dict[str, Any], restart: bool) -> Iterator[Partial]:
        """For one run at a time; what a run left is taken up where settings and source are the same.

        Raises ConfigError, naming what differs, where they are not, or where another run has made the target just now,
        and CheckpointError where another run is at it.
        """
        with self._alone():
            if restart:
                self._clear()
            if self._state.exists():
                self._compare(settings, source)
                self._keep_finished()
            else:
                self._clear()  # whatever it is, no state speaks for it
                self._said = {"version": _VERSION, "settings": settings, "source": source, "done": {}}
                write_json(self._state, self._said)
            self.content.mkdir(exist_ok=True)
            try:
                yield self
            except BaseException:
                # a run that finished nothing has nothing to go on from
                if not self._said["done"]:
                    self.remove()
                raise

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            import fcntl
        except ImportError:  # no such locks on Windows: two runs at once are the user's to avoid
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
            return
        lock = self.folder / "lock"
        for _ in range(_TRIES):
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                file = open(lock, "w")  # noqa: SIM115
            except FileNotFoundError:
                continue  # a run that ended removed the folder meanwhile
            with file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise CheckpointError(
                        f"{self.target}: another run is writing it just now ({self.folder}). Wait for it or stop it."
                    ) from None
                # the lock of a file that a run removed when it ended keeps nobody out
                if not _is_at(file.fileno(), lock):
                    continue
                try:
                    check_free(self.target)  # which that run may have made
                except ConfigError:
                    if not self._state.exists():
                        self.remove()
                    raise
                yield
                return
        raise CheckpointError(f"{self.target}: cannot be written: {lock} goes away as soon as it is made.")

    def _compare(self, settings: dict[str, Any], source: dict[str, Any]) -> None:
        said = read_json_object(self._state, "the state of a conversion")
        if said.get("version") != _VERSION or not all(
            isinstance(said.get(k), dict) for k in ("settings", "source", "done")
        ):
            raise ConfigError(f"{self._state}: expected a state of version {_VERSION}. --restart starts over.")
        for what, old, new in (("settings", said["settings"], settings), ("source", said["source"], source)):
            # as JSON has them: a tuple comes back as a list
            new = json.loads(json.dumps(new))
            for key in dict.fromkeys([*old, *new]):
                if old.get(key) != new.get(key):
                    detail = (
                        f"was {shown(old.get(key))}, now {shown(new.get(key))}" if what == "settings" else "changed"
                    )
                    raise ConfigError(
                        f"{self.target}: an unfinished run ({self.folder}) had other {what}: {key} {detail}. Give the "
                        "same to go on with it; --restart starts over."
                    )
        self._said = said

    def _keep_finished(self) -> None:
        """Remove what a killed run left half written: nothing gets into the target but what was finished."""
        for folder, _, names in os.walk(self.content):
            for path in (Path(folder) / name for name in names):
                if path.relative_to(self.content).as_posix() not in self._said["done"]:
                    path.unlink()

    def is_done(self, shard: str, size: int, header: bytes) -> bool:
        """Whether the shard was finished, and lies there with the size and header that it is to have."""
        digest = hashlib.sha256(header).hexdigest()
        if self._said["done"].get(shard) != {"size": size, "header": digest}:
            return False
        try:
            with open(self.content / shard, "rb") as file:
                return os.fstat(file.fileno()).st_size == size and file.read(len(header)) == header
        except OSError:
            return False

    def finished(self, shard: str, size: int, header: bytes) -> None:
        """Note that a shard is written and flushed."""
        self._said["done"][shard] = {"size": size, "header": hashlib.sha256(header).hexdigest()}
        write_json(self._state, self._said)

    def publish(self) -> None:
        """Make the content the target, in one step. Raises ConfigError where the target appeared meanwhile."""
        for folder, _, _ in os.walk(self.content):
            sync_folder(Path(folder))
        check_free(self.target)  # an empty folder would be replaced
        os.rename(self.content, self.target)
        sync_folder(self.target.parent)
        self.remove()

    def _clear(self) -> None:
        with suppress(FileNotFoundError):
            self._state.unlink()
        with suppress(FileNotFoundError):
            shutil.rmtree(self.content)

    def remove(self) -> None:
        """Nothing stays of the run but what was published."""
        with suppress(OSError):
            shutil.rmtree(self.folder)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the open file is the one that has the name now."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
