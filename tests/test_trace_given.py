"""Traces of outputs that are given: the target's own is that of decoding to the last bit, another's says what it is."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import mtplab
from mtplab import ConfigError
from mtplab.decode import tracing
from mtplab.decode.peek import next_logits
from mtplab.models.spec import DeltaSpec
from mtplab.study.acceptance_set import AcceptanceSet
from mtplab.study.acceptance_views import VIEWS
from mtplab.study.curve import Curve
from mtplab.study.reference import against
from mtplab.study.trace import Trace, trace

PROMPTS = ["Once upon a time there was a king who", "def main():", "In", "x", "import os\n\n\ndef"]
ARRAYS = ("tokens", "output_lengths", "prompt_lengths", "hits", "log_q", "top", "log_p")


@pytest.fixture(scope="module")
def model(bundled_fp8):
    return mtplab.load_model(bundled_fp8)


@pytest.fixture(scope="module")
def whole(bundled):
    """The unquantised target."""
    return mtplab.load_model(bundled)


def same(one: Trace, other: Trace) -> bool:
    return all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in ARRAYS)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quant_policy": "int4", "draft_hidden": "pre_norm", "target_hidden": "pre_norm"},
        {"temperature": 0.8, "draft_sampling": "sampled", "seed": 3, "top_k": 20},
        {"max_batch": 2, "quant_policy": "fp8"},
    ],
    ids=str,
)
def test_the_targets_own_output_gives_the_trace_of_decoding(model, settings, monkeypatch):
    """To the last bit, in passes of any width, with outputs of unlike lengths."""
    free = mtplab.generate(model, PROMPTS, depth=0, max_new_tokens=40, ignore_eos=True).tokens
    ends = (free[1][17], free[2][0])
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=ends))
    decoded = trace(ending, PROMPTS, 4, max_new_tokens=40, **settings)
    for width in (64, 7):
        monkeypatch.setattr(tracing, "_GIVEN_TOKENS", width)
        given = trace(ending, PROMPTS, 4, output=decoded, **settings)
        assert same(given, decoded) and not given.approximate and not given.acceptance().approximate
        assert given.settings["given"] == {"own": True, "agreement": 1.0}
    if not settings:
        assert len(set(decoded.output_lengths.tolist())) > 2


def test_it_reads_few_passes(model):
    output = trace(model, PROMPTS, 1, max_new_tokens=40).outputs
    rounds = []
    trace(model, PROMPTS, 1, output=output, on_round=lambda progress: rounds.append(progress.rounds))
    assert rounds == [1] and len(output[0]) == 40


def test_anothers_output_is_an_approximation_and_says_so(model, whole, tmp_path):
    reference = trace(whole, PROMPTS, 1, max_new_tokens=48)
    found = trace(model, PROMPTS, 4, output=reference.outputs, quant_policy="int4")
    assert found.outputs == reference.outputs and found.approximate
    own = found.settings["given"]["agreement"]
    assert 0.5 < own < 1
    # by passes of its own: the share of tokens that this target would put there itself
    mine = count = 0
    for prompt, output in zip(PROMPTS[:2], reference.outputs[:2], strict=True):
        ids = model.encode(prompt)
        for at in range(0, 48, 6):
            mine += int(next_logits(model, ids + output[:at], "int4").argmax()) == output[at]
            count += 1
    assert abs(mine / count - own) < 0.25
    acceptance = found.acceptance()
    assert "approximate" in repr(found) and "approximate" in repr(acceptance)
    assert f"{100 * own:.1f} % of whose tokens" in str(acceptance) and "approximate: of an" in acceptance._repr_html_()
    assert all(record["approximate"] for record in acceptance.to_records())
    for name in VIEWS:
        view = acceptance.view(name, depths=(1, 2))
        assert "approximate: of an output that was given" in view.note
        assert all(record["approximate"] is True for record in view.to_records())
    assert "approximate at 0" in repr(AcceptanceSet([found]))
    assert "approximate" in Curve.of_acceptance(acceptance).source
    found.save(tmp_path / "given.safetensors")
    again = Trace.load(tmp_path / "given.safetensors")
    assert again.approximate and again.settings["given"] == found.settings["given"] and same(again, found)
    exact = trace(model, PROMPTS, 4, max_new_tokens=48, quant_policy="int4")
    assert "approximate" not in repr(exact) + str(exact.acceptance()) + exact.acceptance()._repr_html_()
    assert "approximate" not in Curve.of_acceptance(exact.acceptance()).source + repr(AcceptanceSet([exact]))
    assert not any(record["approximate"] for record in exact.acceptance().view("depth").to_records())


def test_drafts_are_asked_about_the_given_text(model, whole):
    """As a prompt's continuation: where the draft hits is what it drafts there, with the cache of that text."""
    reference = trace(model, PROMPTS, 1, max_new_tokens=32).outputs
    found = trace(whole, PROMPTS, 1, output=reference)
    start = 0
    for prompt, output in zip(PROMPTS, reference, strict=True):
        ids = model.encode(prompt)
        for slot in (0, 9, 30):
            # the head after the text up to here drafts token slot + 1: forced by an output of that one token more
            alone = trace(whole, [ids + output[:slot]], 1, output=[output[slot : slot + 2]])
            assert alone.hits[0, 0] == found.hits[start + slot, 0]
            # a prompt's pass and decoding part in the last bits
            assert alone.top[0, 0] == pytest.approx(found.top[start + slot, 0], abs=1e-3)
        start += len(output) - 1


def test_beside_the_exact_trace(model, whole):
    reference = trace(whole, PROMPTS, 4, max_new_tokens=48)
    approximate, exact = trace(model, PROMPTS, 4, output=reference), trace(model, PROMPTS, 4, max_new_tokens=48)
    found = against(approximate, exact)
    for line, depth in zip(found.to_records(), range(1, 5), strict=True):
        sides = [each.acceptance().stats(depth).acceptance_length for each in (approximate, exact)]
        assert (line["approximate"], line["exact"]) == pytest.approx(tuple(sides))
        assert line["difference"] == pytest.approx(sides[0] - sides[1]) and line["half_interval"] > 0
    assert "approximate" in str(found) and "% of the given tokens" in str(found)
    assert found._repr_html_().count("<tr>") == 5
    nothing = against(trace(model, PROMPTS, 4, output=exact), exact)
    assert [line["difference"] for line in nothing.to_records()] == [0.0] * 4 and not nothing.outside_chance
    with pytest.raises(ConfigError, match="approximate itself"):
        against(exact, approximate)
    with pytest.raises(ConfigError, match="expected the same prompts"):
        against(approximate, trace(model, PROMPTS[:2], 4, max_new_tokens=8))


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ([[1, 2]], "expected a trace of these prompts, or token ids for each of 2"),
        ([[1, 2], []], "output 1 is empty"),
        ([[1, 2], [99999]], "output 1 has token id 99999"),
        (["ab", "cd"], "output 0 is text"),
        ("ab", "expected a trace of these prompts"),
        (7, "output is 7"),
        ([[1, 2], [5] * 4095], "with 4095 new ones passes the model's max_position_embeddings"),
    ],
)
def test_outputs_that_are_none(model, output, said):
    with pytest.raises(ConfigError, match=said):
        trace(model, PROMPTS[:2], 2, output=output)


def test_a_trace_of_other_prompts(model, whole):
    other = trace(whole, PROMPTS[:3], 1, max_new_tokens=4)
    with pytest.raises(ConfigError, match="output is a trace of 3 prompts, and there are 2 here"):
        trace(model, PROMPTS[:2], 2, output=other)


def test_what_goes_on_past_the_end_is_not_its_own(model):
    free = trace(model, PROMPTS[:2], 2, max_new_tokens=12, ignore_eos=True)
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=(free.outputs[0][4],)))
    found = trace(ending, PROMPTS[:2], 2, output=free)
    assert found.approximate and found.settings["given"]["agreement"] == 1.0
    assert not trace(ending, PROMPTS[:2], 2, output=free, ignore_eos=True).approximate


@torch.inference_mode()
def test_states_after_each_token_stay_small(model):
    """Passes are narrower where a delta-rule layer's states after every token would take much."""
    asked = type("Asked", (), {})
    run = object.__new__(tracing.GivenRun)
    c = model.config
    run.given, run.model = [[1] * 500], asked()
    large = DeltaSpec(k_heads=16, v_heads=48, k_dim=128, v_dim=128, conv_kernel=4)
    layers = (*c.layers, dataclasses.replace(c.layers[0], mixer=large))
    run.model.config = dataclasses.replace(c, layers=layers)
    assert run._most_tokens(1) == 21 and run._most_tokens(8) == 2 and run._most_tokens(64) == 1
    run.model.config = c
    assert run._most_tokens(1) == 64
