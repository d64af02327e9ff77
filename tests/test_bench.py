"""The benchmark: its arithmetic, that a wrong decoder gets no time, and one run on settings of a few tokens."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from mtplab import load_model, open_checkpoint
from mtplab.bench import converting, speed
from mtplab.bench.__main__ import decoding_table, main, products_table
from mtplab.bench.peer import load_transformers
from mtplab.bench.products import ROWS, products
from mtplab.bench.speed import Line, parting, prompts
from mtplab.bench.timing import Timing, interleave
from mtplab.decode import generate
from mtplab.errors import ConfigError, MtplabError


def test_rates_and_verdicts():
    timing = Timing("x", 100, (2.0, 1.0, 4.0))
    assert (timing.median, timing.rate, timing.best_rate) == (2.0, 50.0, 100.0)
    assert Line("x", timing, 2.0, 2.0).verdict == "met" and Line("x", timing, 1.99, 2.0).verdict == "not met"
    bound = Line("x", timing, 1.65, 1.5, at_most=True)
    assert bound.verdict == "not met" and Line("x", timing, 1.5, 1.5, at_most=True).verdict == "met"
    assert "not timed" in decoding_table([Line("x", None, None, 2.0, "wrong")])


def test_contestants_take_turns():
    order = []
    timings = interleave({"a": (1, lambda: order.append("a")), "b": (1, lambda: order.append("b"))}, 2)
    assert order == ["a", "b"] * 3 and len(timings["a"].seconds) == 2


def test_a_wrong_decoder_is_told_from_a_near_tie(bundled):
    model = load_model(bundled)
    ids = model.encode("import os")
    right = generate(model, [ids], depth=0, max_new_tokens=6).tokens[0]
    assert parting(model, ids, right, list(right)) is None
    wrong = [*right[:3], (right[3] + 1) % 2048, *right[4:]]
    with pytest.raises(ValueError, match=f"token 3 is {wrong[3]}, expected {right[3]}"):
        parting(model, ids, right, wrong)


def test_a_near_tie_excuses_one_token_only(bundled, monkeypatch):
    model = load_model(bundled)
    ids = model.encode("import os")
    right = generate(model, [ids], depth=0, max_new_tokens=6).tokens[0]
    wrong = [*right[:2], (right[2] + 1) % 2048, *right[3:]]
    tie, nan = torch.zeros(2048), torch.full((2048,), float("nan"))
    monkeypatch.setattr(speed, "next_logits", lambda model, seen: tie)
    assert "parts at token 2, a near-tie" in parting(model, ids, right, wrong)
    monkeypatch.setattr(speed, "next_logits", lambda model, seen: nan)
    with pytest.raises(ValueError, match="token 2"):
        parting(model, ids, right, wrong)
    # the tie is real, what follows it is not what the model would say
    later = tie.clone()
    later[(wrong[4] + 1) % 2048] = 1.0
    monkeypatch.setattr(speed, "next_logits", lambda model, seen: later if len(seen) == len(ids) + 4 else tie)
    with pytest.raises(ValueError, match="token 4 is .*after parting at token 2"):
        parting(model, ids, right, wrong)


def test_prompts_come_from_the_domains_in_turn(tmp_path):
    for name, texts in {"a": ["a1"], "b": ["b1", "b2"]}.items():
        rows = (json.dumps({"id": text, "domain": name, "text": text}) for text in texts)
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    assert prompts(tmp_path, 3) == ["a1", "b1", "b2"]
    with pytest.raises(ConfigError, match=r"4 prompts were asked for, .* has 3"):
        prompts(tmp_path, 4)
    with pytest.raises(ConfigError, match="found none"):
        prompts(tmp_path / "missing", 1)


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--prompts", "0"], ["--tokens", "x"], ["-o", "no/such/x.json"]])
def test_settings_that_cannot_be_run(wrong, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["speed", *wrong])
    assert stop.value.code == 2 and "usage: python -m mtplab.bench" in capsys.readouterr().err


def test_a_missing_peer_is_said_plainly(bundled, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MtplabError, match="transformers is not installed"):
        load_transformers(open_checkpoint(bundled))


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    out = tmp_path / "bench.json"
    small = ["--tokens", "6", "--rounds", "1", "--prompts", "2", "--max-depth", "1", "--no-compile", "-o", str(out)]
    assert main(["speed", *small]) == 0
    printed = capsys.readouterr().out
    assert "transformers, batch 1" in printed and "best at batch 1" in printed and "dequantize_block" in printed
    rows = json.loads(out.read_text())
    assert {"machine", "decoding", "loading", "tracing"} == set(rows)
    assert [row["verdict"] != "" for row in rows["tracing"]] == [False, True, True] * 2
    assert all(row["verdict"] in ("met", "not met") for row in rows["decoding"] + rows["loading"] if row["goal"])
    assert all(row["seconds"] for row in rows["decoding"]), "every contestant was right and timed"


def test_products_of_a_pass(bundled):
    lines = products(load_model(bundled), 1)
    assert [x.rows for x in lines] == list(ROWS)
    assert not any(x.differ[kind] for x in lines for kind in ("oneDNN", "FBGEMM FP16")), "rows depend on their number"
    assert "FBGEMM FP16" in products_table(lines)


@pytest.mark.slow
def test_conversion_is_measured(tmp_path, monkeypatch, capsys):
    """A row for each case, of a checkpoint small enough for a test; its speed is nobody's."""
    monkeypatch.setattr(converting, "HIDDEN", 256)
    monkeypatch.setattr(converting, "INNER", 512)
    monkeypatch.setattr(converting, "LAYERS", 2)
    cases = {name: converting.CASES[name] for name in ("fp8-block", "bf16, of fp8-block")}
    monkeypatch.setattr(converting, "CASES", cases)
    assert main(["convert", "--rounds", "1", "--work", str(tmp_path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split("  ")[0] for row in rows[1:3]] == ["fp8-block", "bf16, of fp8-block"]
    assert all(float(row.split()[-5]) >= 0 for row in rows[1:3]) and "MB" in rows[1]
    assert list(tmp_path.iterdir()) == []
