"""A sweep: every point of a grid at every depth, read back where it is on disk, run where it is not.

This module knows the order of work and who is told about it. It does not know what a point is, how one is run or
how it is kept: those are its neighbours' business (grid, worker, store).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from mtplab.config import EngineConfig, SamplingConfig, SpecConfig
from mtplab.errors import ConfigError
from mtplab.study.arguments import check_hooks, judges, method_of, opened
from mtplab.study.grid import Settings, build_units, check_depths, prompt_sets
from mtplab.study.identity import checkpoint_folder
from mtplab.study.point import plan_digest
from mtplab.study.producer import error_row
from mtplab.study.progress import Estimator, SweepProgress
from mtplab.study.result import SweepResult
from mtplab.study.row import ResultRow
from mtplab.study.store import PointStore
from mtplab.study.target_quality import QualityMeter
from mtplab.study.words import cache_words, weights_words
from mtplab.study.worker import Hooks, ModelSlot, Outcome, Unit, one_line, remote_work, work

__all__ = ["sweep"]


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
) -> SweepResult:
    """Runs exclusions × prompt sets × temperatures × cache policies, each at every depth.

    A point (all of it but the depth) is identified by a hash of its resolved config and inputs and kept in
    one file under `results`; a depth that is there is read back, never run again. Models are loaded one
    after the other, each once, and only if something must run. The first depth of a point that fails is
    recorded with its error and ends that point; the other points go on.

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

    Returns:
        `SweepResult`; rows are in grid order, depths ascending.

    Raises:
        ConfigError, CheckpointError: something asked for cannot be; nothing has run then.
    """
    started = time.monotonic()
    hooks = {"on_row": on_row, "on_progress": on_progress, "load_model": load_model, "generate": generate}
    check_hooks(hooks, cancel, executor)
    cancel = cancel if cancel is not None else threading.Event()
    asked_depths = check_depths(depths)
    method = method_of(method, generate, asked_depths)
    quality = judges(quality, reference, load_model or generate)
    checkpoint, model = opened(model_or_path)
    if model is not None:
        engine, spec = model.engine, model.spec
        if spec.model_format != engine.model_format:
            raise ConfigError(
                f"the loaded model's draft has model_format {spec.model_format}, its target {engine.model_format}; "
                "give the checkpoint's folder, and draft_exclude to keep the draft out of FP8"
            )
    else:
        engine = EngineConfig.of(
            device=str(device),
            dtype=None if dtype is None else str(dtype).removeprefix("torch."),
            model_format=model_format,
            activation_rounding=activation_rounding,
            exact=exact,
        )
        spec = SpecConfig.from_target(engine)
    settings = Settings(
        engine,
        SpecConfig.from_target(
            engine,
            exclude=spec.exclude,
            draft_sampling=draft_sampling,
            target_hidden=target_hidden,
            draft_hidden=draft_hidden,
        ),
        SamplingConfig.of(top_k=top_k, top_p=top_p, seed=seed, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos),
    )
    units = build_units(
        checkpoint,
        settings,
        asked_depths,
        [chosen.narrowed(domains, limit) for chosen in prompt_sets(prompts)],
        exclude,
        draft_exclude,
        quant_policy,
        draft_quant_policy,
        temperature,
        encode=getattr(model, "encode", None),
        method=method,
        quality=quality,
        reference=None if reference is None else opened(reference, "reference")[0],
        calibration=calibration,
    )
    if results is None:
        results = Path("results") / checkpoint_folder(checkpoint).resolve().name
    store = PointStore(results)
    slot = ModelSlot()
    if model is not None:
        own = plan_digest(model.plan.modules)
        key = next((u.variant.key for u in units if u.config.plan == own), None)
        slot = ModelSlot(key, model if key else None)
    job = _Job(units, store, Hooks(load_model, generate), cancel, on_row, on_progress)
    if executor is None:
        job.run_here(slot)
    else:
        job.run_on(executor)
    with contextlib.suppress(ConfigError) if not job.computed else contextlib.nullcontext():
        store.export()  # a folder that can only be read is no obstacle to reading back
    rows, exact = job.rows(), all(unit.config.exact for unit in units)  # not where it was only asked for
    return SweepResult(
        rows=rows,
        computed=job.computed,
        reused=len(rows) - job.computed,
        judged=job.judged,
        seconds=time.monotonic() - started,
        cancelled=job.stopped,
        folder=store.folder,
        notes=_notes(rows, exact),
        exact=exact,
    )


class _Job:
    """The state of one sweep while it runs."""

    def __init__(
        self,
        units: list[Unit],
        store: PointStore,
        hooks: Hooks,
        cancel: threading.Event,
        on_row: Callable[[ResultRow], None] | None,
        on_progress: Callable[[SweepProgress], None] | None,
    ):
        self.asked = units
        self.store = store
        self.hooks = hooks
        self.cancel = cancel
        self.on_row = on_row
        self.on_progress = on_progress
        # two labels can mean one point: it is run once
        self.units: dict[str, Unit] = {}
        for unit in units:
            self.units.setdefault(unit.point, unit)
        self.asked_by: dict[str, list[Unit]] = {}
        for unit in units:
            self.asked_by.setdefault(unit.point, []).append(unit)
        self.open: dict[str, set[int]] = {point: set(unit.depths) for point, unit in self.units.items()}
        self.found: dict[str, dict[int, ResultRow]] = {point: {} for point in self.units}
        self.computed = 0
        self.reused = 0
        self.judged = 0
        self.failed = 0
        self.stopped = False
        self.estimate = Estimator()
        self.meter = QualityMeter()
        self.started = time.monotonic()

    # running

    def run_here(self, slot: ModelSlot) -> None:
        """One unit after the other in this thread; units that another process holds come last."""
        self._tell("", 0.0, None)
        waiting = self._by_variant(slot)
        patient = False
        while waiting:
            busy = []
            for unit in waiting:
                if self.cancel.is_set():
                    break
                outcome = work(
                    unit,
                    self.store,
                    slot,
                    self.hooks,
                    self.cancel,
                    wait=patient,
                    on_row=lambda row, reused, outcome, unit=unit: self._took(unit, row, reused, outcome),
                    on_round=lambda depth, progress, unit=unit: self._round(unit, depth, progress),
                    meter=self.meter,
                    on_quality=lambda unit=unit: self._tell(f"{_named(unit)} · the target's quality", 0.0, None),
                )
                if outcome.busy:
                    busy.append(unit)
                else:
                    self._settle(unit, outcome)
            if self.cancel.is_set():
                break
            waiting, patient = busy, True
        self.stopped = any(self.open.values())

    def run_on(self, executor: concurrent.futures.Executor) -> None:
        """One future per unit; a cancel reaches the workers as a file in the results folder."""
        flag = self.store.folder / ".locks" / f"cancel-{uuid.uuid4().hex}"
        self.estimate.workers = getattr(executor, "_max_workers", None) or 1
        running: dict[concurrent.futures.Future, Unit] = {}

        def submit(unit: Unit, wait: bool) -> None:
            task = executor.submit(remote_work, unit, str(self.store.folder), self.hooks, str(flag), wait)
            running[task] = unit

        self._tell("", 0.0, None)
        try:
            for unit in self._by_variant(None):
                submit(unit, False)
            while running:
                done, _ = concurrent.futures.wait(running, 0.1, concurrent.futures.FIRST_COMPLETED)
                for task in done:
                    unit = running.pop(task)
                    outcome = self._outcome(unit, task)
                    if outcome.busy and not self.cancel.is_set():
                        submit(unit, True)
                    else:
                        for depth in sorted(outcome.rows):
                            self._took(unit, outcome.rows[depth], depth not in outcome.computed, outcome)
                        self._settle(unit, outcome)
                if self.cancel.is_set() and not flag.exists():
                    flag.touch()
                    for task in list(running):
                        if task.cancel():
                            del running[task]
        finally:
            if running:  # an error here must not leave workers at it
                flag.touch()
                concurrent.futures.wait(running, 60)
            flag.unlink(missing_ok=True)
        self.stopped = any(self.open.values())

    def _by_variant(self, slot: ModelSlot | None) -> list[Unit]:
        """Units of one variant together, in order of first appearance, the loaded one first."""
        order = dict.fromkeys(unit.variant.key for unit in self.units.values())
        first = slot.key if slot is not None else None
        rank = {key: (key != first, position) for position, key in enumerate(order)}
        return sorted(self.units.values(), key=lambda unit: rank[unit.variant.key])

    def _outcome(self, unit: Unit, task: concurrent.futures.Future) -> Outcome:
        """A future's outcome; a worker that died or could not be reached is the unit's failure."""
        try:
            return task.result()
        except ConfigError:
            raise
        except Exception as problem:
            depth = min(unit.depths)
            row = error_row(unit.config, depth, unit.labels, one_line(problem))
            return Outcome(rows={depth: row}, computed={depth})

    # telling

    def _took(self, unit: Unit, row: ResultRow, reused: bool, outcome: Outcome) -> None:
        self.found[unit.point][row.depth] = row
        self.open[unit.point].discard(row.depth)
        if reused:
            self.reused += 1
            self.judged += row.depth in outcome.judged
        else:
            self.computed += 1
            self.failed += row.error is not None
            if row.error is None:
                self.estimate.row_took(row.depth, outcome.seconds.get(row.depth, 0.0))
            if outcome.load_seconds:
                self.estimate.load_took(outcome.load_seconds)
                outcome.load_seconds = 0.0
        if self.on_row is not None:
            for asked in self.asked_by[unit.point]:
                self.on_row(row.relabelled(**asked.labels.fields()))
        self._tell("", 0.0, None)

    def _settle(self, unit: Unit, outcome: Outcome) -> None:
        """A unit is over: after a failure its deeper depths are not open any more."""
        if any(row.error is not None for row in outcome.rows.values()):
            self.open[unit.point].clear()
            self._tell("", 0.0, None)

    def _round(self, unit: Unit, depth: int, progress: Any) -> None:
        fraction = progress.tokens_done / progress.tokens_total if progress.tokens_total else 0.0
        what = "all depths" if unit.config.method == "trace" else f"depth {depth}"
        self._tell(f"{_named(unit)} · {what}", min(1.0, fraction), (unit.point, depth))

    def _tell(self, current: str, fraction: float, at: tuple[str, int] | None) -> None:
        if self.on_progress is None:
            return
        left = [(point, depth) for point, depths in self.open.items() for depth in sorted(depths)]
        if at in left:
            left.remove(at)
            left.insert(0, at)
        variants = {self.units[point].variant.key for point, _ in left}
        spent = 0.0
        if at is not None:
            spent = fraction * (self.estimate.row_cost(at[1]) or 0.0)
        total = sum(len(unit.depths) for unit in self.units.values())
        self.on_progress(
            SweepProgress(
                done=total - len(left),
                total=total,
                computed=self.computed,
                reused=self.reused,
                failed=self.failed,
                current=current,
                fraction=fraction,
                seconds=time.monotonic() - self.started,
                remaining=self.estimate.remaining((d for _, d in left), max(0, len(variants) - 1), spent),
            )
        )

    def rows(self) -> list[ResultRow]:
        """In the order the grid asked, under the labels it asked with."""
        return [
            self.found[unit.point][depth].relabelled(**unit.labels.fields())
            for unit in self.asked
            for depth in unit.depths
            if depth in self.found[unit.point]
        ]


def _named(unit: Unit) -> str:
    weights = weights_words(unit.labels.exclude_label, unit.config.model_format)
    return f"{weights} · {cache_words(unit.config.quant_policy)}"


def _notes(rows: list[ResultRow], exact: bool) -> list[str]:
    """Greedy output must not depend on depth: where it does, that is a finding."""
    outputs: dict[str, dict[str, list[int]]] = {}
    named: dict[str, ResultRow] = {}
    for row in rows:
        if row.temperature == 0 and row.output_hash is not None:
            depths = outputs.setdefault(row.point, {}).setdefault(row.output_hash, [])
            if row.depth not in depths:
                depths.append(row.depth)
            named.setdefault(row.point, row)
    notes = []
    for point, by_output in outputs.items():
        if len(by_output) > 1:
            groups = " | ".join(", ".join(map(str, depths)) for depths in by_output.values())
            why = "a fault" if exact else "near-ties may part the fast path from the exact one"
            notes.append(
                f"{named[point].exclude_label} · {named[point].quant_policy}: greedy output differs between "
                f"depths {groups} ({why})"
            )
    return notes
