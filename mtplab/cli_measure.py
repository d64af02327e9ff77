"""`mtplab measure`: what draft depth pays on this machine, by batch.

Loads a model and prints what `mtplab.study.depth_timing` found; knows no arithmetic.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from mtplab.cli_common import (
    AsJson,
    Batches,
    CachePolicy,
    Calibration,
    CheckpointPath,
    Device,
    Exclude,
    MaxNewTokens,
    ModelFormat,
    Prompts,
    depth_list,
    exclusion,
    move_bar,
    print_json,
    say,
    step_bar,
    whole_numbers,
)

if TYPE_CHECKING:
    from mtplab.models import Model
    from mtplab.study.depth_timing import DepthTimes

__all__ = ["measure"]


def measure(
    path: CheckpointPath,
    depths: Annotated[str, typer.Option(metavar="DEPTHS", help="0-8, 1,2,4, …")] = "0-8",
    batch: Batches = None,
    quant_policy: CachePolicy = "none",
    model_format: ModelFormat = None,
    exclude: Exclude = None,
    temperature: Annotated[float, typer.Option(metavar="NUMBER", help="0 is greedy.")] = 0.0,
    prompts: Prompts = None,
    calibration: Calibration = None,
    max_new_tokens: MaxNewTokens = 64,
    repeats: Annotated[int, typer.Option(metavar="N", help="How often every depth is timed.")] = 3,
    fast: Annotated[bool, typer.Option("--fast/--exact", help="The fastest arithmetic, or row-invariant.")] = True,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Time every draft depth on this machine and say which pays, at each batch.

    Depths take turns, so that a machine that slows down slows all of them; a speed-up is held against plain decoding of
    the same repeat. For a GPU that is not here: mtplab advise.

    \b
    Examples:
      mtplab measure data/tiny-qwen3_5-fp8 --quant-policy int8 --batch 1,64
      mtplab measure data/tiny-qwen3_5 --depths 0-4 --repeats 5
      mtplab measure data/tiny-qwen3_5 --depths 1,2 --max-new-tokens 16 --json
    """
    chosen, batches = depth_list(depths), whole_numbers("--batch", batch or ["1"], "1,64", (1, 4096))
    from mtplab.checkpoint import open_checkpoint
    from mtplab.models import load_model
    from mtplab.quant.policy import resolve_policy
    from mtplab.study.depth_timing import time_depths
    from mtplab.study.grid import weight_format
    from mtplab.study.prompts import calibration_ids, load_prompts

    policy, texts = resolve_policy(quant_policy), load_prompts(prompts)
    kept = exclusion("--exclude", *(exclude or ()))
    opened = open_checkpoint(path)
    model_format = weight_format(opened, model_format, kept)
    model = load_model(opened, device=device, exclude=kept, model_format=model_format, quant_policy=policy)
    with step_bar("timing", "run") as bar:
        found = time_depths(
            model,
            [list(ids) for ids in texts.encoded(model.encode)],
            chosen,
            batches,
            repeats,
            max_new_tokens,
            partial(move_bar, bar),
            temperature=temperature,
            exact=None if not fast else False,
            calibration=calibration_ids([policy], model.encode, calibration),
        )
    if as_json:
        print_json({"lines": found.to_records(), "repeats": found.repeats, "settings": found.settings})
        return
    say(_table(found))
    say(_basis(found, model))


def _table(found: DepthTimes) -> str:
    lines = []
    for batch in found.batches:
        lines += [found.sentence(batch), "", "depth  tokens a round  tokens/s  speed-up (least to most)"]
        for line in found.at(batch):
            length = "–" if line.length is None else f"{line.length:.2f}"
            lines.append(
                f"{line.depth:5}  {length:>14}  {line.tokens_per_second:8.0f}  {line.speedup:.2f}× "
                f"({line.low:.2f} to {line.high:.2f})"
            )
        lines.append("")
    return "\n".join(lines).rstrip("\n")


def _basis(found: DepthTimes, model: Model) -> str:
    """What was timed: speed-ups of other weights or other arithmetic are others."""
    linear = [module for module in model.plan.modules if module.multiplies]
    fp8 = sum(module.weight == "fp8" for module in linear)
    arithmetic = "row-invariant arithmetic, as in a report" if found.settings["exact"] else "the fastest arithmetic"
    return f"\nTimed on {model.device} with {fp8} of {len(linear)} linear modules in FP8, in {arithmetic}."
