"""A sweep: every point of a grid at every depth, read back where it is on disk, run where it is not.

This module knows the order of work and who is told about it. It does not know what a point is, how one is run or
how it is kept: those are its neighbours' business (grid, worker, store).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from mtplab.engines import Attach, engine_settings
from mtplab.errors import ConfigError
from mtplab.study.arguments import check_hooks
from mtplab.study.hint import faint_server
from mtplab.study.job import Job
from mtplab.study.planned import plan_sweep
from mtplab.study.progress import SweepProgress
from mtplab.study.result import SweepResult
from mtplab.study.row import ResultRow
from mtplab.study.served import commands
from mtplab.study.store import PointStore
from mtplab.study.words import engine_words
from mtplab.study.worker import Hooks

__all__ = ["engine_commands", "sweep"]


def sweep(
    model_or_path: Any,
    prompts: Any = None,
    depths: Iterable[int] = range(0, 9),
    quant_policy: Any = ("none",),
    exclude: Any = (None,),
    temperature: Any = (0.0,),
    results: str | Path | None = None,
    max_new_tokens: int = 64,
    on_row: Callable[[ResultRow], None] | None = None,
    cancel: threading.Event | None = None,
    *,
    draft_quant_policy: Any = None,
    draft_exclude: Any = None,
    model_format: str | None = None,
    seed: int = 0,
    top_k: int = 0,
    top_p: float = 1.0,
    draft_sampling: str = "greedy",
    target_hidden: str | None = None,
    draft_hidden: str | None = None,
    ignore_eos: bool = False,
    device: str = "cpu",
    dtype: Any = None,
    activation_rounding: bool = True,
    exact: bool = True,
    domains: list[str] | None = None,
    limit: int | None = None,
    method: Literal["trace", "run"] | None = None,
    executor: concurrent.futures.Executor | None = None,
    on_progress: Callable[[SweepProgress], None] | None = None,
    quality: bool | None = None,
    reference: Any = None,
    load_model: Callable[..., Any] | None = None,
    generate: Callable[..., Any] | None = None,
    calibration: Any = None,
    engine: Any = None,
) -> SweepResult:
    """Runs exclusions × prompt sets × temperatures × cache policies, each at every depth.

    A point (all of it but the depth) is identified by a hash of its resolved config and inputs and kept in
    one file under `results`; a depth that is there is read back, never run again. Models are loaded one
    after the other, each once, and only if something must run. The first depth of a point that fails is
    recorded with its error and ends that point; the other points go on. On an engine every depth has a server of its
    own, and fails alone.

    Args:
        model_or_path: a checkpoint's folder, an open checkpoint, or a loaded model. A loaded model brings
            its own device, dtype, format, rounding and exactness, and stands for `exclude=None`; other
            exclusions are loaded from its checkpoint.
        prompts: None (the bundled ones), a .jsonl or .txt file, a folder, strings, lists of ids, a
            `PromptSet`, or a mapping label -> any of these (several prompt sets).
        depths: drafts per round, each 0…16; 0 is plain decoding.
        quant_policy, draft_quant_policy: cache policies; the draft's follow the target's unless given.
        exclude, draft_exclude: sequences of exclusion sets: None (as stored), `"published"`, `"none"`, a
            glob, or a list of globs. A BF16 checkpoint is quantised to FP8 as it is loaded for every set but
            None.
        temperature: 0 is greedy.
        target_hidden, draft_hidden: what the head reads of the target and is fed back, "post_norm" or "pre_norm"; None
            is what the model's family is served with, and every row says which.
        results: the folder; default `results/<checkpoint's name>`.
        domains, limit: only these domains, only the first `limit` prompts of each.
        on_row: called with each row as it is there, read back ones included.
        on_progress: called with a `SweepProgress` at every row and round.
        cancel: an event; when set, the sweep stops within a round and returns what it has.
        method: "trace" decodes a point once and has every depth from that (`mtplab.trace`); its rows have no seconds
            of their own. "run" decodes at every depth and measures what it takes. At temperature 0 both count the
            same; above it a trace gives expectations. None traces, except where there is nothing to trace (depth 0
            only, a model without a draft) or a `generate` is given. Traces are kept in the folder: `SweepResult.trace`.
        quality: whether each row also says what its target is worth: KL from the unquantised target, top-1 agreement
            and perplexity (fields of `ResultRow`). Measured once for every target × cache policy, also for points that
            are on disk without it; nothing of their acceptance is computed again. None measures, except where
            `load_model` or `generate` stand in for mtplab's own.
        reference: the unquantised checkpoint that targets are compared with: a folder, an open checkpoint or a loaded
            model. None takes the swept checkpoint itself where it is unquantised; where it is stored in FP8 there is
            then no KL, and perplexity is that of the prompts.
        executor: any `concurrent.futures.Executor`; its workers must see the `results` folder. Default: here.
        calibration: texts that calibrated cache policies take their scales from, as `prompts` are given; None is the
            bundled prompts. Part of such a point's hash.
        load_model, generate: other callables with the signatures of mtplab's own.
        engine: a serving engine that runs the points in place of mtplab's own runner: the address of a server that
            runs already (`"http://host:8000"`, or several, each of another depth; also an `Attach`), or the name of
            one to be started for each point (`"vllm"`, `"sglang"`, `"lmdeploy"`, `"llamacpp"`; also a `Launch`). Rows
            come of what its `/metrics` counted meanwhile. With an attached server, depths that none serves are left
            out, and `model_or_path` may be None: what the server has.

    Returns:
        `SweepResult`; rows are in grid order, depths ascending.

    Raises:
        ConfigError, CheckpointError: something asked for cannot be; nothing has run then.
    """
    asked = SimpleNamespace(**locals())
    started = time.monotonic()
    check_hooks(
        {"on_row": on_row, "on_progress": on_progress, "load_model": load_model, "generate": generate}, cancel, executor
    )
    cancel = cancel if cancel is not None else threading.Event()
    planned = plan_sweep(asked, starts=executor is None)
    store = PointStore(planned.results)
    job = Job(planned.units, store, Hooks(load_model, generate), cancel, on_row, on_progress)
    if executor is not None:
        job.run_on(executor)
    else:
        with contextlib.closing(planned.slot):
            job.run_here(planned.slot)
    with contextlib.suppress(ConfigError) if not job.computed else contextlib.nullcontext():
        store.export()  # a folder that can only be read is no obstacle to reading back
    rows, exact = job.rows(), all(unit.config.exact for unit in planned.units)  # not where it was only asked for
    return SweepResult(
        rows=rows,
        computed=job.computed,
        reused=len(rows) - job.computed,
        judged=job.judged,
        seconds=time.monotonic() - started,
        cancelled=job.stopped,
        folder=store.folder,
        notes=[*planned.notes, *_notes(rows, exact)],
        exact=exact,
    )


def engine_commands(*arguments: Any, **settings: Any) -> tuple[list[str], list[str]]:
    """(the shell lines with which `sweep`, whose arguments these are, would start its servers; what is to be known of
    them): for a cluster's scheduler. Starts nothing and asks no server.

    Raises:
        ConfigError, CheckpointError: as `sweep`, also where its engine is not one to be started.
    """
    bound = inspect.signature(sweep).bind(*arguments, **settings)
    bound.apply_defaults()
    asked = SimpleNamespace(**bound.arguments)
    if asked.engine is None or isinstance(engine_settings(asked.engine), Attach):
        raise ConfigError(
            "there is nothing to start: give an engine by its name, engine='vllm' or --engine vllm"
        )
    planned = plan_sweep(asked, starts=False)
    return commands(planned.units), planned.notes


def _notes(rows: list[ResultRow], exact: bool) -> list[str]:
    """Greedy output must not depend on depth, and a head is right sometimes: where not, that is a finding."""
    outputs: dict[str, dict[str, list[int]]] = {}
    named: dict[str, ResultRow] = {}
    for row in rows:
        if row.temperature == 0 and row.output_hash is not None:
            depths = outputs.setdefault(row.point, {}).setdefault(row.output_hash, [])
            if row.depth not in depths:
                depths.append(row.depth)
            named.setdefault(row.point, row)
    notes = []
    for row in rows:
        said = faint_server(row.per_position, row.rounds) if row.engine is not None and row.error is None else ""
        if said:
            notes.append(
                f"{engine_words(row.engine)} · {row.exclude_label} · {row.quant_policy} · temperature "
                f"{row.temperature:g} · depth {row.depth}: {said[:1].lower()}{said[1:]}"
            )
    for point, by_output in outputs.items():
        if len(by_output) > 1:
            groups = " | ".join(", ".join(map(str, depths)) for depths in by_output.values())
            why = "a fault" if exact else "near-ties may part the fast path from the exact one"
            notes.append(
                f"{named[point].exclude_label} · {named[point].quant_policy}: greedy output differs between "
                f"depths {groups} ({why})"
            )
    return notes
