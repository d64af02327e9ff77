"""Runs a notebook from top to bottom with papermill: parameters, a time limit, progress, one clear error.

Knows nothing of what the notebook does and nothing of HTML.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat

from mtplab.errors import ConfigError, MtplabError, not_text
from mtplab.report.progress import PROGRESS_MIME
from mtplab.report.text import plain

__all__ = ["OnProgress", "execute", "parameter_names"]

#: Called with (cells done, cells in all, what is being done); cells done has a fraction while a cell reports
#: its own progress.
OnProgress = Callable[[float, float, str], None]

_ENGINE = "mtplab"


def parameter_names(notebook: Path) -> list[str]:
    """Names that the cell tagged `parameters` gives a value to.

    Raises:
        ConfigError: the file is not a notebook.
    """
    import ast

    book = read_notebook(notebook)
    names = []
    for cell in book.cells:
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", []):
            for statement in ast.parse(cell.source).body:
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
                )
                names += [target.id for target in targets if isinstance(target, ast.Name)]
    return names


def read_notebook(path: Path) -> Any:
    """The notebook in `path`. Raises `ConfigError` when there is none."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; give the path of a notebook (.ipynb), or of results")
    try:
        return nbformat.read(path, as_version=4)
    except Exception as problem:
        raise ConfigError(f"{path} is not a notebook that can be read: {plain(problem)[:200]}") from None


def execute(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, Any],
    *,
    cwd: Path,
    execution_timeout: int,
    on_progress: OnProgress,
) -> Any:
    """Executes `notebook` with `parameters` in `cwd` and writes it, outputs included, to `output`.

    Args:
        execution_timeout: seconds that one cell may take.

    Returns:
        The executed notebook (nbformat node).

    Raises:
        ConfigError: a parameter the notebook does not have.
        MtplabError: a cell failed or took too long; `output` then holds the notebook up to that cell.
    """
    known = parameter_names(notebook)
    unknown = [name for name in parameters if name not in known]
    if unknown:
        raise ConfigError(
            f"{notebook.name} has no parameter {', '.join(map(repr, unknown))}; it has {', '.join(known) or 'none'}"
        )
    for name, value in parameters.items():
        fault = next(filter(None, map(not_text, _texts(value))), None)  # a notebook is a file of UTF-8
        if fault is not None:
            raise ConfigError(f"{notebook.name}: parameter {name} {fault}")
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    _register_engine()
    try:
        with _quiet():
            return papermill.execute_notebook(
                str(notebook),
                str(output.resolve()),
                parameters=dict(parameters),
                engine_name=_ENGINE,
                cwd=str(cwd),
                progress_bar=False,
                execution_timeout=execution_timeout,
                on_progress=on_progress,
            )
    except papermill.PapermillExecutionError as problem:
        first = plain((problem.source or "").strip().split("\n")[0])[:60]
        raise MtplabError(
            f"{notebook.name}: cell {problem.cell_index + 1} ({first!r}) failed with {problem.ename}: "
            f"{' '.join(plain(problem.evalue).split())[:600]} "
            f"(the notebook as far as it got: {output})"
        ) from None
    except CellTimeoutError:
        raise MtplabError(
            f"{notebook.name}: a cell took more than {execution_timeout} s; give a larger execution timeout, or "
            f"fewer points (the notebook as far as it got: {output})"
        ) from None
    except DeadKernelError:
        raise MtplabError(
            f"{notebook.name}: the kernel died, which mostly means that memory ran out (as far as it got: {output})"
        ) from None


def _texts(value: Any) -> Iterator[str]:
    """Every string in a parameter's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value.keys(), *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Papermill logs each path, and the kernel's start-up warns of things that are no concern of a reader."""
    logger = logging.getLogger("papermill")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _register_engine() -> None:
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine, papermill_engines

    class Client(PapermillNotebookClient):
        """Passes on where execution stands, also within a cell that says so itself."""

        on_progress: OnProgress | None = None
        at: int = 0
        heading: str = "starting"

        def execute_cell(self, cell: Any, cell_index: int, *args: Any, **options: Any) -> Any:
            self.at = cell_index
            if cell.cell_type == "markdown":
                self.heading = _heading(cell) or self.heading
            self._tell(0.0, self.heading)
            return super().execute_cell(cell, cell_index, *args, **options)

        def process_message(self, message: Any, *args: Any, **options: Any) -> Any:
            step = message.get("content", {}).get("data", {}).get(PROGRESS_MIME)
            if isinstance(step, dict) and step.get("total"):
                # within the cell, neither its beginning nor the next one's
                share = min(0.999, max(0.001, float(step["done"]) / float(step["total"])))
                self._tell(share, f"{int(step['done'])} of {step['total']:g} {plain(step.get('label', ''))}".strip())
            return super().process_message(message, *args, **options)

        def _tell(self, share: float, label: str) -> None:
            if self.on_progress is not None:
                self.on_progress(self.at + share, len(self.nb.cells), label)

    class Engine(NBClientEngine):
        @classmethod
        def execute_managed_notebook(cls, nb_man: Any, kernel_name: str, **options: Any) -> Any:
            on_progress = options.pop("on_progress", None)
            for unused in ("log_output", "stdout_file", "stderr_file", "input_path"):
                options.pop(unused, None)
            client = Client(
                nb_man,
                kernel_name=kernel_name,
                startup_timeout=options.pop("start_timeout", 60),
                timeout=options.pop("execution_timeout", None),
                # below this level the kernel only remarks on its transport at start-up
                extra_arguments=["--IPKernelApp.log_level=50"],
            )
            client.on_progress = on_progress
            done = client.execute(env=_environment())
            if on_progress is not None:
                on_progress(len(nb_man.nb.cells), len(nb_man.nb.cells), "done")
            return done

    papermill_engines.register(_ENGINE, Engine)


def _environment() -> dict[str, str]:
    """The kernel imports the mtplab that is running, also where that is a checkout nobody installed."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def _heading(cell: Any) -> str:
    """The heading a markdown cell opens, which is what a reader calls the cells below it."""
    lines = [line for line in cell.source.splitlines() if line.startswith("#")]
    return plain(lines[0].lstrip("# "))[:60] if lines else ""
