"""Whether an engine is installed, and in which version, found without starting it.

Asks the Python that the engine's program belongs to what is installed beside it. Knows no engine by name.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from mtplab.engines.registry import engine_of
from mtplab.engines.settings import Launch

__all__ = ["launch_version", "program_of", "remedy"]

_SECONDS = 30.0
_PYTHON = re.compile(r"python[\d.]*")
# a script's own interpreter, by #! or by the detour through /bin/sh that installers take where that is too long
_INTERPRETER = re.compile(rb"(/[^\s\"']*/python[\d.]*)[\s\"']")
# a package may be distributed under another name than it is imported by
_ASK = """
import sys
from importlib.metadata import PackageNotFoundError, packages_distributions, version
name = sys.argv[1]
try:
    print(version(name))
except PackageNotFoundError:
    for each in packages_distributions().get(name, ())[:1]:
        print(version(each))
"""


def launch_version(settings: Launch) -> str | None:
    """The version of the engine's Python package where its program is; None where it cannot be told. Raises ConfigError
    for an engine that is not known."""
    engine, program = engine_of(settings.engine), program_of(settings)
    python = None if program is None or engine.package is None else _python_of(Path(program))
    if python is None:
        return None
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK, engine.package],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=True,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    said = done.stdout.decode("utf-8", "replace").strip()
    return said if re.fullmatch(r"[\w.+!-]{1,64}", said) else None


def program_of(settings: Launch) -> str | None:
    """The file that starts the engine on this machine; None where there is none."""
    return shutil.which((settings.command or engine_of(settings.engine).program_here())[0])


def remedy(settings: Launch) -> str:
    """What to do where there is no `program_of`."""
    whole = f"/where/it/is/{' '.join(engine_of(settings.engine).program)}"
    return f"install it, or say what starts it (command= of a Launch, or --engine-command), such as '{whole}'"


def _python_of(program: Path) -> Path | None:
    """The interpreter of a script, or the program where it is one; None for anything else."""
    if _PYTHON.fullmatch(program.name):
        return program
    try:
        with open(program, "rb") as file:
            head = file.read(512)
    except OSError:
        return None
    if not head.startswith(b"#!") or b"python" not in head:
        return None
    found = _INTERPRETER.search(head)
    named = [] if found is None else [Path(os.fsdecode(found.group(1)))]
    beside = [folder / "python" for folder in (program.parent, program.resolve().parent)]
    return next((path for path in (*named, *beside) if os.access(path, os.X_OK)), None)
