"""Values: what real writers' files dequantise to, bit for bit, and every pair of weight and scale that is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.checkpoint import Checkpoint
from mtplab.checkpoint.formats import Scheme
from mtplab.errors import CheckpointError
from tests.checkpoint_builders import (
    CHECKPOINTS,
    E4M3,
    FP8_CONFIG,
    dequantised,
    qwen_fp8,
    qwen_tensors,
    tensor_file,
    write_checkpoint,
)

UP = "model.layers.0.mlp.up_proj.weight"
UP_SCALE = "model.layers.0.mlp.up_proj.weight_scale_inv"
REAL = sorted(path.name for path in CHECKPOINTS.iterdir())
READ = [name for name in REAL if name != "ct-nvfp4-reject"]  # which is no FP8


# files written by real tools


@pytest.mark.parametrize("name", READ)
def test_real_files_dequantise_bit_for_bit(name: str) -> None:
    ckpt = open_checkpoint(CHECKPOINTS / name / "ckpt")
    expected = load_file(CHECKPOINTS / name / "expected.safetensors")
    quantised = [module for module in ckpt.plan().modules if module.weight == "fp8"]
    assert len(expected) == len(quantised) and (expected or name == "tf-fp8-llama160-ragged")
    for tensor, values in expected.items():
        assert torch.equal(ckpt.dequantize(tensor), values.float()), tensor
        assert torch.equal(ckpt.scaled(tensor).dequantize(), values.float()), tensor
    assert not [problem for problem in ckpt.problems if problem.severity == "error"]


@pytest.mark.parametrize("name", READ)
def test_every_tensor_is_read_as_safetensors_reads_it(name: str) -> None:
    ckpt = open_checkpoint(CHECKPOINTS / name / "ckpt")
    for shard in ckpt.files.shards:
        with safe_open(shard, "pt") as file:
            for tensor in file.keys():  # noqa: SIM118 - it is no mapping
                theirs, ours = file.get_tensor(tensor), ckpt.read(tensor)
                assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
                same = ours.contiguous().view(-1).view(torch.uint8) == theirs.contiguous().view(-1).view(torch.uint8)
                assert bool(same.all())


def test_nvfp4_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"'nvfp4-pack-quantized'.*expected FP8"):
        open_checkpoint(CHECKPOINTS / "ct-nvfp4-reject" / "ckpt")


def test_untileable_weights_stay_as_they_are_and_their_junk_scales_are_reported() -> None:
    ckpt = open_checkpoint(CHECKPOINTS / "tf-fp8-llama160-ragged" / "ckpt")
    scales = [name for name in ckpt.tensors if name.endswith("_inv")]
    assert len(scales) == 7
    assert sorted(problem.tensor for problem in ckpt.problems if problem.kind == "junk-scale") == sorted(scales)
    for scale in scales:
        weight = scale.removesuffix("_scale_inv")
        assert ckpt.tensors[weight].dtype == "BF16"
        assert torch.equal(ckpt.dequantize(weight), ckpt.read(weight).float())
    assert {module.weight for module in ckpt.plan().modules} == {"bf16"}


def test_integer_bytes_are_codes_where_the_config_says_fp8_and_said_to_be() -> None:
    ckpt = open_checkpoint(CHECKPOINTS / "derived-int8-viewed-fp8" / "ckpt")
    stored = {name for name, info in ckpt.tensors.items() if info.dtype == "I8"}
    assert stored == {problem.tensor for problem in ckpt.problems if problem.kind == "bytes-as-integers"}
    assert len(stored) == 7


def test_junk_scales_beside_bf16_weights_are_ignored_and_reported() -> None:
    ckpt = open_checkpoint(CHECKPOINTS / "tf-fp8-qwen3_5-b128" / "ckpt")
    kept = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(ckpt.dequantize(kept), ckpt.read(kept).float())
    junk = {problem.tensor for problem in ckpt.problems if problem.kind == "junk-scale"}
    assert junk == {f"model.layers.1.self_attn.{p}_proj.weight_scale_inv" for p in "kv"}
    assert "is ignored" in ckpt.plan().by_name["model.layers.1.self_attn.k_proj"].rule


def test_the_bundled_checkpoints_open(bundled: Path, bundled_fp8: Path) -> None:
    plain, fp8 = open_checkpoint(bundled), open_checkpoint(bundled_fp8)
    assert plain.quantization is None and fp8.quantization is not None
    assert not [problem for problem in (*plain.problems, *fp8.problems) if problem.severity == "error"]
    for name in plain.tensors:
        values, approximate = plain.dequantize(name), fp8.dequantize(name)
        assert (approximate - values).norm() <= 0.04 * values.norm() + 1e-9


# the definition


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 130), (300, 7)])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ragged_blocks_follow_the_config(tmp_path: Path, block: tuple[int, int], scale_dtype: torch.dtype) -> None:
    codes = (torch.randn(130, 160) * 100).to(E4M3)
    scale = (torch.rand(-(-130 // block[0]), -(-160 // block[1])) + 0.1).to(scale_dtype)
    tensors = {UP: codes, UP_SCALE: scale}
    folder = write_checkpoint(tmp_path / "x", tensors, {**FP8_CONFIG, "weight_block_size": list(block)})
    ckpt = open_checkpoint(folder)
    assert torch.equal(ckpt.dequantize(UP), dequantised(codes, scale.float(), block))
    scaled = ckpt.scaled(UP)
    assert scaled.block == block and scaled.scale.dtype == torch.float32 and scaled.data.dtype == E4M3
    assert torch.equal(scaled.dequantize(), ckpt.dequantize(UP))


def test_plain_tensors_are_cast(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.randn(3, 5).bfloat16(),
        "b.weight": torch.randn(3, 5).half(),
        "c.weight": torch.randn(3, 5),
        "d": torch.tensor(7),
        "e": torch.empty(0, 4),
    }
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", tensors))
    for name, tensor in tensors.items():
        assert ckpt.read(name).dtype == tensor.dtype and torch.equal(ckpt.read(name), tensor)
        assert ckpt.dequantize(name).dtype == torch.float32 and torch.equal(ckpt.dequantize(name), tensor.float())


def test_what_is_read_is_a_copy(tmp_path: Path) -> None:
    ckpt = open_checkpoint(qwen_fp8(tmp_path / "x"))
    first = ckpt.read("mtp.norm.weight")
    kept = first.clone()
    first.zero_()
    assert torch.equal(ckpt.read("mtp.norm.weight"), kept)


def test_names_may_leave_out_weight_and_unknown_ones_get_neighbours(tmp_path: Path) -> None:
    ckpt = open_checkpoint(qwen_fp8(tmp_path / "x"))
    assert torch.equal(ckpt.dequantize("mtp.fc"), ckpt.dequantize("mtp.fc.weight"))
    with pytest.raises(CheckpointError, match=r"'mtp\.fcc\.weight'.*Nearest.*'mtp\.fc\.weight'"):
        ckpt.dequantize("mtp.fcc.weight")
    with pytest.raises(CheckpointError, match=r"'mtp\.fc\.weight' is BF16, expected FP8"):
        ckpt.scaled("mtp.fc")


# pairs that are refused


def broken(folder: Path, **changes: torch.Tensor | None) -> Checkpoint:
    """The FP8 checkpoint with tensors exchanged, or taken out where None."""
    tensors = {**qwen_tensors(), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return open_checkpoint(write_checkpoint(folder, kept, FP8_CONFIG))


def refusal(ckpt: Checkpoint, tensor: str = UP) -> str:
    """The one message that `dequantize` and `scaled` give; it names the file."""
    with pytest.raises(CheckpointError) as caught:
        ckpt.dequantize(tensor)
    with pytest.raises(CheckpointError) as again:
        ckpt.scaled(tensor)
    assert str(caught.value) == str(again.value)
    assert "model.safetensors" in str(caught.value)
    return str(caught.value)


def plan_refusal(ckpt: Checkpoint) -> str:
    with pytest.raises(CheckpointError) as caught:
        ckpt.plan()
    return str(caught.value)


def test_a_weight_without_its_scale(tmp_path: Path) -> None:
    ckpt = broken(tmp_path / "x", **{UP_SCALE: None})
    message = refusal(ckpt)
    assert repr(UP) in message and repr(UP_SCALE) in message and "F8_E4M3 [130, 160]" in message
    assert plan_refusal(ckpt) == message


def test_a_scale_under_another_suffix_is_pointed_out(tmp_path: Path) -> None:
    other = UP_SCALE.replace("weight_scale_inv", "weight_absmax_scale")
    message = refusal(broken(tmp_path / "x", **{UP_SCALE: None, other: torch.ones(2, 2)}))
    assert f"but {other!r}" in message


def test_a_scale_without_its_weight(tmp_path: Path) -> None:
    ckpt = broken(tmp_path / "x", **{UP: None})
    message = plan_refusal(ckpt)
    assert repr(UP_SCALE) in message and repr(UP) in message and "without its weight" in message
    assert ckpt.dequantize("mtp.fc").shape == (160, 320)  # the rest can still be looked at


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 0.0, -0.5])
def test_a_scale_that_is_not_finite_and_positive(tmp_path: Path, value: float) -> None:
    scale = torch.ones(2, 2)
    scale[1, 0] = value
    message = refusal(broken(tmp_path / "x", **{UP_SCALE: scale}))
    assert repr(UP_SCALE) in message and "1 of 4" in message and "[1, 0]" in message and str(value) in message


@pytest.mark.parametrize("shape", [(1, 2), (2, 1), (2, 3), (4,), (2, 1, 2), (), (130, 1)])
def test_a_grid_that_does_not_fit(tmp_path: Path, shape: tuple[int, ...]) -> None:
    ckpt = broken(tmp_path / "x", **{UP_SCALE: torch.ones(shape)})
    message = refusal(ckpt)
    assert repr(UP_SCALE) in message and str(list(shape)) in message
    assert "expected [2, 2]" in message and "[130, 160]" in message and "[128, 128]" in message
    assert plan_refusal(ckpt) == message


def test_a_scale_of_the_wrong_dtype(tmp_path: Path) -> None:
    message = refusal(broken(tmp_path / "x", **{UP_SCALE: torch.ones(2, 2).to(torch.int32)}))
    assert repr(UP_SCALE) in message and "I32" in message and "F32, BF16, F16" in message


def test_codes_that_are_nan(tmp_path: Path) -> None:
    codes = torch.zeros(130, 160).to(E4M3)
    codes.view(torch.uint8)[3, 7], codes.view(torch.uint8)[129, 1] = 0x7F, 0xFF
    message = refusal(broken(tmp_path / "x", **{UP: codes}))
    assert repr(UP) in message and "2 of 20800 FP8 codes are NaN" in message and "[3, 7]" in message


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e5m2fnuz])
def test_codes_of_another_fp8(tmp_path: Path, dtype: torch.dtype) -> None:
    message = refusal(broken(tmp_path / "x", **{UP: torch.ones(130, 160).to(dtype)}))
    assert repr(UP) in message and "expected F8_E4M3" in message


def test_fp8_in_a_layout_that_is_not_read(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", {name: torch.ones(2, 128, 128).to(E4M3)}, FP8_CONFIG))
    assert "stacked experts [e, n, k] with a scale beside them" in refusal(ckpt, name)
    plan_refusal(ckpt)


def test_fp8_that_the_config_does_not_explain(tmp_path: Path) -> None:
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", qwen_tensors()))
    message = refusal(ckpt)
    assert repr(UP) in message and "no quantization_config" in message and repr(UP_SCALE) in message
    assert message.split(" (")[0] in plan_refusal(ckpt)
    assert "2 tensors more are wrong" in plan_refusal(ckpt)


def test_a_config_that_says_fp8_over_bf16_tensors(tmp_path: Path) -> None:
    tensors = {name: t.bfloat16() for name, t in qwen_tensors().items() if not name.endswith("_inv")}
    ckpt = open_checkpoint(write_checkpoint(tmp_path / "x", tensors, FP8_CONFIG))
    (problem,) = ckpt.problems
    assert problem.kind == "nothing-quantised" and "found BF16" in problem.message
    plan = ckpt.plan()
    assert problem.message in plan.warnings
    assert {module.weight for module in plan.modules} == {"bf16"}
    assert torch.equal(ckpt.dequantize(UP), tensors[UP].float())


def test_a_weight_and_its_scale_may_lie_in_different_shards(tmp_path: Path) -> None:
    torch.manual_seed(3)
    ckpt = open_checkpoint(qwen_fp8(tmp_path / "x", shards=3))
    assert ckpt.tensors[UP].file != ckpt.tensors[UP_SCALE].file
    torch.manual_seed(3)
    tensors = qwen_tensors()
    assert torch.equal(ckpt.dequantize(UP), dequantised(tensors[UP], tensors[UP_SCALE], (128, 128)))


def test_a_file_that_shrank_after_it_was_opened(tmp_path: Path) -> None:
    folder = qwen_fp8(tmp_path / "x")
    ckpt = open_checkpoint(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"'mtp\.norm\.weight'.*the file now has 3000"):
        ckpt.read("mtp.norm.weight")
    file.unlink()
    with pytest.raises(CheckpointError, match="missing"):
        ckpt.read("mtp.norm.weight")


def test_dtypes_torch_does_not_have_are_named(tmp_path: Path) -> None:
    tensor_file(tmp_path / "model.safetensors", {"x": torch.zeros(4, dtype=torch.uint8)})
    raw = (tmp_path / "model.safetensors").read_bytes().replace(b'"U8", "shape": [4]', b'"F4", "shape": [8]')
    (tmp_path / "model.safetensors").write_bytes(raw)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="'x' is F4"):
        open_checkpoint(tmp_path).dequantize("x")


# the quantisation config


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, ["'gptq'", "GPTQ", "'fp8'", "expected"]),
        ({"quant_method": "compressed-tensors"}, ["config_groups", "'None'", "expected"]),
        ({"quant_method": "zz_unheard_of"}, ["'zz_unheard_of'", "'fp8'", "expected"]),
        ({"quant_method": ["fp8"]}, ["['fp8']", "'fp8'", "expected"]),
        ({}, ["'None'", "'fp8'", "expected"]),
        ({**FP8_CONFIG, "weight_block_size": [128]}, ["weight_block_size", "[128]"]),
        ({**FP8_CONFIG, "weight_block_size": [128, 0]}, ["weight_block_size", "[128, 0]"]),
        ({**FP8_CONFIG, "weight_block_size": [128, True]}, ["weight_block_size"]),
        ({**FP8_CONFIG, "weight_block_size": "128x"}, ["weight_block_size"]),
        ({**FP8_CONFIG, "fmt": "e3m4"}, ["fmt", "'e3m4'", "'e4m3'"]),
        ({**FP8_CONFIG, "fmt": ["e4m3"]}, ["fmt", "'e4m3'"]),
        ({**FP8_CONFIG, "activation_scheme": "sometimes"}, ["activation_scheme", "'sometimes'"]),
        ({**FP8_CONFIG, "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert", "'lm_head'"]),
        ({**FP8_CONFIG, "ignored_layers": [1]}, ["ignored_layers", "[1]"]),
        ("fp8", ["quantization_config", "'fp8'"]),
    ],
)
def test_a_quantisation_config_that_is_not_read(tmp_path: Path, content: object, words: list[str]) -> None:
    folder = write_checkpoint(tmp_path / "x", {"a.weight": torch.ones(2, 2)}, content)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    for word in (str(folder), "config.json", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("key", ["text_config", "llm_config"])
def test_the_config_may_stand_in_the_text_config(tmp_path: Path, key: str) -> None:
    folder = qwen_fp8(tmp_path / "x")
    content = json.loads((folder / "config.json").read_text())
    content[key] = {"quantization_config": content.pop("quantization_config")}
    (folder / "config.json").write_text(json.dumps(content))
    quantization = open_checkpoint(folder).quantization
    assert quantization is not None and quantization.where == f"{folder / 'config.json'}: {key}.quantization_config"


@pytest.mark.parametrize("fmt", [None, "e4m3", "float8_e4m3fn"])
def test_dialects_of_the_same_format(tmp_path: Path, fmt: str | None) -> None:
    folder = qwen_fp8(tmp_path / "x", fmt=fmt, modules_to_not_convert=None, ignored_layers=["mtp.fc"])
    quantization = open_checkpoint(folder).quantization
    assert quantization is not None
    assert (quantization.exclusions_key, quantization.exclusions) == ("ignored_layers", ("mtp.fc",))
    assert quantization.scheme_of("mtp.fc") == Scheme("block", (128, 128))


def test_the_manifests_say_who_wrote_the_fixtures(tmp_path: Path) -> None:
    for name in REAL:
        manifest = json.loads((CHECKPOINTS / name / "manifest.json").read_text())
        assert manifest["tool"] and (manifest.get("version") or manifest["kind"] == "derived")
    copied = shutil.copytree(CHECKPOINTS / REAL[0] / "ckpt", tmp_path / "elsewhere")
    assert open_checkpoint(copied).tensors.keys() == open_checkpoint(CHECKPOINTS / REAL[0] / "ckpt").tensors.keys()
