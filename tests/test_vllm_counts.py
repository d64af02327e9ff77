"""mtplab on a tiny checkpoint of each family against what vLLM's CPU build gave there: `tests/peers/families.json`, by
`python -m tests.vllm_counts --record`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from family_checkpoints import FAMILIES
from vllm_counts import CASES, compared_with, digest_of_values, prompts_of, record, recorded

RECORDED = Path(__file__).parent / "peers" / "families.json"


@pytest.mark.parametrize("name", CASES)
def test_rounds_are_vllms(tmp_path, name):
    """In float32 every text and every round is vLLM's; in BF16 they part at near-ties alone."""
    case = CASES[name]
    weights, found = recorded(RECORDED, name)
    folder = case.write(tmp_path, **case.sizes)
    assert digest_of_values(folder) == weights, "the checkpoint is another: record vLLM's answers anew"
    compared = compared_with(folder, case, found)
    assert [x.depth for x in compared.depths] == list(range(1, case.deepest + 1))
    assert compared.unexplained == 0
    assert compared.depths[0].theirs.accepted > 0.05 * compared.depths[0].theirs.rounds
    if case.dtype == "float32":
        assert compared.tie < 1e-4
        for depth in compared.depths:
            assert depth.equal_texts == len(prompts_of(12)) and depth.theirs == depth.ours
        assert not compared.behind and not compared.drafts
        return
    # experts chosen otherwise make the farthest of BF16's margins wide; what differs is of the ordinary kind
    usual = compared.target_spread.most_of_99
    assert usual < 0.2 and len(compared.drafts) <= 3
    assert all(abs(each.lead) <= usual for each in (*compared.behind, *compared.drafts))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.dtype == "float32"])
def test_another_convention_is_seen(tmp_path, name):
    """The comparison fails where the head reads other hidden states than vLLM's does."""
    case, (_, found) = CASES[name], recorded(RECORDED, name)
    folder = case.write(tmp_path, **case.sizes)
    other = {"post_norm": "pre_norm", "pre_norm": "post_norm"}
    changed = [(other[case.stages[0]], case.stages[1])]
    if case.deepest > 1:
        changed.append((case.stages[0], other[case.stages[1]]))
    for stages in changed:
        assert compared_with(folder, replace(case, stages=stages), found).unexplained > 0, stages


def test_every_family_is_compared():
    assert set(CASES) == {*FAMILIES, "qwen3_5_moe"} == set(json.loads(RECORDED.read_text()))


def test_what_is_recorded_is_read_back(tmp_path):
    weights, found = recorded(RECORDED, "glm4_moe")
    folder = CASES["mimo"].write(tmp_path / "m", seed=3)
    for name in ("b", "a"):
        record(tmp_path / "kept.json", name, folder, found)
    assert recorded(tmp_path / "kept.json", "b") == (digest_of_values(folder), found)
    assert digest_of_values(folder) != weights
