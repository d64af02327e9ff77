"""What serving engines say of themselves, read by their descriptions: recorded metrics and answers, and broken ones.

Figures that a server might show are in `test_engine_figures.py`, what an engine is started with in
`test_engine_commands.py`, how it is asked in `test_engine_asking.py`.
"""

import copy
import dataclasses

import pytest

from mtplab.config import SamplingConfig
from mtplab.engines.accounts import WrongDepth, caught_up, counts_between, lost, traffic
from mtplab.engines.engine import Answer, Known, NotAnAnswer
from mtplab.engines.figures import samples_of
from mtplab.engines.measured import Counts
from mtplab.engines.registry import ENGINES
from mtplab.errors import MtplabError
from tests.engine_texts import SERVED, TEXTS, answers, looked, recorded, samples

# recorded figures


@pytest.mark.parametrize(
    ("engine", "prompt", "tokens", "expected"),
    [
        ("vllm", 8, (32,) * 4, Counts(124, 55, 165, 73, (32, 23, 18))),
        ("tensorrt_llm", 8, (32,) * 4, Counts(124, 55, 165, 73, (32, 23, 18))),
        # 55 rounds, and two last tokens that came of a step with no draft
        ("llamacpp", 8, (32,) * 4, Counts(124, 57, 161, 67, (31, 20, 16))),
        ("lmdeploy", 16, (27, 27, 27, 26), Counts(103, 40, 120, 63, (31, 20, 12))),
        ("sglang", 16, (27, 27, 27, 26), Counts(103, 40, None, None, None)),
    ],
)
def test_what_was_counted_between_two_looks(engine, prompt, tokens, expected):
    counted = looked(engine, "after").since(looked(engine, "before"))
    given_answers = answers(*tokens, prompt=prompt)
    assert caught_up(counted, given_answers) and traffic(counted, given_answers) is None
    assert counts_between(ENGINES[engine], counted, given_answers, 3) == expected
    assert lost(ENGINES[engine], counted, given_answers, 3) is None


@pytest.mark.parametrize("engine", SERVED)
def test_a_text_says_where_it_is_from(engine):
    for path in TEXTS.glob(f"{engine}-*.txt"):
        first = path.read_text().split("# HELP")[0]
        assert any(word in first for word in ("recorded from a running server", "not recorded", "no server"))
    assert "ecorded" in recorded(engine)["about"]


def test_when_a_counter_was_made_is_not_taken_for_it():
    text = (TEXTS / "vllm-after.txt").read_text()
    assert "vllm:spec_decode_num_drafts_created{" in text
    assert looked("vllm", "after").rounds == 55 and looked("vllm", "after").requests == 4


@pytest.mark.parametrize("engine", ["vllm", "llamacpp"])
def test_at_depth_0_a_token_is_a_round(engine):
    counted = looked(engine, "depth0")
    assert counts_between(ENGINES[engine], counted, answers(*(32,) * 4), 0) == Counts(124, 124, 0, 0, ())
    with pytest.raises(WrongDepth, match="was to draft none"):
        counts_between(ENGINES[engine], looked(engine, "after"), answers(*(32,) * 4), 0)


@pytest.mark.parametrize("engine", ["vllm", "llamacpp", "lmdeploy", "tensorrt_llm"])
def test_a_server_that_drafts_deeper_or_not_at_all_is_found_out(engine):
    counted = looked(engine, "after").since(looked(engine, "before"))
    with pytest.raises(WrongDepth, match="3 tokens a round"):
        counts_between(ENGINES[engine], counted, answers(*(32,) * 4), 2)
    idle = dataclasses.replace(counted, rounds=0, drafted=0, accepted=0, per_position=(0, 0, 0))
    with pytest.raises(WrongDepth, match="speculation is off"):
        counts_between(ENGINES[engine], idle, answers(*(32,) * 4), 3)


# what a server says of itself


def known(engine: str, moment: str, about: dict | None = None) -> Known:
    return ENGINES[engine].known(about or {}, samples(f"{engine}-{moment}"))


def test_what_vllm_says():
    about = {"/version": recorded("vllm")["version"]}
    assert known("vllm", "before", about) == Known("0.32.0", depth=3, quant_policy="none", dp=1)
    assert known("vllm", "depth0", about) == Known("0.32.0", depth=0, quant_policy="none", dp=1)
    for word, policy in (("fp8", "fp8_e4m3"), ("int8_per_token_head", "int8"), ("nvfp4", "nvfp4"), ("fp8_e5m2",) * 2):
        text = f'vllm:cache_config_info{{cache_dtype="{word}",engine="0"}} 1.0\n'
        assert ENGINES["vllm"].known({}, samples_of(text)) == Known(quant_policy=policy)


def test_what_sglang_says():
    told = recorded("sglang")["server_info"]
    expected = Known("0.5.23", 3, "fp8_e4m3", "none", tp=8, ep=8, dp=1)
    assert known("sglang", "before", {"/server_info": told}) == expected
    assert known("sglang", "before") == Known()
    plain = told | {"speculative_algorithm": None, "kv_cache_dtype": "auto"}
    # auto is what the checkpoint says, which it does not tell
    assert known("sglang", "before", {"/server_info": plain}) == Known("0.5.23", 0, tp=8, ep=8, dp=1)
    for more in (
        {"speculative_eagle_topk": 4},
        {"speculative_adaptive": True},
        {"speculative_accept_threshold_single": 0.9},
    ):
        with pytest.raises(MtplabError, match=next(iter(more))):
            known("sglang", "before", {"/server_info": told | more})


def test_what_lmdeploy_says():
    assert known("lmdeploy", "before") == Known()
    assert known("lmdeploy", "after") == Known(depth=3)


def test_what_tensorrt_llm_says():
    about = {"/version": recorded("tensorrt_llm")["version"]}
    assert known("tensorrt_llm", "before", about) == Known("1.3.0", depth=3)
    text = (TEXTS / "tensorrt_llm-after.txt").read_text()
    off = "\n".join(line for line in text.splitlines() if "speculative_config_info" not in line) + "\n"
    fp8 = off.replace('cache_dtype="auto"', 'cache_dtype="fp8"')
    assert ENGINES["tensorrt_llm"].known({}, samples_of(fp8)) == Known(depth=0, quant_policy="fp8_e4m3")
    # an older one, that says nothing of what it runs with
    assert ENGINES["tensorrt_llm"].known({}, samples_of('trtllm_request_success_total{a="b"} 1\n')) == Known()


def test_what_llamacpp_says():
    found = recorded("llamacpp")
    about = {"/props": found["props"], "/slots": found["slots3"]}
    version = found["props"]["build_info"]
    assert known("llamacpp", "before", about) == Known(version)
    assert known("llamacpp", "after", about | {"/slots": found["slots3_after"]}) == Known(version, depth=3)
    assert known("llamacpp", "depth0", about | {"/slots": found["slots0"]}) == Known(version, depth=0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("odd", [None, [], {}, "x", 3, [None], [{}], {"version": 7, "build_info": []}])
def test_odd_words_of_a_server_are_not_known(engine, odd):
    description = ENGINES[engine]
    found = description.known(dict.fromkeys(description.about_paths, odd), {})
    assert found.depth == (0 if engine == "sglang" and isinstance(odd, dict) else None)
    assert found.version is None or isinstance(found.version, str) or engine in ("vllm", "mtplab", "tensorrt_llm")


# answers


def test_answers_of_vllm():
    found, engine = recorded("vllm"), ENGINES["vllm"]
    read = [engine.answer(each, 3) for each in found["depth3"]]
    assert [(a.prompt_tokens, a.completion_tokens, len(a.ids)) for a in read] == [(8, 32, 32)] * 4
    assert read[0].ids[:4] == (606, 265, 343, 66)
    # 15 rounds, of which [7, 3, 2, 3] accepted 0 … 3; nothing is cut of this one
    assert read[0].counts == Counts(31, 15, 45, 16, (8, 5, 3))
    server = looked("vllm", "after")
    assert sum(a.counts.rounds for a in read) == server.rounds == 55
    # 4 + 55 + 73 = 132, and 128 were given: what was cut is out of the answers' own
    assert sum(a.counts.accepted for a in read) == server.accepted - 4 == 124 - 55
    for answer in read:
        assert sum(answer.counts.per_position) == answer.counts.accepted
    summary = engine.answer(found["summary"], found["summary"]["metrics"]["speculative_decoding"]["num_spec_tokens"])
    assert summary.counts.rounds == found["summary"]["metrics"]["speculative_decoding"]["num_spec_steps"]
    plain = engine.answer(found["depth0"], 0)
    assert plain.counts == Counts(31, 31, 0, 0, ()) and engine.answer(found["depth0"], 3).counts is None
    assert engine.tokens(found["tokenize"]) == [665, 289, 457, 541, 26]


def test_steps_of_vllm_that_had_nothing_to_draft_are_rounds():
    body = copy.deepcopy(recorded("vllm")["depth3"][0])
    spec = body["metrics"]["speculative_decoding"]
    assert spec["per_step_accepted"][-1] == 3
    # as if its last token had come of a step in which nothing was left to draft
    spec["per_step_accepted"][-1] = 2
    assert ENGINES["vllm"].answer(body, 3).counts == Counts(31, 16, 45, 15, (8, 5, 2))
    # the same from counts by number
    spec |= {"per_step_accepted": None, "acceptance_histogram": [7, 3, 3, 2]}
    assert ENGINES["vllm"].answer(body, 3).counts == Counts(31, 16, 45, 15, (8, 5, 2))


def test_answers_of_sglang():
    answer = ENGINES["sglang"].answer(recorded("sglang")["depth3"], 3)
    assert answer.ids == (5, 6, 7, 8, 9, 10, 11, 12)
    # before the cut, as the server's own
    assert answer.counts == Counts(7, 3, 9, 5, (3, 2, 0))


def test_answers_of_tensorrt_llm():
    body = recorded("tensorrt_llm")["depth3"]
    answer = ENGINES["tensorrt_llm"].answer(body, 3)
    assert (answer.text, answer.ids, answer.counts) == ("", (5, 6, 7, 8, 9, 10, 11, 12), Counts(7, 3, 9, 5, (3, 2, 0)))
    del body["choices"][0]["speculative_decoding"]
    assert ENGINES["tensorrt_llm"].answer(body, 3).counts is None


def test_answers_of_lmdeploy():
    found, engine = recorded("lmdeploy"), ENGINES["lmdeploy"]
    assert engine.answer(found["length"], 3) == Answer("abc", (5, 6, 7, 8, 9, 10, 11, 12), 3, 8, None)
    # its counters have the token that ended it
    assert engine.answer(found["stop"], 3) == Answer("abc", (5, 6, 7), 3, 4, None)


def test_answers_of_llamacpp():
    found, engine = recorded("llamacpp"), ENGINES["llamacpp"]
    answer = engine.answer(found["depth3"], 3)
    assert (answer.prompt_tokens, answer.completion_tokens, answer.ids[:3]) == (8, 32, (606, 265, 343))
    # its log said: mean len = 1.82
    assert answer.counts == Counts(31, 17, 48, 14, None) and f"{31 / 17:.2f}" == "1.82"
    assert engine.answer(found["depth0"], 0).counts == Counts(31, 31, 0, 0, ())
    # how much of its last round is cut is not said
    assert engine.answer(found["depth3"] | {"stop_type": "eos"}, 3).counts is None
    assert engine.tokens(found["tokenize"]) == [665, 289, 457, 541, 26]


BROKEN = {
    "vllm": ("depth3", [
        (("choices",), [], "no choices"), (("choices", 0, "token_ids"), [1], "1 ids"), (("usage",), None, "no usage"),
        (("choices", 0, "text"), 3, "no text"), (("usage", "completion_tokens"), True, "no count"),
        (("metrics", "speculative_decoding", "per_step_accepted"), [4] * 15, "at depth 3"),
        (("metrics", "speculative_decoding", "per_step_accepted"), [0] * 14, "at depth 3"),
        (("metrics", "speculative_decoding", "per_step_accepted"), "x", "whole numbers"),
        (("metrics", "speculative_decoding"), 3, "not an object"),
    ]),
    "sglang": ("depth3", [
        (("sglext", "spec_tokens_details", "spec_verify_ct"), 4, "not of 4 rounds"),
        (("sglext", "spec_tokens_details", "spec_num_proposed_drafts"), 12, "drafted 12"),
        (("sglext", "spec_tokens_details", "spec_correct_drafts_histogram"), [1, 0, 1, 0, 1], "not of 3 rounds"),
        (("choices", 0, "token_ids"), [-1] * 8, "whole numbers"),
    ]),
    "tensorrt_llm": ("depth3", [
        (("choices", 0, "speculative_decoding", "acceptance_histogram"), [3, 0, 0, 0], "not of 3 rounds and 5"),
        (("choices", 0, "speculative_decoding", "total_draft_tokens"), 4, "drafted 4"),
    ]),
    "lmdeploy": ("length", [
        (("output_ids",), [1], "1 ids"), (("meta_info",), None, "no meta_info"), (("text",), None, "no text"),
        (("meta_info", "finish_reason"), None, "no finish_reason"),
    ]),
    "llamacpp": ("depth3", [
        (("tokens",), [1], "1 ids"), (("content",), None, "no text"), (("timings", "draft_n"), 60, "drafted 60"),
        (("timings", "draft_n_accepted"), 31, "accepted 31"), (("tokens_evaluated",), -1, "no count"),
    ]),
}  # fmt: skip


@pytest.mark.parametrize(
    ("engine", "which", "path", "value", "said"),
    [(engine, which, *case) for engine, (which, cases) in BROKEN.items() for case in cases],
)
def test_broken_answers_are_said_to_be(engine, which, path, value, said):
    body = recorded(engine)[which]
    holder = body = body[0] if isinstance(body, list) else body
    for part in path[:-1]:
        holder = holder[part]
    holder[path[-1]] = value
    with pytest.raises(NotAnAnswer, match=said):
        ENGINES[engine].answer(body, 3)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("body", [None, [], {}, "x", 3, {"choices": [None]}, {"choices": [{}], "usage": {}}])
def test_no_answer_is_said_to_be_none(engine, body):
    with pytest.raises(NotAnAnswer):
        ENGINES[engine].answer(body, 3)


# requests


@pytest.mark.parametrize("engine", SERVED)
def test_everything_that_chooses_tokens_is_sent(engine):
    description = ENGINES[engine]
    greedy = description.request("m", [1, 2], SamplingConfig(max_new_tokens=7, ignore_eos=True), 3)
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"], greedy["stream"]) == (0.0, 1, 1.0, False)
    assert greedy["ignore_eos"] is True and 7 in (greedy.get("max_tokens"), greedy.get("n_predict"))
    assert [1, 2] in (greedy.get("prompt"), greedy.get("input_ids"))
    drawn = description.request("m", [1], SamplingConfig(temperature=0.7, top_p=0.9), 3)
    nothing_cut = -1 if engine == "sglang" else 0
    assert (drawn["temperature"], drawn["top_k"], drawn["top_p"]) == (0.7, nothing_cut, 0.9)
    assert drawn.get("seed") == (None if engine == "lmdeploy" else 3)
    assert description.request("m", [1], SamplingConfig(temperature=1.0, top_k=5), 0)["top_k"] == 5
    # it refuses what it does not know
    allowed = {"model", "prompt", "max_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos", "stream"}
    assert engine != "tensorrt_llm" or set(greedy) | set(drawn) == allowed | {"detokenize"}
    # a seed of its own choice is not asked for
    assert ENGINES["llamacpp"].request("m", [1], SamplingConfig(temperature=1.0), 2**32 - 1)["seed"] == 0
