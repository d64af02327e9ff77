"""Families as a whole: README's table is the code's, an unknown one is told which are known, and a tiny checkpoint of
each goes through the same commands: doctor, audit, sweep, numerics, report."""

from __future__ import annotations

import ast
import json
import shutil
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mtplab import CheckpointError, load_model, open_checkpoint
from mtplab.cli import main
from mtplab.models.families import family_of, registered
from mtplab.models.families.family import as_markdown
from tests.family_checkpoints import FAMILIES
from tests.tiny import MIXTURE, write_tiny

REPO = Path(__file__).parent.parent
WRITERS = {
    "qwen3_5": lambda folder, **changes: write_tiny(folder, **changes),
    "qwen3_5_moe": lambda folder, **changes: write_tiny(folder, **MIXTURE, **changes),
    **FAMILIES,
}


def test_the_readmes_table_is_the_codes():
    assert as_markdown() in (REPO / "README.md").read_text(encoding="utf-8")


def test_every_family_is_one_file_that_says_what_its_tests_compare_with():
    for family in registered():
        assert family.oracle and family.target and family.head
        for name in family.model_types:
            assert family_of({"model_type": name}) == (family, name)
    names = [name for family in registered() for name in family.model_types]
    assert len(names) == len(set(names))


def test_a_familys_file_imports_no_torch():
    """A sweep is planned, and memory is told, without it."""
    for file in (REPO / "mtplab" / "models" / "families").glob("*.py"):
        imported = [
            name.name if isinstance(node, ast.Import) else node.module
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in node.names
        ]
        heavy = ("torch", "mtplab.models.layers", "mtplab.models.build", "mtplab.models.cache", "mtplab.quant")
        assert not [name for name in imported if name and name.startswith(heavy)], file


def test_a_checkpoint_for_every_family():
    """What is tested below is all that is run."""
    assert {family_of({"model_type": name})[0] for name in WRITERS} == set(registered())


def test_an_unknown_architecture_is_told_what_is_known(tmp_path, capsys):
    folder = write_tiny(tmp_path / "other", model_type="gemma9")
    with pytest.raises(CheckpointError, match=r"model_type is 'gemma9'; mtplab runs ") as caught:
        load_model(folder)
    for family in registered():
        assert family.name in str(caught.value) and family.model_types[0] in str(caught.value)
    assert "`mtplab audit`" in str(caught.value) and "CONTRIBUTING.md" in str(caught.value)
    assert main(["audit", str(folder), "--fail-on", "never"]) == 0, "an audit works all the same"
    assert "headers read" in capsys.readouterr().out
    assert open_checkpoint(folder).plan().modules


@pytest.fixture(scope="module", params=list(WRITERS))
def tiny(request, tmp_path_factory) -> Path:
    """A checkpoint of each family, with the bundled tokenizer."""
    folder = tmp_path_factory.mktemp("family") / request.param
    WRITERS[request.param](folder, vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPO / "data/tiny-qwen3_5" / name, folder / name)
    return folder


def test_the_heads_globs_cover_it_and_nothing_else(tiny):
    """Whatever its family calls it: what panels offer as "MTP head"."""
    ckpt = open_checkpoint(tiny)
    heads = {module.name for module in ckpt.plan().modules if module.part == "draft"}
    names = [module.name for module in ckpt.plan().modules]
    covered = {name for name in names for glob in ckpt.draft_globs if fnmatchcase(name, glob)}
    assert heads and covered == heads
    plan = ckpt.plan(exclude=list(ckpt.draft_globs), model_format="fp8")
    assert "draft" not in {m.part for m in plan.modules if m.weight == "fp8"}


@pytest.mark.slow
def test_a_tiny_checkpoint_goes_through_the_same_commands(tiny, tmp_path, capsys):
    """Audit → sweep → report, as README has them, with exclusions and a quantised cache."""
    assert main(["doctor", str(tiny), "--depth", "2", "--context", "200"]) == 0
    assert "it fits" in capsys.readouterr().out
    assert main(["audit", str(tiny), "--fail-on", "warning"]) == 0, capsys.readouterr().out
    capsys.readouterr()
    results = tmp_path / "results"
    sweep = ["sweep", str(tiny), "--depths", "0-2", "--quant-policy", "none,int8", "--exclude", "as-stored"]
    sweep += ["--exclude", "published", "--domain", "python", "--limit", "2", "--max-new-tokens", "12"]
    assert main([*sweep, "--results", str(results), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert len(rows) == 3 * 2 * 2 and not any(row["error"] for row in rows)
    outputs = {(row["exclude_label"], row["quant_policy"], row["output_hash"]) for row in rows}
    assert len(outputs) == 4, "drafts change no output"
    assert all(row["kl"] is not None and row["acceptance_length"] >= 1 for row in rows)
    assert main(["numerics", str(tiny), "--layers", "0"]) == 0
    assert "A slice" in capsys.readouterr().out
    page = tmp_path / "page.html"
    assert main(["report", str(results), "-o", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    assert "<table" in text and len(text) < 1_000_000
