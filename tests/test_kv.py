"""KV-cache policies: names, numerics of each codec, and what a cache holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtplab import ConfigError
from mtplab.models.cache import KVCache, slot_base, slot_index
from mtplab.quant.kv_codec import CODECS
from mtplab.quant.policy import POLICIES, resolve_policy

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "given, name",
    [("none", "none"), (0, "none"), (4, "int4"), (8, "int8"), (16, "fp8_e4m3"), (17, "fp8_e5m2"), ("fp8", "fp8_e4m3"),
     ("FP8_E5M2", "fp8_e5m2"), ("auto", "none"), ("bfloat16", "none"), ("8", "int8"), ("int8_per_token_head", "int8")],
)  # fmt: skip
def test_policy_names_numbers_and_aliases(given, name):
    assert resolve_policy(given).name == name


@pytest.mark.parametrize("given", ["int3", 5, "", None, True, 42.5])
def test_unknown_policy_is_named(given):
    with pytest.raises(ConfigError, match="unknown quant_policy"):
        resolve_policy(given)


@pytest.mark.parametrize("policy, levels", [("int8", 255), ("int4", 15)])
def test_integer_numerics_are_lmdeploys(policy, levels):
    """q = trunc(x/scale + zero + 1/2), scale = (max - min)/levels, zero = -min/scale, in float32 scalars."""
    rows = torch.randn(40, 64) * 3
    codes, meta = CODECS[policy].encode(rows, torch.float32)
    if policy == "int4":
        codes = torch.cat([codes & 15, codes >> 4], -1)
    for x, q, (scale, zero) in zip(rows.numpy(), codes.numpy(), meta.numpy(), strict=True):
        expected_scale = (x.max() - x.min()) / np.float32(levels)
        assert scale == expected_scale and zero == -x.min() / expected_scale
        expected = np.clip(np.trunc(x / scale + zero + np.float32(0.5)), 0, levels)
        assert np.array_equal(q, expected.astype(np.uint8))


def test_int4_packs_split_halves():
    """Element d shares a byte with element d + head_dim/2: lo + 16 * hi."""
    row = torch.arange(16.0)
    codes, _ = CODECS["int4"].encode(row[None], torch.float32)
    assert codes[0].tolist() == [d + 16 * (d + 8) for d in range(8)]


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("meta_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 96.0])  # each a number of every format
def test_constant_rows_read_back(policy, meta_dtype, value):
    rows = torch.full((3, 64), value)
    codec = CODECS[policy]
    codes, meta = codec.encode(rows, meta_dtype)
    assert torch.equal(codec.decode(codes, meta, torch.float32), rows)
    if meta is not None:
        assert (meta[:, 0] == 1).all() and (meta[:, 1].float() == -value).all(), "scale 1, zero -min"


@pytest.mark.parametrize("policy", ["int8", "int4"])
@pytest.mark.parametrize("meta_dtype", [torch.bfloat16, torch.float16])
def test_nearly_constant_rows_stay_finite(policy, meta_dtype):
    rows = 100 + torch.rand(50, 64) * torch.logspace(-9, 0, 50)[:, None]
    codes, meta = CODECS[policy].encode(rows, meta_dtype)
    back = CODECS[policy].decode(codes, meta, torch.float32)
    assert meta.isfinite().all() and back.isfinite().all()
    assert (back - rows).abs().max() < 2.0  # the zero point keeps 8 bits of 100/scale in BF16, as in lmdeploy


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_integer_error_is_half_a_step(policy):
    rows = torch.randn(200, 64)
    codec = CODECS[policy]
    codes, meta = codec.encode(rows, torch.float32)
    error = (codec.decode(codes, meta, torch.float32) - rows).abs()
    assert (error <= meta[:, :1] * 0.501).all()


def test_meta_is_rounded_before_codes_are_made():
    """Codes are made with the scale as stored: a BF16 scale that shrank saturates instead of wrapping round."""
    rows = torch.randn(500, 64) * torch.rand(500, 1).mul(8).exp2()
    codes, meta = CODECS["int8"].encode(rows, BF16)
    assert meta.dtype == BF16
    back = CODECS["int8"].decode(codes, meta, torch.float32)
    span = rows.amax(-1, keepdim=True) - rows.amin(-1, keepdim=True)
    assert ((back - rows).abs() / span).max() < 0.02


@pytest.mark.parametrize("policy, top", [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_fp8_clamps_and_rounds_to_nearest_even(policy, top):
    codec = CODECS[policy]
    rows = torch.tensor([[1e6, -1e6, top, 0.0, 1.0, 1.0625, -2.0**-9, 3.0]])
    codes, meta = codec.encode(rows, BF16)
    back = codec.decode(codes, meta, torch.float32)
    assert meta is None
    assert back[0, :4].tolist() == [top, -top, top, 0.0]
    assert back[0, 4] == 1.0 and back[0, 5] == 1.0 and back[0, 7] == 3.0


@pytest.mark.parametrize("policy", list(POLICIES))
def test_cache_reads_what_it_stores(policy):
    b, h, capacity, d = 3, 2, 16, 32
    cache = KVCache(resolve_policy(policy), b, h, capacity, d, torch.float32, BF16, torch.device("cpu"))
    positions = torch.tensor([[4, 5], [0, 1], [9, 10]])
    k, v = torch.randn(b, 2, h, d), torch.randn(b, 2, h, d)
    slots = slot_index(positions, slot_base(b, h, capacity, positions.device))
    cache.write(slots, torch.cat([k.reshape(-1, d), v.reshape(-1, d)]))
    codec = cache.codec
    for which, rows in enumerate((k, v)):
        codes, meta = codec.encode(rows, BF16)
        expected = codec.decode(codes, meta, torch.float32)
        for i in range(b):
            got = cache.read(capacity)[which][i, :, positions[i]]
            assert torch.equal(got.transpose(0, 1), expected[i])
    stored = codec.decode(cache.codes, cache.meta, torch.float32)
    written = torch.zeros(b, capacity, dtype=torch.bool)
    written[torch.arange(b)[:, None], positions] = True
    stored, values = (x.permute(0, 1, 3, 2, 4) for x in (stored, cache.values))
    assert torch.equal(stored[:, written], values[:, written])
    assert (values[:, ~written] == 0).all(), "nothing is written elsewhere"
    cache.select(torch.tensor([2, 0]))
    expected = codec.decode(*codec.encode(k[2, 0], BF16), torch.float32)
    assert torch.equal(cache.read(capacity)[0][0, :, 9], expected)


def test_bytes_per_token():
    """64-wide heads, BF16 checkpoint: codes plus BF16 scale and zero per head, K and V."""
    by_name = {n: p.bytes_per_token(2, 64, 2) for n, p in POLICIES.items()}
    assert by_name == {
        "none": 2 * 2 * 128,
        "int8": 2 * 2 * (64 + 4),
        "int4": 2 * 2 * (32 + 4),
        "fp8_e4m3": 2 * 2 * 64,
        "fp8_e5m2": 2 * 2 * 64,
    }


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_rows_beyond_the_stored_dtype_stay_finite(policy):
    rows = torch.full((2, 64), 1e5)
    codes, meta = CODECS[policy].encode(rows, torch.float16)
    assert torch.equal(CODECS[policy].decode(codes, meta, torch.float32), torch.full((2, 64), 65504.0))
