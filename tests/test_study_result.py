"""What a sweep gives back: two as one study, and how its settings are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtplab.study import SweepResult
from mtplab.study.words import cache_words, weights_words
from tests.report_fakes import rows


def test_two_sweeps_are_one_study():
    first = SweepResult(rows(excludes=("published",)), computed=15, seconds=2.0, folder=Path("r"), notes=["odd"])
    second = SweepResult(rows(excludes=("*",)), reused=15, seconds=1.0, folder=Path("r"), cancelled=True, exact=False)
    both = first + second
    assert both.rows == [*first.rows, *second.rows] and both.folder == Path("r") and both.notes == ["odd"]
    assert (both.computed, both.reused, both.seconds, both.cancelled, both.exact) == (15, 15, 3.0, True, False)
    assert (first + SweepResult([], folder=Path("other"))).folder is None
    with pytest.raises(TypeError):
        first + [1]


@pytest.mark.parametrize(
    ("label", "model_format", "words"),
    [
        ("none", "fp8", "all FP8"),
        ("none", None, "none (as stored)"),
        ("*", "fp8", "all BF16"),
        ("published", "fp8", "published"),
        ("mtp.*, lm_head", "fp8", "mtp.*, lm_head"),
        ("none (draft: published)", "fp8", "all FP8 (draft: published)"),
        ("published (draft: none)", "fp8", "published (draft: all FP8)"),
    ],
)
def test_exclusions_in_words(label, model_format, words):
    """`none` of an exclusion set is everything in FP8, except in a file that keeps what it stores in BF16."""
    assert weights_words(label, model_format) == words


def test_caches_in_words():
    assert [cache_words(*given) for given in (("none",), ("int8",), ("int8", "int8"), ("int8", "none"))] == [
        *("unquantised", "int8", "int8", "int8 (draft unquantised)")
    ]


def test_a_study_calls_its_settings_by_these_words():
    table = SweepResult(rows(excludes=("*", "none"), policies=("none", "int8"))).to_table()
    lines = [line.split() for line in table.splitlines()]
    assert "all BF16    unquantised  " in table and "all FP8     int8" in table
    assert next(line for line in lines if line[:1] == ["exclusions"])[1:5] == ["KV", "cache", "KV", "B/token"]
    assert "all BF16    unquantised         256  1.00" in table and "all FP8     int8                136  1.00" in table
    alone = SweepResult(rows(excludes=("*", "none"), policies=("int8",))).to_table()
    assert "KV B/token" not in alone and "all BF16    int8      1.00" in alone
    assert "format" not in table and "prompt set prompts" in table and "prompts prompts" not in table


def test_only_numbers_stand_above_what_belongs_to_them():
    """A name may hold the very signs that an interval and a ratio begin with."""
    name = "a ±1 ×2 B/c"
    page = SweepResult(rows(excludes=(name,), policies=("none", "int8")))._repr_html_()
    assert f">{name}<" in page and page.count("<br>±") > 2 and ">KV<br>B/token<" in page
