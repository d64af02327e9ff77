"""A figure with the sentence that stands for it where it cannot be seen.

Draws with matplotlib's `Figure`, never with pyplot, so that a worker thread may do it. Does not know what
a figure shows.
"""

from __future__ import annotations

import base64
import io
from functools import cached_property
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from mtplab.errors import ConfigError
from mtplab.report.text import escape

__all__ = ["Picture"]


class Picture:
    """A matplotlib figure and its alt text; shows as a PNG with that text in Jupyter and in the report.

    Args:
        figure: a `matplotlib.figure.Figure` made without pyplot.
        alt: what the figure says, in a sentence or two, with its main numbers.
        dpi: dots per inch of the PNG; the default keeps a 9-inch figure readable at 800 px and light to carry.

    Raises:
        ConfigError: the alt text is empty.
    """

    def __init__(self, figure: Figure, alt: str, dpi: int = 110):
        if not alt.strip():
            raise ConfigError("a picture needs alt text: say in a sentence what the figure shows")
        self.figure, self.alt, self.dpi = figure, " ".join(alt.split()), dpi

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG bytes, on opaque paper, so that it stays readable on a dark page."""
        if self.figure.canvas is None or not isinstance(self.figure.canvas, FigureCanvasAgg):
            FigureCanvasAgg(self.figure)
        raw, small = io.BytesIO(), io.BytesIO()
        self.figure.savefig(raw, format="png", dpi=self.dpi, facecolor=self.figure.get_facecolor())
        # a chart has few colours: a palette makes it a third of the size, and a report carries several
        image = Image.open(raw).convert("RGB").quantize(colors=192, dither=Image.Dither.NONE)
        image.save(small, format="png", optimize=True)
        return small.getvalue()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        width, height = (int(inches * self.dpi) for inches in self.figure.get_size_inches())
        metadata = {"image/png": {"alt": self.alt, "width": width, "height": height}}
        return {"image/png": self.png, "text/plain": f"[figure] {self.alt}"}, metadata

    def to_html(self) -> str:
        """The picture as one `<img>` with everything inside it, for widgets that take HTML."""
        data = base64.b64encode(self.png).decode("ascii")
        return (
            f'<img src="data:image/png;base64,{data}" alt="{escape(self.alt)}" style="max-width:100%;background:#fff">'
        )
