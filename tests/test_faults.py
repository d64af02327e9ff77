"""Faults of a draft head that nothing reports: output stays right, acceptance collapses, and the workbench shows it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from faults import FAULTS, with_draft
from mtplab import compare_hidden, generate, load_model
from mtplab.models.norm import RMSNorm

PROMPTS = [
    "def main(argv):\n    import os",
    "In the beginning God created",
    "import sys\n\nclass Foo:\n    def __init__(self",
    "And the LORD spake unto Moses, saying,",
]


@pytest.fixture(scope="module")
def healthy(bundled):
    model = load_model(bundled)
    return model, generate(model, PROMPTS, depth=3, max_new_tokens=48)


@pytest.mark.parametrize("fault", list(FAULTS))
def test_fault_collapses_acceptance_and_nothing_else(healthy, fault):
    model, good = healthy
    bad = generate(FAULTS[fault](model), PROMPTS, depth=3, max_new_tokens=48)
    assert bad.tokens == good.tokens, "speculation is lossless: the output cannot show the fault"
    before, after = good.stats, bad.stats
    assert before.acceptance_length - 1 > 1.2
    assert after.acceptance_length - 1 < 0.3 * (before.acceptance_length - 1), after
    assert after.per_position[0] < 0.4 * before.per_position[0] and after.per_position[2] < 0.02, after


@pytest.mark.parametrize("stage", ["target_hidden", "draft_hidden"])
def test_hidden_stage_is_one_call_apart(healthy, stage):
    """The A/B of what the head reads and feeds back: same tokens, other drafts. The norms are made uneven for it, since
    the head normalises what it reads, and even weights make both stages alike."""
    model, _ = healthy
    uneven = 2.0 ** torch.linspace(-6, 6, model.config.hidden_size)
    mine, theirs = model.draft.modules[0].norm, model.target.norm
    model = with_draft(model, norm=RMSNorm(mine.weight * uneven.roll(7), mine.eps))
    target = dataclasses.replace(model.target, norm=RMSNorm(theirs.weight * uneven, theirs.eps))
    model = dataclasses.replace(model, target=target)
    after, before = (
        generate(model, PROMPTS, depth=3, max_new_tokens=24, **{stage: value}) for value in ("post_norm", "pre_norm")
    )
    assert after.tokens == before.tokens
    assert after.stats != before.stats


def test_hidden_stages_in_one_call(healthy):
    """All four choices at once; the engines' choice is the one `generate` makes."""
    model, good = healthy
    found = compare_hidden(model, PROMPTS, depth=3, max_new_tokens=48)
    assert len(found) == 4 and next(iter(found)) == ("post_norm", "post_norm")
    assert found["post_norm", "post_norm"] == good.stats
    assert found["pre_norm", "post_norm"].acceptance_length < good.stats.acceptance_length, "trained on post_norm"
