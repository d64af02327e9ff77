"""`mtplab report`: a notebook, executed, or the results of a sweep, as one HTML file.

Turns options into one call of `render_report` or `write_results`; knows nothing of notebooks or rows itself.
"""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli_common import AsJson, note, path_of, print_json, say
from mtplab.errors import ConfigError

__all__ = ["Lines", "join_parameters", "report"]

_FLAGS = ("-p", "--parameter")
_RESULTS = (".jsonl", ".json", ".html", ".htm")


def report(
    source: Annotated[
        Path,
        typer.Argument(
            help="An .ipynb file; or a results folder, a .jsonl or .json file of rows, or an earlier page.",
            metavar="NOTEBOOK|RESULTS",
            parser=path_of,
        ),
    ],
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
    execution_timeout: Annotated[
        int | None, typer.Option(metavar="SECONDS", help="Seconds that one cell may take.  [default: 600]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Execute a notebook, or read a sweep's results, and write one HTML file that opens without a network.

    The notebook in the repository is not changed; the executed copy lies beside the page. Results take no kernel and
    a few seconds: what they say, figures, tables, the explorer, and what failed.

    \b
    Examples:
      mtplab report notebooks/01_fp8_to_speculation.ipynb
      mtplab report notebooks/01_fp8_to_speculation.ipynb -p max_depth 4 -p policies "['none', 'fp8']" -o short.html
      mtplab report notebooks/01_fp8_to_speculation.ipynb -p prompts my.jsonl --execution-timeout 120
      mtplab report results/tiny-qwen3_5 -o results.html
    """
    parameters = dict(_parameter(text) for text in parameter or [])
    if execution_timeout is not None and execution_timeout < 1:
        raise ConfigError(f"--execution-timeout is {execution_timeout}; expected at least 1 second")
    if source.is_dir() or source.suffix.lower() in _RESULTS:
        for option, given in (("-p", parameters), ("--execution-timeout", execution_timeout)):
            if given:
                raise ConfigError(
                    f"{option} is for a notebook, and {source} holds results, which are read and not run: leave it out"
                )
        from mtplab.report.results_page import write_results

        _tell(write_results(source, output), {}, as_json)
        return
    from mtplab.report import render_report

    # its own bar, if there is somebody to look at it
    follow = None if sys.stderr.isatty() else Lines()
    seconds = execution_timeout or 600
    page = render_report(source, parameters, output, execution_timeout=seconds, on_progress=follow)
    _tell(page, parameters, as_json)


def _tell(page: Path, parameters: dict[str, Any], as_json: bool) -> None:
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
