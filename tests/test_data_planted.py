"""The planted variant: the same float function bit for bit, and a known answer for a search of exclusions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mtplab import CheckpointError, ConfigError, load_model, open_checkpoint
from mtplab.checkpoint import write_safetensors
from mtplab.checkpoint.names import normalised
from mtplab.checkpoint.planted import plant
from mtplab.kernels.fp8_reference import round_activation
from mtplab.quant.block import quantize_block

BUNDLED = Path(__file__).resolve().parent.parent / "data" / "tiny-qwen3_5"
HEAD = ("mtp.fc", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.*")


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    return plant(BUNDLED, tmp_path_factory.mktemp("planted") / "fc")


def rows(path: Path, name: str, count: int = 64) -> torch.Tensor:
    """What the module `name` computes for `count` fixed inputs to the norms in front of it, in float32."""
    checkpoint = open_checkpoint(path)
    g = torch.Generator().manual_seed(3)
    weight = checkpoint.dequantize(f"{name}.weight")
    x = torch.randn(count, weight.shape[1], generator=g)
    return x @ weight.t() if name != "mtp.fc" else (x * fc_gain(checkpoint)) @ weight.t()


def fc_gain(checkpoint) -> torch.Tensor:
    """The factors, 1 + w, of the two norms in front of mtp.fc, in the order of its columns."""
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight")
    return 1 + torch.cat([checkpoint.dequantize(n) for n in norms])


def test_fc_is_the_same_function_bit_for_bit(planted):
    assert planted.modules == ("mtp.fc",)
    assert planted.norms == ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
    assert torch.equal(rows(BUNDLED, "mtp.fc"), rows(planted.path, "mtp.fc"))
    before, after = (open_checkpoint(path).read("mtp.fc.weight") for path in (BUNDLED, planted.path))
    assert not torch.equal(before, after)


def test_factors_are_powers_of_two_over_the_whole_spread(planted):
    before, after = open_checkpoint(BUNDLED), open_checkpoint(planted.path)
    exponent = torch.log2(fc_gain(after) / fc_gain(before))
    assert torch.equal(exponent, exponent.round())
    assert exponent.min() == 0 and exponent.max() == 20 and len(exponent.unique()) == 21
    per_column = before.dequantize("mtp.fc.weight") / after.dequantize("mtp.fc.weight")
    known = ~per_column.isnan()  # 0 / 0
    assert torch.equal(per_column[known], torch.exp2(exponent).expand_as(per_column)[known])


def test_everything_else_is_untouched_and_only_the_norms_become_f32(planted):
    before, after = open_checkpoint(BUNDLED), open_checkpoint(planted.path)
    assert set(before.tensors) == set(after.tensors)
    changed = {"mtp.fc.weight", *(f"{norm}.weight" for norm in planted.norms)}
    for name, info in before.tensors.items():
        if name not in changed:
            assert torch.equal(before.read(name), after.read(name))
        assert after.tensors[name].dtype == ("F32" if name in changed and "norm" in name else info.dtype)
    assert after.config == before.config


def test_logits_of_trunk_and_head_are_bit_identical(tmp_path):
    """Every kind of module that can be planted, at once: tokens and rounds stay, and so does each logit."""
    from mtplab import generate

    made = plant(BUNDLED, tmp_path / "all", modules=("*",), spread=24, seed=7)
    layers = ["linear_attn.in_proj_" + p for p in ("qkv", "z", "a", "b")]
    names = {normalised(name) for name in made.modules}
    assert {f"model.layers.2.{part}" for part in layers} <= names
    assert {"model.layers.3.self_attn.v_proj", "mtp.layers.0.mlp.up_proj", "mtp.fc"} <= names
    assert not any(name.endswith(("down_proj", "o_proj", "out_proj")) for name in names)
    prompt = [list(range(5, 45))]
    plain, spread = (generate(load_model(path), prompt, depth=3, max_new_tokens=40) for path in (BUNDLED, made.path))
    assert plain.tokens == spread.tokens
    assert [(r.position, r.drafted, r.accepted) for r in plain.rounds] == [
        (r.position, r.drafted, r.accepted) for r in spread.rounds
    ]
    assert torch.equal(target_logits(BUNDLED), target_logits(made.path))


def target_logits(path: Path) -> torch.Tensor:
    from tests.oracle import oracle, oracle_hidden

    return oracle_hidden(oracle(path), list(range(5, 60)))[1]


def test_fp8_hurts_exactly_what_was_planted(planted):
    """W8A8 in 128-blocks: the planted module's relative error grows many times over, its neighbours' does not."""

    def error(path: Path, name: str) -> float:
        checkpoint = open_checkpoint(path)
        weight = checkpoint.dequantize(f"{name}.weight")
        x = torch.randn(64, weight.shape[1], generator=torch.Generator().manual_seed(1))
        x = x * fc_gain(checkpoint) if name == "mtp.fc" else x
        exact = x @ weight.t()
        got = round_activation(x) @ quantize_block(weight).dequantize().t()
        return ((got - exact).norm() / exact.norm()).item()

    assert error(planted.path, "mtp.fc") > 2 * error(BUNDLED, "mtp.fc")
    other = "mtp.layers.0.mlp.up_proj"
    assert error(planted.path, other) == error(BUNDLED, other)


def test_readers_of_one_norm_are_planted_together(tmp_path):
    made = plant(BUNDLED, tmp_path / "head", modules=HEAD)
    names = {normalised(name) for name in made.modules}
    assert names == {
        "mtp.fc", "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.self_attn.k_proj", "mtp.layers.0.self_attn.v_proj",
        "mtp.layers.0.mlp.gate_proj", "mtp.layers.0.mlp.up_proj",
    }  # fmt: skip
    # a norm's factors are its own: they do not depend on what else is planted
    alone = plant(BUNDLED, tmp_path / "alone", modules=("mtp.fc",))
    assert torch.equal(fc_gain(open_checkpoint(made.path)), fc_gain(open_checkpoint(alone.path)))


def test_made_once_then_used(planted):
    file = planted.path / "model.safetensors"
    before = file.stat().st_mtime_ns
    assert plant(BUNDLED, planted.path) == planted
    assert file.stat().st_mtime_ns == before
    assert json.loads((planted.path / "planted.json").read_text())["modules"] == ["mtp.fc"]
    with pytest.raises(ConfigError, match="something else"):
        plant(BUNDLED, planted.path, seed=1)
    assert not list(planted.path.parent.glob(".*partial"))


def test_seeds_differ_and_repeat(tmp_path, planted):
    other = plant(BUNDLED, tmp_path / "other", seed=1)
    again = plant(BUNDLED, tmp_path / "again", seed=0)
    gains = [fc_gain(open_checkpoint(p.path)) for p in (planted, again, other)]
    assert torch.equal(gains[0], gains[1]) and not torch.equal(gains[0], gains[2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modules": ("mtp.fcc",)}, "'mtp.fcc' covers no linear module.*mtp.fc"),
        ({"modules": ("*.down_proj",)}, "covers no linear module"),
        ({"modules": ()}, "at least one module"),
        ({"spread": 61}, "0 to 60"),
        ({"spread": True}, "0 to 60"),
        ({"seed": -1}, "0 or more"),
    ],
)
def test_bad_settings_are_named(tmp_path, arguments, message):
    with pytest.raises(ConfigError, match=message):
        plant(BUNDLED, tmp_path / "x", **arguments)
    assert not list(tmp_path.iterdir())


def test_a_quantised_source_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="Plant the BF16 release"):
        plant(BUNDLED.with_name("tiny-qwen3_5-fp8"), tmp_path / "x")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mtp.pre_fc_norm_hidden.weight", float("nan"), r"256 of 256 values have no float32 offset"),
        ("mtp.fc.weight", 1e-38, r"mtp.fc.weight.*smaller spread"),
    ],
)
def test_values_that_cannot_carry_factors_are_refused(tmp_path, name, value, message):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text((BUNDLED / "config.json").read_text())
    bundled = open_checkpoint(BUNDLED)
    tensors = {n: bundled.read(n) for n in bundled.tensors}
    tensors[name] = torch.full_like(tensors[name], value)
    write_safetensors(source / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=message):
        plant(source, tmp_path / "x")
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".*partial"))
