"""A point's rows from one trace of it: the trace on disk where it is deep enough, else one that is made and kept.

The target's part is shared: points that differ in nothing but the draft's weights, its cache, what it feeds back and
how its drafts are chosen ask for one and the same output, which is decoded once and kept beside the traces.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mtplab.study.producer import traced_row, weight_facts
from mtplab.study.tracestore import TraceStore

if TYPE_CHECKING:
    from mtplab.study.row import ResultRow
    from mtplab.study.trace import Trace
    from mtplab.study.worker import Unit

__all__ = ["rows_of"]


def rows_of(
    unit: Unit,
    depths: list[int],
    traces: TraceStore,
    model: Callable[[], Any],
    owned: Callable[[str], contextlib.AbstractContextManager[bool]],
    on_round: Callable[[Any], None] | None = None,
    cancel: Any = None,
) -> list[ResultRow]:
    """Rows at these depths, in this order. `model()` loads the unit's and is called only where something must run;
    `owned(name)` waits for a lock of this name. Errors of the runner pass through."""
    trace = traces.trace(unit.point, max(depths))
    if trace is None:
        trace = _made(unit, traces, model(), owned, on_round, cancel)
    acceptance = trace.acceptance()
    return [traced_row(acceptance, unit.config, depth, unit.labels) for depth in depths]


def _made(unit: Unit, traces: TraceStore, model: Any, owned: Any, on_round: Any, cancel: Any) -> Trace:
    from mtplab.decode.settings import resolve_run
    from mtplab.study.trace import decoded, traced

    config = unit.config
    asked = resolve_run(
        model,
        [list(ids) for ids in config.prompts],
        max(unit.depths),
        **config.run_arguments(),
        on_round=on_round,
        cancel=cancel,
    )
    # two processes that need one target's output make it once; where a cancel ends the wait, it ends the run too
    with owned(f"target-{unit.target}"):
        output = traces.target(unit.target)
        seconds = None
        if output is None:
            output, seconds = decoded(model, asked, on_round, cancel)
            traces.keep_target(unit.target, output)
    found = traced(model, asked, config.domains, output, seconds, cancel)
    found.settings["model"] = weight_facts(model, config)
    found.settings["target_reused"] = seconds is None
    traces.keep(unit.point, found)
    return found
