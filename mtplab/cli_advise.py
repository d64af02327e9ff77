"""`mtplab advise`: what draft depth pays, from acceptance and a cost model of the GPU.

Turns options into one `Setting` and `Curve` and prints what `mtplab.study.advice` makes of them; knows no arithmetic.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtplab.cli_common import AsJson, Batches, names, numbers, path_of, print_json, say, share, whole_numbers
from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.study.advice import Advice, Cell
    from mtplab.study.cost import Setting
    from mtplab.study.curve import Curve

__all__ = ["advise"]

# the map has these besides what was asked for
_BATCHES, _CONTEXTS = (1, 8, 32, 128), (1024, 8192, 65536)


def advise(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="A model of the catalogue: Qwen3.5-27B, …")] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="PATH", parser=path_of, help="Or a checkpoint: sizes and bytes from its headers."),
    ] = None,
    gpu: Annotated[
        str, typer.Option(metavar="NAME", help="A GPU of the catalogue: H100, H200, B200, MI300X, …")
    ] = "H200",
    tp: Annotated[int, typer.Option(metavar="N", help="GPUs that share every layer.")] = 1,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT",
            help="bf16, fp8, fp8-experts, nvfp4, nvfp4-experts, int4; of a BF16 checkpoint fp8, made at load.  "
            "[default: fp8, and of a checkpoint what is stored]",
        ),
    ] = None,
    quant_policy: Annotated[
        str, typer.Option(metavar="NAME", help="KV cache policy: none, int8, int4, fp8, fp8_e5m2.")
    ] = "none",
    batch: Batches = None,
    context: Annotated[
        list[str] | None,
        typer.Option(metavar="NUMBERS", help="Tokens a sequence holds, commas between.  [default: 2048]"),
    ] = None,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHARES", help="By position: share of rounds whose drafts 1…j were all accepted, 0.85 or 85%."
        ),
    ] = None,
    conditional: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SHARES", help="Or of the rounds that got to draft j; one share is taken for --max-depth."
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None, typer.Option(metavar="NUMBERS", help="Or acceptance lengths at depths 1, 2, …")
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", parser=path_of, help="Or the results of a sweep, of the cache policy above."),
    ] = None,
    exclude: Annotated[
        str | None,
        typer.Option(metavar="LABEL", help="Which exclusions of these results: published, none, as-stored, …"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(metavar="NUMBER", help="Which temperature of these results.")
    ] = None,
    max_depth: Annotated[int, typer.Option(metavar="K", help="Depths that one --conditional share stands for.")] = 8,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", parser=path_of, help="JSON of `python -m mtplab.bench kernels -o FILE`, or of constants."
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only hold the model against published measurements.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what draft depth pays on a GPU: tokens a second and speed-up by depth, the best depth, and what binds.

    Times are those of a roofline model unless --measured replaces its constants; acceptance is what you give.

    \b
    Examples:
      mtplab advise --model Qwen3.5-27B --gpu H200 --batch 1,8,32 --context 2048 --acceptance 0.85,0.7,0.6
      mtplab advise --model DeepSeek-R1 --gpu B200 --tp 8 --weights nvfp4-experts --lengths 1.92,2.58,2.82,2.99,3.01
      mtplab advise --model Qwen3.5-35B-A3B --gpu L40S --conditional 0.6 --max-depth 4 --quant-policy fp8 --json
      mtplab advise --checkpoint data/tiny-qwen3_5-fp8 --gpu L40S --conditional 0.8,0.7
      mtplab advise --check
    """
    if check:
        _check(as_json)
        return
    from mtplab.study.advice import advise as work_out
    from mtplab.study.advice import best_map

    curve = _curve(acceptance, conditional, lengths, results, max_depth, quant_policy, exclude, temperature)
    setting = _setting(model, checkpoint, gpu, tp, weights, quant_policy, measured)
    batches = whole_numbers("--batch", batch or ["1"], "1,8,32")
    contexts = whole_numbers("--context", context or ["2048"], "2048,8192")
    found = [work_out(setting, curve, b, c) for c in contexts for b in batches]
    rows, columns = sorted({*batches, *_BATCHES}), sorted({*contexts, *_CONTEXTS})
    cells = best_map(setting, curve, rows, columns)
    if as_json:
        table = [[{"batch": c.batch, "context": c.context, "depth": c.depth, "speedup": c.speedup} for c in line]
                 for line in cells]  # fmt: skip
        print_json({"advice": [one.to_dict() for one in found], "map": table, "basis": found[0].basis})
        return
    for one in found:
        say(_table(one))
    say(_map(cells))
    say(found[0].basis)


def _curve(
    acceptance: list[str] | None, conditional: list[str] | None, lengths: list[str] | None, results: Path | None,
    max_depth: int, policy: str, exclude: str | None, temperature: float | None,
) -> Curve:  # fmt: skip
    from mtplab.study.curve import Curve

    given = {"--acceptance": acceptance, "--conditional": conditional, "--lengths": lengths, "--results": results}
    named = [name for name, value in given.items() if value]
    if len(named) != 1:
        raise ConfigError(
            f"acceptance is given {len(named)} times; expected one of {', '.join(given)}"
            + ("" if named else ": your engine's, or lengths that others published (docs/depth.md)")
        )
    if results is None and (exclude is not None or temperature is not None):
        raise ConfigError(
            "--exclude and --temperature choose among --results; leave them out, or give a results folder"
        )
    if results is not None:
        return _from_results(results, policy, exclude, temperature)
    if named[0] == "--lengths":
        return Curve.of_lengths(numbers("--lengths", given["--lengths"]))
    values = [share(named[0], part) for part in names(named[0], given[named[0]] or [])]
    if named[0] == "--acceptance":
        return Curve.of_positions(values)
    return Curve.of_rate(values[0], max_depth) if len(values) == 1 else Curve.of_conditional(values)


def _from_results(results: Path, policy: str, exclude: str | None, temperature: float | None) -> Curve:
    from mtplab.quant.policy import resolve_policy
    from mtplab.study.curve import Curve
    from mtplab.study.store import read_rows

    wanted: dict[str, Any] = {"quant_policy": resolve_policy(policy).name}
    if exclude is not None:
        wanted["exclude_label"] = exclude
    if temperature is not None:
        wanted["temperature"] = temperature
    return Curve.of_rows(read_rows(results), **wanted)


def _setting(
    model: str | None,
    checkpoint: Path | None,
    gpu: str,
    tp: int,
    weights: str | None,
    policy: str,
    measured: Path | None,
) -> Setting:
    from mtplab.study.cost import ASSUMED, Setting
    from mtplab.study.gpus import gpu as gpu_of
    from mtplab.study.measured import read_measured
    from mtplab.study.model_sizes import weights as weights_named
    from mtplab.study.models_catalogue import model as model_named

    if (model is None) == (checkpoint is None):
        raise ConfigError("expected either --model, a name of the catalogue, or --checkpoint, a folder")
    card = gpu_of(gpu)
    constants, how = (ASSUMED, {}) if measured is None else read_measured(measured, card)
    if model is not None:
        sizes, kept = model_named(model), weights_named(weights or "fp8")
    else:
        from mtplab.checkpoint import open_checkpoint
        from mtplab.study.checkpoint_sizes import sizes_of, weights_of

        if weights not in (None, "fp8"):
            raise ConfigError(
                f"--weights {weights!r:.60} of a checkpoint: expected fp8 (made at load), or leave it out"
            )
        assert checkpoint is not None
        opened = open_checkpoint(checkpoint)
        sizes = sizes_of(opened)
        kept = weights_of(opened, sizes, weights)
    return Setting(sizes, kept, card, tp, policy, constants=constants, measured=how)


def _table(one: Advice) -> str:
    from mtplab.study.numbers import percent

    lines = [
        *one.sentences[:-1],
        "",
        "depth  tokens a round  takes rounds  tokens/s  of each sequence  speed-up  most of it is",
    ]
    for line in one.lines:
        part = line.cost.parts[line.cost.binds] / line.cost.seconds
        lines.append(
            f"{line.depth:5}  {line.length:14.2f}  {line.ratio:12.2f}  {line.tokens_per_second:8.0f}  "
            f"{line.tokens_per_second / one.batch:16.0f}  {line.speedup:7.2f}×  {line.cost.words(line.cost.binds)} "
            f"({percent(part)})" + ("" if line.fits else "; does not fit")
        )
    return "\n".join(lines) + "\n"


def _map(cells: list[list[Cell]]) -> str:
    lines = ["best depth (speed-up) by batch and context; – where it does not fit"]
    lines.append("batch".rjust(7) + "".join(f"{cell.context:>14}" for cell in cells[0]))
    for line in cells:
        shown = ["–" if cell.depth is None else f"{cell.depth} ({cell.speedup:.2f}×)" for cell in line]
        lines.append(f"{line[0].batch:7}" + "".join(f"{text:>14}" for text in shown))
    return "\n".join(lines) + "\n"


def _check(as_json: bool) -> None:
    from mtplab.study.published import compare, markdown

    found = compare()
    if as_json:
        print_json([{**vars(one.point), "modelled": one.modelled, "deviation": one.deviation} for one in found])
    else:
        say(markdown(found).rstrip("\n"))
