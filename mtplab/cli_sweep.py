"""`mtplab sweep`: options into one call of `mtplab.study.sweep`, its result into a table or JSON.

Knows nothing of how points are run or kept.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli_common import (
    Calibration,
    CheckpointPath,
    Device,
    Exact,
    MaxNewTokens,
    Prompts,
    Results,
    TopK,
    TopP,
    depth_list,
    emit,
    exclusion,
    names,
    note,
    numbers,
    path_of,
    print_json,
    say,
)
from mtplab.cli_engines import (
    ApiKeyVariable,
    Concurrency,
    Engine,
    EngineArguments,
    EngineCommand,
    EngineFile,
    Parallel,
    PrintCommands,
    RequestSeconds,
    ServedModel,
    StartSeconds,
    engine_of_options,
)

__all__ = ["PointLines", "sweep"]


def sweep(
    path: CheckpointPath,
    depths: Annotated[
        str, typer.Option(metavar="A-B", help="Draft tokens per round, e.g. 0-8 or 1,3,5; 0 is plain decoding.")
    ] = "0-8",
    quant_policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="KV cache policies, commas between: none, int8, int4, fp8, fp8_e5m2, turboquant; int8/int4 for K and "
            "V apart; fp8:calibrated, fp8:calibrated-head and fp8:checkpoint for scales; int8@3+7 to keep layers 3 and "
            "7 unquantised.  [default: none]",
        ),
    ] = None,
    draft_quant_policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAMES", help="The draft's, each with each of the target's; the same if left out."),
    ] = None,
    calibration: Calibration = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SET",
            help="One set of modules kept out of FP8; repeat for more sets. published, none, as-stored, or globs "
            "with commas between ('mtp.*,lm_head'). A BF16 checkpoint is quantised to FP8 as it is loaded for "
            "every set but as-stored.  [default: as-stored]",
        ),
    ] = None,
    draft_exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="SET", help="Likewise for the draft head, each with each; the same if left out."),
    ] = None,
    temperature: Annotated[
        list[str] | None,
        typer.Option(metavar="NUMBERS", help="Temperatures, commas between; 0 is greedy.  [default: 0]"),
    ] = None,
    prompts: Prompts = None,
    domain: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only prompts of this domain; repeat for more.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first N prompts of each domain.", metavar="N")] = None,
    max_new_tokens: MaxNewTokens = 64,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Annotated[int, typer.Option(metavar="N", help="The same seed gives the same results.")] = 0,
    model_format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="fp8 quantises a BF16 checkpoint as it is loaded, for every set."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="trace|run",
            help="trace decodes once for all depths, run at every depth and says what each takes.  [default: trace, "
            "where there is a draft to trace]",
        ),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="The unquantised checkpoint that targets are compared with.  [default: PATH itself, where it is "
            "unquantised]",
            parser=path_of,
        ),
    ] = None,
    quality: Annotated[
        bool | None,
        typer.Option(
            "--quality/--no-quality",
            help="Judge each target beside its acceptance, or do not.  [default: judge, where mtplab runs it]",
        ),
    ] = None,
    device: Device = "cpu",
    exact: Exact = True,
    results: Results = None,
    by_domain: Annotated[
        bool, typer.Option("--by-domain", help="A line of the table for each domain of prompts.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document with every row on stdout.")] = False,
    engine: Engine = None,
    engine_command: EngineCommand = None,
    engine_args: EngineArguments = None,
    engine_file: EngineFile = None,
    parallel: Parallel = None,
    concurrency: Concurrency = None,
    request_timeout: RequestSeconds = None,
    start_timeout: StartSeconds = None,
    served_model: ServedModel = None,
    api_key_env: ApiKeyVariable = None,
    print_commands: PrintCommands = False,
) -> int:
    """Measure acceptance at every depth for cache policies × exclusions × temperatures.

    Every result is kept as it is finished: interrupt at any moment, run the same line again, and only what is
    missing is computed. The table shows acceptance length (tokens per round, the bonus counted), and what the target
    itself is worth: KL from the unquantised one, top-1 agreement and perplexity. ⚠ marks a broken target, whose
    acceptance says nothing.

    \b
    Examples:
      mtplab sweep data/tiny-qwen3_5 --depths 0-8 --quant-policy none,int8,fp8
      mtplab sweep data/tiny-qwen3_5 --exclude published --exclude none --exclude 'mtp.*' --depths 1,3,5
      mtplab sweep data/tiny-qwen3_5-fp8 --temperature 0,0.7 --domain python --limit 4 --max-new-tokens 32
      mtplab sweep data/tiny-qwen3_5 --depths 0-8 --limit 6 --by-domain
      mtplab sweep data/tiny-qwen3_5 --depths 0-4 --limit 2 --method run --no-quality
      mtplab sweep data/tiny-qwen3_5-fp8 --reference data/tiny-qwen3_5 --depths 0,4 --limit 2
      mtplab sweep data/tiny-qwen3_5 --quant-policy int4 --draft-quant-policy none,int4 --json > rows.json
      mtplab sweep data/tiny-qwen3_5 --quant-policy turboquant,int8/int4,fp8:calibrated --limit 2
      mtplab sweep data/tiny-qwen3_5 --depths 0-4 --limit 2 --engine mtplab
      mtplab sweep data/tiny-qwen3_5 --depths 0-4 --quant-policy none,fp8 --engine vllm --print-commands
      mtplab sweep data/tiny-qwen3_5 --depths 3 --engine http://127.0.0.1:8000

    On a serving engine the same points come back as the same rows: `-` as PATH sweeps what a running server has, with
    no files of it here. docs/engines.md says how acceptance is counted there, and what is missing.

    Ctrl-C stops after the current round; twice stops at once.
    """
    from mtplab.study import engine_commands
    from mtplab.study import sweep as run

    serving = engine_of_options(
        engine,
        engine_command,
        engine_args,
        engine_file,
        parallel,
        concurrency,
        request_timeout,
        start_timeout,
        served_model,
        api_key_env,
    )
    asked = {
        "model_or_path": None if serving is not None and str(path) == "-" else path,
        "prompts": prompts,
        "depths": depth_list(depths),
        "quant_policy": names("--quant-policy", quant_policy or ["none"]),
        "draft_quant_policy": names("--draft-quant-policy", draft_quant_policy) if draft_quant_policy else None,
        "exclude": [exclusion("--exclude", text) for text in exclude] if exclude else (None,),
        "draft_exclude": [exclusion("--draft-exclude", text) for text in draft_exclude] if draft_exclude else None,
        "temperature": numbers("--temperature", temperature or ["0"]),
        "domains": domain or None,
        "limit": limit,
        "max_new_tokens": max_new_tokens,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
        "model_format": model_format,
        "method": method,
        "quality": quality,
        "reference": reference,
        "device": device,
        "exact": exact,
        "results": results,
        "calibration": calibration,
        "engine": serving,
    }
    if print_commands:
        lines, notes = engine_commands(**asked)
        for finding in notes:
            note(finding)
        if as_json:
            print_json(lines)
        else:
            emit("\n".join(lines))
        return 0
    with _stop_on_interrupt() as cancel, _bar() as follow:
        on_row = None
        if follow is None:  # nobody looks at a bar: a line for each finished point instead
            # a server is done with a depth, our runner with a point
            lines = PointLines(len(depth_list(depths)) if serving is None else 1)
            on_row, follow = lines.row, lines.step
        result = run(**asked, on_row=on_row, on_progress=follow, cancel=cancel)
    if as_json:
        print_json(
            {
                "computed": result.computed,
                "read_back": result.reused,
                "quality_measured_of_read_back": result.judged,
                "cancelled": result.cancelled,
                "notes": result.notes,
                "rows": [json.loads(row.to_json()) for row in result],
            }
        )
    else:
        say(result.to_table(by_domain))
        say()
        say(f"{result.summary()}; {result.seconds:.1f} s; kept in {result.folder}")
    for finding in result.notes:
        note(finding)
    faults = result.notes if result.exact else []
    return 1 if result.failed or result.cancelled or faults else 0


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts as usual."""
    cancel = threading.Event()

    def first(number: int, frame: Any) -> None:
        cancel.set()
        signal.signal(signal.SIGINT, before)
        note("stopping after this round; Ctrl-C again stops at once")

    if threading.current_thread() is not threading.main_thread():
        yield cancel
        return
    before = signal.signal(signal.SIGINT, first)
    try:
        yield cancel
    finally:
        signal.signal(signal.SIGINT, before)


class PointLines:
    """A line on stderr for each point that was computed, as soon as its last depth is there or it has failed."""

    def __init__(self, depths: int):
        self.depths = depths
        self._rows: dict[str, int] = {}
        self._finished = ""
        self._computed = 0

    def row(self, row: Any) -> None:
        """For `sweep(on_row=…)`, which is called before the step that counts the row."""
        from mtplab.study.words import cache_words, weights_words

        self._rows[row.point] = self._rows.get(row.point, 0) + 1
        if self._rows[row.point] == self.depths or row.error is not None:
            words = f"{weights_words(row.exclude_label, row.model_format)} · {cache_words(row.quant_policy)}"
            self._finished = words + (" failed" if row.error is not None else "")

    def step(self, progress: Any) -> None:
        """For `sweep(on_progress=…)`."""
        if self._finished and progress.computed > self._computed:
            note(f"{replace(progress, current='')} · finished: {self._finished}")
        if self._finished or progress.computed > self._computed:
            self._finished, self._computed = "", progress.computed


@contextmanager
def _bar() -> Iterator[Any]:
    """A bar on stderr that follows a `SweepProgress`; None when stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    from mtplab.report.text import plain

    # the time to go is the sweep's own: tqdm's would take rows read back for rows computed
    width = shutil.get_terminal_size().columns
    form = "{percentage:3.0f}% {bar:24} {desc}"
    with tqdm(total=1.0, bar_format=form, file=sys.stderr, leave=False, ncols=width) as bar:
        drawn = 0.0

        def follow(progress: Any) -> None:
            nonlocal drawn
            now = time.monotonic()
            if now - drawn < 0.1:
                return
            drawn = now
            bar.total = progress.total
            bar.n = progress.done + (progress.fraction if progress.done < progress.total else 0)
            bar.set_description_str(plain(progress))

        yield follow
