"""What config.json asks for and the files do not have, or have in another shape."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint, write_safetensors
from mtplab.checkpoint.audit.expected import expected_modules
from tests.checkpoint_builders import CHECKPOINTS
from tiny import MIXTURE, write_tiny


def changed(source: Path, folder: Path, change) -> Path:
    """A copy of a checkpoint of one file, with its tensors as `change` leaves them."""
    shutil.copytree(source, folder)
    ckpt = open_checkpoint(source)
    tensors = {name: ckpt.read(name) for name in ckpt.tensors}
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


def found(folder: Path, kind: str):
    return [finding for finding in open_checkpoint(folder).audit().findings if finding.kind == kind]


@pytest.mark.parametrize(
    ("tensor", "module"),
    [
        ("model.norm.weight", "model.norm"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("model.layers.2.input_layernorm.weight", "model.layers.2.input_layernorm"),
        ("model.layers.0.linear_attn.conv1d.weight", "model.layers.0.linear_attn.conv1d"),
        ("mtp.pre_fc_norm_hidden.weight", "mtp.pre_fc_norm_hidden"),
    ],
)
def test_what_no_other_layer_shows_to_be_missing(bundled, tmp_path, tensor, module):
    (finding,) = found(changed(bundled, tmp_path / "x", lambda tensors: tensors.pop(tensor)), "absent")
    assert finding.tensors == (module,) and finding.severity == "error" and "renamed" not in finding.message


def test_a_renamed_module_is_named(bundled, tmp_path):
    def rename(tensors):
        tensors["mtp.fc_proj.weight"] = tensors.pop("mtp.fc.weight")

    (finding,) = found(changed(bundled, tmp_path / "x", rename), "absent")
    assert finding.tensors == ("mtp.fc",) and "There is 'mtp.fc_proj' of its shape" in finding.message


def test_another_shape(bundled, tmp_path):
    def cut(tensors):
        tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, :256].contiguous()

    (finding,) = found(changed(bundled, tmp_path / "x", cut), "wrong-shape")
    assert finding.tensors == ("mtp.fc",) and "[256, 256], expected [256, 512]" in finding.message


def test_one_matrix_in_place_of_several_is_no_fault(bundled, tmp_path):
    def fuse(tensors):
        at = "model.layers.0.mlp."
        parts = [tensors.pop(f"{at}{name}_proj.weight") for name in ("gate", "up")]
        tensors[f"{at}gate_up_proj.weight"] = torch.cat(parts)

    assert found(changed(bundled, tmp_path / "x", fuse), "absent") == []


@pytest.mark.parametrize("stack", [False, True], ids=["single", "stacked"])
def test_experts_are_asked_for_however_files_hold_them(tmp_path, stack):
    path = write_tiny(tmp_path / "m", stack=stack, **MIXTURE)
    assert found(path, "absent") == found(path, "wrong-shape") == []

    def lose(tensors):
        tensors.pop("mtp.layers.0.mlp.experts.down_proj" if stack else "mtp.layers.0.mlp.experts.5.down_proj.weight")

    (finding,) = found(changed(path, tmp_path / "x", lose), "absent")
    assert len(finding.tensors) == (8 if stack else 1)
    assert "mtp.layers.0.mlp.experts.5.down_proj" in finding.tensors


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_real_files_have_what_their_configs_ask_for(name):
    ckpt = open_checkpoint(CHECKPOINTS / name / "ckpt", lenient=True)
    config = json.loads((CHECKPOINTS / name / "ckpt" / "config.json").read_text())
    assert len(expected_modules(config, 0)) >= 10
    assert not {finding.kind for finding in ckpt.audit().findings} & {"absent", "wrong-shape"}


@pytest.mark.parametrize("text", [{}, {"model_type": ["llama"]}, {"model_type": "llama", "hidden_size": "x"}])
def test_a_config_that_leaves_sizes_out_asks_for_nothing(text):
    assert expected_modules(text, 1) == {}
