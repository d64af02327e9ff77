"""The FP8 product with scales of a tensor or of its rows, and FNUZ codes: in the interpreter against torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from gemm_cases import WAYS, codes, on, powers, scales, whole
from kernel_tools import interpreted, poisoned, relative_error
from mtplab.kernels import gemm_plan
from mtplab.kernels.fnuz import to_fnuz
from mtplab.kernels.gemm import gemm_scaled
from mtplab.kernels.gemm_reference import gemm_scaled_reference
from mtplab.kernels.targets import TARGETS
from test_kernel_compile import bare_python

pytestmark = interpreted
KINDS = {"tensor": ((), ()), "channel": ((1,), None), "token": (None, (1, 1)), "token, channel": (None, None)}


def operands(m, n, k, dtype, kind="token, channel", exact=False):
    data, scale = (whole, powers) if exact else (codes, scales)
    x_shape, w_shape = KINDS[kind]
    return (
        data((m, k), dtype, seed=1), scale(*((m, 1) if x_shape is None else x_shape), seed=2),
        data((n, k), dtype, seed=3), scale(*((n, 1) if w_shape is None else w_shape), seed=5),
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 128, 128), (7, 272, 336), (63, 272, 336), (100, 65, 200), (3, 3, 1)])
def test_sums_that_float32_holds_are_exact(monkeypatch, kind, way, m, n, k):
    given = operands(m, n, k, on(monkeypatch, way), kind, exact=True)
    with poisoned():
        got = gemm_scaled(*given, torch.float32)
    assert torch.equal(got.double(), gemm_scaled_reference(*given, torch.float64))


@pytest.mark.parametrize("way", TARGETS)
def test_every_tile_of_every_gpu(monkeypatch, way):
    dtype = on(monkeypatch, way, processors=1)
    for m, n in ((5, 160), (50, 160), (150, 160), (150, 150)):
        given = operands(m, n, 400, dtype)
        with poisoned():
            got = gemm_scaled(*given, torch.float32)
        assert relative_error(got, gemm_scaled_reference(*given, torch.float64)) < 3e-7


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("m", "k"), [(3, 4096), (33, 4096), (3, 256)])
def test_k_divided_among_programs_and_rounded_once(out_dtype, m, k):
    x, x_scale, w, w_scale = operands(m, 80, k, torch.float8_e4m3fn)
    x_scale = x_scale / 1e4
    assert (gemm_plan.plan(x, w).parts > 1) == (k == 4096)
    with poisoned():
        got = gemm_scaled(x, x_scale, w, w_scale, out_dtype)
        exact = gemm_scaled(x, x_scale, w, w_scale, torch.float32)
    assert relative_error(exact, gemm_scaled_reference(x, x_scale, w, w_scale, torch.float64)) < 3e-7
    assert got.dtype == out_dtype and torch.equal(got, exact.to(out_dtype))


@pytest.mark.parametrize("m", [16, 64, 130])
def test_a_row_does_not_depend_on_what_is_beside_it(m):
    x, x_scale, w, w_scale = operands(m, 160, 640, torch.float8_e4m3fn)
    together = gemm_scaled(x, x_scale, w, w_scale, torch.float32)
    assert torch.equal(together, gemm_scaled(x, x_scale, w, w_scale, torch.float32))
    for row in (0, m // 2, m - 1):
        alone = torch.full_like(x.view(torch.uint8), 0x7F)
        alone[row] = x.view(torch.uint8)[row]
        got = gemm_scaled(alone.view(x.dtype), x_scale, w, w_scale, torch.float32)
        assert torch.equal(got[row], together[row]) and got[torch.arange(m) != row].isnan().all()


def test_strided_scales():
    x, x_scale, w, w_scale = operands(20, 160, 256, torch.float8_e4m3fn, exact=True)
    strided = torch.full((20, 3), float("nan"))
    strided[:, 1:2] = x_scale
    expected = gemm_scaled(x, x_scale, w, w_scale, torch.float32)
    assert torch.equal(gemm_scaled(x, strided[:, 1:2], w, w_scale, torch.float32), expected)


def test_nothing_to_do_and_the_reference(monkeypatch):
    assert gemm_scaled(*operands(0, 160, 256, torch.float8_e4m3fn)).shape == (0, 160)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    given = operands(5, 30, 70, torch.float8_e4m3fn)
    assert torch.equal(gemm_scaled(*given), gemm_scaled_reference(*given).bfloat16())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_scale": torch.ones(5, 1)}, r"x_scale has shape \[5, 1\]; expected \[4, 1\]"),
        ({"x_scale": torch.ones(4)}, r"x_scale has shape \[4\]; expected \[4, 1\]"),
        ({"x_scale": torch.ones(()).half()}, "x_scale is torch.float16; expected torch.float32"),
        ({"w_scale": torch.ones(160, 2)}, r"w_scale has shape \[160, 2\]; expected \[160, 1\]"),
        ({"w": torch.ones(160, 256)}, "w is torch.float32; expected torch.float8_e4m3fn"),
        ({"out_dtype": torch.int8}, "out_dtype is torch.int8"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    given = dict(zip(("x", "x_scale", "w", "w_scale"), operands(4, 160, 256, torch.float8_e4m3fn), strict=True))
    with pytest.raises(ValueError, match=message):
        gemm_scaled(**given | changes)



@pytest.mark.slow
@pytest.mark.parametrize(("target", "additions"), [("sm_90", 64), ("sm_100", 0)])
def test_short_accumulators_are_emptied_into_float32(target, additions, tmp_path):
    """One addition for each of the 64 × 128 elements that 128 threads hold, where the matrix unit has fewer bits."""
    import triton

    how = ["-m", "mtplab.kernels.aot", "--quick", "--module", "gemm_scaled_jit", "--target", target]
    done = bare_python(*how, TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (binary,) = tmp_path.glob("*/gemm_scaled.cubin")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    code = subprocess.run([tool, binary], capture_output=True, text=True, check=True).stdout
    assert len(re.findall(r"\bFADD2?\b", code)) == additions


# FNUZ


def test_every_code_means_the_same_in_fnuz():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.tensor([0.75])
    got, doubled = to_fnuz(codes, scale)
    assert got.dtype == torch.float8_e4m3fnuz and torch.equal(scale, torch.tensor([0.75]))
    expected = codes.float() * 0.75
    assert int(expected.isnan().sum()) == 2
    torch.testing.assert_close(got.float() * doubled, expected, rtol=0, atol=0, equal_nan=True)


def test_only_e4m3_becomes_fnuz():
    with pytest.raises(ValueError, match="codes are torch.float8_e5m2; expected torch.float8_e4m3fn"):
        to_fnuz(torch.zeros(4).to(torch.float8_e5m2), torch.ones(1))
