"""Faults of a draft head that nothing reports: output stays right, acceptance collapses, and the workbench shows it."""

from __future__ import annotations

import pytest

from mtplab import generate, load_model
from faults import FAULTS

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
    assert good.stats.per_position[0] > 0.45
    assert bad.stats.per_position[0] < 0.35 * good.stats.per_position[0], bad.stats
    assert bad.stats.acceptance_length < 1 + 0.35 * (good.stats.acceptance_length - 1)


def test_hidden_stage_is_one_call_apart(healthy):
    """The A/B of what the head reads and feeds back: same tokens, another acceptance."""
    model, good = healthy
    for stage in ({"target_hidden": "pre_norm"}, {"draft_hidden": "pre_norm"}):
        other = generate(model, PROMPTS, depth=3, max_new_tokens=48, **stage)
        assert other.tokens == good.tokens
        assert other.stats.rounds != good.stats.rounds
