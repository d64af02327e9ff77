"""A trace is the runner's, round for round, whatever is excluded and however prompts and outputs end."""

import dataclasses

import pytest
import torch

import mtplab
from mtplab.checkpoint.planted import plant
from mtplab.decode import runner
from mtplab.models.cache import slot_base, slot_index
from mtplab.quant.policy import resolve_policy
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


@pytest.mark.parametrize("policy", ["none", "int8", "int4", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [1, 4, 5], [0, 2, 3, 5], [5], [0, 1]], ids=str)
def test_a_cache_that_shrinks_holds_what_one_of_the_chosen_would(model, policy, rows):
    """In another order, and written to afterwards like any other."""
    kept = model.config.draft_layers[0].rows
    heads, d = kept.heads, kept.dim
    (whole,) = model.draft_caches(1, 6, 256, resolve_policy(policy))
    draw = torch.Generator().manual_seed(1)

    def write(cache, at: int, values: torch.Tensor) -> None:
        base = slot_base(cache.room, heads, 256, model.device)[:, : values.shape[1]]
        cache.write(slot_index(torch.full((values.shape[1], 1), at), base), values.reshape(-1, d))

    for at in range(3):
        write(whole, at, torch.randn(2, 6, heads, d, generator=draw))
    smaller, chosen = whole.fork(torch.arange(6), 256), whole.fork(torch.tensor(rows), 256)
    order = smaller.shrink(torch.tensor(rows))
    assert sorted(order.tolist()) == rows and smaller.room == 6
    place = torch.tensor([order.tolist().index(row) for row in rows])
    new = torch.randn(2, len(rows), heads, d, generator=draw)
    write(chosen, 3, new)
    write(smaller, 3, new[:, [rows.index(row) for row in order.tolist()]])
    for mine, theirs in zip(smaller.read(4), chosen.read(4), strict=True):
        assert torch.equal(mine[place], theirs)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "int4"])
def test_with_kernels_interpreted(bundled, monkeypatch, policy):
    """A draft that kernels read for: the caches hold codes only, and are copied as such."""
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    model = mtplab.load_model(bundled)
    settings = {"quant_policy": policy, "max_new_tokens": 6}
    found = trace(model, PROMPTS[1:3], max_depth=2, **settings)
    run = mtplab.generate(model, PROMPTS[1:3], depth=2, **settings)
    assert run.tokens == found.outputs and run.per_prompt == found.acceptance().per_prompt(2)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    again = trace(mtplab.load_model(bundled), PROMPTS[1:3], max_depth=2, **settings)
    assert (again.hits == found.hits).all() and found.hits.any() and not found.hits.all()
