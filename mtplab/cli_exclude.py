"""`mtplab exclude`: options into one search for exclusions, what it found into a table and a list for `quantize`.

Knows nothing of how sets are measured or chosen.
"""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtplab.cli_common import (
    AsJson,
    CachePolicy,
    CheckpointPath,
    Device,
    Exact,
    MaxNewTokens,
    Prompts,
    Results,
    move_bar,
    names,
    note,
    print_json,
    say,
    share,
    step_bar,
)

if TYPE_CHECKING:
    from mtplab.checkpoint.lenses.looks import Looks

__all__ = ["exclude"]

_LINES = 20  # measurements between two lines of progress where there is no terminal


def exclude(
    path: CheckpointPath,
    al_budget: Annotated[
        str, typer.Option(metavar="SHARE", help="Of acceptance length that may be lost: 0.5% or 0.005.")
    ] = "0.5%",
    kl_budget: Annotated[
        float, typer.Option(metavar="NATS", help="Per token, that the target may lie from BF16.")
    ] = 0.01,
    groups: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOW",
            help="What is kept or quantised together: fused (what engines build as one), module, kind, layer, part, or "
            "names and globs with commas between; what none covers is FP8 in every set.  [default: fused]",
        ),
    ] = None,
    portable: Annotated[
        bool,
        typer.Option("--portable", help="Keep in BF16 what one engine or another builds so whatever the list says."),
    ] = False,
    depth: Annotated[int, typer.Option(metavar="K", help="Draft tokens per round.")] = 3,
    prompts: Prompts = None,
    limit: Annotated[
        int,
        typer.Option(
            metavar="N", help="Prompts of each domain; the next N of each confirm what is found, where there are any."
        ),
    ] = 4,
    max_new_tokens: MaxNewTokens = 32,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Groups kept in BF16 at most along a path.  [default: all]")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the texts that KL is taken over.")] = 0,
    quant_policy: CachePolicy = "none",
    device: Device = "cpu",
    exact: Exact = True,
    results: Results = None,
    estimate: Annotated[
        bool,
        typer.Option(
            "--estimate", help="Rank the groups by gradients, in seconds, with none of them run; nothing is searched."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Find which modules must stay BF16: each one's cost in FP8, and the smallest list that keeps a budget.

    PATH is a BF16 checkpoint with an MTP head. Cost is the target's KL from BF16 and the change of acceptance length,
    with 95 % intervals over prompts; what lies within chance is in parentheses. Every measurement is kept: interrupt,
    run the same line again, and only what is missing is computed.

    \b
    Examples:
      mtplab exclude data/tiny-qwen3_5
      mtplab exclude data/tiny-qwen3_5 --estimate
      mtplab exclude data/tiny-qwen3_5 --portable --al-budget 1% --kl-budget 0.004 --groups kind
      mtplab exclude data/tiny-qwen3_5 --groups "mtp.fc,*.out_proj,*.o_proj" --limit 2 --json
    """
    from mtplab.checkpoint import open_checkpoint
    from mtplab.checkpoint.convert.foresee import foreseen, never_fp8_anywhere
    from mtplab.study.exclusion_meter import ExclusionMeter
    from mtplab.study.exclusion_search import check_search, search_exclusions
    from mtplab.study.prompts import load_prompts

    allowed = share("--al-budget", al_budget)
    check_search(allowed, kl_budget, steps=steps)
    every = load_prompts(prompts)
    mine = every.narrowed(limit=limit)
    others = [prompt for prompt in every.narrowed(limit=2 * limit).prompts if prompt not in mine.prompts]
    asked = names("--groups", groups or ["fused"])
    opened = open_checkpoint(path)
    meter = ExclusionMeter(
        path,
        groups=asked[0] if len(asked) == 1 else asked,
        keep=never_fp8_anywhere(opened) if portable and opened.quantization is None else (),
        prompts=mine,
        depth=depth,
        max_new_tokens=max_new_tokens,
        seed=seed,
        quant_policy=quant_policy,
        device=device,
        exact=exact,
        results=results if results is not None else Path("results") / path.resolve().name,
    )
    if estimate:
        _estimate(meter, as_json)
        return
    with _progress(path.name) as progress:
        found = search_exclusions(
            meter,
            allowed,
            kl_budget,
            steps=steps,
            confirm=meter.over(others, seed + 1) if others else None,
            progress=progress,
        )
    engines = None if found.exclude is None else foreseen(opened, found.exclude)
    if as_json:
        said = None if engines is None else engines.sentence
        print_json(found.to_dict() | {"kept_always": sorted(meter.fixed), "engines": said})
        return
    say(found.sensitivity)
    say()
    for sentence in found.sentences():
        say(sentence)
    if found.exclude is not None:
        assert engines is not None
        say(f"Engines, by names and lists: {engines.sentence}")
    for hint in _hints(found, engines, portable, every, limit):
        say(hint)
    if found.exclude is not None:
        say()
        say(f"mtplab quantize {shlex.quote(str(path))} OUT --exclude {shlex.quote(','.join(found.exclude))}")


def _estimate(meter: Any, as_json: bool) -> None:
    from mtplab.study.estimate import estimated
    from mtplab.study.estimate_ranking import ranking, ranking_dict, together_sentence

    found = estimated(meter)
    if as_json:
        print_json(ranking_dict(meter, found))
        return
    say(ranking(meter, found))
    say()
    say(together_sentence(meter, found))


def _hints(found: Any, engines: Looks | None, portable: bool, every: Any, limit: int) -> list[str]:
    """What to give next time, where something is left open or an engine would go wrong."""
    said = []
    if found.recommended is not None and not found.sure:
        most = max(Counter(prompt.domain for prompt in every.prompts).values())
        more = f"--limit {most} takes all {len(every.prompts)} prompts there are, " if limit < most else ""
        said.append(f"For a smaller ±: {more}--prompts FILE brings others, --max-new-tokens makes their texts longer.")
    if not portable and engines is not None and any(look.disagreements for look in engines.looks):
        said.append("For a list that every engine reads right: --portable keeps in BF16 what one of them builds so.")
    return said


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int | None, str], None]]:
    """A bar on a terminal, a line now and then elsewhere."""
    with step_bar(what, "set") as bar:
        told = 0

        def show(done: int, total: int | None, next_one: str) -> None:
            nonlocal told
            move_bar(bar, done, total)
            bar.set_postfix_str(next_one[-48:])
            if not sys.stderr.isatty() and done >= told + _LINES:
                told = done
                note(f"{what}: {done}{'' if total is None else f' of {total}'} sets measured")

        yield show
