"""Figures: what is drawn, what is said of it, and that odd input neither fails nor misleads."""

from __future__ import annotations

import io
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from PIL import Image

from mtplab.errors import ConfigError
from mtplab.report import (
    Picture,
    acceptance_by_depth,
    acceptance_by_position,
    break_even,
    bytes_by_part,
    checkpoint_map,
)
from mtplab.report.palette import DTYPE_COLOURS, DTYPE_INK, POLICY_COLOURS, SERIES, policy_colours
from mtplab.report.rows import as_records, group_series
from mtplab.study.interval import length_error
from tests.report_fakes import module, plan, row, rows


def axes_of(picture):
    return picture.figure.get_axes()


def lines_of(axes):
    """(colour, dash, x, y) of each drawn line."""
    return [
        (line.get_color(), line.get_linestyle(), list(line.get_xdata()), list(line.get_ydata()))
        for line in axes.get_lines()
        if len(line.get_xdata())
    ]


def test_one_line_per_policy_and_exclusion_set():
    study = rows(depths=range(4), policies=("none", "int8"), excludes=("published", "*"))
    axes = axes_of(acceptance_by_depth(study))[0]
    lines = lines_of(axes)
    assert len(lines) == 4
    assert {colour for colour, *_ in lines} == {POLICY_COLOURS["unquantised"], POLICY_COLOURS["int8"]}
    expected = [r.acceptance_length for r in study if r.quant_policy == "int8" and r.exclude_label == "*"]
    assert any(np.allclose(y, expected) for *_, y in lines)


def test_points_lie_at_their_depth_within_the_shift_that_sets_equal_ones_apart():
    policies = ("none", "int8", "int4", "fp8_e4m3", "fp8_e5m2")
    axes = axes_of(acceptance_by_depth(rows(policies=policies)))[0]
    for _, _, x, _ in lines_of(axes):
        assert np.all(np.abs(np.array(x) - np.arange(5)) < 0.2)
        assert x[0] == 0, "plain decoding is the same in every setting"
    shifts = {round(x[1], 6) for _, _, x, _ in lines_of(axes)}
    assert len(shifts) == 10, "no two lines lie exactly on each other"


def test_axes_have_units():
    for picture in (acceptance_by_depth(rows()), acceptance_by_position(rows()), bytes_by_part(plan())):
        labels = [text for axes in axes_of(picture) for text in (axes.get_xlabel(), axes.get_ylabel()) if text]
        assert labels and any(unit in " ".join(labels) for unit in ("tokens per round", "%", "kB"))


def test_per_position_panels_show_unconditional_and_conditional():
    study = [row(depth=3)]
    left, right = axes_of(acceptance_by_position(study))
    assert np.allclose(lines_of(left)[0][3], [100 * share for share in study[0].per_position])
    assert np.allclose(lines_of(right)[0][3], [100 * share for share in study[0].conditional])


def test_a_position_no_round_reached_is_a_gap_and_not_a_zero():
    changed = row(depth=2).model_dump(by_alias=True) | {"conditional": [0.5, None]}
    _, right = axes_of(acceptance_by_position([changed]))
    values = lines_of(right)[0][3]
    assert values[0] == 50 and np.isnan(values[1])


def test_only_one_temperature_is_drawn_at_a_time():
    study = rows(temperatures=(0.0, 0.7))
    greedy, sampled = acceptance_by_depth(study), acceptance_by_depth(study, temperature=0.7)
    assert "greedy" in axes_of(greedy)[0].get_title(loc="left")
    assert "0.7" in axes_of(sampled)[0].get_title(loc="left")
    assert len(lines_of(axes_of(greedy)[0])) == len(lines_of(axes_of(sampled)[0])) == 6
    assert lines_of(axes_of(greedy)[0])[0][3] != lines_of(axes_of(sampled)[0])[0][3]


def test_lines_measured_differently_do_not_become_one():
    study = [*rows(policies=("none",)), *(r.model_copy(update={"method": "trace"}) for r in rows(policies=("none",)))]
    series = group_series(as_records(study))
    assert len(series) == 4 and any("trace" in name for name in series)
    assert all(len(found) == 5 for found in series.values())


@pytest.mark.parametrize("draw", [acceptance_by_depth, acceptance_by_position])
def test_no_rows_and_failed_rows_say_so(draw):
    failed = row(error="RuntimeError: out of memory", acceptance_length=None)
    for study in ([], [failed]):
        picture = draw(study)
        assert "no " in picture.alt
        assert picture.png.startswith(b"\x89PNG")


def test_alt_text_carries_the_numbers():
    alt = acceptance_by_depth([row(depth=d) for d in (0, 3)]).alt
    there = row(depth=3)
    assert f"{there.acceptance_length:.2f} ± {length_error(there):.2f} at depth 3" in alt


def test_bars_are_the_intervals_of_the_rows():
    study = rows(depths=(0, 2, 4), policies=("none", "int8"), excludes=("published",))
    axes = axes_of(acceptance_by_depth(study))[0]
    bars = [segment for each in axes.collections for segment in each.get_segments()]
    drafted = [r for r in study if r.depth]
    assert len(bars) == len(drafted), "none at depth 0, where nothing is drawn by chance"
    for (_, low), (_, high) in bars:
        assert any(
            np.allclose([low, high], [r.acceptance_length - length_error(r), r.acceptance_length + length_error(r)])
            for r in drafted
        )


def test_figures_of_one_study_have_titles_of_their_own():
    study = rows(excludes=("published", "*", "none"))
    by_cache = [r for r in study if r.exclude_label == "published"]
    by_exclusions = [r for r in study if r.quant_policy == "none"]
    titles = [axes_of(acceptance_by_depth(found))[0].get_title(loc="left") for found in (by_cache, by_exclusions)]
    assert "exclusions: published" in titles[0] and "KV cache: unquantised" in titles[1]
    assert len(set(titles)) == 2


def test_colour_says_the_cache_and_marker_and_dash_the_exclusions():
    study = rows(policies=("none", "int8"), excludes=("published", "*"))
    lines = [line for line in axes_of(acceptance_by_depth(study))[0].get_lines() if len(line.get_xdata())]
    looks = [(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines]
    colours, markers, dashes = (list(each) for each in zip(*looks, strict=True))
    assert colours == [POLICY_COLOURS["unquantised"], POLICY_COLOURS["int8"]] * 2
    assert markers == ["o", "o", "s", "s"] and dashes == ["-", "-", "--", "--"]


def test_a_share_over_few_rounds_says_how_few():
    study = [row(depth=8, policy="int4", rounds=200)]
    picture = acceptance_by_position(study)
    _, right = axes_of(picture)
    reached = [200, *(round(200 * share) for share in study[0].per_position[:-1])]
    assert [label.get_text() for label in right.get_xticklabels()] == [f"{j}\n{n}" for j, n in enumerate(reached, 1)]
    hollow = right.get_lines()[1]
    assert list(hollow.get_xdata()) == [j for j, n in enumerate(reached, 1) if n < 50] and len(hollow.get_xdata()) > 2
    assert f"of which {reached[-1]} got to draft 8" in picture.alt


def timed(depths=range(9), policies=("none", "int8", "int4")):
    """Rows in which a round costs 1 + 0.9 k times one at depth 0."""
    found = rows(depths=depths, policies=policies, excludes=("published",))
    return [r.model_copy(update={"seconds": r.rounds * (1 + 0.9 * r.depth) / 1000}) for r in found]


def test_break_even_draws_what_a_round_gives_and_takes():
    study = timed()
    study[13] = study[13].model_copy(update={"seconds": study[13].seconds * 20})
    picture = break_even(study)
    axes = axes_of(picture)[0]
    assert len(axes_of(picture)) == 1
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["takes: rounds at depth 0"] == pytest.approx([1 + 0.9 * k for k in range(9)])
    assert drawn["left out: 1 timings of a busy machine"]
    assert any(np.allclose(y, [r.acceptance_length for r in study[:9]]) for y in drawn.values() if len(y) == 9)
    assert f"depth 8 gives {study[8].acceptance_length:.2f} and takes 8.20" in picture.alt
    assert "1 timings that break the trend are left out" in picture.alt


def test_break_even_at_another_batch_has_a_chart_of_its_own():
    cheap = [r.model_copy(update={"n_prompts": 1, "seconds": r.rounds * (1 + 0.1 * r.depth)}) for r in timed()]
    picture = break_even(timed(), timed=cheap)
    first, second = axes_of(picture)
    assert (first.get_title(loc="left"), second.get_title(loc="left")) == ("batch 4", "batch 1")
    takes = next(list(line.get_ydata()) for line in second.get_lines() if str(line.get_label()).startswith("takes"))
    assert takes == pytest.approx([1 + 0.1 * k for k in range(9)])
    assert "batch 1: depth 0 gives 1.00 and takes 1.00" in picture.alt


def test_break_even_without_plain_decoding_says_so():
    for study in ([], timed(depths=(1, 2))):
        assert "no timed rows with and without drafts; sweep with method='run'" in break_even(study).alt


def map_cells(axes):
    """(text, colour) of every cell, row by row; each text lies in the middle of a square."""
    squares, texts = {}, {}
    for drawn in axes.collections:
        if isinstance(drawn, PolyCollection):
            for path in drawn.get_paths():
                squares[tuple(path.vertices[:4].mean(0))] = to_hex(drawn.get_facecolor()[0]).upper()
        else:
            texts |= {tuple(place): drawn.get_gid() for place in drawn.get_offsets()}
    assert texts.keys() == squares.keys()
    return [(texts[at], squares[at]) for at in sorted(texts, key=lambda at: at[::-1])]


def test_map_colours_every_module_by_its_dtype_and_writes_the_bits():
    picture = checkpoint_map(plan())
    axes = axes_of(picture)[0]
    cells = map_cells(axes)
    assert len(cells) == len(plan().modules)
    assert cells.count(("8·", DTYPE_COLOURS["fp8"])) == 5 and cells.count(("16", DTYPE_COLOURS["bf16"])) == 4
    assert "draft: 1 FP8, 1 BF16" in picture.alt
    rows_shown = [label.get_text() for label in axes.get_yticklabels()]
    assert rows_shown == ["outside the layers", "layer 0", "layer 1", "draft layer 0", "draft, outside"]


def test_layers_held_alike_share_a_row_in_a_deep_model():
    modules = []
    for layer in range(40):
        kind = "self_attn.q_proj" if layer % 4 == 3 else "linear_attn.out_proj"
        modules += [module(f"model.layers.{layer}.{kind}"), module(f"model.layers.{layer}.mlp.up_proj")]
    modules[20].weight, modules[20].activation = "bf16", "none"  # layer 10 is not like its neighbours
    axes = axes_of(checkpoint_map(SimpleNamespace(modules=modules)))[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["layers 0–2, 4–6, 8–9 … (29)", "layers 3, 7, 11 … (10)", "layer 10"]
    assert [text for text, _ in map_cells(axes)] == ["8·", "8·", "8·", "8·", "16", "8·"]


def test_experts_share_a_cell_that_says_when_they_differ():
    modules = [module(f"model.layers.0.mlp.experts.{e}.up_proj") for e in range(3)]
    alike = axes_of(checkpoint_map(SimpleNamespace(modules=modules)))[0]
    assert [text for text, _ in map_cells(alike)] == ["8·"]
    assert [label.get_text() for label in alike.get_xticklabels()] == ["mlp.experts.*.up_proj"]
    modules[1].weight, modules[1].activation = "bf16", "none"
    differ = axes_of(checkpoint_map(SimpleNamespace(modules=modules)))[0]
    assert [text for text, _ in map_cells(differ)] == ["8/16"]


def test_bytes_add_up():
    picture = bytes_by_part(plan())
    axes = axes_of(picture)[0]
    drawn = sum(bar.get_width() for bar in axes.patches)
    assert drawn == pytest.approx(sum(each.nbytes for each in plan().modules) / 1e3)
    assert "target" in picture.alt and "kB" in picture.alt


def test_names_from_a_checkpoint_cannot_start_a_formula_or_turn_the_text():
    hostile = module("model.layers.0.$\\frac{1}$\u202e\x1b[31m<script>")
    picture = checkpoint_map(plan(hostile))
    assert picture.png  # matplotlib would fail on the formula
    label = next(text for text in (t.get_text() for t in axes_of(picture)[0].get_xticklabels()) if "frac" in text)
    assert "\u202e" not in label and "\x1b" not in label


def test_figures_can_be_drawn_in_threads():
    pictures = {}

    def draw(name):
        pictures[name] = acceptance_by_depth(rows()).png

    threads = [threading.Thread(target=draw, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(pictures.values())) == 1 and len(pictures) == 3


def test_picture_shows_as_png_with_alt_text_on_opaque_paper():
    picture = acceptance_by_depth(rows())
    data, metadata = picture._repr_mimebundle_()
    assert metadata["image/png"]["alt"] == picture.alt and picture.alt in data["text/plain"]
    image = Image.open(io.BytesIO(data["image/png"])).convert("RGBA")
    assert image.size == (metadata["image/png"]["width"], metadata["image/png"]["height"])
    assert image.getextrema()[3] == (255, 255) and image.getpixel((2, 2)) == (255, 255, 255, 255)
    assert len(data["image/png"]) < 100_000


def test_a_picture_without_alt_text_is_refused():
    with pytest.raises(ConfigError, match="alt text"):
        Picture(Figure(), " ")


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.1)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_numbers_in_coloured_cells_can_be_read():
    for name, colour in DTYPE_COLOURS.items():
        low, high = sorted((luminance(colour), luminance(DTYPE_INK[name])))
        assert (high + 0.05) / (low + 0.05) >= 4.5, name


def test_a_policy_keeps_its_colour_whatever_else_is_drawn():
    for policies in (["unquantised", "int8"], ["int8"], ["int8 (draft unquantised)", "int8", "unquantised"]):
        colours = policy_colours(policies)
        assert all(colours[name] == POLICY_COLOURS[name] for name in policies if name in POLICY_COLOURS)
        assert len(set(colours.values())) == len(policies)
    assert len(set(policy_colours(["unquantised", *(f"p{i}" for i in range(9))]).values())) == 10
    assert set(policy_colours([f"p{i}" for i in range(12)]).values()) == set(SERIES)


def test_one_depth_alone_has_its_own_tick():
    (axes,) = axes_of(acceptance_by_depth([row(depth=2)]))
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2"] and axes.get_xlim() == (1.5, 2.5)
