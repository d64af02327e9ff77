"""The audit of what would be written, against the audit of what is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import Audit, rewritten
from mtplab.checkpoint.convert import quantize_checkpoint
from mtplab.errors import CheckpointError
from tests.audit_checkpoints import make
from tests.checkpoint_builders import CHECKPOINTS, write_checkpoint

DATA = CHECKPOINTS.parents[1] / "data"


def module_rows(audit: Audit) -> list[tuple[Any, ...]]:
    return [
        (m.name, m.part, m.kind, m.shape, m.stored, m.weight, m.activation, m.nbytes, m.block,
         m.scale and (m.scale.name, m.scale.dtype, m.scale.shape), m.input_scale and m.input_scale.name)
        for m in audit.modules
    ]  # fmt: skip


def compare(source: Path, folder: Path, exclude: Any, format: str | None = None) -> Audit:
    supposed = rewritten(open_checkpoint(source), exclude, format)
    quantize_checkpoint(source, folder, exclude=exclude, format=format)
    written = open_checkpoint(folder).audit()
    assert module_rows(supposed) == module_rows(written)
    assert supposed.bytes_by_part == written.bytes_by_part and supposed.tensors == written.tensors
    assert supposed.head == written.head and supposed.method == f"{written.method}, as it would be written"
    sentences = [audit.looks.sentence if audit.looks is not None else None for audit in (supposed, written)]
    assert sentences[0] == sentences[1]
    assert [(f.severity, f.kind, f.tensors) for f in supposed.findings] == [
        (f.severity, f.kind, f.tensors) for f in written.findings
    ]
    return supposed


REAL = ["ar-fp8-static-autoround", "ct-fp8-channel-dynamic", "ds-v3-ragged-mtp", "hf-qwen3_5-dense-mtpfc-fp8",
        "llmc-fp8-static-kv", "mo-fp8-pb-wo-ragged", "mo-fp8-tensor-kv", "quark-fp8-tensor-kv",
        "tf-fp8-qwen3_5-b128"]  # fmt: skip


@pytest.mark.parametrize("exclude", [None, ["*o_proj"]], ids=["as it is", "less FP8"])
@pytest.mark.parametrize("name", REAL)
def test_of_a_quantised_checkpoint(tmp_path: Path, name: str, exclude: list[str] | None) -> None:
    compare(CHECKPOINTS / name / "ckpt", tmp_path / "new", exclude)


@pytest.mark.parametrize("exclude", [None, "none", ["published", "*.mlp.*"]], ids=["published", "none", "globs"])
@pytest.mark.parametrize("name", ["tiny-qwen3_5", "tiny-qwen3_5-fp8"])
def test_of_the_bundled_model(tmp_path: Path, name: str, exclude: Any) -> None:
    # what an FP8 checkpoint has in BF16 can become FP8 only where it is said what kind
    format = "fp8-block" if name.endswith("fp8") and exclude == "none" else None
    compare(DATA / name, tmp_path / "new", exclude, format)


@pytest.mark.parametrize("family", ["deepseek-v3", "qwen3-next", "mimo-v2"])
def test_of_plain_families(tmp_path: Path, family: str) -> None:
    """Among them modules that a load quantises and the writer keeps: eh_proj, shared_head.head, routers."""
    made = make(family, plain=True)
    made.tensors["model.layers.0.mlp.up_proj.bias"] = torch.zeros(96).bfloat16()
    compare(made.write(tmp_path / "x"), tmp_path / "new", None)


def test_of_stacked_experts(tmp_path: Path) -> None:
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(2, 256, 128).bfloat16(),
        "model.layers.0.mlp.experts.down_proj": torch.randn(2, 128, 128).bfloat16(),
        "model.layers.0.mlp.gate.weight": torch.randn(2, 128).bfloat16(),
        "model.embed_tokens.weight": torch.randn(32, 128).bfloat16(),
        "model.norm.weight": torch.zeros(128).bfloat16(),
    }
    config = {"model_type": "qwen3_5_moe_text", "hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2,
              "mtp_num_hidden_layers": 0}  # fmt: skip
    found = compare(write_checkpoint(tmp_path / "x", tensors, config=config), tmp_path / "new", None)
    assert sum(module.weight == "fp8" for module in found.modules) == 6


def test_of_what_is_not_read() -> None:
    with pytest.raises(CheckpointError, match="nvfp4"):
        rewritten(open_checkpoint(CHECKPOINTS / "ct-nvfp4-reject" / "ckpt", lenient=True))
