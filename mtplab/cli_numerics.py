"""`mtplab numerics`: what FP8 does to the arithmetic of each layer, of a slice of a large model too.

Prints what `mtplab.study.numerics` found; knows no arithmetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mtplab.cli_common import (
    AsJson,
    CheckpointPath,
    Device,
    Exclude,
    Layers,
    Prompts,
    exclusion,
    path_of,
    print_json,
    say,
    spinner,
)

__all__ = ["numerics"]


def numerics(
    path: CheckpointPath,
    layers: Layers = None,
    exclude: Exclude = None,
    prompts: Prompts = None,
    source: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The checkpoint that an FP8 one was made from.", parser=path_of),
    ] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure what FP8 does to each layer and module, for the same inputs: errors of outputs, not of acceptance.

    With --layers, of a slice of a model that this machine cannot hold; what that leaves out is said below the numbers.
    A BF16 checkpoint is quantised as it is loaded; of an FP8 one, rounding of inputs is measured, and with --source the
    weights too.

    \b
    Examples:
      mtplab numerics data/tiny-qwen3_5 --layers 0-1
      mtplab numerics data/tiny-qwen3_5-fp8 --source data/tiny-qwen3_5 --json
    """
    from mtplab.study.numerics import numerics as measured

    with spinner("reading"):
        found = measured(path, layers, prompts, exclusion("--exclude", *(exclude or ())), source, device)
    if as_json:
        print_json(found.to_dict())
    else:
        say(found)
