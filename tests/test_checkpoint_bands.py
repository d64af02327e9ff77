"""Values a band of rows at a time: the same as all at once, whatever the layout."""

import math

import pytest
import torch

from mtplab.checkpoint import open_checkpoint, values
from tests.checkpoint_builders import CHECKPOINTS


@pytest.mark.parametrize("multiple", [1, 5])
@pytest.mark.parametrize("band", [1, 700, 1 << 20])
@pytest.mark.parametrize(
    "name", ["ds-v3-ragged-mtp", "ct-fp8-mixed-groups", "mo-fp8-pb-wo-ragged", "torchao-fp8-wo", "hand-fnuz"]
)
def test_bands_are_the_values(monkeypatch: pytest.MonkeyPatch, name: str, band: int, multiple: int) -> None:
    monkeypatch.setattr(values, "_BAND_BYTES", band)
    ckpt = open_checkpoint(CHECKPOINTS / name / "ckpt")
    for module in ckpt.plan().modules:
        name = f"{module.name}.weight" if f"{module.name}.weight" in ckpt.tensors else module.name
        whole = ckpt.dequantize(name)
        rows = math.prod(whole.shape[:-1])
        found = torch.full((rows, *whole.shape[-1:]), math.nan)
        last = 0
        for start, stop, part in ckpt.bands(name, multiple):
            assert start == last and start % multiple == 0
            found[start:stop], last = part, stop
        assert last == rows
        assert torch.equal(found.view(whole.shape), whole)
