"""Figures and panel of FP8 numerics: what they say in words is what was measured."""

from __future__ import annotations

import pytest
import torch

from mtplab.report import GemmPanel, granularity_errors, number_errors, roofline
from mtplab.study.gpus import SHAPES, gpu
from mtplab.study.granularity import matrix_errors, with_outliers
from mtplab.study.roofline import roof

W = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


def test_a_number_keeps_its_bits_for_fifteen_octaves():
    """E4M3 ends at 448 and is subnormal below 2^-6: log2(448 · 2^6) = 14.8; 2^-10 becomes zero."""
    alt = number_errors().alt
    assert "14.8 octaves" in alt and "from 18.8 octaves" in alt and "5.9 %" in alt
    x = torch.linspace(1, 2, 1001)
    assert float(((x.to(torch.float8_e4m3fn).float() - x) / x).abs().max()) == pytest.approx(1 / 17, rel=0.02)


@pytest.mark.parametrize("measure", ["relative", "worst_row", "worst_column", "damaged_columns", "flushed"])
def test_errors_are_in_the_alt_text(measure):
    errors = matrix_errors(with_outliers(W, 1, 18))
    picture = granularity_errors({"<b>spoilt</b>": errors}, measure)
    assert f"tensor {100 * getattr(errors[0], measure):.2f} %" in picture.alt
    assert picture.png.startswith(b"\x89PNG")


def test_no_error_at_all_can_be_drawn():
    assert granularity_errors({"zero": matrix_errors(torch.zeros(4, 4))}).png


def test_the_roof_says_where_it_turns():
    shape, card = SHAPES[0], gpu("H200 SXM")
    alt = roofline(shape, card, 16).alt
    ratio = roof(shape, 16, card, "bf16").seconds / roof(shape, 16, card, "fp8").seconds
    assert "FP8 is bound by memory below m = " in alt and f"{ratio:.2f} times as fast" in alt


def test_the_panel_follows_its_controls(bundled):
    panel = GemmPanel(bundled)
    assert panel.state == "done" and "as stored" in panel.table.value and panel.roof.value
    before = panel.figure.value
    controls = panel._widgets
    controls["columns"].value, controls["octaves"].value, controls["measure"].value = 2, 16, "damaged_columns"
    assert panel.state == "done" and panel.figure.value != before
    assert "2 input channels × 2^16" in panel.table.value
    controls["module"].value = "mtp.fc"
    assert panel.state == "done" and panel.error is None
