"""Writing a KV cache: the kernel in the interpreter against the codecs the CPU runs, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_tools import interpreted, vast
from mtplab.kernels import kv_reference
from mtplab.kernels.kv_layout import format_of
from mtplab.kernels.kv_write import write_kv
from mtplab.kernels.launch import interpreted as corrected
from mtplab.models.choice import KERNEL_STORAGE
from mtplab.quant.kv_codec import CODECS

pytestmark = interpreted

POLICIES = list(KERNEL_STORAGE)
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
short = {"ids": lambda x: str(x).removeprefix("torch.")}


def values(b: int, t: int, heads: int, d: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of many magnitudes; some constant, nearly so, zero, subnormal, or beyond what FP16 holds."""
    x = torch.randn(b * t * heads, d, generator=torch.Generator().manual_seed(t * 1000 + d))
    x *= 10 ** torch.linspace(-8, 8, len(x))[:, None]
    for at, row in enumerate((0.0, 3.0, -1e-40, 1e-40, 7e4, 100 + torch.rand(d) * 1e-6, torch.rand(d) * 1e-42)):
        if at < len(x):
            x[-at - 1] = row
    if len(x) > 9:
        x[8, 0], x[9, :2] = 448, torch.tensor([57344.0, -57344.0])
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).view(b, t, heads, d).to(dtype)


def cache(policy, pages, heads, page_size, d, dtype=torch.float32, meta_dtype=torch.bfloat16):
    """Codes and meta of 0x7F in every byte."""
    codec = CODECS[policy]
    shape = (2, pages, heads, page_size)
    codes = torch.empty(*shape, codec.code_shape(d), dtype=codec.code_dtype(dtype))
    meta = torch.empty(*shape, 2, dtype=meta_dtype) if policy.startswith("int") else None
    for x in (codes, meta):
        x is not None and x.view(torch.uint8).fill_(0x7F)
    return codes, meta


def same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    """Equal bytes."""
    return (a is None and b is None) or torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check_write(policy, d, dtype, meta_dtype, b=2, t=3, heads=5, capacity=13):
    """Contiguous; the codecs say what each slot holds, and every other slot is as it was."""
    k, v = values(b, t, heads, d, dtype), values(b, t, heads, d, dtype).flip(3).neg()
    codes, meta = cache(policy, b, heads, capacity, d, dtype, meta_dtype)
    untouched = codes.clone(), None if meta is None else meta.clone()
    positions = (torch.arange(b) * 4)[:, None] + torch.arange(t)
    write_kv(k, v, codes, meta, positions)
    written = torch.zeros(b, capacity, dtype=torch.bool)
    written[torch.arange(b)[:, None], positions] = True
    for which, rows in enumerate((k, v)):
        expected, expected_meta = CODECS[policy].encode(rows, meta_dtype)
        for out, want, before in ((codes, expected, untouched[0]), (meta, expected_meta, untouched[1])):
            if out is not None:
                got, before = (x[which].view(torch.uint8).transpose(1, 2) for x in (out, before))
                assert same(got[written], want.flatten(0, 1)), f"{'KV'[which]} {out.dtype}"
                assert torch.equal(got[~written], before[~written]), "something else was written"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("d", [16, 32, 64, 80, 96, 112, 128, 192, 256])
def test_bits(policy, d):
    check_write(policy, d, torch.float32, torch.bfloat16)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", FLOATS, **short)
@pytest.mark.parametrize("meta_dtype", FLOATS, **short)
def test_dtypes(policy, dtype, meta_dtype):
    check_write(policy, 64, dtype, meta_dtype, b=3, t=7, heads=2, capacity=20)


@pytest.mark.parametrize("policy", ["none", "fp8_e4m3"])
def test_a_cast_goes_through_float32(policy):
    """A cache of another dtype than the rows."""
    k = values(1, 9, 2, 64, torch.bfloat16)
    codes, _ = cache(policy, 1, 2, 9, 64, torch.float16)
    write_kv(k, k, codes, None, torch.arange(9)[None])
    expected = k.float().clamp(-448, 448) if policy == "fp8_e4m3" else k.float()
    assert same(codes[0, 0].transpose(0, 1), expected[0].to(codes.dtype))


@pytest.mark.parametrize("policy", POLICIES)
def test_pages_in_any_order_and_strides(policy):
    """A pool laid out token by token, pages shared out at random, against the contiguous cache."""
    b, t, heads, d, page_size = 3, 40, 2, 64, 16
    k, v = (values(b, t, 2 * heads, d, torch.bfloat16)[:, :, i::2] for i in (0, 1))
    positions = torch.tensor([0, 7, 21])[:, None] + torch.arange(t)
    whole, whole_meta = cache(policy, b, heads, 64, d)
    write_kv(k, v, whole, whole_meta, positions)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(5))[: b * 4].view(b, 4).int()
    # [2, pages, page_size, h_kv, d'] in memory
    pool, pool_meta = (
        None if x is None else x.transpose(2, 3).contiguous().transpose(2, 3)
        for x in cache(policy, 20, heads, page_size, d)
    )
    write_kv(k, v, pool, pool_meta, positions, table)
    assert same(kv_reference.gather(pool, table, 64), whole)
    assert pool_meta is None or same(kv_reference.gather(pool_meta, table, 64), whole_meta)


def test_slots_that_lie_more_than_32_bits_apart():
    """Slot 8 begins 2^34 elements after slot 0 in the codes and 2^31 in meta, as in pools laid out token by token."""
    codes = vast(2, 1, 1, 9, 64, dtype=torch.uint8, stride=(64, 0, 128, 2**31, 1))
    meta = vast(2, 1, 1, 9, 2, dtype=torch.bfloat16, stride=(2, 0, 4, 2**28, 1))
    k = values(1, 2, 1, 64, torch.float32)
    v = -k
    write_kv(k, v, codes, meta, torch.tensor([[8, 1]]))
    for which, rows in enumerate((k, v)):
        expected, expected_meta = CODECS["int8"].encode(rows, torch.bfloat16)
        assert same(codes[which, 0, 0, [8, 1]], expected[0, :, 0])
        assert same(meta[which, 0, 0, [8, 1]], expected_meta[0, :, 0])
    assert not codes[:, 0, 0, 0].any() and not meta[:, 0, 0, 0].any()


def test_rows_that_begin_anywhere():
    k, positions = values(1, 3, 2, 64, torch.bfloat16), torch.arange(3)[None]
    codes, meta = cache("int8", 1, 2, 3, 64)
    write_kv(k, k, codes, meta, positions)
    wide = torch.zeros(1, 3, 2, 71, dtype=torch.bfloat16)
    wide[..., 3:67] = k
    other, other_meta = cache("int8", 1, 2, 3, 64)
    write_kv(wide[..., 3:67], k.transpose(2, 3).contiguous().transpose(2, 3), other, other_meta, positions)
    assert same(codes, other) and same(meta, other_meta)


def test_nothing_is_written_outside_the_cache():
    codes, meta = cache("int8", 4, 1, 8, 64)
    before, before_meta = codes.clone(), meta.clone()
    table = torch.tensor([[3, -1], [4, 1]], dtype=torch.int32)
    # negative, in a page that is not there (−1, 4), past the table, past 32 bits
    positions = torch.tensor([[-1, 9, 16, 2**32], [-(2**32), 3, 2**31 - 1, 2**62]])
    rows = torch.ones(2, 4, 1, 64)
    write_kv(rows, rows, codes, meta, positions, table)
    assert same(codes, before) and same(meta, before_meta)
    kv_reference.write(rows, rows, codes, meta, positions, table, format_of(codes, meta, 1, 64))
    assert same(codes, before) and same(meta, before_meta)
    positions[0, 0] = 5
    write_kv(rows, rows, codes, meta, positions, table)
    changed = (codes != before).any(-1).nonzero().tolist()
    assert changed == [[0, 3, 0, 5], [1, 3, 0, 5]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_in_their_row(policy, bad):
    """A NaN reads back as NaN, and −∞ makes an integer row NaN; whatever it is, it is what the codec makes of it."""
    k = torch.randn(1, 3, 1, 64)
    k[0, 1, 0, 7] = bad
    codes, meta = cache(policy, 1, 1, 3, 64)
    write_kv(k, k, codes, meta, torch.arange(3)[None])
    back = CODECS[policy].decode(codes, meta, torch.float32)[0, 0, 0]
    expected = CODECS[policy].decode(*CODECS[policy].encode(k, torch.bfloat16), torch.float32)[0, :, 0]
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)
    integer = policy.startswith("int")
    lost = bad != bad or (integer and bad < 0)
    assert back[[0, 2]].isfinite().all() and bool(back[1, 7].isnan()) == lost
    if integer and lost:
        assert back[1].isnan().all() and (codes[0, 0, 0, 1] == 0).all()


@pytest.fixture(params=[False, True], ids=["exact cast", "cast by way of FP16"])
def cast(request, monkeypatch):
    """Casts to FP8 as they should be, and as Triton has them on sm_89: float32 is first cut to FP16's mantissa."""
    if request.param:
        corrected()
        from triton.runtime import interpreter

        exact = interpreter._convert_float

        def cut(data, source, target, rounding):
            if source.is_fp32() and target.primitive_bitwidth == 8:
                data = (np.ascontiguousarray(data).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
            return exact(data, source, target, rounding)

        monkeypatch.setattr(interpreter, "_convert_float", cut)


@pytest.mark.parametrize("policy", ["fp8_e4m3", "fp8_e5m2"])
def test_every_fp8_code_and_every_tie(policy, cast):
    """Between two codes: the tie, which goes to the even one, a float32 less and a float32 more; and both zeros."""
    dtype = CODECS[policy].dtype
    numbers = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()
    numbers = numbers[numbers.isfinite()].unique()
    ties = (numbers[1:] + numbers[:-1]) / 2
    far = torch.tensor(float("inf"))
    x = torch.cat([numbers, ties, ties.nextafter(far), ties.nextafter(-far), torch.tensor([-0.0, -1e-30])])
    x = torch.cat([x, x.new_zeros(-len(x) % 64)]).view(1, -1, 1, 64)
    codes, _ = cache(policy, 1, 1, x.shape[1], 64)
    write_kv(x, x, codes, None, torch.arange(x.shape[1])[None])
    assert same(codes[0, 0, 0], x[0, :, 0].to(dtype)) and same(codes[1, 0, 0], codes[0, 0, 0])


def test_fp8_scales():
    k, v = torch.randn(1, 6, 2, 64) * 300, torch.randn(1, 6, 2, 64) / 300
    codes, _ = cache("fp8_e4m3", 1, 2, 6, 64)
    write_kv(k, v, codes, None, torch.arange(6)[None], k_scale=3.7, v_scale=0.011)
    for which, (rows, scale) in enumerate(((k, 3.7), (v, 0.011))):
        expected = (rows[0] / torch.tensor(scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert same(codes[which, 0].view(torch.uint8).transpose(0, 1), expected)


def test_the_reference_writes_the_same(monkeypatch):
    k, positions = values(2, 3, 2, 64, torch.float32), torch.tensor([[3, 4, 5], [0, 1, 2]])
    for policy in POLICIES:
        ours, theirs = cache(policy, 2, 2, 6, 64), cache(policy, 2, 2, 6, 64)
        monkeypatch.setenv("MTPLAB_KERNELS", "triton")
        write_kv(k, -k, *ours, positions)
        monkeypatch.setenv("MTPLAB_KERNELS", "reference")
        write_kv(k, -k, *theirs, positions)
        assert same(ours[0], theirs[0]) and same(ours[1], theirs[1]), policy


def test_no_rows():
    codes, meta = cache("int8", 2, 1, 4, 64)
    write_kv(torch.ones(2, 0, 1, 64), torch.ones(2, 0, 1, 64), codes, meta, torch.zeros(2, 0, dtype=torch.long))
    assert (codes == 0x7F).all()


ROWS, PLACES = torch.ones(1, 2, 1, 64), torch.arange(2)[None]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"k": ROWS[0]}, r"k has shape \[2, 1, 64\]; expected \[any, any, any, any\]"),
        ({"v": ROWS.half()}, "v is torch.float16; expected torch.float32"),
        ({"codes": torch.zeros(2, 1, 2, 4, 64, dtype=torch.uint8)}, r"codes has .*expected \[2, any, 1, any, 64\]"),
        ({"codes": torch.zeros(2, 1, 1, 4, 48, dtype=torch.uint8)}, r"expected \[2, any, 1, any, 64\]"),
        ({"codes": torch.zeros(2, 1, 1, 4, 64, dtype=torch.int8)}, "codes is torch.int8"),
        ({"codes": torch.zeros(2, 1, 1, 4, 128, dtype=torch.uint8)[..., ::2]}, "expected 1 in the last dimension"),
        ({"codes": torch.zeros(2, 1, 1, 4, 64)}, "meta was given with torch.float32 codes"),
        ({"codes": torch.zeros(2, 3, 1, 4, 64), "meta": None}, "codes have 3 pages for 1 sequences and no table"),
        ({"meta": None}, "meta is missing; int8 codes need"),
        ({"meta": torch.zeros(2, 1, 1, 3, 2)}, r"meta has shape \[2, 1, 1, 3, 2\]"),
        ({"positions": PLACES.int()}, "positions is torch.int32"),
        ({"table": PLACES}, "table is torch.int64; expected torch.int32"),
        ({"table": torch.zeros(1, 0, dtype=torch.int32)}, "expected rows of pages"),
        ({"k_scale": 2.0}, "k_scale is 2.0 with a cache of int8"),
        ({"codes": torch.zeros(2, 1, 1, 4, 64).to(torch.float8_e5m2), "meta": None, "v_scale": 0.0}, "v_scale is 0.0"),
        ({"k": torch.ones(1, 2, 1, 34), "v": torch.ones(1, 2, 1, 34), "codes": torch.zeros(2, 1, 1, 4, 34).byte()},
         "head_dim is 34; expected a multiple of 16"),
        ({"codes": torch.zeros(2, 1, 1, 4, 67, dtype=torch.uint8)[..., :64]}, "expected multiples of 8 elements"),
        ({"codes": torch.zeros(2, 1, 1, 4, 64).to(torch.float8_e5m2), "meta": None, "k_scale": 1e999}, "k_scale is"),
        ({"k": torch.ones(1, 2, 1, 33), "v": torch.ones(1, 2, 1, 33)}, "head_dim is 33; expected an even number"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(change, message):
    codes, meta = cache("int8", 1, 1, 4, 64)
    given = {"k": ROWS, "v": ROWS, "codes": codes, "meta": meta, "positions": PLACES} | change
    with pytest.raises(ValueError, match=message):
        write_kv(**given)


def test_pages_without_slots_are_refused():
    """A kernel would divide by their number."""
    with pytest.raises(ValueError, match="at least one slot"):
        format_of(torch.zeros(2, 3, 1, 0, 16), None, 1, 16)
