"""What a weight is while it is loaded: written once to where it stays, with the values of reading it whole."""

from __future__ import annotations

import torch

from mtplab import load_model, open_checkpoint
from mtplab.checkpoint import values
from mtplab.quant.block import BLOCK, ScaledTensor, Unread, quantize_block
from mtplab.quant.cpu_products import HalfProduct, packed_product
from mtplab.quant.products import make_product
from tests.tiny import write_tiny

CPU = torch.device("cpu")
SIZES = {"hidden_size": 160, "intermediate_size": 300, "vocab_size": 40}


def test_weights_quantised_band_by_band_are_those_quantised_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(values, "_BAND_BYTES", 1)  # a block of rows at a time
    folder = write_tiny(tmp_path, **SIZES)
    model = load_model(folder, exclude="none", model_format="fp8")
    ckpt = open_checkpoint(folder)
    for linear in model.target.linears():
        for name, held in zip(linear.names, linear.weights(), strict=True):
            assert torch.equal(held, quantize_block(ckpt.dequantize(f"{name}.weight")).dequantize()), name


def test_weights_read_band_by_band_are_those_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(values, "_BAND_BYTES", 1)
    folder = write_tiny(tmp_path, **SIZES)
    model, ckpt = load_model(folder, dtype="bfloat16"), open_checkpoint(folder)
    assert torch.equal(model.target.embedding, ckpt.read("model.embed_tokens.weight"))
    for linear in (*model.target.linears(), *model.draft.linears()):
        for name, held in zip(linear.names, linear.weights(), strict=True):
            assert torch.equal(held, ckpt.read(f"{name}.weight")), name


def test_parts_of_a_product_are_written_below_each_other():
    g = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(n, 256, generator=g) for n in (128, 3, 7))
    codes = quantize_block(a, BLOCK)
    unread = Unread((3, 256), lambda out: out.copy_(b))
    assert torch.equal(
        make_product([codes, unread, c], torch.bfloat16, CPU).dense(),
        torch.cat([codes.dequantize(), b, c]).bfloat16(),
    )
    assert isinstance(codes, ScaledTensor)


def test_only_a_weight_of_its_own_is_changed_by_packing():
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    kept = weight.clone()
    shared = make_product([weight], torch.float32, CPU)  # as an embedding is that the head shares
    assert torch.equal(weight, kept) and torch.equal(shared.dense(), kept)
    if HalfProduct.of(weight) is not None:
        assert torch.equal(packed_product(weight, own=True).dense(), kept)
        assert not torch.equal(weight, kept)
    uneven = kept.clone()
    uneven[0, 0], uneven[5, 3] = 1e30, 1e-3  # no FP16 has both
    before = uneven.clone()
    assert HalfProduct.of(uneven, own=True) is None
    assert torch.equal(uneven, before)
