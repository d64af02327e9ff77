"""TurboQuant's codes against the formula written down again: centroids, packing, norms, and the rotation.

lmdeploy's `fill_kv_cache` and `flatten_kv_cache` are the source (policy 42); the codebooks here come from Lloyd's
iteration on N(0, 1), not from its table.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from mtplab import ConfigError, generate, load_model
from mtplab.kernels import turboquant_reference as turboquant
from mtplab.quant.kv_codec import CODECS
from tiny import write_tiny

F32 = torch.float32


def lloyd_max(levels: int) -> np.ndarray:
    """The codebook of N(0, 1) with the least squared error, by Lloyd's iteration to its fixed point."""
    centroids = np.linspace(-2, 2, levels)
    for _ in range(4000):
        edges = np.concatenate([[-np.inf], (centroids[1:] + centroids[:-1]) / 2, [np.inf]])
        density = np.exp(-(edges**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([(1 + math.erf(edge / math.sqrt(2))) / 2 for edge in edges])
        centroids = (density[:-1] - density[1:]) / (below[1:] - below[:-1])
    return centroids


@pytest.mark.parametrize("bits", [2, 3])
def test_the_codebooks_are_lloyd_maxs(bits):
    upper = lloyd_max(2**bits)[2 ** (bits - 1) :]
    np.testing.assert_allclose(turboquant.CENTROIDS[bits], upper, atol=1e-6)
    middles = np.concatenate([[0.0], (upper[1:] + upper[:-1]) / 2])
    np.testing.assert_allclose(turboquant.BOUNDARIES[bits], middles, atol=1e-6)


@pytest.mark.parametrize("d", [4, 16, 64, 128, 256])
def test_the_rotation_is_the_walsh_hadamard_matrix(d):
    """Orthonormal and its own inverse, so that scores and norms are kept."""
    matrix = torch.tensor(hadamard(d) / math.sqrt(d), dtype=torch.float64)
    x, q = torch.randn(7, d), torch.randn(5, d)
    torch.testing.assert_close(turboquant.rotate(x).double(), x.double() @ matrix.T, atol=2e-6, rtol=0)
    torch.testing.assert_close(turboquant.rotate(turboquant.rotate(x)), x, atol=3e-6, rtol=0)
    scores = turboquant.rotate(q) @ turboquant.rotate(x).T
    torch.testing.assert_close(scores, q @ x.T, atol=2e-4, rtol=0)


def by_hand(row: np.ndarray, bits: int) -> tuple[np.ndarray, float, np.ndarray, np.ndarray]:
    """(indices, norm, residual, centroids of the indices) of one row, in float64."""
    d = len(row)
    turned = hadamard(d) @ row / math.sqrt(d)
    norm = math.sqrt((turned**2).sum() + 1e-8)
    unit, book = turned / norm, lloyd_max(2**bits) / math.sqrt(d)
    index = np.abs(unit[:, None] - book).argmin(1)
    return index, norm, unit - book[index], book[index]


@pytest.mark.parametrize("d", [16, 64, 256])
def test_k_is_norm_times_centroid_plus_signed_residual(d):
    rows = torch.randn(6, d) * torch.logspace(-2, 2, 6)[:, None]
    codes, meta = turboquant.encode_k(rows, F32)
    assert codes.dtype == torch.uint8 and codes.shape == (6, d // 2) and meta.shape == (6, 2)
    back = turboquant.decode_k(codes, meta, F32)
    for row, packed, (norm, spread), read in zip(rows.double().numpy(), codes, meta.tolist(), back, strict=True):
        index, expected_norm, left, book = by_hand(row, 3)
        expected_spread = math.sqrt((left**2).sum() + 1e-8) / math.sqrt(d)
        assert math.isclose(norm, expected_norm, rel_tol=1e-5) and math.isclose(spread, expected_spread, rel_tol=1e-4)
        # low nibble element i, high nibble element i + d/2; three bits of index below a bit for left >= 0
        nibbles = torch.cat([packed & 15, packed >> 4]).numpy()
        clear = np.abs(left) > 1e-6
        assert (nibbles % 8 == index).all() and ((nibbles >= 8) == (left >= 0))[clear].all()
        sign = np.where(nibbles >= 8, 1, -1)
        expected = hadamard(d).T @ (expected_norm * (book + expected_spread * sign)) / math.sqrt(d)
        np.testing.assert_allclose(read.numpy(), expected, atol=2e-5 * expected_norm)


@pytest.mark.parametrize("d", [16, 64, 256])
def test_v_is_norm_times_centroid(d):
    rows = torch.randn(6, d) * torch.logspace(-2, 2, 6)[:, None]
    codes, meta = turboquant.encode_v(rows, F32)
    assert codes.dtype == torch.uint8 and codes.shape == (6, d // 4) and meta.shape == (6, 1)
    back = turboquant.decode_v(codes, meta, F32)
    for row, packed, (norm,), read in zip(rows.double().numpy(), codes, meta.tolist(), back, strict=True):
        index, expected_norm, _, book = by_hand(row, 2)
        # elements i, i + d/4, i + d/2, i + 3d/4 from the lowest bits up
        assert (torch.cat([packed >> shift & 3 for shift in (0, 2, 4, 6)]).numpy() == index).all()
        assert math.isclose(norm, expected_norm, rel_tol=1e-5)
        expected = hadamard(d).T @ (expected_norm * book) / math.sqrt(d)
        np.testing.assert_allclose(read.numpy(), expected, atol=2e-5 * expected_norm)


def test_the_error_is_that_of_the_codebooks():
    """Of normal rows, as shares of their variance: the codebook's own for V; for K what is left of its residual once
    one step of the residual's root mean square is taken off by sign."""
    rows = torch.randn(4000, 128)
    for name, book in (("turboquant V", lloyd_max(4)), ("turboquant K", lloyd_max(8))):
        back = CODECS[name].decode(*CODECS[name].encode(rows, F32), F32)
        found = ((back - rows) ** 2).sum() / (rows**2).sum()
        sample = np.random.default_rng(0).standard_normal(400_000)
        left = sample - book[np.abs(sample[:, None] - book).argmin(1)]
        if name.endswith("K"):
            left = left - np.sqrt((left**2).mean()) * np.where(left >= 0, 1, -1)
        assert math.isclose(found, (left**2).mean(), rel_tol=0.05)


@pytest.mark.parametrize("which", ["K", "V"])
def test_norms_are_rounded_to_the_checkpoints_dtype_and_stay_finite(which):
    codec = CODECS[f"turboquant {which}"]
    rows = torch.stack([torch.zeros(64), torch.full((64,), 1e4), torch.full((64,), torch.nan)])
    codes, meta = codec.encode(rows, torch.float16)
    back = codec.decode(codes, meta, F32)
    assert meta.dtype == torch.float16 and back[2].isnan().all()
    assert (back[0].abs() < 1e-3).all() and back[1].isfinite().all()
    assert float(meta[1, 0]) == 65504.0, "a norm beyond the dtype is its largest number"


def test_heads_of_another_size_are_refused_before_anything_runs(tmp_path):
    model = load_model(write_tiny(tmp_path, head_dim=24, rope_parameters={"partial_rotary_factor": 0.25}))
    with pytest.raises(ConfigError, match=r"power of two from 4 on, but head_dim is 24; use int4 or int8"):
        generate(model, [[1, 2]], depth=1, max_new_tokens=2, quant_policy="turboquant")
    with pytest.raises(ConfigError, match="head_dim is 24"):
        generate(model, [[1, 2]], depth=1, max_new_tokens=2, draft_quant_policy="int8/turboquant")
