"""Products of experts and the routing to them, in the interpreter against torch in float64."""

from __future__ import annotations

import pytest
import torch

from gemm_cases import WAYS, blocks, codes, on, powers, scales, whole
from kernel_tools import interpreted, poisoned, relative_error
from mtplab.kernels.gemm_grouped import gemm_grouped, route
from mtplab.kernels.gemm_reference import gemm_grouped_reference
from mtplab.kernels.silu_quantize import silu_quantize

pytestmark = interpreted


def choice(tokens: int, each: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Experts of each token, [tokens, each], most tokens at the first few experts and none at the last."""
    generator = torch.Generator().manual_seed(seed)
    weight = 0.5 ** torch.arange(experts, dtype=torch.float32)
    weight[-1] = 0
    return torch.multinomial(weight.expand(tokens, experts), each, generator=generator)


def weights(experts: int, n: int, k: int, dtype: torch.dtype, exact: bool = False):
    data, scale = (whole, powers) if exact else (codes, scales)
    return data((experts, n, k), dtype, seed=3), scale(experts, blocks(n), blocks(k), seed=4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n", "k"), [(160, 336), (65, 200)], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(
    ("tokens", "each", "experts"),
    [(1, 2, 5), (7, 3, 6), (20, 1, 9), (100, 2, 4), (300, 2, 3)],
    ids=["one token", "few", "uneven", "many", "most"],
)
def test_each_token_meets_its_experts(monkeypatch, way, n, k, tokens, each, experts):
    dtype = on(monkeypatch, way)
    chosen = choice(tokens, each, experts)
    w, w_scale = weights(experts, n, k, dtype, exact=True)
    x, x_scale = whole((tokens, k), dtype, seed=1), powers(tokens, blocks(k), seed=2)
    with poisoned():
        routing = route(chosen, experts)
        token = routing.token
        taken = x.view(torch.uint8)[token].view(dtype)
        got = gemm_grouped(taken, x_scale[token], w, w_scale, routing, torch.float32)
    # token by token, without any sorting
    left = x.double() * x_scale.double().repeat_interleave(128, 1)[:, :k]
    right = w.double() * w_scale.double().repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[:, :, :k]
    expected = torch.einsum("sk,spnk->spn", left, right[chosen])
    assert torch.equal(got.double(), expected[token, routing.slot])


@pytest.mark.parametrize("tokens", [9, 70, 300])
def test_all_codes_and_scales(tokens):
    w, w_scale = weights(3, 144, 400, torch.float8_e4m3fn)
    routing = route(choice(tokens, 2, 3), 3)
    x, x_scale = codes((2 * tokens, 400), seed=1), scales(2 * tokens, 4, seed=2)
    with poisoned():
        got = gemm_grouped(x, x_scale, w, w_scale, routing, torch.float32)
        half = gemm_grouped(x, x_scale, w, w_scale, routing, torch.bfloat16)
    expected = gemm_grouped_reference(x, x_scale, w, w_scale, routing.offsets, torch.float64)
    assert relative_error(got, expected) < 3e-7
    assert torch.equal(half, got.bfloat16())
    assert torch.equal(got, gemm_grouped(x, x_scale, w, w_scale, routing, torch.float32))


@pytest.mark.parametrize(("tokens", "experts"), [(30, 8), (120, 4)])
def test_a_row_does_not_depend_on_where_the_others_go(tokens, experts):
    w, w_scale = weights(experts, 160, 256, torch.float8_e4m3fn)
    x, x_scale = codes((tokens, 256), seed=1), scales(tokens, 2, seed=2)
    first, second = choice(tokens, 1, experts, 1), choice(tokens, 1, experts, 2)
    kept = torch.arange(tokens) % 3 == 0
    second[kept] = first[kept]
    results = []
    for chosen, spoilt in ((first, False), (second, True)):
        routing = route(chosen, experts)
        data = x.view(torch.uint8).clone()
        if spoilt:
            data[~kept] = 0x7F
        got = gemm_grouped(
            data[routing.token].view(x.dtype), x_scale[routing.token], w, w_scale, routing, torch.float32
        )
        results.append(got[routing.token.argsort()])
    assert torch.equal(results[0][kept], results[1][kept]) and results[1][~kept].isnan().all()


@pytest.mark.parametrize("way", WAYS)
def test_both_projections_with_a_quantisation_between(monkeypatch, way):
    """[gate; up], silu(gate) · up, down: near the layer in float64 whose only rounding is that of the activations."""
    dtype = on(monkeypatch, way)
    chosen = choice(12, 2, 4)
    routing = route(chosen, 4)
    x, x_scale = codes((12, 256), dtype, seed=1), torch.full((12, 2), 1 / 256)
    first, first_scale = codes((4, 2 * 192, 256), dtype, seed=3), torch.full((4, 3, 2), 1 / 4096)
    second, second_scale = codes((4, 96, 192), dtype, seed=5), torch.full((4, 1, 2), 1 / 256)
    taken = x.view(torch.uint8)[routing.token].view(dtype)
    with poisoned():
        h = gemm_grouped(taken, x_scale[routing.token], first, first_scale, routing)
        middle, middle_scale = silu_quantize(h, dtype)
        got = gemm_grouped(middle, middle_scale, second, second_scale, routing, torch.float32)
    expected = torch.empty(24, 96, dtype=torch.float64)
    for row, (token, slot) in enumerate(zip(routing.token, routing.slot, strict=True)):
        expert = chosen[token, slot]
        gate, up = (first[expert].double() / 4096 @ (x[token].double() / 256)).chunk(2)
        expected[row] = second[expert].double() / 256 @ (torch.nn.functional.silu(gate) * up)
    # an FP8 code is off by 1/16 at most and by 0.026 in the root mean square, h in BF16 by a tenth of that
    assert relative_error(got, expected) < 0.04


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize(("tokens", "each", "experts"), [(1, 1, 1), (5, 2, 64), (64, 1, 4), (300, 4, 7), (129, 1, 2)])
def test_tiles_cover_every_row_once(rows, tokens, each, experts):
    for seed in range(5):
        chosen = choice(tokens, each, experts + 1, seed)
        routing = route(chosen, experts + 1)
        offsets = routing.offsets.tolist()
        assert offsets[0] == 0 and offsets[-1] == tokens * each == len(routing.token)
        assert torch.equal(chosen[routing.token, routing.slot], chosen.flatten().sort().values)
        covered = []
        for expert, row in zip(*(column.tolist() for column in routing.tiles(rows)), strict=True):
            if expert >= 0:
                assert offsets[expert] <= row < offsets[expert + 1] and (row - offsets[expert]) % rows == 0
                covered += range(row, min(row + rows, offsets[expert + 1]))
        assert covered == list(range(tokens * each))


def test_an_expert_for_all_and_as_many_tiles_as_rows():
    """The two ends of how many tiles a routing may need."""
    alone = route(torch.full((40, 1), 2), 5)
    expert, row = alone.tiles(16)
    assert expert.tolist() == [2, 2, 2, -1, -1, -1, -1] and row[:3].tolist() == [0, 16, 32]
    apart = route(torch.arange(6)[:, None], 6)
    assert apart.tiles(16)[0].tolist() == [0, 1, 2, 3, 4, 5] == apart.tiles(16)[1].tolist()


def test_no_tokens_and_the_reference(monkeypatch):
    w, w_scale = weights(3, 160, 256, torch.float8_e4m3fn)
    nothing = route(torch.empty(0, 2, dtype=torch.int64), 3)
    assert gemm_grouped(codes((0, 256)), scales(0, 2), w, w_scale, nothing).shape == (0, 160)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    routing = route(choice(5, 2, 3), 3)
    x, x_scale = codes((10, 256), seed=1), scales(10, 2)
    got = gemm_grouped(x, x_scale, w, w_scale, routing, torch.float16)
    assert torch.equal(got, gemm_grouped_reference(x, x_scale, w, w_scale, routing.offsets).half())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": codes((9, 256))}, r"x has shape \[9, 256\]; expected \[10, 256\]"),
        ({"w": codes((2, 160, 256))}, r"w has shape \[2, 160, 256\]; expected \[3, any, 256\]"),
        ({"w": codes((160, 256))}, r"w has shape \[160, 256\]; expected \[3, any, 256\]"),
        ({"w": codes((3, 256, 160)).transpose(1, 2)}, "w has strides"),
        ({"w_scale": torch.ones(3, 2, 3)}, r"w_scale has shape \[3, 2, 3\]; expected \[3, 2, 2\]"),
        ({"x_scale": torch.ones(10, 1)}, r"x_scale has shape \[10, 1\]; expected \[10, 2\]"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    w, w_scale = weights(3, 160, 256, torch.float8_e4m3fn)
    given = {"x": codes((10, 256)), "x_scale": scales(10, 2), "w": w, "w_scale": w_scale}
    with pytest.raises(ValueError, match=message):
        gemm_grouped(**given | {"routing": route(choice(5, 2, 3), 3)} | changes)


def test_more_rows_of_weights_than_32_bits_count_are_refused():
    """2^16 experts of 2^15 rows: the last tile's first row would be negative."""
    experts, n = 2**16, 2**15
    w, w_scale = codes((1, 1, 16)).expand(experts, n, 16), torch.ones(1, 1, 1).expand(experts, n // 128, 1)
    routing = route(choice(5, 2, experts), experts)
    with pytest.raises(ValueError, match="65536 experts of 32768 rows, 2147483648 in all; expected at most"):
        gemm_grouped(codes((10, 16)), scales(10, 1), w, w_scale, routing)


@pytest.mark.parametrize(
    ("chosen", "experts", "message"),
    [
        (torch.tensor([[0, 3]]), 3, "chosen_experts has 0 to 3; expected 0 to 2"),
        (torch.tensor([[-1, 2]]), 3, "chosen_experts has -1 to 2"),
        (torch.zeros(2, 2), 3, "chosen_experts is torch.float32; expected torch.int64"),
        (torch.zeros(2, dtype=torch.int64), 3, r"chosen_experts has shape \[2\]; expected \[any, any\]"),
        (torch.zeros(0, 2, dtype=torch.int64), 0, "experts is 0; expected at least one"),
    ],
)
def test_impossible_routes_are_named(chosen, experts, message):
    with pytest.raises(ValueError, match=message):
        route(chosen, experts)
