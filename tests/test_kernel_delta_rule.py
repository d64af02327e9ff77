"""The gated delta rule: the kernel in the interpreter against its torch reference, and that against the model's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_tools import interpreted, poisoned, relative_error
from mtplab.kernels.delta_rule import delta_rule
from mtplab.kernels.delta_rule_reference import delta_rule_reference
from mtplab.models.cache import DeltaState
from mtplab.models.delta_rule import delta_rule_step
from mtplab.models.layers import L2_EPS, GatedDelta
from mtplab.models.norm import RMSNorm
from mtplab.models.spec import DeltaSpec

pytestmark = interpreted


def inputs(b: int, t: int, key_heads: int, heads: int, dk: int, dv: int, dtype: torch.dtype = torch.float32):
    """q, k, v, g, beta and a state, with a zero key, a zero query, a decay of 1 and one of nearly 0."""
    seed = torch.Generator().manual_seed(b * 1000 + t * 100 + heads * 10 + dk + dv)
    q, k = (torch.randn(b, t, key_heads, dk, generator=seed) * 3 for _ in range(2))
    v = torch.randn(b, t, heads, dv, generator=seed)
    g = -torch.rand(b, t, heads, generator=seed) * 0.5
    beta = torch.rand(b, t, heads, generator=seed)
    if t > 1:
        k[0, 0, 0], q[0, -1, 0], g[0, 0, 0], g[-1, 1, -1] = 0, 0, 0, -80
    state = torch.randn(b * heads, dk, dv, generator=seed)
    return q.to(dtype), k.to(dtype), v.to(dtype), g, beta, state


def empty_ring(t: int, state: Tensor) -> Tensor:
    return torch.full((t, *state.shape), float("nan"), dtype=state.dtype)


def settings(dk: int) -> dict:
    return {"normalize": True, "scale": dk**-0.5, "eps": L2_EPS}


@pytest.mark.parametrize(
    "b, t, key_heads, heads, dk, dv",
    [
        (1, 1, 1, 1, 64, 64), (2, 2, 1, 2, 128, 128), (1, 17, 1, 2, 64, 32), (3, 2, 1, 1, 256, 16),
        (1, 2, 1, 3, 96, 80), (2, 2, 2, 4, 64, 16), (1, 2, 3, 3, 64, 16),
    ],
)
@pytest.mark.parametrize("normalize", [True, False], ids=["normalised", "as given"])
def test_against_float64(b, t, key_heads, heads, dk, dv, normalize):
    *x, state = inputs(b, t, key_heads, heads, dk, dv)
    if not normalize:
        x[:2] = (torch.nn.functional.normalize(y, dim=-1) for y in x[:2])
    how = settings(dk) | {"normalize": normalize}
    expected, states = delta_rule_reference(*(y.double() for y in x), state.double(), **how)
    ring = empty_ring(t, state)
    before = state.clone()
    with poisoned():
        out = delta_rule(*x, state, ring, **how)
    assert out.dtype == torch.float32 and torch.equal(state, before)
    assert relative_error(out, expected) < 1e-6 and relative_error(ring, states) < 1e-6
    assert (ring.double() - states).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(dtype):
    *x, state = inputs(2, 2, 1, 2, 64, 64, dtype)
    expected, states = delta_rule_reference(*(y.double() for y in x), state.double(), **settings(64))
    ring = empty_ring(2, state)
    with poisoned():
        out = delta_rule(*x, state, ring, **settings(64))
    assert relative_error(out, expected) < 1e-6 and relative_error(ring, states) < 1e-6


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_a_round_is_as_many_single_steps(kept):
    """Bit for bit, and so is rolling back: with a BF16 state too, which is rounded after each token."""
    t = 4
    *x, state = inputs(2, t, 1, 2, 64, 64, torch.bfloat16)
    state = state.to(kept)
    ring = empty_ring(t, state)
    out = delta_rule(*x, state, ring, **settings(64))
    moving = state.clone()
    for i in range(t):
        one = delta_rule(*(y[:, i : i + 1] for y in x), moving, **settings(64))
        assert torch.equal(one[:, 0], out[:, i]) and torch.equal(moving, ring[i]), i
    # and the reference rounds where the kernel does
    expected, states = delta_rule_reference(*(y.float() for y in x), state.float(), **settings(64), kept=kept)
    assert relative_error(out, expected) < (1e-6 if kept == torch.float32 else 1e-3)
    assert relative_error(ring, states) < (1e-6 if kept == torch.float32 else 1e-3)


def test_rounding_each_token_is_not_rounding_at_the_end():
    """What a packet that kept float32 between its tokens would give differs."""
    *x, state = inputs(1, 6, 1, 1, 64, 64)
    x[3], state = torch.full_like(x[3], -0.1), state.bfloat16()
    ring = empty_ring(6, state)
    delta_rule(*x, state, ring, **settings(64))
    _, late = delta_rule_reference(*x, state.float(), **settings(64))
    _, each = delta_rule_reference(*x, state.float(), **settings(64), kept=torch.bfloat16)
    assert (ring[-1] != late[-1].bfloat16()).float().mean() > 10 * (ring[-1] != each[-1].bfloat16()).float().mean()


def test_slots_start_each_sequence_where_it_was_rolled_back_to():
    t, b, heads = 3, 3, 2
    *x, state = inputs(b, t, 2, heads, 64, 64)
    ring = empty_ring(t, state)
    delta_rule(*x, state, ring, **settings(64))
    slots = torch.tensor([2, 0, 1])
    taken = ring.unflatten(1, (b, heads))[slots, torch.arange(b)].flatten(0, 1)
    *x, _ = inputs(b, t, 2, heads, 64, 64, torch.bfloat16)
    expected_ring = empty_ring(t, state)
    expected = delta_rule(*x, taken, expected_ring, **settings(64))
    out = delta_rule(*x, ring, ring, slots=slots, **settings(64))  # the ring is read and written
    assert torch.equal(out, expected) and torch.equal(ring, expected_ring)


def test_a_sequence_does_not_see_its_neighbours_and_two_runs_agree():
    *x, state = inputs(3, 2, 1, 2, 64, 64)
    ring, again, alone = empty_ring(2, state), empty_ring(2, state), empty_ring(2, state[2:4])
    out = delta_rule(*x, state, ring, **settings(64))
    assert torch.equal(delta_rule(*x, state, again, **settings(64)), out) and torch.equal(ring, again)
    one = delta_rule(*(y[1:2] for y in x), state[2:4], alone, **settings(64))
    assert torch.equal(one, out[1:2]) and torch.equal(alone, ring[:, 2:4])


@pytest.mark.parametrize("before", [0, 3], ids=["where they lie", "copied, as they begin at no multiple of 16"])
def test_slices_of_a_projection(before):
    b, t, key_heads, heads, d = 2, 2, 1, 2, 64
    *x, state = inputs(b, t, key_heads, heads, d, d)
    wide = torch.full((b, t, 2 * key_heads * d + heads * d + 16), float("nan"))
    parts = list(wide[..., before : before - 16].split([key_heads * d, key_heads * d, heads * d], -1))
    views = [part.unflatten(-1, (-1, d)) for part in parts]
    for view, y in zip(views, x[:3], strict=True):
        view.copy_(y)
    turned = [y.transpose(0, 1).contiguous().transpose(0, 1) for y in x[3:]]  # gates kept [t, b, h]
    ring, expected_ring = empty_ring(t, state), empty_ring(t, state)
    expected = delta_rule(*x, state, expected_ring, **settings(d))
    out = delta_rule(*views, *turned, state, ring, **settings(d))
    assert torch.equal(out, expected) and torch.equal(ring, expected_ring)


def test_nan_stays_in_its_head_and_padding_changes_nothing():
    *x, state = inputs(2, 3, 2, 2, 64, 64)
    x[2][0, 1, 1, 5] = float("nan")
    x[3][1, 2], x[4][1, 2] = 0, 0  # beta 0, decay 1: a token that is not there
    ring = empty_ring(3, state)
    delta_rule(*x, state, ring, **settings(64))
    assert ring[1:, 1, :, 5].isnan().all() and ring.isnan().sum() == 2 * 64
    assert torch.equal(ring[2, 2:], ring[1, 2:])


def test_torch_in_place_of_triton_writes_the_same_places(monkeypatch):
    *x, state = inputs(2, 3, 1, 2, 64, 64)
    slots, first = torch.tensor([1, 2]), [y[:, :1] for y in x]

    def all_ways() -> list[Tensor]:
        ring, moving = empty_ring(4, state), state.clone()
        out = [delta_rule(*x, state, ring, **settings(64)), delta_rule(*first, moving, **settings(64)), moving]
        return [*out, ring[:3].clone(), delta_rule(*x, ring, ring, slots=slots, **settings(64)), ring[:3]]

    ours = all_ways()
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    for got, expected in zip(ours, all_ways(), strict=True):
        assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize("sequences", [0, 1])
def test_nothing_to_do(sequences):
    *x, state = inputs(1, 1, 1, 2, 64, 64)
    x, state = [y[:sequences, : 1 - sequences] for y in x], state[: 2 * sequences]
    ring = torch.full((2, *state.shape), 7.0)
    assert delta_rule(*x, state, ring).shape == x[2].shape and (ring == 7).all()


# the model's own


def test_the_models_step_is_the_references():
    *x, state = inputs(2, 3, 2, 4, 64, 32)
    q, k, v, g, beta = (y.double() for y in x)
    how = {"normalize": False, "scale": 1.0, "eps": 0.0}
    expected, states = delta_rule_reference(q, k, v, g, beta, state.double(), **how)
    before, after = state.double(), torch.empty_like(state, dtype=torch.float64)
    q, k = (y.repeat_interleave(2, 2) for y in (q, k))
    for i in range(3):
        rows = [y[:, i].reshape(8, 1, -1) for y in (q, k, v, g.exp(), beta)]
        out = delta_rule_step(*rows, before, after)
        torch.testing.assert_close(out.view(2, 4, 32), expected[:, i], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(after, states[i], rtol=1e-12, atol=1e-12)
        before = after.clone()


class _Run:
    """What the mixer's decoding reads of a pass of 2 sequences."""

    batch, valid = 2, None

    def __init__(self, tokens: int):
        self.tokens = tokens

    def spread(self, x: Tensor) -> Tensor:
        return x.view(2, self.tokens, *x.shape[1:])


_SPEC = DeltaSpec(k_heads=1, v_heads=2, k_dim=64, v_dim=64, conv_kernel=4)


@pytest.mark.parametrize("uniform", [2, None], ids=["all keep two", "each its own"])
def test_the_engines_rounds_through_its_own_state(uniform):
    """A round of three tokens, a commit, a step in place, a commit, a round: `DeltaState` serves as it is."""
    mixer = GatedDelta.__new__(GatedDelta)
    mixer.spec = _SPEC
    size = torch.full((2, 1, 64), 64**-0.5)
    size[0] /= 8
    mixer._qk_norm = RMSNorm(size, L2_EPS / 64)
    keep = torch.tensor([2, 2] if uniform else [3, 1])
    ours, theirs = (DeltaState(2, _SPEC, torch.float32, torch.device("cpu")) for _ in range(2))
    for t in (3, 1, 2):
        q, k, v, g, beta, _ = inputs(2, t, 1, 2, 64, 64)
        mixed = torch.cat([y.flatten(2) for y in (q, k, v)], -1)
        window = torch.zeros(2, 3 + t, 256)
        gates = (y.reshape(2 * t, 2).clone() for y in (g, beta))
        expected = mixer._decode(*mixer._heads(mixed), *gates, window, _Run(t), theirs)
        if t > 1:
            ours.keep_window(window)
        out = delta_rule(q, k, v, g, beta, ours.recurrent, ours.step_buffer(t) if t > 1 else None, **settings(64))
        assert relative_error(out, expected) < 1e-6
        for state in (ours, theirs):
            state.commit(keep.clamp_max(t), min(uniform, t) if uniform else None)
        assert relative_error(ours.recurrent, theirs.recurrent) < 1e-6


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.ones(1, 2, 1, 63)}, r"k has shape \[1, 2, 1, 64\]; expected \[1, 2, 1, 63\]"),
        ({"q": torch.ones(1, 2, 1, 64).half()}, "q is torch.float16; expected torch.float32"),
        ({"g": torch.ones(1, 2, 2).half()}, "g is torch.float16; expected torch.float32"),
        ({"v": torch.ones(1, 2, 3, 64)}, r"g has shape \[1, 2, 2\]; expected \[1, 2, 3\]"),
        ({"state": torch.ones(2, 64, 32)}, r"state has shape \[2, 64, 32\]; expected \[2, 64, 64\]"),
        ({"state": torch.ones(2, 64, 64).half()}, "state is torch.float16; expected torch.float32 or torch.bfloat16"),
        ({"state": torch.ones(2, 64, 64).transpose(1, 2)}, r"state has strides .*; expected it contiguous"),
        ({"ring": None}, "ring is None with t = 2; expected a ring"),
        ({"ring": torch.ones(1, 2, 64, 64)}, "ring has 1 slots; expected at least t = 2"),
        ({"ring": torch.ones(2, 2, 64, 64).bfloat16()}, "ring is torch.bfloat16; expected torch.float32"),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, r"state has shape \[2, 64, 64\]; expected \[any, 2, 64, 64\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x = dict(zip(("q", "k", "v", "g", "beta", "state"), inputs(1, 2, 1, 2, 64, 64), strict=True))
    with pytest.raises(ValueError, match=message):
        delta_rule(**{**x, "ring": torch.ones(2, 2, 64, 64), **change})


@pytest.mark.parametrize("dk, dv, message", [(288, 64, "dk is 288"), (64, 40, "dv is 40; expected a multiple of 16")])
def test_sizes_it_has_no_tile_for(dk, dv, message):
    *x, state = inputs(1, 1, 1, 1, dk, dv)
    with pytest.raises(ValueError, match=message):
        delta_rule(*x, state)


def test_heads_that_do_not_divide():
    *x, state = inputs(1, 1, 1, 3, 64, 64)
    x[:2] = (y.repeat(1, 1, 2, 1) for y in x[:2])
    with pytest.raises(ValueError, match="v has 3 heads and q 2; expected a multiple"):
        delta_rule(*x, state)


def test_no_sequences_are_no_fault_of_the_reference():
    q, k, v, g, beta, state = inputs(1, 2, 1, 2, 16, 16)
    out, states = delta_rule_reference(
        q[:0], k[:0], v[:0], g[:0], beta[:0], state[:0], normalize=True, scale=1.0, eps=L2_EPS
    )
    assert out.shape == (0, 2, 2, 16) and states.shape == (2, 0, 16, 16)
