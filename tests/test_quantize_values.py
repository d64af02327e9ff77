"""Checkpoints written anew: every code, scale and value is what the reference and real writers' files say it is."""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mtplab.checkpoint import Checkpoint, open_checkpoint
from mtplab.checkpoint.convert import engine, quantize_checkpoint
from mtplab.checkpoint.convert.encode import block_amax, encode, scales_of
from mtplab.checkpoint.convert.layouts import recipe_of
from mtplab.errors import CheckpointError, ConfigError
from mtplab.kernels import fp8_reference
from tests.checkpoint_builders import CHECKPOINTS, LISTED, qwen_fp8, qwen_tensors, write_checkpoint

READ = sorted(path.name for path in CHECKPOINTS.iterdir() if path.name != "ct-nvfp4-reject")
COMBINATIONS = [
    (granularity, layout, scales)
    for granularity, layout, scales in itertools.product(
        ("block", "channel", "tensor"), ("hf", "compressed-tensors", "modelopt"), ("float", "ue8m0")
    )
    if (granularity, layout) not in (("channel", "hf"), ("tensor", "modelopt"))
]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return a.shape == b.shape and bool((a == b).all())


def plain(folder: Path, dtype: torch.dtype = torch.bfloat16, shards: int = 1) -> Path:
    shapes = {name: t.shape for name, t in qwen_tensors().items() if not name.endswith("_inv")}
    tensors = {name: (torch.randn(shape) * 0.02).to(dtype) for name, shape in shapes.items()}
    tensors["model.layers.0.mlp.up_proj.weight"][3] = 0  # a channel of zeros
    return write_checkpoint(folder, tensors, shards=shards)


# arithmetic


def nearest_e4m3(values: torch.Tensor) -> torch.Tensor:
    """The code of the E4M3 number nearest to each float32, ties to the even code: by comparing with all of them."""
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    magnitude = values.double().abs()
    above = torch.searchsorted(table, magnitude).clamp_max(126)
    below = (above - 1).clamp_min(0)
    up, down = (table[above] - magnitude).abs(), (magnitude - table[below]).abs()
    even = torch.where(above % 2 == 0, above, below)
    code = torch.where(up < down, above, torch.where(up > down, below, even))
    return code.to(torch.uint8) | values.signbit().to(torch.uint8) << 7


def test_every_bf16_value_becomes_the_nearest_code_under_every_scale() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    values = values[values.isfinite()].view(1, -1)
    assert values.numel() == 2 * 255 * 128
    seen = set()
    for scale in (1.0, 2.0**-9, 3.0, 0.0123, 448.0, 1.7e30, 2.0**120, 1e-38, 2.0**-149, 7.3e-5):
        out = torch.empty(values.shape, dtype=torch.uint8)
        encode(values, torch.tensor([[scale]]), (1, values.shape[1]), out)
        quotient = (values.float() / torch.tensor(scale)).clamp(-448, 448)
        assert torch.equal(out, nearest_e4m3(quotient)), scale
        seen |= set(out.unique().tolist())
    assert seen == set(range(256)) - {0x7F, 0xFF}  # all but NaN


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((130, 160), (128, 128)), ((128, 256), (128, 128)), ((5, 7), (128, 128)), ((9, 33), (1, 33)), ((64, 96), (32, 16)),
     ((7, 300), (7, 300)), ((1, 1), (128, 128))],
)  # fmt: skip
def test_blocks_are_the_references(dtype: torch.dtype, shape: tuple[int, int], block: tuple[int, int]) -> None:
    weight = (torch.randn(shape) * torch.randn(shape).exp()).to(dtype)
    weight[0] = 0
    weight[-1, -1] = 1e-7
    codes, scale = fp8_reference.quantize_block(weight, block)
    found = scales_of(block_amax(weight, block), power_of_two=False)
    out = torch.empty(shape, dtype=torch.uint8)
    encode(weight, found, block, out)
    assert torch.equal(found, scale) and torch.equal(out, codes.view(torch.uint8))
    rounded = scales_of(block_amax(weight, block), power_of_two=True)
    assert bool((rounded >= scale).all()) and bool((rounded < 2 * scale).all())
    assert bool((rounded.frexp().mantissa == 0.5).all())
    weight[0, 0] = float("nan")
    assert bool(scales_of(block_amax(weight, block), True)[0, 0].isnan())


# every combination


def check(source: Checkpoint, made: Checkpoint, granularity: str, scales: str, block: tuple[int, int]) -> None:
    names = {module.name for module in made.plan().modules if module.weight == "fp8"}
    assert names == {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "mtp.layers.0.self_attn.q_proj"}
    assert made.plan().warnings == ()
    for name in source.tensors:
        weight = source.read(name)
        if name.removesuffix(".weight") not in names:
            assert made.tensors[name].dtype == source.tensors[name].dtype and same_bytes(made.read(name), weight), name
            continue
        n, k = weight.shape
        size = {"block": block, "channel": (1, k), "tensor": (n, k)}[granularity]
        codes, scale = fp8_reference.quantize_block(weight, size)
        if scales == "ue8m0":
            scale = torch.exp2(torch.ceil(torch.log2(scale.double()))).float()
            rows = scale.repeat_interleave(size[0], 0)[:n].repeat_interleave(size[1], 1)[:, :k]
            codes = (weight.float() / rows).to(torch.float8_e4m3fn)
        found = made.scaled(name)
        assert found.block == size and torch.equal(found.scale, scale), name
        assert same_bytes(found.data, codes), name
        error = (made.dequantize(name) - weight.float()).norm() / weight.float().norm()
        assert 0.01 < error < (0.03 if scales == "float" else 0.04)


@pytest.mark.parametrize(("granularity", "layout", "scales"), COMBINATIONS)
def test_every_format_in_every_layout_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, granularity: str, layout: str, scales: str
) -> None:
    source = open_checkpoint(plain(tmp_path / "src", shards=2))
    monkeypatch.setattr(engine, "BAND", 700)  # several bands of each tensor
    options = {"format": f"fp8-{granularity}", "layout": layout, "scales": scales}
    if granularity == "block" and layout != "modelopt":
        options["block"] = (32, 48)
    quantize_checkpoint(source.path, tmp_path / "dst", **options)
    made = open_checkpoint(tmp_path / "dst")
    check(source, made, granularity, scales, options.get("block", (128, 128)))
    # and without bands, by one thread, the same bytes
    monkeypatch.undo()
    quantize_checkpoint(source.path, tmp_path / "again", threads=1, **options)
    for path in sorted((tmp_path / "dst").iterdir()):
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name
    # and back: the BF16 nearest to code times scale, under the source's own config
    quantize_checkpoint(tmp_path / "dst", tmp_path / "bf16", format="bf16")
    back = open_checkpoint(tmp_path / "bf16")
    assert back.quantization is None and back.config == source.config and back.tensors.keys() == source.tensors.keys()
    for name in back.tensors:
        assert same_bytes(back.read(name), made.dequantize(name).bfloat16()), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_plain_dtypes_are_quantised_too(tmp_path: Path, dtype: torch.dtype) -> None:
    source = open_checkpoint(plain(tmp_path / "src", dtype))
    quantize_checkpoint(source.path, tmp_path / "dst")
    check(source, open_checkpoint(tmp_path / "dst"), "block", "float", (128, 128))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "fp8-channel"}, "hf has no scale per channel"),
        ({"format": "fp8-tensor", "layout": "modelopt"}, "needs an input_scale"),
        ({"block": (64, 64), "layout": "modelopt"}, "blocks of 128x128 only"),
        ({"format": "fp8-tensor", "block": (64, 64)}, "with 'fp8-block' only"),
        ({"format": "fp9"}, "expected one of fp8-block, fp8-channel, fp8-tensor, bf16"),
        ({"layout": "gguf"}, "expected one of compressed-tensors, hf, modelopt"),
        ({"scales": "int"}, "expected one of float, ue8m0"),
        ({"block": (0, 128)}, "two whole numbers"),
        ({"format": "bf16", "layout": "hf"}, "say how FP8 is written"),
        ({"draft": "drop"}, "expected one of like-target, keep, quantize, bf16"),
    ],
)
def test_what_cannot_be_written_is_refused_by_name(tmp_path: Path, options: dict, said: str) -> None:
    source = plain(tmp_path / "src")
    with pytest.raises(ConfigError, match=said):
        quantize_checkpoint(source, tmp_path / "dst", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_plain_checkpoint_is_not_dequantised(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="found one that is not quantised"):
        quantize_checkpoint(plain(tmp_path / "src"), tmp_path / "dst", format="bf16")


# from FP8, whoever wrote it


@pytest.mark.parametrize("name", READ)
def test_real_files_become_the_values_their_own_tools_read(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(CHECKPOINTS / name / "ckpt")
    written = quantize_checkpoint(source.path, tmp_path / "dst", format="bf16")
    made = open_checkpoint(tmp_path / "dst")
    expected = load_file(CHECKPOINTS / name / "expected.safetensors")
    assert made.quantization is None and made.found is None
    assert not {info.dtype for info in made.tensors.values()} & {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "I8", "U8"}
    for tensor, values in expected.items():
        assert same_bytes(made.read(tensor), values.float().bfloat16()), tensor
    for tensor in made.tensors.keys() - expected.keys():
        assert same_bytes(made.read(tensor), source.read(tensor)), tensor
    # what is gone is scales and nothing else
    gone = source.tensors.keys() - made.tensors.keys()
    assert all("scale" in tensor or tensor.endswith("qdata") for tensor in gone), gone
    assert written.actions.get("to BF16", 0) == len(expected)


@pytest.mark.parametrize("name", READ)
def test_real_files_without_a_setting_stay_as_they_are(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(CHECKPOINTS / name / "ckpt")
    written = quantize_checkpoint(source.path, tmp_path / "dst")
    made = open_checkpoint(tmp_path / "dst")
    assert made.config == source.config
    assert (made.found and made.found.content) == (source.found and source.found.content)
    assert source.tensors.keys() - made.tensors.keys() == written.left.keys()
    assert all("scale beside a weight that is not FP8" in why for why in written.left.values())
    for tensor in made.tensors:
        assert same_bytes(made.read(tensor), source.read(tensor)), tensor


@pytest.mark.parametrize("name", [name for name in READ if name != "tf-fp8-llama160-ragged"])  # of which none is FP8
def test_real_files_with_one_module_more_kept_out(name: str, tmp_path: Path) -> None:
    source = open_checkpoint(CHECKPOINTS / name / "ckpt")
    quantised = [module.name for module in source.plan().modules if module.weight == "fp8"]
    module = quantised[-1]
    if source.quantization.method == "torchao":
        with pytest.raises(ConfigError, match="torchao cannot say"):
            quantize_checkpoint(source.path, tmp_path / "dst", exclude=[module])
        return
    quantize_checkpoint(source.path, tmp_path / "dst", exclude=[module])
    made = open_checkpoint(tmp_path / "dst")
    plan = made.plan()
    assert [m.name for m in plan.modules if m.weight == "fp8"] == quantised[:-1]
    assert module in made.quantization.exclusions
    new = set(plan.warnings) - {w.replace(str(source.path), str(tmp_path / "dst")) for w in source.plan().warnings}
    assert not [warning for warning in new if module in warning]
    name = module if module in made.tensors else f"{module}.weight"
    assert same_bytes(made.read(name), source.dequantize(name).bfloat16())
    for tensor in made.tensors.keys() - {name}:
        assert same_bytes(made.read(tensor), source.read(tensor)), tensor


@pytest.mark.parametrize(("layout", "suffix"), [("compressed-tensors", ""), ("modelopt", ""), ("hf", "_inv")])
def test_a_change_of_layout_alone_changes_no_code_and_no_scale(tmp_path: Path, layout: str, suffix: str) -> None:
    source = open_checkpoint(qwen_fp8(tmp_path / "src", shards=2))
    written = quantize_checkpoint(source.path, tmp_path / "dst", format="fp8-block", layout=layout)
    assert written.actions == {"copied": 7, "carried over": 3} and written.left == {}
    made = open_checkpoint(tmp_path / "dst")
    for name, module in ((m.name, m) for m in source.plan().modules):
        if module.weight == "fp8":
            ours, theirs = made.scaled(name), source.scaled(name)
            assert same_bytes(ours.data, theirs.data) and torch.equal(ours.scale, theirs.scale), name
            assert f"{name}.weight_scale{suffix}" in made.tensors
    listed = set(made.quantization.exclusions)
    assert set(LISTED) <= listed
    # and back again is where it came from
    quantize_checkpoint(tmp_path / "dst", tmp_path / "back", format="fp8-block")
    back = open_checkpoint(tmp_path / "back")
    assert back.tensors.keys() == source.tensors.keys()
    assert all(same_bytes(back.read(name), source.read(name)) for name in back.tensors)


def test_powers_of_two_are_carried_over_and_checked(tmp_path: Path) -> None:
    source = open_checkpoint(CHECKPOINTS / "ds-ue8m0-e8m0dtype" / "ckpt")
    written = quantize_checkpoint(source.path, tmp_path / "a", format="fp8-block", scales="ue8m0")
    made = open_checkpoint(tmp_path / "a")
    names = [module.name for module in source.plan().modules if module.weight == "fp8"]
    assert written.actions["carried over"] == len(names) and "to FP8" not in written.actions
    assert made.config["quantization_config"]["scale_fmt"] == "ue8m0"
    for name in names:
        assert torch.equal(made.scaled(name).scale, source.scaled(name).scale)
    false = qwen_fp8(tmp_path / "false", scale_fmt="ue8m0")
    with pytest.raises(CheckpointError, match="other scales than powers of two, which the config promises"):
        quantize_checkpoint(false, tmp_path / "b", format="fp8-block", scales="ue8m0")
    written = quantize_checkpoint(qwen_fp8(tmp_path / "plain"), tmp_path / "c", format="fp8-block", scales="ue8m0")
    assert written.actions["to FP8"] == 3  # float scales are no powers of two: quantised from the values


def test_another_granularity_is_quantised_from_the_values(tmp_path: Path) -> None:
    source = open_checkpoint(qwen_fp8(tmp_path / "src"))
    quantize_checkpoint(source.path, tmp_path / "dst", format="fp8-channel", layout="compressed-tensors")
    made = open_checkpoint(tmp_path / "dst")
    name = "model.layers.0.mlp.up_proj.weight"
    values = source.dequantize(name)
    codes, scale = fp8_reference.quantize_block(values, (1, values.shape[1]))
    assert same_bytes(made.scaled(name).data, codes) and torch.equal(made.scaled(name).scale, scale)


def test_recipes_are_named_like_their_parts() -> None:
    assert recipe_of("fp8-block", "hf").block_of((300, 200)) == (128, 128)
    assert recipe_of("fp8-channel", "modelopt").block_of((300, 200)) == (1, 200)
    assert recipe_of("fp8-tensor", "hf").block_of((300, 200)) == (300, 200)


