"""Which modules are quantised, dequantised or kept, and that no tensor of the source is lost without a word."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtplab.checkpoint import Checkpoint, open_checkpoint
from mtplab.checkpoint.convert import quantize_checkpoint
from mtplab.errors import ConfigError
from mtplab.quant.block import quantize_block
from tests.checkpoint_builders import CHECKPOINTS, E4M3, FP8_CONFIG, LISTED, qwen_fp8, qwen_tensors, write_checkpoint

DRAFT = "mtp.layers.0.self_attn.q_proj"


def plain(tensors: dict[str, torch.Tensor], folder: Path, **config: Any) -> Path:
    return write_checkpoint(folder, {name: t.bfloat16() for name, t in tensors.items()}, config=config)


def weights(made: Checkpoint) -> dict[str, str]:
    return {module.name: module.weight for module in made.plan().modules}


def fp8_of(folder: Path) -> set[str]:
    return {name for name, weight in weights(open_checkpoint(folder)).items() if weight == "fp8"}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


# the draft head


def bf16(folder: Path) -> Path:
    return plain({name: t.float() for name, t in qwen_tensors().items() if not name.endswith("_inv")}, folder)


@pytest.mark.parametrize(
    ("draft", "quantised"),
    [("like-target", True), ("quantize", True), ("keep", False), ("bf16", False)],
)
def test_the_draft_head_of_a_plain_checkpoint(tmp_path: Path, draft: str, quantised: bool) -> None:
    source = open_checkpoint(bf16(tmp_path / "src"))
    quantize_checkpoint(source.path, tmp_path / "dst", draft=draft)
    made = open_checkpoint(tmp_path / "dst")
    assert (weights(made)[DRAFT] == "fp8") is quantised and weights(made)["mtp.fc"] == "bf16"
    assert weights(made)["model.layers.0.mlp.up_proj"] == "fp8"
    assert (DRAFT in made.quantization.exclusions) is not quantised
    if not quantised:
        assert all(same(made.read(name), source.read(name)) for name in source.tensors if name.startswith("mtp."))


@pytest.mark.parametrize(
    ("draft", "options", "expected"),
    [
        ("like-target", {}, "as stored"),
        ("keep", {}, "as stored"),
        ("bf16", {}, "bf16"),
        ("like-target", {"format": "bf16"}, "bf16"),
        ("like-target", {"format": "fp8-channel", "layout": "compressed-tensors"}, "channel"),
        ("keep", {"format": "fp8-block", "layout": "compressed-tensors"}, "as stored"),
        ("bf16", {"format": "fp8-block", "layout": "compressed-tensors"}, "bf16"),
    ],
)
def test_the_draft_head_of_an_fp8_checkpoint(tmp_path: Path, draft: str, options: dict, expected: str) -> None:
    source = open_checkpoint(qwen_fp8(tmp_path / "src"))
    quantize_checkpoint(source.path, tmp_path / "dst", draft=draft, **options)
    made = open_checkpoint(tmp_path / "dst")
    assert made.tensors.keys() >= {name for name in source.tensors if not name.endswith("_inv")}
    if expected == "bf16":
        assert same(made.read(f"{DRAFT}.weight"), source.dequantize(f"{DRAFT}.weight").bfloat16())
        assert made.quantization is None or DRAFT in made.quantization.exclusions
    elif expected == "channel":
        assert made.scaled(DRAFT).block == (1, 160)
    else:
        assert same(made.read(f"{DRAFT}.weight"), source.read(f"{DRAFT}.weight"))
        assert torch.equal(made.scaled(DRAFT).scale, source.scaled(DRAFT).scale)
    assert made.plan().warnings == ()


@pytest.mark.parametrize(
    ("options", "wanted"), [({"format": "bf16"}, "BF16"), ({"format": "fp8-tensor"}, "a scale per tensor")]
)
def test_a_head_that_cannot_stay_as_it_is_is_refused(tmp_path: Path, options: dict, wanted: str) -> None:
    source = qwen_fp8(tmp_path / "src")
    with pytest.raises(ConfigError, match=f"'keep': '{DRAFT}' is stored as FP8 .*is to be {wanted}"):
        quantize_checkpoint(source, tmp_path / "dst", draft="keep", **options)


def test_a_bf16_head_of_an_fp8_checkpoint_is_quantised_on_request_only(tmp_path: Path) -> None:
    tensors = qwen_tensors()
    tensors[f"{DRAFT}.weight"] = torch.randn(256, 160).bfloat16()
    del tensors[f"{DRAFT}.weight_scale_inv"]
    source = write_checkpoint(tmp_path / "src", tensors, {**FP8_CONFIG, "modules_to_not_convert": [*LISTED, DRAFT]})
    with pytest.raises(ConfigError, match=r"in the layout it has: expected a format"):
        quantize_checkpoint(source, tmp_path / "a", draft="quantize")
    quantize_checkpoint(source, tmp_path / "b", format="fp8-block")
    assert weights(open_checkpoint(tmp_path / "b"))[DRAFT] == "bf16"
    quantize_checkpoint(source, tmp_path / "c", format="fp8-block", draft="quantize")
    made = open_checkpoint(tmp_path / "c")
    assert weights(made)[DRAFT] == "fp8" and weights(made)["mtp.fc"] == "bf16"
    assert DRAFT not in made.quantization.exclusions and made.plan().warnings == ()


def test_a_draft_setting_without_a_head_is_refused(tmp_path: Path) -> None:
    source = plain({"model.layers.0.mlp.up_proj.weight": torch.randn(4, 4)}, tmp_path / "src")
    with pytest.raises(ConfigError, match="has no draft head"):
        quantize_checkpoint(source, tmp_path / "dst", draft="keep")


def test_layers_behind_the_last_are_a_draft_head_too(tmp_path: Path) -> None:
    """DeepSeek-V3's and GLM's: model.layers.{num_hidden_layers}; its copies of head and embedding go along."""
    source = open_checkpoint(CHECKPOINTS / "ds-v3-ragged-mtp" / "ckpt")
    draft = {name for name in source.tensors if name.startswith("model.layers.1.")}
    assert "model.layers.1.eh_proj.weight" in draft and any(name.endswith("_inv") for name in draft)
    quantize_checkpoint(source.path, tmp_path / "a", draft="bf16")
    made = open_checkpoint(tmp_path / "a")
    assert {name for name in made.tensors if name.startswith("model.layers.1.")} == {
        name for name in draft if not name.endswith("_inv")
    }
    assert fp8_of(tmp_path / "a") == {name for name in fp8_of(source.path) if not name.startswith("model.layers.1.")}
    # from plain weights: what joins the head's two inputs is kept, as it is published
    quantize_checkpoint(source.path, tmp_path / "plain", format="bf16")
    quantize_checkpoint(tmp_path / "plain", tmp_path / "b")
    assert fp8_of(tmp_path / "b") == fp8_of(source.path)
    assert "model.layers.1.eh_proj" in open_checkpoint(tmp_path / "b").quantization.exclusions


# exclusions of an FP8 source


def test_names_given_for_an_fp8_source_come_on_top_of_its_own(tmp_path: Path) -> None:
    source = qwen_fp8(tmp_path / "src")
    quantize_checkpoint(source, tmp_path / "a", exclude=["*.down_proj"])
    assert fp8_of(tmp_path / "a") == {"model.layers.0.mlp.up_proj", DRAFT}
    quantize_checkpoint(source, tmp_path / "b", exclude=["*.down_proj"], draft_exclude=["mtp.layers.*"])
    assert fp8_of(tmp_path / "b") == {"model.layers.0.mlp.up_proj"}
    quantize_checkpoint(source, tmp_path / "c", exclude="none", format="fp8-block")
    linear = {"lm_head", "mtp.fc", "model.layers.0.linear_attn.in_proj_a"}
    assert fp8_of(tmp_path / "c") == fp8_of(source) | linear
    assert open_checkpoint(tmp_path / "c").quantization.exclusions == ("model.embed_tokens",)
    with pytest.raises(ConfigError, match="'nothing' matches no module"):
        quantize_checkpoint(source, tmp_path / "d", exclude=["nothing"])


def test_static_and_cache_scales_follow_the_layout(tmp_path: Path) -> None:
    source = open_checkpoint(CHECKPOINTS / "mo-fp8-tensor-kv" / "ckpt")
    inputs = {name for name in source.tensors if name.endswith("input_scale")}
    cache = set(source.kv_scales())
    assert inputs and cache
    module = next(module.name for module in source.plan().modules if module.weight == "fp8")
    same_layout = quantize_checkpoint(source.path, tmp_path / "a", exclude=[module])
    assert set(same_layout.left) == {f"{module}.input_scale"}
    assert open_checkpoint(tmp_path / "a").tensors.keys() >= (inputs | cache) - {f"{module}.input_scale"}
    for name in ("config.json", "hf_quant_config.json"):
        said = json.loads((tmp_path / "a" / name).read_text())
        said = said.get("quantization_config", said.get("quantization"))
        assert module in said.get("ignore", said.get("exclude_modules"))
        assert said.get("kv_cache_quant_algo", "FP8") == "FP8"
    other = quantize_checkpoint(source.path, tmp_path / "b", format="fp8-tensor", layout="compressed-tensors")
    assert set(other.left) == inputs | cache
    assert open_checkpoint(tmp_path / "b").plan().warnings == ()


# nothing is lost


def test_what_is_not_the_text_model_is_copied_and_what_is_left_is_named(tmp_path: Path) -> None:
    tensors = {name: t.float() for name, t in qwen_tensors().items() if not name.endswith("_inv")}
    tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
    others = {
        "model.visual.blocks.0.attn.qkv.weight": torch.randn(8, 8),
        "vision_tower.encoder.fc1.weight": torch.randn(8, 8),
        "multi_modal_projector.linear_1.weight": torch.randn(8, 8),
        "model.language_model.layers.0.mlp.gate.weight": torch.randn(4, 160),
        "model.language_model.layers.0.block_sparse_moe.gate.weight": torch.randn(4, 160),
        "model.language_model.layers.7.mlp.up_proj.weight": torch.randn(8, 160),  # beyond what the config counts
    }
    stacked = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    folder = plain({**tensors, **others, stacked: torch.randn(4, 8, 160)}, tmp_path / "src")
    (folder / "chat_template.jinja").write_text("{{ x }}")
    (folder / "modeling_x.py").write_text("raise SystemExit")
    source = open_checkpoint(folder)
    written = quantize_checkpoint(folder, tmp_path / "dst")
    made = open_checkpoint(tmp_path / "dst")
    scales = {f"{name}.weight_scale_inv" for name in fp8_of(tmp_path / "dst")}
    assert made.tensors.keys() == source.tensors.keys() | scales
    assert len(fp8_of(tmp_path / "dst")) == 3
    for name in (*others, stacked):
        assert same(made.read(name), source.read(name))
        assert name.removesuffix(".weight") in made.quantization.exclusions
    assert "model.language_model.layers.0.mlp.experts" in made.quantization.exclusions
    assert any("stacked experts stay" in warning for warning in written.warnings)
    assert not [warning for warning in made.plan().warnings if "name no module" in warning]
    assert written.left == {} and written.files_left == ("modeling_x.py",)
    assert (tmp_path / "dst" / "chat_template.jinja").read_text() == "{{ x }}"


def test_stacked_experts_of_a_known_family_become_single_ones(tmp_path: Path) -> None:
    sizes = {"num_experts": 3, "moe_intermediate_size": 40, "hidden_size": 64}
    group = "model.language_model.layers.0.mlp.experts"
    tensors = {
        f"{group}.gate_up_proj": torch.randn(3, 80, 64) * 0.02,
        f"{group}.down_proj": torch.randn(3, 64, 40) * 0.02,
        "model.language_model.layers.0.mlp.gate.weight": torch.randn(3, 64),
        "mtp.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 80, 64) * 0.02,
        "mtp.layers.0.mlp.experts.down_proj": torch.randn(3, 64, 40) * 0.02,
    }
    text = {"model_type": "qwen3_5_moe_text", "num_hidden_layers": 1, "mtp_num_hidden_layers": 1, **sizes}
    source = plain(tensors, tmp_path / "src", model_type="qwen3_5_moe", text_config=text)
    written = quantize_checkpoint(source, tmp_path / "dst", draft="keep")
    made = open_checkpoint(tmp_path / "dst")
    parts = ("gate_proj", "up_proj", "down_proj")
    assert fp8_of(tmp_path / "dst") == {f"{group}.{e}.{part}" for e in range(3) for part in parts}
    assert "mtp.layers.0.mlp.experts.down_proj" in made.tensors and f"{group}.down_proj" not in made.tensors
    assert "mtp.layers.0.mlp.experts" in made.quantization.exclusions
    assert not [name for name in made.quantization.exclusions if name.startswith(group)]
    for expert in range(3):
        gate, up = tensors[f"{group}.gate_up_proj"][expert].bfloat16().chunk(2)
        down = tensors[f"{group}.down_proj"][expert].bfloat16()
        for part, weight in zip(parts, (gate, up, down), strict=True):
            expected = quantize_block(weight.contiguous())
            found = made.scaled(f"{group}.{expert}.{part}")
            assert same(found.data, expected.data) and torch.equal(found.scale, expected.scale)
    assert written.actions == {"to FP8": 9, "copied": 3} and made.plan().warnings == ()
    # excluded, they stay stacked; and so do those of a family whose stacks may lie otherwise
    quantize_checkpoint(source, tmp_path / "kept", exclude=["published", "*.experts.*"])
    assert fp8_of(tmp_path / "kept") == set()
    other = plain(tensors, tmp_path / "other", model_type="llama4", text_config={**text, "model_type": "llama4_text"})
    assert "how this model's are stacked is not known" in quantize_checkpoint(other, tmp_path / "o").warnings[0]


def test_tensors_outside_the_index_are_named(tmp_path: Path) -> None:
    folder = qwen_fp8(tmp_path / "src", shards=2)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["mtp.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    written = quantize_checkpoint(folder, tmp_path / "dst", format="bf16")
    assert list(written.left) == ["mtp.norm.weight"] and "not in the index" in written.left["mtp.norm.weight"]
    made = json.loads((tmp_path / "dst" / "model.safetensors.index.json").read_text())
    assert made["weight_map"] == {k: v for k, v in index["weight_map"].items() if not k.endswith("_inv")}
    sizes = {name: info.nbytes for name, info in open_checkpoint(tmp_path / "dst").tensors.items()}
    assert made["metadata"]["total_size"] == sum(sizes.values())


def test_blocks_at_the_edge_are_warned_of_where_readers_get_them_wrong(tmp_path: Path) -> None:
    source = bf16(tmp_path / "src")  # 130x160, 160x130 and 256x160
    said = quantize_checkpoint(source, tmp_path / "a").warnings
    assert len(said) == 1 and said[0].startswith("3 weights are no multiple of 128x128 ('model.layers.0.mlp.")
    assert "transformers takes a block to be shape over grid" in said[0]
    assert "vLLM refuses" in quantize_checkpoint(source, tmp_path / "b", layout="modelopt").warnings[0]
    assert quantize_checkpoint(source, tmp_path / "c", layout="compressed-tensors").warnings == ()
    exclude = ["published", "*.down_proj"]
    assert quantize_checkpoint(source, tmp_path / "d", block=(2, 32), exclude=exclude).warnings == ()


def test_an_fp8_embedding_becomes_bf16_in_a_layout_of_linear_weights(tmp_path: Path) -> None:
    tensors = qwen_tensors()
    name = "model.embed_tokens.weight"
    tensors[name] = (torch.randn(32, 160) * 60).to(E4M3)
    tensors[f"{name}_scale_inv"] = torch.rand(1, 2) + 0.1
    source = open_checkpoint(write_checkpoint(tmp_path / "src", tensors, FP8_CONFIG))
    quantize_checkpoint(source.path, tmp_path / "dst", format="fp8-block", layout="compressed-tensors")
    made = open_checkpoint(tmp_path / "dst")
    assert same(made.read(name), source.dequantize(name).bfloat16())
    assert "model.embed_tokens" in made.quantization.exclusions
    # and stays what it is where the layout stays
    quantize_checkpoint(source.path, tmp_path / "same", draft="bf16")
    assert same(open_checkpoint(tmp_path / "same").read(name), source.read(name))


def test_what_lies_beside_a_single_file_stays_there(tmp_path: Path) -> None:
    (tmp_path / "bank.json").write_text("{}")
    file = plain({"model.layers.0.mlp.up_proj.weight": torch.randn(4, 4)}, tmp_path / "src") / "model.safetensors"
    file = file.rename(tmp_path / "lora.safetensors")
    quantize_checkpoint(file, tmp_path / "dst", exclude={"published"})
    assert sorted(path.name for path in (tmp_path / "dst").iterdir()) == ["config.json", "lora.safetensors"]


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in qwen_tensors().items() if not name.endswith("_inv")}
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(2)
    source = write_checkpoint(tmp_path / "src", tensors)
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight_scale_inv' would be written twice"):
        quantize_checkpoint(source, tmp_path / "dst")
    quantize_checkpoint(source, tmp_path / "dst", layout="modelopt")


def test_scales_stacked_beside_single_experts_are_given_to_each(tmp_path: Path) -> None:
    """What transformers' writer leaves behind, and cannot read back itself, is put right by writing it anew."""
    group = "model.layers.0.mlp.experts"
    tensors = {"model.norm.weight": torch.ones(128).bfloat16()}
    for expert in range(2):
        for which, shape in (("gate", (128, 256)), ("up", (128, 256)), ("down", (256, 128))):
            tensors[f"{group}.{expert}.{which}_proj.weight"] = (torch.randn(shape) * 60).to(E4M3)
    tensors[f"{group}.gate_up_proj_scale_inv"] = torch.rand(2, 2, 2) + 0.1
    tensors[f"{group}.down_proj_scale_inv"] = torch.rand(2, 2, 1) + 0.1
    source = open_checkpoint(write_checkpoint(tmp_path / "src", tensors, FP8_CONFIG))
    quantize_checkpoint(source.path, tmp_path / "dst", format="fp8-block")
    made = open_checkpoint(tmp_path / "dst")
    assert not [name for name in made.tensors if name.endswith("proj_scale_inv")]
    for name in (name for name in tensors if name.endswith("_proj.weight")):
        assert torch.equal(made.dequantize(name), source.dequantize(name))
        assert f"{name}_scale_inv" in made.tensors
