"""Attention over a KV cache: the kernels in the interpreter against float64, and what a result may depend on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from kernel_tools import interpreted, poisoned, relative_error, vast
from mtplab.kernels import attention, attention_reference
from mtplab.kernels.attention import attend_cache
from mtplab.kernels.kv_layout import format_of
from mtplab.kernels.kv_write import write_kv
from mtplab.kernels.targets import TARGETS
from mtplab.models.attend import attend, attention_bias
from mtplab.models.cache import KVCache, slot_base, slot_index
from mtplab.models.choice import KERNEL_STORAGE
from mtplab.models.spec import CacheRows
from mtplab.quant.kv_codec import CODECS
from mtplab.quant.policy import resolve_policy

pytestmark = interpreted

POLICIES = list(KERNEL_STORAGE)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# ‖error‖/‖expected‖: weights and outputs are rounded to the dtype
ERROR = {BF16: 6e-3, FP16: 8e-4, FP32: 2e-6}
short = {"ids": lambda x: str(x).removeprefix("torch.")}


def filled(policy, lengths, kv_heads, d, dtype, page_size=None, reach=None, seed=0):
    """A cache that holds `lengths` slots of each sequence, NaN (or 0x7F) in every other; (codes, meta, table)."""
    b, reach = len(lengths), reach or max(lengths)
    pages = -(-reach // (page_size or reach))
    shape = (2, b * pages, kv_heads, page_size or reach)
    codec = CODECS[policy]
    codes = torch.empty(*shape, codec.code_shape(d), dtype=codec.code_dtype(dtype))
    codes.view(torch.uint8).fill_(0x7F)
    codes.fill_(float("nan")) if policy == "none" else None
    meta = torch.full((*shape, 2), float("nan"), dtype=dtype) if policy.startswith("int") else None
    table = torch.randperm(b * pages, generator=torch.Generator().manual_seed(seed)).view(b, pages).int()
    for i, length in enumerate(lengths):
        rows = torch.randn(2, 1, length, kv_heads, d, generator=torch.Generator().manual_seed(seed + i + 1))
        rows = (rows + rows.mean(-1, keepdim=True) * 4).to(dtype)
        write_kv(*rows, codes, meta, torch.arange(length)[None], table[i : i + 1])
    return codes, meta, table


def queries(b, t, heads, d, dtype, seed=100):
    return torch.stack(
        [torch.randn(t, heads, d, generator=torch.Generator().manual_seed(seed + i)) * 2 for i in range(b)]
    ).to(dtype)


def last_positions(lengths, t):
    """[b, t]: the last t slots of each sequence."""
    return torch.tensor(lengths)[:, None] - t + torch.arange(t)


def expected_of(q, codes, meta, positions, table, scale=None, scales=(1.0, 1.0)):
    """The reference's result for float64 rows that are what it reads back."""
    form = format_of(codes, meta, codes.shape[2], q.shape[-1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return attention_reference.attend(q, codes, meta, positions, table, form, scale, scales)


def check(policy, lengths, t, heads, kv_heads, d, dtype, page_size=None, **how):
    codes, meta, table = filled(policy, lengths, kv_heads, d, dtype, page_size)
    q, positions = queries(len(lengths), t, heads, d, dtype), last_positions(lengths, t)
    with poisoned():
        got = attend_cache(q, codes, meta, positions, table, **how)
    assert got.shape == q.shape and got.dtype == dtype
    expected = expected_of(q, codes, meta, positions, table)
    assert relative_error(got, expected) < ERROR[dtype]
    # no row hides behind the others
    for a, e in zip(got.flatten(0, 2), expected.flatten(0, 2), strict=True):
        assert relative_error(a, e) < 4 * ERROR[dtype]


def test_the_reference_equals_torch():
    """One position a query, everything visible to the last: scaled_dot_product_attention's result."""
    lengths, t, d = [40, 40], 4, 32
    codes, meta, table = filled("none", lengths, 2, d, FP32)
    q, positions = queries(2, t, 6, d, FP32), last_positions(lengths, t)
    k, v = (codes[i][table[:, 0].long()].repeat_interleave(3, 1) for i in (0, 1))
    mask = torch.arange(40) <= positions[:, None, :, None]
    expected = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask).transpose(1, 2)
    torch.testing.assert_close(expected_of(q, codes, meta, positions, table), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], **short)
def test_formats(policy, dtype):
    check(policy, [70, 1, 129], 1, 8, 2, 64, dtype)


@pytest.mark.parametrize("d", [16, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("policy", ["none", "int4", "int8"])
def test_head_dims(d, policy):
    check(policy, [50], 2, 4, 2, d, BF16)


@pytest.mark.parametrize("gpu", ["sm_89", "gfx942", "gfx950"])
@pytest.mark.parametrize("t", [1, 5])
def test_tiles_of_other_gpus(gpu, t, monkeypatch):
    """The interpreter takes the tiles of sm_90; of these CDNA3 also rounds to BF16 in its own way, and has no mask."""
    monkeypatch.setattr(attention, "target", lambda device: TARGETS[gpu])
    for policy in ("int8", "none"):
        check(policy, [70, 3 + t], t, 4, 1, 64, BF16)
        check(policy, [40], t, 4, 1, 256, BF16)
    check("fp8_e4m3", [33], t, 4, 1, 64, FP32)


@pytest.mark.parametrize("policy, dtype", [("int8", BF16), ("fp8_e4m3", BF16), ("fp8_e4m3", FP16), ("fp8_e4m3", FP32)])
def test_cdna3_converts_as_others_do(policy, dtype, monkeypatch):
    """Bit for bit, as the tile is the same for heads of 128; and a NaN that is seen shows there too."""
    results = []
    for gpu in ("gfx942", "gfx950"):
        monkeypatch.setattr(attention, "target", lambda device, gpu=gpu: TARGETS[gpu])
        codes, meta, table = filled(policy, [150], 1, 128, dtype)
        if policy == "fp8_e4m3":  # every code but NaN
            every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
            codes.view(torch.uint8)[:, 0, 0, 10:12] = every[(every & 0x7F) != 0x7F].repeat(2)[:256].view(2, 128)
        q, positions = queries(1, 5, 4, 128, dtype), last_positions([150], 5)
        results.append(attend_cache(q, codes, meta, positions, table, piece=64))
        assert relative_error(results[-1], expected_of(q, codes, meta, positions, table)) < ERROR[dtype]
        if meta is None:
            codes.view(torch.uint8)[1, 0, 0, 149] = 0xFF
        else:
            meta[1, :, :, 149, 0] = float("nan")
        assert attend_cache(q, codes, meta, positions, table, piece=64)[0, 4].isnan().all()
    assert torch.equal(*results)


@pytest.mark.parametrize("t, heads, kv_heads", [(1, 1, 1), (5, 4, 4), (2, 16, 1), (5, 8, 2), (8, 16, 1), (3, 15, 3)])
def test_rows_of_a_tile(t, heads, kv_heads):
    """From one row to two tiles, odd groups; each token sees one slot more than the one before."""
    check("int8", [40, 33], t, heads, kv_heads, 64, BF16)


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_and_lengths(policy):
    """Pages shorter than a block; lengths at, before and after the end of a page and of a piece."""
    check(policy, [64, 65, 63, 17, 130], 1, 4, 1, 32, BF16, page_size=16, piece=64)


def test_more_pieces_than_are_summed_at_a_time():
    check("int8", [1030], 2, 2, 1, 32, BF16, page_size=16, piece=64)
    codes, _, table = filled("none", [1090], 1, 32, BF16)
    codes[0] *= torch.linspace(0.1, 3, 1090)[:, None].to(BF16)  # the largest score is in the 17th or 18th
    q, positions = queries(1, 1, 2, 32, BF16), torch.tensor([[1089]])
    expected = expected_of(q, codes, None, positions, table)
    assert relative_error(attend_cache(q, codes, None, positions, table, piece=64), expected) < ERROR[BF16]


@pytest.mark.parametrize("dtype", [BF16, FP32], **short)
def test_large_scores(dtype):
    """A softmax without its maximum would overflow; one that forgot to rescale would show."""
    codes, _, table = filled("none", [200], 1, 64, dtype)
    codes[0] *= torch.linspace(0, 40, 200)[:, None].to(dtype)
    q, positions = queries(1, 1, 4, 64, dtype), torch.tensor([[199]])
    for scale in (1.0, 0.01):
        got = attend_cache(q, codes, None, positions, table, scale=scale, piece=64)
        expected = expected_of(q, codes, None, positions, table, scale)
        assert got.isfinite().all() and relative_error(got, expected) < 5 * ERROR[dtype]


def test_fp8_scales():
    codes, _, table = filled("fp8_e4m3", [90], 2, 64, BF16)
    q, positions = queries(1, 2, 4, 64, BF16), last_positions([90], 2)
    expected = expected_of(q, codes, None, positions, table, None, (0.37, 5.0))
    for piece in (64, 128):
        got = attend_cache(q, codes, None, positions, table, k_scale=0.37, v_scale=5.0, piece=piece)
        assert relative_error(got, expected) < ERROR[BF16]


def test_strides_of_queries_and_a_cache_laid_out_by_token():
    codes, meta, table = filled("int8", [60, 45], 2, 64, BF16, page_size=16)
    wide = queries(2, 3, 12, 64, BF16)
    q, positions = wide[:, :, 1::3], last_positions([60, 45], 3)
    expected = attend_cache(q.contiguous(), codes, meta, positions, table)
    odd = torch.empty(q.numel() + 3, dtype=BF16)[3:].view(q.shape).copy_(q)  # no multiple of 16 bytes
    assert torch.equal(attend_cache(odd, codes, meta, positions, table), expected)
    by_token = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in (codes, meta)]
    assert torch.equal(attend_cache(q, *by_token, positions.t().contiguous().t(), table), expected)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_engines_cache_is_attended_as_the_engine_does(policy):
    """Its own writing, its own attention; no table, FP32 with a BF16 checkpoint's scales and zeros."""
    b, t, heads, kv_heads, d, capacity = 2, 20, 4, 2, 32, 24
    cache = KVCache(resolve_policy(policy), b, CacheRows(kv_heads, d), capacity, FP32, BF16, torch.device("cpu"))
    positions = torch.arange(t).expand(b, t)
    rows = torch.randn(2, b * t * kv_heads, d, generator=torch.Generator().manual_seed(3)).flatten(0, 1)
    cache.write(slot_index(positions, slot_base(b, kv_heads, capacity, rows.device)), rows)
    q, last = queries(b, 3, heads, d, FP32), positions[:, -3:]
    bias = attention_bias(last, torch.arange(t), heads // kv_heads, FP32)
    expected = attend(q.transpose(1, 2) * d**-0.5, *cache.read(t), bias, exact=False).view(q.shape)
    got = attend_cache(q, cache.codes, cache.meta, last)
    assert relative_error(got, expected) < ERROR[FP32]


def test_slots_that_lie_more_than_32_bits_apart():
    """Slot 8 begins 2^34 elements after slot 0 in the codes and 2^31 in meta, as in pools laid out token by token."""
    near, near_meta, table = filled("int8", [9], 1, 64, BF16)
    codes = vast(2, 1, 1, 9, 64, dtype=torch.uint8, stride=(64, 0, 128, 2**31, 1)).copy_(near)
    meta = vast(2, 1, 1, 9, 2, dtype=BF16, stride=(2, 0, 4, 2**28, 1)).copy_(near_meta)
    q, positions = queries(1, 1, 2, 64, BF16), torch.tensor([[8]])
    expected = attend_cache(q, near, near_meta, positions, table)
    assert torch.equal(attend_cache(q, codes, meta, positions, table), expected)


# what a result may depend on


@pytest.mark.parametrize("policy", ["none", "int4"])
def test_a_row_is_the_same_in_any_company(policy):
    """Bit-equal alone and in a batch, whatever the pages, the table's reach, the `longest` said, and twice."""
    lengths, t = [300, 5, 129], 2
    q, positions = queries(3, t, 8, 64, BF16), last_positions(lengths, t)
    cache = filled(policy, lengths, 2, 64, BF16, page_size=64, reach=320)
    with poisoned():
        whole = attend_cache(q, *cache[:2], positions, cache[2], piece=128)
    assert torch.equal(attend_cache(q, *cache[:2], positions, cache[2], piece=128, longest=300), whole)
    for i in range(3):
        alone = slice(i, i + 1)
        own = attend_cache(
            q[alone], *cache[:2], positions[alone], cache[2][alone], piece=128, longest=int(lengths[i])
        )
        assert torch.equal(own, whole[alone]), f"sequence {i} alone"
    # the same slots in one page a sequence, table of another reach
    codes, meta, table = filled(policy, lengths, 2, 64, BF16, reach=700)
    assert torch.equal(attend_cache(q, codes, meta, positions, table, piece=128), whole)


def test_one_piece_equals_many_that_are_empty():
    """The sum of pieces adds exact zeros: said to be 20 pieces long, or known to be one."""
    codes, meta, table = filled("int8", [60], 2, 64, BF16, reach=1280)
    q, positions = queries(1, 1, 4, 64, BF16), torch.tensor([[59]])
    many = attend_cache(q, codes, meta, positions, table, piece=64)
    assert torch.equal(attend_cache(q, codes, meta, positions, table, piece=64, longest=60), many)


@pytest.mark.parametrize("most", [5, 2])  # rows of two kinds of tile
def test_decoding_and_verification_agree(most):
    """A token's result is the same whether it comes alone or among those that are verified with it."""
    lengths, t = [131], most
    codes, meta, table = filled("int8", lengths, 1, 64, BF16)
    q, positions = queries(1, t, 4, 64, BF16), last_positions(lengths, t)
    together = attend_cache(q, codes, meta, positions, table, piece=64)
    for i in range(t):
        one = slice(i, i + 1)
        alone = attend_cache(q[:, one], codes, meta, positions[:, one], table, piece=64, most_tokens=most)
        assert torch.equal(alone, together[:, one]), f"token {i}"


# what is not a number


def test_a_query_that_sees_nothing_gets_zeros():
    codes, meta, table = filled("int8", [70, 70], 1, 64, BF16)
    q, positions = queries(2, 2, 2, 64, BF16), torch.tensor([[-1, 69], [-(2**32), -5]])
    expected = expected_of(q, codes, meta, positions, table)
    for piece in (64, 128):
        with poisoned():
            got = attend_cache(q, codes, meta, positions, table, piece=piece)
        assert (got[0, 0] == 0).all() and (got[1] == 0).all() and (expected[got == 0] == 0).all()
        assert relative_error(got[0, 1], expected[0, 1]) < ERROR[BF16]


@pytest.mark.parametrize("which", [0, 1], ids=["k", "v"])
@pytest.mark.parametrize("piece", [64, 128])
def test_a_nan_that_is_seen_shows(which, piece):
    """In every query that sees it; a NaN in K harms no query before it."""
    codes, _, table = filled("none", [100], 1, 64, BF16)
    codes[which, :, :, 99] = float("nan")
    q, positions = queries(1, 2, 2, 64, BF16), torch.tensor([[98, 99]])
    got = attend_cache(q, codes, None, positions, table, piece=piece)
    assert got[0, 1].isnan().all()
    if which == 0:
        assert got[0, 0].isfinite().all()
    alone = attend_cache(q[:, :1], codes, None, positions[:, :1], table, piece=piece)
    assert alone.isfinite().all()


def test_a_position_beyond_the_cache_sees_all_of_it():
    codes, meta, table = filled("int8", [70], 1, 64, BF16)
    q = queries(1, 1, 2, 64, BF16)
    end = attend_cache(q, codes, meta, torch.tensor([[69]]), table, piece=64)
    assert torch.equal(attend_cache(q, codes, meta, torch.tensor([[2**40]]), table, piece=64), end)


def test_a_length_that_is_too_small_leaves_slots_out():
    """Whole pieces up to it are read, nothing beyond the pieces there are."""
    codes, meta, table = filled("int8", [300, 300], 1, 64, BF16)
    q = queries(2, 1, 2, 64, BF16)
    start = attend_cache(q, codes, meta, torch.tensor([[127], [127]]), table, piece=64)
    cut = attend_cache(q, codes, meta, torch.tensor([[299], [299]]), table, piece=64, longest=100)
    assert torch.equal(cut, start)


def test_no_sequences_and_the_reference_chosen(monkeypatch):
    codes, meta, table = filled("int4", [9], 1, 32, BF16)
    nothing = torch.ones(0, 1, 2, 32, dtype=BF16), codes, meta, torch.ones(0, 1).long(), table[:0]
    assert attend_cache(*nothing).shape == (0, 1, 2, 32)
    q, positions = queries(1, 1, 2, 32, BF16), torch.tensor([[8]])
    got = attend_cache(q, codes, meta, positions, table)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    expected = attend_cache(q, codes, meta, positions, table)
    assert torch.equal(expected, expected_of(q, codes, meta, positions, table))
    assert relative_error(got, expected) < ERROR[BF16]


FP8_CODES = torch.zeros(2, 1, 1, 9, 64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.ones(1, 2, 64)}, r"q has shape \[1, 2, 64\]"),
        ({"q": torch.ones(1, 1, 2, 72, dtype=BF16)}, "head_dim is 72; expected a multiple of 16"),
        ({"q": torch.ones(1, 1, 3, 64, dtype=BF16)}, "q has 3 heads and codes shape"),
        ({"q": torch.ones(1, 1, 2, 64, dtype=FP16)}, "meta is torch.bfloat16 and q is torch.float16"),
        ({"codes": torch.ones(2, 1, 2, 9, 64), "meta": None}, "codes are torch.float32 and q is torch.bfloat16"),
        ({"positions": torch.zeros(1, 2).long()}, r"positions has shape \[1, 2\]; expected \[1, 1\]"),
        ({"v_scale": 2.0}, "v_scale is 2.0 with a cache of int8"),
        ({"codes": FP8_CODES, "meta": None, "v_scale": 0.0}, "v_scale is 0.0; expected a positive number"),
        ({"codes": FP8_CODES, "meta": None, "k_scale": float("inf")}, "k_scale is inf; expected a positive number"),
        (
            {
                "codes": torch.zeros(2, 1, 1, 1, 64, dtype=torch.uint8).expand(2, 1, 1, 2**31, 64),
                "meta": torch.zeros(2, 1, 1, 1, 2, dtype=BF16).expand(2, 1, 1, 2**31, 2),
            },
            "table has 1 pages of 2147483648 slots; expected at most",
        ),
        ({"piece": 100}, "piece is 100; expected a multiple of 64"),
        ({"most_tokens": 0}, "most_tokens is 0, and q has 1 tokens"),
        ({"codes": torch.zeros(2, 1, 2, 9, 65, dtype=torch.uint8)[..., :64]}, "expected multiples of 16 elements"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    codes, meta, _ = filled("int8", [9], 2, 64, BF16)
    given = {"q": queries(1, 1, 2, 64, BF16), "codes": codes, "meta": meta, "positions": torch.tensor([[8]])} | change
    with pytest.raises(ValueError, match=message):
        attend_cache(**given)
