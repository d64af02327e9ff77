"""`mtplab audit`: what is in a checkpoint, what is wrong with it, and what engines will make of it."""

from __future__ import annotations

from typing import Annotated

import typer

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import SEVERITIES, Audit
from mtplab.checkpoint.audit.text import as_text
from mtplab.cli_common import CheckpointPath, emit, print_json, step_bar

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
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
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
    """
    ckpt = open_checkpoint(path, lenient=True)
    found = _deep(ckpt) if deep else ckpt.audit()
    if as_json:
        print_json(found.to_dict(modules=modules))
    else:
        emit(as_text(found, modules))
    if fail_on != _NEVER and found.at_least(fail_on):
        raise typer.Exit(1)


def _deep(ckpt) -> Audit:
    total = sum(info.nbytes for info in ckpt.tensors.values())
    with step_bar(total, "reading", unit="B") as bar:
        return ckpt.audit(deep=True, progress=lambda done, _: bar.update(done - bar.n))
