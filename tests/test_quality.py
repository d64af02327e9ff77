"""The target's own quality: against itself nothing is lost; against a quantised one what float64 says by hand."""

import math

import numpy as np
import pytest
import torch

import mtplab
from mtplab.decode.peek import next_logits
from mtplab.errors import ConfigError
from mtplab.study.quality import own_texts, quality, read

PROMPTS = ["Once upon a time", "def main():"]


@pytest.fixture(scope="module")
def models(bundled, bundled_fp8):
    return mtplab.load_model(bundled), mtplab.load_model(bundled_fp8)


@pytest.fixture(scope="module")
def texts(models):
    return own_texts(models[0], PROMPTS, max_new_tokens=20)


def test_a_model_agrees_with_itself(models, texts):
    found = quality(models[0], texts, models[0], exact=True)
    assert (found.mean_kl, found.top1_agreement) == (0.0, 1.0)
    assert found.perplexity == found.reference_perplexity
    assert len(found.nll) == sum(map(len, texts)) - len(texts)


def test_every_position_is_what_one_pass_says(models, texts):
    reference, model = models
    found = quality(model, texts, reference, quant_policy="int4", exact=True)
    for row in range(0, len(found.nll), 7):
        text, position = texts[found.text[row]], int(found.position[row])
        mine = next_logits(model, text[:position], "int4").double().log_softmax(-1)
        whole = next_logits(reference, text[:position]).double().log_softmax(-1)
        assert found.nll[row] == pytest.approx(-float(mine[text[position]]), abs=1e-5)
        assert found.kl[row] == pytest.approx(float((whole.exp() * (whole - mine)).sum()), abs=1e-5)
    assert 0 < found.mean_kl < 1 and 0 < found.top1_agreement <= 1
    assert found.perplexity == pytest.approx(math.exp(found.nll.mean()))


def test_coarser_is_worse(models, texts):
    reference, model = models
    kl = {policy: quality(reference, texts, reference, quant_policy=policy).mean_kl for policy in ("int8", "int4")}
    assert 0 < kl["int8"] < kl["int4"]
    assert quality(model, texts, reference).mean_kl > 0


def test_prompts_are_skipped_and_positions_grouped(models, texts):
    skip = [len(text) - 20 for text in texts]
    found = quality(models[1], texts, skip=skip)
    assert len(found.nll) == 19 * 2 and found.kl is None and found.mean_kl is None
    whole = quality(models[1], texts)
    assert len(whole.nll) == sum(len(text) - 1 for text in texts)
    groups = whole.by_context([0, 10, 10_000, 20_000])
    assert sum(group["tokens"] for group in groups) == len(whole.nll)
    measured = ("kl", "kl_half_interval", "top1_agreement", "perplexity")
    assert groups[2] == {"from": 10_000, "to": 20_000, "tokens": 0} | dict.fromkeys(measured)
    assert np.isfinite(groups[0]["perplexity"])


def test_long_texts_are_read_in_segments(models, texts, monkeypatch):
    whole = quality(models[1], texts, models[0], quant_policy="int8")
    monkeypatch.setattr("mtplab.decode.reading._LOGIT_BYTES", 1)
    parts = quality(models[1], texts, models[0], quant_policy="int8")
    torch.testing.assert_close(torch.from_numpy(parts.kl), torch.from_numpy(whole.kl), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("texts", "skip", "says"),
    [
        ([[1]], 0, "text 0 has 1 tokens, of which 0 are skipped"),
        ([[1, 2, 3], [1, 2, 3]], [1, 2], "text 1 has 3 tokens, of which 2 are skipped"),
        ([[1, 2, 3]], [0, 0], "skip is"),
        ([[1, 2, 3]], -1, "skip is -1"),
        ([[1, 2, 3]], [-2], "skip is"),
        ([[1, 2, 3]], 0.5, "skip is 0.5"),
        ([[1, 2, 3]], ["1"], "skip is"),
        ([], 0, "texts is"),
        ([[1, 2, 10**9]], 0, "token id"),
    ],
)
def test_what_is_refused(models, texts, skip, says):
    with pytest.raises(ConfigError, match=says):
        quality(models[0], texts, skip=skip)


def test_a_text_longer_than_either_model_is_refused(models):
    room = models[0].config.max_position
    says = f"text 1 has {room + 1} tokens; expected no more than max_position_embeddings, {room}"
    texts = [[1, 2, 3], [1] * (room + 1)]
    with pytest.raises(ConfigError, match=says):
        quality(models[0], texts)
    with pytest.raises(ConfigError, match=says):
        read(models[0], texts)


def test_strings_are_read_by_the_models_tokenizer(models):
    text = "Once upon a time"
    found = [quality(models[0], given) for given in (text, [text], [models[0].encode(text)])]
    assert found[0].perplexity == found[1].perplexity == found[2].perplexity
