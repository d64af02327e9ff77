"""Sampling: the output's distribution is the target's, whatever the draft; counter-based random numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from mtplab import generate, load_model
from mtplab.config import SamplingConfig
from mtplab.decode.accept import accept_greedy, accept_sampled
from mtplab.decode.peek import next_logits
from mtplab.decode.random import Purpose, philox, uniform
from mtplab.decode.sampling import distribution, sample
from tiny import write_tiny


def test_philox_known_answers():
    """The vectors of the Random123 distribution (kat_vectors, philox4x32 10)."""
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
         (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ]  # fmt: skip
    for counter, key, expected in cases:
        out = philox(np.array(counter, dtype=np.uint32), key[0] | key[1] << 32)
        assert tuple(int(x) for x in out) == expected


def test_uniforms_are_uniform_and_apart():
    prompts, positions = np.arange(50), np.tile(np.arange(400), (50, 1))
    a = uniform(1, prompts, positions, Purpose.ACCEPT)
    b = uniform(1, prompts, positions, Purpose.SAMPLE)
    assert a.min() >= 0 and a.max() < 1 and len(np.unique(a)) == a.size
    counts = np.histogram(a, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < chi2.ppf(0.999, 49)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03
    assert np.array_equal(uniform(1, prompts[3:4], positions[3:4, 7:9], Purpose.ACCEPT), a[3:4, 7:9])


def test_distribution_top_k_and_top_p():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0]).log_softmax(-1)
    plain = distribution(logits, SamplingConfig(temperature=1.0))
    torch.testing.assert_close(plain, logits.double().exp())
    top2 = distribution(logits, SamplingConfig(temperature=1.0, top_k=2))
    assert (top2[2:] == 0).all() and float(top2.sum()) == pytest.approx(1)
    assert float(top2[0] / top2[1]) == pytest.approx(np.e)
    assert (distribution(logits, SamplingConfig(temperature=1.0, top_p=0.7)) > 0).tolist() == [True, True, False, False]
    assert (distribution(logits, SamplingConfig(temperature=1.0, top_p=1e-9)) > 0).sum() == 1
    tiny = distribution(logits, SamplingConfig(temperature=1e-310))
    assert tiny.tolist() == [1.0, 0.0, 0.0, 0.0], "a tiny temperature is greedy, not NaN"
    sharp = distribution(logits, SamplingConfig(temperature=0.5))
    assert float(sharp[0] / sharp[1]) == pytest.approx(np.e**2)


def test_sample_never_draws_weight_zero():
    weights = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    u = torch.tensor([0.0, 0.29999, 0.3, 0.5, np.nextafter(1.0, 0.0)], dtype=torch.float64)
    assert sample(weights.expand(5, 5), u).tolist() == [1, 1, 3, 3, 3]


def test_accept_greedy():
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    choices = torch.tensor([[1, 2, 3, 4]] * 3)
    verdict = accept_greedy(drafts, choices)
    assert verdict.accepted.tolist() == [3, 1, 0]
    emitted = [row[: a + 1] for row, a in zip(verdict.tokens.tolist(), [3, 1, 0], strict=True)]
    assert emitted == [[1, 2, 3, 4], [1, 2], [1]]


def test_p_and_q_are_the_papers():
    """p is the target's, q the draft's: a draft is kept with probability min(1, p/q)."""
    p = torch.tensor([[[0.5, 0.5], [1.0, 0.0]]], dtype=torch.float64)
    q = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    for u, kept in ((0.49, 1), (0.51, 0)):
        verdict = accept_sampled(torch.tensor([[0]]), p, q, torch.tensor([[u]]), torch.tensor([[0.0, 0.0]]))
        assert verdict.accepted.item() == kept
        # the bonus is p's, the recovered token the residual's
        assert verdict.tokens[0, kept].item() == (0 if kept else 1)


def chi_square(counts: np.ndarray, probs: np.ndarray) -> tuple[float, float]:
    """(statistic, its 99.9 % bound), cells expected below 5 merged."""
    expected = probs * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 5:
        assert observed[-1] < 25
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) < 2:
        return 0.0, 1.0
    return float(((observed - expected) ** 2 / expected).sum()), float(chi2.ppf(0.999, len(expected) - 1))


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy drafts", "sampled drafts"])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (4, 0.9)])
def test_output_distribution_is_the_targets(sampled, top_k, top_p):
    """20 000 runs of a Markov target over 7 tokens with a deliberately bad draft, depth 3: the first, second, third
    and fourth token each have the target's distribution, given the token before."""
    v, k, n = 7, 3, 20_000
    generator = torch.Generator().manual_seed(5)
    target_logits = torch.randn(v, v, generator=generator) * 1.5
    draft_logits = 0.2 * target_logits + torch.randn(v, v, generator=generator)
    sampling = SamplingConfig(temperature=0.8, top_k=top_k, top_p=top_p, seed=11)
    p_rows, q_rows = distribution(target_logits, sampling), distribution(draft_logits, sampling)
    prompts = np.arange(n)
    positions = np.tile(np.arange(k + 1), (n, 1))
    u_draft, u_accept, u_sample = (
        torch.from_numpy(uniform(sampling.seed, prompts, positions, purpose))
        for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.SAMPLE)
    )
    last = torch.zeros(n, dtype=torch.long)
    drafts, q = [], []
    for j in range(k):
        q.append(q_rows[last])
        last = sample(q[-1], u_draft[:, j]) if sampled else q[-1].argmax(-1)
        drafts.append(last)
    drafts = torch.stack(drafts, 1)
    before = torch.cat([torch.zeros(n, 1, dtype=torch.long), drafts], 1)
    verdict = accept_sampled(drafts, p_rows[before], torch.stack(q, 1) if sampled else None, u_accept[:, :k], u_sample)
    accepted, tokens = verdict.accepted.numpy(), verdict.tokens.numpy()
    assert 0 < accepted.mean() < 2, "the draft is bad, but not useless"
    for j in range(k + 1):
        for previous in range(v):
            known = (accepted >= j) & ((tokens[:, j - 1] == previous) if j else previous == 0)
            if known.sum() < 300:
                continue
            counts = np.bincount(tokens[known, j], minlength=v)
            statistic, bound = chi_square(counts, p_rows[previous].numpy())
            assert statistic < bound, f"token {j} after {previous}: {counts}"


@pytest.mark.slow
@pytest.mark.parametrize("draft_sampling", ["greedy", "sampled"])
def test_runner_samples_the_targets_distribution(tmp_path, draft_sampling):
    """Through the whole runner: 6 000 sequences over 16 tokens, a random (so bad) head, depth 3. Each token has the
    target's distribution, given what came before it."""
    model = load_model(write_tiny(tmp_path, spread=3.0), exact=False)
    prompt, n, length = [3, 1, 4], 6_000, 3
    sampling = {"temperature": 0.9, "max_new_tokens": length}
    out = generate(model, [prompt] * n, depth=3, seed=3, draft_sampling=draft_sampling, max_batch=2500, **sampling)
    assert 0.02 < out.stats.per_position[0] < 0.6, "the draft is bad, but not useless"
    seen: dict[tuple, np.ndarray] = {}
    for row in out.tokens:
        for j in range(length):
            seen.setdefault(tuple(row[:j]), np.zeros(16, dtype=int))[row[j]] += 1
    tested = 0
    for prefix, counts in seen.items():
        if counts.sum() >= 300:
            statistic, bound = chi_square(counts, next_distribution(model, prompt + list(prefix), sampling))
            assert statistic < bound, (prefix, counts)
            tested += 1
    assert tested > 10


def next_distribution(model, ids: list[int], sampling: dict) -> np.ndarray:
    """The target's distribution of the token after ids, by one prompt pass."""
    return distribution(next_logits(model, ids), SamplingConfig(**sampling)).numpy()


def test_same_seed_same_tokens_however_batched(bundled):
    model = load_model(bundled)
    prompts = ["import os", "In the beginning", "x", "The"]
    settings = {"depth": 3, "temperature": 0.8, "max_new_tokens": 16}
    once = generate(model, prompts, seed=4, **settings).tokens
    assert generate(model, prompts, seed=4, max_batch=3, **settings).tokens == once
    assert generate(model, prompts, seed=5, **settings).tokens != once
