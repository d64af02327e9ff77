"""A page of a report without a notebook and without a kernel: own words and finished objects, one template for all.

What is put together here goes through `to_html` like an executed notebook. Does not know what a page is about.
"""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat

from mtplab.errors import ConfigError
from mtplab.report.html import to_html, write_page
from mtplab.report.text import escape, plain

__all__ = ["Page", "page_path", "save_page"]


class Page:
    """Cells one after the other, below a title that may hold anything."""

    def __init__(self, title: str):
        self.title = title
        self._book = nbformat.v4.new_notebook()
        self.html(f"<h1>{escape(title)}</h1>")

    def text(self, markdown: str) -> None:
        """Words of our own. Nothing that a file brought along: Markdown lets markup through."""
        self._book.cells.append(nbformat.v4.new_markdown_cell(markdown))

    def html(self, html: str) -> None:
        """HTML in which everything that is not ours is escaped already."""
        self._add({"text/html": html}, {})

    def words(self, *paragraphs: str) -> None:
        """Sentences that may quote anything, a paragraph each."""
        self.html("".join(f"<p>{escape(words)}</p>" for words in paragraphs))

    def show(self, *objects: Any) -> None:
        """What Jupyter would show of these: pictures, an explorer, anything with `_repr_html_`."""
        for each in objects:
            bundle = getattr(each, "_repr_mimebundle_", None)
            data = bundle() if bundle is not None else {"text/html": each._repr_html_()}
            data, metadata = data if isinstance(data, tuple) else (data, {})
            self._add(data, metadata)

    def render(self, provenance: str) -> str:
        """The HTML document. `provenance` is the table, already HTML, that says where it comes from."""
        return to_html(self._book, provenance, title=plain(self.title))

    def _add(self, data: dict[str, Any], metadata: dict[str, Any]) -> None:
        ready = {kind: _ready(value) for kind, value in data.items()}
        output = nbformat.v4.new_output("display_data", data=ready, metadata=metadata)
        self._book.cells.append(nbformat.v4.new_code_cell("", outputs=[output]))


def page_path(output: str | Path | None, stem: str) -> Path:
    """Where a page goes: `output`, or a file named by the time below reports/`stem`/. Its folder is there then.

    Raises:
        ConfigError: the folder cannot be made, or a folder stands where the file should.
    """
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}.html"
    path = (Path("reports") / stem / name if output is None else Path(output)).resolve()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"{path.parent}: cannot be made ({problem.strerror}); give another file") from None
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; give a file such as {path.name}.html")
    return path


def save_page(path: Path, text: str) -> Path:
    """Writes the page whole or not at all. Raises `ConfigError` when the disk does not take it."""
    try:
        write_page(path, text)
    except OSError as problem:
        raise ConfigError(f"{path}: cannot be written ({problem.strerror}); give another file") from None
    return path


def _ready(value: Any) -> Any:
    """Bytes as a notebook holds them."""
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value
