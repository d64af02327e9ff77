"""`mtplab report`: a notebook, executed, as one HTML file.

Turns options into one call of `mtplab.report.html.render_report`; knows nothing of notebooks itself.
"""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli_common import note, path_of, print_json, say
from mtplab.errors import ConfigError

__all__ = ["Lines", "join_parameters", "report"]

_FLAGS = ("-p", "--parameter")


def report(
    notebook: Annotated[Path, typer.Argument(help="The .ipynb file.", metavar="NOTEBOOK", parser=path_of)],
    parameter: Annotated[
        list[str] | None,
        typer.Option(
            *_FLAGS,
            metavar="NAME VALUE",
            help="A value for the notebook's cell tagged `parameters`; repeat for more. NAME=VALUE does too. "
            "Numbers, True, None and lists are read as Python or JSON, all else as text.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="The HTML file; below reports/ if left out.", parser=path_of
        ),
    ] = None,
    execution_timeout: Annotated[int, typer.Option(metavar="SECONDS", help="Seconds that one cell may take.")] = 600,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Execute a notebook and write it as one HTML file that opens without a network.

    The notebook in the repository is not changed; the executed copy lies beside the page.

    \b
    Examples:
      mtplab report notebooks/01_fp8_to_speculation.ipynb
      mtplab report notebooks/01_fp8_to_speculation.ipynb -p max_depth 4 -p policies "['none', 'fp8']" -o short.html
      mtplab report notebooks/01_fp8_to_speculation.ipynb -p prompts my.jsonl --execution-timeout 120
    """
    parameters = dict(_parameter(text) for text in parameter or [])
    if execution_timeout < 1:
        raise ConfigError(f"--execution-timeout is {execution_timeout}; expected at least 1 second")
    from mtplab.report import render_report

    # its own bar, if there is somebody to look at it
    follow = None if sys.stderr.isatty() else Lines()
    page = render_report(notebook, parameters, output, execution_timeout=execution_timeout, on_progress=follow)
    if as_json:
        print_json({"report": str(page), "parameters": parameters})
    else:
        say(page)


class Lines:
    """A line on stderr for each part of the notebook as it begins, and every `every` seconds within a long one."""

    def __init__(self, every: float = 15.0):
        self._every = every
        self._part = ""
        self._told = float("-inf")

    def __call__(self, done: float, total: float, label: str) -> None:
        now, cell = time.monotonic(), int(done)
        begins = done == cell and label != self._part
        if begins or now - self._told >= self._every:
            note(f"cell {min(cell + 1, int(total))} of {int(total)} · {label}")
            self._told = now
        if begins:
            self._part = label


def join_parameters(arguments: list[str]) -> list[str]:
    """`-p NAME VALUE` as `-p NAME=VALUE`, for a parser whose options take one value. Others stay as they are."""
    if "report" not in arguments[:1]:
        return arguments
    joined: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        joined.append(word)
        if word in _FLAGS and len(rest) >= 2 and "=" not in rest[0]:
            joined.append(f"{rest.pop(0)}={rest.pop(0)}")
    return joined


def _parameter(text: str) -> tuple[str, Any]:
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise ConfigError(f"-p {text!r}: expected a name and a value, such as -p depth 3")
    return name, _value(value)


def _value(text: str) -> Any:
    """A Python or JSON literal if it is one, else the text itself."""
    for read in (ast.literal_eval, json.loads):
        try:
            value = read(text)
            json.dumps(value, allow_nan=False)  # only what can be a parameter
            return value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return text
