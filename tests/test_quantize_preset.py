"""What is kept out of FP8 by default is one list: a load that quantises, a forecast and a file agree on it."""

import json
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint, write_safetensors
from mtplab.checkpoint.audit import rewritten
from mtplab.checkpoint.convert import quantize_checkpoint
from mtplab.checkpoint.names import draft_prefixes, of_other_senses
from mtplab.checkpoint.pairing import SCALE_SUFFIXES

# DeepSeek-V3's names, with a router of another family and what a multimodal model has beside its text model
LINEAR = {
    "model.layers.0.self_attn.q_a_proj": (128, 128),
    "model.layers.0.self_attn.o_proj": (128, 128),
    "model.layers.0.mlp.gate": (8, 128),
    "model.layers.0.block_sparse_moe.gate": (8, 128),
    "model.layers.0.mlp.router": (8, 128),
    "model.layers.0.mlp.router.proj": (8, 128),
    "model.layers.0.mlp.up_proj": (128, 128),
    "model.layers.1.eh_proj": (128, 256),
    "model.layers.1.self_attn.o_proj": (128, 128),
    "model.layers.1.shared_head.head": (256, 128),
    "lm_head": (256, 128),
}
OUTSIDE = (
    "model.visual.blocks.0.attn.qkv", "visual.merger.mlp.0", "vision_tower.encoder.fc1", "model.vision_tower.fc1",
    "audio_tower.layers.0.fc1", "multi_modal_projector.linear_1", "mm_projector.0", "model.image_embed.proj",
)  # fmt: skip
KEPT = {
    "model.layers.0.mlp.gate", "model.layers.0.block_sparse_moe.gate", "model.layers.0.mlp.router",
    "model.layers.0.mlp.router.proj", "model.layers.1.eh_proj", "model.layers.1.shared_head.head", "lm_head",
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    shapes = {**LINEAR, **dict.fromkeys(OUTSIDE, (128, 128)), "model.embed_tokens": (256, 128)}
    tensors = {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    tensors["model.layers.0.self_attn.o_proj.bias"] = torch.randn(128).bfloat16()
    write_safetensors(folder / "model.safetensors", tensors)
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 1, "num_nextn_predict_layers": 1, "hidden_size": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("exclude", "kept"),
    [
        (None, KEPT),
        ("none", set()),
        (["*.o_proj"], {"model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"}),
        (["published", "*.up_proj"], {*KEPT, "model.layers.0.mlp.up_proj"}),
    ],
)
def test_a_load_a_forecast_and_a_file_quantise_the_same(
    source: Path, tmp_path: Path, exclude: object, kept: set[str]
) -> None:
    ckpt = open_checkpoint(source)
    planned = ckpt.plan(exclude=exclude, model_format="fp8")
    assert {module.name for module in planned.modules if module.weight == "fp8"} == LINEAR.keys() - kept
    foreseen = rewritten(ckpt, exclude)
    assert {module.name for module in foreseen.modules if module.stored == "F8_E4M3"} == LINEAR.keys() - kept
    written = quantize_checkpoint(source, tmp_path / "dst", exclude=exclude)
    assert {module.name for module in written.plan.modules if module.weight == "fp8"} == LINEAR.keys() - kept
    assert {m.name: m.loaded_nbytes for m in written.plan.modules} == {m.name: m.loaded_nbytes for m in planned.modules}


def test_what_is_not_the_text_model_is_known_by_one_rule(source: Path) -> None:
    plan = open_checkpoint(source).plan(exclude="none", model_format="fp8")
    assert {module.name for module in plan.modules if module.part == "unused"} == set(OUTSIDE)
    assert {name for name in (*LINEAR, *OUTSIDE, "model.embed_tokens") if of_other_senses(name)} == set(OUTSIDE)
    text = ("model.layers.0.mlp.image", "model.layers.0.supervision_.fc", "model.revisual.fc", "model.layers.0.o_proj")
    assert not any(map(of_other_senses, text))


def test_prefixes_of_heads_are_those_of_the_families() -> None:
    assert draft_prefixes({}) == ("mtp.", "model.mtp.", "model.mtp_layers.")
    counted = {"num_hidden_layers": 61, "num_nextn_predict_layers": 2}
    assert draft_prefixes(counted)[3:] == ("model.layers.61.", "model.layers.62.")


def test_endings_of_scales_hold_every_formats() -> None:
    names = (
        "a.weight_scale_inv", "a.weight_scale", "a.qscale_weight", "a._weight_scale", "a.gate_up_proj_weight_scale",
        "a.experts.down_proj_scale_inv", "a.input_scale", "a.qscale_act", "a.activation_scale", "a.k_scale",
    )  # fmt: skip
    assert all(name.endswith(SCALE_SUFFIXES) for name in names)
    # parameters of their own right
    assert not any(name.endswith(SCALE_SUFFIXES) for name in ("a.scale", "a.logit_scale", "a.weight", "a.layer_scale"))
