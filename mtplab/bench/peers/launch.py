"""One job in one process of an engine's environment, its result kept on disk so that it is run once.

A result is taken from disk where the job is the same to the letter and the checkpoint has the same bytes. The process
gets a session of its own, which is killed when it ends or takes too long. Knows nothing of what a job does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtplab.errors import MtplabError
from mtplab.study.store import write_atomically

__all__ = ["Keeper", "digest_of", "run_job"]


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Keeper:
    """Results by name in a folder, each beside the job it answers."""

    def __init__(self, folder: Path, fresh: bool = False) -> None:
        self.folder, self.fresh = folder, fresh
        self._made: set[str] = set()

    def recall(self, name: str, job: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was kept for this very job; None where there is nothing, or only another job's."""
        file = self.folder / f"{name}.json"
        if (self.fresh and name not in self._made) or not file.is_file():
            return None
        try:
            kept = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            return None
        return kept["result"] if isinstance(kept, dict) and kept.get("job") == job and "result" in kept else None

    def keep(self, name: str, job: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Write a result whole or not at all. Raises ConfigError where the disk does not take it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{name}.json", (json.dumps({"job": job, "result": result}) + "\n").encode())
        self._made.add(name)


def run_job(
    command: Sequence[str], job: Mapping[str, Any], folder: Path, name: str, seconds: float, env: Mapping[str, str]
) -> dict[str, Any]:
    """Run a worker on a job; its result, with `wall` seconds from its start to its end, `cpu` seconds of processor that
    it and what it waited for took, and the machine's load before.

    Raises MtplabError where it fails or takes longer than `seconds`; what it printed stays in `folder`. A SIGTERM is
    taken as the end of the program, so that the worker ends with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, out = folder / f"{name}.log", folder / f"{name}.out.tmp"
    out.unlink(missing_ok=True)
    load = os.getloadavg()[0]
    before = signal.signal(signal.SIGTERM, _leave)
    used, began = _cpu_of_children(), time.perf_counter()
    try:
        returned = _watched(command, job, log, out, seconds, env)
    except subprocess.TimeoutExpired:
        raise MtplabError(f"{name}: took more than {seconds:.0f} s and was stopped; see {log}") from None
    finally:
        signal.signal(signal.SIGTERM, before)
    wall, cpu = time.perf_counter() - began, _cpu_of_children() - used
    if returned or not out.is_file():
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise MtplabError(f"{name}: ended with {returned}; see {log}, which ends with: {' | '.join(tail)}")
    result = json.loads(out.read_text(encoding="utf-8"))
    out.unlink()
    return result | {"wall": wall, "cpu": cpu, "load before": round(load, 2)}


def _cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _watched(
    command: Sequence[str], job: Mapping[str, Any], log: Path, out: Path, seconds: float, env: Mapping[str, str]
) -> int:
    """The exit status of a worker, which is gone with all that it started when this returns or raises."""
    with log.open("wb") as printed:
        process = subprocess.Popen(
            [*command, str(out)],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(job).encode(), timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode


def _leave(number: int, frame: object) -> None:
    """End in the ordinary way, through every `finally`."""
    raise SystemExit(128 + number)
