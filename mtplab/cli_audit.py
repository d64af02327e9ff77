"""`mtplab audit`: what is in a checkpoint, what is wrong with it, and what engines will make of it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mtplab.checkpoint import Checkpoint, open_checkpoint
from mtplab.checkpoint.audit import SEVERITIES, Audit
from mtplab.checkpoint.audit.text import as_text
from mtplab.cli_common import AsJson, CheckpointPath, emit, move_bar, path_of, print_json, step_bar

__all__ = ["audit"]

_NEVER = "never"


def _level(text: str) -> str:
    if text not in (*SEVERITIES, _NEVER):
        raise typer.BadParameter(f"{text!r}; give one of {', '.join(SEVERITIES)} or {_NEVER}")
    return text


def audit(
    path: CheckpointPath,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the values too: NaN, scales, norms, a random head.")
    ] = False,
    modules: Annotated[
        bool, typer.Option("--modules", help="A line for every module, and the rule that decided.")
    ] = False,
    as_json: AsJson = False,
    source: Annotated[
        Path | None,
        typer.Option(metavar="PATH", parser=path_of, help="The checkpoint this one was made from: find what was lost."),
    ] = None,
    fail_on: Annotated[
        str,
        typer.Option(
            metavar="LEVEL", parser=_level, help="Exit 1 at this level or worse: error, warning, note, never."
        ),
    ] = "error",
) -> None:
    """Say what is in a checkpoint, what is wrong with it and why that matters, and how each engine will read it.

    Headers only, whatever the size, unless --deep is given. Exit codes: 0 nothing at or above --fail-on, 1 findings,
    2 unreadable.

    \b
    Examples:
      mtplab audit data/tiny-qwen3_5-fp8
      mtplab audit data/tiny-qwen3_5-fp8 --deep --json
      mtplab audit data/tiny-qwen3_5-fp8 --fail-on warning
      mtplab audit data/tiny-qwen3_5-fp8 --source data/tiny-qwen3_5
    """
    ckpt = open_checkpoint(path, lenient=True)
    origin = open_checkpoint(source, lenient=True) if source is not None else None
    found = _deep(ckpt, origin) if deep else ckpt.audit(source=origin)
    if as_json:
        print_json(found.to_dict(modules=modules))
    else:
        emit(as_text(found, modules))
    if fail_on != _NEVER and found.at_least(fail_on):
        raise typer.Exit(1)


def _deep(ckpt: Checkpoint, origin: Checkpoint | None) -> Audit:
    with step_bar("reading", unit="B") as bar:
        return ckpt.audit(deep=True, progress=partial(move_bar, bar), source=origin)
