"""Watches over one engine, so that nothing of it outlives who started it: `guardian.py PARENT SECONDS PROGRAM …`.

A program of its own, of the standard library alone, so that it is there in milliseconds and what happens to its parent
does not happen to it. It starts PROGRAM in a session of its own, whose output goes where its own stderr goes, and says
`started PID` (or `failed WHY`) and in the end `ended CODE` on stdout. It ends the engine, everything that the engine
started with it, on a line `stop SECONDS` on its stdin, when that is closed, when PARENT is its parent no more, and on
a signal: SIGTERM first, SIGKILL to what is left after SECONDS. Knows nothing of engines.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

__all__ = ["Process", "descendants", "processes"]

_LINUX = sys.platform == "linux"
_PDEATHSIG, _SUBREAPER = 1, 36  # linux/prctl.h: PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_LOOK = 1.0  # seconds between two looks at the parent and at the log
_ENDING = 0.05  # and while the engine ends
LEFT_BEHIND = 1.0  # seconds for what an engine that ended by itself left running
KILLING = 10.0  # seconds until what SIGKILL did not end (it waits for a device) is left alone
_LOG = 64 << 20  # bytes of log at which its beginning is dropped
_LOG_KEPT = 1 << 20


class Process:
    """A line of /proc: its number, its parent's, its session's, and whether it has ended and only waits to be read."""

    def __init__(self, pid: int, parent: int, session: int, ended: bool):
        self.pid, self.parent, self.session, self.ended = pid, parent, session, ended


def processes() -> Iterator[Process]:
    """All there are; none where there is no /proc."""
    names = os.listdir("/proc") if _LINUX else []
    for name in names:
        if name.isdecimal():
            # a process may end while it is read
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    # proc(5): pid (name) state ppid pgrp session …, and the name may hold anything
                    state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
                yield Process(int(name), int(parent), int(session), state in (b"Z", b"X"))


def descendants(of: int) -> list[int]:
    """What runs below a process. What loses its parent comes to a guardian, so that nothing gets out of its sight."""
    children: dict[int, list[Process]] = {}
    for process in processes():
        children.setdefault(process.parent, []).append(process)
    found, below = [], [of]
    while below:
        for process in children.pop(below.pop(), ()):
            below.append(process.pid)
            if not process.ended:
                found.append(process.pid)
    return found


class _Guardian:
    """One engine, from its start to its end."""

    def __init__(self, parent: int, seconds: float, wake: int):
        self.parent, self.seconds, self.wake = parent, seconds, wake
        self.pid = 0
        self.code: int | None = None
        self.asked = 0  # signals to stop
        self.killing: float | None = None  # when what is left is killed
        self._input: int | None = 0
        self._line = b""
        self._swept = False

    def start(self, command: list[str]) -> None:
        """Raises OSError, ValueError, SubprocessError."""
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=2,
            start_new_session=True,
            preexec_fn=_tie(os.getpid()),
        )
        self.pid = child.pid
        child.returncode = 0  # it is waited for here, with all that come to this process

    def watch(self) -> int | None:
        """Until all has ended: the engine's exit code, or minus the signal that ended it; None where nothing does."""
        while True:
            self._reap()
            if os.getppid() != self.parent or self.asked:
                self._stop(0.0 if self.asked > 1 else self.seconds)
            if self.code is not None and self._left() == 0:
                return self.code
            if self.killing is not None and time.monotonic() >= self.killing:
                self._kill()
                return self.code
            _cut_log()
            self._wait(_LOOK if self.killing is None else _ENDING)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.pid:
                    self.code = os.waitstatus_to_exitcode(status)

    def _stop(self, seconds: float) -> None:
        """Ask the engine to end. An engine ends its own workers: they are asked only once it has ended."""
        if self.killing is None and self.code is None:
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGTERM)
        self._within(seconds)

    def _within(self, seconds: float) -> None:
        ends = time.monotonic() + seconds
        self.killing = ends if self.killing is None else min(ends, self.killing)

    def _left(self) -> int:
        """How many are left of an engine that ended; they are asked to end too, once."""
        left = descendants(os.getpid())
        if not _LINUX:
            left = [-self.pid] if _there(-self.pid) else []
        if left and not self._swept:
            self._swept = True
            if self.killing is None:
                self._within(min(self.seconds, LEFT_BEHIND))
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGTERM)
        return len(left)

    def _kill(self) -> None:
        ends = time.monotonic() + KILLING
        while time.monotonic() < ends:
            left = descendants(os.getpid())
            if not _LINUX and _there(-self.pid):
                left = [-self.pid]
            # one that is started meanwhile is found the next time
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            if not left and self.code is not None:
                return
            time.sleep(0.01)

    def _wait(self, seconds: float) -> None:
        """For a child's end, a signal, or a word from the parent."""
        ready, _, _ = select.select([self.wake, *([] if self._input is None else [self._input])], [], [], seconds)
        if self.wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 4096)
        if self._input in ready:
            self._read()

    def _read(self) -> None:
        try:
            said = os.read(0, 4096)
        except OSError:
            said = b""
        if not said:  # the parent is gone
            self._input = None
            self._stop(self.seconds)
            return
        *lines, self._line = (self._line + said).split(b"\n")
        for line in lines:
            word, _, number = line.partition(b" ")
            if word == b"stop":
                with contextlib.suppress(ValueError):
                    self._stop(float(number) if number else self.seconds)


def _there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _tie(guardian: int) -> Callable[[], None]:
    """What a child does before it becomes the engine: it is to be killed where its guardian is."""

    def tie() -> None:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:  # which happened before this line
            os._exit(1)

    return tie


if _LINUX:
    _libc = ctypes.CDLL(None)

    def _prctl(option: int, value: int) -> None:
        _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))

else:

    def _prctl(option: int, value: int) -> None:
        pass


def _cut_log() -> None:
    """Keeps a log that grows for days to its end."""
    with contextlib.suppress(OSError):
        found = os.fstat(2)
        if stat.S_ISREG(found.st_mode) and found.st_size > _LOG:
            kept = os.pread(2, _LOG_KEPT, found.st_size - _LOG_KEPT)
            os.ftruncate(2, 0)
            os.write(2, kept)


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(1, line.replace("\n", " ").encode("utf-8", "surrogateescape") + b"\n")


def _main(arguments: list[str]) -> int:
    parent, seconds, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    _prctl(_SUBREAPER, 1)
    wake, waking = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    guardian = _Guardian(parent, seconds, wake)

    def ask(*_: object) -> None:
        guardian.asked += 1

    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(name, ask)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        guardian.start(command)
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        _tell(f"failed {getattr(problem, 'strerror', None) or problem}")
        return 1
    _tell(f"started {guardian.pid}")
    code = guardian.watch()
    _tell("stuck" if code is None else f"ended {code}")
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
