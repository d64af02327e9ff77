"""Exclusion lists written anew: every format's own keys, those of all its methods, and nothing else of its config."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint, write_safetensors
from mtplab.checkpoint.convert import quantize_checkpoint
from mtplab.checkpoint.convert.amend import amended
from mtplab.checkpoint.formats import formats
from mtplab.errors import ConfigError

CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
METHODS = [(fmt, method) for fmt in formats() for method in fmt.methods]
EXTRA = {"bits": 8, "data_type": "fp", "group_size": -1, "act_bits": 8}


def with_config(name: str, folder: Path, **changes: object) -> Path:
    shutil.copytree(CHECKPOINTS / name / "ckpt", folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("fmt", "method"), METHODS, ids=[method for _, method in METHODS])
def test_every_method_lists_what_is_kept_or_says_that_it_cannot(fmt, method: str) -> None:
    content = {"quant_method": method, "other": {"kept": [1]}}
    if not fmt.can_keep_more:
        with pytest.raises(ConfigError, match=f"a checkpoint of {method} cannot say .* modelopt_fp8"):
            amended(content, ["a.b"])
        return
    made = amended(content, ["a.b", "c"])
    assert content == {"quant_method": method, "other": {"kept": [1]}}
    assert made.pop("other") == {"kept": [1]} and made.pop("quant_method") == method
    ((key, listed),) = made.items()
    assert key == fmt.list_keys[0] and list(listed) == ["a.b", "c"]


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp8"])
def test_modelopt_under_each_of_its_names_keeps_a_module_more_out(tmp_path: Path, method: str) -> None:
    source = with_config("mo-fp8-tensor-kv", tmp_path / "src", quant_method=method)
    module = next(module.name for module in open_checkpoint(source).plan().modules if module.weight == "fp8")
    quantize_checkpoint(source, tmp_path / "dst", exclude=[module])
    made = open_checkpoint(tmp_path / "dst")
    assert made.plan().by_name[module].weight == "bf16" and module in made.quantization.exclusions
    assert made.found.content["quant_method"] == method


def test_layers_that_a_mixed_config_names_go_with_their_quantisation_only() -> None:
    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "FP8"}, "c": {"quant_algo": "FP8"}}
    content = {"quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    content["ignore"] = ["c"]  # wrongly: it is still what says how c is read
    made = amended(content, ["a"])
    assert made["ignore"] == ["c", "a"] and list(made["quantized_layers"]) == ["b", "c"]
    nested = amended({"quant_method": "modelopt", "quantization": {**content}}, ["a"])
    assert nested["quantization"]["ignore"] == ["c", "a"] and "ignore" not in nested
    del content["ignore"]
    assert amended({"quant_method": "modelopt", "quantization": content}, ["a"])["quantization"]["exclude_modules"] == [
        "a"
    ]


def test_all_lists_are_exchanged_and_all_are_added_to(tmp_path: Path) -> None:
    """Readers prefer one key or the other: a list that stays under the other would still count for some."""
    lists = {"modules_to_not_convert": ["lm_head"], "ignored_layers": ["mtp"]}
    ckpt = open_checkpoint(with_config("tf-fp8-qwen3_5-b128", tmp_path / "src", **lists))
    assert ckpt.quantization.exclusions == ("lm_head", "mtp")
    assert ckpt.with_exclusions([]).quantization.exclusions == ()
    assert ckpt.with_exclusions(["x"]).quantization.exclusions == ("x",)
    made = amended(ckpt.found.content, ["x"])
    assert (made["modules_to_not_convert"], made["ignored_layers"]) == (["lm_head", "x"], ["mtp", "x"])


def test_auto_rounds_list_is_exchanged_and_its_other_overrides_stay(tmp_path: Path) -> None:
    module = "model.layers.0.mlp.up_proj"
    tensors = {f"{module}.weight": torch.ones(4, 4).to(torch.float8_e4m3fn), f"{module}.weight_scale": torch.ones(4)}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    extra = {"a": {"bits": 16}, "b": {"act_bits": 16}}
    config = {
        "model_type": "llama",
        "quantization_config": {"quant_method": "auto-round", **EXTRA, "extra_config": extra},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = open_checkpoint(tmp_path).with_exclusions(["c"])
    assert made.quantization.exclusions == ("c",) and set(made.found.content["extra_config"]) == {"b", "c"}


def test_what_is_quantised_at_load_keeps_its_bias(tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    tensors = {f"{module}.weight": torch.zeros(128, 128).bfloat16(), f"{module}.bias": torch.zeros(128).bfloat16()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (planned,) = open_checkpoint(tmp_path).plan(model_format="fp8").modules
    assert planned.loaded_nbytes == 128 * 128 + 4 + 2 * 128
