"""Heads: every family's is found whole, and found to lack what it lacks."""

from pathlib import Path

import pytest

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import Audit, Finding
from tests.audit_checkpoints import FAMILIES, Made, make


def audited(made: Made, folder: Path, **options) -> Audit:
    return open_checkpoint(made.write(folder / "x"), lenient=True).audit(**options)


def warned(audit: Audit) -> list[Finding]:
    """Errors and warnings but for what engines make of it: TensorRT-LLM reads no blocks of 32."""
    return [finding for finding in audit.at_least("warning") if not finding.kind.startswith("engine-")]


# family → what the layout is called, layers on disk, what it takes from the target
WHOLE = {
    "qwen3.5": ("Qwen3-Next, Qwen3.5 and later", 1, ["mtp.embed_tokens", "mtp.lm_head"]),
    "qwen3-next": ("Qwen3-Next, Qwen3.5 and later", 1, ["mtp.embed_tokens", "mtp.lm_head"]),
    "qwen3.5-vl": ("Qwen3-Next, Qwen3.5 and later", 1, ["mtp.embed_tokens", "mtp.lm_head"]),
    "deepseek-v3": ("DeepSeek-V3, GLM-4.5 and later", 1, []),
    "deepseek-v4": ("DeepSeek-V4", 1, []),
    "mimo-7b": ("MiMo-7B", 1, []),
    "mimo-v2": ("MiMo-V2", 3, []),
    "nemotron-3": ("Nemotron-3", 2, []),
    "step-3.5": ("Step-3.5, 3.7", 3, []),
}


@pytest.mark.parametrize("plain", [False, True], ids=["fp8", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_head(tmp_path: Path, family: str, plain: bool) -> None:
    audit = audited(make(family, plain), tmp_path, deep=True)
    head, (layout, layers, shared) = audit.head, WHOLE[family]
    assert head is not None and head.complete, head
    assert (head.family, head.layers, list(head.missing), list(head.shared)) == (layout, layers, [], shared)
    known = {"scale-suffix"} if family == "deepseek-v4" and not plain else set()
    assert {f.kind for f in warned(audit)} == known
    assert "complete" in str(head) and head.to_dict()["complete"] is True


# family, what is left out, what is said to be missing
LACKING = [
    ("qwen3.5", ["mtp.fc"], ["mtp.fc"]),
    ("qwen3.5", ["mtp.norm", "mtp.pre_fc_norm_hidden"], ["mtp.norm", "mtp.pre_fc_norm_hidden"]),
    ("qwen3.5", ["mtp.layers.0.self_attn.o_proj"], ["mtp.layers.0.self_attn.o_proj"]),
    ("qwen3.5", ["mtp.layers.0.self_attn.q_norm"], ["mtp.layers.0.self_attn.q_norm"]),
    ("qwen3.5", ["mtp.fc", "mtp.norm", "mtp.pre_fc"],
     ["mtp.fc", "mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"]),
    ("qwen3-next", ["mtp.layers.0.mlp.shared_expert_gate"], ["mtp.layers.0.mlp.shared_expert_gate"]),
    ("qwen3-next", ["mtp.layers.0.mlp.experts."],
     [f"mtp.layers.0.mlp.experts.*.{name}_proj" for name in ("down", "gate", "up")]),
    ("qwen3-next", ["mtp.layers.0.mlp.experts.2."], ["mtp.layers.0.mlp.experts: 3 of 9 experts' weights"]),
    ("qwen3.5-vl", ["mtp.layers.0.mlp.experts.0.up_proj"], ["mtp.layers.0.mlp.experts: 1 of 9 experts' weights"]),
    ("qwen3.5-vl", ["mtp.layers.0.mlp.gate."], ["mtp.layers.0.mlp.gate"]),
    ("deepseek-v3", ["model.layers.3.eh_proj"], ["model.layers.3.eh_proj"]),
    ("deepseek-v3", ["model.layers.3.enorm", "model.layers.3.shared_head.norm"],
     ["model.layers.3.enorm", "model.layers.3.shared_head.norm"]),
    ("deepseek-v3", ["model.layers.3.self_attn.kv_b_proj"], ["model.layers.3.self_attn.kv_b_proj"]),
    ("deepseek-v4", ["mtp.0.e_proj"], ["mtp.0.e_proj"]),
    ("deepseek-v4", ["mtp.0.attn.wkv"], ["mtp.0.attn.wkv"]),
    ("deepseek-v4", ["mtp.0.ffn.experts.1.w2"], ["mtp.0.ffn.experts: 1 of 9 experts' weights"]),
    ("mimo-7b", ["model.mtp_layers.0.input_proj"], ["model.mtp_layers.0.input_proj"]),
    ("mimo-7b", ["model.mtp_layers.0.mlp.up_proj"], ["model.mtp_layers.0.mlp.up_proj"]),
    ("mimo-v2", ["model.mtp.layers.1.final_layernorm"], ["model.mtp.layers.1.final_layernorm"]),
    ("mimo-v2", ["model.mtp.layers.2.self_attn.k_proj"], ["model.mtp.layers.2.self_attn.k_proj"]),
    ("nemotron-3", ["mtp.layers.0.eh_proj"], ["mtp.layers.0.eh_proj"]),
    ("nemotron-3", ["mtp.layers.1.final_layernorm"], ["mtp.layers.1.final_layernorm"]),
    ("step-3.5", ["model.layers.4.hnorm"], ["model.layers.4.hnorm"]),
    ("step-3.5", ["model.layers.5.mlp.down_proj"], ["model.layers.5.mlp.down_proj"]),
    ("step-3.5", ["model.layers.5.transformer.shared_head.norm"], ["model.layers.5.transformer.shared_head.norm"]),
]  # fmt: skip


@pytest.mark.parametrize(("family", "dropped", "missing"), LACKING, ids=lambda value: str(value)[:40])
def test_a_head_that_lacks_something(tmp_path: Path, family: str, dropped: list[str], missing: list[str]) -> None:
    made = make(family, plain=True)
    made.drop(*dropped)
    audit = audited(made, tmp_path)
    assert audit.head is not None and not audit.head.complete
    assert (audit.head.family, sorted(audit.head.missing)) == (WHOLE[family][0], sorted(missing))
    (finding,) = warned(audit)
    assert (finding.severity, finding.kind, sorted(finding.tensors)) == ("error", "incomplete-head", sorted(missing))
    assert missing[0] in finding.message and "INCOMPLETE" in str(audit.head)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_that_is_promised_and_not_there(tmp_path: Path, family: str) -> None:
    made = make(family)
    made.drop("mtp.", "model.mtp.", "model.mtp_layers.", *(f"model.layers.{i}." for i in (4, 5)))
    if family in ("deepseek-v3", "step-3.5"):
        made.drop("model.layers.3.")
    audit = audited(made, tmp_path)
    assert audit.head is not None and (audit.head.layers, audit.head.complete) == (0, False)
    (finding,) = (f for f in audit.findings if f.severity == "error")
    assert finding.kind == "missing-head" and "config.json" in finding.message and finding.fix


def test_no_head_and_none_promised(tmp_path: Path) -> None:
    made = make("qwen3.5")
    made.drop("mtp.")
    made.config["mtp_num_hidden_layers"] = 0
    made.quantization["modules_to_not_convert"].remove("mtp.fc")  # type: ignore[index]
    audit = audited(made, tmp_path)
    assert audit.head is None and not warned(audit)
    assert "MTP head: none" in str(audit)


@pytest.mark.parametrize(("count", "kinds"), [(0, {"unused-layers"}), (2, {"fewer-head-layers"}), (1, set())])
def test_what_config_counts(tmp_path: Path, count: int, kinds: set[str]) -> None:
    made = make("qwen3.5")
    made.config["mtp_num_hidden_layers"] = count
    assert {finding.kind for finding in warned(audited(made, tmp_path))} == kinds


def test_layers_that_config_does_not_count(tmp_path: Path) -> None:
    made = make("mimo-v2")
    made.config["num_nextn_predict_layers"] = 1
    (finding,) = (f for f in audited(made, tmp_path).findings if f.kind == "more-head-layers")
    assert finding.severity == "note" and "3 MTP layers are on disk, and config.json counts 1" in finding.message
    del made.config["num_nextn_predict_layers"]
    assert "uncounted-head" in {f.kind for f in audited(made, tmp_path).findings}


def test_stacked_experts_are_no_missing_ones(tmp_path: Path) -> None:
    made = make("qwen3-next", plain=True)
    for name in ("gate_up_proj", "down_proj"):
        made.tensors[f"mtp.layers.0.mlp.experts.{name}"] = made.values(3 * 64, 64).view(3, 64, 64).bfloat16()
    made.drop(*(f"mtp.layers.0.mlp.experts.{i}." for i in range(3)))
    head = audited(made, tmp_path).head
    assert head is not None and head.complete, head
