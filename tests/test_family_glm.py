"""GLM-4.5 and its like: target, head and drafts are transformers', in BF16 and in FP8, and runs stay lossless."""

from __future__ import annotations

import torch
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRMSNorm

from family_checks import PROMPTS, changed, check_head_setting, check_lossless, stack_experts
from family_suite import HeadBehindTheTarget, family_fixtures
from mtplab import generate, load_model
from mtplab.decode.peek import next_logits

HEAD = "model.layers.3."
# GLM-4.5-Air has no norms of q and k; groups, and more than one shared expert, are DeepSeek-V3's and allowed here
SHAPES = {
    "glm-4.5": {},
    "air": {"use_qk_norm": False},
    "no biases": {"attention_bias": False, "first_k_dense_replace": 2},
    "groups": {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False, "use_qk_norm": False},
    "all experts": {"first_k_dense_replace": 0, "partial_rotary_factor": 1.0, "num_key_value_heads": 4},
}

each, folder, pair = family_fixtures("glm4_moe", SHAPES)


class TestGlm(HeadBehindTheTarget):
    family, layout = "glm4_moe", "GLM-4.5"
    norm, layer = Glm4MoeRMSNorm, Glm4MoeDecoderLayer
    prompt_seed = 4
    faults = (
        ("n_group", 3, "n_group is 3; expected groups of 2 or more that n_routed_experts, 8, divide into"),
        ("topk_group", 2, "topk_group is 2; expected at most n_group, 1"),
        ("num_experts_per_tok", 9, "num_experts_per_tok is 9; expected at most 8"),
        ("use_qk_norm", "yes", "use_qk_norm is 'yes'; expected true or false"),
        ("rope_scaling", {"rope_type": "yarn"}, "rope_type is 'yarn'"),
        ("first_k_dense_replace", -1, "first_k_dense_replace is -1"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
    )


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


def test_stacked_experts_are_the_single_ones(folder, tmp_path):
    other = load_model(changed(folder, tmp_path / "stack", stack_experts))
    assert torch.equal(next_logits(other, PROMPTS[2]), next_logits(load_model(folder), PROMPTS[2]))
    assert generate(other, PROMPTS, depth=2).rounds == generate(load_model(folder), PROMPTS, depth=2).rounds


def test_masking_is_the_familys(pair):
    """vLLM's zeros at position 0, which change what is drafted."""
    model = pair[0]
    assert model.draft.first_masked
    check_head_setting(model, first_masked=False)
