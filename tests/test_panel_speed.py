"""Every control of every panel moves its figure in less than 250 ms, on the bundled model.

Measured from the event to the traits that the browser shows, over several moves of each control; the median counts,
for Python's cycle collector stops whichever move it falls on. The clock is this thread's own: nothing here waits, and
what else the machine does is no panel's doing.
"""

from __future__ import annotations

import statistics
import time

import ipywidgets as widgets
import pytest

import mtplab
from mtplab.report import AcceptancePanel, AdvisePanel, AuditPanel, CheckpointPanel, GemmPanel, SweepPanel
from mtplab.study import load_prompts
from mtplab.study.published import ACCEPTANCE

LIMIT, MOVES = 0.250, 5


def moved(widget, step):
    """Another value for a control, as a user would set it; `step` counts moves."""
    if isinstance(widget, widgets.IntRangeSlider):
        low, high = widget.min, widget.max
        return (low + step % 2, high - step % max(1, high - low - 1))
    if isinstance(widget, widgets.Checkbox):
        return not widget.value
    if isinstance(widget, widgets.SelectMultiple):
        values = [option[1] if isinstance(option, tuple) else option for option in widget.options]
        return tuple(values[: 1 + step % len(values)])
    if isinstance(widget, widgets.Dropdown | widgets.ToggleButtons):
        values = [option[1] if isinstance(option, tuple) else option for option in widget.options]
        return values[(values.index(widget.value) + 1) % len(values)]
    if isinstance(widget, widgets.IntSlider | widgets.FloatSlider):
        return widget.min + (widget.value - widget.min + widget.step) % (widget.max - widget.min)
    return widget.value + "a"


@pytest.fixture(scope="module")
def panels(bundled, bundled_fp8):
    model = mtplab.load_model(bundled)
    prompts = load_prompts().narrowed(limit=8).prompts
    settings = {"max_new_tokens": 64, "domains": [prompt.domain for prompt in prompts]}
    traces = [
        mtplab.trace(model, [prompt.text for prompt in prompts], 8, temperature=t, **settings) for t in (0.0, 0.5, 1.0)
    ]
    return {
        "acceptance": AcceptancePanel(traces),
        "audit": AuditPanel(bundled_fp8),
        "checkpoint": CheckpointPanel(bundled_fp8),
        "gemm": GemmPanel(bundled),
        "advise": AdvisePanel(ACCEPTANCE),
        "sweep": SweepPanel(bundled),
    }


@pytest.mark.serial
@pytest.mark.parametrize("name", ["acceptance", "audit", "checkpoint", "gemm", "advise", "sweep"])
def test_every_control_is_followed_at_once(panels, name):
    panel = panels[name]
    # an acceptance panel's views differ in what they work out
    views = panel._widgets["view"].options if name == "acceptance" else [(None, None)]
    slow = {}
    for words, view in views:
        if view is not None:
            panel._widgets["view"].value = view
        for key, widget in panel._widgets.items():
            before, took = widget.value, []
            for step in range(MOVES):
                value = moved(widget, step)
                began = time.thread_time()
                widget.value = value
                took.append(time.thread_time() - began)
                assert panel.state in ("done", "idle", "failed")
            widget.value = before
            if statistics.median(took) >= LIMIT:
                slow[words, key] = took
    assert not slow
