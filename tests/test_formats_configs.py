"""What configs say of which module has which scheme; names of KV scales; formats that are refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.formats.known import KNOWN_METHODS
from mtplab.errors import CheckpointError
from tests.checkpoint_builders import E4M3, FP8_CONFIG, write_checkpoint
from tests.format_cases import E5M2, EXPERTS, K, Q, check, codes, errors, product, scales, spread

V = "model.layers.0.self_attn.v_proj"
O = "model.layers.0.self_attn.o_proj"
GATE = "model.layers.0.mlp.gate_proj"


# compressed-tensors


def ct_args(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": False, "symmetric": True, **more}


def ct(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    named = {f"group_{n}": group for n, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": named, **more}


def test_compressed_tensors_targets_count_by_name_then_pattern_then_class(tmp_path: Path) -> None:
    """The first pattern counts, matched from the name's start; a class name stands for all that is left."""
    groups = ct(
        {"targets": ["Linear"], "weights": ct_args("tensor"), "input_activations": ct_args("token", dynamic=True)},
        {"targets": ["re:.*self_attn.[qk]", "re:.*mlp.gate"], "weights": ct_args("channel"), "format": None},
        {"targets": ["re:.*q_proj", "lm_head"], "weights": ct_args("group", group_size=32)},
        {"targets": [K], "weights": ct_args("block", block_structure="128x64")},
        ignore=[],
    )  # fmt: skip
    shape, blocks = (130, 96), {}
    blocks[Q], blocks[GATE], blocks["lm_head"] = (1, 96), (1, 96), (1, 32)
    blocks[K], blocks[V] = (128, 64), (130, 96)
    tensors, expected = {}, {}
    for module, (bm, bn) in blocks.items():
        scale = scales(-(-130 // bm), -(-96 // bn), dtype=torch.bfloat16)
        tensors |= {f"{module}.weight": codes(*shape), f"{module}.weight_scale": scale}
        expected[f"{module}.weight"] = product(tensors[f"{module}.weight"], spread(scale, (bm, bn), shape))
    tensors[f"{V}.weight_scale"] = tensors[f"{V}.weight_scale"].view(1)
    plan = check(tmp_path / "x", tensors, groups, expected).plan()
    assert {name: plan.by_name[name].block for name in blocks} == blocks
    assert {name: plan.by_name[name].activation for name in blocks} == {
        Q: "none", GATE: "none", "lm_head": "none", K: "none", V: "fp8",
    }  # fmt: skip
    assert plan.by_name[V].activation_group == 0


@pytest.mark.parametrize("wrapped", ["model.language_model.", "model."])
def test_a_target_may_have_the_other_root(tmp_path: Path, wrapped: str) -> None:
    name = Q.replace("model.", wrapped, 1)
    groups = ct({"targets": [Q.replace("model.", "model.language_model.", 1)], "weights": ct_args("channel")},
                {"targets": ["re:model.layers.*k_proj"], "weights": ct_args("tensor")})  # fmt: skip
    key = name.replace("q_proj", "k_proj")
    tensors = {f"{name}.weight": codes(40, 32), f"{name}.weight_scale": scales(40, 1),
               f"{key}.weight": codes(40, 32), f"{key}.weight_scale": scales(1)}  # fmt: skip
    expected = {f"{module}.weight": product(tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"])
                for module in (name, key)}  # fmt: skip
    check(tmp_path / "x", tensors, groups, expected)


def test_activations_of_compressed_tensors_follow_their_own_strategy(tmp_path: Path) -> None:
    dynamic = {"num_bits": 8, "type": "float", "dynamic": True}
    blocks = {"weights": ct_args("block", block_structure=[128, 128])}
    groups = ct(
        {"targets": [Q], **blocks, "input_activations": {**dynamic, "strategy": "group", "group_size": 128}},
        {"targets": [K], **blocks, "input_activations": {**dynamic, "strategy": "token"}},
        {"targets": [V], "weights": ct_args("tensor"), "input_activations": ct_args("tensor")},
        {"targets": [O], "weights": ct_args("tensor"), "input_activations": ct_args("tensor")},
    )
    tensors = {f"{V}.input_scale": scales(1)}
    for module in (Q, K, V, O):
        tensors |= {f"{module}.weight": codes(128, 128), f"{module}.weight_scale": scales(1, 1)}
    plan = open_checkpoint(
        write_checkpoint(tmp_path / "x", tensors, groups, config={"mtp_num_hidden_layers": 0})
    ).plan()
    found = {name: plan.by_name[name] for name in (Q, K, V, O)}
    assert [found[name].activation_group for name in (Q, K, O)] == [128, 0, 0]
    stored = found[V].input_scale
    assert stored is not None and stored.name == f"{V}.input_scale" and "stored for them" in found[V].rule
    assert found[O].input_scale is None and "but there is none" in found[O].rule


@pytest.mark.parametrize(("method", "covers"), [("compressed-tensors", True), ("fp8", False)])
def test_a_pattern_of_compressed_tensors_ends_anywhere(tmp_path: Path, method: str, covers: bool) -> None:
    """`re:.*gate` covers gate_proj there (re.match), and is to end at a dot in transformers."""
    quantization = ct({"targets": ["Linear"], "weights": ct_args("tensor")}, ignore=["re:.*gate"])
    if method == "fp8":
        quantization = {**FP8_CONFIG, "modules_to_not_convert": [".*gate"]}
    tensors = {f"{GATE}.weight": torch.ones(4, 4).bfloat16()}
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", tensors, quantization))
    plan = ckpt.plan()
    assert ("gate': kept in BF16" in plan.by_name[GATE].rule) == covers
    assert any("name no module" in warning for warning in plan.warnings) != covers


# Quark


def test_quark_overrides_by_layer(tmp_path: Path) -> None:
    def config(**weight: Any) -> dict[str, Any]:
        return {"weight": {"dtype": "fp8_e4m3", **weight}, "input_tensors": {"is_dynamic": True}}

    quantization = {
        "quant_method": "quark", "exclude": ["lm_head"],
        "global_quant_config": config(qscheme="per_tensor"),
        "layer_quant_config": {"*q_proj": config(qscheme="per_channel", ch_axis=0),
                               "*[k]_proj": config(qscheme="per_group", group_size=32),
                               V: {"weight": {"dtype": "fp8_e5m2", "qscheme": "per_tensor"}},
                               "*experts*": {"weight": {"dtype": "int4", "qscheme": "per_group"}}},
    }  # fmt: skip
    expert = f"{EXPERTS}.0.up_proj"
    tensors = {f"{Q}.weight": codes(40, 64), f"{Q}.weight_scale": scales(40, dtype=torch.bfloat16),
               f"{K}.weight": codes(40, 64), f"{K}.weight_scale": scales(40, 2, dtype=torch.bfloat16),
               f"{V}.weight": codes(40, 64, dtype=E5M2), f"{V}.weight_scale": scales(dtype=torch.bfloat16),
               f"{O}.weight": codes(40, 64), f"{O}.weight_scale": scales(dtype=torch.bfloat16)}  # fmt: skip
    grids = {Q: (1, 64), K: (1, 32), V: (40, 64), O: (40, 64)}
    expected = {}
    for module, block in grids.items():
        grid = tensors[f"{module}.weight_scale"].view(-(-40 // block[0]), -(-64 // block[1]))
        expected[f"{module}.weight"] = product(tensors[f"{module}.weight"], spread(grid, block, (40, 64)))
    plan = check(tmp_path / "x", tensors, quantization, expected).plan()
    assert [plan.by_name[name].activation for name in (Q, V)] == ["fp8", "none"]
    int4 = {f"{expert}.weight": torch.ones(40, 8, dtype=torch.int32), f"{expert}.weight_scale": scales(40, 2)}
    (message,) = errors(check(tmp_path / "y", {**tensors, **int4}, quantization, expected)).values()
    assert repr(f"{expert}.weight") in message and "dtype 'int4'" in message


# auto-round


def auto_round(**more: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "packing_format": "auto_round:fp8", "bits": 8, "data_type": "fp",
            "act_bits": 8, "act_dynamic": True, **more}  # fmt: skip


def test_auto_round_e5m2_and_blocks(tmp_path: Path) -> None:
    tensors = {f"{Q}.weight": codes(70, 96, dtype=E5M2), f"{Q}.weight_scale_inv": scales(3, 2)}
    expected = {f"{Q}.weight": product(tensors[f"{Q}.weight"],
                                       spread(tensors[f"{Q}.weight_scale_inv"], (32, 64), (70, 96)))}  # fmt: skip
    check(tmp_path / "x", tensors, auto_round(group_size=[32, 64], fmt="e5m2"), expected)


def test_auto_round_overrides_by_layer(tmp_path: Path) -> None:
    extra = {K: {"bits": 16, "data_type": "float"}, r"model\.layers\.\d+\.self_attn\.v_proj": {"group_size": 0},
             O: {"fmt": "e5m2"}, r".*experts.*": {"bits": 4, "data_type": "int", "group_size": 128}}  # fmt: skip
    expert = f"{EXPERTS}.0.up_proj"
    tensors = {f"{Q}.weight": codes(40, 64), f"{Q}.weight_scale": scales(40),
               f"{V}.weight": codes(40, 64), f"{V}.weight_scale": scales(1),
               f"{O}.weight": codes(40, 64, dtype=E5M2), f"{O}.weight_scale": scales(40),
               f"{K}.weight": torch.randn(40, 64).bfloat16(), f"{K}.weight_scale": scales(40)}  # fmt: skip
    expected = {f"{module}.weight": product(tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].view(-1, 1))
                for module in (Q, V, O)}  # fmt: skip
    quantization = auto_round(group_size=-1, extra_config=extra)
    ckpt = check(tmp_path / "x", tensors, quantization, expected)
    kept = ckpt.plan().by_name[K]
    assert kept.weight == "bf16" and f"extra_config lists {K!r}" in kept.rule and "is ignored" in kept.rule
    packed = {f"{expert}.qweight": torch.ones(8, 40, dtype=torch.int32)}
    (message,) = errors(check(tmp_path / "y", {**tensors, **packed}, quantization, expected)).values()
    assert "GPTQ or AWQ" in message


def test_auto_round_writes_a_scale_per_channel_under_fp8_too(tmp_path: Path) -> None:
    tensors = {f"{Q}.weight": codes(40, 64), f"{Q}.weight_scale": scales(40), f"{Q}.input_scale": scales(1)}
    quantization = {**auto_round(group_size=-1, act_dynamic=False), "quant_method": "fp8",
                    "activation_scheme": "static"}  # fmt: skip
    expected = product(tensors[f"{Q}.weight"], tensors[f"{Q}.weight_scale"].view(40, 1))
    check(tmp_path / "x", tensors, quantization, {f"{Q}.weight": expected})


# torchao


@pytest.mark.parametrize(("granularity", "shape", "block"), [
    ({"_type": "PerTensor", "_data": {}}, (1, 1), (130, 96)),
    ({"_type": "PerRow", "_data": {"dim": -1}}, (130, 1), (1, 96)),
    ([{"_type": "PerBlock", "_data": {"block_size": [1, 128]}},
      {"_type": "PerBlock", "_data": {"block_size": [128, 64]}}], (2, 2), (128, 64)),
    (None, (1, 1), (130, 96)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_torchao(tmp_path: Path, granularity: Any, shape: tuple, block: tuple, dtype: str) -> None:
    weight, scale = codes(130, 96, dtype=getattr(torch, dtype)), scales(*shape)
    tensors = {f"{Q}._weight_qdata": weight, f"{Q}._weight_scale": scale, "model.norm.weight": torch.ones(3)}
    data = {"granularity": granularity, "weight_dtype": {"_type": "torch.dtype", "_data": dtype}}
    default = {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": data}
    quantization = {"quant_method": "torchao", "quant_type": {"default": default}}
    folder = tmp_path / "x"
    expected = product(weight, spread(scale, block, (130, 96)))
    ckpt = check(folder, tensors, quantization, {f"{Q}.weight": expected})
    assert ckpt.plan().by_name[Q].activation == "fp8"
    default["_type"] = "FqnToConfig"
    with pytest.raises(CheckpointError, match="FqnToConfig"):
        open_checkpoint(write_checkpoint(folder, tensors, quantization))


# the KV cache


@pytest.mark.parametrize(("names", "others"), [
    (["self_attn.k_scale", "self_attn.v_scale"], ["self_attn.q_scale"]),  # compressed-tensors
    (["self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"], []),  # ModelOpt
    (["self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"], ["self_attn.q_proj.output_scale"]),  # Quark
    (["self_attn.kv_scale"], []),  # AutoFP8
    (["self_attn.attn.k_scale", "self_attn.attn.v_scale"], ["self_attn.rotary_scale"]),
])  # fmt: skip
@pytest.mark.parametrize("quantization", [FP8_CONFIG, None], ids=["fp8", "plain"])
def test_kv_scales_under_every_name(tmp_path: Path, names: list[str], others: list[str], quantization: Any) -> None:
    stem = "model.layers.0."
    tensors = {stem + name: scales(1) for name in (*names, *others)} | {"model.norm.weight": torch.ones(3)}
    tensors[f"{Q}.weight"] = torch.ones(3, 3)
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", tensors, quantization))
    assert set(ckpt.kv_scales()) == {stem + name for name in names}
    assert not [problem for problem in ckpt.problems if problem.severity == "error"]
    assert ckpt.plan().nbytes() == sum(info.nbytes for info in ckpt.tensors.values())


# recognised, and refused by name


@pytest.mark.parametrize("method", KNOWN_METHODS)
def test_a_known_method_is_named(tmp_path: Path, method: str) -> None:
    folder = write_checkpoint(tmp_path / "x", {"a.weight": torch.ones(2, 2)}, {"quant_method": method})
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert f"{method!r}, {KNOWN_METHODS[method]}: expected" in str(caught.value)
    assert open_checkpoint(folder, lenient=True).refused is not None


@pytest.mark.parametrize(("quantization", "words"), [
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["'NVFP4'", "FP8"]),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, ["'W4A8_AWQ'"]),
    (ct({"targets": ["Linear"], "format": "nvfp4-pack-quantized",
         "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}), ["nvfp4-pack-quantized"]),
    (ct({"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
        format="int-quantized"), ["int-quantized", "8' bits of type 'int'"]),
    (ct({"targets": ["Linear"], "weights": None}), ["no weight quantisation"]),
    (auto_round(bits=4, data_type="int"), ["'4' bits", "'int'"]),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, ["'int4'"]),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}}, ["'Int4WeightOnly"]),
])  # fmt: skip
def test_what_is_no_fp8_is_named(tmp_path: Path, quantization: dict, words: list[str]) -> None:
    folder = write_checkpoint(tmp_path / "x", {"a.weight": torch.ones(2, 2)}, quantization)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for word in (str(folder), "expected", *words):
        assert word in str(caught.value)


def integers(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.randint(0, 100, shape).to(dtype)


PACKED = {
    "ModelOpt NVFP4": ({f"{Q}.weight": integers(48, 32), f"{Q}.weight_scale": torch.ones(48, 4).to(E4M3),
                        f"{Q}.weight_scale_2": torch.tensor(0.1)}, f"{Q}.weight", "NVFP4"),
    "compressed-tensors NVFP4": ({f"{Q}.weight_packed": integers(48, 32), f"{Q}.weight_global_scale": torch.ones(1)},
                                 f"{Q}.weight_packed", "NVFP4"),
    "GPTQ": ({f"{Q}.qweight": integers(8, 48, dtype=torch.int32), f"{Q}.scales": torch.ones(1, 48).half()},
             f"{Q}.qweight", "GPTQ"),
    "bitsandbytes": ({f"{Q}.weight": integers(48 * 32, 1), f"{Q}.weight.quant_map": torch.ones(16)},
                     f"{Q}.weight", "bitsandbytes"),
    "bitsandbytes int8": ({f"{Q}.weight": integers(48, 64, dtype=torch.int8), f"{Q}.SCB": torch.ones(48)},
                          f"{Q}.weight", "INT8"),
    "gpt-oss": ({f"{EXPERTS}.gate_up_proj_blocks": integers(2, 48, 2, 16), f"{EXPERTS}.gate_up_proj_scales":
                 integers(2, 48, 2)}, f"{EXPERTS}.gate_up_proj_blocks", "MXFP4"),
    "integers alone": ({f"{Q}.weight": integers(48, 64, dtype=torch.int8)}, f"{Q}.weight", "no scale beside them"),
}  # fmt: skip


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("quantization", [None, FP8_CONFIG], ids=["no config", "fp8"])
def test_codes_of_another_format_are_never_taken_for_numbers(tmp_path: Path, case: str, quantization: Any) -> None:
    tensors, name, word = PACKED[case]
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", {**tensors, "a": torch.ones(2)}, quantization))
    (found,) = (problem for problem in ckpt.problems if problem.severity == "error")
    assert (found.tensor, found.kind) == (name, "packed") and word in found.message
    with pytest.raises(CheckpointError):
        ckpt.dequantize(name)
    with pytest.raises(CheckpointError):
        next(iter(ckpt.bands(name)))
    assert torch.equal(ckpt.read(name), tensors[name])
