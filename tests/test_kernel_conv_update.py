"""The short convolution: the kernel in the interpreter against its torch reference, and that against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_tools import interpreted, poisoned, relative_error
from mtplab.kernels.conv_update import conv_update
from mtplab.kernels.delta_rule_reference import conv_reference
from mtplab.models.layers import GatedDelta
from mtplab.models.spec import DeltaSpec

pytestmark = interpreted


def inputs(b: int, t: int, c: int, width: int = 4, dtype: torch.dtype = torch.float32):
    seed = torch.Generator().manual_seed(b * 100 + t * 10 + c)
    x, state, weight = (torch.randn(*shape, c, generator=seed) for shape in ((b, t), (b, width - 1), (width,)))
    return x.to(dtype), state.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("b, t, c, width", [(1, 1, 1, 4), (2, 5, 600, 4), (3, 2, 512, 3), (1, 17, 100, 2)])
def test_against_torchs_convolution(b, t, c, width):
    """In float64, by another route: `conv1d` over groups of one channel."""
    x, state, weight = inputs(b, t, c, width)
    rows = torch.cat([state, x], 1)
    expected = F.silu(F.conv1d(rows.double().mT, weight.double().t()[:, None], groups=c)).mT
    torch.testing.assert_close(conv_reference(rows.double(), weight.double()), expected, rtol=1e-12, atol=1e-12)
    window, before = torch.full_like(rows, float("nan")), state.clone()
    with poisoned():
        out = conv_update(x, state, weight, window)
    assert relative_error(out, expected) < 1e-6
    assert torch.equal(window, rows) and torch.equal(state, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_round_is_as_many_single_steps(dtype):
    """Bit for bit, and the state after n tokens is a slice of the window."""
    x, state, weight = inputs(2, 3, 40, dtype=dtype)
    window = torch.full((2, 6, 40), float("nan"), dtype=dtype)
    out = conv_update(x, state, weight, window)
    for i in range(3):
        assert torch.equal(conv_update(x[:, i : i + 1], state, weight)[:, 0], out[:, i])
        assert torch.equal(state, window[:, i + 1 : i + 4])
    rows = window.double()
    bound = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}[dtype]
    assert relative_error(out, conv_reference(rows, weight.double())) < bound


def test_the_engines_convolution_is_the_references():
    x, state, weight = inputs(2, 3, 48)
    mixer = GatedDelta.__new__(GatedDelta)
    mixer.spec, mixer.conv_weight = DeltaSpec(1, 1, 16, 16, conv_kernel=4), weight
    window = torch.empty(2, 6, 48)
    out = conv_update(x, state, weight, window)
    assert relative_error(out, mixer._convolve(window, 3)) < 1e-6


def test_columns_of_a_projection_neighbours_and_nan():
    x, state, weight = inputs(3, 2, 33)
    window, other, alone = torch.empty(3, 5, 33), torch.empty(3, 5, 33), torch.empty(1, 5, 33)
    expected = conv_update(x, state, weight, window)
    wide = torch.full((3, 2, 50), float("nan"))
    wide[..., 10:43] = x
    assert torch.equal(conv_update(wide[..., 10:43], state, weight, other), expected) and torch.equal(other, window)
    assert torch.equal(conv_update(x[1:2], state[1:2], weight, alone), expected[1:2])
    state[0, 1, 3] = float("nan")  # in reach of tokens 0 and 1 of its channel
    out = conv_update(x, state, weight, window)
    assert out[0, :, 3].isnan().all() and out.isnan().sum() == 2


def test_torch_in_place_of_triton_writes_the_same_places(monkeypatch):
    x, state, weight = inputs(2, 3, 9)
    window, other, moving = torch.empty(2, 6, 9), torch.empty(2, 6, 9), state.clone()
    expected, one = conv_update(x, state, weight, window), conv_update(x[:, :1], moving, weight)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    assert relative_error(conv_update(x, state, weight, other), expected) < 1e-6 and torch.equal(other, window)
    assert relative_error(conv_update(x[:, :1], state, weight), one) < 1e-6 and torch.equal(state, moving)


def test_nothing_to_do():
    x, state, weight = inputs(2, 0, 8)
    window = torch.empty(2, 3, 8)
    assert conv_update(x, state, weight, window).shape == (2, 0, 8) and torch.equal(window, state)
    assert conv_update(*inputs(0, 1, 8)).shape == (0, 1, 8)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.ones(1, 2, 8).double()}, "x is torch.float64; expected torch.bfloat16 or"),
        ({"weight": torch.ones(5, 8)}, "weight has 5 taps; expected 2, 3, 4"),
        ({"weight": torch.ones(8, 4).t()}, r"weight has strides \(1, 4\); expected it contiguous"),
        ({"state": torch.ones(1, 4, 8)}, r"state has shape \[1, 4, 8\]; expected \[1, 3, 8\]"),
        ({"window": None}, "window is None with t = 2"),
        ({"window": torch.ones(1, 4, 8)}, r"window has shape \[1, 4, 8\]; expected \[1, 5, 8\]"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x, state, weight = inputs(1, 2, 8)
    given = {"x": x, "state": state, "weight": weight, "window": torch.ones(1, 5, 8), **change}
    with pytest.raises(ValueError, match=message):
        conv_update(**given)


def test_a_state_within_the_window_is_refused():
    """It is read by one program while another writes the window."""
    x, _, weight = inputs(1, 2, 16)
    window = torch.zeros(1, 5, 16)
    with pytest.raises(ValueError, match="share memory"):
        conv_update(x, window[:, 1:4], weight, window)
