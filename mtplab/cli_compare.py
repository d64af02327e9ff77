"""`mtplab compare`: result files side by side, with intervals; as text, Markdown, JSON or one HTML file.

Turns options into one call of `mtplab.compare`; reads and compares nothing itself.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli_common import AsJson, names, note, path_of, print_json, say
from mtplab.errors import ConfigError

__all__ = ["compare"]


def compare(
    sources: Annotated[
        list[str],
        typer.Argument(
            help="The baseline, then what is compared with it. Each is a results folder, a .jsonl or .json file of "
            "rows or a page of mtplab report; NAME=PATH gives it a name.",
            metavar="A B...",
        ),
    ],
    by: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Settings that rows must agree on, with commas between, whatever else differs: depth alone, or "
            "exclusions, cache, draft-cache, temperature, top-k, top-p, seed, prompts, tokens, checkpoint, engine, "
            "method.  [default: all but those that have one value in each file, and not the same]",
        ),
    ] = None,
    between: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of one source, the rows with each value of this setting against those with the first: engine, say.",
        ),
    ] = None,
    fail_below: Annotated[
        float | None,
        typer.Option(
            metavar="TOKENS",
            help="Exit with 1 where a point loses more tokens per round than this, beyond chance (marked **), or fails "
            "or has a broken target where the baseline does not.",
        ),
    ] = None,
    positions: Annotated[bool, typer.Option("--positions", help="Acceptance by draft position too.")] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write one HTML file.", parser=path_of)
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Markdown on stdout, for a page of CI.")] = False,
    as_json: AsJson = False,
) -> int:
    """Put result files side by side: acceptance, quality, bytes and speed, and which differences are beyond chance.

    Rows are matched on depth and on all settings that vary within a file; what has one value in the one file and
    another in the other is what is compared. Where both ran the same prompts, they are compared prompt by prompt.

    \b
    Examples:
      mtplab compare results/before results/after
      mtplab compare old=rows.jsonl new=results/after -o compare.html
      mtplab compare results/before results/after --fail-below 0.05 --markdown > compare.md
      mtplab compare results/int8 results/fp8 --by depth --json
      mtplab compare results/tiny-qwen3_5 --between engine
    """
    if markdown and as_json:
        raise ConfigError("--markdown and --json both print on stdout: give one of them")
    if fail_below is not None and not (math.isfinite(fail_below) and fail_below >= 0):
        raise ConfigError(f"--fail-below {fail_below}: expected tokens per round, such as 0.05 or 0")
    from mtplab.report.comparison import compare as run

    paths, called = zip(*map(_named, sources), strict=True)
    found = run(*paths, names=called, by=None if by is None else names("--by", [by]), between=between)
    if as_json:
        print_json(found.to_dict())
    elif markdown:
        say(found.to_markdown(positions))
    else:
        say(found.to_text(positions))
    if output is not None:
        page = found.save(output)
        note(page) if as_json or markdown else say(f"\n{page}")
    unmatched = [against for against in found.against if not against.matched.pairs]
    for against in unmatched:
        note(f"{against.other.name}: no row matches one of {against.base.name}")
    if unmatched:
        return 1
    return 0 if fail_below is None else _judge(found, fail_below)


def _judge(found: Any, least: float) -> int:
    """The exit code that `--fail-below` asks for, and why, on stderr."""
    code = 0
    for against in found.against:
        lost, failed = against.lost(least), against.newly_failed()
        broke = [why for why in against.broke if why is not None]
        if not any(point.change is not None for point in against.points) and not failed:
            raise ConfigError(
                f"--fail-below: no difference of {against.other.name} from {against.base.name} has an interval, so "
                "none can be told from chance; give rows with counts by prompt, of two prompts or more"
            )
        reasons = {"lost more than that, beyond chance": lost, "failed": failed, "have a broken target": broke}
        for what, points in reasons.items():
            if points:
                code = 1
                of = f"{len(points)} of {len(against.matched.pairs)} points"
                note(f"{against.other.name}: {of} {what} (--fail-below {least:g})")
    return code


def _named(text: str) -> tuple[str, str | None]:
    """(path, name) of `PATH` or `NAME=PATH`; a path that is there may have a = in it."""
    name, sign, path = text.partition("=")
    if not sign or _there(text):
        return text, None
    if not name.strip() or not path:
        raise ConfigError(f"{text!r}: expected a path, or a name and a path such as new=results/new")
    return path, name.strip()


def _there(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False
