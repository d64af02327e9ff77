"""Several temperatures as one result: every view against the acceptance it comes from, and what stands around it."""

import re

import numpy as np
import pytest

import mtplab
import mtplab.report
from mtplab import drawing
from mtplab.errors import ConfigError
from mtplab.study.acceptance_set import AcceptanceSet
from mtplab.study.acceptance_views import VIEWS
from mtplab.study.acceptance_words import acceptance_sentences
from mtplab.study.bootstrap import ratio_interval

PROMPTS = ["Once upon a time", "def main():", "In the beginning", "The", "import os", "A", "We went", "class B:", "It"]
DOMAINS = ["words", "code", "words", "words", "code", "words", "words", "code", "words"]
DEPTH = 4


@pytest.fixture(scope="module")
def traces(bundled):
    model = mtplab.load_model(bundled)
    return [
        mtplab.trace(model, PROMPTS, DEPTH, temperature=t, max_new_tokens=24, domains=DOMAINS) for t in (0.8, 0.0)
    ]


@pytest.fixture(scope="module")
def found(traces):
    return AcceptanceSet(traces)


def test_it_holds_each_temperature(found, traces):
    assert found.temperatures == [0.0, 0.8] and len(found) == 2 and found.domains == ["words", "code"]
    assert {t: stats.rounds for t, stats in found.by_temperature(3).items()} == {
        0.0: traces[1].acceptance().stats(3).rounds,
        0.8: traces[0].acceptance().stats(3).rounds,
    }
    assert found.depths == range(DEPTH + 1) and not found.few
    for wrong, word in (([], "nothing"), ([traces[0], traces[0]], "1 temperatures")):
        with pytest.raises(ConfigError, match=word):
            AcceptanceSet(wrong)
    with pytest.raises(ConfigError, match="other prompts"):
        AcceptanceSet([traces[0], traces[1].narrowed("code")])
    with pytest.raises(ConfigError, match=r"\[0.0, 0.8\]"):
        found[0.5]


def test_a_domain_by_itself_is_a_trace_of_its_prompts(found, bundled):
    model = mtplab.load_model(bundled)
    own = [prompt for prompt, domain in zip(PROMPTS, DOMAINS, strict=True) if domain == "code"]
    alone = mtplab.trace(model, own, DEPTH, max_new_tokens=24).acceptance()
    part = found[0.0].only("code")
    assert part.trace.outputs == alone.trace.outputs
    for depth in found.depths:
        assert part.stats(depth) == alone.stats(depth) == found[0.0].by_domain(depth)["code"]
    assert part.gate(0.6) == alone.gate(0.6)
    with pytest.raises(ConfigError, match="'words', 'code'"):
        found.only("music")


def test_views_say_what_the_acceptance_says(found):
    one = found[0.0]
    line = found.view("depth", temperatures=[0.0], depths=(1, 3)).lines[0]
    assert line.x == (1, 2, 3) and line.y == tuple(one.length(depth) for depth in (1, 2, 3))
    assert list(zip(line.low, line.high, strict=True)) == [one.interval(depth) for depth in (1, 2, 3)]
    stats = one.stats(3)
    for name, shares in (("position", stats.per_position), ("conditional", stats.conditional)):
        view = found.view(name, temperatures=[0.0], depths=(0, 3))
        assert view.share and view.lines[0].y == pytest.approx(shares)
    line = found.view("context", temperatures=[0.0]).lines[0]
    told = {(low + high - 1) / 2: length for low, high, length in one.by_context(DEPTH, range(0, 65, 16)) if length}
    assert dict(zip(line.x, line.y, strict=True)) == pytest.approx(told)
    gated, fixed = found.view("gate", temperatures=[0.0], confidence=0.35).lines
    assert gated.setting[gated.chosen] == 0.35 and fixed.kind == "fixed"
    stats = one.gate(0.35)
    assert gated.y[gated.chosen] == pytest.approx(stats.acceptance_length)
    assert gated.x[gated.chosen] == pytest.approx(stats.drafted / stats.rounds)
    assert gated.y[0] == fixed.y[-1] == one.length(DEPTH) and gated.y[-1] == pytest.approx(1.0)
    planned, _ = found.view("schedule", temperatures=[0.0], depths=(1, 3), switch=15).lines
    stats = one.schedule(lambda at: np.where(at < 15, 1, 3))
    assert planned.setting[planned.chosen] == 15 and planned.y[planned.chosen] == pytest.approx(stats.acceptance_length)
    assert planned.y[0] == pytest.approx(one.length(3)) and planned.y[-1] == pytest.approx(one.length(1))


def test_the_least_a_gate_drafts_is_counted_by_hand(found):
    """Round by round over the same hits: a chain stops at a draft that is not sure, at the latest at its miss."""
    one, gate = found[0.0], 0.5
    trace, total, rounds, first = one.trace, 0, 0, 0
    for length in trace.output_lengths:
        slot = 0
        while slot < length - 1:
            sure = np.exp(trace.top[first + slot].astype(float))
            planned = next((j for j, value in enumerate(sure) if value < gate), DEPTH)  # NaN, past a miss, is not below
            missed = int(trace.hits[first + slot].sum()) + 1  # drafts up to the miss, itself included
            total += min(planned, missed, DEPTH, length - 1 - slot)
            rounds += 1
            slot += min(int(trace.hits[first + slot, :planned].sum()) + 1, length - 1 - slot)
        first += length - 1
    assert one.gate(gate).rounds == rounds
    assert one.least_drafted(gate, DEPTH).sum() == pytest.approx(total)
    assert total < one.gate(gate).drafted


def test_intervals_of_a_view_are_the_bootstraps(found):
    one = found[0.8]
    counts = one.counts(DEPTH)
    line = found.view("position", temperatures=[0.8]).lines[0]
    for j in range(DEPTH):
        span = ratio_interval(counts.accepted_per_position[:, j], counts.rounds)
        assert (line.low[j], line.high[j]) == span


def test_it_shows_itself(found):
    text, page = str(found), found._repr_html_()
    assert repr(found) == "<AcceptanceSet: 9 prompts, temperatures [0.0, 0.8], depths 0 to 4>"
    low, high = found[0.8].interval(4)
    cell = f"{found[0.8].length(4):.2f} ({low:.2f}–{high:.2f})"
    assert cell in text and cell.replace(" ", "<br>") in page and "rough" not in text
    assert "over 3 prompts only" in str(found.only("code")) and found.only("code").few
    assert "over 3 prompts only" in found.view("depth", domains=["code"]).note
    frame = found.to_frame()
    assert len(frame) == 2 * 3 * 5 and set(frame.domain.dropna()) == {"words", "code"}
    long = found.view("gate").to_frame()
    assert set(long.kind) == {"measured", "fixed"} and long.temperature.nunique() == 2


def test_every_view_is_drawn(found):
    for name in VIEWS:
        for domains in ((None,), found.domains):
            view = found.view(name, domains=domains)
            page = view.plot().to_html()
            assert page.count("<figure") == 1 and "nan" not in page and "None" not in page
            # every point of every line that is not there to compare with
            drawn = sum(y is not None for line in view.lines if line.kind == "measured" for y in line.y)
            marks = re.findall(r'<path d="[^"]+" transform="translate\([^)]+\)" fill="[^"]+" stroke=', page)
            assert len(marks) == drawn
            for words in (view.x_label, view.y_label):
                assert words in page


def test_plot_says_what_is_missing(found, monkeypatch):
    monkeypatch.setattr(drawing, "_drawing", None)
    with pytest.raises(ConfigError, match="import mtplab.report"):
        found.plot()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"name": "pie"}, "depth, position"),
        ({"temperatures": [0.3]}, "was not traced"),
        ({"temperatures": []}, "at least one"),
        ({"domains": ["music"]}, "'words', 'code'"),
        ({"depths": (0, 9)}, "0 to 4"),
        ({"depths": (3, 1)}, "0 to 4"),
        ({"confidence": 1.2}, "probability"),
    ],
)
def test_what_is_not_there_is_refused(found, options, word):
    with pytest.raises(ConfigError, match=word):
        found.view(**options)


def test_sentences_carry_their_numbers_and_hold_for_one_token_too(found, bundled):
    said = " ".join(acceptance_sentences(found))
    for one in found:
        assert f"{one.length(DEPTH):.2f}" in said
    best = max(found.domains, key=lambda name: found[0.0].only(name).length(DEPTH))
    assert f"{best} is the easiest domain ({found[0.0].only(best).length(DEPTH):.2f})" in said
    model = mtplab.load_model(bundled)
    for tokens in (1, 2, 3):
        short = AcceptanceSet([mtplab.trace(model, PROMPTS[:2], 1, max_new_tokens=tokens, domains=["a", "b"])])
        assert acceptance_sentences(short) and str(short)
        for name in VIEWS:
            assert "<figure" in short.plot(name).to_html()
