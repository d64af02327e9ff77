"""Checkpoints of every family of which config.json or a tensor is wrong: opening, auditing, planning, counting memory,
loading and running work or raise a MtplabError, in seconds and little memory.

Seconds of what `python -m tests.fuzz --families` does for minutes; below it, faults that were found so, each with what
is right.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from mtplab import CheckpointError, load_model, memory, open_checkpoint
from mtplab.checkpoint.audit.expected import expected_modules
from mtplab.models.config import parse_config
from mtplab.models.families import registered
from mtplab.models.spec import MixtureSpec
from tests.family_checkpoints import STEP_TEXT, write_step3p7
from tests.family_mutations import WRITERS, run, write_all

EXAMPLES = int(os.environ.get("MTPLAB_FUZZ_EXAMPLES", "25"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("name", WRITERS)
def test_changed_checkpoints_raise_nothing_else(sources, tmp_path, name):
    first = Random(name).randrange(2**31)
    run(0, sources, tmp_path / "x", name)  # what is imported and compiled on first use counts for nobody
    reached = [run(first + i, sources, tmp_path / "x", name) for i in range(EXAMPLES)]
    # else this would test the JSON parser, or nothing
    assert 0 < reached.count("ran") < EXAMPLES


def test_every_family_is_among_them():
    assert len(WRITERS) > len(registered()) - 1


def read(changes: dict[str, Any], names: Any = None, base: dict[str, Any] = STEP_TEXT) -> Any:
    return parse_config(base | changes, names=names)


@pytest.mark.parametrize(
    "given", ["1" * 5000, "2,,3", "2,3,", "", "\u0662,3", "2,3,\u00b2", "1e1", "-1", ["x"], [2.0], 3, None]
)
def test_numbers_of_layers_with_experts_that_are_none(given):
    with pytest.raises(CheckpointError, match=r"moe_layers_enum is .*; expected numbers of the layers with experts"):
        read({"moe_layers_enum": given})


@pytest.mark.parametrize("given", ["2,3,4", " 2, 3 ,4 ", [2, 3, 4], ["2", "3", " 4"][:2] + [4]])
def test_numbers_of_layers_with_experts_however_they_are_written(given):
    found = read({"moe_layers_enum": given})
    feeds = [each.feed for each in (*found.layers, *found.draft_layers)]
    assert [isinstance(feed, MixtureSpec) for feed in feeds] == [False] * 2 + [True] * 3 + [False] * (len(feeds) - 5)


def test_the_audit_reads_those_numbers_as_the_model_does(tmp_path):
    folder = write_step3p7(tmp_path, text_only=True, moe_layers_enum="2,3,4")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"moe_layers_enum": "2, 3, 4"}))
    assert any(isinstance(each.feed, MixtureSpec) for each in load_model(folder).config.layers)
    assert "absent" not in {finding.kind for finding in open_checkpoint(folder).audit().findings}


@pytest.mark.parametrize(
    "changes, said",
    [
        # scaled for no layer at all, in silence
        ({"yarn_only_types": ["full_attentoin"]}, r"yarn_only_types is .*full_attention, sliding_attention"),
        ({"yarn_only_types": [3]}, "yarn_only_types"),
        ({"use_rope_layers": "false"}, "use_rope_layers is 'false'; expected true for every layer"),
        ({"use_rope_layers": 7}, "use_rope_layers is 7"),
    ],
)
def test_settings_of_rotation_that_mean_nothing(changes, said):
    with pytest.raises(CheckpointError, match=said):
        read(changes)
    assert read({"use_rope_layers": [True] * 8}).layers == read({}).layers


def test_a_stray_name_is_no_thousandth_layer_of_a_head(sources, tmp_path):
    """Qwen3-Next's config.json counts no head layers, so names do: one of 9999 would be as many caches."""
    source = sources["qwen3_next"]
    tensors = load_file(source / "model.safetensors")
    tensors["mtp.layers.9999.mlp.gate.weight"] = tensors["mtp.layers.0.mlp.gate.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"mtp\.layers\.9999\.\*; expected at most 16 layers of the MTP head"):
        load_model(tmp_path)
    assert "expected at most 16 layers" in memory(tmp_path).why


def test_an_audit_does_not_write_down_millions_of_experts(sources):
    config = json.loads((sources["deepseek_v3"] / "config.json").read_text())
    assert len(expected_modules(config, 1)) > 3 * 3 * 8
    begun = time.thread_time()
    assert expected_modules(config | {"n_routed_experts": 8_000_000}, 1) == {}
    assert time.thread_time() - begun < 3
    # Kimi-K2, the most modules that were published
    kimi = config | {"n_routed_experts": 384, "num_hidden_layers": 61}
    assert len(expected_modules(kimi, 1)) > 61 * 384 * 3


@pytest.mark.parametrize("given", [True, 3, "1", {"1": 1}])
def test_layers_without_experts_that_are_no_list(sources, tmp_path, given):
    config = json.loads((sources["qwen3_next"] / "config.json").read_text()) | {"mlp_only_layers": given}
    assert expected_modules(config, 1) == {}
    with pytest.raises(CheckpointError, match=r"mlp_only_layers is .*; expected a JSON list"):
        read({}, base=config)
