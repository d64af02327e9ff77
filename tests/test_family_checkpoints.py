"""The tiny checkpoints of `family_checkpoints`: published names, weights that transformers finds, logits apart, and FP8
that is what it was."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from family_checkpoints import FAMILIES, block_fp8, draft_names, load_target, ready_for_mtp, write_fp8
from mtplab import open_checkpoint

_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ROOT = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")


def _weights(at: str, *names: str) -> set[str]:
    return {f"{at}{name}.weight" for name in names}


def _experts(at: str, shared: str) -> set[str]:
    parts = [f"{each}.{part}_proj" for each in ("mlp.experts.N", f"mlp.{shared}") for part in ("gate", "up", "down")]
    return _weights(at, *parts, "mlp.gate")


_QK = ("self_attn.q_norm", "self_attn.k_norm")
_DEEPSEEK_ATTENTION = tuple(
    f"self_attn.{x}"
    for x in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
)
_STEP_MIXTURE = ("moe", "share_expert")
_NEXT = "model.layers.N."
_V3_HEAD = _weights(_NEXT, "enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head.norm", "shared_head.head")
_BIASES = {f"{_NEXT}{name}.bias" for name in _QKV}
_ROUTED = _experts(_NEXT, "shared_experts") | {f"{_NEXT}mlp.gate.e_score_correction_bias"}
# tensors of the releases, N for a number
PUBLISHED = {
    "qwen3_next": {
        *_ROOT,
        *_weights(_NEXT, *_MLP, *_NORMS, *_QKV, *_QK, "self_attn.o_proj", "mlp.shared_expert_gate"),
        *_weights(_NEXT, *(f"linear_attn.{x}" for x in ("in_proj_qkvz", "in_proj_ba", "conv1d", "norm", "out_proj"))),
        f"{_NEXT}linear_attn.A_log",
        f"{_NEXT}linear_attn.dt_bias",
        *_experts(_NEXT, "shared_expert"),
        *_weights("mtp.", "fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
        *_weights("mtp.layers.N.", *_NORMS, *_QKV, *_QK, "self_attn.o_proj", "mlp.shared_expert_gate"),
        *_experts("mtp.layers.N.", "shared_expert"),
    },
    "deepseek_v3": {*_ROOT, *_weights(_NEXT, *_MLP, *_NORMS, *_DEEPSEEK_ATTENTION), *_ROUTED, *_V3_HEAD},
    "glm4_moe": {
        *_ROOT, *_weights(_NEXT, *_MLP, *_NORMS, *_QKV, *_QK, "self_attn.o_proj"), *_BIASES, *_ROUTED, *_V3_HEAD,
    },
    "mimo": {
        *_ROOT,
        *_weights(_NEXT, *_MLP, *_NORMS, *_QKV, "self_attn.o_proj"),
        *_BIASES,
        *_weights("model.mtp_layers.N.", *_MLP, *_NORMS, *_QKV, "self_attn.o_proj"),
        *(f"model.mtp_layers.N.{name}.bias" for name in _QKV),
        *_weights(
            "model.mtp_layers.N.", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"
        ),
    },
    "step3p7": {
        *_ROOT,
        *_weights(_NEXT, *_MLP, *_NORMS, *_QKV, *_QK, "self_attn.o_proj", "self_attn.g_proj", "moe.gate"),
        *_weights(_NEXT, *(f"{each}.{part}_proj" for each in _STEP_MIXTURE for part in ("gate", "up", "down"))),
        f"{_NEXT}moe.router_bias",
        *_weights(_NEXT, "enorm", "hnorm", "eh_proj"),
        *_weights(f"{_NEXT}transformer.shared_head.", "norm", "output"),
    },
}  # fmt: skip
# other shapes of a family: without norms of q and k (GLM-4.5-Air), without a query rank (DeepSeek-V3's small ones)
OTHERS = [
    ("glm4_moe", {"use_qk_norm": False}),
    ("deepseek_v3", {"q_lora_rank": None}),
    ("deepseek_v3", {"heads": 2}),
    ("step3p7", {"text_only": True}),
    ("step3p7", {"heads": 1}),
]
CASES = [*((name, {}) for name in FAMILIES), *OTHERS]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder of a family with overrides, written once."""
    made = {}

    def get(name, overrides):
        key = (name, tuple(overrides))
        if key not in made:
            made[key] = FAMILIES[name](tmp_path_factory.mktemp(name), **overrides)
        return made[key]

    return get


@pytest.mark.parametrize("name", FAMILIES)
def test_names_are_those_of_the_releases(name, written):
    tensors = load_file(written(name, {}) / "model.safetensors")
    found = {re.sub(r"\.\d+(?=\.)", ".N", each) for each in tensors if not each.startswith(("vision", "vit_"))}
    assert found == PUBLISHED[name]


@pytest.mark.parametrize(("name", "overrides"), CASES, ids=str)
def test_transformers_finds_every_weight_and_spreads_its_logits(name, overrides, written):
    folder = written(name, overrides)
    model = load_target(folder)
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0]
    best = logits.topk(2, -1).values
    assert 2 < logits.std() < 8
    assert (best[:, 0] - best[:, 1]).median() > 0.5
    assert len(set(logits.argmax(-1).tolist())) > 10
    assert len(draft_names(folder)) >= 14


@pytest.mark.parametrize("name", FAMILIES)
def test_values_fit_bf16_and_norms_are_not_one(name, written):
    for each, value in load_file(written(name, {}) / "model.safetensors").items():
        assert torch.equal(value.float(), value.bfloat16().float()), each
        assert value.float().std() > 0.01 or "vision" in each, each


def test_a_lacking_weight_is_seen(tmp_path):
    from safetensors.torch import save_file

    folder = FAMILIES["glm4_moe"](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.experts.3.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((AssertionError, RuntimeError)):
        load_target(folder)
    save_file(tensors | {"model.layers.1.mlp.other": lost}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises((AssertionError, RuntimeError)):
        load_target(folder)


@pytest.mark.parametrize(("name", "overrides"), [("deepseek_v3", {}), ("glm4_moe", {}), ("step3p7", {"infix": ""})])
def test_transformers_drafts_with_the_head(name, overrides, written):
    """Text stays greedy's, and fewer passes than tokens are needed: the head is right now and then."""
    model = ready_for_mtp(load_target(written(name, overrides)))
    ids = torch.randint(0, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(ids, **settings)
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    drafted = model.generate(ids, use_mtp=True, **settings)
    handle.remove()
    assert torch.equal(plain, drafted)
    assert len(passes) < 56


@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_is_the_bf16_in_blocks(name, tmp_path):
    folder = write_fp8(name, tmp_path)
    ckpt, plain = open_checkpoint(folder), load_file(tmp_path / "bf16" / "model.safetensors")
    stored = load_file(folder / "model.safetensors")
    quantised = [each for each in plain if stored[each].dtype == torch.float8_e4m3fn]
    assert len(quantised) > len(plain) / 3
    assert {each for each in stored if each not in plain} == {f"{each}_scale_inv" for each in quantised}
    for each in quantised:
        size = plain[each].float().abs().amax()
        assert (ckpt.dequantize(each) - plain[each].float()).abs().max() <= size / 16, each
    for each in plain.keys() - set(quantised):
        assert torch.equal(stored[each], plain[each]), each
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["weight_block_size"] == [128, 128]


def test_blocks_are_scaled_one_by_one():
    weight = torch.randn(2, 130, 260, generator=torch.Generator().manual_seed(0))
    weight[:, 128:, :128] *= 1000
    codes, scale = block_fp8(weight)
    assert codes.shape == weight.shape and scale.shape == (2, 2, 3)
    whole = scale.repeat_interleave(128, 1)[:, :130].repeat_interleave(128, 2)[..., :260]
    # half a step of E4M3 is a 16th of a value, and 2^-10 of the scale below its normal numbers
    assert ((codes.float() * whole - weight).abs() <= weight.abs() / 16 + whole * 2**-10).all()
    for e, i, j in ((0, 0, 0), (1, 1, 0), (1, 1, 2)):
        block = weight[e, 128 * i : 128 * i + 128, 128 * j : 128 * j + 128]
        assert scale[e, i, j] == block.abs().max() / 448
