"""The oracle of heads: against mtplab where that runs the family, against transformers' own drafts, and able to tell
the conventions of engines apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from family_checkpoints import FAMILIES, load_target, ready_for_mtp, write_qwen3_5_moe
from family_heads import Convention, HeadOracle
from mtplab import load_model, trace
from mtplab.bench.peers.rounds import walk

PROMPTS = [[7], [3, 14, 15, 9, 26], [5, 35]]


@pytest.mark.parametrize("stages", [("post_norm", "post_norm"), ("pre_norm", "pre_norm"), ("post_norm", "pre_norm")])
def test_a_family_that_runs_here(tmp_path, stages):
    folder = write_qwen3_5_moe(tmp_path)
    settings = {"max_new_tokens": 20, "ignore_eos": True, "exact": True}
    made = trace(load_model(folder), PROMPTS, 3, target_hidden=stages[0], draft_hidden=stages[1], **settings)
    oracle = HeadOracle(folder, Convention(*stages))
    hits = np.split(np.asarray(made.hits), len(PROMPTS))
    assert made.hits[:, 0].mean() > 0.1
    for prompt, text, mine in zip(PROMPTS, made.outputs, hits, strict=True):
        np.testing.assert_array_equal(oracle.hits(prompt, text, 3)[0], mine)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_rounds_are_those_of_transformers(tmp_path, name):
    folder = FAMILIES[name](tmp_path)
    model, oracle = ready_for_mtp(load_target(folder)), HeadOracle(folder)
    settings = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for prompt in PROMPTS:
        passes: list[int] = []
        handle = model.register_forward_hook(lambda *_, seen=passes: seen.append(1))
        ids = model.generate(torch.tensor([prompt]), use_mtp=True, **settings)[0].tolist()
        handle.remove()
        hits, _ = oracle.hits(prompt, ids[len(prompt) :], 1)
        assert len(walk(hits.numpy(), 1)) == len(passes) - 1  # the first pass reads the prompt
    assert hits.any()


@pytest.mark.parametrize("name", FAMILIES)
def test_conventions_are_told_apart(tmp_path, name):
    folder = FAMILIES[name](tmp_path)
    plain = Convention()
    oracles = {"plain": HeadOracle(folder, plain)}
    changes = {"target_hidden": "pre_norm", "draft_hidden": "pre_norm", "masked": True}
    if name == "step3p7":
        changes["own_head"] = True
    ids = torch.randint(2, 64, (30,), generator=torch.Generator().manual_seed(2)).tolist()
    for key, value in changes.items():
        oracles[key] = HeadOracle(folder, replace(plain, **{key: value}))
    found = {}
    for key, oracle in oracles.items():
        hidden, _ = oracle.states(ids)
        rows = [oracle.drafts(ids, slot, 2, hidden[: slot + 1]) for slot in range(0, 28, 3)]
        found[key] = torch.stack(rows)
    first, second = found["plain"].unbind(1)
    for key in changes:
        one, two = found[key].unbind(1)
        assert (one.argmax(-1) != first.argmax(-1)).any() or (two.argmax(-1) != second.argmax(-1)).any(), key
        if key == "draft_hidden":
            assert torch.equal(one, first)
