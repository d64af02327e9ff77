"""What tests of formats share: values, their products by the definition, and one check of a whole checkpoint.

The products are formed here, element by element in double precision, and use nothing of mtplab.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.checkpoint import Checkpoint
from mtplab.errors import CheckpointError
from tests.checkpoint_builders import E4M3, write_checkpoint

E8M0, E5M2 = torch.float8_e8m0fnu, torch.float8_e5m2
Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
EXPERTS = "model.layers.0.mlp.experts"


def codes(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return (torch.randn(shape) * 60).to(dtype)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.rand(shape) * 0.05 + 0.001).to(dtype)


def exponents(*shape: int) -> torch.Tensor:
    """Exponent bytes as UE8M0 has them, and the powers of two that they mean, from the definition."""
    return torch.randint(100, 140, shape, dtype=torch.uint8)


def powers(exponent: torch.Tensor) -> torch.Tensor:
    return torch.tensor([2.0 ** (int(byte) - 127) for byte in exponent.flatten()]).view(exponent.shape)


def product(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """code * scale in double precision, rounded once; `scale` is broadcast as torch broadcasts."""
    return (weight.double() * scale.double()).float()


def spread(scale: torch.Tensor, block: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    """A grid of scales as one value an element."""
    for axis, size in enumerate(block):
        scale = scale.repeat_interleave(size, axis)
    return scale[tuple(slice(size) for size in shape)]


def check(folder: Path, tensors: dict, quantization: Any, expected: dict, config: dict | None = None) -> Checkpoint:
    """Write, open, compare every expected value bit for bit, and plan what is expected as FP8."""
    config = {"mtp_num_hidden_layers": 0, **(config or {})}
    ckpt = open_checkpoint(write_checkpoint(folder, tensors, quantization, config=config))
    for name, values in expected.items():
        assert torch.equal(ckpt.dequantize(name), values), name
        assert torch.equal(ckpt.scaled(name).dequantize(), values), name
        bands = torch.cat([band.clone() for _, _, band in ckpt.bands(name)])
        assert torch.equal(bands.view(values.shape), values), name
    if not any(problem.severity == "error" for problem in ckpt.problems):
        planned = {module.name for module in ckpt.plan().modules if module.weight == "fp8"}
        assert planned == {name.removesuffix(".weight") for name in expected}
    return ckpt


def errors(ckpt: Checkpoint) -> dict[str, str]:
    """The message about each tensor that cannot be used; reading it must say the same, and planning be refused."""
    found = {problem.tensor: problem.message for problem in ckpt.problems if problem.severity == "error"}
    for name, message in found.items():
        with pytest.raises(CheckpointError) as caught:
            ckpt.dequantize(name)
        assert str(caught.value) == message
    if found:
        with pytest.raises(CheckpointError):
            ckpt.plan()
    return found
