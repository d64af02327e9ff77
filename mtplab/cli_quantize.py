"""`mtplab quantize`: options into one call of `quantize_checkpoint`, and what it wrote, and did not, into lines.

Knows nothing of how checkpoints are written.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtplab.cli_common import AsJson, exclusion, move_bar, note, path_of, print_json, say, step_bar
from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.checkpoint.convert import Written

__all__ = ["quantize"]

_FEW = 3  # names shown of a longer list
_LINE_EVERY = 30.0  # seconds between lines of progress where there is no terminal


def quantize(
    src: Annotated[
        Path, typer.Argument(help="The checkpoint to read: BF16, or any FP8.", metavar="SRC", parser=path_of)
    ],
    dst: Annotated[Path, typer.Argument(help="The folder to write; it must not exist.", metavar="DST", parser=path_of)],
    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="fp8-block, fp8-channel, fp8-tensor (what shares a scale), or bf16.  [default: fp8-block; an FP8 "
            "source stays in the layout it has]",
        ),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(metavar="NAME", help="hf, compressed-tensors or modelopt.  [default: hf]")
    ] = None,
    scales: Annotated[str, typer.Option(metavar="NAME", help="float, or ue8m0: powers of two.")] = "float",
    block: Annotated[str | None, typer.Option(metavar="ROWSxCOLUMNS", help="Of fp8-block.  [default: 128x128]")] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            help="Modules kept in BF16: published, none (the text model's linear weights all become FP8), or names and "
            "globs with commas between; of an FP8 source, those to be made BF16.  [default: published; what an FP8 "
            "source keeps]",
        ),
    ] = None,
    draft_exclude: Annotated[
        list[str] | None, typer.Option(metavar="SET", help="The same for the draft head; --exclude's if left out.")
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="The MTP head: like-target, keep (as it is stored), quantize (also what an FP8 source left out) or "
            "bf16.",
        ),
    ] = "like-target",
    restart: Annotated[bool, typer.Option("--restart", help="Discard what a stopped run left.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint anew: BF16 to FP8, FP8 to BF16, FP8 in another layout, or with more modules kept out of it.

    DST appears whole or not at all. A stopped run goes on when the same command is given again. What is FP8 already and
    asked for as it is stays bit for bit.

    \b
    Examples:
      mtplab quantize data/tiny-qwen3_5 out/fp8
      mtplab quantize data/tiny-qwen3_5 out/ct --format fp8-channel --layout compressed-tensors --draft keep
      mtplab quantize data/tiny-qwen3_5-fp8 out/less --exclude "*.o_proj"
      mtplab quantize data/tiny-qwen3_5-fp8 out/bf16 --format bf16
    """
    from mtplab.checkpoint.convert import quantize_checkpoint

    sizes = None if block is None else _sizes(block)
    started = time.monotonic()
    with _bar(f"{src.name} → {dst.name}") as (progress, read):
        written = quantize_checkpoint(
            src,
            dst,
            exclude=exclusion("--exclude", *(exclude or ())),
            draft_exclude=exclusion("--draft-exclude", *(draft_exclude or ())),
            progress=progress,
            format=format,
            layout=layout,
            scales=scales,
            block=sizes,
            draft=draft,
            restart=restart,
        )
    seconds = time.monotonic() - started
    for warning in (*written.warnings, *written.plan.warnings):
        note(f"warning: {warning}")
    if as_json:
        print_json(_plain(written, read[0], seconds))
        return
    _report(written, read[0], seconds)


def _sizes(text: str) -> tuple[int, int]:
    parts = text.split("x")
    if len(parts) != 2 or not all(part.isdecimal() and len(part) < 8 for part in parts):
        raise ConfigError(f"--block {text!r}: expected rows and columns, like 128x128")
    return int(parts[0]), int(parts[1])


@contextmanager
def _bar(what: str) -> Iterator[tuple[Callable[[int, int], None], list[int]]]:
    """(what is told of progress, a list whose one number is the bytes read so far)."""
    read = [0]
    told = time.monotonic()
    with step_bar(what, "B") as bar:
        bar.unit_scale = True

        def show(done: int, total: int) -> None:
            nonlocal told
            move_bar(bar, done, total)
            read[0] = done
            if bar.disable and time.monotonic() - told > _LINE_EVERY:  # no terminal
                told = time.monotonic()
                note(f"{what}: {done / 1e9:.1f} of {total / 1e9:.1f} GB")

        yield show, read


def _report(written: Written, read: int, seconds: float) -> None:
    what = ", ".join(f"{count} {action}" for action, count in written.actions.items())
    parts = Counter(module.part for module in written.plan.modules if module.weight == "fp8")
    fp8 = ", ".join(f"{part} {count}" for part, count in parts.items()) or "none"
    say(f"{written.path}: {written.nbytes:,} bytes in {seconds:.1f} s, {read / 1e9 / max(seconds, 1e-9):.2f} GB/s read")
    say(f"tensors     {what}" + (f"; {written.resumed} shards from the stopped run" if written.resumed else ""))
    say(f"FP8         {fp8}")
    say(f"kept out    {len(written.kept)} modules listed{_some(written.kept)}")
    by_reason: dict[str, list[str]] = {}
    for name, why in written.left.items():
        by_reason.setdefault(why, []).append(name)
    for why, found in by_reason.items():
        say(f"left out    {len(found)} tensors{_some(found)}: {why}")
    if written.engines:
        say(f"engines     {written.engines}")
    if written.files_left:
        say(f"not copied  {', '.join(written.files_left)}")


def _some(found: list[str] | tuple[str, ...]) -> str:
    if not found:
        return ""
    return f" ({', '.join(found[:_FEW])}{', …' if len(found) > _FEW else ''})"


def _plain(written: Written, read: int, seconds: float) -> dict[str, object]:
    return {
        "path": str(written.path),
        "bytes": written.nbytes,
        "bytes_read": read,
        "seconds": round(seconds, 3),
        "tensors": written.actions,
        "fp8": [module.name for module in written.plan.modules if module.weight == "fp8"],
        "kept": list(written.kept),
        "left": written.left,
        "engines": written.engines,
        "files_left": list(written.files_left),
        "warnings": [*written.warnings, *written.plan.warnings],
        "resumed_shards": written.resumed,
    }
