"""Sizes and bytes read from a checkpoint's headers: the bundled one, and DeepSeek-V3's in sparse files."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

import mtplab
import sparse_checkpoints
from family_checkpoints import FAMILIES
from mtplab.errors import CheckpointError
from mtplab.study.checkpoint_sizes import sizes_of, weights_of
from mtplab.study.models_catalogue import model
from tiny import write_tiny

V3 = {
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", ["bundled", "bundled_fp8"])
def test_the_bundled_checkpoint(name, request):
    """Bytes of all parts add up to the plan's, but for norms, convolutions and what else a product does not read."""
    opened = mtplab.open_checkpoint(request.getfixturevalue(name))
    sizes = sizes_of(opened)
    assert (sizes.hidden, sizes.layers, sizes.attention_layers, sizes.tied) == (256, 4, 1, True)
    kept = weights_of(opened, sizes)
    assert kept.nbytes(sizes) == pytest.approx(opened.plan().loaded_nbytes(), rel=0.01)
    assert kept.mixer.rate == ("fp8" if name == "bundled_fp8" else "bf16") and kept.fc.rate == kept.head.rate == "bf16"
    assert kept.mlp.nbytes == pytest.approx(1 + 4 / 128**2 if name == "bundled_fp8" else 2)


def test_a_tied_head_is_the_embedding(tmp_path):
    """With twice the vocabulary in config.json, each of its parameters has half of BF16's two bytes."""
    opened = mtplab.open_checkpoint(write_tiny(tmp_path / "tied", tie_word_embeddings=True))
    sizes = sizes_of(opened)
    assert sizes.tied and not opened.plan().loaded_nbytes("head")
    assert weights_of(opened, sizes).head.nbytes == 2
    assert weights_of(opened, replace(sizes, vocabulary=2 * sizes.vocabulary)).head.nbytes == 1


def test_a_head_with_a_layer_per_depth(tmp_path):
    """Every layer counts, and a parameter of it has BF16's two bytes."""
    opened = mtplab.open_checkpoint(write_tiny(tmp_path / "deep", mtp_num_hidden_layers=3))
    sizes = sizes_of(opened)
    kept = weights_of(opened, sizes)
    assert sizes.draft_layers == 3 and kept.draft_mixer.nbytes == pytest.approx(2, rel=0.02)
    assert kept.draft_mlp.nbytes == kept.fc.nbytes == 2 and kept.draft_mlp.rate == "bf16"
    shallow = sizes_of(mtplab.open_checkpoint(write_tiny(tmp_path / "one")))
    assert shallow.draft_layers == 1 and sizes.parameters()["draft_mlp"] == 3 * shallow.parameters()["draft_mlp"]


def test_fp8_made_at_load(bundled):
    opened = mtplab.open_checkpoint(bundled)
    kept = weights_of(opened, sizes_of(opened), "fp8")
    assert kept.mlp.nbytes == pytest.approx(1 + 4 / 128**2) and "fp8" in kept.name
    assert kept.fc.rate == kept.head.rate == "bf16"  # the published exclusions, unless others are asked for


def test_a_checkpoint_of_deepseek_v3_is_the_catalogues(tmp_path, monkeypatch):
    """Names, dtypes and shapes of the release, cut to 5 layers: sizes and bytes of every part are the preset's."""
    monkeypatch.setattr(sparse_checkpoints, "LAYERS", 5)
    sparse_checkpoints.write_deepseek_v3(tmp_path / "v3", shards=4, config={**V3, "num_hidden_layers": 5})
    opened = mtplab.open_checkpoint(tmp_path / "v3")
    sizes, expected = sizes_of(opened), replace(model("DeepSeek-V3"), attention_layers=5)
    assert sizes.parameters() == expected.parameters() and sizes.attention == expected.attention
    kept = weights_of(opened, sizes)
    for part, nbytes in {"mixer": 1, "mlp": 1, "experts": 1, "head": 2, "draft_fc": 2, "draft_mixer": 1, "draft_mlp": 1,
                         "draft_experts": 1}.items():  # fmt: skip
        assert kept.of(part).nbytes == pytest.approx(nbytes, rel=2e-3), part


def _changed(bundled, folder, **changes):
    shutil.copytree(bundled, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return mtplab.open_checkpoint(folder)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "wide"}, "config.json gives hidden_size as 'wide'; expected a whole number above 0"),
        ({"num_attention_heads": 0}, "gives num_attention_heads as 0; expected"),
        ({"linear_value_head_dim": None}, "gives linear_value_head_dim as None"),
        ({"num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2, "decoder_sparse_step": 2},
         "spreads experts over some layers only"),
    ],
)  # fmt: skip
def test_dimensions_that_make_no_sense_are_refused(bundled, tmp_path, changes, words):
    with pytest.raises(CheckpointError, match=words):
        sizes_of(_changed(bundled, tmp_path / "ckpt", **changes))


def test_bytes_that_do_not_fit_the_dimensions_are_refused(bundled, tmp_path):
    opened = _changed(bundled, tmp_path / "ckpt", intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"mlp has .* bytes, 16.00 for each of .*; expected 0.3 to 4.6"):
        weights_of(opened, sizes_of(opened))


def test_queries_that_are_made_from_the_hidden_state(tmp_path):
    opened = mtplab.open_checkpoint(FAMILIES["deepseek_v3"](tmp_path / "v3", q_lora_rank=None))
    sizes = sizes_of(opened)
    assert "q_b" not in sizes.attention.parameters(sizes.hidden)
    kept = weights_of(opened, sizes)
    assert kept.mixer.nbytes == kept.draft_mixer.nbytes == 2, "every parameter is counted, and none twice"


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("step3p7", {}, r"attention layers of Step-3\.5, 3\.7 differ"),
        ("glm4_moe", {"heads": 2}, "its MTP head has 2 layers, each with a projection of its own"),
    ],
)
def test_layers_that_the_cost_model_does_not_know_are_refused(tmp_path, family, changes, words):
    """And not taken for others, twice as heavy."""
    opened = mtplab.open_checkpoint(FAMILIES[family](tmp_path / "ckpt", **changes))
    with pytest.raises(CheckpointError, match=words) as caught:
        sizes_of(opened)
    assert "`mtplab measure`" in str(caught.value)
