"""The `mtplab` command: which commands there are, and how a failure leaves.

Knows no command's options; each has its own file. Nothing heavy is imported until a command runs, so that
`--help` answers at once. Exit codes: 0 done, 1 failed or findings, 2 wrong usage or unreadable input.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mtplab.cli_advise import advise
from mtplab.cli_audit import audit
from mtplab.cli_common import ReaderGone, drop_output, note, warnings_as_notes
from mtplab.cli_compare import compare
from mtplab.cli_doctor import doctor
from mtplab.cli_exclude import exclude
from mtplab.cli_generate import generate
from mtplab.cli_measure import measure
from mtplab.cli_numerics import numerics
from mtplab.cli_quantize import quantize
from mtplab.cli_report import join_parameters, report
from mtplab.cli_serve import serve
from mtplab.cli_sweep import sweep
from mtplab.errors import CheckpointError, ConfigError, MtplabError

__all__ = ["app", "main"]

app = typer.Typer(
    name="mtplab",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command(short_help="Run prompts and see what was accepted.")(generate)
app.command(short_help="What is in a checkpoint, what is wrong with it, what engines make of it.")(audit)
app.command(short_help="Acceptance by depth, cache policy and exclusions; kept and read back.")(sweep)
app.command(short_help="What draft depth pays on this machine, timed.")(measure)
app.command(short_help="What draft depth pays on a GPU, from acceptance and a cost model.")(advise)
app.command(short_help="Which modules must stay BF16: each one's cost, and a list for a budget.")(exclude)
app.command(short_help="The runner as an OpenAI-compatible endpoint, to try drivers of engines on.")(serve)
app.command(short_help="Execute a notebook, or take a sweep's results: one HTML file.")(report)
app.command(short_help="What FP8 does to each layer's arithmetic, of a slice of a large model too.")(numerics)
app.command(short_help="Result files side by side: differences, with intervals.")(compare)
app.command(short_help="Write a checkpoint anew: to FP8, to BF16, in another layout.")(quantize)
app.command(short_help="What runs here: versions, devices, kernels or torch, and why.")(doctor)


def _show_version(wanted: bool) -> None:
    if wanted:
        from mtplab.study.provenance import version

        others = ", ".join(f"{name} {version(name) or 'missing'}" for name in ("torch", "triton"))
        print(f"mtplab {version('mtplab')} (python {sys.version.split()[0]}, {others})")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and stop.")
    ] = False,
) -> None:
    """FP8 models with a multi-token-prediction draft head: what is accepted, and what it costs.

    \b
    Examples, from a checkout:
      mtplab generate data/tiny-qwen3_5 --prompt "Once upon a time" --depth 3
      mtplab sweep data/tiny-qwen3_5 --depths 0-8 --quant-policy none,int8,fp8
      mtplab sweep --help

    Exit codes: 0 done, 1 failed or findings, 2 wrong usage or unreadable input.
    """
    if context.invoked_subcommand is None:
        print(context.get_help(), file=sys.stderr)
        raise typer.Exit(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (`sys.argv` by default) and returns its exit code.

    Failures are one line on stderr; set MTPLAB_DEBUG=1 to see where an unexpected one came from.
    """
    arguments = join_parameters(list(sys.argv[1:] if arguments is None else arguments))
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever called, as by `>&-`: nobody wants to read it
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - as long as the process
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal that cannot show a character is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        with warnings_as_notes():
            code = app(arguments, standalone_mode=False, prog_name="mtplab")
        sys.stdout.flush()
        if code == 130:  # how typer tells of an interrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except (CheckpointError, ConfigError) as problem:
        return _fail(problem, 2)
    except MtplabError as problem:
        return _fail(problem, 1)
    except (KeyboardInterrupt, typer.Abort):
        return _fail("stopped", 1)
    except ReaderGone:  # that is how a pipe ends
        drop_output()
        return 0
    except Exception as problem:
        if isinstance(problem, typer.BadParameter.__mro__[2]):  # click's family, which typer brings along
            return _fail(f"{problem.format_message()} (see mtplab --help)", 2)
        if isinstance(problem, OSError) and problem.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(f"{problem.filename or 'the output'} cannot be written: {problem.strerror}; make room", 1)
        if os.environ.get("MTPLAB_DEBUG"):
            raise
        return _fail(f"{type(problem).__name__}: {problem} (unexpected; MTPLAB_DEBUG=1 shows where)", 1)


def _fail(problem: object, code: int) -> int:
    note(problem)
    return code


if __name__ == "__main__":
    sys.exit(main())
