"""Audits of the bundled model and of checkpoints that third-party writers made: what is true of each, and no more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import Audit
from mtplab.checkpoint.planted import plant
from tests.audit_checkpoints import make
from tests.checkpoint_builders import CHECKPOINTS, E4M3, tensor_file

DATA = CHECKPOINTS.parents[1] / "data"

# Kinds by severity's first letter, those that only values show behind a bar. The writers' models are random: their
# norms lie about 1 whatever the family, and one fusion is as it was drawn. Each was looked at and is true of its file:
# matrices of 96 to 160 rows do not split into whole blocks of 128 or 32 over ranks; per-tensor scales of q, k and v
# differ; some engines do not know a method or refuse its config; transformers leaves what is no multiple of 128 in BF16
# with uninitialised scales beside it, and drops mtp_num_hidden_layers from the config.
REAL: dict[str, str] = {
    "ar-fp8-block-fp8-ragged": "n:tensor-parallel n:fused-blocks",
    "ar-fp8-static-autoround": "w:engine-refuses n:engine-unread",
    "ct-fp8-block-ragged": "n:engine-unread n:tensor-parallel n:fused-blocks",
    "ct-fp8-channel-dynamic": "n:engine-unread",
    "ct-fp8-mixed-groups": "n:engine-unread | n:fused-scales",
    "ct-nvfp4-reject": "e:not-read",
    "derived-hf_quant_config-only": "n:engine-unread n:kv-scales | n:fused-scales",
    "derived-int8-viewed-fp8": "w:bytes-as-integers n:engine-unread",
    "ds-ue8m0-e8m0dtype": "n:e8m0-scales n:tensor-parallel n:fused-blocks",
    "ds-v3-ragged-mtp": "n:engine-lossy n:tensor-parallel n:fused-blocks | e:random-head",
    "hand-fbgemm_fp8": "n:engine-unread",
    "hand-fnuz": "w:fnuz n:engine-unread",
    "hf-qwen3_5-dense-mtpfc-fp8": "w:unused-layers n:tensor-parallel | e:norm-convention",
    "llmc-fp8-static-kv": "w:engine-refuses n:engine-unread n:kv-scales | n:fused-scales",
    "mo-fp8-pb-wo-ragged": "w:engine-refuses n:engine-unread n:tensor-parallel n:fused-blocks",
    "mo-fp8-tensor-kv": "n:engine-unread n:kv-scales | n:fused-scales",
    "quark-fp8-custom-fp8": "| n:fused-scales",
    "quark-fp8-tensor-kv": "n:engine-unread n:kv-scales | n:fused-scales",
    "tf-fp8-llama160-pertensor-static": "| n:fused-scales",
    "tf-fp8-llama160-ragged": "w:junk-scale w:nothing-quantised",
    "tf-fp8-llama64-b32-sharded": "w:engine-refuses n:tensor-parallel",
    "tf-fp8-qwen3_5-b128": "w:junk-scale w:untileable w:fused-split w:engine-silent n:engine-lossy n:tensor-parallel "
                           "| e:norm-convention",
    "torchao-fp8-wo": "n:engine-unread",
}  # fmt: skip


def kinds(audit: Audit) -> set[str]:
    return {f"{finding.severity[0]}:{finding.kind}" for finding in audit.findings}


@pytest.mark.parametrize("name", sorted(path.name for path in CHECKPOINTS.iterdir()))
def test_a_real_checkpoint(name: str) -> None:
    headers, _, values = REAL[name].partition("|")
    ckpt = open_checkpoint(CHECKPOINTS / name / "ckpt", lenient=True)
    shallow = ckpt.audit()
    assert kinds(shallow) == set(headers.split())
    assert kinds(ckpt.audit(deep=True)) == set(headers.split()) | set(values.split())
    assert str(shallow) and shallow._repr_html_()


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("name", ["tiny-qwen3_5", "tiny-qwen3_5-fp8"])
def test_the_bundled_model_is_clean(name: str, deep: bool) -> None:
    audit = open_checkpoint(DATA / name).audit(deep=deep, source=DATA / "tiny-qwen3_5")
    # its K and V have 64 rows, half a block
    assert kinds(audit) == ({"n:tensor-parallel", "n:fused-blocks"} if name.endswith("fp8") else set())
    assert audit.head is not None and audit.head.complete
    assert sum(sum(row.values()) for row in audit.bytes_by_part.values()) == sum(m.nbytes for m in audit.modules)


def test_lists_as_they_were_published(tmp_path: Path) -> None:
    """Every module that is not FP8 by name: that of Qwen3-Next-80B-A3B-FP8, in full, and MiniMax-M2.7's, by endings."""
    made = make("qwen3-next")
    made.rename("in_proj_a.", "in_proj_ba.")
    made.drop(*(f"model.layers.{i}.linear_attn.in_proj_b." for i in range(3)))
    kept = [n for n, tensor in made.tensors.items() if tensor.dtype != E4M3 and not n.endswith(made.suffix)]
    kept = [name.removesuffix(".weight") for name in kept]
    assert {"model.layers.0.linear_attn.A_log", "mtp.layers.0.mlp.gate", "model.layers.3.self_attn.q_norm"} <= set(kept)
    made.quantization["modules_to_not_convert"] = kept  # type: ignore[index]
    assert kinds(open_checkpoint(made.write(tmp_path / "x")).audit()) == kinds(open_checkpoint(
        make("qwen3-next").write(tmp_path / "y")).audit()) == {"w:engine-refuses", "n:tensor-parallel"}  # fmt: skip
    made = make("mimo-v2")
    made.quantization["modules_to_not_convert"] = ["gate", "eh_proj", "lm_head", "embed_tokens"]  # type: ignore[index]
    assert not open_checkpoint(made.write(tmp_path / "z")).audit().at_least("error")


def test_the_heads_part_of_a_list_left_out(tmp_path: Path) -> None:
    """As MiMo-V2-Flash: o_proj stays BF16 everywhere, and the list names the target's alone."""
    made = make("mimo-v2")
    for name in [name for name in made.tensors if name.endswith("o_proj.weight")]:
        module = name.removesuffix(".weight")
        del made.tensors[module + made.suffix]
        made.tensors[name] = made.tensors[name].bfloat16()
        if ".mtp." not in module:
            made.quantization["modules_to_not_convert"].append(module)  # type: ignore[index]
    (finding,) = (f for f in open_checkpoint(made.write(tmp_path)).audit().findings if f.severity == "error")
    assert finding.kind == "unlisted-plain" and "draft head" in finding.message
    assert finding.tensors == tuple(f"model.mtp.layers.{i}.self_attn.o_proj" for i in range(3))


def bundled(folder: Path, **changed: torch.Tensor) -> Path:
    """The bundled model with some tensors changed; None drops one."""
    ckpt = open_checkpoint(DATA / "tiny-qwen3_5")
    tensors = {**{name: ckpt.read(name) for name in ckpt.tensors}, **changed}
    shutil.copytree(DATA / "tiny-qwen3_5", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensor_file(folder / "model.safetensors", {n: t for n, t in tensors.items() if t is not None})
    return folder


@pytest.mark.parametrize("by", [1, -1])
def test_the_bundled_models_norms_shifted(tmp_path: Path, by: int) -> None:
    """All of the head's norms by 1: the margins of the thresholds on a trained model."""
    ckpt = open_checkpoint(DATA / "tiny-qwen3_5")
    norms = [name for name in ckpt.tensors if name.startswith("mtp.") and "norm" in name]
    moved = {name: (ckpt.read(name).float() + by).bfloat16() for name in norms}
    found = open_checkpoint(bundled(tmp_path / "x", **moved)).audit(deep=True, source=ckpt)
    errors = {f.kind: f for f in found.at_least("warning")}
    assert set(errors) == {"draft-norm-convention", "values-differ"}
    assert len(errors["draft-norm-convention"].tensors) >= 5 and len(errors["values-differ"].tensors) == len(norms) == 7


def test_the_bundled_models_norms_written_for_w(tmp_path: Path) -> None:
    ckpt = open_checkpoint(DATA / "tiny-qwen3_5")
    norms = [name for name in ckpt.tensors if "norm" in name and "linear_attn" not in name]
    moved = {name: (ckpt.read(name).float() + 1).bfloat16() for name in norms}
    found = open_checkpoint(bundled(tmp_path / "x", **moved)).audit(deep=True)
    assert [f.kind for f in found.at_least("warning")] == ["norm-convention"]


@pytest.mark.parametrize("scale", [0.02, 0.2])
def test_the_bundled_models_head_drawn_anew(tmp_path: Path, scale: float) -> None:
    ckpt = open_checkpoint(DATA / "tiny-qwen3_5")
    drawn = torch.Generator().manual_seed(0)
    linears = [name for name, info in ckpt.tensors.items() if name.startswith("mtp.") and len(info.shape) == 2]
    changed = {n: (torch.randn(ckpt.info(n).shape, generator=drawn) * scale).bfloat16() for n in linears}
    found = open_checkpoint(bundled(tmp_path / "x", **changed)).audit(deep=True)
    (finding,) = (f for f in found.findings if f.kind == "random-head")
    assert finding.severity == "error" and len(finding.tensors) == len(linears) == 8


def test_a_planted_checkpoint_keeps_its_clean_audit(tmp_path: Path) -> None:
    """The same function with norm weights of up to 2^20: far from usual, and no fault."""
    planted = plant(DATA / "tiny-qwen3_5", tmp_path / "x")
    found = open_checkpoint(planted.path).audit(deep=True)
    assert kinds(found) == set()


# what a conversion did to a whole checkpoint, and what is found
LOST = {
    "the head": (["mtp."], {"lost-draft": "error", "changed-config": "warning"}, 15),
    "a head's tensor": (["mtp.layers.0.self_attn.k_proj"], {"lost-draft": "error"}, 1),
    "a layer": (["model.layers.2."], {"lost-target": "error"}, 14),
    "an expert": (["model.layers.1.mlp.experts.2.up_proj"], {"lost-target": "error"}, 1),
}


@pytest.mark.parametrize("what", LOST)
def test_what_a_conversion_lost(tmp_path: Path, what: str) -> None:
    family = "qwen3-next" if what == "an expert" else "qwen3.5"
    prefixes, expected, count = LOST[what]
    made, source = make(family), make(family, plain=True).write(tmp_path / "source")
    made.drop(*prefixes)
    if what == "the head":
        made.config["mtp_num_hidden_layers"] = 0
    found = open_checkpoint(made.write(tmp_path / "x"), lenient=True)
    new = {f.kind: f for f in found.audit(source=source).findings} | {}
    for finding in found.audit().findings:
        new.pop(finding.kind, None)
    assert {kind: f.severity for kind, f in new.items()} == expected
    lost = next(f for kind, f in new.items() if kind.startswith("lost"))
    assert len(lost.tensors) == count and f"{count} modules" in lost.message and str(source) in lost.message


def test_a_conversion_that_loses_nothing(tmp_path: Path) -> None:
    """BF16 to FP8, out of the multimodal wrapper, experts stacked: no difference."""
    source = make("qwen3.5-vl", plain=True)
    source.tensors["model.visual.merger.weight"] = torch.ones(4, 4).bfloat16()
    made = make("qwen3-next", plain=True)
    made.config["model_type"] = "qwen3_5_moe_text"
    for prefix in [f"model.layers.{i}.mlp.experts" for i in range(4)] + ["mtp.layers.0.mlp.experts"]:
        made.drop(*(f"{prefix}.{i}." for i in range(3)))
        made.tensors[f"{prefix}.gate_up_proj"] = torch.ones(3, 64, 64).bfloat16()
        made.tensors[f"{prefix}.down_proj"] = torch.ones(3, 64, 32).bfloat16()
    found = open_checkpoint(made.write(tmp_path / "x")).audit(source=source.write(tmp_path / "source"))
    assert kinds(found) == {"n:lost-vision"}


def test_another_shape_and_other_values(tmp_path: Path) -> None:
    source = make("qwen3.5", plain=True).write(tmp_path / "source")
    made = make("qwen3.5", plain=True)
    made.tensors["mtp.fc.weight"] = made.tensors["mtp.fc.weight"].T.contiguous()
    name = "model.layers.0.mlp.up_proj.weight"
    made.tensors[name] = made.tensors[name] * 2
    made.tensors["model.norm.weight"] = made.tensors["model.norm.weight"] + 1
    ckpt = open_checkpoint(made.write(tmp_path / "x"))
    assert "changed-shape" in {f.kind for f in ckpt.audit(source=source).findings}
    found = {f.kind: f for f in ckpt.audit(deep=True, source=source).findings}
    assert found["values-differ"].tensors == ("model.layers.0.mlp.up_proj", "model.norm")
    assert "[128, 64], there [64, 128]" in found["changed-shape"].message
