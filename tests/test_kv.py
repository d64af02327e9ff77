"""KV-cache policies: names, numerics of each codec, and what a cache holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtplab import ConfigError
from mtplab.models.cache import KVCache, slot_base, slot_index
from mtplab.models.choice import KERNEL_STORAGE
from mtplab.models.spec import CacheRows
from mtplab.quant.kv_codec import CODECS, codec_of
from mtplab.quant.policy import POLICIES, resolve_policy

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    "given, name",
    [("none", "none"), (0, "none"), (4, "int4"), (8, "int8"), (16, "fp8_e4m3"), (17, "fp8_e5m2"), ("fp8", "fp8_e4m3"),
     ("FP8_E5M2", "fp8_e5m2"), ("auto", "none"), (42, "turboquant"), ("bfloat16", "none"), ("8", "int8"),
     ("int8_per_token_head", "int8")],
)  # fmt: skip
def test_policy_names_numbers_and_aliases(given, name):
    assert resolve_policy(given).name == name


@pytest.mark.parametrize(
    "given, name",
    [("8/4", "int8/int4"), ("int8/int8", "int8"), (" INT8@7+3+3 ", "int8@3+7"),
     ("fp8:calibrated/fp8_e4m3:calibrated", "fp8_e4m3:calibrated"), ("turboquant/42", "turboquant"),
     ("bf16/fp8:checkpoint@0", "none/fp8_e4m3:checkpoint@0"), ("none/none", "none")],
)  # fmt: skip
def test_one_name_for_one_meaning(given, name):
    found = resolve_policy(given)
    assert found.name == name and resolve_policy(name) == found and str(found) == name
    assert found.summary and "," not in name, "lists of policies have commas between"


@pytest.mark.parametrize(
    "given, said",
    [
        ("int8:calibrated", "only fp8_e4m3 and fp8_e5m2 take any: use int8"),
        ("fp8:row", "asks for scales 'row'; expected one of calibrated, calibrated-head, checkpoint"),
        ("fp8_e5m2:checkpoint", "use fp8_e4m3:checkpoint"),
        ("none@3", "use none"),
        ("int8@first", "keeps layers 'first'; expected their numbers, as in int8@3"),
        ("int8@", "keeps layers ''"),
        ("int8/int4/int8", "has 3 parts; expected one, or K/V"),
        ("int8/int3", "its part 'int3'"),
        ("turboquant_k8v4", "vLLM's turboquant_\\* store other codes"),
    ],
)
def test_nonsense_says_what_to_write(given, said):
    with pytest.raises(ConfigError, match=said):
        resolve_policy(given)


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


@pytest.mark.parametrize("policy", KERNEL_STORAGE)
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


APART = ["int8/int4", "turboquant/fp8", "none/int8", "fp8_e4m3/fp8_e5m2"]
SCALED = [f"fp8_e4m3:{scales}" for scales in ("calibrated", "calibrated-head")] + ["fp8:calibrated/fp8:calibrated-head"]


@pytest.mark.parametrize("policy", [*POLICIES, *APART, *SCALED, "fp8:calibrated/int4"])
@pytest.mark.parametrize("kernels", [False, True])
def test_cache_reads_what_it_stores(policy, kernels):
    """Written, read, picked and forked: each row is what its own codec makes of it, with its own head's scale."""
    b, h, capacity, d = 3, 2, 16, 32
    policy = resolve_policy(policy)
    scales = tuple(
        None if side.scales is None else torch.tensor([0.25, 3.0])[: 2 if side.scales.endswith("head") else 1] * (1 + i)
        for i, side in enumerate(policy.sides)
    )
    cpu = torch.device("cpu")
    cache = KVCache(policy, b, CacheRows(h, d), capacity, torch.float32, BF16, cpu, kernels=kernels, scales=scales)
    positions = torch.tensor([[4, 5], [0, 1], [9, 10]])
    both = torch.randn(2, b, 2, h, d)
    cache.write(slot_index(positions, slot_base(b, h, capacity, cpu)), both.reshape(-1, d))
    for which, (side, scale) in enumerate(zip(policy.sides, scales, strict=True)):
        expected = torch.zeros(b, h, capacity, d)
        for i in range(b):
            for head in range(h):
                factor = 1.0 if scale is None else float(scale[head % len(scale)])
                rows = both[which, i, :, head] / factor
                codec = codec_of(side.storage)
                expected[i, head, positions[i]] = codec.decode(*codec.encode(rows, BF16), torch.float32) * factor
        got = cache.read(capacity)[which]
        at = torch.zeros(b, capacity, dtype=torch.bool)
        at[torch.arange(b)[:, None], positions] = True
        assert torch.equal(got.transpose(1, 2)[at], expected.transpose(1, 2)[at])
        if not kernels:
            assert (got.transpose(1, 2)[~at] == 0).all(), "nothing is written elsewhere"
        fork = cache.fork(torch.tensor([2, 0, 2]), 12)
        assert torch.equal(fork.read(12)[which][2][:, 9:11], expected[2][:, 9:11]) and fork.room == 3
    kept = cache.read(capacity)
    cache.select(torch.tensor([2, 0]))
    for mine, before in zip(cache.read(capacity), kept, strict=True):
        assert torch.equal(mine, before[[2, 0]])


def test_bytes_per_token():
    """64-wide heads, BF16 checkpoint: codes plus what lies beside each head's row in BF16, K and V."""
    by_name = {n: p.bytes_per_token(2, 64, 2) for n, p in POLICIES.items()}
    assert by_name == {
        "none": 2 * 2 * 128,
        "int8": 2 * 2 * (64 + 4),
        "int4": 2 * 2 * (32 + 4),
        "fp8_e4m3": 2 * 2 * 64,
        "fp8_e5m2": 2 * 2 * 64,
        "turboquant": 2 * (32 + 4) + 2 * (16 + 2),
    }
    assert resolve_policy("int8/int4").bytes_per_token(2, 64, 2) == 2 * (64 + 4) + 2 * (32 + 4)
    assert resolve_policy("fp8:calibrated-head").bytes_per_token(2, 64, 2) == by_name["fp8_e4m3"]


@pytest.mark.parametrize("policy", [*POLICIES, *APART])
def test_bytes_per_token_are_those_of_the_cache(policy):
    policy, heads, d = resolve_policy(policy), 2, 64
    cache = KVCache(policy, 3, CacheRows(heads, d), 16, BF16, BF16, torch.device("cpu"))
    held = sum(x.nbytes for part in cache.parts for x in part.held)
    assert held == 3 * 16 * policy.bytes_per_token(heads, d, 2)


@pytest.mark.parametrize("policy", ["int8", "int4"])
def test_rows_beyond_the_stored_dtype_stay_finite(policy):
    rows = torch.full((2, 64), 1e5)
    codes, meta = CODECS[policy].encode(rows, torch.float16)
    assert torch.equal(CODECS[policy].decode(codes, meta, torch.float32), torch.full((2, 64), 65504.0))
