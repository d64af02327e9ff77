"""Figures that a server might show: hostile, some that come and go, and those of any rounds in each engine's terms."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtplab.engines.accounts import WrongDepth, counts_between, lost
from mtplab.engines.engine import counts_of_histogram
from mtplab.engines.figures import FiguresFull, FiguresReset, Look, look, samples_of
from mtplab.engines.measured import Counts
from mtplab.engines.registry import ENGINES
from mtplab.errors import MtplabError
from tests.engine_texts import SERVED, TEXTS, answers, exposed, generated, looked

# hostile figures


def with_value(engine: str, name: str, value: str) -> str:
    lines = (TEXTS / f"{engine}-after.txt").read_text().splitlines()
    found = [line for line in lines if line.startswith(name)]
    assert found
    return "\n".join(f"{line.rpartition(' ')[0]} {value}" if line in found else line for line in lines) + "\n"


@pytest.mark.parametrize("value", ["NaN", "-1", "+Inf", "-Inf", "1.5", "1e300", "9007199254740992"])
@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "tensorrt_llm", "lmdeploy"])
def test_counts_that_are_none_are_refused_by_name(engine, value):
    figures = ENGINES[engine].figures
    for name in (figures.drafted, figures.positions[0], figures.generation_tokens):
        with pytest.raises(MtplabError, match=name):
            look(figures, samples_of(with_value(engine, name, value)))


@pytest.mark.parametrize("place", ["-1", "x", "", "²", "100", "1e1", " 0"])
def test_positions_that_are_none_are_refused(place):
    text = f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} 1\n'
    with pytest.raises(MtplabError, match="position"):
        look(ENGINES["vllm"].figures, samples_of(text))


def test_six_digits_do_not_count_a_million():
    name = "llamacpp:tokens_predicted_total"
    figures = ENGINES["llamacpp"].figures
    assert look(figures, samples_of(with_value("llamacpp", name, "999999"))).generation_tokens == 999_999
    for value in ("1e+06", "1.23457e+06"):
        with pytest.raises(FiguresFull, match=f"{name} is .*6 digits only.*cannot be known"):
            look(figures, samples_of(with_value("llamacpp", name, value)))
    # others write all of them
    found = look(ENGINES["vllm"].figures, samples_of("vllm:prompt_tokens_total 1.234567e+06\n"))
    assert found.prompt_tokens == 1_234_567


def test_ranks_are_summed_and_positions_kept_apart():
    lines = (TEXTS / "vllm-after.txt").read_text().splitlines()
    twice = [line.replace('engine="0"', f'engine="{rank}"') for rank in (0, 1) for line in lines if "{" in line]
    found = look(ENGINES["vllm"].figures, samples_of("\n".join(twice) + "\n"))
    assert (found.rounds, found.drafted, found.accepted, found.per_position) == (110, 330, 146, (64, 46, 36))
    assert ENGINES["vllm"].known({}, samples_of("\n".join(twice) + "\n")).dp == 2


def test_positions_that_appear_and_fail_to():
    def places(*values: int) -> Look:
        name = "trtllm_spec_decode_accepted_tokens_total"
        text = "".join(f'{name}{{token_position="{j}"}} {value}\n' for j, value in enumerate(values) if value)
        return look(ENGINES["tensorrt_llm"].figures, samples_of(text))

    assert places(5, 0, 1).since(places(2)).per_position == (3, 0, 1)
    assert places(5).since(places()).per_position == (5,)
    assert places().since(places()).per_position is None
    for before in (places(6), places(5, 1), places(0, 1)):
        with pytest.raises(FiguresReset, match="by position fell"):
            places(5).since(before)


def test_a_process_that_started_seconds_later_is_another():
    first = look(ENGINES["vllm"].figures, samples_of("process_start_time_seconds 1.79607310972e+09\n"))
    for later, same in ((0.4, True), (1.5, False), (60.0, False), (-1.5, False)):
        now = dataclasses.replace(first, started=first.started + later)
        if same:
            now.since(first)
        else:
            with pytest.raises(FiguresReset, match="process is another"):
                now.since(first)


def test_what_a_server_does_not_count_is_none():
    empty = look(ENGINES["vllm"].figures, samples_of(""))
    assert all(value is None for value in vars(empty).values())
    with pytest.raises(WrongDepth, match="no figure of drafts, such as trtllm_spec_decode_drafted_tokens_total: "):
        counts_between(ENGINES["tensorrt_llm"], empty, answers(5), 3)
    some = dataclasses.replace(empty, rounds=4)
    assert counts_between(ENGINES["sglang"], some, answers(5), 3) == Counts(4, 4, None, None, None)


def test_rounds_that_lmdeploy_lost_are_not_made_up_for():
    counted = looked("lmdeploy", "after").since(looked("lmdeploy", "before"))
    ours = answers(27, 27, 27, 26, prompt=16)
    # of 40 rounds, one that accepted two and one that accepted none went uncounted
    less = dataclasses.replace(counted, rounds=38, drafted=114, accepted=61, per_position=(30, 19, 12))
    assert counts_between(ENGINES["lmdeploy"], less, ours, 3) == Counts(103, None, None, None, None)
    assert "4 of its tokens came of none" in lost(ENGINES["lmdeploy"], less, ours, 3)
    assert lost(ENGINES["lmdeploy"], counted, ours, 0) is None
    # the same in an engine that loses none are steps without drafts
    assert counts_between(ENGINES["vllm"], less, ours, 3).rounds == 42
    assert lost(ENGINES["vllm"], less, ours, 3) is None


# any rounds: what is counted gives tokens over rounds

TOKENS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
LUCK = st.lists(st.integers(0, 5), min_size=1, max_size=9)


@pytest.mark.parametrize("engine", SERVED)
@settings(max_examples=60, deadline=None)
@given(depth=st.integers(1, 5), tokens=TOKENS, luck=LUCK)
def test_acceptance_length_is_tokens_over_steps(engine, depth, tokens, luck):
    description = ENGINES[engine]
    before = look(description.figures, samples_of(exposed(engine, depth, 50, [(depth, 1)] * 7)))
    texts = [generated(engine, depth, each, luck) for each in tokens]
    drafts = [each for text, _ in texts for each in text]
    after = exposed(engine, depth, 50 + sum(tokens), [(depth, 1)] * 7 + drafts)
    counted = look(description.figures, samples_of(after)).since(before)
    found = counts_between(description, counted, answers(*tokens), depth)
    steps = len(drafts) + sum(plain for _, plain in texts)
    assert (found.tokens, found.rounds) == (sum(tokens) - len(tokens), steps)
    if engine != "sglang":
        assert found.drafted == sum(d for d, _ in drafts) and found.accepted == sum(a for _, a in drafts)
        assert found.per_position == tuple(sum(a > j for _, a in drafts) for j in range(depth))
    # each text by itself, as an answer counts it
    for total, (rounds, plain) in zip(tokens, texts, strict=True):
        histogram = [sum(a == j for _, a in rounds) for j in range(depth + 1)]
        own = counts_of_histogram(histogram, sum(d for d, _ in rounds), total - 1, depth)
        assert (own.tokens, own.rounds) == (total - 1, len(rounds) + plain)


@settings(max_examples=100, deadline=None)
@given(depth=st.integers(1, 5), tokens=st.integers(2, 40), luck=LUCK)
def test_vllm_s_answers_leave_out_what_was_cut(depth, tokens, luck):
    rounds, _ = generated("vllm", depth, tokens, luck)
    spec = {"per_step_accepted": [a for _, a in rounds], "per_step_drafted": [d for d, _ in rounds]}
    usage = {"prompt_tokens": 1, "completion_tokens": tokens}
    body = {"choices": [{"text": "", "token_ids": [0] * tokens}], "usage": usage}
    found = ENGINES["vllm"].answer(body | {"metrics": {"speculative_decoding": spec}}, depth).counts
    assert found.rounds == len(rounds) and found.accepted + found.rounds == tokens - 1
    assert sum(found.per_position) == found.accepted
