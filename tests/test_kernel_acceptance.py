"""The speculative step: kernels in the interpreter against the rule in torch, token for token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_tools import interpreted, poisoned
from mtplab.decode.accept import accept_greedy, accept_sampled
from mtplab.decode.random import Purpose, uniform
from mtplab.decode.sampling import greedy
from mtplab.kernels.acceptance import Emitted, emit_greedy, emit_sampled
from mtplab.kernels.acceptance_jit import BLOCK, BLOCK_J
from mtplab.kernels.acceptance_reference import UNITS, draw

pytestmark = interpreted
VOCABULARY = 248_320
NAN = float("nan")


def emitted(tokens: torch.Tensor, accepted: torch.Tensor) -> list[list[int]]:
    return [row[: n + 1] for row, n in zip(tokens.tolist(), accepted.tolist(), strict=True)]


def assert_emits(got: Emitted, expected: list[list[int]]) -> None:
    """Those tokens, their number, and −1 after them."""
    width = got.tokens.shape[1]
    assert got.num_emitted.tolist() == [len(row) for row in expected]
    assert got.tokens.tolist() == [row + [-1] * (width - len(row)) for row in expected]


# greedy


def greedy_round(b: int, k: int, v: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits, and drafts of which a row's first mismatch is at row mod (k + 2), where that is below k."""
    logits = torch.randn(b, k + 1, v, generator=torch.Generator().manual_seed(b * k + v)).to(dtype)
    drafts = logits[:, :k].argmax(-1)
    for row in range(b):
        wrong = row % (k + 2)
        if wrong < k:
            drafts[row, wrong] = (drafts[row, wrong] + 1) % v
    return drafts, logits


@pytest.mark.parametrize("b, k, v", [(7, 3, 1000), (1, 0, 7), (2, 31, 33), (3, 1, 1), (2, 1, VOCABULARY)])
def test_greedy_is_the_rules(b, k, v):
    drafts, logits = greedy_round(b, k, v)
    expected = accept_greedy(drafts, greedy(logits))
    with poisoned():
        got = emit_greedy(drafts, logits)
    assert_emits(got, emitted(expected.tokens, expected.accepted))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_and_ties(dtype):
    """Many logits of a thousand are equal in 8 bits: the first one is the choice, as torch's argmax has it."""
    drafts, logits = greedy_round(5, 3, 1000, dtype)
    logits = (logits * 2).round()
    drafts[:3] = greedy(logits)[:3, :3]
    expected = accept_greedy(drafts, greedy(logits))
    assert_emits(emit_greedy(drafts, logits), emitted(expected.tokens, expected.accepted))
    assert expected.accepted.max() == 3


def test_order_of_logits():
    """Negative ones, both zeros, infinities, subnormals; equal ones far apart."""
    rows = [[-3.0, -1.0, -2.0], [-0.0, 0.0, -1.0], [0.0, -0.0, -0.0], [float("-inf")] * 3, [1e-40, 2e-40, 0.0],
            [1.0, float("inf"), 3e38], [float("-inf"), -3e38, float("-inf")]]  # fmt: skip
    logits = torch.tensor(rows)[:, None]
    got = emit_greedy(torch.empty(len(rows), 0, dtype=torch.int64), logits)
    assert got.tokens[:, 0].tolist() == [1, 0, 0, 0, 1, 1, 1] == greedy(logits)[:, 0].tolist()
    far = torch.zeros(1, 1, 20_000)
    far[0, 0, [9_000, 9_001, 19_999]] = 1.0
    assert emit_greedy(torch.empty(1, 0, dtype=torch.int64), far).tokens.tolist() == [[9_000]]


@pytest.mark.parametrize("way", ["triton", "reference"])
def test_greedy_nan_ends_a_round_visibly(monkeypatch, way):
    monkeypatch.setenv("MTPLAB_KERNELS", way)
    drafts, logits = torch.tensor([[2, 2], [2, 2], [-1, 2]]), torch.zeros(3, 3, 9000)
    logits[:, :, 2] = 1
    logits[0, 1, 8999], logits[1, 2, 0], logits[2, 0, 3] = NAN, NAN, NAN
    assert_emits(emit_greedy(drafts, logits), [[2, -1], [2, 2, -1], [-1]])


@pytest.mark.parametrize("way", ["triton", "reference"])
def test_ragged_greedy_rounds(monkeypatch, way):
    """What lies past a round's drafts is not looked at, whatever it is."""
    monkeypatch.setenv("MTPLAB_KERNELS", way)
    counts = torch.tensor([0, 1, 2, 3, -5, 99])
    drafts, logits = torch.full((6, 3), 4), torch.zeros(6, 4, 10)
    logits[:, :, 4] = 1
    for row, count in enumerate(counts.clamp(0, 3).tolist()):
        drafts[row, count:] = -7 if row % 2 else 4
        logits[row, count + 1 :] = NAN
    assert_emits(emit_greedy(drafts, logits, counts), [[4] * (n + 1) for n in (0, 1, 2, 3, 0, 3)])


def test_rows_of_other_strides():
    drafts, logits = greedy_round(3, 2, 50)
    expected = emit_greedy(drafts, logits)
    turned = logits.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(emit_greedy(drafts, turned).tokens, expected.tokens)
    assert torch.equal(emit_greedy(drafts, logits.mT.contiguous().mT).tokens, expected.tokens)
    assert torch.equal(emit_greedy(drafts[1:2], logits[1:2]).tokens, expected.tokens[1:2])


# sampled


def sampled_round(b: int, k: int, v: int, dtype: torch.dtype, drawn: bool, sharp: float = 1.0):
    seed = torch.Generator().manual_seed(b * 100 + k * 10 + v)
    p = (torch.randn(b, k + 1, v, generator=seed) * sharp).double().softmax(-1).to(dtype)
    q = (p[:, :k].double().log() + 0.3 * torch.randn(b, k, v, generator=seed).double()).softmax(-1).to(dtype)
    drafts = draw(q, torch.rand(b, k, generator=seed, dtype=torch.float64)) if drawn else q.argmax(-1)
    return drafts, p, q if drawn else None


def by_the_rule(drafts, p, q, seed, prompts, positions) -> list[list[int]]:
    at = positions.numpy()[:, None] + np.arange(p.shape[1])
    accept, sample = (
        torch.from_numpy(uniform(seed, prompts.numpy(), at, purpose)) for purpose in (Purpose.ACCEPT, Purpose.SAMPLE)
    )
    verdict = accept_sampled(drafts, p, q, accept[:, : drafts.shape[1]], sample)
    return emitted(verdict.tokens, verdict.accepted)


@pytest.mark.parametrize("drawn", [True, False], ids=["drawn drafts", "likeliest drafts"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "b, k, v, sharp", [(16, 4, 60, 4.0), (5, 0, 7, 1.0), (2, 31, 33, 4.0), (4, 2, 9000, 6.0), (1, 1, 1, 1.0)]
)
def test_sampled_is_the_rules(b, k, v, sharp, dtype, drawn):
    drafts, p, q = sampled_round(b, k, v, dtype, drawn, sharp)
    prompts, positions = torch.arange(b) * 3, torch.arange(b) * 1000 + 5
    with poisoned():
        got = emit_sampled(drafts, p, q, 17, prompts, positions)
    expected = by_the_rule(drafts, p, q, 17, prompts, positions)
    assert_emits(got, expected)
    if (b, k) == (16, 4):
        assert len({len(row) for row in expected}) > 2, "rounds end at different places"


@pytest.mark.parametrize("drawn, dtype", [(True, torch.float32), (False, torch.float64)])
def test_a_whole_vocabulary(drawn, dtype):
    """61 blocks, so two looks at their sums: rounds that are rejected and rounds that are not."""
    drafts, p, q = sampled_round(3, 1, VOCABULARY, dtype, drawn, 0.5)
    drafts[0], p[0, 0, 7] = 7, 0
    p[1, 0] = torch.nn.functional.one_hot(drafts[1, 0], VOCABULARY)
    prompts, positions = torch.arange(3), torch.tensor([9, 99, 999])
    expected = by_the_rule(drafts, p, q, 2, prompts, positions)
    assert {len(row) for row in expected} == {1, 2}
    assert max(row[-1] for row in expected) > 32 * BLOCK
    assert_emits(emit_sampled(drafts, p, q, 2, prompts, positions), expected)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**63 + 5, 2**64 - 1, -3])
def test_numbers_are_the_runs_own(seed):
    """With one token in 2¹² equally likely, a token is the first 12 bits of the number that drew it."""
    p = torch.full((2, 1, 1 << 12), 2.0**-12, dtype=torch.float64)
    prompts, positions = torch.tensor([0, 2**31 + 7]), torch.tensor([2**32 - 1, 12])
    got = emit_sampled(torch.empty(2, 0, dtype=torch.int64), p, None, seed, prompts, positions)
    numbers = uniform(seed, prompts.numpy(), positions.numpy()[:, None], Purpose.SAMPLE)
    assert got.tokens.tolist() == np.floor(numbers * (1 << 12)).astype(int).tolist()


@pytest.mark.parametrize("way", ["triton", "reference"])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn drafts", "likeliest drafts"])
def test_ragged_sampled_rounds(monkeypatch, drawn, way):
    """A round of n drafts is what it would be in a batch where all have n."""
    monkeypatch.setenv("MTPLAB_KERNELS", way)
    counts = torch.tensor([0, 1, 2, 3, 3, 2])
    drafts, p, q = sampled_round(6, 3, 40, torch.float64, drawn, 5.0)
    prompts, positions = torch.arange(6), torch.arange(6) * 10
    expected = []
    for i, n in enumerate(counts.tolist()):
        one = slice(i, i + 1)
        cut = q[one, :n] if drawn else None
        expected += by_the_rule(drafts[one, :n], p[one, : n + 1], cut, 3, prompts[one], positions[one])
        drafts[i, n:], p[i, n + 1 :] = -1, NAN
        if drawn:
            q[i, n:] = NAN
    assert_emits(emit_sampled(drafts, p, q, 3, prompts, positions, counts), expected)
    assert {len(row) for row in expected} >= {1, 2, 3}


@pytest.mark.parametrize("way", ["triton", "reference"])
def test_what_is_missing_or_nan(monkeypatch, way):
    monkeypatch.setenv("MTPLAB_KERNELS", way)
    p = torch.zeros(5, 2, 4)
    p[:, 0, 1] = p[:, 1, 3] = 1
    q = torch.zeros(5, 1, 4)
    q[:, 0, 1] = 1
    drafts = torch.tensor([[1], [4], [-1], [1], [1]])
    p[3, 0], q[4, 0] = NAN, NAN
    numbers = 1, torch.arange(5), torch.arange(5)
    # kept and a bonus; no token, so the residual, of which nothing is left, so p; a NaN target; a NaN draft
    assert_emits(emit_sampled(drafts, p, q, *numbers), [[1, 3], [1], [1], [-1], [1]])
    assert_emits(emit_sampled(drafts, p, None, *numbers), [[1, 3], [1], [1], [-1], [1, 3]])


def test_draws_are_exact_at_the_edges_of_a_token():
    """Sums are whole numbers: u below a token's edge, at it and above it are told apart, wherever the blocks part."""
    v = 3 * BLOCK
    weights = torch.full((v,), 2.0**-14, dtype=torch.float64)  # adds up to 3/4
    ids = torch.tensor([0, 1, BLOCK - 1, BLOCK, 2 * BLOCK, v - 1])
    edge = ids.double() / v
    assert draw(weights.expand(6, v), edge.nextafter(torch.tensor(1.0).double())).tolist() == ids.tolist()
    assert draw(weights.expand(5, v), edge[1:].nextafter(torch.tensor(0.0).double())).tolist() == (ids[1:] - 1).tolist()
    assert draw(weights[:0].expand(1, 0).new_zeros(1, 3), torch.tensor([0.5])).tolist() == [-1]
    last = torch.tensor(np.nextafter(1.0, 0.0))
    assert int(draw(weights, last)) == v - 1
    assert int(draw(torch.tensor([1.0, 1 / UNITS, 0.9 / UNITS], dtype=torch.float64), last)) == 1, "less than a unit"


def whole_units(prompts: torch.Tensor, purpose: Purpose) -> tuple[int, float]:
    """A position at which the first prompt's number is a multiple of 2⁻⁵², and the number."""
    numbers = uniform(0, prompts.numpy(), np.arange(64)[None], purpose)[0]
    at = int(np.flatnonzero(numbers * UNITS % 1 == 0)[0])
    return at, float(numbers[at])


@pytest.mark.parametrize("way", ["triton", "reference"])
def test_a_number_on_the_edge_belongs_to_the_token_above(monkeypatch, way):
    """Within a block, and from one block to the next but one: what lies between has no mass and is not drawn."""
    monkeypatch.setenv("MTPLAB_KERNELS", way)
    prompt, none = torch.tensor([3]), torch.empty(1, 0, dtype=torch.int64)
    at, u = whole_units(prompt, Purpose.SAMPLE)
    for low, high in ((2, 5), (BLOCK - 1, 2 * BLOCK + 5)):
        p = torch.zeros(1, 1, 3 * BLOCK, dtype=torch.float64)
        p[0, 0, low], p[0, 0, high] = u, 1 - u
        assert_emits(emit_sampled(none, p, None, 0, prompt, torch.tensor([at])), [[high]])
        p[0, 0, low], p[0, 0, high] = u + 1 / UNITS, 1 - u - 1 / UNITS
        assert_emits(emit_sampled(none, p, None, 0, prompt, torch.tensor([at])), [[low]])


@pytest.mark.parametrize("way", ["triton", "reference"])
def test_a_draft_as_likely_as_its_number_is_not_kept(monkeypatch, way):
    """Numbers start at 0, so keeping it would keep a draft of probability 0."""
    monkeypatch.setenv("MTPLAB_KERNELS", way)
    prompt, draft = torch.tensor([3]), torch.tensor([[1]])
    at, u = whole_units(prompt, Purpose.ACCEPT)
    for chance, expected in ((u, [2]), (u + 1 / UNITS, [1, 0])):
        p = torch.tensor([[[0.0, chance, 1 - chance], [1.0, 0.0, 0.0]]], dtype=torch.float64)
        assert_emits(emit_sampled(draft, p, None, 0, prompt, torch.tensor([at])), [expected])


def test_neighbours_other_strides_and_a_second_run():
    drafts, p, q = sampled_round(4, 2, 50, torch.float64, True)
    prompts, positions = torch.arange(4), torch.arange(4) * 7
    expected = emit_sampled(drafts, p, q, 8, prompts, positions)
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (p, q)]
    assert torch.equal(emit_sampled(drafts, *turned, 8, prompts, positions).tokens, expected.tokens)
    columns = [x.mT.contiguous().mT for x in (p, q)]
    assert torch.equal(emit_sampled(drafts, *columns, 8, prompts, positions).tokens, expected.tokens)
    one = slice(2, 3)
    alone = emit_sampled(drafts[one], p[one], q[one], 8, prompts[one], positions[one])
    assert torch.equal(alone.tokens, expected.tokens[one])


def test_no_rounds():
    drafts, numbers = torch.empty(0, 2, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    assert emit_greedy(drafts, torch.empty(0, 3, 5)).tokens.shape == (0, 3)
    assert emit_sampled(drafts, torch.empty(0, 3, 5), None, 0, numbers, numbers).num_emitted.shape == (0,)


def test_room_for_the_most_drafts():
    from mtplab.kernels.acceptance import MOST_DRAFTS

    assert BLOCK_J == MOST_DRAFTS + 1, "the token after the drafts needs a place too"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"drafts": torch.zeros(2, 32, dtype=torch.int64)}, "drafts has 32 columns; expected at most 31"),
        ({"drafts": torch.zeros(2, 1)}, "drafts is torch.float32; expected torch.int64"),
        ({"drafts": torch.zeros(1, 2, dtype=torch.int64).t()[:, :1].expand(2, 2)}, "expected it contiguous"),
        ({"target_probs": torch.ones(2, 1, 4)}, r"target_probs has shape \[2, 1, 4\]; expected \[2, 2, any\]"),
        ({"target_probs": torch.ones(2, 2, 4).half()}, "target_probs is torch.float16; expected torch.float32 or"),
        ({"target_probs": torch.ones(2, 2, 0)}, "target_probs has no columns"),
        ({"draft_probs": torch.ones(2, 1, 4).double()}, "draft_probs is torch.float64; expected torch.float32"),
        ({"draft_probs": torch.ones(2, 1, 5)}, r"draft_probs has shape \[2, 1, 5\]; expected \[2, 1, 4\]"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions has shape \[3\]; expected \[2\]"),
        ({"num_drafts": torch.zeros(2)}, "num_drafts is torch.float32; expected torch.int64"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    numbers = torch.zeros(2, dtype=torch.int64)
    given = {"drafts": torch.zeros(2, 1, dtype=torch.int64), "target_probs": torch.ones(2, 2, 4), "draft_probs": None}
    given |= {"seed": 0, "prompts": numbers, "positions": numbers, "num_drafts": None, **change}
    with pytest.raises(ValueError, match=message):
        emit_sampled(**given)
