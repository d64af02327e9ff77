"""Dialects of the formats that no committed file has: written from values here, read back bit for bit."""

import importlib
import json
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import formats as formats_package
from mtplab.checkpoint import open_checkpoint
from mtplab.errors import CheckpointError
from tests.checkpoint_builders import E4M3, FP8_CONFIG, write_checkpoint
from tests.format_cases import (
    E5M2,
    E8M0,
    EXPERTS,
    K,
    Q,
    check,
    codes,
    errors,
    exponents,
    powers,
    product,
    scales,
    spread,
)  # fmt: skip

# HF fp8


@pytest.mark.parametrize("block", [(32, 64), (128, 128)])
def test_transformers_stacks_the_scales_of_experts_that_lie_one_by_one(tmp_path: Path, block: tuple[int, int]) -> None:
    e, i, h = 3, block[0] * 2, block[1] + 40
    tensors, expected = {}, {}
    rows, columns = i // block[0], -(-h // block[1])
    both, down = scales(e, 2 * rows, columns), scales(e, -(-h // block[0]), -(-i // block[1]))
    tensors[f"{EXPERTS}.gate_up_proj_scale_inv"], tensors[f"{EXPERTS}.down_proj_scale_inv"] = both, down
    for n in range(e):
        for which, shape, scale in (("gate", (i, h), both[n, :rows]), ("up", (i, h), both[n, rows:]),
                                    ("down", (h, i), down[n])):  # fmt: skip
            name = f"{EXPERTS}.{n}.{which}_proj.weight"
            tensors[name] = codes(*shape)
            expected[name] = product(tensors[name], spread(scale, block, shape))
    ckpt = check(tmp_path / "x", tensors, {**FP8_CONFIG, "weight_block_size": list(block)}, expected)
    assert ckpt.problems == ()
    assert ckpt.plan().nbytes() == sum(info.nbytes for info in ckpt.tensors.values())


def test_stacked_scales_that_gate_and_up_share_cannot_be_told_apart(tmp_path: Path) -> None:
    tensors = {f"{EXPERTS}.gate_up_proj_scale_inv": scales(1, 3, 1)}  # ceil(2 * 160 / 128), one block lies across
    for which in ("gate", "up"):
        tensors[f"{EXPERTS}.0.{which}_proj.weight"] = codes(160, 128)
    found = errors(check(tmp_path / "x", tensors, FP8_CONFIG, {}))
    assert len(found) == 2
    for message in found.values():
        assert "gate_up_proj_scale_inv' [1, 3, 1]" in message and "cannot be told apart" in message


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("names", [("weight_scale_inv", "activation_scale"), ("weight_scale", "input_scale"),
                                   ("qscale_weight", "qscale_act")])  # fmt: skip
def test_a_scale_per_tensor_under_every_name(tmp_path: Path, shape: tuple[int, ...], names: tuple[str, str]) -> None:
    weight, activation = names
    tensors = {f"{Q}.weight": codes(48, 80), f"{Q}.{weight}": scales(*shape), f"{Q}.{activation}": scales(*shape)}
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    expected = product(tensors[f"{Q}.weight"], tensors[f"{Q}.{weight}"].reshape(1, 1))
    ckpt = check(tmp_path / "x", tensors, quantization, {f"{Q}.weight": expected})
    assert ckpt.problems == ()
    (module,) = ckpt.plan().modules
    assert module.nbytes == 48 * 80 + 4 + 4 and module.block == (48, 80)
    assert module.input_scale is not None and module.input_scale.name == f"{Q}.{activation}"


@pytest.mark.parametrize("stored", ["F32", "F8_E8M0", "U8"])
def test_powers_of_two_as_scales(tmp_path: Path, stored: str) -> None:
    exponent = exponents(2, 3)
    exponent[0, 0], exponent[0, 1] = 0, 254
    weight = codes(130, 300).float().clamp(-1, 1).to(E4M3)
    scale = {"F32": powers(exponent), "F8_E8M0": exponent.view(E8M0), "U8": exponent}[stored]
    tensors = {f"{Q}.weight": weight, f"{Q}.weight_scale_inv": scale}
    expected = product(weight, spread(powers(exponent), (128, 128), (130, 300)))
    ckpt = check(tmp_path / "x", tensors, {**FP8_CONFIG, "scale_fmt": "ue8m0"}, {f"{Q}.weight": expected})
    assert float(ckpt.scaled(Q).scale[0, 0]) == 2.0**-127


@pytest.mark.parametrize("stored", [E8M0, torch.uint8])
def test_the_exponent_255_is_not_a_number(tmp_path: Path, stored: torch.dtype) -> None:
    exponent = exponents(1, 3)
    exponent[0, 2] = 255
    tensors = {f"{Q}.weight": codes(128, 300), f"{Q}.weight_scale_inv": exponent.view(stored)}
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", tensors, FP8_CONFIG))
    with pytest.raises(CheckpointError, match=r"1 of 3 scales are not finite and positive.*nan at \[0, 2\]"):
        ckpt.dequantize(Q)


def test_packed_exponents_of_a_running_kernel_are_refused(tmp_path: Path) -> None:
    tensors = {f"{Q}.weight": codes(128, 512), f"{Q}.weight_scale_inv": torch.ones(1, 1, dtype=torch.int32)}
    ckpt = check(tmp_path / "x", tensors, FP8_CONFIG, {})
    (message,) = (problem.message for problem in ckpt.problems)
    assert "I32" in message and "running kernels" in message


@pytest.mark.parametrize("dtype", [E5M2, torch.float8_e5m2fnuz, torch.uint8, torch.int8])
def test_e5m2(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = codes(48, 80, dtype=E5M2 if dtype in (torch.uint8, torch.int8) else dtype)
    tensors = {f"{Q}.weight": weight.view(dtype), f"{Q}.weight_scale_inv": scales(1, 1)}
    expected = product(weight, tensors[f"{Q}.weight_scale_inv"])
    check(tmp_path / "x", tensors, {**FP8_CONFIG, "fmt": "e5m2"}, {f"{Q}.weight": expected})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.uint8, torch.int8])
def test_fnuz_and_bytes_that_writers_stored_as_integers(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = codes(48, 80, dtype=torch.float8_e4m3fnuz if dtype == torch.float8_e4m3fnuz else E4M3)
    tensors = {f"{Q}.weight": weight.view(dtype), f"{Q}.weight_scale_inv": scales(1, 1, dtype=torch.bfloat16)}
    expected = product(weight, tensors[f"{Q}.weight_scale_inv"])
    ckpt = check(tmp_path / "x", tensors, FP8_CONFIG, {f"{Q}.weight": expected})
    assert [problem.kind for problem in ckpt.problems] == ([] if dtype.is_floating_point else ["bytes-as-integers"])


def test_deepseek_v4_is_read_but_for_its_fp4_experts(tmp_path: Path) -> None:
    """`.scale` under bare names, FP4 in bytes beside it, and scales that are parameters."""
    fp8 = {"layers.0.attn.wq_a": (256, 384), "layers.0.ffn.shared_experts.w1": (128, 384), "mtp.0.e_proj": (384, 384)}
    tensors: dict[str, torch.Tensor] = {"embed.weight": torch.randn(32, 384).bfloat16()}
    expected = {}
    for module, shape in fp8.items():
        exponent = exponents(-(-shape[0] // 128), -(-shape[1] // 128))
        tensors |= {f"{module}.weight": codes(*shape), f"{module}.scale": exponent.view(E8M0)}
        expected[f"{module}.weight"] = product(
            tensors[f"{module}.weight"], spread(powers(exponent), (128, 128), shape)
        )
    plain = {"layers.0.hc_attn_scale": torch.randn(3), "layers.0.hc_ffn_scale": torch.randn(3),
             "layers.0.attn.q_norm.scale": torch.randn(384).bfloat16(), "mtp.0.hc_head_scale": torch.randn(1),
             "layers.0.attn.compressor.wkv.weight": torch.randn(64, 384).bfloat16()}  # fmt: skip
    expert = "layers.0.ffn.experts.7.w1"
    packed = {f"{expert}.weight": torch.randint(-128, 127, (128, 192), dtype=torch.int8),
              f"{expert}.scale": exponents(128, 12).view(E8M0)}  # fmt: skip
    quantization = {**FP8_CONFIG, "scale_fmt": "ue8m0", "fmt": "e4m3"}
    config = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "mtp_num_hidden_layers": None}
    ckpt = check(tmp_path / "x", {**tensors, **plain, **packed}, quantization, expected, config)
    (message,) = errors(ckpt).values()
    assert repr(f"{expert}.weight") in message and "FP4 codes, two in a byte (MXFP4)" in message
    for name, values in plain.items():
        assert torch.equal(ckpt.dequantize(name), values.float())
    plan = check(tmp_path / "y", {**tensors, **plain}, quantization, expected, config).plan()
    assert plan.by_name["mtp.0.e_proj"].part == "draft" and plan.by_name["embed"].part == "embedding"
    assert {name.removesuffix(".weight") for name in plain} <= plan.by_name.keys()


# FBGEMM and ModelOpt: stacked experts


@pytest.mark.parametrize(("h", "i"), [(96, 40), (64, 64)])
def test_fbgemm_stacks_experts_transposed(tmp_path: Path, h: int, i: int) -> None:
    """The scale of down_proj [e, h, 1] belongs to the last axis of [e, i, h], also where i is h."""
    up, down = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    tensors = {up: codes(2, h, 2 * i), f"{up}_scale": scales(2, 1, 2 * i),
               down: codes(2, i, h), f"{down}_scale": scales(2, h, 1),
               f"{Q}.weight": codes(h, i), f"{Q}.weight_scale": scales(h, 1)}  # fmt: skip
    expected = {up: product(tensors[up], tensors[f"{up}_scale"]),
                down: product(tensors[down], tensors[f"{down}_scale"].view(2, 1, h)),
                f"{Q}.weight": product(tensors[f"{Q}.weight"], tensors[f"{Q}.weight_scale"])}  # fmt: skip
    quantization = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    assert check(tmp_path / "x", tensors, quantization, expected).scaled(down).block == (1, i, 1)


def test_modelopt_stacks_experts_with_a_scale_for_all(tmp_path: Path) -> None:
    up, down = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"
    tensors, expected = {}, {}
    for name, shape in ((up, (2, 96, 80)), (down, (2, 40, 96))):
        tensors |= {name: codes(*shape), f"{name}_weight_scale": scales(), f"{name}_input_scale": scales()}
        expected[name] = product(tensors[name], tensors[f"{name}_weight_scale"])
    ckpt = check(tmp_path / "x", tensors, {"quant_method": "modelopt", "quant_algo": "FP8"}, expected)
    assert ckpt.problems == ()
    modules = {module.name: module for module in ckpt.plan().modules}
    assert modules.keys() == {up, down} and modules[up].nbytes == 2 * 96 * 80 + 4 + 4


@pytest.mark.parametrize("number_first", [True, False])
def test_modelopt_numbers_experts_before_or_after_the_projection(tmp_path: Path, number_first: bool) -> None:
    tensors, expected = {}, {}
    for n in range(2):
        for which in ("gate", "up", "down"):
            module = f"{EXPERTS}.{n}.{which}_proj" if number_first else f"{EXPERTS}.{which}_proj.{n}"
            tensors |= {f"{module}.weight": codes(40, 24), f"{module}.weight_scale": scales(40)}
            expected[f"{module}.weight"] = product(
                tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"].view(40, 1)
            )
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
    ckpt = check(tmp_path / "x", tensors, quantization, expected)
    assert ckpt.problems == () and {module.activation_group for module in ckpt.plan().modules} == {0}


@pytest.mark.parametrize("stored", [torch.uint8, E8M0])
@pytest.mark.parametrize("quantization", [{"quant_method": "modelopt", "quant_algo": "MXFP8"},
                                          {"quant_method": "mxfp8"},
                                          {"quant_method": "compressed-tensors", "format": "mxfp8-quantized",
                                           "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
                                               "num_bits": 8, "type": "float", "strategy": "group",
                                               "group_size": 32}}}}])  # fmt: skip
def test_mxfp8(tmp_path: Path, stored: torch.dtype, quantization: dict) -> None:
    exponent = exponents(48, 3)
    exponent[0, 0] = 0
    tensors = {f"{Q}.weight": codes(48, 96), f"{Q}.weight_scale": exponent.view(stored)}
    expected = product(tensors[f"{Q}.weight"], spread(powers(exponent), (1, 32), (48, 96)))
    ckpt = check(tmp_path / "x", tensors, quantization, {f"{Q}.weight": expected})
    assert ckpt.plan().by_name[Q].activation_group == 32


def test_mixed_precision_names_what_is_nvfp4_and_reads_the_rest(tmp_path: Path) -> None:
    layers = {Q: {"quant_algo": "FP8"}, K: {"quant_algo": "fp8_pb_wo"}, EXPERTS: {"quant_algo": "NVFP4"}}
    tensors = {f"{Q}.weight": codes(48, 96), f"{Q}.weight_scale": scales(), f"{Q}.input_scale": scales(),
               f"{K}.weight": codes(130, 96), f"{K}.weight_scale": scales(2, 1, 1, 1)}  # fmt: skip
    wrapped = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    expert = f"{EXPERTS}.3.up_proj"
    nvfp4 = {f"{expert}.weight": torch.randint(0, 255, (48, 32), dtype=torch.uint8),
             f"{expert}.weight_scale": torch.ones(48, 4).to(E4M3),
             f"{expert}.weight_scale_2": torch.tensor(0.1)}  # fmt: skip
    by_block = spread(tensors[f"{K}.weight_scale"].view(2, 1), (128, 128), (130, 96))
    values = {f"{Q}.weight": product(tensors[f"{Q}.weight"], tensors[f"{Q}.weight_scale"]),
              f"{K}.weight": product(tensors[f"{K}.weight"], by_block)}  # fmt: skip
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    ckpt = check(tmp_path / "x", {**tensors, **nvfp4}, quantization, values)
    (message,) = errors(ckpt).values()
    assert repr(f"{expert}.weight") in message and "NVFP4" in message
    expected = {name.replace("model.", "model.language_model.", 1): value for name, value in values.items()}
    plan = check(tmp_path / "y", wrapped, quantization, expected).plan()
    treated = {module.name.rpartition(".")[2]: module.activation for module in plan.modules}
    assert treated == {"q_proj": "fp8", "k_proj": "none"}
    only = {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {Q: {"quant_algo": "NVFP4"}}}}
    with pytest.raises(CheckpointError, match="MIXED_PRECISION with one of them"):
        check(tmp_path / "z", tensors, {"quant_method": "modelopt", **only}, {})


@pytest.mark.parametrize("algo", ["FP8", "fp8"])
def test_a_config_that_stands_in_hf_quant_config_alone(tmp_path: Path, algo: str) -> None:
    tensors = {f"{Q}.weight": codes(48, 96), f"{Q}.weight_scale": scales()}
    folder = write_checkpoint(tmp_path / "x", tensors)
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": algo, "kv_cache_quant_algo": "FP8",
                                                                  "exclude_modules": ["lm_head"]}}  # fmt: skip
    (folder / "hf_quant_config.json").write_text(json.dumps(content))
    ckpt = open_checkpoint(folder)
    assert torch.equal(ckpt.dequantize(Q), product(tensors[f"{Q}.weight"], tensors[f"{Q}.weight_scale"]))
    assert ckpt.quantization is not None
    assert (ckpt.quantization.exclusions, ckpt.quantization.kv_cache) == (("lm_head",), "'FP8'")
    (folder / "hf_quant_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="hf_quant_config.json"):
        open_checkpoint(folder)


# a new format


NEW = '''
"""A format that did not exist."""

from mtplab.checkpoint.formats.base import Format, QuantizationConfig, Scheme

FORMAT = Format(
    name="Brand new",
    methods=("brand_new",),
    pairs=((".codes", ".times"),),
    parse=lambda content, where: QuantizationConfig("brand_new", where, lambda module: Scheme("channel")),
)
'''


def test_a_new_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "brand_new_format.py").write_text(NEW)
    monkeypatch.setattr(formats_package, "__path__", [*formats_package.__path__, str(tmp_path / "added")])
    monkeypatch.delitem(importlib.sys.modules, f"{formats_package.__name__}.brand_new_format", raising=False)
    formats_package.formats.cache_clear()
    try:
        tensors = {f"{Q}.codes": codes(48, 96), f"{Q}.times": scales(48)}
        folder = write_checkpoint(tmp_path / "x", tensors, {"quant_method": "brand_new"})
        ckpt = open_checkpoint(folder)
        expected = product(tensors[f"{Q}.codes"], tensors[f"{Q}.times"].view(48, 1))
        assert torch.equal(ckpt.dequantize(f"{Q}.weight"), expected)
        assert ckpt.plan().by_name[Q].weight == "fp8"
    finally:
        monkeypatch.undo()
        importlib.sys.modules.pop(f"{formats_package.__name__}.brand_new_format", None)
        formats_package.formats.cache_clear()
    with pytest.raises(CheckpointError, match="'brand_new'"):
        open_checkpoint(folder)
