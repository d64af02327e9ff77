"""An engine brought up and held: its checkpoint written, its process started, waited for, and ended.

What a command is made of is in `launch.py`, asking a server in `asking.py`, and how nothing is left in `guardian.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import ipaddress
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mtplab.checkpoint import open_checkpoint
from mtplab.config import SamplingConfig
from mtplab.engines.asking import Server
from mtplab.engines.attach import Attached, NoSuchModel, recognised
from mtplab.engines.clean import Cleaner, bracketed, key_of
from mtplab.engines.client import Broken, Client, Refused
from mtplab.engines.engine import Engine, Wanted
from mtplab.engines.figures import FiguresFull
from mtplab.engines.guardian import LEFT_BEHIND
from mtplab.engines.installed import launch_version, program_of, remedy
from mtplab.engines.loop import Cancelled, OutOfTime, in_loop
from mtplab.engines.measured import Measured
from mtplab.engines.process import EngineProcess
from mtplab.engines.serving import Progress, Running
from mtplab.engines.settings import Attach, Launch
from mtplab.errors import CheckpointError, ConfigError, MtplabError

__all__ = ["converted", "start"]

_POLL = 0.1  # seconds between two looks at a server that comes up
_ANSWER = 5.0  # seconds of one look
_PORTS = 3  # that are tried where another server is on one
_RUN = ("target", "head", "draft")  # parts of a plan that an engine runs for text
# seconds in which a process whose requests broke may turn out to have ended, and what it left to be gone
_DYING = LEFT_BEHIND + 1.0


class _Started:
    """A server of ours (`Running`): it lives as its process does."""

    def __init__(self, title: str, server: Server, process: EngineProcess, paths: tuple[str, ...]):
        self._title, self._server, self._process, self._paths = title, server, process, paths
        self._full = False

    def measure(
        self,
        prompts: Sequence[Sequence[int]],
        domains: Sequence[str],
        depth: int,
        sampling: SamplingConfig,
        cancel: Any,
        on_progress: Callable[[Progress], None] | None,
    ) -> Measured:
        try:
            return self._server.measure(prompts, domains, depth, sampling, cancel, on_progress)
        except MtplabError as problem:
            self._full = self._full or isinstance(problem, FiguresFull)
            code = None if cancel.is_set() or self._full else self._process.wait(_DYING)
            if code is not None:
                problem = MtplabError(
                    f"{self._title} {self._process.ending()} while it was measured; the last it said: "
                    f"{self._process.last_words()} ({problem})"
                )
            raise self._server.cleaner(self._paths).error(problem) from None

    def alive(self) -> bool:
        # one that nothing can be counted on any more is replaced
        return not self._full and self._process.poll() is None

    def close(self) -> None:
        try:
            self._server.close()
        finally:
            self._process.stop()
        if self._process.stuck:
            raise MtplabError(f"{self._title} {self._process.ending()} with what it holds of the machine")


def start(
    engine: Engine, settings: Launch, wanted: Wanted, command: Callable[[str, int], list[str]], cancel: Any
) -> Running:
    """A server that answers.

    Args:
        command: from the model's name and the port.
        cancel: what `is_set()` of gives it up.

    Raises MtplabError where there is none within `settings.start` seconds; nothing is left of it then. No key, address
    or path is in it, for it is what a row has in place of figures.
    """
    key, ends = key_of(settings.key_variable), time.monotonic() + settings.start
    paths = _paths_of(wanted, settings)
    for attempt in range(1, _PORTS + 1):
        try:
            return _start(engine, settings, wanted, command, key, ends, paths, cancel)
        except _Taken as problem:
            if attempt == _PORTS:
                raise Cleaner(engine.title, None, (key,) if key else (), paths).error(problem) from None
        except MtplabError as problem:
            raise Cleaner(engine.title, None, (key,) if key else (), paths).error(problem) from None
    raise AssertionError("the last attempt returns or raises")


class _Taken(MtplabError):
    """Another server got the port in the moment between its choice and its use."""


def _start(
    engine: Engine,
    settings: Launch,
    wanted: Wanted,
    command: Callable[[str, int], list[str]],
    key: str | None,
    ends: float,
    paths: tuple[str, ...],
    cancel: Any,
) -> Running:
    # a name that no other server has: what answers on the port is known to be this one
    name, host = f"mtplab-{uuid.uuid4().hex[:12]}", _reached(settings.host)
    words = command(name, port := _free_port(settings.host))
    if program_of(settings) is None:
        raise MtplabError(f"{engine.title}: {words[0]} is not there; {remedy(settings)}")
    began = time.monotonic()
    logs = None if wanted.logs is None else Path(wanted.logs)
    process = EngineProcess(
        words, _environment(engine, settings, key, host), settings.stop, [key] if key else [], logs
    )
    try:
        address = f"http://{bracketed(host)}:{port}"
        shown = None if engine.key_variable is None else key
        asked = Attach(addresses=(address,), engine=engine.name, model=name, key_variable=settings.key_variable)
        try:
            found = in_loop(
                lambda: _answering(engine, process, asked, port, shown), cancel, max(0.0, ends - time.monotonic())
            )
        except Cancelled:
            raise MtplabError(f"{engine.title} was stopped before it answered") from None
        except OutOfTime:
            raise MtplabError(
                f"{engine.title} was not ready within {settings.start:g} s (start of a Launch); the last it said: "
                f"{process.last_words()}"
            ) from None
        _check_told(engine, wanted, found)
        facts: dict[str, Any] = {"attached": False, **engine.described()}
        facts |= {"version": launch_version(settings), "start_seconds": round(time.monotonic() - began, 1)}
        facts |= {name: value for name, value in vars(found.known).items() if value is not None}
        server = Server(address, engine, name, settings.limits, shown, facts)
    except BaseException:
        process.stop()
        raise
    return _Started(engine.title, server, process, paths)


async def _answering(engine: Engine, process: EngineProcess, asked: Attach, port: int, key: str | None) -> Attached:
    """What the server says of itself, once it is ready. Raises _Taken where it is not the one that was started,
    MtplabError where that has ended."""
    (address,) = asked.addresses
    taken = f"{address}: another server answers there than the one that was started; try again"
    async with Client(address, None, seconds=_ANSWER) as stranger, Client(address, key, seconds=_ANSWER) as ours:
        while True:
            if process.poll() is not None:
                raise MtplabError(
                    f"{engine.title} {process.ending()} before it answered; the last it said: {process.last_words()}"
                )
            with contextlib.suppress(Broken):
                status, _ = await stranger.get(engine.health_path)
                if status == 404:  # an engine without one
                    status, _ = await stranger.get(engine.models_path)
                closed = status in (401, 403)
                if closed and key is None:
                    raise _Taken(taken)
                # a key is for the one that was started: whoever listens there otherwise does not get to see it
                if (closed or status == 200) and key is not None and process.listens(port) is False:
                    raise _Taken(f"{taken}; no process of what was started listens there, so it got no API key")
                if status == 200 or closed:
                    try:
                        return await recognised(ours, asked)
                    except (NoSuchModel, Refused):
                        raise _Taken(taken) from None
            await asyncio.sleep(_POLL)


def _check_told(engine: Engine, wanted: Wanted, found: Attached) -> None:
    """Raises MtplabError where the server says that it is not what it was started for: an engine may leave aside what
    it was told."""
    fault = found.contradiction(wanted.quant_policy, wanted.draft_quant_policy)
    if fault is None and found.depth not in (None, wanted.depth):
        fault = f"{engine.title} was started for depth {wanted.depth}, and says that it drafts {found.depth} a round"
    if fault is not None:
        raise MtplabError(fault)


def _paths_of(wanted: Wanted, settings: Launch | None = None) -> tuple[str, ...]:
    """Paths of this machine that an engine, or what is written for it, may name."""
    found = [wanted.checkpoint, os.getcwd()]
    if wanted.converted is not None:
        folder = Path(wanted.converted[1])
        found += [str(folder), str(folder.parent), str(folder.parent.parent)]
    if settings is not None:
        words = (settings.served or "", *(settings.command or ()), *settings.arguments)
        found += [word.rpartition("=")[2] for word in words]
    return tuple(path for path in found if path.startswith("/"))


def _environment(engine: Engine, settings: Launch, key: str | None, host: str) -> dict[str, str]:
    """This process's, with the key under the engine's name for it and under no other."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(engine.unset)}
    found.pop(settings.key_variable, None)
    if engine.key_variable is not None:
        found.pop(engine.key_variable, None)
        if key is not None:
            found[engine.key_variable] = key
    # engines ask themselves whether they are up, and a proxy would not know
    for name in ("no_proxy", "NO_PROXY"):
        found[name] = ",".join(filter(None, [found.get(name), "localhost,127.0.0.1,::1", host]))
    return found | engine.environment()


def _reached(host: str) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    try:
        found = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(found) if not found.is_unspecified else "127.0.0.1" if found.version == 4 else "::1"


def _free_port(host: str) -> int:
    """A port that nobody listens on at the moment. Raises ConfigError for a host that is not this machine's."""
    try:
        try:
            family = socket.AF_INET if ipaddress.ip_address(host).version == 4 else socket.AF_INET6
            place: Any = (host, 0)
        except ValueError:  # a name
            family, *_, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.bind(place)
            return listener.getsockname()[1]
    except (OSError, UnicodeError) as problem:
        raise ConfigError(
            f"host {host!r:.80} of a Launch: nothing can listen there on this machine ({problem})"
        ) from None


def converted(wanted: Wanted, cancel: Any) -> None:
    """Write the checkpoint that the engine needs where it is not there yet; one process at a time does.

    Raises ConfigError, CheckpointError as `quantize_checkpoint`, and where the folder holds something else; MtplabError
    where `cancel` is set before it is whole. What was done is gone on with the next time. Paths are in it by their last
    parts.
    """
    if wanted.converted is None:
        return
    try:
        _write(wanted, cancel)
    except MtplabError as problem:
        raise Cleaner("", paths=_paths_of(wanted)).error(problem) from None


def _write(wanted: Wanted, cancel: Any) -> None:
    kept, folder = wanted.converted[0], Path(wanted.converted[1])

    def go_on(*_: int) -> None:
        if cancel.is_set():
            raise MtplabError(f"{folder}: stopped before the checkpoint was written")

    with _alone(folder, go_on):
        if not os.path.lexists(folder):
            from mtplab.checkpoint.convert import quantize_checkpoint

            quantize_checkpoint(wanted.checkpoint, folder, exclude=list(kept) or "none", progress=go_on)
    _check_kept(folder, set(kept))


def _check_kept(folder: Path, wanted: set[str]) -> None:
    """A row says what ran in FP8: a checkpoint that has it otherwise is not served. Reads headers only."""
    modules = open_checkpoint(folder).plan().modules
    found = {
        module.name
        for module in modules
        if module.part in _RUN and module.multiplies and (module.weight, module.activation) != ("fp8", "fp8")
    }
    wrong = sorted(found ^ wanted)
    if wrong:
        raise CheckpointError(
            f"{folder}: {len(wrong)} modules are {'not ' if wrong[0] in found else ''}in FP8 and were to be otherwise "
            f"({', '.join(wrong[:3])}); remove the folder where it is not what mtplab wrote, or sweep other exclusions."
        )


@contextlib.contextmanager
def _alone(folder: Path, go_on: Callable[[], None]) -> Iterator[None]:
    """Holds the lock of what is to be written; it ends with its process. Its file stays: removing it would let two
    processes lock two files of one name."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open(folder.with_name(f".{folder.name}.lock"), "ab")  # noqa: SIM115
    except OSError as problem:
        raise CheckpointError(f"{folder}: cannot be written: {problem.strerror or problem}.") from None
    with lock:
        while True:
            go_on()
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_POLL)
            else:
                break
        yield
