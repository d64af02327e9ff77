"""Figures, tables and panel of advice: what they say in words is what was worked out, and the panel keeps up."""

from __future__ import annotations

import time

import pytest

from mtplab.report import (
    AdvisePanel,
    advice_table,
    best_depth_map,
    lengths_by_depth,
    published_table,
    round_parts,
    speedup_by_depth,
)
from mtplab.study.advice import Cell, advise, best_map
from mtplab.study.cost import BINDS, Setting
from mtplab.study.curve import Curve
from mtplab.study.gpus import gpu
from mtplab.study.model_sizes import weights
from mtplab.study.models_catalogue import model
from mtplab.study.published import ACCEPTANCE, compare

SETTING = Setting(model("Qwen3.5-27B"), weights("fp8"), gpu("H200"))
CURVE = Curve.of_lengths([1.9, 2.7, 3.3])


def test_speed_ups_are_in_the_alt_text():
    found = {f"batch {batch} <b>": advise(SETTING, CURVE, batch) for batch in (1, 32)}
    picture = speedup_by_depth(found)
    for label, advice in found.items():
        assert f"{label}: 1.00 at 0, {advice.lines[1].speedup:.2f} at 1" in picture.alt
    assert picture.png.startswith(b"\x89PNG") and "&lt;b&gt;" in picture.to_html()
    line = next(line for line in picture.figure.axes[0].lines if line.get_linestyle() == "--")
    assert set(line.get_ydata()) == {1}  # where drafting breaks even
    tight = advise(Setting(SETTING.sizes, weights("bf16"), gpu("RTX 5090")), CURVE)
    assert "1.00 at 0 (does not fit)" in speedup_by_depth(tight).alt


def test_the_map_has_a_number_in_every_cell():
    cells = best_map(SETTING, CURVE, (1, 64, 1024), (1024, 65536))
    picture = best_depth_map(cells, "$x_{1}$")
    shown = [text.get_text() for text in picture.figure.axes[0].texts]
    expected = ["does not fit" if c.depth is None else f"{c.depth} ({c.speedup:.2f}×)" for line in cells for c in line]
    assert shown == expected and "does not fit" in shown and picture.png
    assert f"batch 1, by context 1024: {cells[0][0].depth} ({cells[0][0].speedup:.2f} times)" in picture.alt


def test_a_maps_text_can_be_read_on_its_colour():
    """Contrast of at least 4.5 : 1 (WCAG) in every cell, whatever the depth."""
    cells = [[Cell(1, depth + 1, depth, 1.0) for depth in range(9)]]
    axes = best_depth_map(cells).figure.axes[0]
    for box, text in zip(axes.patches, axes.texts, strict=True):
        dark, light = sorted((_luminance(box.get_facecolor()), _luminance(_rgb(text.get_color()))))
        assert (light + 0.05) / (dark + 0.05) >= 4.5, text.get_text()


def _rgb(colour):
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))


def _luminance(rgb):
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in rgb[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_parts_add_up_to_the_round():
    advice = advise(SETTING, CURVE, 64)
    picture = round_parts(advice)
    bars = picture.figure.axes[0].patches
    for depth, line in enumerate(advice.lines):
        stacked = sum(bar.get_height() for bar in bars if round(bar.get_x() + bar.get_width() / 2) == depth)
        assert stacked == pytest.approx(1e3 * line.cost.seconds, rel=0.02)  # parts below half a percent are left out
    assert f"{BINDS['state']} {1e3 * advice.lines[-1].cost.parts['state']:.2f}" in picture.alt


def test_lengths_are_in_the_alt_text():
    picture = lengths_by_depth({"mine": CURVE, **ACCEPTANCE})
    assert "mine: 1.00 at 0, 1.90 at 1, 2.70 at 2, 3.30 at 3" in picture.alt and picture.png


def test_published_acceptance_names_its_source():
    assert all("https://" in curve.source and len(curve.depths) > 4 for curve in ACCEPTANCE.values())


def test_tables():
    advice = advise(SETTING, CURVE, 8)
    found = advice_table(advice)
    assert found.count("<tr>") == 5 and f"{advice.lines[3].tokens_per_second:.0f}" in found
    compared = compare()
    table = published_table(compared)
    assert table.count("<tr>") == len(compared) + 1 and f"{100 * compared[0].deviation:+.0f} %" in table
    assert table.count("explained") == sum(bool(one.point.why) for one in compared)


def test_the_panel_follows_its_controls():
    panel = AdvisePanel({"mine": CURVE})
    controls = panel._widgets
    assert panel.state == "done" and controls["curve"].value == "mine"
    assert [line.depth for line in panel.result[0].lines] == [0, 1, 2, 3]
    assert "pays most" in panel.advice.value and "Best draft" not in panel.table.value
    before = panel.figure.value
    controls["curve"].value = ""
    controls["share"].value = 0.3
    assert panel.figure.value != before and panel.result[0].curve.depths[-1] == 8
    controls["model"].value, controls["gpu"].value = "Qwen3.5-35B-A3B", "L40S"
    controls["batch"].value = 16
    assert "MTP loses here" in panel.advice.value
    # 16 heads on 16 GPUs is as many as there are; 24 cannot be shared by 16
    controls["tp"].value = 16
    assert panel.state == "done"
    controls["model"].value = "Qwen3.5-27B"
    assert panel.state == "failed" and "expected a divisor of the 24 attention heads" in panel.status.value
    controls["tp"].value = 8
    assert panel.state == "done"


@pytest.mark.serial
def test_the_panel_follows_within_a_quarter_of_a_second():
    """Processor time: what the machine does besides is not the panel's."""
    panel = AdvisePanel()
    took = []
    for batch in (1, 16, 64, 256):
        start = time.process_time()
        panel._widgets["batch"].value = batch
        took.append(time.process_time() - start)
    assert sorted(took)[1] < 0.25, took
