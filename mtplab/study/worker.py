"""One unit of a sweep's work: a point, at the depths asked for, from lock to file.

A point on a serving engine is a unit a depth, for each depth is another server.

Runs wherever an executor puts it; everything it takes and gives can be pickled except the callbacks, which
only an in-process run has. It does not know the grid, the labels of other points, or how progress is shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtplab.engines import ServerSlot, Serving
from mtplab.errors import MtplabError
from mtplab.study.fields import fact_of
from mtplab.study.point import PointConfig
from mtplab.study.producer import Labels, error_row, produce, served_row
from mtplab.study.row import ResultRow
from mtplab.study.store import PointStore
from mtplab.study.target_quality import QualityMeter, QualityTask, TargetQuality

__all__ = ["CancelFile", "Hooks", "ModelSlot", "Outcome", "Unit", "Variant", "remote_work", "work"]

OnRound = Callable[[int, Any], None]  # (depth, the runner's progress)


@dataclass(frozen=True)
class Variant:
    """One set of weights in memory; `key` is equal for variants that load the same model."""

    key: str
    path: str
    device: str
    dtype: Any
    exclude: tuple[str, ...] | str | None
    draft_exclude: tuple[str, ...] | str | None
    model_format: str | None
    activation_rounding: bool
    exact: bool

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `load_model` beside the path."""

        def as_list(globs: Any) -> Any:
            return list(globs) if isinstance(globs, tuple) else globs

        return {
            "device": self.device,
            "dtype": self.dtype,
            "exclude": as_list(self.exclude),
            "draft_exclude": as_list(self.draft_exclude),
            "model_format": self.model_format,
            "activation_rounding": self.activation_rounding,
            "exact": self.exact,
        }


@dataclass(frozen=True)
class Unit:
    """A point to be run at `depths`, under the labels it was first asked for with."""

    config: PointConfig
    variant: Variant | None  # None where an engine serves what is not at hand
    labels: Labels
    depths: tuple[int, ...]
    target: str  # equal for units whose targets do the same
    quality: QualityTask | None = None  # None leaves the target's quality out
    serving: Serving | None = None  # the engine's server, of the unit's one depth; None runs mtplab's own model
    engine_version: str | None = None  # where it is known before it is asked

    @property
    def point(self) -> str:
        return self.config.hash()

    @property
    def key(self) -> str:
        """What nobody else may be at while this unit is: a point, or one depth of it on an engine."""
        return self.point if self.serving is None else f"{self.point}.{self.depths[0]}"

    @property
    def source(self) -> str:
        """Equal for units that one loaded model, or one server, serves."""
        return self.variant.key if self.serving is None else self.serving.key


@dataclass(frozen=True)
class Hooks:
    """What loads and what generates; None means mtplab's own. With a process pool they must be picklable."""

    load_model: Callable[..., Any] | None = None
    generate: Callable[..., Any] | None = None

    def loader(self) -> Callable[..., Any]:
        if self.load_model is not None:
            return self.load_model
        from mtplab.models import load_model

        return load_model

    def generator(self) -> Callable[..., Any]:
        if self.generate is not None:
            return self.generate
        from mtplab.decode import generate

        return generate


class ModelSlot:
    """Holds one loaded model: asking for another variant drops the one before, then loads."""

    def __init__(self, key: str | None = None, model: Any = None):
        self._key = key
        self._model = model

    @property
    def key(self) -> str | None:
        return self._key

    def close(self) -> None:
        """Lets go of the model."""
        self._key = self._model = None

    def get(self, variant: Variant, hooks: Hooks) -> tuple[Any, float]:
        """The variant's model, and the seconds that loading it took (0.0 when it was there)."""
        key = variant.key
        if self._key == key:
            return self._model, 0.0
        self.close()
        started = time.monotonic()
        self._model = hooks.loader()(variant.path, **variant.arguments())
        self._key = key
        return self._model, time.monotonic() - started


Slot = ModelSlot | ServerSlot


@dataclass
class Outcome:
    """What became of a unit. `judged`: depths that were read back and got their target's quality now. `busy`: another
    process holds the point; nothing was done."""

    rows: dict[int, ResultRow] = field(default_factory=dict)
    computed: set[int] = field(default_factory=set)
    judged: set[int] = field(default_factory=set)
    seconds: dict[int, float] = field(default_factory=dict)
    load_seconds: float = 0.0
    busy: bool = False
    cancelled: bool = False


class CancelFile:
    """An event that other processes and machines can see: set when a file exists."""

    def __init__(self, path: str, every: float = 0.2):
        self.path = path
        self.every = every
        self._looked = 0.0
        self._set = False

    def is_set(self) -> bool:
        now = time.monotonic()
        if not self._set and now - self._looked >= self.every:
            self._looked = now
            self._set = Path(self.path).exists()
        return self._set


def work(
    unit: Unit,
    store: PointStore,
    slot: Slot,
    hooks: Hooks,
    cancel: Any,
    wait: bool = False,
    on_row: Callable[[ResultRow, bool, Outcome], None] | None = None,
    on_round: OnRound | None = None,
    meter: QualityMeter | None = None,
    on_quality: Callable[[], None] | None = None,
    on_start: Callable[[], None] | None = None,
) -> Outcome:
    """Brings a point's file up to date at the unit's depths.

    A depth that is on disk without an error is read back, and where the target's quality is asked for and is not in it,
    that alone is added. The first depth that fails is recorded with its error and ends the point; a later sweep tries
    it again. `on_row(row, reused, outcome)` is called as each row is there, `on_round(depth, progress)` after each
    round of the runner, `on_quality()` before the target is judged, `on_start()` before a server is waited for.
    """
    outcome = Outcome()
    maker = _Maker(unit, store, slot, hooks, cancel, outcome, on_start)

    def take(row: ResultRow, reused: bool) -> None:
        if unit.quality is None and reused:
            row = row.without_quality()
        outcome.rows[row.depth] = row
        if not reused:
            outcome.computed.add(row.depth)
        if on_row is not None:
            on_row(row, reused, outcome)

    point = unit.point
    on_disk = store.rows(point)
    if all(_finished(unit, on_disk, depth) for depth in unit.depths):
        done = all(_judged(unit, on_disk[depth]) for depth in unit.depths)
        if done or not store.writable():
            unknown = TargetQuality.failed("the results folder cannot be written")
            for depth in unit.depths:
                row = on_disk[depth]
                take(row if _judged(unit, row) else row.with_quality(unknown.row_fields(), unknown.about()), True)
            return outcome
    with _owned(store, unit.key, wait, cancel) as held:
        if not held:
            outcome.busy = True
            outcome.cancelled = cancel.is_set()
            return outcome
        # another process may have finished depths between the look and the lock
        rows = store.kept(point)
        missing = [depth for depth in unit.depths if not _finished(unit, rows, depth)]
        bare = [depth for depth in unit.depths if depth not in missing and not _judged(unit, rows[depth])]
        for depth in unit.depths:
            if depth not in missing and depth not in bare:
                take(rows[depth], True)
        found = None
        if unit.quality is not None and (missing or bare):
            if on_quality is not None:
                on_quality()
            started = time.monotonic()
            found = maker.quality(meter or QualityMeter())
            if found is None:
                return outcome
            spent = (time.monotonic() - started) / len(unit.depths)
            judged = {depth: rows[depth].with_quality(found.row_fields(), found.about()) for depth in bare}
            if found.key and bare:  # a failure must not take the place of what was measured against another reference
                store.write(unit.config, judged.values())
                outcome.judged |= set(bare)
            for depth in bare:
                take(judged[depth], True)
        made = maker.traced if unit.config.method == "trace" else maker.run
        for new in made(missing, on_round):
            if found is not None:
                new = [row if row.error else row.with_quality(found.row_fields(), found.about()) for row in new]
                outcome.seconds |= {row.depth: outcome.seconds[row.depth] + spent for row in new}
            store.write(unit.config, new)
            for row in new:
                take(row, False)
    return outcome


@dataclass(frozen=True)
class _Maker:
    """What makes a unit's rows: whatever fails says so in them."""

    unit: Unit
    store: PointStore
    slot: Slot
    hooks: Hooks
    cancel: Any
    outcome: Outcome
    on_start: Callable[[], None] | None = None

    def model(self, variant: Variant) -> Any:
        """A variant's model; what loading it took is noted."""
        loaded, loading = self.slot.get(variant, self.hooks)
        self.outcome.load_seconds += loading
        return loaded

    def owned(self, name: str) -> _owned:
        """Waits for a lock of this name."""
        return _owned(self.store, name, True, self.cancel)

    def quality(self, meter: QualityMeter) -> TargetQuality | None:
        """The quality of the unit's target; None where the sweep was cancelled."""

        def load(variant: Variant, reference: bool) -> Any:
            if reference and self.slot.key not in (None, variant.key):
                # the slot's model is wanted next, and a loaded one that was given cannot be loaded again
                return self.hooks.loader()(variant.path, **variant.arguments())
            return self.model(variant)

        try:
            return meter.of(self.unit, self.store, load, self.owned, self.cancel)
        except Exception as problem:
            if self.cancel.is_set():
                self.outcome.cancelled = True
                return None
            return TargetQuality.failed(one_line(problem))

    def ready(self) -> Callable[[int, Callable[[Any], None] | None], ResultRow]:
        """What makes the row of a depth and calls a function at every round: the runner with its model loaded, or the
        unit's server once it answers."""
        config, labels, serving = self.unit.config, self.unit.labels, self.unit.serving
        if serving is None:
            model, generate = self.model(self.unit.variant), self.hooks.generator()
            return lambda depth, told: produce(
                model, config, depth, labels, generate, on_round=told, cancel=self.cancel
            )
        if self.on_start is not None and self.slot.key != serving.key:
            self.on_start()
        running, loading = self.slot.get(serving, self.cancel)
        self.outcome.load_seconds += loading

        def measured(depth: int, told: Callable[[Any], None] | None) -> ResultRow:
            found = running.measure(config.prompts, config.domains, depth, config.sampling(), self.cancel, told)
            return served_row(found, config, depth, labels)

        return measured

    def run(self, depths: list[int], on_round: OnRound | None) -> Iterator[list[ResultRow]]:
        """Depth after depth through the runner or the unit's server, up to the first that fails."""
        for depth in depths:
            if self.cancel.is_set():
                self.outcome.cancelled = True
                return
            started = time.monotonic()
            try:
                ready = self.ready()
                started = time.monotonic()
                row = ready(depth, _at(on_round, depth))
            except Exception as problem:
                if self.cancel.is_set():  # how a runner and a server stop
                    self.outcome.cancelled = True
                    return
                row = self._failed(depth, problem)
            self.outcome.seconds[depth] = time.monotonic() - started
            yield [row]
            if row.error is not None:
                return

    def traced(self, depths: list[int], on_round: OnRound | None) -> Iterator[list[ResultRow]]:
        """All depths from one trace; what fails, fails at the least of them."""
        from mtplab.study.tracer import rows_of
        from mtplab.study.tracestore import TraceStore

        if not depths or self.cancel.is_set():
            self.outcome.cancelled = bool(depths)
            return
        started = time.monotonic()

        def model() -> Any:
            nonlocal started
            loaded = self.model(self.unit.variant)
            started = time.monotonic()
            return loaded

        traces, round_of_all = TraceStore(self.store), _at(on_round, depths[0])
        try:
            rows = rows_of(self.unit, depths, traces, model, self.owned, round_of_all, self.cancel)
        except Exception as problem:
            if self.cancel.is_set():
                self.outcome.cancelled = True
                return
            rows = [self._failed(depths[0], problem)]
        for row in rows:
            self.outcome.seconds[row.depth] = (time.monotonic() - started) / len(rows)
        yield rows

    def _failed(self, depth: int, problem: Exception) -> ResultRow:
        return error_row(self.unit.config, depth, self.unit.labels, one_line(problem))


def _at(on_round: OnRound | None, depth: int) -> Callable[[Any], None] | None:
    """What the runner is to call at this depth."""
    return None if on_round is None else lambda progress: on_round(depth, progress)


_mine = threading.local()


def remote_work(units: Sequence[Unit], folder: str, hooks: Hooks, cancel_path: str, wait: bool) -> list[Outcome]:
    """`work` on units of one source inside an executor's worker. Each worker thread keeps the last model it loaded, and
    what references said; a server ends with the units that it was started for."""
    store, cancel = PointStore(folder), CancelFile(cancel_path)
    if units[0].serving is not None:
        slot = ServerSlot()
        try:
            return [work(unit, store, slot, hooks, cancel, wait=wait) for unit in units]
        finally:
            slot.close()
    if not hasattr(_mine, "slot"):
        _mine.slot, _mine.meter = ModelSlot(), QualityMeter()
    return [work(unit, store, _mine.slot, hooks, cancel, wait=wait, meter=_mine.meter) for unit in units]


def one_line(problem: BaseException) -> str:
    """An error as one line; the type only where the message was not written for a user."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if isinstance(problem, MtplabError) else f"{type(problem).__name__}: {text}"


def _finished(unit: Unit, rows: dict[int, ResultRow], depth: int) -> bool:
    """Whether a depth is there: without an error, and of this version of the engine as far as both are known."""
    if depth not in rows or rows[depth].error is not None:
        return False
    found = fact_of(rows[depth], "engine", "version")
    return None in (found, unit.engine_version) or found == unit.engine_version


def _judged(unit: Unit, row: ResultRow) -> bool:
    """Whether the row holds the quality that is asked for: of this target over this text, against this reference."""
    return unit.quality is None or fact_of(row, "quality", "key") == unit.quality.key


class _owned:
    """The point's lock; with `wait`, tries until it is free or the sweep is cancelled."""

    def __init__(self, store: PointStore, point: str, wait: bool, cancel: Any):
        self._arguments = (store, point, wait, cancel)

    def __enter__(self) -> bool:
        store, point, wait, cancel = self._arguments
        while True:
            self._lock = store.lock(point)
            held = self._lock.__enter__()
            if held or not wait or cancel.is_set():
                return held
            self._lock.__exit__(None, None, None)
            time.sleep(0.2)

    def __exit__(self, *problem: Any) -> None:
        self._lock.__exit__(*problem)
