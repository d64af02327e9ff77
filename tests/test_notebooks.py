"""Every notebook runs from top to bottom under papermill, in its own folder, within a time limit.

Found by glob, never listed. Parameters that set how much work is done are turned down; the defaults are what
`make report` runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from mtplab.report.execute import parameter_names

REPO = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((REPO / "notebooks").glob("**/*.ipynb"))

#: A notebook that has one of these parameters gets the small value.
SMALL = {"prompts_per_domain": "1", "max_new_tokens": "8", "max_depth": "2"}
CELL_LIMIT = 180  # seconds


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    known = parameter_names(path)
    options = [word for name, value in SMALL.items() if name in known for word in ("-p", name, value)]
    if "results" in known:
        options += ["-p", "results", str(tmp_path / "results")]
    executed = tmp_path / path.name
    command = [sys.executable, "-m", "papermill", str(path), str(executed), *options]
    command += ["--cwd", str(path.parent), "--execution-timeout", str(CELL_LIMIT), "--no-progress-bar"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    book = nbformat.read(executed, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    # a warning on stderr would stand in the reader's report
    noise = [output.text for cell in code for output in cell.outputs if output.get("name") == "stderr"]
    assert noise == []
    said = [output.text for cell in code for output in cell.outputs if output.get("name") == "stdout"]
    # what loading takes, before anything else is said
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
