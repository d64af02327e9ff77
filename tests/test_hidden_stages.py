"""What a head reads and is fed back where nobody says: as its family is served, in runs, traces, rows and hashes."""

from __future__ import annotations

import json

import pytest

from family_checkpoints import FAMILIES
from mtplab import ConfigError, generate, load_model, open_checkpoint, sweep, trace
from mtplab.config import EngineConfig, SamplingConfig, SpecConfig
from mtplab.models.asked import as_served
from mtplab.models.families import registered
from mtplab.study.grid import Settings, build_units
from mtplab.study.hidden import compare_hidden
from mtplab.study.prompts import load_prompts

PROMPTS = [[5, 9, 3], [7, 2, 8, 4]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GLM-4.5, whose two stages differ."""
    return FAMILIES["glm4_moe"](tmp_path_factory.mktemp("glm"))


def planned(folder, **stages):
    """The one point of a sweep, planned from headers."""
    sampling = SamplingConfig(max_new_tokens=4)
    settings = Settings(EngineConfig(), SpecConfig(**stages), sampling)
    prompts = [load_prompts(PROMPTS)]
    checkpoint = open_checkpoint(folder)
    return build_units(checkpoint, settings, (1,), prompts, (None,), None, ("none",), None, (0.0,))[0].config


def test_runs_and_traces_say_what_was_read(folder):
    model = load_model(folder)
    run, found = generate(model, PROMPTS, 3, max_new_tokens=8), trace(model, PROMPTS, 3, max_new_tokens=8)
    for spec in (run.settings["spec"], found.settings["spec"]):
        assert (spec["target_hidden"], spec["draft_hidden"]) == ("post_norm", "pre_norm")
    named = {"target_hidden": "post_norm", "draft_hidden": "pre_norm"}
    assert trace(model, PROMPTS, 3, max_new_tokens=8, **named).top.tobytes() == found.top.tobytes()
    other = trace(model, PROMPTS, 3, max_new_tokens=8, draft_hidden="post_norm")
    assert other.settings["spec"]["draft_hidden"] == "post_norm"
    assert other.top[:, 1:].tobytes() != found.top[:, 1:].tobytes(), "and it matters from the second draft on"
    assert next(iter(compare_hidden(model, PROMPTS, 2, max_new_tokens=4))) == ("post_norm", "pre_norm")
    with pytest.raises(ConfigError, match="draft_hidden"):
        generate(model, PROMPTS, 1, draft_hidden="mid_norm")


def test_a_sweep_is_planned_with_them_and_its_rows_say_so(folder, tmp_path):
    own, named = planned(folder), planned(folder, target_hidden="post_norm", draft_hidden="pre_norm")
    assert (own.target_hidden, own.draft_hidden) == ("post_norm", "pre_norm") and own.hash() == named.hash()
    assert planned(folder, draft_hidden="post_norm").hash() != own.hash()
    rows = sweep(folder, PROMPTS, depths=[1], max_new_tokens=4, results=tmp_path, quality=False).rows
    assert [row.provenance["config"]["draft_hidden"] for row in rows] == ["pre_norm"]


def test_qwens_points_are_those_they_were(bundled):
    """Its defaults are those that all families had, so that kept results are found again."""
    default, named = planned(bundled), planned(bundled, target_hidden="post_norm", draft_hidden="post_norm")
    assert default.hash() == named.hash()


def test_stages_of_families(tmp_path):
    """As vLLM 0.32 serves them."""
    found = {f.model_types[0]: (f.target_hidden, f.draft_hidden) for f in registered()}
    before = {name: stages for name, stages in found.items() if "pre_norm" in stages}
    assert before == {
        "glm4_moe": ("post_norm", "pre_norm"),
        "mimo": ("pre_norm", "post_norm"),
        "step3p5": ("pre_norm", "pre_norm"),
    }
    config = json.loads((FAMILIES["glm4_moe"](tmp_path) / "config.json").read_text())
    assert as_served(SpecConfig(draft_hidden="post_norm"), config).draft_hidden == "post_norm"
    # of a family that is not run: a sweep with a `load_model` of its own is planned all the same
    stranger = as_served(SpecConfig(depth=2), {"model_type": "unheard_of"})
    assert (stranger.target_hidden, stranger.draft_hidden, stranger.depth) == ("post_norm", "post_norm", 2)
