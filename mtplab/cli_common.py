"""What the commands share: how text reaches a terminal, how a list is spelled, how a bar is drawn.

Knows no command and nothing of models. Whatever a checkpoint, a prompt or a model brings in is printed with
its control characters shown, never obeyed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mtplab.errors import ConfigError
from mtplab.report.text import plain

__all__ = [
    "ReaderGone",
    "depth_list",
    "emit",
    "exclusion",
    "names",
    "note",
    "numbers",
    "print_json",
    "say",
    "spinner",
    "step_bar",
]


class ReaderGone(Exception):
    """Whoever read stdout (head, less) has left."""


def say(text: object = "") -> None:
    """To stdout, control characters made visible."""
    emit(plain(text))


def emit(text: str) -> None:
    """To stdout as it is, at once. Raises `ReaderGone` when nobody reads it any more."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # typer would take it for a failure
        raise ReaderGone from None


def note(text: object) -> None:
    """One line to stderr."""
    print(plain(text).replace("\n", " "), file=sys.stderr)


def print_json(value: Any) -> None:
    """One JSON document to stdout, ASCII only, so that nothing in it reaches the terminal as a command."""
    emit(json.dumps(value, ensure_ascii=True, indent=2, allow_nan=False))


def depth_list(text: str) -> tuple[int, ...]:
    """`0-8`, `1,3,5` or `0,2-4` as depths. Raises `ConfigError`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--depths {text!r}: {part.strip()!r} is not a depth; expected e.g. 0-8 or 1,3,5")
        low, high = int(first), int(last if dash else first)
        if high < low:
            raise ConfigError(f"--depths {text!r}: {part.strip()!r} runs backwards")
        if high > 1000:  # the study says what it takes; this only keeps the list short
            raise ConfigError(f"--depths {text!r}: {high} is too deep")
        found += range(low, high + 1)
    return tuple(found)


def names(values: Sequence[str]) -> list[str]:
    """Every name of a repeatable, comma-separated option, in order."""
    return [part.strip() for value in values for part in value.split(",") if part.strip()]


def numbers(option: str, values: Sequence[str]) -> list[float]:
    """Likewise, as numbers. Raises `ConfigError`."""
    found = []
    for part in names(values):
        try:
            found.append(float(part))
        except ValueError:
            raise ConfigError(f"{option} {part!r}: expected a number such as 0 or 0.7") from None
    return found


def exclusion(text: str) -> str | list[str] | None:
    """One exclusion set: `as-stored`, `published`, `none`, or globs with commas between."""
    globs = names([text])
    if globs in (["as-stored"], ["stored"]):
        return None
    return globs[0] if globs in (["published"], ["none"]) else globs


@contextmanager
def step_bar(total: float | None, what: str, unit: str = "tok") -> Iterator[Any]:
    """A tqdm bar on stderr for one step; nothing when stderr is no terminal."""
    from tqdm import tqdm

    with tqdm(total=total, desc=plain(what), unit=unit, leave=False, file=sys.stderr, disable=None) as bar:
        yield bar


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """A moving sign on stderr while a step of unknown length runs; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(plain(what), spinner="dots"):
        yield
