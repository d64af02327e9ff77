"""`mtplab advise`: what it prints, what it takes, and how it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from mtplab.cli import main
from mtplab.study.published import compare, markdown
from report_fakes import rows

MODEL = ["advise", "--model", "Qwen3.5-27B", "--gpu", "h200"]


def run(capsys, *words):
    code = main(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def test_a_table_the_best_depth_a_map_and_what_it_rests_on(capsys):
    code, out, err = run(capsys, *MODEL, "--batch", "1,8", "--context", "2048", "--acceptance", "0.85,0.7,0.6")
    assert code == 0 and err == ""
    assert out.count("pays most") == 2 and out.count("depth  tokens a round") == 2
    lines = [line.split() for line in out.splitlines() if line.startswith("    3 ")]
    assert [line[1] for line in lines] == ["3.15", "3.15"]
    assert "best depth (speed-up) by batch and context" in out
    grid = next(line.split() for line in out.splitlines() if line.lstrip().startswith("batch"))
    assert grid == ["batch", "1024", "2048", "8192", "65536"]
    assert "Times are a roofline model's, not measured" in out


def test_json_is_one_document(capsys):
    code, out, _ = run(capsys, *MODEL, "--lengths", "1.9,2.7", "--batch", "4", "--tp", "2", "--json")
    found = json.loads(out)
    assert code == 0 and set(found) == {"advice", "map", "basis"}
    (one,) = found["advice"]
    assert (one["tp"], one["batch"], one["best"]) == (2, 4, 2)
    assert [line["acceptance_length"] for line in one["depths"]] == [1.0, 1.9, 2.7]


def test_it_needs_no_torch():
    words = ["advise", "--model", "Qwen3.5-27B", "--conditional", "0.8,0.7"]
    code = f"import sys, mtplab.cli as c; print(c.main({words!r}), *{{'torch', 'matplotlib'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0", done.stderr


def test_where_it_loses_it_says_so(capsys):
    words = ["--model", "Qwen3.5-35B-A3B", "--gpu", "L40S", "--conditional", "0.3", "--max-depth", "2", "--batch", "16"]
    code, out, _ = run(capsys, "advise", *words)
    assert code == 0 and "MTP loses here because a round at depth 1 takes" in out


def test_a_checkpoint_is_read_from_its_headers(capsys, bundled, bundled_fp8):
    code, out, _ = run(capsys, "advise", "--checkpoint", str(bundled_fp8), "--conditional", "0.8,0.7")
    assert code == 0 and "tiny-qwen3_5-fp8 with stored weights on H200 SXM" in out
    assert "bytes from the headers of tiny-qwen3_5-fp8" in out
    code, out, _ = run(capsys, "advise", "--checkpoint", str(bundled), "--weights", "fp8", "--conditional", "0.8,0.7")
    assert code == 0 and "fp8 (made at load) weights" in out


def test_results_of_a_sweep(capsys, monkeypatch, tmp_path):
    study = rows(policies=("none", "int8"), excludes=("published", "*"))
    monkeypatch.setattr(import_module("mtplab.study.store"), "read_rows", lambda folder: study)
    code, out, _ = run(capsys, *MODEL, "--results", str(tmp_path), "--quant-policy", "int8", "--exclude", "published")
    assert code == 0 and "measured by a sweep of tiny (published, cache int8, temperature 0)" in out
    code, _, err = run(capsys, *MODEL, "--results", str(tmp_path))
    assert code == 2 and "rows of 2 settings are left" in err and "exclude_label published" in err
    code, _, err = run(capsys, *MODEL, "--results", str(tmp_path), "--exclude", "published", "--temperature", "1")
    assert code == 2 and "no finished row of" in err and "temperature 1.0" in err


def test_measured_constants(capsys, tmp_path):
    file = tmp_path / "own.json"
    file.write_text('{"bandwidth": 0.4, "host": 0}')
    slow = json.loads(run(capsys, *MODEL, "--conditional", "0.8,0.7", "--measured", str(file), "--json")[1])
    fast = json.loads(run(capsys, *MODEL, "--conditional", "0.8,0.7", "--json")[1])
    parts = [found["advice"][0]["depths"][0]["parts"] for found in (slow, fast)]
    assert parts[0]["weights"] == pytest.approx(2 * parts[1]["weights"]) and parts[0]["host"] == 0
    assert "but for bandwidth (" in slow["basis"] and "own.json" in slow["basis"]


def test_the_check_prints_the_pages_table(capsys):
    code, out, _ = run(capsys, "advise", "--check")
    assert code == 0 and out == markdown(compare())
    found = json.loads(run(capsys, "advise", "--check", "--json")[1])
    assert len(found) == len(compare()) and {"source", "value", "modelled", "deviation", "why"} <= set(found[0])


@pytest.mark.parametrize("option", ["--acceptance", "--conditional"])
def test_shares_are_per_cent_too(capsys, option):
    told = [run(capsys, *MODEL, option, given, "--json")[1] for given in ("0.85,0.7,0.6", "85%,70%,60%")]
    assert told[0] == told[1] and json.loads(told[0])["advice"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--conditional", "0.5"], "expected either --model, a name of the catalogue, or --checkpoint"),
        (["--model", "Qwen3.5-27B", "--checkpoint", "x", "--conditional", "0.5"], "expected either --model"),
        (["--model", "Qwen3.5-27B"], "acceptance is given 0 times; expected one of --acceptance, --conditional"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--lengths", "1.5"], "acceptance is given 2 times"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5,0.6"], "above 0.5 at 1; expected shares that do not grow"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--exclude", "none"], "choose among --results"),
        (["--model", "Qwen3.6-28B", "--acceptance", "0.5"], "model 'Qwen3.6-28B' is not in the catalogue"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--gpu", "H300"], "GPU 'H300' is not in the catalogue"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--weights", "fp7"], "weights 'fp7': expected one of"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--batch", "0"], "batch is 0; expected a whole number"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--batch", "1,x"], "--batch 'x': expected whole numbers"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--tp", "5"], "tp is 5; expected a divisor of the 24"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--quant-policy", "int3"], "unknown quant_policy 'int3'"),
        (["--model", "Qwen3.5-27B", "--acceptance", "a"], "--acceptance 'a': expected a share such as 0.5% or 0.005"),
        (["--model", "Qwen3.5-27B", "--acceptance", "85"], "85.0; expected a share from 0 to 1"),
        (["--model", "Qwen3.5-27B", "--acceptance", "850%"], "8.5; expected a share from 0 to 1"),
        (["--model", "Qwen3.5-27B", "--conditional", "0.5", "--max-depth", "99"], "depths is 99; expected"),
        (["--model", "Qwen3.5-27B", "--acceptance", "0.5", "--measured", "none"], "none: expected the JSON of"),
        (["--model", "Qwen3.5-27B", "--results", "nowhere"], "no such results folder"),
    ],
)
def test_wrong_usage_is_one_line(capsys, words, said):
    code, out, err = run(capsys, "advise", *words)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1


def test_a_checkpoint_takes_only_its_own_formats(capsys, bundled):
    code, _, err = run(capsys, "advise", "--checkpoint", str(bundled), "--conditional", "0.5", "--weights", "int4")
    assert code == 2 and "--weights 'int4' of a checkpoint: expected fp8" in err
