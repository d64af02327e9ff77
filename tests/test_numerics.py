"""Slices of a target, and what FP8 does to layers: against formulas written down again, planted errors, labels."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase

import pytest
import torch

import mtplab
from mtplab import CheckpointError, ConfigError, generate, load_model, memory, numerics, open_checkpoint
from mtplab.checkpoint import Checkpoint
from mtplab.cli import main
from mtplab.models.memory import weights_in_memory
from mtplab.quant.policy import resolve_policy
from mtplab.study.draft_divergence import draft_divergence
from mtplab.study.layer_errors import compare_layers
from mtplab.study.text_batches import text_batches
from tests.family_checkpoints import FAMILIES, write_deepseek_v3, write_fp8, write_step3p7
from tests.tiny import MIXTURE, write_tiny

TEXTS = ["Once upon a time there was a king", "def main():"]


def hidden_after(model, layers: int, texts: list[list[int]]) -> torch.Tensor:
    """Hidden states after the first so many layers of a model."""
    (batch,) = text_batches(model, texts, [0] * len(texts), 1)
    with torch.inference_mode():
        x = batch.run.gather(torch.nn.functional.embedding(batch.tokens, model.target.embedding))
        caches = model.target_caches(batch.run.batch, batch.capacity, resolve_policy("none"))
        for layer, cache in zip(model.target.layers[:layers], caches, strict=False):
            x = layer(x, batch.run, cache)
    return x


def test_a_slice_computes_what_those_layers_of_the_whole_do(bundled):
    whole, part = load_model(bundled, exact=False), load_model(bundled, exact=False, layers="0-2")
    ids = [whole.encode(text) for text in TEXTS]
    assert [layer.number for layer in part.config.layers] == [0, 1, 2] and part.config.sliced
    assert torch.equal(hidden_after(part, 3, ids), hidden_after(whole, 3, ids))


def test_nothing_of_the_layers_left_out_is_read(bundled, monkeypatch):
    read = set()
    for method in ("bands", "read", "scaled"):
        before = getattr(Checkpoint, method)

        def noted(self, name, *rest, before=before, **named):
            read.add(name)
            return before(self, name, *rest, **named)

        monkeypatch.setattr(Checkpoint, method, noted)
    load_model(bundled, layers=[1])
    assert {name.split(".")[2] for name in read if name.startswith("model.layers.")} == {"1"}
    assert "mtp.fc.weight" in read and "model.norm.weight" in read


def test_a_slice_takes_the_memory_that_was_said(bundled):
    whole, part = memory(bundled), memory(bundled, layers="2")
    model = load_model(bundled, layers="2")
    assert part.weights == weights_in_memory(model.checkpoint, model.plan, model.engine, model.config)
    ckpt = open_checkpoint(bundled)
    others = [m for m in ckpt.plan().modules if m.name.startswith("model.layers.") and ".2." not in m.name]
    least = sum(torch.Size(m.shape).numel() for m in others)  # a byte a value, whatever they are held in
    assert others and part.weights.nbytes < whole.weights.nbytes - least
    assert part.caches.token < whole.caches.token, "layer 2 has no KV cache"


def test_a_slice_generates_nothing(bundled):
    part = load_model(bundled, layers="0-1")
    for run in (generate, mtplab.trace):
        with pytest.raises(ConfigError, match=r"the model is a slice: 2 of 4 layers.*mtplab\.numerics"):
            run(part, ["x"], 1, max_new_tokens=2)


@pytest.mark.parametrize(
    "layers, said",
    [
        ("0-9", "layers names 4, 5, 6, 7, …; this model has layers 0 to 3"),
        ("a", "layers is 'a': 'a' is not a number or a range"),
        ("3-1", "runs backwards"),
        ([], "expected numbers of layers"),
        ([1.5], "expected numbers of layers"),
        ([True], "expected numbers of layers"),
        (5, "layers is 5"),
        ("9" * 40, "is more than 10000"),
    ],
)
def test_layers_that_cannot_be(bundled, layers, said):
    with pytest.raises(ConfigError, match="layers") as caught:
        load_model(bundled, layers=layers)
    assert said in str(caught.value)


def rounded(x: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """x in E4M3 with a scale per block of height × width, read back: the formula of DeepSeek-V3's report, 3.3."""
    out = torch.empty_like(x)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            block = x[i : i + height, j : j + width]
            scale = block.abs().amax() / 448
            out[i : i + height, j : j + width] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return out


def test_a_modules_error_is_the_formulas(bundled):
    """Of the first projection, whose input is the normed embedding: weights and inputs in FP8, written down again."""
    found = numerics(bundled, "0", TEXTS)
    ckpt, model = open_checkpoint(bundled), load_model(bundled)
    ids = torch.tensor([i for text in TEXTS for i in model.encode(text)])
    x = ckpt.dequantize("model.embed_tokens.weight")[ids]
    x = x / (x.square().mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
    x = x * (1 + ckpt.dequantize("model.layers.0.input_layernorm.weight"))
    name = "model.layers.0.linear_attn.in_proj_qkv"
    weight = ckpt.dequantize(f"{name}.weight")
    exact, fp8 = x @ weight.t(), rounded(x, 1, 128) @ rounded(weight, 128, 128).t()
    expected = float((fp8 - exact).norm() / exact.norm())
    (mine,) = (module.error for module in found.modules if module.name == name)
    assert 0.005 < expected < 0.2 and mine == pytest.approx(expected, rel=1e-3)


def test_what_is_kept_has_no_error_and_is_not_listed(bundled):
    found = numerics(bundled, prompts=TEXTS, exclude=["model.layers.*", "mtp.*"])
    assert not found.modules and {layer.added for layer in found.layers} == {0.0} and found.draft_kl == 0
    found = numerics(bundled, prompts=TEXTS, exclude=["mtp.*"])
    assert {module.part for module in found.modules} == {"target"} and found.layers[-1].added == 0
    assert all(layer.added > 0 and layer.hidden > 0 for layer in found.layers[:-1])


def test_a_planted_scale_is_the_worst_module(bundled_fp8, tmp_path):
    """One weight's scales doubled, against the file as it was: its error is 1, the others' 0."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "broken"
    folder.mkdir()
    for file in bundled_fp8.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    (source,) = bundled_fp8.glob("*.safetensors")
    tensors = load_file(source)
    tensors["model.layers.1.mlp.down_proj.weight_scale_inv"] *= 2
    save_file(tensors, folder / source.name)
    found = numerics(folder, prompts=TEXTS, source=bundled_fp8)
    (worst, *others) = found.worst(100)
    assert worst.name == "model.layers.1.mlp.down_proj" and worst.error == pytest.approx(1.0)
    assert not any(module.error for module in others) and found.layers[0].hidden == 0 < found.layers[1].added


def test_experts_are_one_line_a_layer(tmp_path):
    folder = write_tiny(tmp_path / "moe", **MIXTURE)
    found = numerics(folder, prompts=[[1, 2, 3, 4, 5, 6, 7]])
    names = [module.name for module in found.modules]
    assert "model.layers.0.mlp.experts" in names and "mtp.layers.0.mlp.experts" in names
    assert not any(".experts." in name for name in names) and all(module.error > 0 for module in found.modules)


def test_vocabulary_heads_in_fp8_are_measured(tmp_path):
    """Engines build them in BF16, so only `none` has them in FP8; Step's head has its own beside the target's."""
    folder, ids = write_step3p7(tmp_path, text_only=True), [5, 6, 7, 8, 9]
    found = {m.name: m for m in numerics(folder, "0-4", [ids], exclude="none").modules}
    assert not any(m.name.endswith(("lm_head", ".output")) for m in numerics(folder, "0-4", [ids]).modules)
    own = [name for name in found if name.endswith(".shared_head.output")]
    assert len(own) == 3 and {found[name].part for name in own} == {"draft"} and found["lm_head"].part == "target"
    model = load_model(folder, exact=False)
    x = hidden_after(model, 5, [ids])[: len(ids)]
    x, weight = model.target.normed(x), open_checkpoint(folder).dequantize("lm_head.weight")
    exact, fp8 = x @ weight.t(), rounded(x, 1, 128) @ rounded(weight, 128, 128).t()
    assert found["lm_head"].error == pytest.approx(float((fp8 - exact).norm() / exact.norm()), rel=1e-3)


@pytest.mark.parametrize(
    "write, names",
    [
        (lambda folder: write_tiny(folder, **MIXTURE), ("model.layers.1.mlp.experts", "mtp.layers.0.mlp.experts")),
        (write_deepseek_v3, ("model.layers.1.mlp.experts", "model.layers.3.mlp.experts")),
        (write_step3p7, ("model.layers.4.moe.experts",)),
    ],
)
def test_experts_have_their_part_and_are_listed_where_they_are_in_fp8(tmp_path, write, names):
    folder, ids = write(tmp_path), [[5, 6, 7, 8, 9]]
    found = {m.name: m for m in numerics(folder, prompts=ids).modules if m.name.endswith(".experts")}
    assert set(names) <= set(found) and not any("_proj" in name for name in found)
    modules = open_checkpoint(folder).plan().modules
    heads = {m.name.partition(".mlp.")[0] for m in modules if m.part == "draft"}
    for name, module in found.items():
        assert module.part == ("draft" if name.partition(".mlp.")[0] in heads else "target") and module.error > 0
    stacks = [glob for glob in ("*.experts*", "*.moe.*") if any(fnmatchcase(m.name, glob) for m in modules)]
    kept = numerics(folder, prompts=ids, exclude=stacks)
    assert kept.modules and not any(module.name.endswith(".experts") for module in kept.modules)


def test_stacks_of_another_name_are_one_line_a_layer_too(tmp_path):
    found = numerics(FAMILIES["step3p7"](tmp_path / "step"), "2", [[1, 2, 3, 4, 5, 6, 7]])
    names = [module.name for module in found.modules]
    assert "model.layers.2.moe.experts" in names and not any("gate_proj.experts" in name for name in names)
    assert "Every module of the head reads what the first one does" in "\n".join(found.about)


def test_what_rounds_no_input_is_said(tmp_path):
    found = numerics(write_fp8("deepseek_v3", tmp_path / "v3"), prompts=[[1, 2, 3, 4, 5, 6, 7]])
    errors = {module.name: module.error for module in found.modules}
    assert errors["model.layers.0.self_attn.kv_b_proj"] == 0 < errors["model.layers.0.self_attn.q_b_proj"]
    assert "kv_b_proj has no such error" in "\n".join(found.about)


def test_what_a_slice_leaves_out_is_said(bundled, bundled_fp8):
    assert not any("slice" in line for line in numerics(bundled, prompts=TEXTS).about)
    first = "\n".join(numerics(bundled, "0-1", TEXTS).about)
    assert "2 of the target's 4 layers (0-1)" in first and "after layer 1, not those after layer 3" in first
    assert "reads embeddings" not in first and "No acceptance" in first
    later = "\n".join(numerics(bundled, [1, 3], TEXTS).about)
    assert "Layer 1 reads embeddings" in later and "behind a gap" in later and "The head reads" not in later
    assert "rounding inputs alone" in "\n".join(numerics(bundled_fp8, "0", TEXTS).about)
    with pytest.raises(ConfigError, match="is not quantised: leave it out"):
        numerics(bundled, source=bundled_fp8)


def test_other_layers_cannot_be_compared(bundled, tmp_path):
    with pytest.raises(ConfigError, match="have other layers here"):
        compare_layers(load_model(bundled), load_model(bundled, layers="0"), [[1, 2, 3]])
    with pytest.raises(ConfigError, match="3 after those"):
        numerics(bundled, prompts=[[1, 2]])
    with pytest.raises(CheckpointError, match="no tokenizer"):
        numerics(write_tiny(tmp_path), prompts=TEXTS)


def test_a_path_is_told_in_characters_that_nothing_obeys(bundled_fp8, tmp_path):
    """A folder's name is a stranger's; what is shown of it goes to terminals and pages, without where it lies."""
    source = tmp_path / "\x1b[31mred<b>\u202e"
    source.symlink_to(bundled_fp8)
    found = numerics(bundled_fp8, "0", ["Once upon a time"], source=source)
    for shown in (str(found), found._repr_html_()):
        assert shown.replace("\n", "").isprintable() and str(tmp_path) not in shown
    assert r"Against \x1b[31mred<b>\u202e, which" in str(found) and "&lt;b&gt;" in found._repr_html_()


@pytest.mark.parametrize("ids", [[1, 2, 16], [1, 2, 10**30]])
def test_ids_that_the_model_does_not_have(tmp_path, ids):
    folder = write_tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"text 1 has token id 1[06]\d*; expected 0 to 15"):
        numerics(folder, prompts=[[1, 2, 3], ids])
    with pytest.raises(ConfigError, match="expected 0 to 15"):
        draft_divergence(load_model(folder), [[1, 2, 3], ids], [0, 0])
    assert numerics(folder, prompts=[[1, 2, 15]]).tokens == 3


@pytest.mark.parametrize(
    "changes", [{"vocab_size": 24}, {"vocab_size": 12}, {"hidden_size": 64, "head_dim": 16}, {"rms_norm_eps": 1e-5}]
)
def test_a_source_of_other_sizes_is_no_source(tmp_path, changes):
    one, other = write_tiny(tmp_path / "one"), write_tiny(tmp_path / "other", **changes)
    key = next(iter(changes))
    with pytest.raises(ConfigError, match=rf"have {key} \S+ and \S+; expected one model") as caught:
        compare_layers(load_model(one), load_model(other), [[1, 2, 3]])
    assert "/one" in str(caught.value) and "/other" in str(caught.value)


def test_a_head_whose_copies_differ_in_one_file_alone(tmp_path):
    """DeepSeek-V3's releases copy embedding and output matrix into the head; a file whose copies are others has them
    for its own. Modules are still compared with their counterparts, and the distributions with the file's own."""
    from safetensors.torch import load_file, save_file

    same, other = write_deepseek_v3(tmp_path / "same"), tmp_path / "other"
    tensors = load_file(same / "model.safetensors")
    tensors["model.layers.3.shared_head.head.weight"] *= 2
    other.mkdir()
    save_file(tensors, other / "model.safetensors")
    (other / "config.json").write_bytes((same / "config.json").read_bytes())
    models = load_model(same), load_model(other)
    assert models[0].draft.modules[0].head is None and models[1].draft.modules[0].head is not None
    found = [compare_layers(*pair, [[5, 6, 7, 8]]) for pair in (models, models[::-1])]
    for each in found:
        assert not any(layer.added for layer in each.layers) and each.draft_kl > 0
    assert found[0].draft_kl != found[1].draft_kl
    assert compare_layers(models[1], models[1], [[5, 6, 7, 8]]).draft_kl == 0


def test_the_command(bundled, capsys):
    assert main(["numerics", str(bundled), "--layers", "0,2"]) == 0
    shown = capsys.readouterr().out
    assert "layer 2" in shown and "behind a gap" in shown and "nats" in shown and "head 0" in shown
    assert main(["numerics", str(bundled), "--layers", "0,2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found["layers"]] == ["layer 0", "layer 2", "head 0"] and found["draft_kl_nats"] > 0
    assert main(["numerics", str(bundled), "--layers", "7"]) == 2
    assert "this model has layers 0 to 3" in capsys.readouterr().err
    assert main(["doctor", str(bundled), "--layers", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["weight_bytes"] == memory(bundled, layers="0").weights.nbytes
    html = numerics(bundled, "0", TEXTS)._repr_html_()
    assert "<table" in html and "layer 0" in html and "A slice" in html
