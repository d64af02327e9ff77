"""Arithmetic that overflows is an error that says where, and what would change something."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mtplab import MtplabError, generate, load_model
from mtplab.config import SamplingConfig, SpecConfig
from mtplab.decode.runner import Run
from mtplab.models.norm import RMSNorm
from mtplab.quant.policy import resolve_policy


@pytest.fixture(scope="module")
def model(bundled):
    return load_model(bundled)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_non_finite_logits_are_told(model, temperature):
    """An overflow in the arithmetic is an error that names the prompt, not token 0."""
    broken = RMSNorm(torch.full_like(model.target.norm.weight, torch.inf), model.target.norm.eps)
    overflowing = dataclasses.replace(model, target=dataclasses.replace(model.target, norm=broken))
    with pytest.raises(MtplabError, match="prompt 0: the target's logits are NaN or infinite") as told:
        generate(overflowing, ["In the beginning God", "def f"], depth=1, max_new_tokens=4, temperature=temperature)
    assert "in float32 with no input rounded" in str(told.value), "nothing is left to set"


def test_a_round_that_overflows_names_its_prompt(model, monkeypatch):
    """The second prompt of the batch, in a round: the first goes on being fine."""
    policy = resolve_policy("none")
    settings = SpecConfig(depth=1), SamplingConfig(max_new_tokens=9)
    run = Run(model, [[5, 6], [7, 8]], *settings, policy, policy, exact=True)
    real = run.steps.verify

    def broken(*arguments):
        hidden, normed, logits = real(*arguments)
        logits[1, 0, 3] = torch.inf
        return hidden, normed, logits

    with torch.inference_mode():
        run.prefill()
        monkeypatch.setattr(run.steps, "verify", broken)
        with pytest.raises(MtplabError, match="prompt 1: the target's logits are NaN or infinite after 3 tokens"):
            run.round()


@pytest.mark.parametrize(
    "settings, names",
    [
        ({}, set()),
        ({"model_format": "fp8", "activation_rounding": False}, set()),
        ({"model_format": "fp8"}, {"activation_rounding=False"}),
        ({"model_format": "fp8", "exclude": ["*"]}, set()),
        ({"dtype": "bfloat16"}, {"dtype='float32'"}),
        ({"dtype": "float16", "model_format": "fp8"}, {"dtype='float32'", "activation_rounding=False"}),
    ],
)
def test_overflow_advice_names_what_would_change_something(bundled, settings, names):
    advice = load_model(bundled, **settings).overflow_advice()
    assert {name for name in ("activation_rounding=False", "dtype='float32'") if name in advice} == names
    assert advice.endswith(".") and ("load_model(" in advice) == bool(names)
