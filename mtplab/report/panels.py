"""The base of every panel: controls, a run in a thread, cancel, progress, and what became of it.

A panel is thin: it turns widgets into a configuration, hands that to a headless function, and draws the
result into traits of `HTML` widgets. It captures no output (that hangs executed notebooks) and
never uses pyplot (which is not safe in a thread). This module knows no model and no study.
"""

from __future__ import annotations

import contextlib
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import ipywidgets as widgets

from mtplab.errors import ConfigError, MtplabError
from mtplab.report.picture import Picture
from mtplab.report.progress import Clock
from mtplab.report.text import escape
from mtplab.study.progress import duration

__all__ = ["Panel", "Progress"]

Progress = Callable[..., None]


class Panel(ABC):
    """Controls with Run and Cancel around one headless function.

    A subclass gives `inputs()` (widgets by name, in the order shown), `work(config, progress, cancel)`
    (called in the thread; returns the result; may call `self.draw(partial)` as results come) and
    `draw(result)` (writes `self.figure`, `self.table`).

    Attributes:
        controls: the widget to display.
        result: what the last finished run returned, or None.
        error: the exception of the last run if it failed, or None.
        state: "idle", "running", "done", "cancelled" or "failed".
    """

    title = "Panel"
    run_label = "Run"
    #: of the words beside an input, and of both together
    label_width = "150px"
    input_width = "min(520px, 98%)"

    def __init__(self) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.state = "idle"
        self._cancel = threading.Event()
        self._finished = threading.Event()
        self._finished.set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._shown: dict[str, Any] = {}
        self._widgets: dict[str, widgets.Widget] = self.inputs()
        self.run_button = widgets.Button(description=self.run_label, button_style="primary", icon="play")
        self.cancel_button = widgets.Button(description="Cancel", disabled=True, icon="stop")
        self.bar = widgets.IntProgress(min=0, max=1000, value=0, layout=widgets.Layout(width="220px"))
        self.status = widgets.HTML("Ready.")
        # an HTML widget and not an Image: that one has no place for alt text
        self.figure = widgets.HTML()
        self.table = widgets.HTML()
        self.run_button.on_click(lambda _: self._clicked())
        self.cancel_button.on_click(lambda _: self.cancel())
        self.controls = self.layout()

    # what a subclass gives

    @abstractmethod
    def inputs(self) -> dict[str, widgets.Widget]:
        """Widgets by the name their value has in `config`."""

    @abstractmethod
    def work(self, config: Mapping[str, Any], progress: Progress, cancel: threading.Event) -> Any:
        """Does the work and returns its result; runs outside the main thread."""

    @abstractmethod
    def draw(self, result: Any) -> None:
        """Shows a result, partial or final."""

    def layout(self) -> widgets.Widget:
        """The whole panel; a subclass may arrange its inputs otherwise."""
        return widgets.VBox([self.head(), *self._widgets.values(), self.actions(), self.figure, self.table])

    # what every panel has

    def head(self) -> widgets.Widget:
        """The title."""
        return widgets.HTML(f"<b>{escape(self.title)}</b>")

    def look(self) -> dict[str, Any]:
        """How an input with words beside it looks: arguments of its widget."""
        return {"style": {"description_width": self.label_width}, "layout": widgets.Layout(width=self.input_width)}

    def actions(self) -> widgets.Widget:
        """Run, Cancel, the bar and the status line, in a row that wraps on a narrow page."""
        row = widgets.Layout(display="flex", flex_flow="row wrap", align_items="center")
        return widgets.Box([self.run_button, self.cancel_button, self.bar, self.status], layout=row)

    @property
    def config(self) -> Mapping[str, Any]:
        """The settings as they stand, a read-only snapshot."""
        return MappingProxyType({name: widget.value for name, widget in self._widgets.items()})

    def show_picture(self, picture: Picture) -> None:
        """Shows a picture, with its alt text."""
        self.figure.value = picture.to_html(quick=True)

    def show_if_new(self, place: widgets.HTML, key: Any, picture: Callable[[], Picture]) -> None:
        """Draws a picture in a place of its own unless `key`, all that it is made from, is what stands there already.

        A drawing takes a tenth of a second, and most controls change one figure of several.
        """
        name = place.model_id or ""
        if self._shown.get(name) != key:
            place.value = picture().to_html(quick=True)
            self._shown[name] = key

    def run(self, block: bool = False) -> Any:
        """Starts the work; with `block` does it here and now, and returns the result.

        Raises:
            ConfigError: a run is under way, or the settings make no sense (nothing is started).
            Exception: with `block`, whatever the work raised; it shows in the panel either way.
        """
        with self._lock:
            if self.state == "running":
                raise ConfigError("this panel is running; cancel it or wait for it before the next run")
            config = self.config
            self.state, self.error = "running", None
            self._cancel = threading.Event()
            self._finished.clear()
        self.run_button.disabled, self.cancel_button.disabled = True, False
        self.bar.bar_style, self.bar.value = "", 0
        self.status.value = "Starting …"
        if block:
            self._run(config)
            if self.state == "failed" and self.error is not None:
                raise self.error
            return self.result
        self._thread = threading.Thread(target=self._run, args=(config,), name=self.title, daemon=True)
        self._thread.start()
        return None

    def follow(self) -> None:
        """Shows the settings as they stand, here and now, and from now on after every change of a control."""
        for widget in self._widgets.values():
            widget.observe(lambda _: self._show(), names="value")
        self._show()

    def cancel(self) -> None:
        """Asks the work to stop at its next step; what is done stays."""
        self._cancel.set()
        if self.state == "running":
            self.cancel_button.disabled = True
            self.status.value = "Stopping …"

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for the run under way; False when `timeout` seconds were not enough."""
        return self._finished.wait(timeout)

    def _show(self) -> None:
        # a failure is already written into the panel; raising here would only reach the kernel's log
        with contextlib.suppress(MtplabError):
            self.run(block=True)

    def _clicked(self) -> None:
        try:
            self.run()
        except Exception as problem:
            self.status.value = _problem(problem)

    def _run(self, config: Mapping[str, Any]) -> None:
        clock, cancel = Clock(), self._cancel

        def progress(done: float, total: float, label: str = "", to_go: float | None = None) -> None:
            if total and not cancel.is_set():
                self.bar.value = int(1000 * done / total)
                self.status.value = escape(clock.sentence(done, total, label, to_go))

        state, status, style = "done", "", "success"
        try:
            result = self.work(config, progress, cancel)
            self.result = result
            if result is not None:
                self.draw(result)
            if cancel.is_set():
                state, status, style = "cancelled", f"Cancelled after {duration(clock.spent)}.", "warning"
            else:
                self.bar.value = 1000
                status = f"Done in {duration(clock.spent)}."
        except Exception as problem:
            if cancel.is_set():
                state, status, style = "cancelled", f"Cancelled after {duration(clock.spent)}.", "warning"
            else:
                self.error = problem
                state, status, style = "failed", _problem(problem), "danger"
        finally:
            # the buttons first: whoever sees "done" may press Run at once
            self.run_button.disabled, self.cancel_button.disabled = False, True
            self.bar.bar_style = style
            self.state = state
            self.status.value = status
            self._finished.set()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.controls._repr_mimebundle_(**options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.state})"


def _problem(problem: BaseException) -> str:
    """A failure in the panel: the message for one of ours, the last lines of the traceback for a bug."""
    text = escape(problem) or escape(type(problem).__name__)
    if isinstance(problem, MtplabError):
        return f'<span role="alert"><b>Failed:</b> {text}</span>'
    lines = traceback.format_exception(type(problem), problem, problem.__traceback__)[-3:]
    return (
        f'<span role="alert"><b>Failed</b> ({escape(type(problem).__name__)}): {text}</span>'
        f'<details><summary>where</summary><pre tabindex="0">{escape("".join(lines))}</pre></details>'
    )
