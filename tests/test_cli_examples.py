"""Every command that the help and the pages show is accepted, up to where the work would begin."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib import import_module

import pytest

from mtplab.cli import main
from mtplab.engines.attach import Attached
from mtplab.engines.engine import Known
from tests.report_fakes import rows, write_results


class Reached(Exception):
    """Everything an example asks for was checked; the work would begin here."""


@pytest.fixture
def up_to_the_work(repo, tmp_path, monkeypatch):
    """Runs a command line in a checkout of links, through all its checks: no weights are read, nothing is rendered."""
    for name in ("data", "notebooks", "pyproject.toml"):
        (tmp_path / name).symlink_to(repo / name)
    monkeypatch.chdir(tmp_path)
    # what sweeps and reports of a reader's own have left
    for name in ("before", "after", "tiny-qwen3_5"):
        write_results(tmp_path / "results" / name, rows(depths=range(3), policies=("none",)))
    mine = rows(depths=range(3), policies=("none",))
    theirs = [row.model_copy(update={"engine": "vllm", "point": f"{row.point} on vllm"}) for row in mine]
    write_results(tmp_path / "results" / "both", [*mine, *theirs])
    for policy in ("int8", "fp8"):
        write_results(tmp_path / "results" / policy, rows(range(3), (policy,), ("published",)))
    (tmp_path / "rows.jsonl").write_text("".join(each.to_json() + "\n" for each in rows(range(3))))

    def stop(*arguments, **options):
        raise Reached

    # the sweep's module hides behind its function
    monkeypatch.setattr(import_module("mtplab.study.sweep"), "PointStore", stop)
    monkeypatch.setattr("mtplab.models.load_model", stop)
    monkeypatch.setattr("mtplab.study.numerics.load_model", stop)
    monkeypatch.setattr("papermill.execute_notebook", stop)
    monkeypatch.setattr("mtplab.checkpoint.convert.quantize.Partial", stop)
    monkeypatch.setattr("mtplab.report.page.Page.render", stop)

    # every engine is installed
    monkeypatch.setattr("shutil.which", lambda name: name)
    depths = iter((3, 8))

    def recognised(address, settings):
        # of several servers each is at a depth of its own
        depth = next(depths) if len(settings.addresses) > 1 else 3
        return Attached(address, "vllm", "m", Known(depth=depth), settings.limits, settings.key_variable)

    monkeypatch.setattr("mtplab.engines.attach._recognised", recognised)
    monkeypatch.setattr(Attached, "encode", lambda server, text: [1])

    def run(line: str, capsys) -> None:
        # a folder in which a sweep has left its rows and an engine's
        line = line.replace("results/tiny-qwen3_5 --between", "results/both --between")
        words = shlex.split(line.split(" > ")[0], comments=True)
        assert words[0] == "mtplab"
        code = main(words[1:])
        err = capsys.readouterr().err
        runs_nothing = words[1] in ("doctor", "audit", "advise", "compare") or "--print-commands" in words
        done = runs_nothing and code == 0
        assert done or (code == 1 and "Reached" in err), f"{line}\n{err}"

    return run


def test_every_example_in_the_help_is_accepted(up_to_the_work, capsys):
    examples = []
    commands = ("generate", "sweep", "audit", "quantize", "report", "compare", "doctor", "advise", "exclude", "measure",
                "numerics", "serve")  # fmt: skip
    for name in ([], *([command] for command in commands)):
        main([*name, "--help"])
        lines = capsys.readouterr().out.splitlines()
        examples += [line.strip() for line in lines if line.startswith("    mtplab ")]
    examples = [line for line in examples if not line.endswith("--help")]
    assert len(examples) >= 13
    for example in examples:
        up_to_the_work(example, capsys)


def test_an_example_that_asks_for_what_is_not_there_is_found(up_to_the_work, capsys):
    with pytest.raises(AssertionError, match="no domain 'code'"):
        up_to_the_work("mtplab sweep data/tiny-qwen3_5 --domain code", capsys)
    with pytest.raises(AssertionError, match="no parameter 'depht'"):
        up_to_the_work("mtplab report notebooks/01_fp8_to_speculation.ipynb -p depht 3", capsys)


PAGES = (
    "README.md", "CONTRIBUTING.md", "notebooks/README.md", "data/README.md", "docs/depth.md", "docs/compare.md",
    "docs/cache.md", "docs/engines.md",
)  # fmt: skip


def commands_of(page: str) -> list[str]:
    """Every mtplab command in a page's code, in blocks and in lines, broken lines joined."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    blocks += re.findall(r"^ {4}(.*)$", prose, re.MULTILINE)
    found = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found += [" ".join(span.split()) for span in re.findall(r"`(mtplab [a-z]+ [^`]*)`", prose)]
    return [line.strip() for line in found if line.strip().startswith("mtplab ")]


def test_every_command_in_the_pages_is_accepted(repo, up_to_the_work, capsys):
    """Paths that stand for a reader's own are put in; everything else must be as it is written."""
    examples = [line for page in PAGES for line in commands_of((repo / page).read_text())]
    examples = [line for line in examples if not line.endswith("--help")]
    assert len(examples) >= 4
    for example in examples:
        up_to_the_work(example, capsys)


@pytest.mark.slow
def test_the_python_in_the_readme_runs(repo):
    blocks = re.findall(r"^```python\n(.*?)^```", (repo / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    done = subprocess.run([sys.executable, "-c", "\n".join(blocks)], capture_output=True, text=True, cwd=repo)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
