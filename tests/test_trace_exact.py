"""A trace is the runner's, round for round, whatever is excluded and however prompts and outputs end."""

import dataclasses

import pytest

import mtplab
from mtplab.checkpoint.planted import plant
from mtplab.decode import runner
from mtplab.study.trace import trace

PROMPTS = ["Once upon a time there was a king who", "def main():", "In the", "The", "import os\n\n\ndef"]


def same_counts(model, prompts, depths=(1, 3, 8), **settings) -> mtplab.study.trace.Trace:
    settings = {"max_new_tokens": 24, "exact": True, **settings}
    found = trace(model, prompts, max_depth=max(depths), **settings)
    for depth in depths:
        run = mtplab.generate(model, prompts, depth=depth, **settings)
        assert run.tokens == found.outputs
        assert found.acceptance().per_prompt(depth) == run.per_prompt, depth
        assert found.acceptance().stats(depth) == run.stats
    return found


@pytest.mark.parametrize(
    "weights",
    [
        {"exclude": "published"},
        {"exclude": "none"},
        {"exclude": ["mtp.*"]},
        {"exclude": "published", "draft_exclude": "none"},
        {"exclude": ["*.down_proj", "mtp.layers.*"]},
    ],
    ids=str,
)
def test_whatever_is_excluded_of_a_bf16_checkpoint(bundled, weights):
    same_counts(mtplab.load_model(bundled, model_format="fp8", **weights), PROMPTS)


@pytest.mark.parametrize("draft_exclude", ["published", "none"])
def test_the_planted_weakness(bundled, tmp_path, draft_exclude):
    weak = plant(bundled, tmp_path / "weak").path
    model = mtplab.load_model(weak, model_format="fp8", exclude="published", draft_exclude=draft_exclude)
    same_counts(model, PROMPTS[:3])


@pytest.fixture(scope="module")
def model(bundled_fp8):
    return mtplab.load_model(bundled_fp8)


@pytest.mark.parametrize("max_batch", [1, 2, 5])
def test_however_ragged_prompts_are_batched(model, max_batch):
    prompts = [*PROMPTS, PROMPTS[0] * 9]
    found = same_counts(model, prompts, max_batch=max_batch, quant_policy="int4", draft_quant_policy="fp8")
    assert found.prompt_lengths.tolist() == [len(model.encode(prompt)) for prompt in prompts]


def test_prompts_of_several_segments(model, monkeypatch):
    monkeypatch.setattr(runner, "SEGMENT", 64)
    same_counts(model, [PROMPTS[0] * 12, PROMPTS[1]], depths=(4,), quant_policy="int8", max_new_tokens=12)


def test_an_output_that_ends(model):
    free = mtplab.generate(model, PROMPTS, depth=0, max_new_tokens=40, ignore_eos=True).tokens
    # in the midst of one, at the first token of another
    ends = (free[1][17], free[2][0])
    ending = dataclasses.replace(model, config=dataclasses.replace(model.config, eos_token_ids=ends))
    found = same_counts(ending, PROMPTS, depths=(1, 2, 5, 8), max_new_tokens=40)
    assert found.output_lengths[2] == 1 and 1 < found.output_lengths[1] <= 18
    assert len(set(found.output_lengths.tolist())) > 2
    alone = same_counts(ending, [PROMPTS[2]], max_new_tokens=40)
    assert alone.acceptance().length(8) is None and alone.acceptance().stats(3).rounds == 0


@pytest.mark.parametrize("tokens", [1, 2])
def test_outputs_of_a_token_or_two(model, tokens):
    same_counts(model, PROMPTS, max_new_tokens=tokens)


@pytest.mark.parametrize("drafts", ["greedy", "sampled"])
def test_the_output_is_plain_decodings_above_temperature_0(model, drafts):
    sampling = {"temperature": 0.9, "top_k": 30, "top_p": 0.9, "seed": 4, "max_new_tokens": 16}
    found = trace(model, PROMPTS, 4, draft_sampling=drafts, max_batch=2, **sampling)
    assert found.outputs == mtplab.generate(model, PROMPTS, depth=0, max_batch=2, **sampling).tokens
