"""One sweep while it runs: which units are open, who works at them, what has been told.

Knows the order of work and who is told about it; not what a point is, how one is run or how it is kept.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from mtplab.engines import ServerSlot
from mtplab.errors import ConfigError
from mtplab.study.producer import error_row
from mtplab.study.progress import Estimator, SweepProgress
from mtplab.study.row import ResultRow
from mtplab.study.store import PointStore
from mtplab.study.target_quality import QualityMeter
from mtplab.study.words import cache_words, weights_words
from mtplab.study.worker import Hooks, ModelSlot, Outcome, Unit, one_line, remote_work, work

__all__ = ["Job"]


class Job:
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
            self.units.setdefault(unit.key, unit)
        self.asked_by: dict[str, list[Unit]] = {}
        for unit in units:
            self.asked_by.setdefault(unit.key, []).append(unit)
        self.open: dict[str, set[int]] = {key: set(unit.depths) for key, unit in self.units.items()}
        self.found: dict[str, dict[int, ResultRow]] = {unit.point: {} for unit in units}
        self.computed = 0
        self.reused = 0
        self.judged = 0
        self.failed = 0
        self.stopped = False
        self.estimate = Estimator()
        self.meter = QualityMeter()
        self.started = time.monotonic()

    # running

    def run_here(self, slot: ModelSlot | ServerSlot) -> None:
        """One unit after the other in this thread; units that another process holds come last."""
        self._tell("", 0.0, None)
        waiting = self._by_source(slot)
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
                    on_start=lambda unit=unit: self._tell(
                        f"{_named(unit)} · depth {unit.depths[0]}: waiting for the server", 0.0, None
                    ),
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
        """One future per unit, or per server of an engine; a cancel reaches the workers as a file in the results
        folder."""
        flag = self.store.folder / ".locks" / f"cancel-{uuid.uuid4().hex}"
        self.estimate.workers = getattr(executor, "_max_workers", None) or 1
        running: dict[concurrent.futures.Future, list[Unit]] = {}

        def submit(units: list[Unit], wait: bool) -> None:
            task = executor.submit(remote_work, units, str(self.store.folder), self.hooks, str(flag), wait)
            running[task] = units

        self._tell("", 0.0, None)
        try:
            for units in self._batches():
                submit(units, False)
            while running:
                done, _ = concurrent.futures.wait(running, 0.1, concurrent.futures.FIRST_COMPLETED)
                for task in done:
                    units = running.pop(task)
                    busy = []
                    for unit, outcome in zip(units, self._outcomes(units, task), strict=True):
                        if outcome.busy and not self.cancel.is_set():
                            busy.append(unit)
                            continue
                        for depth in sorted(outcome.rows):
                            self._took(unit, outcome.rows[depth], depth not in outcome.computed, outcome)
                        self._settle(unit, outcome)
                    if busy:
                        submit(busy, True)
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

    def _by_source(self, slot: ModelSlot | ServerSlot | None) -> list[Unit]:
        """Units of one model or server together, in order of first appearance, the loaded one first."""
        order = dict.fromkeys(unit.source for unit in self.units.values())
        first = slot.key if slot is not None else None
        rank = {key: (key != first, position) for position, key in enumerate(order)}
        return sorted(self.units.values(), key=lambda unit: rank[unit.source])

    def _batches(self) -> list[list[Unit]]:
        """What one future does: a unit, or all that one server is started for."""
        ordered = self._by_source(None)
        return [
            batch
            for _, group in itertools.groupby(ordered, lambda unit: unit.source)
            for units in [list(group)]
            for batch in ([units] if units[0].serving is not None else [[unit] for unit in units])
        ]

    def _outcomes(self, units: list[Unit], task: concurrent.futures.Future) -> list[Outcome]:
        """A future's outcomes; a worker that died or could not be reached is its units' failure."""
        try:
            return task.result()
        except ConfigError:
            raise
        except Exception as problem:
            return [self._lost(unit, one_line(problem)) for unit in units]

    def _lost(self, unit: Unit, why: str) -> Outcome:
        """Of a unit whose worker is gone: what that had finished is there."""
        depth = min(unit.depths)
        row = self.store.rows(unit.point).get(depth) if unit.serving is not None else None
        if row is None or row.error is not None:
            row = error_row(unit.config, depth, unit.labels, why)
        return Outcome(rows={depth: row}, computed={depth})

    # telling

    def _took(self, unit: Unit, row: ResultRow, reused: bool, outcome: Outcome) -> None:
        self.found[unit.point][row.depth] = row
        self.open[unit.key].discard(row.depth)
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
            for asked in self.asked_by[unit.key]:
                self.on_row(row.relabelled(**asked.labels.fields()))
        self._tell("", 0.0, None)

    def _settle(self, unit: Unit, outcome: Outcome) -> None:
        """A unit is over: after a failure its deeper depths are not open any more."""
        if any(row.error is not None for row in outcome.rows.values()):
            self.open[unit.key].clear()
            self._tell("", 0.0, None)

    def _round(self, unit: Unit, depth: int, progress: Any) -> None:
        fraction = progress.tokens_done / progress.tokens_total if progress.tokens_total else 0.0
        what = "all depths" if unit.config.method == "trace" else f"depth {depth}"
        self._tell(f"{_named(unit)} · {what}", min(1.0, fraction), (unit.key, depth))

    def _tell(self, current: str, fraction: float, at: tuple[str, int] | None) -> None:
        if self.on_progress is None:
            return
        left = [(key, depth) for key, depths in self.open.items() for depth in sorted(depths)]
        if at in left:
            left.remove(at)
            left.insert(0, at)
        sources = {self.units[key].source for key, _ in left}
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
                remaining=self.estimate.remaining((d for _, d in left), max(0, len(sources) - 1), spent),
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
