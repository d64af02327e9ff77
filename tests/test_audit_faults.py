"""Every kind of fault that a file can show: planted in a whole checkpoint, the audit finds it and nothing else.

The kinds are those of public reports on FP8, MTP heads and exclusion lists; the reports are named where the checks are.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import Audit, Finding
from tests.audit_checkpoints import BLOCK, H, Made, make
from tests.checkpoint_builders import E4M3

UP, Q = "model.layers.1.mlp.up_proj", "mtp.layers.0.self_attn.q_proj"
SCALE = ".weight_scale_inv"
Change = Callable[[Made], None]


def drop(*names: str) -> Change:
    return lambda made: made.drop(*names)


def listing(*entries: str, without: tuple[str, ...] = ()) -> Change:
    """Entries more in the exclusion list, and without those that start so."""

    def change(made: Made) -> None:
        assert made.quantization is not None
        kept = [e for e in made.quantization["modules_to_not_convert"] if not (without and e.startswith(without))]
        made.quantization["modules_to_not_convert"] = [*kept, *entries]

    return change


def plain(*modules: str) -> Change:
    """These modules in BF16, and not listed."""

    def change(made: Made) -> None:
        for name in modules:
            scale = made.tensors.pop(name + made.suffix)
            spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            made.tensors[f"{name}.weight"] = (made.tensors[f"{name}.weight"].float() * spread).bfloat16()

    return change


def fp8(name: str) -> Change:
    """This module in FP8, and not listed."""

    def change(made: Made) -> None:
        made.fp8(name, made.tensors[f"{name}.weight"].float())
        listing(without=(name,))(made)

    return change


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    """Tensors whose names end so, changed."""

    def changed(made: Made) -> None:
        names = [one for one in made.tensors if one.endswith(name)]
        assert names
        for one in names:
            made.tensors[one] = change(made.tensors[one])

    return changed


def both(*changes: Change) -> Change:
    def change(made: Made) -> None:
        for one in changes:
            one(made)

    return change


def at(value: float, *where: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(old: torch.Tensor) -> torch.Tensor:
        new = old.clone()
        new[where] = value
        return new

    return change


def codes(byte: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(old: torch.Tensor) -> torch.Tensor:
        new = old.clone()
        new.view(torch.uint8)[0, :3] = byte
        return new

    return change


def config(**keys: object) -> Change:
    def change(made: Made) -> None:
        made.config.update(keys)

    return change


def quantization(**keys: object) -> Change:
    def change(made: Made) -> None:
        assert made.quantization is not None
        made.quantization.update(keys)

    return change


def rename(old: str, new: str) -> Change:
    return lambda made: made.rename(old, new)


def add(**tensors: torch.Tensor) -> Change:
    return lambda made: made.tensors.update({name.replace("__", "."): t for name, t in tensors.items()})


def whole_tensor(made: Made) -> None:
    """One scale for each weight; k's a thousand times as large as q's and v's."""
    assert made.quantization is not None
    made.quantization["weight_block_size"] = None
    for name in [name for name in made.tensors if name.endswith(made.suffix)]:
        made.tensors[name] = torch.tensor(0.001)


def no_plus_one(made: Made) -> None:
    made.config["model_type"] = "llama"
    made.one_plus = False


def random_head(made: Made) -> None:
    for name, old in made.tensors.items():
        if name.startswith("mtp.") and old.dim() == 2 and not name.endswith(made.suffix):
            values = torch.randn(old.shape, generator=made.generator) * 0.02
            if old.dtype == E4M3:
                made.tensors[name] = (values * 5000).to(E4M3)
                made.tensors[name.removesuffix(".weight") + made.suffix].fill_(1 / 5000)
            else:
                made.tensors[name] = values.bfloat16()


def shift(*endings: str, by: float = 1) -> Change:
    return both(*(tensor(ending, lambda old: (old.float() + by).bfloat16()) for ending in endings))


TARGET_NORMS = ("model.norm.weight", *(f"model.layers.{i}.{n}_layernorm.weight" for i in range(4)
                                       for n in ("input", "post_attention")),
                "model.layers.3.self_attn.q_norm.weight", "model.layers.3.self_attn.k_norm.weight")  # fmt: skip
DRAFT_NORMS = ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight",
               "mtp.layers.0.input_layernorm.weight", "mtp.layers.0.post_attention_layernorm.weight",
               "mtp.layers.0.self_attn.q_norm.weight", "mtp.layers.0.self_attn.k_norm.weight")  # fmt: skip
KV = torch.tensor(0.5)

# (family, change, kinds with their severity, a name that is told, what else the finding says)
HEADERS: dict[str, tuple[str, Change, dict[str, str], str, str]] = {
    # scales and dtypes
    "orphan-fp8": ("qwen3.5", drop(Q + SCALE), {"missing-scale": "error"}, Q, "acceptance 0 %"),
    "scale-of-nothing": ("qwen3.5", lambda made: made.tensors.pop(f"{UP}.weight"), {"missing-weight": "error",
                         "missing-modules": "error"}, UP, "unconsumed"),
    "no-config": ("qwen3.5", lambda made: setattr(made, "quantization", None), {"unexplained-fp8": "error"}, "F8_E4M3",
                  "raw numbers"),
    "suffix-against-block": ("qwen3.5", rename(SCALE, ".weight_scale"), {"scale-suffix": "warning"}, UP,
                             "look for weight_scale_inv"),
    "bare-scale": ("qwen3.5", rename(SCALE, ".scale"), {"scale-suffix": "warning"}, UP, "43455"),
    "two-suffixes": ("qwen3.5", rename(UP + SCALE, UP + ".weight_scale"),
                     {"scale-suffix": "warning", "mixed-suffixes": "warning"}, UP, "weight_scale_inv"),
    "wrong-grid": ("qwen3.5", tensor(UP + SCALE, lambda old: old[:1]), {"scale-grid": "error"}, UP, "expected [3, 2]"),
    "scale-as-integers": ("qwen3.5", tensor(SCALE, lambda old: torch.full(old.shape, 118, dtype=torch.uint8)),
                          {"integer-scales": "warning"}, "U8", "2**(byte - 127)"),
    "scale-as-exponents": ("qwen3.5", tensor(SCALE, lambda old: old.to(torch.float8_e8m0fnu)),
                           {"e8m0-scales": "note"}, "F8_E8M0", "float32 scales"),
    "packed-scale": ("qwen3.5", tensor(UP + SCALE, lambda old: old.to(torch.int32)), {"scale-dtype": "error"}, UP,
                     "I32"),
    "fused-in-a-block": ("qwen3.5", tensor("mtp.layers.0.mlp.gate_proj.weight", lambda old: old[:80].contiguous()),
                         {"fused-blocks": "note"}, "mtp.layers.0.mlp.gate_proj", "fewer rows of scales"),
    "junk-scale": ("qwen3.5", add(mtp__fc__weight_scale_inv=torch.ones(2, 4)), {"junk-scale": "warning"}, "mtp.fc",
                   "noise"),
    "bytes-as-int8": ("qwen3.5", tensor(Q + ".weight", lambda old: old.view(torch.int8)),
                      {"bytes-as-integers": "warning"}, Q, "compute with integers"),
    "e5m2-codes": ("qwen3.5", tensor(Q + ".weight", lambda old: old.to(torch.float8_e5m2)), {"dtype": "error"}, Q,
                   "expected F8_E4M3"),
    "fnuz-codes": ("qwen3.5", tensor(Q + ".weight", lambda old: old.view(torch.uint8).view(torch.float8_e4m3fnuz)),
                   {"fnuz": "warning"}, Q, "bias 8"),
    "fnuz-codes-e5m2": ("qwen3.5", both(tensor(Q + ".weight", lambda old: old.to(torch.float8_e5m2fnuz)),
                                        quantization(fmt="e5m2")),
                        {"fnuz": "warning", "dtype": "error"}, Q, "bias 16, at most 57344"),
    "quantised-lm-head": ("qwen3.5", fp8("lm_head"), {"quantised-head": "warning"}, "lm_head", "KeyError"),
    "quantised-shared-head": ("deepseek-v3", fp8("model.layers.3.shared_head.head"), {"quantised-head": "warning"},
                              "model.layers.3.shared_head.head", "BF16"),
    "quantised-fusion": ("qwen3.5", fp8("mtp.fc"), {"fp8-fusion": "warning"}, "mtp.fc", "BF16"),
    "all-in-bf16": ("qwen3.5", lambda made: setattr(made, "tensors", make("qwen3.5", plain=True).tensors),
                    {"nothing-quantised": "warning"}, "BF16", "Remove"),
    # lists and names
    "fc-unlisted": ("qwen3.5", listing(without=("mtp.fc",)), {"unlisted-plain": "error"}, "mtp.fc", "acceptance 0 %"),
    "built-fp8-stored-bf16": ("qwen3.5", both(*(plain(f"mtp.layers.0.{name}") for name in (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj")), listing(without=("mtp.fc",))), {"unlisted-plain": "error"}, Q, "built as FP8, stored as"),
    "partial-list": ("qwen3-next", both(
        plain(*(f"mtp.layers.0.mlp.experts.{i}.{n}_proj" for i in range(3) for n in ("gate", "up", "down")))),
        {"unlisted-plain": "error", "partial-draft-list": "warning"}, "mtp.layers.0.mlp.experts.0.down_proj", "List"),
    "in-proj-unlisted": ("qwen3.5", both(plain("model.layers.0.linear_attn.in_proj_qkv",
                                               "model.layers.0.linear_attn.in_proj_z")),
                         {"unlisted-plain": "error"}, "model.layers.0.linear_attn.in_proj_qkv", "noise"),
    "untileable": ("qwen3.5", listing(without=("model.layers.0.linear_attn.in_proj_a",)), {"untileable": "warning"},
                   "model.layers.0.linear_attn.in_proj_a", "32x32"),
    "listed-though-fp8": ("qwen3.5", listing(Q), {"listed-fp8": "error"}, Q,
                          "acceptance 0 %"),
    "whole-head-listed": ("qwen3.5", listing("mtp"), {"listed-fp8": "error"}, Q, "unconsumed"),
    "entry-of-no-module": ("qwen3.5", listing("model.layers.0.mlp.gate_prj"), {"unmatched-entry": "warning"},
                           "model.layers.0.mlp.gate_prj", "'model.layers.0.mlp.gate_proj'"),
    "short-pattern": ("qwen3.5", listing("proj_qkv"), {"unmatched-entry": "warning"}, "proj_qkv", "not protected"),
    "other-root": ("qwen3.5", both(listing("model.language_model.layers.0.linear_attn.in_proj_a",
                                           without=("model.layers.0.linear_attn.in_proj_a",))),
                   {"other-root": "warning"}, "language_model", "48349"),
    "fused-in-part": ("qwen3.5", both(plain("model.layers.3.self_attn.k_proj"),
                                      listing("model.layers.3.self_attn.k_proj")),
                      {"fused-split": "warning"}, "model.layers.3.self_attn.k_proj", "q_proj, k_proj, v_proj"),
    "numbered-behind": ("qwen3.5", listing("mtp.layers.4.mlp"), {"draft-numbering": "warning",
                                                                 "unmatched-entry": "warning"},
                        "mtp.layers.4.mlp", "on disk"),
    "numbered-from-0": ("qwen3.5", both(plain(f"{Q[:-6]}o_proj"), listing(f"{Q[:-6]}o_proj")),
                        {"draft-numbering": "note"}, f"{Q[:-6]}o_proj", "mtp.layers.4"),
    "bad-pattern": ("qwen3.5", listing("(unclosed", "re:.*in_proj_[ab]"), {"bad-pattern": "error"}, "(unclosed",
                    "Correct or remove"),
    "endless-pattern": ("qwen3.5", listing("([.a-z0-9_]|[.a-z0-9_]{2})*[XYZ]"), {"bad-pattern": "error"}, "[XYZ]",
                        "takes more than"),
    # weights that are not there
    "head-promised": ("deepseek-v4", drop("mtp."), {"missing-head": "error", "unmatched-entry": "warning"},
                      "mtp.0.ffn.gate", "acceptance 0 %"),
    "head-in-part": ("qwen3.5", drop("mtp.layers.0.mlp."), {"incomplete-head": "error"}, "mtp.layers.0.mlp.up_proj",
                     "acceptance falls"),
    "shared-head-absent": ("deepseek-v3", drop("model.layers.3.shared_head.head"), {"shared-head-absent": "warning"},
                           "model.layers.3.shared_head.head", "34385"),
    "no-lm-head": ("qwen3.5", both(drop("lm_head"), config(tie_word_embeddings=False, architectures=["X"])),
                   {"no-lm-head": "error"}, "lm_head", "never loaded"),
    "tied-and-stored": ("qwen3.5", config(tie_word_embeddings=True), {"tied-head-stored": "note"}, "lm_head", "embed"),
    "counted-twice": ("qwen3.5", config(num_nextn_predict_layers=3), {"head-counts-disagree": "warning"}, "",
                      "mtp_num_hidden_layers 1"),
    "layer-lost": ("qwen3.5", drop("model.layers.2."), {"missing-layers": "error", "unmatched-entry": "warning"}, "2",
                   "looks well"),
    "module-lost": ("qwen3.5", drop("model.layers.2.mlp.up_proj"), {"missing-modules": "error"},
                    "model.layers.2.mlp.up_proj", "original"),
    "expert-lost": ("qwen3-next", drop("model.layers.2.mlp.experts.1.down_proj"), {"missing-modules": "error"},
                    "model.layers.2.mlp.experts.1.down_proj", "original"),
    "whole-expert-lost": ("qwen3-next", drop("model.layers.2.mlp.experts.1."), {"missing-modules": "error"},
                          "model.layers.2.mlp.experts.1", "original"),
    # the cache
    "kv-scales": ("qwen3.5", add(model__layers__3__self_attn__k_scale=KV), {"kv-scales": "note"},
                  "model.layers.3.self_attn.k_scale", "1.0"),
    "kv-scales-of-the-head": ("qwen3.5", add(mtp__layers__0__self_attn__k_scale=KV),
                              {"kv-scales": "note", "draft-kv-scales": "warning"}, "mtp.layers.0.self_attn.k_scale",
                              "27227"),
    "kv-scales-behind": ("deepseek-v3", add(model__layers__3__self_attn__k_scale=KV),
                         {"kv-scales": "note", "draft-kv-scales": "warning"}, "model.layers.3.self_attn.k_scale",
                         "27227"),
    "kv-widths": ("qwen3.5", lambda made: made.attention("mtp.layers.0.self_attn", kv=96),
                  {"draft-kv-layout": "warning"}, "mtp.layers.0.self_attn", "192 values per token"),
    "own-indexer": ("deepseek-v3", lambda made: made.linear("model.layers.3.self_attn.indexer.wk"),
                    {"draft-indexer": "note"}, "model.layers.3.self_attn.indexer.wk", "1362"),
}  # fmt: skip

VALUES: dict[str, tuple[str, Change, dict[str, str], str, str]] = {
    "nan-codes": ("qwen3.5", tensor(UP + ".weight", codes(0x7F)), {"nan-codes": "error"}, UP, "3 FP8 codes"),
    "nan-codes-negative": ("qwen3.5", tensor(UP + ".weight", codes(0xFF)), {"nan-codes": "error"}, UP, "3 FP8 codes"),
    "nan-values": ("qwen3.5", tensor("mtp.fc.weight", at(float("nan"), 0, 0)), {"nan-values": "error"}, "mtp.fc",
                   "1 values"),
    "infinite-values": ("qwen3.5", tensor("mtp.norm.weight", at(float("inf"), 0)), {"nan-values": "error"}, "mtp.norm",
                        "1 values"),
    "nan-scale": ("qwen3.5", tensor(UP + SCALE, at(float("nan"), 0, 0)), {"bad-scale": "error"}, UP, "1 scales"),
    "zero-scale": ("qwen3.5", tensor(UP + SCALE, at(0, 1, 1)), {"bad-scale": "error"}, UP, "1 scales"),
    "negative-scale": ("qwen3.5", tensor(UP + SCALE, at(-1, 1, 1)), {"bad-scale": "error"}, UP, "1 scales"),
    "zero-block": ("qwen3.5", tensor(UP + ".weight", at(0, slice(32, 64), slice(0, 32))), {"zero-blocks": "note"}, UP,
                   "1 blocks"),
    "zero-weight": ("qwen3.5", tensor(UP + ".weight", torch.zeros_like), {"zero-weight": "warning"}, UP,
                    "never filled"),
    "scale-reciprocal": ("qwen3.5", tensor(SCALE, torch.reciprocal), {"scale-direction": "error"},
                         "model.layers.0.linear_attn.in_proj_qkv", "reciprocal"),
    "scale-of-one-reciprocal": ("qwen3.5", tensor(UP + SCALE, torch.reciprocal),
                                {"scale-direction": "error", "absurd-scale": "error", "outlier-module": "warning"}, UP,
                                "reciprocal"),
    "scale-applied-twice": ("qwen3.5", tensor(UP + SCALE, lambda old: old * old),
                            {"outlier-module": "warning"}, UP, "siblings"),
    "one-layer-too-large": ("qwen3.5", tensor(UP + SCALE, lambda old: old * 16), {"outlier-module": "warning"}, UP,
                            "siblings"),
    "not-powers-of-two": ("qwen3.5", quantization(scale_fmt="ue8m0"), {"scale-format": "warning"},
                          "model.layers.0.linear_attn.in_proj_qkv", "powers of two"),
    "norms-of-the-head-twice": ("qwen3.5", shift(*DRAFT_NORMS), {"draft-norm-convention": "error"}, "mtp.norm",
                                "converted twice"),
    "norms-of-the-head-without": ("deepseek-v3", shift(*(f"layers.3.{n}.weight" for n in (
        "enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm",
        "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm")), by=-1),
        {"draft-norm-convention": "error"}, "model.layers.3.enorm", "converted twice"),
    "norms-of-the-head-mixed": ("qwen3.5", shift(*DRAFT_NORMS[:3]), {"draft-norm-convention": "error"},
                                "mtp.pre_fc_norm_hidden", "the others not"),
    "norms-of-the-target-twice": ("qwen3.5", shift(*TARGET_NORMS, *DRAFT_NORMS), {"norm-convention": "error"},
                                  "model.norm", "1 + w"),
    "norms-of-the-target-without": ("mimo-7b", shift("norm.weight", by=-1), {"norm-convention": "error"},
                                    "model.norm", "multiplies by w"),
    "norms-of-the-target-mixed": ("qwen3.5", shift("_layernorm.weight"), {"mixed-norms": "warning"},
                                  "model.layers.0.input_layernorm", "original checkpoint"),
    "random-head": ("qwen3.5", random_head, {"random-head": "error"}, Q, "8 of 8"),
    "zero-head": ("qwen3.5", tensor(Q + ".weight", torch.zeros_like), {"zero-head": "warning"}, Q, "all zero"),
    "zero-fusion": ("qwen3.5", tensor("mtp.fc.weight", torch.zeros_like), {"zero-head": "error"}, "mtp.fc", "fusion"),
    "initial-norms": ("qwen3.5", both(*(tensor(name, torch.zeros_like) for name in DRAFT_NORMS)),
                      {"initial-draft-norms": "error"}, "mtp.norm", "exactly 0"),
    "initial-norms-w": ("mimo-7b", tensor("norm.weight", torch.ones_like),
                        {"initial-draft-norms": "error", "initial-target-norms": "warning"},
                        "model.mtp_layers.0.final_layernorm", "exactly 1"),
    "copy-differs": ("deepseek-v3", tensor("layers.3.embed_tokens.weight", at(9, 0, 0)), {"copy-differs": "warning"},
                     "model.embed_tokens.weight", "different values"),
    "head-copy-differs": ("deepseek-v3", tensor("shared_head.head.weight", lambda old: old.float()),
                          {"copy-differs": "warning"}, "lm_head.weight", "F32"),
    "fused-scales": ("qwen3.5", both(whole_tensor, tensor("layers.3.self_attn.k_proj" + SCALE, lambda old: old * 3)),
                     {"fused-scales": "note"}, "model.layers.3.self_attn.q_proj", "3.0x"),
    "fused-scales-apart": ("qwen3.5", both(whole_tensor, tensor("layers.3.self_attn.v_proj" + SCALE, lambda old:
                                                                old * 1000)),
                           {"fused-scales": "warning"}, "model.layers.3.self_attn.q_proj", "1000.0x"),
}  # fmt: skip


def audited(made: Made, folder: Path, deep: bool) -> Audit:
    return open_checkpoint(made.write(folder), lenient=True).audit(deep=deep)


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], Audit]:
    """The audit of a family's whole checkpoint."""

    @functools.cache
    def of(family: str, deep: bool) -> Audit:
        return audited(make(family), tmp_path_factory.mktemp("clean"), deep)

    return of


def check(found: Audit, before: Audit, kinds: dict[str, str], name: str, says: str) -> list[Finding]:
    known = {(f.kind, f.severity) for f in before.findings}
    # what each engine makes of it is tested where the engines are
    new = [f for f in found.findings if (f.kind, f.severity) not in known and not f.kind.startswith("engine-")]
    assert {f.kind: f.severity for f in new} == kinds, new
    told = [f"{f.message} {f.why} {f.fix} {' '.join(f.tensors)}" for f in new]
    assert any(name in text for text in told) and any(says in text for text in told), told
    assert all(f.why and (f.fix or f.severity == "note") and f.message.endswith((".", ")")) for f in new), new
    return new


@pytest.mark.parametrize("fault", HEADERS)
def test_a_fault_that_headers_show(tmp_path: Path, clean: Callable[[str, bool], Audit], fault: str) -> None:
    family, change, *expected = HEADERS[fault]
    made = make(family)
    change(made)
    check(audited(made, tmp_path, False), clean(family, False), *expected)


@pytest.mark.parametrize("fault", VALUES)
def test_a_fault_that_values_show(tmp_path: Path, clean: Callable[[str, bool], Audit], fault: str) -> None:
    family, change, *expected = VALUES[fault]
    made = make(family)
    change(made)
    check(audited(made, tmp_path, True), clean(family, True), *expected)
    shallow = open_checkpoint(tmp_path, lenient=True).audit()
    assert not {f.kind for f in shallow.findings} & set(expected[0]), "headers cannot show it"


@pytest.mark.parametrize("family", ["qwen3.5", "deepseek-v3"])
def test_a_head_that_the_index_leaves_out(tmp_path: Path, family: str) -> None:
    made = make(family)
    folder = made.write(tmp_path, shards=3)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    heads = [name for name in content["weight_map"] if name.startswith(("mtp.", "model.layers.3."))
             and (family == "deepseek-v3" or name.startswith("mtp."))]  # fmt: skip
    index.write_text(json.dumps({"weight_map": {n: f for n, f in content["weight_map"].items() if n not in heads}}))
    errors = {f.kind: f for f in open_checkpoint(folder).audit().findings if f.severity == "error"}
    assert set(errors) == {"unindexed-head", "missing-head"}
    assert f"{len(heads)} of them are the draft head's" in errors["unindexed-head"].message
    assert sorted(errors["unindexed-head"].tensors) == sorted(heads)


def test_codes_scaled_for_fnuz(tmp_path: Path) -> None:
    """Needs weights of some size: that no code of few reaches 448 is chance."""
    made = make("qwen3.5")
    for name in [name for name, tensor in made.tensors.items() if tensor.dtype == E4M3]:
        made.fp8(name.removesuffix(".weight"), made.values(*made.tensors[name].shape), top=240)
    new = {f.kind: f for f in audited(made, tmp_path, True).findings}
    assert new["fn-fnuz"].severity == "warning" and "240" in new["fn-fnuz"].message


def test_stacked_scales_beside_single_experts(tmp_path: Path) -> None:
    """What transformers writes and cannot read."""
    made = make("qwen3-next")
    experts = "model.layers.0.mlp.experts"
    for i in range(3):
        for name in ("gate", "up", "down"):
            made.drop(f"{experts}.{i}.{name}_proj{SCALE}")
    made.tensors[f"{experts}.gate_up_proj_scale_inv"] = torch.full((3, 2, H // BLOCK), 0.001)
    made.tensors[f"{experts}.down_proj_scale_inv"] = torch.full((3, H // BLOCK, 1), 0.001)
    (finding,) = (f for f in audited(made, tmp_path, False).findings if f.severity == "error")
    assert finding.kind == "stacked-scales" and len(finding.tensors) == 9


@pytest.mark.parametrize(("size", "most"), [(512, 4), (640, 1), (1024, 8)])
def test_how_far_a_shared_expert_can_be_split(tmp_path: Path, size: int, most: int) -> None:
    """Blocks of 128: 512 rows make 4 ranks at most, 640 = 5 blocks none (vLLM pull request 52915, issue 54178)."""
    tensors = {}
    for name, n, k in (("gate_proj", size, 1024), ("up_proj", size, 1024), ("down_proj", 1024, size)):
        module = f"model.layers.0.mlp.shared_expert.{name}"
        tensors[f"{module}.weight"] = torch.ones(n, k).to(E4M3)
        tensors[f"{module}{SCALE}"] = torch.ones(n // 128, k // 128)
    made = Made({"model_type": "qwen3_next", "mtp_num_hidden_layers": 0}, tensors=tensors)
    made.quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = [f for f in audited(made, tmp_path, False).findings if f.kind == "tensor-parallel"]
    said = {4: "over at most 4 ranks", 1: "cannot be split"}
    assert [said[most] in f.message for f in found] == ([True] if most < 8 else [])


def test_the_nearest_name_is_told_for_a_name_written_otherwise(tmp_path: Path) -> None:
    """GLM-5's list says indexers_proj where the tensor is indexer.weights_proj (ATOM pull request 451)."""
    made = make("deepseek-v3")
    for i in range(4):
        made.tensors[f"model.layers.{i}.self_attn.indexer.weights_proj.weight"] = made.values(H, H).bfloat16()
    listing(*(f"model.layers.{i}.self_attn.indexers_proj" for i in range(3)))(made)
    (finding,) = (f for f in audited(made, tmp_path, False).at_least("warning") if not f.kind.startswith("engine-"))
    assert (finding.kind, len(finding.tensors)) == ("unmatched-entry", 3)
    assert "nearest to the first: 'model.layers.0.self_attn.indexer.weights_proj'" in finding.message


def test_unused_files_and_copies_of_the_config(tmp_path: Path) -> None:
    folder = make("qwen3.5").write(tmp_path, shards=2)
    (folder / "extra.safetensors").write_bytes((folder / "model-00001-of-00002.safetensors").read_bytes())
    content = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    found = {f.kind: f for f in open_checkpoint(folder).audit().findings}
    assert "extra.safetensors" in found["unused-file"].message and found["unused-file"].severity == "warning"
    assert found["configs-disagree"].severity == "warning" and "exclusions" in found["configs-disagree"].message


def test_links_are_told(tmp_path: Path) -> None:
    real = make("mimo-7b").write(tmp_path / "blobs")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for file in real.iterdir():
        (folder / file.name).symlink_to(file)
    assert "links" in {f.kind for f in open_checkpoint(folder).audit().findings}
