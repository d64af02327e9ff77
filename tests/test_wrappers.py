"""Multimodal wrappers: their text model is run as if it stood alone, its names under whichever root, and what they see
with is neither read nor counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import mtplab
from family_checkpoints import write_glm4_moe
from family_checks import PROMPTS, check_audit, check_greedy, check_logits, check_lossless, check_rollback
from mtplab import generate, load_model, open_checkpoint, quantize_checkpoint
from mtplab.cli import main
from mtplab.config import EngineConfig, SpecConfig
from mtplab.decode.peek import next_logits
from mtplab.errors import CheckpointError
from mtplab.models.config import parse_config
from mtplab.models.model import load_configured
from tiny import MIXTURE, write_tiny

SIZES = {"vocab_size": 64, "hidden_size": 64, "head_dim": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
KINDS = ["linear_attention"] * 3 + ["full_attention"]
# as Qwen3.5 is published: of the half of the rotated features that turns, how many turn by frame, row and column
ROPE = {
    "rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
    "mrope_section": [4, 2, 2],
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
    "num_position_embeddings": 16,
}  # fmt: skip
ROOTS = {"model.language_model.": "lm_head.", "language_model.model.": "language_model.lm_head."}
SENSES = "vision-00002.safetensors"


def write_text(folder: Path, name: str) -> Path:
    """The text model alone, dense or a mixture, with its experts stacked as published."""
    own = MIXTURE | {"moe_intermediate_size": 32} if name == "qwen3_5_moe" else {}
    return write_tiny(
        folder, spread=4.0, stack=bool(own), layer_types=KINDS, rope_parameters=ROPE, **SIZES, **own
    )


def wrap(text: Path, folder: Path, name: str, root: str = "model.language_model.") -> Path:
    """The same in a wrapper: a vision tower in a file of its own, the head `mtp.*` at the top."""
    config = json.loads((text / "config.json").read_text())
    kind = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[name]
    outer = {
        "architectures": [f"{kind}ForConditionalGeneration"], "model_type": name, "text_config": config,
        "vision_config": VISION | {"model_type": name}, "image_token_id": 60, "video_token_id": 61,
        "vision_start_token_id": 62, "vision_end_token_id": 63, "tie_word_embeddings": config["tie_word_embeddings"],
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(outer))
    seen = getattr(transformers, f"{kind}VisionModel")._from_config(oracle_config(folder).vision_config)
    head = ROOTS[root]
    tensors = {}
    for each, value in load_file(text / "model.safetensors").items():
        renamed = each.replace("lm_head.", head, 1) if each.startswith("lm_head.") else each
        tensors[root + renamed.removeprefix("model.") if renamed.startswith("model.") else renamed] = value
    vision = {f"{root.partition('language_model')[0]}visual.{n}": v.bfloat16() for n, v in seen.state_dict().items()}
    first = "model-00001.safetensors"
    save_file(tensors, folder / first, {"format": "pt"})
    save_file({name: value.contiguous() for name, value in vision.items()}, folder / SENSES, {"format": "pt"})
    index = dict.fromkeys(tensors, first) | dict.fromkeys(vision, SENSES)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder


def oracle_config(folder: Path):
    return transformers.AutoConfig.from_pretrained(folder)


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def both(request, tmp_path_factory):
    """(the text model's folder, the wrapper's, its name)."""
    at = tmp_path_factory.mktemp(request.param)
    text = write_text(at / "text", request.param)
    return text, wrap(text, at / "whole", request.param), request.param


@pytest.fixture(scope="module")
def oracle(both):
    """transformers' ForConditionalGeneration, every weight but the head's found."""
    whole = oracle_config(both[1])
    kind = getattr(transformers, whole.architectures[0])
    model, info = kind.from_pretrained(
        both[1], dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"], info
    assert all(name.startswith("mtp.") for name in info["unexpected_keys"]), info
    return model.eval()


@pytest.mark.parametrize("exact", [True, False])
def test_text_logits_are_the_wrappers(both, oracle, exact):
    check_logits(load_model(both[1]), oracle, exact)


def test_ragged_batches_decode_as_the_wrapper(both, oracle):
    check_greedy(load_model(both[1]), oracle)


@pytest.mark.parametrize("root", list(ROOTS))
def test_a_root_changes_nothing(both, tmp_path, root):
    text, _, name = both
    alone, wrapped = load_model(text), load_model(wrap(text, tmp_path / "w", name, root))
    assert wrapped.target.head.names == (f"{ROOTS[root]}weight".removesuffix(".weight"),)
    for settings in ({"depth": 0}, {"depth": 3, "quant_policy": "int8"}):
        one, other = (generate(each, PROMPTS, max_new_tokens=12, **settings) for each in (alone, wrapped))
        assert one.tokens == other.tokens and one.rounds == other.rounds
    assert torch.equal(next_logits(alone, PROMPTS[2]), next_logits(wrapped, PROMPTS[2]))


def test_fp8_reaches_the_text_model_alone(both, tmp_path):
    """Quantised by mtplab, and as it is loaded; the tower stays as it is."""
    text, whole, _ = both
    quantize_checkpoint(text, tmp_path / "text")
    quantize_checkpoint(whole, tmp_path / "whole")
    alone, wrapped = load_model(tmp_path / "text"), load_model(tmp_path / "whole")
    assert torch.equal(next_logits(alone, PROMPTS[2]), next_logits(wrapped, PROMPTS[2]))
    kinds = {(m.part, m.weight) for m in wrapped.plan.modules if ".visual." in m.name}
    assert kinds == {("unused", "bf16")}
    assert any(m.weight == "fp8" for m in wrapped.plan.modules if m.part == "draft")
    settings = {"max_new_tokens": 10, "depth": 2}
    assert generate(alone, PROMPTS, **settings).rounds == generate(wrapped, PROMPTS, **settings).rounds
    at_load = load_model(whole, model_format="fp8")
    assert torch.equal(next_logits(at_load, PROMPTS[2]), next_logits(wrapped, PROMPTS[2]))


def test_no_byte_of_the_tower_is_read(both, tmp_path):
    """Its file loses all but its header once that is read: loading and running do not notice."""
    text, _, name = both
    whole = wrap(text, tmp_path / "w", name)
    checkpoint, file = open_checkpoint(whole), whole / SENSES
    with file.open("r+b") as opened:
        header = int.from_bytes(opened.read(8), "little")
        opened.truncate(8 + header)
    seen = [each for each in checkpoint.tensors if "visual." in each]
    with pytest.raises(CheckpointError, match="truncated"):
        checkpoint.read(seen[0])
    model = load_configured(checkpoint, EngineConfig(model_format="fp8"), SpecConfig())
    check_lossless(model, "int8", (1, 3), 8)


def test_the_tower_is_not_counted(both, capsys):
    text, whole, _ = both
    alone, wrapped = mtplab.memory(text, depth=2), mtplab.memory(whole, depth=2)
    assert wrapped.weights == alone.weights and wrapped.caches == alone.caches
    assert wrapped.stored > alone.stored
    assert main(["doctor", str(whole), "--context", "256"]) == 0
    assert "it fits" in capsys.readouterr().out
    assert main(["audit", str(whole), "--fail-on", "warning"]) == 0, capsys.readouterr().out
    check_audit(whole, "Qwen3.5")


@pytest.mark.parametrize("root", list(ROOTS))
def test_a_tied_vocabulary_head_is_counted_where_it_is_made(tmp_path, root):
    """A head of its own under either root is no second one."""
    text = write_text(tmp_path / "text", "qwen3_5")

    def said(folder, tied):
        config = json.loads((folder / "config.json").read_text())
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
        (folder / "config.json").write_text(json.dumps(config))
        return mtplab.memory(folder).weights.nbytes

    whole = wrap(text, tmp_path / "w", "qwen3_5", root)
    assert said(whole, True) == said(whole, False)


def test_lossless_and_without_a_trace(both):
    check_lossless(load_model(both[1], model_format="fp8", exclude="none"), "fp8", (1, 2, 4))
    check_rollback(load_model(both[1]), "int4")


def test_sections_of_positions_are_the_same_for_text(both):
    """Whatever they are, and where an old config calls the rotation itself so."""
    config = json.loads((both[1] / "config.json").read_text())
    found = parse_config(config)
    plain = {key: value for key, value in ROPE.items() if "mrope" not in key}
    for rope in (plain, ROPE | {"mrope_section": [2, 3, 3]}, plain | {"rope_type": "mrope"}):
        assert parse_config(config | {"text_config": config["text_config"] | {"rope_parameters": rope}}) == found
    assert found.layers[3].mixer.rotary.dim == 16


def test_a_head_behind_the_layers_is_found_under_a_wrappers_root(tmp_path):
    """GLM-4.5's names, which number the head behind the target, as a wrapper would hold them."""
    plain = write_glm4_moe(tmp_path / "plain")
    config = json.loads((plain / "config.json").read_text())
    for root, head in ROOTS.items():
        folder = tmp_path / root
        folder.mkdir()
        tensors = load_file(plain / "model.safetensors")
        lm_head = tensors.pop("lm_head.weight")
        renamed = {root + name.removeprefix("model."): value for name, value in tensors.items()}
        save_file(renamed | {f"{head}weight": lm_head}, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps({"model_type": "some_vl", "text_config": config}))
        model, alone = load_model(folder), load_model(plain)
        assert model.draft.modules[0].head is None and model.draft.modules[0].embedding is model.target.embedding
        settings = {"depth": 2, "max_new_tokens": 16}
        assert generate(model, PROMPTS, **settings).rounds == generate(alone, PROMPTS, **settings).rounds
        check_audit(folder, "GLM-4.5")
