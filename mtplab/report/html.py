"""From a notebook to one HTML file that needs neither a kernel nor a network.

Runs the notebook (`execute.py`), converts it with the project's own template, and writes three files side by
side: the page, the executed notebook, and the rows it showed as JSON. Does not know what the notebook studies.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from html.parser import HTMLParser
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from mtplab.errors import MtplabError
from mtplab.report.execute import OnProgress, execute, read_notebook
from mtplab.report.explorer import ROWS_MIME, script_hash
from mtplab.report.table import html_table
from mtplab.report.text import escape, plain

__all__ = ["REMOVED_TAGS", "render_report", "to_html", "write_page"]

#: Cells with one of these tags are no part of a report.
REMOVED_TAGS = ("parameters", "injected-parameters", "live-only", "remove-cell")

#: Every address nbconvert would fetch something from; none of them is left in.
_URLS = (
    "require_js_url",
    "mathjax_url",
    "mermaid_js_url",
    "mermaid_layout_elk_js_url",
    "jquery_url",
    "jupyter_widgets_base_url",
    "widget_renderer_url",
)


def render_report(
    notebook: str | Path,
    parameters: Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    execution_timeout: int = 600,
    on_progress: OnProgress | None = None,
) -> Path:
    """Executes a notebook and writes it as one self-contained HTML file.

    The kernel starts in the notebook's own folder, as in JupyterLab. Beside `X.html` lie `X.ipynb` (the
    executed notebook) and, if the notebook showed an explorer, `X.rows.json`. Each file appears whole or not at all.

    Args:
        notebook: path of an .ipynb file.
        parameters: values for its cell tagged `parameters`. A text that names an existing file or folder
            relative to the current folder is made absolute, since the kernel runs elsewhere.
        output: the HTML file to write; `reports/<notebook>/<UTC>-<hash>.html` below the current folder when None,
            where the hash is over the notebook's cells and the parameters.
        execution_timeout: seconds that one cell may take.
        on_progress: called with (cells done, cells in all, what is being done); a bar on stderr when None.

    Returns:
        Path of the HTML file.

    Raises:
        ConfigError: no such notebook, or it has no such parameter.
        MtplabError: a cell failed or took too long; `X.failed.ipynb` then shows how far it got.
    """
    source = Path(notebook)
    book = read_notebook(source)
    given = {name: _absolute(value) for name, value in (parameters or {}).items()}
    started = datetime.now(UTC)
    digest = config_hash(book, parameters or {})
    if output is None:
        page = Path("reports") / source.stem / f"{started:%Y%m%dT%H%M%SZ}-{digest}.html"
    else:
        page = Path(output)
    page = page.resolve()
    page.parent.mkdir(parents=True, exist_ok=True)

    bar: Any = None
    if on_progress is None:
        bar, on_progress = _bar(source.stem)
    try:
        with tempfile.TemporaryDirectory(prefix=".report-", dir=page.parent) as folder:
            executed = Path(folder) / "executed.ipynb"
            try:
                node = execute(
                    source.resolve(),
                    executed,
                    given,
                    cwd=source.resolve().parent,
                    execution_timeout=execution_timeout,
                    on_progress=on_progress,
                )
            except MtplabError as problem:
                failed = page.with_suffix(".failed.ipynb")
                if executed.exists():
                    os.replace(executed, failed)
                raise type(problem)(str(problem).replace(str(executed.resolve()), str(failed))) from None
            facts = provenance(source, given, digest, started)
            text = to_html(node, facts)
            rows = rows_of(node)
            if rows:
                write_page(page.with_suffix(".rows.json"), json.dumps(rows, ensure_ascii=False, indent=0) + "\n")
            os.replace(executed, page.with_suffix(".ipynb"))
        write_page(page, text)
    finally:
        if bar is not None:
            bar.close()
    return page


def to_html(node: Any, facts: Mapping[str, Any] | str, title: str | None = None) -> str:
    """An executed notebook as one HTML document.

    Args:
        node: the notebook (nbformat node), with its outputs.
        facts: what the provenance table says, name -> value; or the table itself, as HTML.
        title: of the document; the notebook's first heading when None.
    """
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    config = Config()
    config.TagRemovePreprocessor.enabled = True
    config.TagRemovePreprocessor.remove_cell_tags = set(REMOVED_TAGS)
    title = _title(node) if title is None else title
    table = facts if isinstance(facts, str) else html_table(("What", "Value"), facts.items(), left=2)
    with as_file(files("mtplab.report").joinpath("template")) as templates:
        exporter = HTMLExporter(config=config, extra_template_basedirs=[str(templates)], template_name="mtplab")
        for name in _URLS:
            if exporter.has_trait(name):
                setattr(exporter, name, "")
        exporter.exclude_input = True
        node, frames = _set_aside(node)
        resources = {"mtplab": {"title": title, "provenance_html": table, "script_hash": script_hash()}}
        body, _ = exporter.from_notebook_node(node, resources=resources)
    body = body.replace("<!--mtplab:toc-->", _contents(body), 1)
    for mark, frame in frames.items():
        body = body.replace(mark, frame, 1)
    return body


def _set_aside(node: Any) -> tuple[Any, dict[str, str]]:
    """The notebook with a mark in place of each explorer, and the explorers by mark.

    nbconvert parses and writes the whole page anew to add alt texts; a frame's document goes in afterwards, so
    that it is byte for byte what the explorer made, and not half as large again by quotes written as entities.
    """
    node = copy.deepcopy(node)
    frames: dict[str, str] = {}
    for cell in node.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if ROWS_MIME in data and "text/html" in data:
                mark = f"<!--mtplab:frame:{len(frames)}:{secrets.token_hex(8)}-->"
                frames[mark], data["text/html"] = data["text/html"], mark
    return node, frames


def rows_of(node: Any) -> list[dict[str, Any]]:
    """Every row that an explorer in the notebook carries, each once."""
    found: dict[str, dict[str, Any]] = {}
    for cell in node.cells:
        for output in cell.get("outputs", []):
            for row in output.get("data", {}).get(ROWS_MIME, {}).get("rows", []):
                found.setdefault(json.dumps(row, sort_keys=True), row)
    return list(found.values())


def config_hash(book: Any, parameters: Mapping[str, Any]) -> str:
    """Eight hex digits over the notebook's cells and the parameters: the same question, the same hash."""
    asked = [[cell.cell_type, cell.source] for cell in book.cells]
    text = json.dumps([asked, dict(parameters)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def provenance(source: Path, parameters: Mapping[str, Any], digest: str, started: datetime) -> dict[str, Any]:
    """What the table at the end of a report says."""
    from mtplab.study.provenance import collect

    facts = collect()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items() if version)
    took = (datetime.now(UTC) - started).total_seconds()
    shown = {
        "Notebook": source.name,
        "Parameters": ", ".join(f"{name} = {value!r}" for name, value in parameters.items()) or "as in the notebook",
        "Question (hash)": digest,
        "Date": f"{started:%Y-%m-%d %H:%M:%S} UTC, executed in {took:.0f} s",
        "Commit": facts.get("commit") or "unknown",
        "Versions": f"python {facts.get('python')}, {versions}",
        "Machine": f"{facts.get('platform')}, {facts.get('cpu') or 'CPU'}, {facts.get('cores')} cores",
    }
    return shown


def _absolute(value: Any) -> Any:
    if isinstance(value, str) and value and len(value) < 1024 and "\n" not in value and Path(value).exists():
        return str(Path(value).resolve())
    return value


def _title(node: Any) -> str:
    for cell in node.cells:
        if cell.cell_type == "markdown":
            found = re.search(r"^# +(.+)$", cell.source, re.MULTILINE)
            if found:
                return plain(found[1].strip())
    return "Report"


class _Headings(HTMLParser):
    """Collects (id, text) of every h2; the heading's own anchor sign is no part of its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._id: str | None = None
        self._text: list[str] = []
        self._skip = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "h2":
            self._id, self._text = dict(attrs).get("id") or "", []
        elif self._id is not None and tag == "a":
            self._skip += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "h2" and self._id is not None:
            self.found.append((self._id, "".join(self._text).strip()))
            self._id = None
        elif self._id is not None and tag == "a":
            self._skip -= 1

    def handle_data(self, data: str) -> None:
        if self._id is not None and not self._skip:
            self._text.append(data)


def _contents(body: str) -> str:
    parser = _Headings()
    parser.feed(body)
    items = "".join(f'<li><a href="#{escape(to)}">{escape(text)}</a></li>' for to, text in parser.found if to)
    return f"<p>Contents</p><ol>{items}</ol>" if items else ""


def write_page(path: Path, text: str) -> None:
    """Writes a text file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _bar(name: str) -> tuple[Any, Callable[[float, float, str], None]]:
    """A bar on stderr for a caller who gave no callback."""
    from tqdm import tqdm

    bar = tqdm(
        total=1.0,
        file=sys.stderr,
        desc=name,
        bar_format="{desc}: {percentage:3.0f} %|{bar:24}| {postfix} [{elapsed}]",
    )

    def on_progress(done: float, total: float, label: str) -> None:
        bar.n = done / total if total else 0.0
        bar.set_postfix_str(label)

    return bar, on_progress
