"""The bundled model is what its card says: a trained Qwen3.5 in two checkpoints, with prompts, small enough for git."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import mtplab
from mtplab.checkpoint import write_safetensors
from tests.oracle import oracle

DATA = Path(__file__).resolve().parent.parent / "data"
BF16, FP8 = DATA / "tiny-qwen3_5", DATA / "tiny-qwen3_5-fp8"
NEAR, DOMAINS = ("scripture", "python", "docs"), ("docs", "letters", "python", "scripture")


def prompts(domain: str) -> list[dict]:
    return [json.loads(line) for line in (DATA / "prompts" / f"{domain}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def model():
    return mtplab.load_model(BF16)


def test_small_enough_for_git():
    assert sum(f.stat().st_size for folder in (BF16, FP8) for f in folder.rglob("*")) <= 25e6


def test_names_are_transformers_own():
    """Every tensor of transformers' text model and nothing else, beside the head's."""
    names = {n for n in mtplab.open_checkpoint(BF16).tensors if not n.startswith("mtp.")}
    expected = set(oracle(BF16).state_dict()) - {"lm_head.weight"}
    assert names == expected


def test_dtypes_on_disk():
    for name, info in mtplab.open_checkpoint(BF16).tensors.items():
        f32 = name.endswith((".A_log", "linear_attn.norm.weight"))
        assert info.dtype == ("F32" if f32 else "BF16"), name


def test_config_has_no_mrope_keys():
    for folder in (BF16, FP8):
        assert "mrope" not in (folder / "config.json").read_text()
    assert mtplab.open_checkpoint(BF16).config["architectures"] == ["Qwen3_5ForCausalLM"]


def test_fp8_is_qwens_layout():
    checkpoint = mtplab.open_checkpoint(FP8)
    q = json.loads((FP8 / "config.json").read_text())["quantization_config"]
    assert (q["quant_method"], q["fmt"], q["activation_scheme"]) == ("fp8", "e4m3", "dynamic")
    assert q["weight_block_size"] == [128, 128]
    kept = {"lm_head", "model.embed_tokens", "mtp.fc"}
    kept |= {f"model.layers.{i}.linear_attn.{m}" for i in range(3) for m in ("conv1d", "in_proj_a", "in_proj_b")}
    assert set(q["modules_to_not_convert"]) == kept
    for name, info in checkpoint.tensors.items():
        linear = name.endswith("proj.weight") or name.endswith(("in_proj_qkv.weight", "in_proj_z.weight"))
        if linear and name.removesuffix(".weight") not in kept:
            n, k = info.shape
            assert info.dtype == "F8_E4M3", name
            scale = checkpoint.tensors[name.removesuffix(".weight") + ".weight_scale_inv"]
            assert scale.shape == (-(-n // 128), -(-k // 128))
        elif not name.endswith("scale_inv"):
            assert info.dtype == mtplab.open_checkpoint(BF16).tensors[name].dtype, name


def test_fp8_holds_the_same_model():
    bf16, fp8 = mtplab.open_checkpoint(BF16), mtplab.open_checkpoint(FP8)
    for name in bf16.tensors:
        exact, got = bf16.dequantize(name), fp8.dequantize(name)
        if fp8.tensors[name].dtype == "F8_E4M3":
            error = (got - exact).norm() / exact.norm()
            assert 0.005 < error < 0.04, f"{name}: {error}"
        else:
            assert torch.equal(got, exact), name


def test_both_carry_the_same_tokenizer(model):
    assert (BF16 / "tokenizer.json").read_bytes() == (FP8 / "tokenizer.json").read_bytes()
    text = "def f(x):\n    return {'naïve': x}  # ☃\n"
    assert model.decode(model.encode(text)) == text
    assert model.encode("<|endoftext|>") == [0]
    assert json.loads((BF16 / "generation_config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize("domain", DOMAINS)
def test_prompts(model, domain):
    rows = prompts(domain)
    assert len(rows) >= 16
    assert all(set(row) == {"id", "domain", "text"} and row["domain"] == domain for row in rows)
    lengths = sorted(len(model.encode(row["text"])) for row in rows)
    assert lengths[0] >= 8 and lengths[-1] <= 64 and lengths[-1] >= 2 * lengths[0]


def test_prompt_ids_and_texts_are_unique():
    rows = [row for domain in DOMAINS for row in prompts(domain)]
    assert len({row["id"] for row in rows}) == len({row["text"] for row in rows}) == len(rows)
    assert {f.stem for f in (DATA / "prompts").glob("*.jsonl")} == set(DOMAINS)


@pytest.mark.slow
def test_acceptance_is_worth_studying(model):
    """Greedy, over the near domains: 0.60 to 0.90 at depth 1, falling with depth; lower when sampled, far from 0."""
    texts = [row["text"] for domain in NEAR for row in prompts(domain)[:8]]
    greedy = mtplab.generate(model, texts, depth=4, max_new_tokens=96).stats.per_position
    assert 0.6 <= greedy[0] <= 0.9
    assert greedy[0] > greedy[1] > greedy[2] > greedy[3] > 0.2
    sampled = mtplab.generate(model, texts, depth=4, max_new_tokens=96, temperature=0.7, seed=1).stats.per_position
    assert 0.35 < sampled[0] < greedy[0]


@pytest.mark.slow
def test_sampled_text_does_not_loop(model):
    """At temperature 0.7 at least half of all 4-grams are distinct."""
    texts = [row["text"] for domain in NEAR for row in prompts(domain)[:8]]
    made = mtplab.generate(model, texts, depth=3, max_new_tokens=128, temperature=0.7, seed=3).tokens
    grams = [tuple(t[i : i + 4]) for t in made for i in range(len(t) - 3)]
    assert len(set(grams)) / len(grams) >= 0.5


@pytest.mark.slow
def test_acceptance_comes_from_the_head(model, tmp_path):
    """With the halves of mtp.fc swapped on disk it collapses: what is accepted was learnt, not easy text."""
    checkpoint = mtplab.open_checkpoint(BF16)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(256, dims=1)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    shutil.copy(BF16 / "config.json", tmp_path)
    ids = [model.encode(row["text"]) for row in prompts("docs")[:6]]
    whole, swapped = (
        mtplab.generate(m, ids, depth=1, max_new_tokens=48).stats.per_position[0]
        for m in (model, mtplab.load_model(tmp_path))
    )
    assert swapped < 0.5 * whole


def test_card_quotes_what_was_measured():
    """The card is made from data/recipe/results and says so; its tables hold those numbers."""
    card = (DATA / "README.md").read_text()
    measured = json.loads((DATA / "recipe" / "results" / "measured.json").read_text())
    for corpus in NEAR:
        run = measured["held_out"][corpus]["0.0"]
        assert f"{run['acceptance_length']:.2f}" in card
        assert 0.6 <= run["per_position"][0] <= 0.9
        assert measured["held_out"][corpus]["0.7"]["distinct_4_grams"]["together"] >= 0.5
    for engine in ("llama_cpp", "vllm_cpu", "mtplab_float32", "mtplab_bfloat16"):
        rows = [json.loads(x) for x in (DATA / "recipe" / "results" / f"{engine}.jsonl").read_text().splitlines()]
        assert {row["depth"] for row in rows} == {0, 1, 2, 3, 4}
        for row in rows[6:]:
            assert f"{row['accepted']}/{row['drafted']}" in card
