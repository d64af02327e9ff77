"""Messages of mtplab's errors: one line, nothing in it that a terminal obeys, nothing that cannot be written."""

from __future__ import annotations

import os
import pickle

import pytest

from mtplab import CheckpointError, ConfigError, MtplabError, load_model, open_checkpoint, sweep
from mtplab.cli import main
from mtplab.decode.settings import token_ids
from mtplab.errors import not_text, printable
from mtplab.study.prompts import load_prompts
from mtplab.study.store import read_rows

HOSTILE = "a\x1b[31mb\nc\x9bd\u202ee"
SHOWN = r"a\x1b[31mb\nc\x9bd\u202ee"


@pytest.mark.parametrize("kind", [MtplabError, ConfigError, CheckpointError])
def test_control_characters_are_shown(kind):
    problem = kind(f"{HOSTILE}: no such folder")
    assert str(problem) == f"{SHOWN}: no such folder"
    assert str(pickle.loads(pickle.dumps(problem))) == str(problem), "on its way from a worker"
    assert str(kind("µ × – 日本")) == "µ × – 日本"
    assert kind(3).args == (3,)


def test_what_has_been_shown_stays():
    assert printable(printable(HOSTILE)) == SHOWN
    assert printable("a\tb\nc\r", keep="\t\n") == "a\tb\nc\\x0d"
    assert printable("caf\udce9") == r"caf\xe9", "the byte of a name that is not UTF-8"
    assert printable("\ud800") == r"\ud800"


@pytest.mark.parametrize(
    "call",
    [
        lambda path: open_checkpoint(path),
        lambda path: load_model(path),
        lambda path: sweep(path),
        lambda path: load_prompts(path),
        lambda path: read_rows(path),
    ],
    ids=["open_checkpoint", "load_model", "sweep", "load_prompts", "read_rows"],
)
@pytest.mark.parametrize("name", [HOSTILE, "caf\udce9"], ids=["control characters", "not UTF-8"])
def test_a_hostile_path_is_shown_by_whatever_reads_it(tmp_path, call, name):
    with pytest.raises(MtplabError) as told:
        call(tmp_path / name)
    message = str(told.value)
    assert printable(name) in message and message == printable(message)
    message.encode("utf-8")


@pytest.mark.parametrize(
    "text, says",
    [
        ("ab\udcff", "is not valid UTF-8: byte 0xff at character 2; give it in UTF-8"),
        ("ab\ud800", "holds half a surrogate pair at character 2, which is no text; leave it out"),
        ("日本 \U0001f600", None),
    ],
)
def test_what_is_no_text(bundled, text, says):
    assert not_text(text) == says
    if says is None:
        return
    model = load_model(bundled)
    for call in (lambda: token_ids(model, [text]), lambda: load_prompts([text])):
        with pytest.raises(ConfigError) as told:
            call()
        assert str(told.value) == f"prompt 0 {says}"
    with pytest.raises(ConfigError, match="text "):
        model.encode(text)


@pytest.mark.parametrize("text", [None, 3, b"a"])
def test_only_text_is_encoded(bundled, text):
    with pytest.raises(ConfigError, match="expected a string"):
        load_model(bundled).encode(text)


def test_results_of_a_folder_that_is_not_utf8(bundled, tmp_path, monkeypatch):
    """Its name becomes the default results folder's, and a label in every row."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    try:
        folder.symlink_to(bundled)
        copy = tmp_path / os.fsdecode(b"real-\xe9")
        copy.mkdir()
    except OSError:
        pytest.skip("a file system of UTF-8 names only")
    for file in bundled.iterdir():
        (copy / file.name).symlink_to(file)
    prompts = tmp_path / os.fsdecode(b"p\xe9.txt")
    prompts.write_text("one")
    monkeypatch.chdir(tmp_path)
    out = sweep(copy, prompts, depths=[0], max_new_tokens=2)
    assert out.rows[0].error is None and out.rows[0].checkpoint == r"real-\xe9" and out.rows[0].prompt_set == r"p\xe9"
    assert read_rows(tmp_path / "results" / copy.name) == out.rows


@pytest.mark.parametrize(
    "value, says",
    [
        ("caf\udce9", "is not valid UTF-8: byte 0xe9 at character 3"),
        (r"['a', 'caf\ud800']", "holds half a surrogate pair at character 3"),
        (r"{'a': ['caf\ud800']}", "holds half a surrogate pair at character 3"),
    ],
)
def test_a_parameter_that_is_no_text(repo, tmp_path, capsys, value, says):
    """A notebook is a file of UTF-8: papermill could not write it."""
    notebook = str(repo / "notebooks" / "02_fp8_numerics.ipynb")
    assert main(["report", notebook, "-p", "text", value, "-o", str(tmp_path / "out.html")]) == 2
    assert f"parameter text {says}" in capsys.readouterr().err
