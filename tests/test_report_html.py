"""From a notebook to one file: what is left out, what is kept, and that nothing is asked from outside."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest

from mtplab.errors import ConfigError, MtplabError
from mtplab.report.execute import parameter_names
from mtplab.report.html import config_hash, render_report, rows_of, to_html
from mtplab.study.row import ResultRow

pytestmark = pytest.mark.slow  # each starts a kernel


def notebook(path: Path, *cells) -> Path:
    """Cells are markdown text, or (code, tag, …)."""
    book = nbformat.v4.new_notebook()
    book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
    for number, cell in enumerate(cells):
        if isinstance(cell, str):
            book.cells.append(nbformat.v4.new_markdown_cell(cell))
        else:
            book.cells.append(nbformat.v4.new_code_cell(cell[0], metadata={"tags": list(cell[1:])}))
        book.cells[-1].id = f"cell-{number}"
    nbformat.write(book, path)
    return path


def silent(*_):
    pass


class References(HTMLParser):
    """Everything a browser would fetch, in the page and in the documents inside its frames."""

    def __init__(self, text):
        super().__init__()
        self.found, self.tags = [], []
        self.styles = []
        self._style = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append((tag, given))
        self._style = tag == "style"
        for name in ("src", "href", "srcset", "poster", "data", "action", "background"):
            if given.get(name):
                self.found.append(given[name])
        if given.get("style"):
            self.styles.append(given["style"])
        if given.get("srcdoc"):
            inner = References(given["srcdoc"])
            self.found += inner.found
            self.styles += inner.styles

    def handle_data(self, data):
        if self._style:
            self.styles.append(data)

    @property
    def outside(self):
        urls = [url for url in self.found if not url.startswith(("data:", "#"))]
        sheet = " ".join(self.styles)
        urls += re.findall(r"@import[^;]*", sheet)
        return urls + [url for url in re.findall(r"url\(([^)]*)\)", sheet) if not url.strip("'\" ").startswith("data:")]


STUDY = """
import ipywidgets
from IPython.display import HTML, display
from mtplab.report import Conclusion, NotebookProgress, SweepExplorer, acceptance_by_depth
from mtplab.study.row import ResultRow
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """(path, text, progress) of a report over made-up rows, hostile names among them."""
    folder = tmp_path_factory.mktemp("report")
    from tests.report_fakes import row, rows

    hostile = "</script><script>document.title='broken'</script>\u202e"
    study = [*rows(depths=range(3)), row(exclude=hostile)]
    (folder / "rows.jsonl").write_text("\n".join(each.to_json() for each in study))
    source = notebook(
        folder / "study.ipynb",
        "# A study & its <b>title</b>\n\nText.\n\n## First part\n\n```\n## not a heading\n```",
        ("name = 'default'\nrounds = 3", "parameters"),
        (STUDY + "study = [ResultRow.from_json(line) for line in open('rows.jsonl')]",),
        ("print('hello', name, rounds)\nimport sys; print('\\x1b[31ma <i>warning</i>', file=sys.stderr)",),
        ("step = NotebookProgress()\nfor i in range(3):\n    step(i + 1, 4, 'half')\n    step._last = 0",),
        ("step.finish('all done')",),
        "## Figures `and code`",
        ("acceptance_by_depth(study)",),
        ("SweepExplorer(study)",),
        ("SweepExplorer(study[:2])  # rows shown twice are kept once",),
        "only in the notebook",
        ("ipywidgets.IntSlider(description='a slider')", "live-only"),
        ("ipywidgets.IntSlider(description='another')",),
        ("display(HTML('secret'))", "remove-cell"),
        ("Conclusion(study)",),
    )
    book = nbformat.read(source, as_version=4)
    book.cells[10].metadata.tags = ["live-only"]
    nbformat.write(book, source)
    steps = []
    path = render_report(source, {"name": "given"}, folder / "out" / "page.html", 120, lambda *step: steps.append(step))
    return path, path.read_text(encoding="utf-8"), steps


def test_nothing_is_asked_from_outside(page):
    _, text, _ = page
    found = References(text)
    assert found.outside == []
    assert len(found.found) > 5, "the parser does see references"
    assert References("<img src='https://x/y.png'><style>@import 'a.css'; p{background:url(b.png)}</style>").outside
    assert "default-src 'none'" in text
    assert len(text) < 1_000_000


def test_code_and_tagged_cells_are_left_out(page):
    _, text, _ = page
    for gone in (
        "import ipywidgets",
        "name = &#39;",
        "a slider",
        "secret",
        "only in the notebook",
        "ResultRow.from_json",
    ):
        assert gone not in text, gone
    assert "hello given 3" in text
    assert "A panel stood here" in text, "a widget that is not tagged says what it was"


def contents(text):
    return re.search(r"<nav [^>]*>.*?</nav>", text, re.DOTALL)[0]


def test_headings_make_the_contents(page):
    _, text, _ = page
    tags = References(text)
    nav = contents(text)
    links = re.findall(r'<a href="#([^"]+)">([^<]+)</a>', nav)
    assert [label for _, label in links] == ["First part", "Figures and code", "Where this comes from"]
    ids = {attrs.get("id") for _, attrs in tags.tags}
    assert {to for to, _ in links} <= ids
    assert "<title>A study &amp; its &lt;b&gt;title&lt;/b&gt;</title>" in text
    assert ("html", {"lang": "en"}) in tags.tags


def test_every_picture_has_its_alt_text(page):
    images = [attrs for tag, attrs in References(page[1]).tags if tag == "img"]
    assert images and all("Line chart" in attrs["alt"] for attrs in images)


def test_progress_stays_as_one_line_and_errors_as_text(page):
    text = page[1]
    assert text.count("all done") == 1 and "to go" not in text
    assert "&lt;i&gt;warning&lt;/i&gt;" in text and "\x1b" not in text


def test_progress_is_passed_on(page):
    steps = page[2]
    done = [step[0] for step in steps]
    assert done == sorted(done) and done[0] == 0 and done[-1] == steps[-1][1] == 16  # 15 cells and the parameters
    assert any(step[2].startswith("1 of 4 half") and step[0] % 1 == 0.25 for step in steps)
    assert any(step[2] == "Figures `and code`" for step in steps)


def test_rows_lie_beside_the_page_once(page):
    path = page[0]
    rows = json.loads(path.with_suffix(".rows.json").read_text())
    assert [ResultRow.model_validate(each).depth for each in rows].count(1) == 6 and len(rows) == 19
    executed = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    assert rows_of(executed) == rows
    assert sorted(each.name for each in path.parent.iterdir()) == ["page.html", "page.ipynb", "page.rows.json"]


def test_hostile_names_are_inert(page):
    text = page[1]
    tags = References(text).tags
    assert not [attrs for tag, attrs in tags if tag == "script"]
    assert "\u202e" not in text


def test_provenance_says_where_it_comes_from(page):
    text = page[1][page[1].index('id="provenance"') :]
    for fact in ("study.ipynb", "name = 'given'", "torch 2.", "UTC", "cores"):
        assert fact in text, fact


# what can go wrong


def test_a_failing_cell_is_one_error_and_leaves_no_page(tmp_path, capfd):
    source = notebook(tmp_path / "bad.ipynb", ("x = 1", "parameters"), ("print('so far')\n1 / 0",), ("2",))
    with pytest.raises(
        MtplabError, match=r"cell 2 \(\"print\('so far'\)\"\) failed with ZeroDivisionError: division by zero"
    ):
        render_report(source, output=tmp_path / "out.html", on_progress=silent)
    failed = tmp_path / "out.failed.ipynb"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["bad.ipynb", "out.failed.ipynb"]
    assert "so far" in failed.read_text()
    assert "Traceback" not in capfd.readouterr().err


def test_a_cell_that_hangs_is_stopped(tmp_path):
    source = notebook(tmp_path / "slow.ipynb", ("x = 1", "parameters"), ("import time; time.sleep(600)",))
    with pytest.raises(MtplabError, match="more than 2 s"):
        render_report(source, output=tmp_path / "out.html", execution_timeout=2, on_progress=silent)
    assert not (tmp_path / "out.html").exists()


def test_a_kernel_that_dies_is_one_error(tmp_path):
    source = notebook(tmp_path / "dies.ipynb", ("x = 1", "parameters"), ("import os; os._exit(1)",))
    with pytest.raises(MtplabError, match="kernel died"):
        render_report(source, output=tmp_path / "out.html", on_progress=silent)


@pytest.mark.parametrize(
    ("content", "parameters", "message"),
    [
        (None, {}, "not a file"),
        ("{", {}, "not a notebook"),
        ("book", {"depth": 3}, "has no parameter 'depth'; it has x, y"),
    ],
)
def test_bad_input_is_said_before_anything_runs(tmp_path, content, parameters, message):
    source = tmp_path / "some.ipynb"
    if content == "book":
        notebook(source, ("x = 1\ny: int = 2", "parameters"))
    elif content:
        source.write_text(content)
    with pytest.raises(ConfigError, match=message):
        render_report(source, parameters, tmp_path / "out" / "page.html", on_progress=silent)
    assert not list(tmp_path.glob("out/*"))


def test_default_name_says_when_and_what(tmp_path, monkeypatch, capfd):
    source = notebook(tmp_path / "small.ipynb", "# Small", ("model = 'data'", "parameters"), ("print(model)",))
    (tmp_path / "elsewhere" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    path = render_report(source, {"model": "here"})
    digest = config_hash(nbformat.read(source, as_version=4), {"model": "here"})
    assert re.fullmatch(rf"\d{{8}}T\d{{6}}Z-{digest}\.html", path.name)
    assert path.parent == tmp_path / "elsewhere" / "reports" / "small"
    # the kernel runs in the notebook's folder, so a path that is here goes in whole
    assert str(tmp_path / "elsewhere" / "here") in path.read_text()
    assert "100 %" in capfd.readouterr().err, "a bar on stderr when nobody asked for progress"


def test_hash_is_over_the_question(tmp_path):
    book = nbformat.read(notebook(tmp_path / "a.ipynb", ("x = 1", "parameters")), as_version=4)
    other = nbformat.read(notebook(tmp_path / "b.ipynb", ("x = 2", "parameters")), as_version=4)
    hashes = {config_hash(book, {}), config_hash(book, {"x": 2}), config_hash(other, {})}
    assert len(hashes) == 3 and config_hash(book, {}) == config_hash(book, {})


def test_parameters_are_read_from_the_tagged_cell(tmp_path):
    source = notebook(tmp_path / "p.ipynb", ("z = 0",), ("a = 1  # one\nb: str = 'x'\nc = [1,\n 2]", "parameters"))
    assert parameter_names(source) == ["a", "b", "c"]


def test_a_notebook_without_headings_or_outputs_has_no_contents():
    book = nbformat.v4.new_notebook()
    text = to_html(book, {"What": "nothing"})
    nav = contents(text)
    assert "Where this comes from" in nav and "<title>Report</title>" in text
