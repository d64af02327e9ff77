"""Which rows of two files belong together, across what, and what is said to differ."""

from __future__ import annotations

import itertools
import random

import pytest

from mtplab.errors import ConfigError
from mtplab.study.matching import AXES, display_order, match_rows
from mtplab.study.result import SweepResult
from mtplab.study.words import cache_words, follows
from tests.report_fakes import row, rows


def facts(study, **provenance):
    return [each.model_copy(update={"provenance": {**each.provenance, **provenance}}) for each in study]


def told(found, settings=True):
    return {d.name: (d.base, d.other, d.pairs) for d in found.differences if d.setting == settings}


def test_rows_of_one_setting_and_depth_are_a_pair():
    base, other = rows(depths=range(4)), rows(depths=range(2, 6), policies=("int8", "none", "fp8_e4m3"))
    random.Random(1).shuffle(other)
    found = match_rows(base, other)
    expected = itertools.product(("all BF16", "published"), ("unquantised", "int8"), (2, 3))
    assert [(p.settings["exclusions"], p.settings["KV cache"], p.depth) for p in found.pairs] == list(expected)
    assert all(p.base.depth == p.other.depth and p.base.quant_policy == p.other.quant_policy for p in found.pairs)
    assert len(found.only_base) == len(base) - 8 and len(found.only_other) == len(other) - 8
    assert found.differences == []


@pytest.mark.parametrize(
    ("changes", "name", "values"),
    [
        ({"quant_policy": "fp8_e4m3", "draft_quant_policy": "fp8_e4m3"}, "KV cache", ("unquantised", "fp8_e4m3")),
        ({"draft_quant_policy": "int8"}, "draft's cache", ("as the target's", "int8")),
        ({"exclude_label": "none"}, "exclusions", ("published", "all FP8")),
        ({"checkpoint": "other"}, "checkpoint", ("tiny", "other")),
        ({"temperature": 0.7}, "temperature", ("0", "0.7")),
        ({"prompt_set": "code"}, "prompts", ("prompts, 4 in all", "code, 4 in all")),
        ({"max_new_tokens": 64}, "tokens a prompt", ("32", "64")),
        ({"seed": 3}, "seed", ("0", "3")),
        ({"method": "trace"}, "method", ("run", "trace")),
    ],
)
def test_what_has_one_value_on_each_side_is_what_is_compared(changes, name, values):
    base = [row(depth) for depth in range(3)]
    found = match_rows(base, [each.model_copy(update=changes) for each in base])
    assert len(found.pairs) == 3 and told(found) == {name: (*values, 3)}


def test_what_varies_within_a_file_must_agree():
    base = rows(depths=(1, 2), policies=("none", "int8"), excludes=("published",))
    found = match_rows(base, rows(depths=(1, 2), policies=("int4",), excludes=("published",)))
    assert found.pairs == [] and len(found.only_base) == 4 and len(found.only_other) == 2
    # while another setting that is one in each is still compared
    found = match_rows(base, rows(depths=(1, 2), policies=("none", "int8"), excludes=("*",)))
    assert len(found.pairs) == 4 and told(found) == {"exclusions": ("published", "all BF16", 4)}


def test_by_names_what_must_agree_and_nothing_else():
    base = rows(depths=(1, 2), policies=("none", "int8"), excludes=("published",))
    other = rows(depths=(2, 3), policies=("int4",), excludes=("*",))
    with pytest.raises(ConfigError, match="the first has two rows at depth 1; they differ in cache: match by that too"):
        match_rows(base, other, by=["depth"])
    found = match_rows(base[:2], other, by=["depth"])
    assert [(p.depth, p.settings) for p in found.pairs] == [(2, {})]
    assert told(found) == {"exclusions": ("published", "all BF16", 1), "KV cache": ("unquantised", "int4", 1)}
    found = match_rows(base, rows(depths=(2,), policies=("int8", "none"), excludes=("*",)), by=["cache"])
    assert [p.settings for p in found.pairs] == [{"KV cache": "unquantised"}, {"KV cache": "int8"}]
    with pytest.raises(ConfigError, match="no setting 'colour' to match by; there are depth, engine, checkpoint"):
        match_rows(base, other, by=["colour"])


def test_the_same_numbers_twice_are_one_and_others_are_a_question():
    base = [row(1), row(1, provenance={"date": "later"}), row(2)]
    assert len(match_rows(base, base).pairs) == 2
    with pytest.raises(ConfigError, match="B has two rows at depth 1.*their settings are the same and their numbers"):
        match_rows(base, [row(1), row(1, rounds=300)], names=("A", "B"))


def test_circumstances_tell_rows_apart_where_settings_do_not():
    """One name for two contents: a folder that two versions of a checkpoint were swept into."""
    old, new = ({"config": {"checkpoint": f"full:{digit * 64}"}} for digit in "ab")
    base = facts([row(1), row(2)], **old) + facts([row(1, rounds=300), row(2, rounds=300)], **new)
    found = match_rows(base, facts([row(1), row(2)], **new))
    assert {p.base.rounds for p in found.pairs} == {300} and len(found.only_base) == 2


def test_circumstances_that_differ_are_told_and_what_is_not_known_is_not():
    config = {"checkpoint": "full:" + "1" * 64, "plan": "p" * 64}
    base = facts(rows(depths=(1, 2)), commit="a" * 40, threads=1, config=config)
    other = facts(base, commit="b" * 40 + "+changes", threads=2, cpu="Ours", versions={"torch": "2.14", "numpy": "2.0"})
    other = facts(other, config={"checkpoint": "full:" + "2" * 64, "plan": "q" * 64})
    assert told(match_rows(base, other), settings=False) == {
        "checkpoint's content": ("full:111111111111", "full:222222222222", 12),
        "modules in FP8 (digest of the plan)": ("p" * 12, "q" * 12, 12),
        "mtplab's commit": ("a" * 10, "b" * 10 + "+changes", 12),
        "torch": ("2.13", "2.14", 12),
        "threads": ("1", "2", 12),
    }
    # another exclusion set means another plan: that is said once
    renamed = [each.model_copy(update={"exclude_label": "mtp.*"}) for each in other if each.exclude_label == "*"]
    kept = [each for each in base if each.exclude_label == "*"]
    assert "modules in FP8 (digest of the plan)" not in told(match_rows(kept, renamed), settings=False)


def test_the_least_quantised_comes_first():
    study = rows(depths=(1,), policies=("int4", "none", "int8"), excludes=("none", "mtp.*", "published", "*"))
    ordered = sorted(study, key=display_order)
    assert [each.exclude_label for each in ordered[::3]] == ["*", "published", "mtp.*", "none"]
    assert [each.quant_policy for each in ordered[:3]] == ["none", "int8", "int4"]


def test_a_draft_that_follows_a_target_with_layers_kept():
    """`int8` beside `int8@3` is what a draft has that is given nothing: no setting of its own, in words or in axes."""
    kept = row(policy="int8@3", draft_quant_policy="int8")
    assert AXES["draft-cache"][1](kept) == "as the target's"
    assert cache_words("int8@3", "int8") == cache_words("int8@3") == "int8@3"
    assert cache_words("int8@3", "int4") == "int8@3 (draft int4)" and not follows("int8", "int8/int4@3")
    apart = row(policy="int8@3", draft_quant_policy="none")
    assert AXES["draft-cache"][1](apart) == "unquantised" and display_order(kept) < display_order(apart)
    assert "draft" not in str(SweepResult([kept, row(policy="int4")])).splitlines()[0]
    assert "draft's cache" in str(SweepResult([apart, row(policy="int4")]))
