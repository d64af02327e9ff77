"""Rows out of folders, files and pages: the same rows whichever way, and nothing that a file can do to its reader."""

from __future__ import annotations

import json
import os
import time
import tracemalloc

import pytest

from mtplab.errors import ConfigError
from mtplab.report import SweepExplorer
from mtplab.report.page import Page
from mtplab.study import rowfile
from mtplab.study.rowfile import rows_of_source
from mtplab.study.store import PointStore, read_rows
from tests.report_fakes import row, rows, write_results

STUDY = rows(depths=range(3), policies=("none", "int8"))
HOSTILE = "</script><script>alert(1)</script>'\"&amp;\u202e\x1b[31m<iframe class=\"mtplab-explorer\" srcdoc='x'>"


def page_of(*studies) -> str:
    page = Page(HOSTILE)
    for study in studies:
        page.show(SweepExplorer(study))
    return page.render("")


def lines(study) -> str:
    return "".join(each.to_json() + "\n" for each in study)


def test_a_folder_gives_its_rows_and_stays_as_it_is(tmp_path):
    folder = write_results(tmp_path / "r", STUDY)
    before = sorted(os.listdir(folder))
    found = rows_of_source(folder)
    assert found == read_rows(folder) and len(found) == len(STUDY)
    assert sorted(os.listdir(folder)) == before, "reading makes no folder for locks"
    PointStore(folder).export()
    assert rows_of_source(folder / "rows.jsonl") == found


@pytest.mark.parametrize("shape", ["lines", "blank lines", "list", "indented", "sweep --json", "marked"])
def test_every_file_of_rows_gives_the_same(tmp_path, shape):
    each = [json.loads(one.to_json()) for one in STUDY]
    text = {
        "lines": lines(STUDY),
        "blank lines": "\n\n" + lines(STUDY).replace("\n", "\n\n"),
        "list": json.dumps(each),
        "indented": json.dumps(each, indent=2),
        "sweep --json": json.dumps({"computed": 6, "notes": [], "rows": each}, indent=2),
        "marked": "\ufeff" + lines(STUDY),
    }[shape]
    (tmp_path / "X.rows.json").write_text(text, encoding="utf-8")
    assert rows_of_source(tmp_path / "X.rows.json") == STUDY


def test_a_page_gives_every_row_of_its_explorers_once(tmp_path):
    hostile = row(exclude=HOSTILE, prompt_set=HOSTILE, provenance={"device": HOSTILE, "versions": {HOSTILE: "1"}})
    path = tmp_path / "page.html"
    path.write_text(page_of([*STUDY, hostile], STUDY[:2]), encoding="utf-8")
    assert rows_of_source(path) == [*STUDY, hostile]
    # as a browser saves it: another quote, everything else in entities
    text = path.read_text(encoding="utf-8")
    start, end = text.index("srcdoc='", text.index("<iframe ")), text.index("'></iframe>")
    inside = text[start + 8 : end].replace("&#39;", "'").replace('"', "&quot;")
    saved = text[:start] + f'srcdoc="{inside}"' + text[end + 1 :]
    (tmp_path / "saved.htm").write_text(saved, encoding="utf-8")
    assert rows_of_source(tmp_path / "saved.htm") == [*STUDY, hostile]


def changed(**fields) -> str:
    return json.dumps({**json.loads(STUDY[1].to_json()), **fields})


def island(text: str) -> str:
    document = f'<script id="data" type="application/json">{text}</script>'
    return f"""<html><iframe class="mtplab-explorer" srcdoc='{document}'>"""


ONE = json.loads(STUDY[1].to_json())


BAD = {
    "empty": ("", "holds no rows"),
    "blank": (" \n ", "holds no rows"),
    "words": ("hello", "begins with 'hello'"),
    "other": ('[{"id": 1, "domain": "x", "text": "y"}]', "row 1: not a result row of schema 3"),
    "numbers": ("[1, 2]", "row 1 is a JSON int"),
    "cut": (lines(STUDY)[:-200], "row 12 is not JSON that can be read .*cut off"),
    "nan": (changed(depth="D").replace('"D"', "NaN"), "row 1: holds NaN"),
    "infinite": (changed(seconds="S").replace('"S"', "1e999"), "the number 1e999 is too large"),
    "hidden": (changed(provenance={"config": {"x": "S"}}).replace('"S"', "-Infinity"), "holds -Infinity"),
    "large": (changed(tokens="S").replace('"S"', "9" * 5000), "the number 99999999999999999999… is too large"),
    "deep": ("[" * 200_000, "nested too deep|is not JSON"),
    "half a pair": (changed(exclude_label="S").replace('"S"', '"\\ud800"'), "row 1: not a result row"),
    "extra": (changed(**{HOSTILE: 1}), r"row 1: not a result row.*\\x1b\[31m"),
    "newer": (changed(schema=4), "row 1: not a result row of schema 3: schema"),
    "perplexity": (changed(perplexity=0), "row 1: not a result row of schema 3: perplexity"),
    "inconsistent": (changed(acceptance_length=17.0), "row 1: not a result row"),
    "threads": (changed(provenance={"threads": "two"}), "provenance.threads is 'two'; expected int"),
    "device": (changed(provenance={"device": ["cpu"]}), "provenance.device is .*expected str"),
    "config": (changed(provenance={"config": []}), r"provenance.config is \[\]; expected dict"),
    "compared": (json.dumps([{**ONE, "source": "a"}]), "comparison of several files"),
    "no rows": ('{"rows": 3}', "its rows are a int"),
    "page": ("<!DOCTYPE html><p>hello", "without an explorer"),
    "cut page": (page_of(STUDY)[: page_of(STUDY).index("<iframe ") + 900], "is cut off"),
    "no island": ("""<html><iframe class="mtplab-explorer" srcdoc='<p>'>""", "explorer holds no rows"),
    "list island": (island("[]"), "none that mtplab wrote"),
    "empty island": (island('{"rows":[],"provenance":{},"labels":[]}'), "holds no rows"),
    "bad island": (island('{"rows":[5],"provenance":{},"labels":[[]]}'), "row 1 is a JSON int"),
    "labels": (island(json.dumps({"rows": [ONE], "provenance": {}, "labels": ["depth"]})), "depth"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_row_is_refused_by_name(tmp_path, name):
    text, says = BAD[name]
    path = tmp_path / "given.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as raised:
        rows_of_source(path)
    assert str(path) in str(raised.value) and "\x1b" not in str(raised.value)


def test_what_is_no_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\x00")
    with (tmp_path / "huge.jsonl").open("wb") as file:
        file.truncate(10 << 40)  # ten terabytes of nothing
    (tmp_path / "empty").mkdir()
    unlike = {
        "pipe.jsonl": "not a regular file",
        "bytes.jsonl": "byte 0 is not UTF-8",
        "huge.jsonl": "10995116277760 bytes; expected rows in at most",
        "empty": "a folder without results",
        "nothing": "does not exist",
        "a\0b": r"a\\x00b: does not exist|no file system",
        "x" * 5000: "no file system",
    }
    for name, says in unlike.items():
        with pytest.raises(ConfigError, match=says):
            rows_of_source(str(tmp_path / name))
    for wrong in ("", None, 3):
        with pytest.raises(ConfigError, match="expected a results folder"):
            rows_of_source(wrong)


def test_a_folder_with_a_pipe_or_a_giant_among_its_points_is_refused(tmp_path):
    def giant(path):
        path.touch()
        os.truncate(path, 1 << 40)

    for number, make in enumerate((os.mkfifo, giant)):
        folder = write_results(tmp_path / str(number), STUDY)
        make(folder / f"{'0' * 64}.json")
        with pytest.raises(ConfigError, match="000.json: expected a file of at most"):
            rows_of_source(folder)


def test_a_small_file_takes_no_giant_memory_and_a_wrong_one_no_time(tmp_path, monkeypatch):
    """A row is looked for in windows: a value that goes on for ever is given up early, before it is built."""
    path = tmp_path / "bomb.json"
    path.write_text("[" + "[]," * 4_000_000)
    tracemalloc.start()
    began = time.thread_time()
    with pytest.raises(ConfigError, match="row 1 is a JSON list"):
        rows_of_source(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 60_000_000 and time.thread_time() - began < 5
    path.write_text('[{"x": [' + "[]," * 2_000_000)
    with pytest.raises(ConfigError, match="longer than 4000000 characters"):
        rows_of_source(path)
    monkeypatch.setattr(rowfile, "MAX_ROWS", 5)
    path.write_text(lines(STUDY))
    with pytest.raises(ConfigError, match="more than 5 rows"):
        rows_of_source(path)


def test_a_page_of_frames_without_end_takes_no_time(tmp_path):
    path = tmp_path / "many.html"
    path.write_text("<html>" + '<iframe class="mtplab-explorer" ' * 200_000)
    began = time.thread_time()
    with pytest.raises(ConfigError, match="cut off"):
        rows_of_source(path)
    assert time.thread_time() - began < 5
