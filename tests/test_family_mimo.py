"""MiMo-7B: its target is transformers' Qwen2, its head an assembly of Qwen2's layers, and drafting stays lossless."""

from __future__ import annotations

import numpy as np
import pytest
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from family_checks import PROMPTS, changed, check_audit, check_head_setting, quantised_here
from family_definition import HeadModule, assembled, weights_of
from family_suite import EVERY_STAGE, RunsAsTransformers, family_fixtures
from mtplab import CheckpointError, load_model, open_checkpoint, trace

HEAD = "model.mtp_layers.0."

each, folder, pair = family_fixtures("mimo", {"published": {}})


class TestMiMo(RunsAsTransformers):
    family, layout = "mimo", "MiMo-7B"
    wrong = ({"masked": False}, {"hidden_first": False})
    stages = EVERY_STAGE
    faults = (
        ("num_nextn_predict_layers", 2, "num_nextn_predict_layers is 2; expected 0 or 1"),
        ("use_sliding_window", True, "use_sliding_window is true; expected false"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_type is 'yarn'"),
        ("attention_bias", "yes", "attention_bias is 'yes'; expected true or false"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
    )

    def heads_of(self, oracle, folder, masked: bool = True, hidden_first: bool = True) -> list[HeadModule]:
        config, names = oracle.config, ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        norms = [Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3)]
        order = {"masked": masked, "hidden_first": hidden_first}
        layer = Qwen2DecoderLayer(config, 0)
        return [assembled(weights_of(folder, HEAD), names, norms, layer, oracle.model.rotary_emb, **order)]


def test_served_as_vllm_does(pair, folder):
    """Before the target's final norm, after the head's own."""
    model, oracle = pair
    found = trace(model, PROMPTS, 3, max_new_tokens=12)
    spec = found.settings["spec"]
    assert (spec["target_hidden"], spec["draft_hidden"]) == ("pre_norm", "post_norm")
    other = trace(model, PROMPTS, 3, max_new_tokens=12, target_hidden="post_norm")
    assert found.outputs == other.outputs and np.nanmax(abs(found.top - other.top)) > 1e-3


def test_quantised_here_it_loads_as_quantised_at_load(tmp_path):
    written, loaded = quantised_here("mimo", tmp_path, depth=2)
    fp8 = [m.name for m in written.plan.modules if m.weight == "fp8"]
    assert fp8 == [m.name for m in loaded.plan.modules if m.weight == "fp8"] and any(HEAD in name for name in fp8)
    check_audit(tmp_path / "out", "MiMo-7B")


def test_a_head_that_is_not_there_is_named(folder, tmp_path):
    def lose(tensors, config):
        for name in [name for name in tensors if name.startswith(HEAD)]:
            tensors.pop(name)

    bare = changed(folder, tmp_path / "bare", lose)
    assert "no MTP head, though config.json promises 1" in str(open_checkpoint(bare).audit().head)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 1, but no tensor is named model.mtp_layers"):
        load_model(bare)


def test_position_0_and_the_order_matter(pair):
    """What is MiMo's own: zeros at position 0, the hidden state first."""
    head = pair[0].draft
    assert head.first_masked and head.hidden_first
    check_head_setting(pair[0], first_masked=False)
