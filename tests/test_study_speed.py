"""What a depth costs in time, and rows whose seconds a busy machine made."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from mtplab.decode import generate
from mtplab.study.speed import BATCH, costs, odd_timings, round_seconds


def row(depth, seconds, policy="none", rounds=100, **more):
    return {
        "depth": depth,
        "seconds": seconds,
        "rounds": rounds,
        "quant_policy": policy,
        "exclude_label": "published",
        "temperature": 0.0,
        **more,
    }


def line(policy="none", times=1.0, depths=range(9)):
    """A round costs 1 + 0.9 k times one at depth 0."""
    return [row(depth, times * (1 + 0.9 * depth), policy) for depth in depths]


def test_the_batch_is_what_generate_takes():
    assert inspect.signature(generate).parameters["max_batch"].default == BATCH


def test_a_cost_is_the_median_over_settings():
    study = [*line(), *line("int8", 1.2), *line("int4")]
    study[8]["seconds"] *= 1.5
    found = costs(study)
    assert list(found) == list(range(9)) and {cost.settings for cost in found.values()} == {3}
    assert [cost.ratio for cost in found.values()] == pytest.approx([1 + 0.9 * k for k in range(9)])


def test_rounds_are_what_seconds_are_shared_by():
    assert round_seconds(row(2, 3.0, rounds=60)) == 0.05
    assert round_seconds(row(2, None)) is None and round_seconds({"depth": 1, "seconds": 1.0, "rounds": 0}) is None


def test_without_plain_decoding_there_is_no_cost():
    assert costs(line(depths=(1, 2, 4))) == {}


def test_a_row_the_machine_disturbed_is_named_and_not_counted():
    study = [*line(), *line("int8"), *line("int4")]
    study[5]["seconds"] *= 20
    odd = odd_timings(study)
    assert [at for at, off in enumerate(odd) if off is not None] == [5]
    assert odd[5] == pytest.approx(20, rel=0.5)
    assert costs(study)[5].ratio == pytest.approx(5.5) and costs(study)[5].settings == 2


def test_a_whole_line_is_named_too_and_so_is_a_disturbed_depth_0():
    study = [*line(times=8.0), *line("int8"), *line("int4"), *line("fp8_e4m3")]
    assert [off is not None for off in odd_timings(study)] == [True] * 9 + [False] * 27
    alone = line()
    alone[0]["seconds"] *= 30
    assert [off is not None for off in odd_timings(alone)] == [True] + [False] * 8
    assert costs(alone) == {}, "nothing to divide by that can be believed"


def test_what_a_cache_costs_is_not_odd():
    generator = np.random.default_rng(1)
    study = [each for at in range(12) for each in line(f"p{at}", generator.uniform(0.7, 1.9))]
    assert odd_timings(study) == [None] * len(study)


def test_other_prompts_and_devices_have_their_own_trend():
    slow = [{**each, "seconds": each["seconds"] * 50, "provenance": {"device": "other"}} for each in line()]
    assert odd_timings([*line(), *slow]) == [None] * 18


def test_rows_without_seconds_are_passed_over():
    study = [*line(), row(3, None, "int8")]
    assert odd_timings(study) == [None] * 10 and costs(study)[3].settings == 1
    assert odd_timings([]) == [] and costs([]) == {}
