"""GLM-4.5 and its like: target, head and drafts are transformers', in BF16 and in FP8, and runs stay lossless."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

from family_checkpoints import load_target, write_fp8, write_glm4_moe
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
    check_transformers_drafts,
    dequantised,
    filled,
    weights_of,
)
from mtplab import CheckpointError, generate, load_model, trace
from mtplab.decode.peek import next_logits
from tiny import stacked

HEAD = "model.layers.3."
# GLM-4.5-Air has no norms of q and k; groups, and more than one shared expert, are DeepSeek-V3's and allowed here
SHAPES = {
    "glm-4.5": {},
    "air": {"use_qk_norm": False},
    "no biases": {"attention_bias": False, "first_k_dense_replace": 2},
    "groups": {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False, "use_qk_norm": False},
    "all experts": {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "num_key_value_heads": 4},
}


@pytest.fixture(scope="module", params=list(SHAPES))
def each(request, tmp_path_factory):
    """(our model, transformers') of every shape."""
    folder = write_glm4_moe(tmp_path_factory.mktemp("glm"), **SHAPES[request.param])
    return load_model(folder), load_target(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_glm4_moe(tmp_path_factory.mktemp("glm"))


@pytest.fixture(scope="module")
def pair(folder):
    return load_model(folder), load_target(folder)


def head_of(oracle, folder, masked: bool) -> HeadModule:
    """The head as vLLM runs it, or as transformers does, which masks nothing."""
    weights, config = weights_of(folder, HEAD), oracle.config
    own = ("enorm", "hnorm", "shared_head.norm")
    norms = [filled(Glm4MoeRMSNorm(64, config.rms_norm_eps), {"weight": weights.pop(f"{name}.weight")}) for name in own]
    fc = weights.pop("eh_proj.weight")
    for name in ("embed_tokens.weight", "shared_head.head.weight"):
        weights.pop(name)
    layer = filled(Glm4MoeDecoderLayer(config, config.num_hidden_layers), weights)
    return HeadModule(norms[0], norms[1], fc, layer, norms[2], oracle.model.rotary_emb, masked=masked)


@pytest.mark.parametrize("exact", [True, False])
def test_target_equals_transformers(each, exact):
    check_logits(*each, exact)


def test_ragged_batches_decode_as_transformers(each):
    check_greedy(*each)


def test_head_equals_an_assembly_of_transformers_layers(each):
    model, oracle = each
    folder = model.checkpoint.path
    check_head(model, oracle, [head_of(oracle, folder, True)])
    with pytest.raises(AssertionError):
        check_head(model, oracle, [head_of(oracle, folder, False)])


@pytest.mark.parametrize("hidden", ["post_norm", "pre_norm"])
def test_drafts_are_those_of_the_definition(pair, folder, hidden):
    model, oracle = pair
    check_drafts(model, Definition(oracle, [head_of(oracle, folder, True)], hidden, hidden))


def test_drafts_are_transformers(each):
    check_transformers_drafts(*each, prompt_seed=4)


@pytest.mark.slow
@pytest.mark.parametrize("weights, policy", TREATMENTS)
def test_lossless_and_traced_exactly(folder, weights, policy):
    check_lossless(load_model(folder, **WEIGHTS[weights]), policy)


@pytest.mark.parametrize("policy", ["none", "int4"])
def test_rejected_drafts_leave_no_trace(pair, policy):
    check_rollback(pair[0], policy)


def test_fp8_files_run(tmp_path):
    folder = write_fp8("glm4_moe", tmp_path / "fp8")
    plain = dequantised(folder, tmp_path / "plain")
    check_fp8(folder, plain, load_target(plain))
    check_audit(folder, "GLM-4.5")
    check_memory(folder)


def test_an_fp8_head_has_scales_of_its_own(folder, tmp_path):
    """GLM-4.5-Air-FP8 keeps the head's output matrix in FP8 under `weight_scale`: it is read, and not the target's."""

    def quantise(tensors, config):
        name = f"{HEAD}shared_head.head.weight"
        weight = tensors[name].float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{HEAD}shared_head.head.weight_scale"] = scale
        group = {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False, "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
        }
        ignored = ["lm_head", "re:.*self_attn.*", "re:.*mlp.*", "re:.*eh_proj"]
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group},
            "ignore": ignored, "quantization_status": "compressed",
        }  # fmt: skip

    model, shared = load_model(changed(folder, tmp_path / "own", quantise)), load_model(folder)
    assert shared.draft.modules[0].head is None and model.draft.modules[0].head.rounded == (True,)
    assert shared.draft.modules[0].embedding is shared.target.embedding
    own, targets = model.draft.modules[0].head.weights()[0], shared.target.head.weights()[0]
    assert 1e-4 < (own - targets).abs().max() < 0.05 * targets.abs().max()
    check_lossless(model, "none", (1, 2), 10)


def test_copies_that_differ_are_the_heads_own(folder, tmp_path):
    def differ(tensors, config):
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"{HEAD}{name}.weight"] = -tensors[f"{HEAD}{name}.weight"]

    model, shared = load_model(changed(folder, tmp_path / "own", differ)), load_model(folder)
    module = model.draft.modules[0]
    assert torch.equal(module.embedding, -shared.target.embedding)
    assert torch.equal(module.head.weights()[0], -shared.target.head.weights()[0])

    def lose(tensors, config):
        for name in ("embed_tokens", "shared_head.head"):
            tensors.pop(f"{HEAD}{name}.weight")

    without = load_model(changed(folder, tmp_path / "none", lose))
    settings = {"depth": 3, "max_new_tokens": 20}
    assert generate(without, PROMPTS, **settings).rounds == generate(shared, PROMPTS, **settings).rounds
    assert generate(model, PROMPTS, **settings).rounds != generate(shared, PROMPTS, **settings).rounds


def test_stacked_experts_are_the_single_ones(folder, tmp_path):
    """As transformers holds them in memory, and writes them where its renaming is off."""

    def stack(tensors, config):
        made = stacked(tensors)
        tensors.clear()
        tensors.update(made)

    other = load_model(changed(folder, tmp_path / "stack", stack))
    assert torch.equal(next_logits(other, PROMPTS[2]), next_logits(load_model(folder), PROMPTS[2]))
    assert generate(other, PROMPTS, depth=2).rounds == generate(load_model(folder), PROMPTS, depth=2).rounds


def test_said_of_the_file(folder):
    check_audit(folder, "GLM-4.5")
    check_memory(folder)
    check_memory(folder, model_format="fp8", exclude="none")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("n_group", 3, "n_group is 3; expected groups of 2 or more that n_routed_experts, 8, divide into"),
        ("topk_group", 2, "topk_group is 2; expected at most n_group, 1"),
        ("num_experts_per_tok", 9, "num_experts_per_tok is 9; expected at most 8"),
        ("use_qk_norm", "yes", "use_qk_norm is 'yes'; expected true or false"),
        ("rope_scaling", {"rope_type": "yarn"}, "rope_type is 'yarn'"),
        ("first_k_dense_replace", -1, "first_k_dense_replace is -1"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
    ],
)
def test_config_faults_are_named(folder, tmp_path, key, value, said):
    with pytest.raises(CheckpointError, match=said):
        load_model(changed(folder, tmp_path / "m", lambda tensors, config: config.update({key: value})))


def test_masking_is_the_familys(pair):
    """vLLM's zeros at position 0, which change what is drafted."""
    model = pair[0]
    assert model.draft.first_masked
    bare = dataclasses.replace(model, draft=dataclasses.replace(model.draft, first_masked=False))
    one, other = (trace(each, PROMPTS[:2], 2, max_new_tokens=8) for each in (model, bare))
    assert one.outputs == other.outputs and np.nanmax(abs(one.top - other.top)) > 1e-3
