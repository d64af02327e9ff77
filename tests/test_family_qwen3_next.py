"""Qwen3-Next: target and head are transformers', in BF16 and in FP8, and runs stay lossless."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRMSNorm

from family_checkpoints import write_fp8, write_qwen3_next
from family_checks import PROMPTS, changed, stack_experts
from family_definition import HeadModule, assembled, weights_of
from family_suite import RunsAsTransformers, family_fixtures
from mtplab import CheckpointError, generate, load_model
from mtplab.checkpoint.experts import stacked_parts
from mtplab.checkpoint.header import TensorInfo
from mtplab.decode.peek import next_logits
from mtplab.models.config import parse_config
from tiny import stacked

SHAPES = {
    "published": {},
    # heads of q, k and v of other sizes and numbers, so that their order in a projection tells
    "three value heads to a key head": {
        "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "mlp_only_layers": [],
    },
    "one value head to a key head": {"linear_num_key_heads": 4, "norm_topk_prob": False, "num_experts_per_tok": 3},
    "every second layer mixed": {"decoder_sparse_step": 2, "mlp_only_layers": None, "full_attention_interval": 2},
}  # fmt: skip

each, folder, pair = family_fixtures("qwen3_next", SHAPES)


class TestQwen3Next(RunsAsTransformers):
    family, layout = "qwen3_next", "Qwen3-Next"
    faults = (
        ("mlp_only_layers", ["1"], r"mlp_only_layers is \['1'\]; expected a list of layers' numbers"),
        ("mlp_only_layers", 1, "mlp_only_layers is 1; expected a JSON list"),
        ("decoder_sparse_step", 0, "decoder_sparse_step is 0"),
        ("num_nextn_predict_layers", 40, "num_nextn_predict_layers is 40"),
        ("attention_bias", True, "attention_bias is true; expected false"),
        ("linear_num_value_heads", 3, "linear_num_value_heads is 3; expected a multiple of 2"),
        ("layer_types", ["full_attention"], "layer_types has 1 entries"),
    )

    def heads_of(self, oracle, folder) -> list[HeadModule]:
        config = copy.deepcopy(oracle.config)
        # the head's layer alone: attention, and experts as its own number has it
        config.layer_types = ["full_attention"]
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        around = weights_of(folder, "mtp.")
        weights = weights_of(folder, "mtp.layers.0.") | {f"{name}.weight": around[f"{name}.weight"] for name in names}
        norms = [Qwen3NextRMSNorm(64, config.rms_norm_eps) for _ in range(3)]
        return [assembled(weights, names, norms, Qwen3NextDecoderLayer(config, 0), oracle.model.rotary_emb)]

    def test_fp8_files_run(self, tmp_path):
        """Among others `in_proj_qkvz`, whose blocks of scales hold parts of heads."""
        super().test_fp8_files_run(tmp_path)
        inputs = load_model(tmp_path / "fp8").target.layers[0].mixer.inputs
        assert dict(zip(inputs.names, inputs.rounded, strict=True)) == {
            "model.layers.0.linear_attn.in_proj_qkvz": True, "model.layers.0.linear_attn.in_proj_ba": False,
        }  # fmt: skip

    def test_said_of_the_file(self, each):
        super().test_said_of_the_file(each[0].checkpoint.path)


def test_stacked_experts_are_the_single_ones(folder, tmp_path):
    other = load_model(changed(folder, tmp_path / "stack", stack_experts))
    assert torch.equal(next_logits(other, PROMPTS[2]), next_logits(load_model(folder), PROMPTS[2]))
    fp8 = [load_model(path, model_format="fp8", exclude="none") for path in (folder, tmp_path / "stack")]
    assert torch.equal(next_logits(fp8[0], PROMPTS[2]), next_logits(fp8[1], PROMPTS[2]))


def test_stacked_fp8_experts_are_the_single_ones(tmp_path):
    """Codes and scales stacked alike, gate above up: 128 inner features are whole blocks."""
    single = write_fp8("qwen3_next", tmp_path / "fp8")

    def stack(tensors, config):
        scales = {n.removesuffix("_scale_inv"): tensors.pop(n) for n in list(tensors) if n.endswith("_scale_inv")}
        codes = {name: value.view(torch.uint8) for name, value in tensors.items() if name in scales}
        found = stacked(codes), stacked(scales)
        for name in codes:
            tensors.pop(name)
        for name, value in found[0].items():
            tensors[name] = value.view(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = found[1][name]

    model, other = load_model(single), load_model(changed(single, tmp_path / "stack", stack))
    assert other.plan.by_name["model.layers.0.mlp.experts.gate_up_proj"].weight == "fp8"
    assert torch.equal(next_logits(other, PROMPTS[2]), next_logits(model, PROMPTS[2]))
    settings = {"depth": 2, "max_new_tokens": 12}
    assert generate(other, PROMPTS, **settings).rounds == generate(model, PROMPTS, **settings).rounds


def test_a_stack_is_known_by_its_sizes():
    config = {"model_type": "qwen3_next", "num_experts": 8, "hidden_size": 64, "moe_intermediate_size": 32}
    info = TensorInfo("a.experts.gate_up_proj", "BF16", (8, 64, 64), None, 0, 0)
    assert stacked_parts(info, config) == ("gate_proj", "up_proj")
    assert not stacked_parts(info, config | {"num_experts": 4})


def test_head_layers_are_counted_on_disk(folder, tmp_path):
    """The published config.json says nothing of a head, and neither does one beside what transformers saves."""
    config = json.loads((folder / "config.json").read_text())
    assert not any("mtp" in key or "nextn" in key for key in config)
    assert load_model(folder).config.mtp_layers == 1 == parse_config(config).mtp_layers
    assert parse_config(config, names=()).mtp_layers == 0
    assert parse_config(config | {"num_nextn_predict_layers": 2}).mtp_layers == 2

    def headless(tensors, config):
        for name in [name for name in tensors if name.startswith("mtp.")]:
            tensors.pop(name)

    bare = load_model(changed(folder, tmp_path / "bare", headless))
    assert bare.draft is None
    assert generate(bare, PROMPTS, depth=0, max_new_tokens=8).tokens

    def second(tensors, config):
        for name in [name for name in tensors if name.startswith("mtp.layers.0.")]:
            tensors[name.replace(".0.", ".1.", 1)] = tensors[name].clone()

    alike = write_qwen3_next(tmp_path / "alike", mlp_only_layers=[])
    assert load_model(changed(alike, tmp_path / "two", second)).config.mtp_layers == 2

    def torn(tensors, config):
        for name in [name for name in tensors if name.startswith("mtp.layers.")]:
            tensors.pop(name)

    with pytest.raises(CheckpointError, match=r"mtp\.layers\.0\."):
        load_model(changed(folder, tmp_path / "torn", torn))


@pytest.mark.slow
def test_with_kernels_interpreted(tmp_path, monkeypatch):
    """The delta rule's kernels read what is sorted out of the interleaved projections."""
    folder = write_qwen3_next(tmp_path, num_hidden_layers=2, full_attention_interval=2)
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    run = generate(load_model(folder), [[1, 2, 3, 1], [2]], depth=2, max_new_tokens=4, quant_policy="int4")
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    again = generate(load_model(folder), [[1, 2, 3, 1], [2]], depth=2, max_new_tokens=4, quant_policy="int4")
    assert again.rounds == run.rounds and again.tokens == run.tokens
