"""A trace above temperature 0: its expectations are those of speculative sampling, on a toy whose answer is known by
enumeration and on the bundled model, and its probabilities are those of passes without any cache."""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mtplab
from mtplab.config import SamplingConfig
from mtplab.decode.accept import accept_sampled
from mtplab.decode.sampling import distribution
from mtplab.models.attend import KEY_BLOCK
from mtplab.models.delta_rule import CHUNK
from mtplab.models.passes import PassMaker
from mtplab.models.rows import round_up
from mtplab.quant.policy import resolve_policy
from mtplab.study.renewal import expected_counts
from mtplab.study.trace import trace

# a target and a draft of four tokens, each looking at the token before only
P = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.6, 0.2, 0.1], [0.25, 0.25, 0.25, 0.25], [0.05, 0.05, 0.1, 0.8]])
Q = np.array([[0.4, 0.1, 0.3, 0.2], [0.3, 0.3, 0.2, 0.2], [0.0, 0.5, 0.25, 0.25], [0.1, 0.1, 0.4, 0.4]])
START, LEFT = 1, 5  # the prompt's first token, and how many more are emitted


def toy_alpha(output: tuple[int, ...], depth: int, drawn: bool) -> np.ndarray:
    """[1, s, k] of an output, by the definition: min(1, q/p), or whether the likeliest draft is the token."""
    found = np.zeros((1, len(output) - 1, depth))
    for slot in range(len(output) - 1):
        for j in range(min(depth, len(output) - 1 - slot)):
            before, token = output[slot + j], output[slot + j + 1]
            if drawn:
                found[0, slot, j] = min(1.0, Q[before, token] / P[before, token])
            else:
                found[0, slot, j] = Q[before].argmax() == token
    return found


def through_outputs(depth: int, drawn: bool) -> np.ndarray:
    """(rounds, accepted at position 1 …, k) on average, by the renewal walk over every output there is."""
    total = np.zeros(1 + depth)
    for rest in itertools.product(range(4), repeat=LEFT):
        output = (START, *rest)
        weight = math.prod(P[a, b] for a, b in itertools.pairwise(output))
        if weight:
            counts = expected_counts(toy_alpha(output, depth, drawn), np.array([LEFT]), depth)
            total += weight * np.concatenate([counts.rounds, counts.accepted_per_position[0]])
    return total


def through_rounds(depth: int, drawn: bool) -> np.ndarray:
    """The same by following every draw of a speculative sampler, with its probability."""

    def round_from(token: int, left: int, weight: float, found: np.ndarray) -> None:
        if left and weight:
            found[0] += weight
            step(token, left, 1, weight, found)

    def step(token: int, left: int, j: int, weight: float, found: np.ndarray) -> None:
        p = P[token]
        if j > depth:
            for bonus in range(4):
                round_from(bonus, left - 1, weight * p[bonus], found)
            return
        q = Q[token] if drawn else np.eye(4)[Q[token].argmax()]
        for draft in np.flatnonzero(q):
            kept = weight * q[draft] * min(1.0, p[draft] / q[draft])
            found[j] += kept
            if left > 1 and kept:
                step(draft, left - 1, j + 1, kept, found)
        rest = np.maximum(0.0, p - q)
        lost = weight * (1.0 - np.minimum(p, q).sum())
        for token_, share in enumerate(rest / rest.sum() if rest.sum() else rest):
            round_from(token_, left - 1, lost * share, found)

    found = np.zeros(1 + depth)
    round_from(START, LEFT, 1.0, found)
    return found


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("depth", [0, 1, 2, 4])
def test_the_walk_over_outputs_is_the_sum_over_draws(depth, drawn):
    np.testing.assert_allclose(through_outputs(depth, drawn), through_rounds(depth, drawn), rtol=1e-12)


@pytest.mark.parametrize("drawn", [True, False])
def test_simulated_speculative_sampling_gives_the_walks_numbers(drawn):
    """The runner's own rule, 20 000 outputs of the toy at depth 3."""
    depth, n = 3, 20_000
    draw = torch.Generator().manual_seed(3)
    p, q = torch.from_numpy(P), torch.from_numpy(Q)
    token, left = torch.full((n,), START), torch.full((n,), LEFT)
    found = torch.zeros(n, 1 + depth, dtype=torch.float64)
    while (live := left > 0).any():
        tokens, probs = [token], []
        for _ in range(depth):
            probs.append(q[tokens[-1]])
            tokens.append(torch.multinomial(probs[-1], 1, generator=draw)[:, 0] if drawn else probs[-1].argmax(-1))
        target = torch.stack([p[t] for t in tokens], 1)
        uniforms = torch.rand(2, n, depth + 1, generator=draw, dtype=torch.float64)
        drafts = torch.stack(tokens[1:], 1)
        verdict = accept_sampled(
            drafts, target, torch.stack(probs, 1) if drawn else None, uniforms[0, :, :depth], uniforms[1]
        )
        kept = torch.minimum(verdict.accepted, left)
        found[:, 0] += live
        found[:, 1:] += (torch.arange(1, depth + 1) <= kept[:, None]) & live[:, None]
        left = (left - verdict.accepted - 1).clamp_min(0)
        token = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
    exact = through_outputs(depth, drawn)
    error = (found.std(0) / math.sqrt(n)).numpy()
    assert (np.abs(found.mean(0).numpy() - exact) <= 3 * error).all()


@pytest.fixture(scope="module")
def model(bundled_fp8):
    return mtplab.load_model(bundled_fp8)


def means(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and its standard error over prompts, [n, ..] → [..] each."""
    return values.mean(0), values.std(0, ddof=1) / math.sqrt(len(values))


def apart(model, drafts: str, n: int, tokens: int, depths: tuple[int, ...], **sampling) -> tuple[float, float]:
    """Over rounds and accepted drafts by position, how many combined standard errors n traced outputs and n runs of
    the runner lie apart at most: (as the trace has it, were drafts taken for the other kind)."""
    ids = [model.encode("The king said that")] * n
    settings = {"max_new_tokens": tokens, "ignore_eos": True, "draft_sampling": drafts, **sampling}
    found = trace(model, ids, max(depths), seed=1, **settings)
    alpha, slots = found.alpha()
    other = found.hits if drafts == "sampled" else np.exp(np.minimum(0.0, np.nan_to_num(found.log_q, nan=-np.inf)))
    other = other.reshape(alpha.shape).astype(float)
    worst = [0.0, 0.0]
    for depth in depths:
        run = mtplab.generate(model, ids, depth=depth, seed=2 + depth, **settings)
        counted = np.array([[s.rounds, *s.accepted_per_position] for s in run.per_prompt], dtype=float)
        for at, probabilities in enumerate((alpha, other)):
            counts = expected_counts(probabilities, slots, depth)
            expected = np.concatenate([counts.rounds[:, None], counts.accepted_per_position[:, :depth]], 1)
            (mine, my_error), (theirs, their_error) = means(expected), means(counted)
            gap = np.abs(mine - theirs) / np.maximum(np.hypot(my_error, their_error), 1e-12)
            worst[at] = max(worst[at], float(gap.max()))
    return worst[0], worst[1]


@pytest.mark.parametrize(
    ("drafts", "cut"),
    [("greedy", {"top_k": 12, "top_p": 0.8}), ("sampled", {"top_k": 12, "top_p": 0.8}), ("sampled", {})],
)
def test_traced_outputs_are_what_runs_give(model, drafts, cut):
    right, wrong = apart(model, drafts, 200, 8, (3,), temperature=1.0, **cut)
    assert right <= 3
    assert wrong > 3  # so many outputs can tell drafts that are drawn from those that are not


@pytest.mark.slow
def test_many_traced_outputs_are_what_many_runs_give(model):
    right, wrong = apart(model, "sampled", 400, 12, (2, 4), temperature=0.8, top_k=50, top_p=0.95)
    assert right <= 3 and wrong > 6


class Plain:
    """The target and the head over whole sequences, nothing kept between calls."""

    def __init__(self, model, ids: list[int]):
        self.model, self.ids = model, ids
        self.hidden = model.target.normed(
            self._pass(
                ids,
                lambda tokens, run, capacity: model.target(
                    tokens, run, model.target_caches(1, capacity, resolve_policy("none"))
                ),
            )
        )
        self.logits = model.target.logits(self.hidden)

    def _pass(self, ids, call):
        width = round_up(len(ids), CHUNK)
        capacity = round_up(width, KEY_BLOCK)
        passes = PassMaker(self.model.config, capacity, self.model.dtype, self.model.device)
        run = passes.make(torch.arange(width)[None], width, True, torch.tensor([len(ids)]))
        return call(F.pad(torch.tensor([ids]), (0, width - len(ids))), run, capacity)[: len(ids)]

    def drafts(self, slot: int, depth: int) -> list[torch.Tensor]:
        """Logits of drafts 1 … depth of a chain that begins with the hidden state of token `slot`."""
        given, found = self.hidden[: slot + 1], []
        for j in range(depth):

            def head(tokens, run, capacity, given=given):
                padded = F.pad(given, (0, 0, 0, tokens.shape[1] - len(given)))[None]
                embedded = run.gather(F.embedding(tokens, self.model.target.embedding))
                return self.model.draft(
                    embedded, run.gather(padded), run, *self.model.draft_caches(1, 1, capacity, resolve_policy("none"))
                )

            out = self.model.draft.normed(self._pass(self.ids[1 : slot + 2 + j], head))[-1:]
            found.append(self.model.target.logits(out)[0])
            given = torch.cat([given, out])
        return found


@torch.inference_mode()
def test_probabilities_are_those_of_passes_without_a_cache(model):
    sampling = SamplingConfig(temperature=0.9, top_k=40, top_p=0.9)
    prompt = model.encode("def main():")
    arguments = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "draft_sampling": "sampled"}
    found = trace(model, [prompt], 3, max_new_tokens=20, ignore_eos=True, **arguments)
    output = found.outputs[0]
    plain = Plain(model, prompt + output)
    n = len(prompt)
    kept = missed = 0
    for slot in range(19):
        p = distribution(plain.logits[n + slot], sampling)
        assert found.log_p[slot] == pytest.approx(float(p[output[slot + 1]].log()), abs=1e-3)
        for j, logits in enumerate(plain.drafts(n - 1 + slot, min(3, 19 - slot))):
            token = output[slot + 1 + j]
            q = float(distribution(logits, sampling)[token])
            assert found.top[slot, j] == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-3)
            assert math.exp(found.log_q[slot, j]) == pytest.approx(q, abs=1e-3)
            assert found.hits[slot, j] == (int(logits.argmax()) == token and (j == 0 or found.hits[slot, j - 1]))
            kept += 1
            if not q:  # no round goes past a draft that is never drawn
                missed += 1
                assert np.isnan(found.log_q[slot, j + 1 :]).all()
                break
    assert kept > 19 and missed
    assert np.isnan(found.log_q[18, 1:]).all()  # past the output's end
