"""The benchmark: its arithmetic, that a wrong decoder gets no time, and one run on settings of a few tokens."""

from __future__ import annotations

import json

import pytest

from mtplab import load_model
from mtplab.bench.__main__ import decoding_table, main, products_table
from mtplab.bench.products import ROWS, products
from mtplab.bench.speed import Line, parting
from mtplab.bench.timing import Timing, interleave
from mtplab.decode import generate


def test_rates_and_verdicts():
    timing = Timing("x", 100, (2.0, 1.0, 4.0))
    assert (timing.median, timing.rate, timing.best_rate) == (2.0, 50.0, 100.0)
    assert Line("x", timing, 2.0, 2.0).verdict == "met" and Line("x", timing, 1.99, 2.0).verdict == "not met"
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


@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    out = tmp_path / "bench.json"
    small = ["--tokens", "6", "--rounds", "1", "--prompts", "2", "--max-depth", "1", "--no-compile", "-o", str(out)]
    assert main(["speed", *small]) == 0
    printed = capsys.readouterr().out
    assert "transformers, batch 1" in printed and "best at batch 1" in printed and "dequantize_block" in printed
    rows = json.loads(out.read_text())
    assert {"machine", "decoding", "loading"} == set(rows)
    assert all(row["seconds"] for row in rows["decoding"]), "every contestant was right and timed"


def test_products_of_a_pass(bundled):
    lines = products(load_model(bundled), 1)
    assert [x.rows for x in lines] == list(ROWS)
    assert all(x.packed_differ == 0 for x in lines), "packed rows depend on their number"
    assert "packed" in products_table(lines)
