"""A sweep's results as a page: every part there is something for, nothing for what is not there, mixtures said."""

from __future__ import annotations

import json
import re

from mtplab.cli import main
from mtplab.report.results_page import results_page
from tests.report_fakes import row, rows, write_results

HOSTILE = "</script><script>document.title='broken'</script><img src=x onerror=alert(1)>\"'&`*_[a](b)\u202e\x1b[31m"


def sections(text):
    nav = re.search(r"<nav .*?</nav>", text, re.DOTALL)[0]
    return re.findall(r">([^<]+)</a>", nav)


def test_every_part_that_rows_have_something_for():
    study = rows(depths=range(5), policies=("none", "int8"), excludes=("published", "*"))
    text = results_page(study, "mine")
    assert sections(text) == [
        "What the numbers say",
        "Acceptance by depth",
        "Acceptance by draft position",
        "What a round takes",
        "Bytes",
        "Explore the rows",
        "Where this comes from",
    ]
    assert "20 rows of 4 points; none of them failed." in text and len(text) < 1_000_000
    # what is least quantised is the reference
    assert "everything in BF16 (KV cache: unquantised), a round at depth 4" in text
    assert f"{row(4, 'int8', '*').acceptance_length:.2f}" in text and "Results: mine" in text
    assert text.count("<iframe ") == 1


def test_what_is_not_measured_is_not_drawn_and_quality_is_where_it_is():
    plain = {"seconds": None, "tokens_per_second": None, "method": "trace"}
    study = [row(depth, policy, **plain) for policy in ("none", "int8") for depth in range(3)]
    assert "What a round takes" not in sections(results_page(study, "x"))
    measured = [each.model_copy(update={"kl": 0.0123, "perplexity": 8.125}) for each in study]
    text = results_page(measured, "x")
    assert ">KL, nats</th>" in text and ">0.0123</td>" in text and ">8.12</td>" in text
    assert ">KL, nats</th>" not in results_page(study, "x")
    sizes = ["target_weight_bytes", "draft_weight_bytes", "kv_bytes_per_token"]
    sizes += ["draft_kv_bytes_per_token", "state_bytes"]
    bare = [each.model_copy(update=dict.fromkeys(sizes)) for each in study]
    assert "Bytes" not in sections(results_page(bare, "x"))
    alone = results_page([row(0, **plain)], "x")
    assert "Acceptance by draft position" not in sections(alone)


def test_more_lines_than_a_figure_holds_are_two_figures():
    study = rows(depths=range(3), policies=("none", "int8", "int4"), excludes=("published", "*", "none"))
    assert results_page(study, "x").count('alt="Line chart, acceptance length in tokens') == 2
    assert results_page(study[:18], "x").count('alt="Line chart, acceptance length in tokens') == 1


def test_failed_points_are_listed_with_their_errors():
    failed = row(2, "int8").model_copy(update={"error": f"out of memory {HOSTILE}", "acceptance_length": None})
    text = results_page([*rows(depths=range(2), policies=("none",)), failed], "x")
    assert "What failed" in sections(text) and "out of memory &lt;/script&gt;" in text
    assert "1 of them failed" in text
    only = results_page([failed], "x")
    assert sections(only) == ["What failed", "Where this comes from"] and "nothing to draw" in only


def test_mixed_checkpoints_prompts_and_temperatures_have_parts_of_their_own():
    study = rows(depths=range(2), policies=("none",))
    other = [each.model_copy(update={"checkpoint": HOSTILE, "prompt_set": HOSTILE}) for each in study]
    longer = [each.model_copy(update={"max_new_tokens": 64}) for each in study]
    text = results_page([*study, *other, *longer], HOSTILE)
    assert "3 different combinations of checkpoint and prompts" in text
    # less-than signs stand in the names, as entities
    assert "tiny · prompts · 4 prompts × 32 tokens" in text and "tiny · prompts · 4 prompts × 64 tokens" in text
    assert "<script>document" not in text and "<img src=x" not in text
    assert "\x1b" not in text and "\u202e" not in text
    warm = [*study, *rows(depths=range(2), policies=("none",), temperatures=(0.7,))]
    assert "At temperature 0.7" in results_page(warm, "x") and "different combinations" not in results_page(warm, "x")


def test_one_name_for_two_contents_is_two_parts():
    study = rows(depths=range(2), policies=("none",))
    half = [
        each.model_copy(update={"provenance": {"config": {"checkpoint": f"full:{digit * 64}"}}})
        for digit in "ab"
        for each in study
    ]
    text = results_page(half, "x")
    assert "2 different combinations" in text and "tiny (full:aaaaaaaaaaaa)" in text


def test_the_command_takes_a_file_of_rows_and_the_page_it_made(tmp_path, capsys):
    study = rows(depths=range(3), policies=("none",))
    (tmp_path / "r.rows.json").write_text(json.dumps([json.loads(each.to_json()) for each in study]))
    source, out = tmp_path / "r.rows.json", tmp_path / "out" / "page.html"
    for given in (source, out):
        assert main(["report", str(given), "-o", str(out), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"report": str(out), "parameters": {}}
        text = out.read_text(encoding="utf-8")
        assert str(tmp_path) not in text, "no path of this machine is in a page"
        assert "6 rows of 2 points" in text


def test_a_page_goes_below_reports_if_nothing_else_is_said(tmp_path, monkeypatch, capsys):
    write_results(tmp_path / "mine", rows(depths=range(2)))
    monkeypatch.chdir(tmp_path)
    assert main(["report", "mine"]) == 0
    (page,) = (tmp_path / "reports" / "mine").glob("*.html")
    assert capsys.readouterr().out == f"{page}\n"


def test_what_is_for_notebooks_is_refused_for_results(tmp_path, capsys):
    folder = write_results(tmp_path / "mine", rows(depths=range(2)))
    for given in (["-p", "depth", "3"], ["--execution-timeout", "3"]):
        assert main(["report", str(folder), *given]) == 2
        assert f"{given[0]} is for a notebook, and {folder} holds results" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "a folder without results of a sweep" in capsys.readouterr().err
    assert main(["report", str(folder), "-o", str(tmp_path)]) == 2
    assert "is a folder; give a file" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["report", str(folder), "-o", str(tmp_path / "file" / "x.html")]) == 2
    assert "cannot be made" in capsys.readouterr().err
