"""What the commands share: options, how text reaches a terminal, how a list is spelled, how a bar is drawn.

Knows no command and nothing of models. Whatever a checkpoint, a prompt or a model brings in is printed with
its control characters shown, never obeyed.
"""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.errors import ConfigError, MtplabError
from mtplab.report.text import plain

__all__ = [
    "AsJson",
    "Batches",
    "CachePolicy",
    "Calibration",
    "CheckpointPath",
    "Device",
    "DraftCachePolicy",
    "Exact",
    "Exclude",
    "Layers",
    "MaxNewTokens",
    "ModelFormat",
    "Prompts",
    "ReaderGone",
    "Results",
    "TopK",
    "TopP",
    "depth_list",
    "drop_output",
    "emit",
    "exclusion",
    "move_bar",
    "names",
    "note",
    "numbers",
    "path_of",
    "print_json",
    "say",
    "share",
    "spinner",
    "step_bar",
    "warnings_as_notes",
    "whole_numbers",
]

# characters on stderr: of a path or a value, and of a whole message
MAX_WORD, MAX_LINE = 240, 1200
_SHARE = re.compile(r"[0-9]{0,3}(?:\.[0-9]{1,17})?(?<=[0-9])%?")


def path_of(text: str) -> Path:
    """A path as an option's value; an empty one, which would mean the current folder, is a slip."""
    if not text.strip():
        raise typer.BadParameter("an empty path; give a file or folder, or '.' for the current folder")
    return Path(text)


# options that mean the same in every command that has them
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Batches = Annotated[
    list[str] | None, typer.Option(metavar="NUMBERS", help="Sequences at once, commas between.  [default: 1]")
]
CachePolicy = Annotated[str, typer.Option(metavar="NAME", help="KV cache policy.")]
Calibration = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Texts that calibrated cache policies take their scales from, as --prompts are given; the bundled ones if "
        "left out.",
        parser=path_of,
    ),
]
CheckpointPath = Annotated[
    Path, typer.Argument(help="The checkpoint's folder, or hf://org/name.", metavar="PATH", parser=path_of)
]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, …")]
DraftCachePolicy = Annotated[
    str | None, typer.Option(metavar="NAME", help="The draft's; the target's if left out.")
]
Exact = Annotated[bool, typer.Option("--exact/--fast", help="Row-invariant arithmetic, or the fastest there is.")]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOBS",
        help="Modules kept out of FP8: published, none, or globs ('mtp.*'); repeat or use commas. A BF16 checkpoint is "
        "then quantised to FP8 as it is loaded.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(metavar="N", help="Tokens per prompt at most.")]
Layers = Annotated[
    str | None,
    typer.Option(
        metavar="NUMBERS",
        help="Only these layers of the target, e.g. 0-3, and the head: a slice that a small machine can hold.",
    ),
]
ModelFormat = Annotated[
    str | None,
    typer.Option(metavar="FORMAT", help="fp8 quantises a BF16 checkpoint as it is loaded, draft head included."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A .jsonl or .txt file, or a folder of .jsonl files; the bundled ones if left out.",
        parser=path_of,
    ),
]
Results = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where results are kept and read back from.  [default: results/<checkpoint>]",
        parser=path_of,
    ),
]
TopK = Annotated[int, typer.Option(metavar="K", help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(metavar="P", help="Keep the likeliest tokens up to this probability.")]


class ReaderGone(Exception):
    """Whoever read stdout (head, less) has left."""


def say(text: object = "") -> None:
    """To stdout, control characters made visible."""
    emit(plain(text))


def emit(text: str) -> None:
    """To stdout as it is, at once. Raises `ReaderGone` when nobody reads it any more, MtplabError where it cannot be
    written."""
    try:
        print(text, flush=True)
    except BrokenPipeError:  # typer would take it for a failure
        raise ReaderGone from None
    except OSError as problem:
        drop_output()
        raise MtplabError(f"the output cannot be written: {problem.strerror}; send it elsewhere") from None


def drop_output() -> None:
    """Sends what is still to be written to stdout nowhere, so that leaving does not try it once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def note(text: object) -> None:
    """One line to stderr, `mtplab: ` in front, with what is too long to be read cut in the middle."""
    words = (_cut(word, MAX_WORD) for word in plain(text).split(" "))
    with suppress(OSError):  # a stderr that takes nothing changes neither what is done nor the exit code
        print(f"mtplab: {_cut(' '.join(words).replace(chr(10), ' '), MAX_LINE)}", file=sys.stderr)


def _cut(text: str, limit: int) -> str:
    """The text if it has at most `limit` characters, else its two ends: paths and names differ there."""
    half = (limit - 1) // 2
    return text if len(text) <= limit else f"{text[:half]}…{text[-half:]}"


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Shows a warning as one line to stderr, without the line of source that raised it."""

    def show(message: Warning | str, *where: Any) -> None:
        note(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def print_json(value: Any) -> None:
    """One JSON document to stdout, ASCII only, so that nothing in it reaches the terminal as a command."""
    emit(json.dumps(value, ensure_ascii=True, indent=2, allow_nan=False))


def depth_list(text: str) -> tuple[int, ...]:
    """`0-8`, `1,3,5` or `0,2-4` as depths. Raises `ConfigError`."""
    from mtplab.config import number_list  # which brings pydantic: help is printed without

    try:
        return number_list(text)
    except ConfigError as problem:
        raise ConfigError(f"--depths {text!r:.60}: {problem}") from None


def names(option: str, values: Sequence[str]) -> list[str]:
    """Every name of a repeatable, comma-separated option, in order. Raises `ConfigError` for an empty one."""
    found = [part.strip() for value in values for part in value.split(",")]
    if not all(found):
        raise ConfigError(f"{option} {','.join(values)!r}: an empty name; expected names with single commas between")
    return found


def numbers(option: str, values: Sequence[str]) -> list[float]:
    """Likewise, as numbers. Raises `ConfigError`."""
    found = []
    for part in names(option, values):
        try:
            found.append(float(part))
        except ValueError:
            raise ConfigError(f"{option} {part!r}: expected a number such as 0 or 0.7") from None
    return found


def share(option: str, text: str) -> float:
    """`85%` or `0.85`. Raises `ConfigError`; whether it lies between 0 and 1 is for who reads it to say."""
    plain_text = text.strip()
    if not _SHARE.fullmatch(plain_text):
        raise ConfigError(f"{option} {text!r:.60}: expected a share such as 0.5% or 0.005")
    return float(plain_text[:-1]) / 100 if plain_text.endswith("%") else float(plain_text)


def whole_numbers(
    option: str, values: Sequence[str], such_as: str, within: tuple[int, int] | None = None
) -> list[int]:
    """Likewise, as whole numbers, from the first to the second of `within`; None leaves it to others which make sense.
    Raises `ConfigError`."""
    low, high = within or (0, 10**9 - 1)
    span = f" from {low} to {high}," if within else ""
    found = []
    for part in names(option, values):
        number = int(part[:10]) if part.isascii() and part.isdecimal() else -1
        if not low <= number <= high:
            raise ConfigError(f"{option} {part!r:.60}: expected whole numbers{span} such as {such_as}")
        found.append(number)
    return found


def exclusion(option: str, *texts: str) -> str | list[str] | None:
    """One exclusion set: `as-stored` (or nothing given), `published`, `none`, or globs with commas between. Raises
    `ConfigError`."""
    globs = names(option, texts)
    if globs in ([], ["as-stored"], ["stored"]):
        return None
    return globs[0] if globs in (["published"], ["none"]) else globs


@contextmanager
def step_bar(what: str, unit: str = "tok") -> Iterator[Any]:
    """A tqdm bar on stderr for one step, which `move_bar` moves; nothing when stderr is no terminal."""
    from tqdm import tqdm

    with tqdm(desc=plain(what), unit=unit, leave=False, file=sys.stderr, disable=None) as bar:
        yield bar


def move_bar(bar: Any, done: int, total: int | None) -> None:
    """Moves a bar to what is done of how much; it never goes back."""
    bar.total = total
    bar.update(max(0, done - bar.n))


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """A moving sign on stderr while a step of unknown length runs; nothing when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(plain(what), spinner="dots"):
        yield
