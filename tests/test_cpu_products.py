"""Weights packed for the CPU: which packing a weight gets, the product's values, its rows, and the compiled form."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from mtplab.quant import cpu_products
from mtplab.quant.cpu_products import HalfProduct, PackedProduct, packed_product

torch.manual_seed(0)
BF16 = (torch.randn(130, 200) * 0.05).bfloat16().float()


def product_of(weight, x):
    return x.double() @ weight.double().t()


@pytest.mark.parametrize("scale", [2.0**-40, 1.0, 2.0**40])
def test_bf16_weights_are_held_as_fp16_whatever_their_scale(scale):
    weight = BF16 * scale
    product = packed_product(weight)
    assert isinstance(product, HalfProduct)
    assert torch.equal(product.dense(), weight)
    x = torch.randn(5, 200)
    torch.testing.assert_close(product(x).double(), product_of(weight, x), rtol=1e-5, atol=1e-5 * scale)


def test_tiny_bf16_weights_beside_large_ones_are_held_exactly():
    weight = BF16.clone()
    weight[3, 7] = 2.0**-24
    assert torch.equal(HalfProduct.of(weight).dense(), weight)


@pytest.mark.parametrize("value", [2.0**-60, 1 + 2.0**-12, float("inf"), float("nan"), 2.0**100])
def test_weights_that_fp16_would_round_are_not(value):
    weight = BF16.clone()
    weight[100, 7] = value
    assert HalfProduct.of(weight) is None
    product = packed_product(weight)
    assert isinstance(product, PackedProduct)
    assert torch.equal(product.dense().nan_to_num(9), weight.nan_to_num(9))


def test_a_zero_weight():
    zero = torch.zeros(3, 5)
    assert torch.equal(packed_product(zero)(torch.ones(2, 5)), torch.zeros(2, 3))


@pytest.mark.parametrize("kind", [HalfProduct.of, PackedProduct])
@pytest.mark.parametrize("n, k", [(772, 256), (256, 512), (7, 33), (130, 1000)])
def test_a_row_does_not_depend_on_the_rows_beside_it(kind, n, k):
    product = kind((torch.randn(n, k) / 16).bfloat16().float())
    x, residual = torch.randn(1024, k), torch.randn(1024, n)
    whole, added = product(x), product.add_to(residual, x)
    for m in (8, 16, 24, 40, 64, 256):
        assert torch.equal(product(x[:m]), whole[:m]), m
        assert torch.equal(product.add_to(residual[:m], x[:m]), added[:m]), m


@pytest.mark.xdist_group("torch.compile")
@pytest.mark.parametrize("operator", [True, False], ids=["operator", "without the operator"])
def test_half_compiled(monkeypatch, operator):
    """Also where torch no longer has the product as an operator of tensors."""
    if not operator:
        monkeypatch.setattr(cpu_products, "_has_compiled_half", lambda: False)
    product = HalfProduct.of(BF16)
    product.prepare_compiled()
    assert (product._compiled is not None) is operator
    torch.compiler.reset()
    compiled = torch.compile(lambda residual, x: product.add_to(residual, x) + product(x))
    residual, x = torch.randn(3, 130), torch.randn(3, 200)
    expected = residual.double() + 2 * product_of(BF16, x)
    torch.testing.assert_close(compiled(residual, x).double(), expected, rtol=1e-5, atol=1e-5)


def test_deprecation_is_not_told_to_the_user():
    """FBGEMM's operator says, once a process, that it may go; the user can do nothing about that."""
    code = (
        "import torch; from mtplab.quant.cpu_products import HalfProduct, _has_compiled_half\n"
        "HalfProduct.of(torch.ones(8, 8)).prepare_compiled(); print(_has_compiled_half())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("True\n", "")
