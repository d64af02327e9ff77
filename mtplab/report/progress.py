"""Progress with time to go: the arithmetic, the sentence, and a line in a notebook that updates itself.

Does not know what is being done; a step tells it how much is done of how much.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from mtplab.report.text import escape, plain
from mtplab.study.progress import duration

__all__ = ["PROGRESS_MIME", "Clock", "NotebookProgress"]

#: Beside the text, each update carries `{"done", "total", "label"}` under this type, so that whoever executes
#: the notebook (the report, the CLI) can move a bar of its own.
PROGRESS_MIME = "application/vnd.mtplab.progress+json"


class Clock:
    """Time spent and time to go, from the share of the work that is done."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.start

    def to_go(self, done: float, total: float) -> float | None:
        """Seconds left at the pace so far; None before anything is done."""
        return self.spent * (total - done) / done if done > 0 else None

    def sentence(self, done: float, total: float, label: str = "", to_go: float | None = None) -> str:
        """`12 of 36 · published, int8 · 8 s spent, 16 s to go`; `to_go` where the caller knows better."""
        if to_go is None:
            to_go = self.to_go(done, total)
        times = f"{duration(self.spent)} spent" + ("" if to_go is None else f", {duration(to_go)} to go")
        return " · ".join(part for part in (f"{int(done)} of {total:g}", plain(label), times) if part)


class NotebookProgress:
    """One line of output that updates in place, in JupyterLab and under papermill alike.

    Uses display ids, no widget and no captured output, so nothing waits for a front end. Call it with
    `(done, total, label)`; call `finish` when done. Updates closer than 0.2 s are left out.
    """

    def __init__(self, what: str = "points"):
        self.what = what
        self.clock = Clock()
        self._id = f"mtplab-progress-{uuid.uuid4().hex[:12]}"
        self._last = float("-inf")
        self._shown = False

    def __call__(self, done: float, total: float, label: str = "", to_go: float | None = None) -> None:
        now = time.monotonic()
        if now - self._last >= 0.2 or done >= total:
            self._last = now
            self._show(self.clock.sentence(done, total, label, to_go), done, total, label)

    def follow(self, step: Any) -> None:
        """For `mtplab.sweep(on_progress=…)`: `step` says `done`, `fraction`, `total`, `current`, `remaining`."""
        self(step.done + step.fraction, step.total, step.current, step.remaining)

    def finish(self, sentence: str = "") -> None:
        """Replaces the line by what was done, which is what a report keeps."""
        self._show(sentence or f"{self.what} done in {duration(self.clock.spent)}", 1, 1, self.what)

    def _show(self, sentence: str, done: float, total: float, label: str) -> None:
        from IPython.display import display

        share = 100 * done / total if total else 0
        bar = "" if done >= total else f'<progress max="100" value="{share:.0f}"></progress> '
        bundle: dict[str, Any] = {
            "text/plain": sentence,
            "text/html": f'<span class="mtplab-progress">{bar}{escape(sentence)}</span>',
            PROGRESS_MIME: {"done": done, "total": total, "label": plain(label)},
        }
        display(bundle, raw=True, display_id=self._id, update=self._shown)
        self._shown = True
