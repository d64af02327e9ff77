"""Every notebook runs from top to bottom under papermill, in its own folder, within a time limit.

Found by glob, never listed. Parameters that set how much work is done are turned down; the defaults are what
`make report` runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from mtplab import load_model
from mtplab.report.execute import execute, parameter_names
from mtplab.server import serve

REPO = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPO / "notebooks").glob("**/*.ipynb"))

#: A notebook that has one of these parameters gets the small value.
SMALL = {"prompts_per_domain": 1, "max_new_tokens": 8, "max_depth": 2, "text_tokens": 72, "groups": "layer"}
CELL_LIMIT = 180  # seconds


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.fixture
def server(bundled):
    """A small one, for a notebook that asks servers."""
    with serve(load_model(bundled), depth=2) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, request, monkeypatch):
    known = parameter_names(path)
    parameters = {name: value for name, value in SMALL.items() if name in known}
    if "results" in known:
        parameters["results"] = str(tmp_path / "results")
    if "servers" in known:
        parameters["servers"] = [request.getfixturevalue("server").url]
    # of the kernel, a process of its own; papermill in this one
    monkeypatch.setenv("PYTHONPATH", str(REPO))
    executed = tmp_path / path.name
    execute(
        path, executed, parameters, cwd=path.parent, execution_timeout=CELL_LIMIT, on_progress=lambda *told: None
    )
    book = nbformat.read(executed, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    # a warning on stderr would stand in the reader's report
    noise = [output.text for cell in code for output in cell.outputs if output.get("name") == "stderr"]
    assert noise == []
    said = [output.text for cell in code for output in cell.outputs if output.get("name") == "stdout"]
    # what loading takes, before anything else is said
    if "servers" in known:
        shown = "".join(str(output.get("data")) for cell in code for output in cell.outputs)
        assert "every text is that of mtplab's runner, token for token" in shown.replace("&#x27;", "'")
    assert re.search(r": (weights .* in the files\)|no model is loaded; )", said[0])


#: What brings weights into memory.
LOADS = re.compile(r"load_model\(|sweep\(|ExclusionMeter\(|dequantize\(|\.audit\(")
SAID = re.compile(r"print\(f.*(mtplab\.memory\(|no model is loaded)")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_memory_is_said_before_anything_is_loaded(path):
    book = nbformat.read(path, as_version=4)
    code = "\n".join(cell.source for cell in book.cells if cell.cell_type == "code")
    said, loaded = SAID.search(code), LOADS.search(code)
    assert said and (loaded is None or said.start() < loaded.start())


def test_every_notebook_is_in_the_readme():
    readme = (REPO / "notebooks" / "README.md").read_text()
    assert [path.name for path in NOTEBOOKS if path.name not in readme] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_has_a_title_sections_and_controls(path):
    book = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    assert book.cells[0].cell_type == "markdown" and book.cells[0].source.startswith("# ")
    assert text.count("\n## ") + text.startswith("## ") >= 2
    panels = [cell for cell in book.cells if cell.cell_type == "code" and "Panel(" in cell.source]
    assert all("live-only" in cell.metadata.get("tags", []) for cell in panels)
