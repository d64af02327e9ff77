"""Intervals over prompts: against a loop that leaves each prompt out, and against what they promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from mtplab.study.interval import (
    change,
    change_error,
    holm,
    jackknife,
    length_error,
    prompt_counts,
    same_prompts,
    student,
    student_p,
)


def row(rounds, tokens, label="prompts", domains=1, **more):
    """A row whose prompts are dealt out to `domains` domains in order."""
    parts = {}
    for at, (each_rounds, each_tokens) in enumerate(
        zip(np.array_split(rounds, domains), np.array_split(tokens, domains), strict=True)
    ):
        parts[f"d{at}"] = {"prompt_rounds": each_rounds.tolist(), "prompt_tokens": each_tokens.tolist()}
    return {"prompt_set": label, "max_new_tokens": 64, "by_domain": parts, **more}


def drawn(generator, n, mean=3.0, spread=0.8):
    """n prompts of 63 tokens, each with an acceptance length of its own."""
    lengths = np.clip(generator.normal(mean, spread, n), 1.0, 9.0)
    return np.maximum(1, np.round(63 / lengths)).astype(int), np.full(n, 63)


def by_hand(rounds, tokens):
    """Leave out one prompt after the other, in plain Python."""
    found = []
    for out in range(len(rounds)):
        kept = [i for i in range(len(rounds)) if i != out]
        found.append(sum(tokens[i] for i in kept) / sum(rounds[i] for i in kept))
    return found


def spread_of(found):
    n = len(found)
    mean = sum(found) / n
    return stats.t.ppf(0.975, n - 1) * math.sqrt((n - 1) / n * sum((value - mean) ** 2 for value in found))


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 10, 15, 30, 72, 1000])
def test_student_is_students(freedom):
    assert student(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), abs=1e-3)


@pytest.mark.parametrize("domains", [1, 3])
def test_the_length_is_that_of_a_loop(domains):
    rounds, tokens = drawn(np.random.default_rng(1), 17)
    assert length_error(row(rounds, tokens, domains=domains)) == pytest.approx(
        spread_of(by_hand(rounds, tokens)), rel=1e-4
    )


def test_a_difference_is_paired_by_prompt():
    generator = np.random.default_rng(2)
    rounds, tokens = drawn(generator, 20)
    slower = rounds + generator.integers(0, 3, 20)
    error, paired = change_error(row(rounds, tokens), row(slower, tokens))
    apart = [a - b for a, b in zip(by_hand(rounds, tokens), by_hand(slower, tokens), strict=True)]
    assert paired and error == pytest.approx(spread_of(apart), rel=1e-4)
    loose, unpaired = change_error(row(rounds, tokens), row(slower, tokens, label="others"))
    assert not unpaired and loose == pytest.approx(
        math.hypot(length_error(row(rounds, tokens)), length_error(row(slower, tokens)))
    )
    assert error < loose / 2, "what makes a prompt easy is in both rows"


def test_rows_with_as_many_prompts_in_other_domains_are_not_paired():
    rounds, tokens = drawn(np.random.default_rng(3), 12)
    assert change_error(row(rounds, tokens, domains=2), row(rounds, tokens, domains=3))[1] is False


def test_an_interval_holds_the_truth_as_often_as_it_says():
    """Prompts with a length of their own, rounds alike within a prompt. What few prompts leave of 95 % depends on how
    skewed they are (91 … 94 % of 16, over four populations); rounds taken as independent hold far less."""
    generator = np.random.default_rng(4)
    population_rounds, population_tokens = drawn(generator, 200_000)
    truth = population_tokens.sum() / population_rounds.sum()
    for n, least in ((16, 0.915), (73, 0.93)):
        held = held_by_rounds = 0
        for _ in range(2000):
            rounds, tokens = drawn(generator, n)
            off = abs(tokens.sum() / rounds.sum() - truth)
            held += off <= length_error(row(rounds, tokens))
            # what a round gave, spread evenly over a prompt's rounds: independent rounds would vary as much
            each = np.repeat(tokens / rounds, rounds)
            held_by_rounds += off <= 1.96 * each.std() / math.sqrt(len(each))
        assert least <= held / 2000 <= 0.97, n
        assert held_by_rounds / 2000 < 0.6, n


def test_a_difference_holds_the_truth_as_often_as_it_says():
    generator = np.random.default_rng(5)

    def pair(n):
        rounds, tokens = drawn(generator, n)
        return rounds, rounds + generator.binomial(4, 0.3, n), tokens

    big = pair(200_000)
    truth = big[2].sum() / big[0].sum() - big[2].sum() / big[1].sum()
    held = 0
    for _ in range(1000):
        first, second, tokens = pair(24)
        error, _ = change_error(row(first, tokens), row(second, tokens))
        held += abs(tokens.sum() / first.sum() - tokens.sum() / second.sum() - truth) <= error
    assert 0.925 <= held / 1000 <= 0.98


def test_where_nothing_can_be_told_there_is_no_number():
    assert length_error({"by_domain": {}}) is None
    assert length_error({"by_domain": {"old": {"rounds": 3, "tokens": 9}}}) is None
    assert length_error(row(np.array([4]), np.array([9]))) is None
    assert length_error(row(np.array([4, 0]), np.array([9, 0]))) is None, "without the first there is no round"
    assert change_error(row(np.array([4, 5]), np.array([9, 9])), {"by_domain": {}}) is None
    assert jackknife(np.array([])) is None


def test_a_domain_has_its_own():
    rounds, tokens = drawn(np.random.default_rng(6), 10)
    both = row(rounds, tokens, domains=2)
    assert length_error(both, "d0") == pytest.approx(length_error(row(rounds[:5], tokens[:5])))
    assert prompt_counts(both, "d7") is None


def test_plain_decoding_is_certain():
    assert length_error(row(np.full(9, 63), np.full(9, 63))) == 0.0


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 6, 7, 10, 23, 72, 999])
@pytest.mark.parametrize("t", [0.0, 0.3, -1.0, 2.5, 7.0])
def test_the_tails_are_students(freedom, t):
    assert student_p(t, freedom) == pytest.approx(2 * stats.t.sf(abs(t), freedom), abs=1e-12)
    assert student_p(math.inf, freedom) == 0


def test_a_change_says_how_likely_it_is_by_chance():
    rounds, tokens = drawn(np.random.default_rng(7), 20)
    slower = rounds + np.random.default_rng(8).integers(0, 3, 20)
    found = change(row(slower, tokens), row(rounds, tokens))
    leave_out = np.array(by_hand(slower, tokens)) - np.array(by_hand(rounds, tokens))
    deviation = math.sqrt(19 / 20 * ((leave_out - leave_out.mean()) ** 2).sum())
    assert found.value == pytest.approx(tokens.sum() / slower.sum() - tokens.sum() / rounds.sum())
    assert found.paired and found.p == pytest.approx(2 * stats.t.sf(abs(found.value) / deviation, 19), rel=1e-3)
    assert (found.p < 0.05) == (abs(found.value) > found.error)
    same = change(row(rounds, tokens), row(rounds, tokens))
    assert (same.value, same.error, same.p) == (0, 0, 1)
    certain = change(row(np.full(5, 10), np.full(5, 30)), row(np.full(5, 10), np.full(5, 20)))
    assert (certain.value, certain.error, certain.p) == (1, 0, 0)
    assert change(row(np.array([0, 0]), np.array([0, 0])), row(rounds, tokens)) is None


def test_without_a_difference_one_in_twenty_lies_outside():
    """Two halves of one population, unpaired, and two noisy readings of the same prompts, paired."""
    generator = np.random.default_rng(9)
    outside = {True: 0, False: 0}
    for _ in range(1000):
        rounds, tokens = drawn(generator, 24)
        noisy = [rounds + generator.integers(0, 4, 24) for _ in range(2)]
        outside[True] += change(row(noisy[0], tokens), row(noisy[1], tokens)).p < 0.05
        others = drawn(generator, 24)
        outside[False] += change(row(rounds, tokens), row(*others, label="others")).p < 0.05
    assert all(0.03 <= count / 1000 <= 0.075 for count in outside.values()), outside


def test_holms_procedure_step_by_step():
    """The example of the procedure as the literature works it: 0.01 < 0.05/4, 0.015 < 0.05/3, 0.03 > 0.05/2: stop."""
    assert holm([0.03, 0.01, 0.04, 0.015]) == [False, True, False, True]
    assert holm([0.02, 0.02]) == [True, True] and holm([0.03, 0.03]) == [False, False]
    assert holm([]) == []
    generator = np.random.default_rng(10)
    alarms = sum(any(holm(generator.uniform(size=30))) for _ in range(4000))
    assert 0.035 <= alarms / 4000 <= 0.065, "of studies without any difference, one in twenty has an alarm"


def test_which_rows_ran_the_same_prompts():
    rounds, tokens = np.array([3, 4, 5]), np.array([9, 9, 9])

    def said(label="prompts", ids=None, checkpoint="a", n=3):
        config = {"config": {"prompt_digest": ids, "checkpoint": checkpoint}}
        return row(rounds[:n], tokens[:n], label=label, provenance=config)

    assert same_prompts(said(), said()) and not same_prompts(said(), said("others"))
    assert same_prompts(said(ids="1"), said("renamed", ids="1"))
    assert not same_prompts(said(ids="1"), said(ids="2")), "a file that was edited between two sweeps"
    assert same_prompts(said(ids="1"), said(ids="2", checkpoint="b")), "ids of another tokenizer"
    assert same_prompts(said(ids="1"), said()), "rows of before there was a digest"
    assert not same_prompts(said(ids="1"), said(ids="1", n=2))
    assert not same_prompts(said(), {**said(), "max_new_tokens": 32})
