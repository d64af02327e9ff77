"""The block-scaled FP8 product: the kernels in the interpreter against torch in float64."""

from __future__ import annotations

import pytest
import torch

from gemm_cases import WAYS, blocks, codes, on, powers, scales, whole
from kernel_tools import interpreted, poisoned, relative_error
from mtplab.kernels import gemm_plan
from mtplab.kernels.gemm import gemm_block
from mtplab.kernels.gemm_reference import gemm_block_reference
from mtplab.kernels.targets import TARGETS

pytestmark = interpreted


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.float8_e4m3fn, exact: bool = False):
    """x, x_scale, w, w_scale"""
    data, scale = (whole, powers) if exact else (codes, scales)
    return (
        data((m, k), dtype, seed=1), scale(m, blocks(k), seed=2),
        data((n, k), dtype, seed=3), scale(blocks(n), blocks(k), seed=4),
    )  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("m", [1, 7, 16, 17, 63, 100])
@pytest.mark.parametrize(("n", "k"), [(128, 128), (272, 336), (65, 200), (3, 1)])
def test_sums_that_float32_holds_are_exact(monkeypatch, way, m, n, k):
    given = operands(m, n, k, on(monkeypatch, way), exact=True)
    with poisoned():
        got = gemm_block(*given, torch.float32)
    assert torch.equal(got.double(), gemm_block_reference(*given, dtype=torch.float64))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("m", [7, 40, 130])
def test_all_codes_and_scales(monkeypatch, way, m):
    given = operands(m, 144, 400, on(monkeypatch, way, processors=1))
    with poisoned():
        got = gemm_block(*given, torch.float32)
    assert relative_error(got, gemm_block_reference(*given, dtype=torch.float64)) < 3e-7


@pytest.mark.parametrize("way", TARGETS)
def test_every_tile_of_every_gpu(monkeypatch, way):
    dtype = on(monkeypatch, way, processors=1)
    tiles = set()
    for m, n in ((5, 160), (50, 160), (150, 160), (150, 150)):
        given = operands(m, n, 256, dtype, exact=True)
        tiles.add(gemm_plan.plan(given[0], given[2]).tile)
        with poisoned():
            got = gemm_block(*given, torch.float32)
        assert torch.equal(got.double(), gemm_block_reference(*given, dtype=torch.float64))
    assert len(tiles) == 4


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [256, 2080], ids=["whole", "divided"])
@pytest.mark.parametrize("m", [3, 33])
def test_residual_is_added_before_the_one_rounding(out_dtype, k, m):
    x, x_scale, w, w_scale = operands(m, 80, k)
    x_scale, w_scale = x_scale / 1000, w_scale / 1000
    residual = torch.randn(m, 80).to(out_dtype)
    assert (gemm_plan.plan(x, w).parts > 1) == (k == 2080)
    with poisoned():
        got = gemm_block(x, x_scale, w, w_scale, out_dtype, residual)
        plain = gemm_block(x, x_scale, w, w_scale, torch.float32)
    assert got.dtype == out_dtype
    assert torch.equal(got, (plain + residual.float()).to(out_dtype))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 64, 4096), (16, 1040, 2048), (60, 128, 2064), (2, 50, 3000)])
def test_k_divided_among_programs(monkeypatch, way, m, n, k):
    given = operands(m, n, k, on(monkeypatch, way), exact=True)
    cut = gemm_plan.plan(given[0], given[2])
    assert 1 < cut.parts <= 16 and (cut.parts - 1) * cut.blocks < blocks(k) <= cut.parts * cut.blocks
    with poisoned():
        got = gemm_block(*given, torch.float32)
    assert torch.equal(got.double(), gemm_block_reference(*given, dtype=torch.float64))


@pytest.mark.parametrize("m", [16, 64, 130])
@pytest.mark.parametrize("n", [160, 150], ids=["aligned", "unaligned"])
def test_a_row_does_not_depend_on_what_is_beside_it(m, n):
    x, x_scale, w, w_scale = operands(m, n, 640)
    together = gemm_block(x, x_scale, w, w_scale, torch.float32)
    assert torch.equal(together, gemm_block(x, x_scale, w, w_scale, torch.float32))
    for row in (0, m // 2, m - 1):
        alone = x.view(torch.uint8).clone().fill_(0x7F).view(x.dtype)
        alone.view(torch.uint8)[row] = x.view(torch.uint8)[row]
        got = gemm_block(alone, x_scale, w, w_scale, torch.float32)
        assert torch.equal(got[row], together[row])
        assert got[torch.arange(m) != row].isnan().all()


@pytest.mark.parametrize(("few", "most"), [(1, 16), (17, 64)])
def test_a_row_does_not_depend_on_how_many_share_its_tile(few, most):
    x, x_scale, w, w_scale = operands(most, 160, 1100 // 16 * 16)
    assert gemm_plan.plan(x[:few], w)[:3] == gemm_plan.plan(x, w)[:3]
    got = gemm_block(x[:few], x_scale[:few], w, w_scale, torch.float32)
    assert torch.equal(got, gemm_block(x, x_scale, w, w_scale, torch.float32)[:few])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("m", [4, 30])
def test_nan_zero_and_infinity_stay_where_they_are(monkeypatch, way, m):
    x, x_scale, w, w_scale = operands(m, 144, 300 // 16 * 16, on(monkeypatch, way), exact=True)
    x_scale.fill_(1), w_scale.fill_(1)
    nan = 0x80 if x.dtype == torch.float8_e4m3fnuz else 0x7F
    x.view(torch.uint8)[1, 130] = w.view(torch.uint8)[140, 5] = nan
    x_scale[2] = 0
    x_scale[3, 1] = float("inf")
    got = gemm_block(x, x_scale, w, w_scale, torch.float32)
    expected = gemm_block_reference(x, x_scale, w, w_scale)
    assert got[1].isnan().all() and got[:, 140].isnan().all()
    assert (got[2, :140] == 0).all()
    sound = torch.ones(m, 144, dtype=torch.bool)
    sound[1], sound[3], sound[:, 140] = False, False, False
    assert torch.equal(got[sound], expected[sound]) and not got[3].isfinite().any()


def test_a_zero_scale_of_w_takes_its_block_out():
    x, x_scale, w, w_scale = operands(3, 160, 256)
    w_scale[0, 1] = 0
    got = gemm_block(x, x_scale, w, w_scale, torch.float32)
    first = gemm_block(x[:, :128], x_scale[:, :1], w[:, :128], w_scale[:, :1], torch.float32)
    assert torch.equal(got[:, :128], first[:, :128])


@pytest.mark.parametrize("m", [5, 40])
def test_strides(m):
    x, x_scale, w, w_scale = operands(m, 160, 256, exact=True)
    expected = gemm_block(x, x_scale, w, w_scale, torch.float32)
    residual = torch.zeros(m, 400)[:, 16:176]
    for at in (0, 32, 5):
        wide = torch.full((m, 320), float("nan")).to(x.dtype)
        wide.view(torch.uint8)[:, at : at + 256] = x.view(torch.uint8)
        rows = torch.full((160, 300), float("nan")).to(w.dtype)
        rows.view(torch.uint8)[:, at : at + 256] = w.view(torch.uint8)
        by_block = x_scale.t().contiguous().t()
        got = gemm_block(
            wide[:, at : at + 256], by_block, rows[:, at : at + 256], w_scale, torch.float32, residual
        )
        assert torch.equal(got, expected)
    by_column = x.view(torch.uint8).t().contiguous().t().view(x.dtype)
    assert torch.equal(gemm_block(by_column, x_scale, w, w_scale, torch.float32), expected)
    same = x[:1].expand(m, 256), x_scale[:1].expand(m, 2)
    assert torch.equal(gemm_block(*same, w, w_scale, torch.float32), expected[:1].expand(m, 160))


@pytest.mark.parametrize(("m", "n"), [(0, 160), (3, 0)])
def test_nothing_to_do(m, n):
    assert gemm_block(*operands(m, n, 256)).shape == (m, n)


def test_the_reference_stands_in(monkeypatch):
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    given = operands(9, 200, 300)
    residual = torch.randn(9, 200).half()
    got = gemm_block(*given, torch.float16, residual)
    assert torch.equal(got, gemm_block_reference(*given, residual).half())


def changed(**changes):
    x, x_scale, w, w_scale = operands(4, 160, 256)
    return {"x": x, "x_scale": x_scale, "w": w, "w_scale": w_scale} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(4, 256)}, "x is torch.float32; expected torch.float8_e4m3fn or"),
        ({"x": codes((4, 256), torch.float8_e4m3fnuz)}, "w is torch.float8_e4m3fn; expected torch.float8_e4m3fnuz"),
        ({"w": codes((160, 255))}, r"w has shape \[160, 255\]; expected \[any, 256\]"),
        ({"w": codes((2, 160, 256))}, r"w has shape \[2, 160, 256\]; expected \[any, 256\]"),
        ({"w": codes((256, 160)).t()}, "w has strides"),
        ({"x_scale": torch.ones(4, 3)}, r"x_scale has shape \[4, 3\]; expected \[4, 2\]"),
        ({"w_scale": torch.ones(2, 2).bfloat16()}, "w_scale is torch.bfloat16; expected torch.float32"),
        ({"w_scale": torch.ones(1, 2)}, r"w_scale has shape \[1, 2\]; expected \[2, 2\]"),
        ({"out_dtype": torch.float64}, "out_dtype is torch.float64"),
        ({"residual": torch.ones(4, 160)}, "residual is torch.float32; expected torch.bfloat16"),
        ({"residual": torch.ones(1, 160).bfloat16()}, r"residual has shape \[1, 160\]; expected \[4, 160\]"),
        ({"x": codes((4, 0)), "w": codes((160, 0))}, "x has no columns"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        gemm_block(**changed(**changes))


def test_codes_that_the_gpu_does_not_multiply_are_refused(monkeypatch):
    on(monkeypatch, "gfx942")
    with pytest.raises(ValueError, match="x is torch.float8_e4m3fn; gfx942 multiplies torch.float8_e4m3fnuz"):
        gemm_block(**changed())
