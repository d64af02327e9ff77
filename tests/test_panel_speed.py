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
from mtplab.report import (
    AcceptancePanel,
    AdvisePanel,
    AuditPanel,
    CheckpointPanel,
    GemmPanel,
    SweepPanel,
    audit_panel,
    checkpoint_panel,
)
from mtplab.report.audit_panel import WRITE
from mtplab.report.module_tree import ModuleTree
from mtplab.study import load_prompts
from mtplab.study.acceptance_views import VIEWS
from mtplab.study.published import ACCEPTANCE

LIMIT, MOVES = 0.250, 3


def moved(widget, step):
    """Another value for a control, as a user would set it; `step` counts moves."""
    if isinstance(widget, ModuleTree):
        return (["mtp.fc", "*.mlp.down_proj", "*.mlp.*"][step % 3],)
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


def controls(panel):
    """Every control of a panel by name, a tree's search among them."""
    for key, widget in panel._widgets.items():
        yield key, widget
        if isinstance(widget, ModuleTree):
            yield f"{key}: search", widget.search


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


#: What a panel is set to before its controls are moved, where what a control moves depends on that.
SETTINGS = {
    "acceptance": [{"view": name} for name in VIEWS],
    "audit": [{}, {"what": WRITE, "exclude": audit_panel.OWN}],
    "checkpoint": [{}, {"exclude": checkpoint_panel.OWN}],
    "gemm": [{}, {"columns": 8}],
    "advise": [{}],
    "sweep": [{}],
}


@pytest.mark.serial
@pytest.mark.parametrize("name", SETTINGS)
def test_every_control_is_followed_at_once(panels, name):
    panel, slow, redrawn = panels[name], {}, 0
    for settings in SETTINGS[name]:
        for key, value in settings.items():
            panel._widgets[key].value = value
        for key, widget in controls(panel):
            before, took = widget.value, []
            for step in range(MOVES):
                value, figure = moved(widget, step), panel.figure.value
                began = time.thread_time()
                widget.value = value
                took.append(time.thread_time() - began)
                redrawn += panel.figure.value != figure
            widget.value = before
            print(name, settings, key, f"{1e3 * statistics.median(took):.0f} ms")
            if statistics.median(took) >= LIMIT:
                slow[str(settings), key] = took
    assert not slow
    assert (redrawn >= MOVES) == (name != "sweep"), "figures were measured; the sweep's follow Run alone"
