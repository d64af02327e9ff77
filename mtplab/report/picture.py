"""A figure with the sentence that stands for it where it cannot be seen.

Draws with matplotlib's `Figure`, never with pyplot, so that a worker thread may do it. Does not know what
a figure shows.
"""

from __future__ import annotations

import base64
import io
from functools import cached_property
from typing import Any

import numpy as np
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

    def _drawn(self) -> Image.Image:
        """The figure's pixels, RGB, on opaque paper, so that it stays readable on a dark page."""
        # not savefig, which goes through every artist twice
        before, self.figure.dpi = self.figure.dpi, self.dpi
        try:
            canvas = FigureCanvasAgg(self.figure)
            canvas.draw()
        finally:
            self.figure.dpi = before
        return Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")

    @cached_property
    def png(self) -> bytes:
        """The figure as PNG bytes, small."""
        # a chart has few colours: a palette makes it a third of the size, and a report carries several
        return _png(self._drawn().quantize(colors=192, dither=Image.Dither.NONE), optimize=True)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        width, height = (int(inches * self.dpi) for inches in self.figure.get_size_inches())
        metadata = {"image/png": {"alt": self.alt, "width": width, "height": height}}
        return {"image/png": self.png, "text/plain": f"[figure] {self.alt}"}, metadata

    def to_html(self, quick: bool = False) -> str:
        """The picture as one `<img>` with everything inside it, for widgets that take HTML.

        With `quick` the PNG is made in a tenth of the time and is three times as large: for what the next move of a
        control replaces.
        """
        png = _png(self._drawn(), compress_level=1) if quick else self.png
        data = base64.b64encode(png).decode("ascii")
        return (
            f'<img src="data:image/png;base64,{data}" alt="{escape(self.alt)}" style="max-width:100%;background:#fff">'
        )


def _png(image: Image.Image, **options: Any) -> bytes:
    written = io.BytesIO()
    image.save(written, format="png", **options)
    return written.getvalue()
