"""What a trace says: every answer against a walk over the same hits, round by round, and the runner's own records."""

import re
from dataclasses import replace

import numpy as np
import pytest

import mtplab
from mtplab.errors import ConfigError
from mtplab.study.interval import jackknife
from mtplab.study.trace import Trace, trace

LENGTHS = (9, 1, 30, 2, 17)
PROMPTS = (5, 3, 11, 2, 8)
DEPTH = 6


@pytest.fixture(scope="module")
def found() -> Trace:
    """Hits drawn at random, as a trace keeps them: a draft counts only after those before it, chains end at a miss."""
    draw = np.random.default_rng(5)
    parts = {"hits": [], "top": []}
    for length in LENGTHS:
        slots = length - 1
        left = slots - np.arange(slots)
        drawn = (draw.random((slots, DEPTH)) < 0.7) & (np.arange(DEPTH) < left[:, None])
        hits = np.logical_and.accumulate(drawn, axis=1)
        reached = np.concatenate([np.ones((slots, 1), bool), hits[:, :-1]], 1) & (np.arange(DEPTH) < left[:, None])
        parts["hits"].append(hits)
        parts["top"].append(np.where(reached, np.log(draw.uniform(0.1, 1.0, (slots, DEPTH))), np.nan))
    total = sum(LENGTHS) - len(LENGTHS)
    return Trace(
        tokens=draw.integers(0, 9, sum(LENGTHS)).astype(np.int32),
        output_lengths=np.array(LENGTHS),
        prompt_lengths=np.array(PROMPTS),
        hits=np.concatenate(parts["hits"]),
        log_q=np.full((total, DEPTH), np.nan, np.float32),
        top=np.concatenate(parts["top"]).astype(np.float32),
        log_p=np.full(total, np.nan, np.float32),
        domains=("a", "b", "a", "b", "c"),
        settings={"spec": {"draft_sampling": "greedy"}, "sampling": {"temperature": 0.0}},
        seconds={},
    )


def walked(found: Trace, depth_at) -> list[tuple[int, int, int, int]]:
    """(prompt, position, drafted, emitted) of every round, one after the other; `depth_at(slot's number, position)`."""
    rounds, first = [], 0
    for prompt, length in enumerate(LENGTHS):
        slot = 0
        while slot < length - 1:
            position = PROMPTS[prompt] + 1 + slot
            depth = depth_at(first + slot, position)
            accepted = int(found.hits[first + slot, :depth].sum())
            emitted = min(accepted + 1, length - 1 - slot)
            rounds.append((prompt, position, depth, emitted))
            slot += emitted
        first += length - 1
    return rounds


@pytest.mark.parametrize("depth", range(DEPTH + 1))
def test_counts_of_a_depth(found, depth):
    acceptance = found.acceptance()
    rounds = walked(found, lambda slot, position: depth)
    stats = acceptance.stats(depth)
    assert (stats.rounds, stats.drafted) == (len(rounds), depth * len(rounds))
    assert stats.emitted == sum(LENGTHS) - len(LENGTHS) == sum(r[3] for r in rounds)
    assert [s.rounds for s in acceptance.per_prompt(depth)] == [
        sum(r[0] == prompt for r in rounds) for prompt in range(len(LENGTHS))
    ]
    assert {name: s.rounds for name, s in acceptance.by_domain(depth).items()} == {
        name: sum(found.domains[r[0]] == name for r in rounds) for name in "abc"
    }
    low, high = acceptance.interval(depth)
    assert low <= acceptance.length(depth) <= high and (low < high or depth == 0)
    # the ±: of the length of all prompts but one, each left out in turn
    tokens = np.array(LENGTHS) - 1
    each = np.array([sum(r[0] == prompt for r in rounds) for prompt in range(len(LENGTHS))])
    left = jackknife((tokens.sum() - tokens) / (each.sum() - each))
    assert acceptance.half_interval(depth) == pytest.approx(left)


def test_by_position_in_the_context(found):
    edges = [0, 7, 12, 13, 40, 99]
    for depth in (1, 4):
        rounds = walked(found, lambda slot, position, depth=depth: depth)
        for low, high, length in found.acceptance().by_context(depth, edges):
            inside = [r[3] for r in rounds if low <= r[1] < high]
            assert length == (pytest.approx(np.mean(inside)) if inside else None)
    for bad in ([3], [3, 3], [5, 2]):
        with pytest.raises(ConfigError, match="edges"):
            found.acceptance().by_context(1, bad)


def test_a_depth_that_follows_the_context(found):
    plan = lambda positions: np.clip(positions // 5, 0, DEPTH)  # noqa: E731
    rounds = walked(found, lambda slot, position: int(plan(position)))
    stats = found.acceptance().schedule(plan)
    assert (stats.rounds, stats.drafted) == (len(rounds), sum(r[2] for r in rounds))
    for bad in (lambda at: np.full(at.shape, DEPTH + 1), lambda at: -np.ones(at.shape), lambda at: np.zeros(3)):
        with pytest.raises(ConfigError, match="expected whole depths from 0 to 6"):
            found.acceptance().schedule(bad)


@pytest.mark.parametrize("confidence", [0.0, 0.3, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("depth", [None, 3])
def test_a_gate_of_confidence(found, confidence, depth):
    most = DEPTH if depth is None else depth

    def drafted(slot, position):
        sure = np.exp(found.top[slot, :most].astype(float))
        for j, value in enumerate(sure):
            if value < confidence:  # never where it is not known
                return j
        return most

    rounds = walked(found, drafted)
    stats = found.acceptance().gate(confidence, depth)
    assert (stats.rounds, stats.drafted) == (len(rounds), sum(r[2] for r in rounds))
    with pytest.raises(ConfigError, match="confidence"):
        found.acceptance().gate(1.5)


def test_it_shows_itself(found):
    acceptance = found.acceptance()
    assert repr(acceptance) == "<Acceptance: 5 prompts, depths 0 to 6>"
    text, page = str(acceptance), acceptance._repr_html_()
    assert len(text.splitlines()) == 1 + 7 + 1 and "over 5 prompts only: the intervals are rough" in text
    assert page.count("<tr>") == 8 and f"{acceptance.length(6):.3f}" in page and "rough" in page
    frame = acceptance.to_frame()
    assert frame.depth.tolist() == list(range(7)) and frame.few.all()
    assert frame.acceptance_length.tolist() == [acceptance.length(depth) for depth in range(7)]
    for beyond in (7, -1, 1.5, True):
        with pytest.raises(ConfigError, match="expected 0 to 6"):
            acceptance.stats(beyond)


def test_how_many_prompts_are_few(bundled):
    model = mtplab.load_model(bundled)
    prompts = ["Once upon", "In the", "def f(", "The", "import", "A", "We", "It"]
    eight = trace(model, prompts, 2, max_new_tokens=6).acceptance()
    assert not eight.few and "rough" not in str(eight) + eight._repr_html_()
    assert eight.interval(2)[0] < eight.length(2) < eight.interval(2)[1]
    one = trace(model, prompts[:1], 2, max_new_tokens=6).acceptance()
    assert one.few and one.interval(2) is None and "one prompt only" in str(one)


def test_the_runners_records_by_context(bundled):
    model = mtplab.load_model(bundled)
    prompts, settings = ["Once upon a time", "def main():", "The"], {"max_new_tokens": 30}
    acceptance = trace(model, prompts, 3, **settings).acceptance()
    records = mtplab.generate(model, prompts, depth=3, **settings).rounds
    for low, high, length in acceptance.by_context(3, [0, 8, 16, 24, 60]):
        emitted = [record.emitted for record in records if low <= record.position < high]
        assert length == (pytest.approx(np.mean(emitted)) if emitted else None)


def test_a_trace_shows_itself(found):
    assert repr(found) == f"<Trace: 5 prompts, {sum(LENGTHS) - len(LENGTHS)} slots, depths 0 to 6>"
    text, page = str(found), found._repr_html_()
    assert f"trace of 5 prompts ({sum(PROMPTS)} tokens) and {sum(LENGTHS)} tokens of output, greedy" in text
    for depth in range(DEPTH + 1):
        length = f"{found.acceptance().stats(depth).acceptance_length:.3f}"
        assert re.search(rf"^ *{depth} +{re.escape(length)}$", text, re.MULTILINE) and f">{length}</td>" in page
    evil = "<script>alert(1)</script>\x1b[31m\u202e"
    hostile = replace(found, domains=(evil,) * 5)
    text, page = str(hostile), hostile._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert not set("\x1b\u202e") & set(text + page)
    given = replace(found, settings={**found.settings, "given": {"own": False, "agreement": 0.943}})
    for shown in (str(given), given._repr_html_()):
        assert "approximate: the output was given, 94.3 % of its tokens are the target" in shown
    one = replace(found, settings={**found.settings, "sampling": {"temperature": 0.7}})
    assert "temperature 0.7, drafts greedy" in str(one)
