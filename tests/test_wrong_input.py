"""What people give by mistake, or files by accident, is named and refused, with what was expected and what to do."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mtplab import compare_caches, generate, load_model, memory, trace
from mtplab.checkpoint.hub import resolve_hub
from mtplab.checkpoint.write import write_safetensors
from mtplab.decode.calibration import bound
from mtplab.errors import CheckpointError, ConfigError
from mtplab.quant.policy import resolve_policy
from mtplab.report.paths import resolve_path
from mtplab.study.acceptance_set import AcceptanceSet
from mtplab.study.quality import Quality, read
from tests.tiny import MIXTURE, stacked, write_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_tiny(tmp_path_factory.mktemp("wrong")))


@pytest.fixture(scope="module")
def found(model):
    return trace(model, [[1, 2, 3], [4, 5]], max_depth=3, max_new_tokens=12).acceptance()


_LONG = 10**5000  # more digits than Python spells


@pytest.mark.parametrize("policy", ["²", "①", "١٦", "１６", "int8/٤", _LONG, -_LONG, "x" * 100_000], ids=range(8))
def test_numbers_of_policies_are_plain_digits(policy):
    with pytest.raises(ConfigError, match="unknown quant_policy") as caught:
        resolve_policy(policy)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize("start", ["int8@", "int8:", "fp8:", "int8/", "int8//"])
def test_long_policies_are_quoted_in_part(start):
    with pytest.raises(ConfigError) as caught:
        resolve_policy(start + "x" * 100_000)
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], r"calibration is \[\]; expected a string"),
        ([[1], []], "calibration text 1 is empty"),
        ([[1], [99]], "calibration text 1 has token id 99; expected 0 to 15"),
        ([[1.5]], r"calibration text 0 is \[1.5\]"),
    ],
)
def test_calibration_is_called_by_its_name(model, given, said):
    with pytest.raises(ConfigError, match=said):
        generate(model, [[1, 2]], depth=1, max_new_tokens=2, quant_policy="fp8:calibrated", calibration=given)


def test_texts_and_outputs_are_called_by_their_names(model):
    with pytest.raises(ConfigError, match="^text 1 is empty"):
        read(model, [[1, 2], []])
    with pytest.raises(ConfigError, match="^output 1 has token id 16"):
        trace(model, [[1], [2]], output=[[1], [16]])


def test_a_scale_too_small_to_divide_by_is_1(model, monkeypatch):
    tiny = torch.tensor([[1e-44], [0.0]])
    monkeypatch.setattr("mtplab.decode.calibration._largest", lambda *_: {1: tiny})
    k, v = bound(model, resolve_policy("fp8_e4m3:calibrated"), "target", [[1]]).scales_of(1)
    assert k.item() == v.item() == 1.0


# traced acceptance


_NAN, _INF = float("nan"), float("inf")


@pytest.mark.parametrize("edges", [None, 5, [], [3], [5, 1], [0, 0], [0, _NAN], [0, _INF], "ab", [0, 1.5]])
def test_edges_are_whole_positions_that_grow(found, edges):
    one = Quality(np.zeros(4, int), np.arange(4), np.ones(4))
    of_trace = (lambda: found.by_context(1, edges), lambda: found.context_intervals(1, edges))
    for asked in (*of_trace, lambda: one.by_context(edges)):
        with pytest.raises(ConfigError, match="expected at least two whole positions"):
            asked()


def test_edges_may_be_numpys(found):
    assert found.by_context(1, np.array([0.0, 8.0, 16.0])) == found.by_context(1, [0, 8, 16])


@pytest.mark.parametrize("confidence", [None, "x", _NAN, -1, 2, True, [0.5]])
def test_a_gate_is_a_probability(found, confidence):
    for asked in (found.gate, lambda value: found.view("gate", confidence=value)):
        with pytest.raises(ConfigError, match="expected a probability, 0 to 1"):
            asked(confidence)


@pytest.mark.parametrize("depth_at", [None, 5, [1, 2]])
def test_a_schedule_is_a_function(found, depth_at):
    with pytest.raises(ConfigError, match="expected a function from positions to depths"):
        found.schedule(depth_at)


@pytest.mark.parametrize(
    "asked",
    [
        {"depths": 5}, {"depths": (1,)}, {"depths": ()}, {"depths": (0, 1.5)}, {"depths": "ab"}, {"depths": (2, 1)},
        {"temperatures": 0}, {"temperatures": []}, {"temperatures": [[]]}, {"temperatures": "0"},
        {"temperatures": [1.0]}, {"domains": None}, {"domains": []}, {"domains": [[]]}, {"domains": ""},
        {"domains": ["x"]},
        {"switch": None}, {"switch": 1.5}, {"switch": -1}, {"switch": _NAN},
    ],
)  # fmt: skip
def test_what_a_view_is_asked_for(found, asked):
    with pytest.raises(ConfigError, match="|".join([*asked, "was not traced", "domain is"])):
        found.view("schedule", **asked)


@pytest.mark.parametrize("given", [None, 5, "x", [], [None], [5]])
def test_what_a_set_is_made_of(given):
    with pytest.raises(ConfigError, match="expected a list of traces, one or more"):
        AcceptanceSet(given)


@pytest.mark.parametrize("depth", [0, -1, 17, 1.5, None])
def test_caches_are_compared_at_a_depth_that_can_be_traced(bundled, depth):
    with pytest.raises(ConfigError, match="max_depth is .*; expected 1 to 16"):
        compare_caches(load_model(bundled), [[1, 2]], ["none"], max_depth=depth, max_new_tokens=2)


def test_one_policy_may_be_a_text(bundled):
    with pytest.raises(ConfigError, match="unknown quant_policy 'int9'"):
        compare_caches(load_model(bundled), [[1, 2]], "int9")


def test_names_that_are_none(found):
    with pytest.raises(ConfigError, match="domain is"):
        found.only([])
    with pytest.raises(ConfigError, match="was not traced"):
        AcceptanceSet([found])[[]]


# checkpoints


@pytest.mark.parametrize(
    ("policy", "draft", "said"),
    [
        ("int8@0", None, "keeps layer 0 unquantised, which has no KV cache here; expected some of 1"),
        ("int8@" + "+".join(map(str, range(2, 999))), None, "have no KV cache"),
        ("int8", "int8@1", "names layers of the target"),
        ("turboquant", None, "power of two"),
        ("none", "int8/turboquant", "power of two"),
    ],
)
def test_memory_refuses_caches_that_a_run_refuses(tmp_path, policy, draft, said):
    folder = write_tiny(tmp_path, head_dim=12, rope_parameters={"partial_rotary_factor": 0.5})
    with pytest.raises(ConfigError, match=said) as caught:
        memory(folder, quant_policy=policy, draft_quant_policy=draft)
    assert len(str(caught.value)) < 400
    model = load_model(folder)
    with pytest.raises(ConfigError, match=said):
        generate(model, [[1, 2]], depth=1, max_new_tokens=2, quant_policy=policy, draft_quant_policy=draft)


@pytest.mark.parametrize("kept", ["gate_up_proj", "down_proj"])
def test_experts_that_are_there_twice(tmp_path, kept):
    folder = write_tiny(tmp_path, **MIXTURE)
    tensors = load_file(folder / "model.safetensors")
    name = f"model.layers.0.mlp.experts.{kept}"
    tensors[name] = stacked(tensors)[name]
    write_safetensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=rf"holds experts twice, stacked as .*{kept} and singly as .*experts\.0"):
        load_model(folder)


# folders and streams


@pytest.mark.parametrize("look", [lambda: resolve_path("~nobody-of-that-name/x"), lambda: resolve_hub("hf://a/b")])
def test_the_folder_of_no_user(monkeypatch, look):
    monkeypatch.setenv("HF_HUB_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(ConfigError, match="no such user's folder"):
        look()


_MAIN = "import sys; from mtplab.cli import main; sys.exit(main())"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["doctor", "data/tiny-qwen3_5"]])
def test_output_that_cannot_be_written(arguments):
    with open("/dev/full", "w") as full:
        ran = subprocess.run([sys.executable, "-c", _MAIN, *arguments], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1
    assert ran.stderr.startswith("mtplab: the output cannot be written: No space left") and ran.stderr.count("\n") == 1


@pytest.mark.parametrize(("path", "code"), [("data/tiny-qwen3_5", 0), ("/no/such/place", 2)])
def test_streams_that_are_closed(path, code):
    closed = 'exec "$0" -c "$1" doctor "$2" >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, sys.executable, _MAIN, path], check=False).returncode == code
