"""What depth pays here: runs in turn, speed-ups within a repeat, and sentences that hold for whatever came out."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from mtplab import ConfigError, load_model
from mtplab.cli import main
from mtplab.study.depth_timing import DepthTime, DepthTimes, time_depths
from tiny import write_tiny


@pytest.fixture
def calls(monkeypatch):
    """Runs that take what a table says: depth k takes (1 + k / 2) s a round and emits 1 + k tokens, one run is slow."""
    found = []

    def generate(model, prompts, depth, max_batch, **settings):
        found.append((depth, max_batch, len(prompts), settings))
        slow = 10 if len(found) == 5 else 1  # the second repeat's depth 0 at the first batch: all of it is held to that
        rounds = 60 // (1 + depth)
        return SimpleNamespace(
            decode_seconds=slow * rounds * (1 + depth / 2),
            stats=SimpleNamespace(acceptance_length=1.0 + depth, emitted=60),
            settings={"quant_policy": "int8"},
        )

    monkeypatch.setattr("mtplab.decode.generate", generate)
    return found


def test_depths_take_turns_and_are_held_against_their_own_repeat(calls):
    steps = []
    found = time_depths(None, [[1], [2], [3]], [1, 2], [1, 16], 3, on_step=lambda *step: steps.append(step))
    assert [call[:3] for call in calls[:10]] == [(2, 1, 8)] + [(0, 1, 8), (1, 1, 8), (2, 1, 8)] * 3
    assert {call[1:3] for call in calls[10:]} == {(16, 16)} and all(call[3]["ignore_eos"] for call in calls)
    assert steps[-1] == (20, 20) and found.batches == (1, 16)
    by_depth = {line.depth: line for line in found.at(16)}
    assert by_depth[1].speedup == pytest.approx(2 / 1.5) and by_depth[2].speedup == pytest.approx(3 / 2)
    assert by_depth[0].speedup == by_depth[0].low == by_depth[0].high == 1.0
    slow = {line.depth: line for line in found.at(1)}
    assert slow[2].speedup == pytest.approx(1.5) and slow[2].high == pytest.approx(15.0)  # the median stays
    assert found.best(16).depth == 2
    assert "depth 2 pays most, 1.50 times plain decoding (1.50 to 1.50" in found.sentence(16)


def times(*lines):
    return DepthTimes(tuple(DepthTime(1, *line) for line in lines), 3, {"quant_policy": "none"})


def test_sentences_say_what_every_repeat_said():
    assert "no depth pays" in times((0, 1.0, 9.0, 1.0, 1.0, 1.0), (1, 1.7, 8.0, 0.9, 0.8, 0.95)).sentence(1)
    two = (1, 1.7, 9.2, 1.02, 0.9, 1.1), (2, 2.0, 9.1, 1.01, 0.9, 1.2)
    close = times((0, 1.0, 9.0, 1.0, 1.0, 1.0), *two).sentence(1)
    assert "no gain to count on" in close and "Depth 2 cannot be told from it" in close


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"depths": [1.5]}, "depths"),
        ({"depths": [-1]}, "from 0 on"),
        ({"batches": [0]}, "from 1 on"),
        ({"repeats": 0}, "from 1 on"),
        ({"prompts": []}, "0 prompts"),
        ({"batches": []}, "0 batches"),
    ],
)
def test_numbers_that_are_none_are_refused(changes, says):
    with pytest.raises(ConfigError, match=says):
        time_depths(None, **({"prompts": [[1]], "depths": [1], "batches": [1]} | changes))


def test_a_real_model_is_timed(tmp_path):
    model = load_model(write_tiny(tmp_path / "m"))
    found = time_depths(model, [[1, 2], [3]], [2], [1, 8], 2, 6, quant_policy="int8")
    assert [(x.batch, x.depth) for x in found.lines] == [(1, 0), (1, 2), (8, 0), (8, 2)]
    assert all(x.tokens_per_second > 0 and x.low <= x.speedup <= x.high for x in found.lines)
    assert found.lines[0].length == 1.0 and found.settings["quant_policy"] == "int8"


def test_the_command(bundled, capsys):
    words = ["measure", str(bundled), "--depths", "1", "--repeats", "2", "--max-new-tokens", "6", "--batch", "1,8"]
    assert main([*words, "--quant-policy", "int8"]) == 0
    out = capsys.readouterr().out
    assert out.count("KV cache int8:") == 2 and out.count("depth  tokens a round") == 2
    assert out.endswith("\nTimed on cpu with 0 of 39 linear modules in FP8, in the fastest arithmetic.\n")
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["lines"]) == 4
    assert main(["measure", str(bundled), "--batch", "0"]) == 2
    assert "--batch '0'" in capsys.readouterr().err


def test_it_says_which_weights_and_which_arithmetic(bundled_fp8, capsys):
    words = ["measure", str(bundled_fp8), "--depths", "1", "--repeats", "1", "--max-new-tokens", "4", "--exact"]
    assert main(words) == 0
    assert capsys.readouterr().out.endswith(
        "\nTimed on cpu with 32 of 39 linear modules in FP8, in row-invariant arithmetic, as in a report.\n"
    )


def test_exclusions_mean_what_they_mean_elsewhere(bundled, capsys):
    """Of a BF16 checkpoint, as in generate, sweep and doctor: all else is quantised as it is loaded."""
    words = ["measure", str(bundled), "--depths", "1", "--repeats", "1", "--max-new-tokens", "4", "--exclude", "mtp.*"]
    assert main(words) == 0
    fp8, linear = re.search(r"with (\d+) of (\d+) linear modules in FP8", capsys.readouterr().out).groups()
    assert 0 < int(fp8) < int(linear)
