"""An engine's process: started under a guardian, its last words read, ended with all that it started.

The log is a file without a name, so that nothing of it is left anywhere. Knows neither engines nor what a server is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from mtplab.engines.clean import hides
from mtplab.engines.guardian import KILLING, LEFT_BEHIND, descendants, processes
from mtplab.errors import MtplabError, printable

__all__ = ["EngineProcess"]

_READ = 64 << 10  # bytes of the log's end that are looked at
_LINE = 240  # characters of a line
_LINES = 6
# colours and the like
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_FAULT = re.compile(r"\b\w*(?:Error|Exception|error|fatal)\b\s*:")


class EngineProcess:
    """A program that runs until it is stopped, or this process has ended in whatever way.

    Args:
        command: the program, looked for on the environment's PATH, and its arguments.
        environment: all of its environment.
        logs: the folder that its log is kept in where its last words are asked for; None keeps nothing of it.
        stop: seconds that it is given to end where nobody says otherwise.
        secrets: what is cut out of whatever it said.

    Raises MtplabError where it cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        stop: float,
        secrets: Sequence[str] = (),
        logs: Path | None = None,
    ):
        self._hide = hides(secrets)
        self._code: int | None = None
        self.stuck = False  # whether not even SIGKILL has ended it
        self._said = ""
        self._lock = threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # what is written goes to the end, also after the guardian has cut the beginning
        fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        self._stop, self._logs = stop, logs
        guardian = [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py"))]
        try:
            self._guardian = subprocess.Popen(
                [*guardian, str(os.getpid()), str(stop), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=dict(environment),
                # a Ctrl-C is this process's to see to
                start_new_session=True,
            )
        except (OSError, ValueError) as problem:
            self._log.close()
            raise MtplabError(f"{command[0]}: cannot be started ({problem})") from None
        word, _, rest = self._guardian.stdout.readline().decode("utf-8", "replace").strip().partition(" ")
        if word != "started":
            self._guardian.wait()
            self._settle()
            raise MtplabError(f"{command[0]}: cannot be started ({rest or self.last_words()})")
        self.pid = int(rest)

    def poll(self) -> int | None:
        """None while it runs; then its exit code, or minus the signal that ended it. Nothing of it is left then."""
        if self._guardian.poll() is not None:
            self._settle()
        return self._code

    def ending(self) -> str:
        """How it ended, in words that follow its name."""
        code = self.poll()
        if self.stuck:
            return "does not end by SIGKILL either, which what waits for a device does not, and is left behind,"
        if code is None:
            return "runs"
        return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"

    def wait(self, seconds: float) -> int | None:
        """`poll` once it has ended, or after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guardian.wait(seconds)
        return self.poll()

    def stop(self, seconds: float | None = None) -> int | None:
        """End it, within this many seconds by itself; the same as `poll` afterwards."""
        seconds = self._stop if seconds is None else seconds
        if self.poll() is None:
            with contextlib.suppress(OSError, ValueError):
                self._guardian.stdin.write(f"stop {seconds}\n".encode())
                self._guardian.stdin.flush()
            if self.wait(seconds + LEFT_BEHIND + KILLING + 5.0) is None:
                self._guardian.kill()  # which takes the engine along
                self._guardian.wait()
        return self.poll()

    def listens(self, port: int) -> bool | None:
        """Whether it is the engine, or what it started, that listens on a TCP port of this machine, and nobody else
        does; None where that cannot be told."""
        there = _listening(port)
        if there is None:
            return None
        held = [_sockets(pid) for pid in descendants(self._guardian.pid)]
        if there <= set().union(*(each for each in held if each is not None)):
            return bool(there)
        return None if None in held else False

    def tail(self, lines: int = _LINES) -> list[str]:
        """The last lines that it wrote, each cut to a bearable length, no secret among them."""
        return [line[:_LINE] for line in self._lines()[-lines:]]

    def last_words(self) -> str:
        """The same on one line, after the lines before them that name an error: a program that falls over its own
        child says why first and that last."""
        lines = [line[:_LINE] for line in self._lines()]
        early = dict.fromkeys(line for line in lines[:-_LINES] if _FAULT.search(line))
        return (" | ".join([*list(early)[-2:], *lines[-_LINES:]]) or "it wrote nothing") + self._kept()

    def _kept(self) -> str:
        """Where the log lies from now on: what ended a process may stand far above its last words."""
        text = self._text()
        if self._logs is None or not text.strip():
            return ""
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{self._guardian.pid}.log"
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
            (self._logs / name).write_text(text, encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return f" (its log: {self._logs.name}/{name} of the results folder)"

    def _lines(self) -> list[str]:
        text = self._text()
        found = (printable(line).strip() for line in text.replace("\r", "\n").split("\n"))
        return [line for line in found if line]

    def _text(self) -> str:
        with self._lock:
            if self._log.closed:
                return self._said
            descriptor = self._log.fileno()
            size = os.fstat(descriptor).st_size
            raw = os.pread(descriptor, _READ, max(0, size - _READ))
        text = raw.decode("utf-8", "replace")
        if size > _READ:  # half a line may hold half a secret
            text = text.partition("\n")[2]
        return self._hide(_ESCAPES.sub("", text))

    def _settle(self) -> None:
        """Once the guardian has ended: what it said last, what the log holds last, and everything let go of."""
        said = self._text()
        with self._lock:
            if self._log.closed:
                return
            word, _, rest = self._guardian.stdout.read().decode("utf-8", "replace").strip().partition(" ")
            if word == "ended":
                self._code = int(rest)
            elif word == "stuck":
                self.stuck, self._code = True, -signal.SIGKILL
            else:
                self._code = self._guardian.returncode
                if hasattr(self, "pid"):
                    _kill_session(self.pid)
            self._said = said
            self._log.close()
            self._guardian.stdout.close()
            with contextlib.suppress(OSError):
                self._guardian.stdin.close()


def _listening(port: int) -> set[str] | None:
    """The sockets, by number, on which somebody listens at a port; None where there is no /proc."""
    found, tables = set(), 0
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/net/{name}", encoding="ascii") as file:
                lines = file.read().splitlines()[1:]
        except OSError:
            continue
        tables += 1
        for line in lines:
            # proc(5): number, local address:port in hexadecimal, remote, state (0A listens), …, inode in the tenth
            words = line.split()
            if len(words) > 9 and words[3] == "0A" and int(words[1].rpartition(":")[2], 16) == port:
                found.add(words[9])
    return found if tables else None


def _sockets(pid: int) -> set[str] | None:
    """The sockets that a process holds, none where it has ended; None where it is another user's."""
    found = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except PermissionError:
        return None
    except OSError:
        return found
    for name in names:
        with contextlib.suppress(OSError):  # closed meanwhile
            link = os.readlink(f"/proc/{pid}/fd/{name}")
            if link.startswith("socket:["):
                found.add(link[len("socket:[") : -1])
    return found


def _kill_session(session: int) -> None:
    """What a guardian that was killed itself left: the engine has gone with it, but not what the engine had started."""
    ends = time.monotonic() + KILLING
    while time.monotonic() < ends:
        left = [each.pid for each in processes() if each.session == session and not each.ended]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
