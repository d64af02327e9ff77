"""MiMo-7B: its target is transformers' Qwen2, its head an assembly of Qwen2's layers, and drafting stays lossless."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from family_checkpoints import load_target, write_fp8, write_mimo
from family_checks import (
    PROMPTS,
    TREATMENTS,
    WEIGHTS,
    Definition,
    HeadModule,
    changed,
    check_audit,
    check_drafts,
    check_fp8,
    check_greedy,
    check_head,
    check_logits,
    check_lossless,
    check_memory,
    check_rollback,
    dequantised,
    filled,
    weights_of,
)
from mtplab import CheckpointError, generate, load_model, open_checkpoint, quantize_checkpoint, trace

HEAD = "model.mtp_layers.0."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mimo(tmp_path_factory.mktemp("mimo"))


@pytest.fixture(scope="module")
def pair(folder):
    """(our model, transformers')."""
    return load_model(folder), load_target(folder)


def head_of(oracle, folder, masked: bool = True, hidden_first: bool = True) -> HeadModule:
    """The head of Qwen2's modules, as vLLM puts it together."""
    weights, config = weights_of(folder, HEAD), oracle.config
    own = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    norms = [
        filled(Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps), {"weight": weights.pop(f"{name}.weight")})
        for name in own
    ]
    fc = weights.pop("input_proj.weight")
    layer = filled(Qwen2DecoderLayer(config, 0), weights)
    return HeadModule(norms[0], norms[1], fc, layer, norms[2], oracle.model.rotary_emb, hidden_first, masked)


@pytest.mark.parametrize("exact", [True, False])
def test_target_equals_transformers(pair, exact):
    check_logits(*pair, exact)


def test_ragged_batches_decode_as_transformers(pair):
    check_greedy(*pair)


def test_head_equals_an_assembly_of_transformers_layers(pair, folder):
    model, oracle = pair
    check_head(model, oracle, [head_of(oracle, folder)])
    for wrong in ({"masked": False}, {"hidden_first": False}):
        with pytest.raises(AssertionError):
            check_head(model, oracle, [head_of(oracle, folder, **wrong)])


@pytest.mark.parametrize("draft_hidden", ["post_norm", "pre_norm"])
@pytest.mark.parametrize("target_hidden", ["post_norm", "pre_norm"])
def test_drafts_are_those_of_the_definition(pair, folder, target_hidden, draft_hidden):
    model, oracle = pair
    check_drafts(model, Definition(oracle, [head_of(oracle, folder)], draft_hidden, target_hidden))


def test_served_as_vllm_does(pair, folder):
    """Before the target's final norm, after the head's own."""
    model, oracle = pair
    found = trace(model, PROMPTS, 3, max_new_tokens=12)
    spec = found.settings["spec"]
    assert (spec["target_hidden"], spec["draft_hidden"]) == ("pre_norm", "post_norm")
    other = trace(model, PROMPTS, 3, max_new_tokens=12, target_hidden="post_norm")
    assert found.outputs == other.outputs and np.nanmax(abs(found.top - other.top)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("weights, policy", TREATMENTS)
def test_lossless_and_traced_exactly(folder, weights, policy):
    check_lossless(load_model(folder, **WEIGHTS[weights]), policy)


@pytest.mark.parametrize("policy", ["none", "int4"])
def test_rejected_drafts_leave_no_trace(pair, policy):
    check_rollback(pair[0], policy)


def test_fp8_files_run(tmp_path):
    folder = write_fp8("mimo", tmp_path / "fp8")
    plain = dequantised(folder, tmp_path / "plain")
    check_fp8(folder, plain, load_target(plain))
    check_audit(folder, "MiMo-7B")
    check_memory(folder)


def test_quantised_here_it_loads_as_quantised_at_load(tmp_path):
    write_fp8("mimo", tmp_path / "f")
    source = tmp_path / "f" / "bf16"
    quantize_checkpoint(source, tmp_path / "out", format="fp8-block")
    written, loaded = load_model(tmp_path / "out"), load_model(source, model_format="fp8")
    fp8 = [m.name for m in written.plan.modules if m.weight == "fp8"]
    assert fp8 == [m.name for m in loaded.plan.modules if m.weight == "fp8"] and any(HEAD in name for name in fp8)
    runs = [generate(each, PROMPTS, depth=2, max_new_tokens=12) for each in (written, loaded)]
    assert runs[0].tokens == runs[1].tokens and runs[0].rounds == runs[1].rounds
    check_audit(tmp_path / "out", "MiMo-7B")


def test_said_of_the_file(folder):
    check_audit(folder, "MiMo-7B")
    check_memory(folder)
    check_memory(folder, model_format="fp8", exclude="none")


def test_a_head_that_is_not_there_is_named(folder, tmp_path):
    def lose(tensors, config):
        for name in [name for name in tensors if name.startswith(HEAD)]:
            tensors.pop(name)

    bare = changed(folder, tmp_path / "bare", lose)
    assert "no MTP head, though config.json promises 1" in str(open_checkpoint(bare).audit().head)
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers is 1, but no tensor is named model.mtp_layers"):
        load_model(bare)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("num_nextn_predict_layers", 2, "num_nextn_predict_layers is 2; expected 0 or 1"),
        ("use_sliding_window", True, "use_sliding_window is true; expected false"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_type is 'yarn'"),
        ("attention_bias", "yes", "attention_bias is 'yes'; expected true or false"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
    ],
)
def test_config_faults_are_named(folder, tmp_path, key, value, said):
    with pytest.raises(CheckpointError, match=said):
        load_model(changed(folder, tmp_path / "m", lambda tensors, config: config.update({key: value})))


def test_position_0_and_the_order_matter(pair):
    """What is MiMo's own: zeros at position 0, the hidden state first."""
    head = pair[0].draft
    assert head.first_masked and head.hidden_first
    bare = dataclasses.replace(pair[0], draft=dataclasses.replace(head, first_masked=False))
    one, other = (trace(each, PROMPTS[:2], 2, max_new_tokens=8) for each in (pair[0], bare))
    assert one.outputs == other.outputs and np.nanmax(abs(one.top - other.top)) > 1e-3
