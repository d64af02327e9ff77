"""A model with other exclusions is the one that loading gives, and shares what both treat alike."""

import pytest
import torch

import mtplab
from mtplab.decode.peek import next_logits
from mtplab.errors import ConfigError

PROMPTS = ["Once upon a time", "def main():"]
SETS = (
    {"exclude": "none"},
    {"exclude": "published"},
    # parts of packed layers: q without k and v, one of four projections of the delta rule, gate without up
    {"exclude": ["model.layers.3.self_attn.q_proj", "*.in_proj_z", "mtp.layers.0.mlp.gate_proj"]},
    {"exclude": "none", "draft_exclude": ["mtp.fc"]},
    {"exclude": ["*"]},
)


@pytest.fixture(scope="module")
def model(bundled):
    return mtplab.load_model(bundled)


def same(one, other) -> None:
    """Every weight, its rounding, and what comes out, to the last bit."""
    for mine, theirs in ((one.target, other.target), (one.draft, other.draft)):
        for a, b in zip(mine.linears(), theirs.linears(), strict=True):
            assert (a.names, a.rounded) == (b.names, b.rounded)
            assert all(torch.equal(x, y) for x, y in zip(a.weights(), b.weights(), strict=True)), a.names
    ids = one.encode(PROMPTS[0])
    assert torch.equal(next_logits(one, ids), next_logits(other, ids))
    runs = [mtplab.generate(each, PROMPTS, depth=3, max_new_tokens=12) for each in (one, other)]
    assert runs[0].tokens == runs[1].tokens and runs[0].per_prompt == runs[1].per_prompt


@pytest.mark.parametrize("settings", SETS, ids=str)
def test_it_is_what_loading_gives(bundled, model, settings):
    same(
        model.with_exclusions(**settings, model_format="fp8"),
        mtplab.load_model(bundled, model_format="fp8", **settings),
    )


def test_from_one_set_to_the_next_and_back(bundled, model):
    here = model
    for settings in SETS:
        here = here.with_exclusions(**settings, model_format="fp8")
    same(here, model)
    same(here.with_exclusions("published"), mtplab.load_model(bundled, model_format="fp8"))
    # none of it touched the model it began with
    same(model, mtplab.load_model(bundled))


def test_only_what_changes_is_built(model):
    whole = model.with_exclusions("none", model_format="fp8")
    less = whole.with_exclusions(["mtp.fc", "model.layers.1.mlp.up_proj"])
    built = [
        a.names
        for mine, theirs in ((whole.target, less.target), (whole.draft, less.draft))
        for a, b in zip(mine.linears(), theirs.linears(), strict=True)
        if a is not b
    ]
    assert built == [("model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"), ("mtp.fc",)]
    assert less.target.embedding is model.target.embedding and less.engine.exclude == ("mtp.fc", built[0][1])


def test_a_stored_fp8_model_only_rounds_otherwise(bundled_fp8):
    stored = mtplab.load_model(bundled_fp8)
    settings = {"exclude": ["*.o_proj", "*.gate_proj"]}
    same(stored.with_exclusions(**settings), mtplab.load_model(bundled_fp8, **settings))


def test_a_pattern_that_covers_nothing_is_named(model):
    with pytest.raises(ConfigError, match="matches no module"):
        model.with_exclusions(["mtp.fcc"], model_format="fp8")
