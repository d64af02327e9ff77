"""Asking a server that counts truly gives its counts; one that fails in any way gives an error in time, and no more.

The server is `fake_engine`, which speaks as vLLM does.
"""

import json
import socket
import threading
import time

import pytest

from fake_engine import FakeEngine, in_a_thread, rounds_of
from mtplab.config import SamplingConfig
from mtplab.engines import Attach, Limits
from mtplab.engines.attach import attach
from mtplab.engines.measured import Measured
from mtplab.engines.vllm import Vllm
from mtplab.errors import ConfigError, MtplabError

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
DOMAINS = ["code", "prose", "code", "prose"]
TOKENS = 20
NO = threading.Event()
QUICK = Limits(request=1.0, point=20.0)
SHORT = 0.4  # seconds for one request, where the server takes longer


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch):
    """Between two attempts at a group; nothing here is about how long they are."""
    monkeypatch.setattr("mtplab.engines.asking._PAUSE", 0.02)


def measured(engine: FakeEngine, depth: int | None = None, cancel=NO, told=None, **limits) -> Measured:
    settings = Attach(addresses=(engine.url,), limits=QUICK.model_copy(update=limits))
    server = attach(settings)[0].open(cancel)
    sampling = SamplingConfig(max_new_tokens=TOKENS)
    return server.measure(PROMPTS, DOMAINS, engine.depth if depth is None else depth, sampling, cancel, told)


def total(found: Measured):
    counts = [share.counts for share in found.shares]
    out = counts[0]
    for each in counts[1:]:
        out += each
    return out


# a server that works


@pytest.mark.parametrize("own", [False, True], ids=["metrics", "answers"])
@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("depth", [0, 1, 3, 5])
def test_what_a_server_counts_is_what_is_measured(depth, concurrency, own):
    with FakeEngine(depth, own=own) as engine:
        engine.count(9, 50)  # by somebody, before
        found = measured(engine, concurrency=concurrency)
    counts, rounds = total(found), rounds_of(TOKENS, depth) if depth else []
    n = len(PROMPTS)
    assert counts.tokens == n * (TOKENS - 1)
    if not depth:
        assert (counts.rounds, counts.drafted, counts.accepted, counts.per_position) == (counts.tokens, 0, 0, ())
    else:
        assert (counts.rounds, counts.drafted) == (n * len(rounds), n * depth * len(rounds))
        # an answer says which drafts lie beyond its end, the server's counters do not
        cut = sum(rounds) + len(rounds) - (TOKENS - 1)
        assert counts.accepted == n * (sum(rounds) - (cut if own else 0))
        assert counts.per_position[0] >= counts.per_position[-1]
    alone = concurrency == 1 or own or not depth
    assert sorted(len(share.prompts) for share in found.shares) == ([1] * n if alone else [2, 2])
    assert sorted(p for share in found.shares for p in share.prompts) == list(range(n))
    assert found.remarks == () and len(found.outputs) == n and found.outputs[0] != found.outputs[1]
    assert (found.engine, found.version) == ("vllm", "0.32.0")
    assert engine.url not in json.dumps(found.facts)


def test_no_more_requests_are_under_way_than_asked_for():
    with FakeEngine() as engine:
        engine.delay = 0.05
        measured(engine, concurrency=2)
        assert engine.most == 2
        seen = []
        measured(engine, told=lambda progress: seen.append((progress.tokens_done, progress.tokens_total)))
    assert [done for done, _ in seen] == [20, 40, 60, 80] and {of for _, of in seen} == {80}


def test_it_works_where_an_event_loop_runs_as_in_a_notebook():
    async def cell():
        return measured(engine)

    with FakeEngine() as engine:
        assert total(in_a_thread(cell())).rounds == len(PROMPTS) * len(rounds_of(TOKENS, 3))


# other people's requests


def stranger(engine, number, handler):
    if number == 2:
        engine.count(7, 30)
    return False


@pytest.mark.parametrize("own", [False, True])
def test_other_traffic_is_said(own):
    with FakeEngine(own=own, fault=stranger) as engine:
        found = measured(engine, attempts=1)
    (remark,) = found.remarks
    assert "other traffic" in remark and "1 request and 37 tokens" in remark
    assert ("leave out" in remark) == own
    if own:  # and the counts are of our requests alone
        assert total(found).rounds == len(PROMPTS) * len(rounds_of(TOKENS, 3))


def test_a_group_that_others_disturbed_is_measured_again():
    with FakeEngine(fault=stranger) as engine:
        found = measured(engine, attempts=2)
        assert engine.begun == len(PROMPTS) + 2  # the two prompts of the group that was disturbed, once more
    assert found.remarks == () and total(found).rounds == len(PROMPTS) * len(rounds_of(TOKENS, 3))


def test_a_request_of_others_that_is_under_way_is_said(monkeypatch):
    monkeypatch.setattr(Vllm, "lag", 0.3)
    with FakeEngine() as engine:
        engine.running = 1
        found = measured(engine, attempts=1)
    assert "others had requests under way" in found.remarks[0]


# faults


def once(answer):
    """A fault that spoils the second completion only."""

    def fault(engine, number, handler):
        return number == 2 and answer(engine, handler)

    return fault


def always(answer):
    return lambda engine, number, handler: number >= 2 and answer(engine, handler)


def broken_500(engine, handler):
    handler.send(500, {"error": {"message": "engine died\x1b[31m"}})
    return True


def hangs(engine, handler):
    time.sleep(1.0)
    return False


def drips(engine, handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    try:
        for _ in range(60):  # for longer than the test may take, were it not for a limit on the whole request
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)
    except OSError:
        pass  # the other side had enough
    return True


def half(engine, handler):
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [{"text"')
    handler.close_connection = True
    return True


def cut_json(engine, handler):
    handler.send(200, '{"choices": [{"text": "x"')
    return True


def empty(engine, handler):
    handler.send(200, {"choices": []})
    return True


def no_usage(engine, handler):
    handler.send(200, {"choices": [{"text": "x", "token_ids": [1]}]})
    return True


def odd_usage(engine, handler):
    handler.send(200, {"choices": [{"text": "x"}], "usage": {"prompt_tokens": 3, "completion_tokens": -1}})
    return True


def closes(engine, handler):
    handler.close_connection = True
    return True


def resets(engine, handler):
    engine.zero()
    engine.started += 100
    return False


def counts_fall(engine, handler):
    engine.generated = engine.rounds = 0
    return False


FAULTS = {
    "500": (broken_500, "status 500"),
    "hang": (hangs, "no answer within 0.4 s"),
    "drips": (drips, "no answer within 0.4 s"),
    "half": (half, "broke off"),
    "cut": (cut_json, "half an answer"),
    "empty": (empty, "no choices of one element"),
    "usage": (no_usage, "no usage"),
    "odd": (odd_usage, "completion_tokens is -1"),
    "closes": (closes, "broke off"),
    "reset": (resets, "started anew"),
    "falls": (counts_fall, "fell from|shows 2 requests and 0 tokens"),
}


def time_for(answer) -> float:
    """Seconds for one request: few where it is the server that takes long, else what a busy machine may need."""
    return SHORT if answer in (hangs, drips) else 5.0


@pytest.mark.parametrize("answer", [fault for fault, _ in FAULTS.values()], ids=list(FAULTS))
def test_what_fails_once_is_measured_again_and_counted_once(answer):
    with FakeEngine(fault=once(answer)) as engine:
        engine.count(9, 50)
        found = measured(engine, request=time_for(answer))
    assert total(found).rounds == len(PROMPTS) * len(rounds_of(TOKENS, 3))
    assert total(found).tokens == len(PROMPTS) * (TOKENS - 1) and found.remarks == ()


@pytest.mark.parametrize(("answer", "said"), FAULTS.values(), ids=list(FAULTS))
def test_what_always_fails_is_an_error_in_time_that_says_so(answer, said, monkeypatch):
    monkeypatch.setattr(Vllm, "lag", 0.5)
    before, began = threading.active_count(), time.monotonic()
    with FakeEngine(fault=always(answer)) as engine:
        engine.count(9, 50)
        with pytest.raises(MtplabError, match=said) as error:
            measured(engine, attempts=2, request=time_for(answer))
    assert time.monotonic() - began < 10
    assert "2 times in all" in str(error.value) and "\x1b" not in str(error.value)
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before


@pytest.mark.parametrize("status", [429, 503])
def test_what_a_server_puts_off_is_asked_again(status):
    def busy(engine, number, handler):
        if number in (1, 2, 3):
            handler.send(status, "later", {"Retry-After": "0"})
        return number in (1, 2, 3)

    with FakeEngine(fault=busy) as engine:
        found = measured(engine, attempts=4)
        assert engine.begun == len(PROMPTS) + 3
    assert total(found).rounds == len(PROMPTS) * len(rounds_of(TOKENS, 3))


def test_a_refusal_is_not_tried_again():
    def refuse(engine, number, handler):
        handler.send(400, {"error": {"message": "max_tokens is too large"}})
        return True

    with FakeEngine(fault=refuse) as engine:
        with pytest.raises(MtplabError, match=r"status 400 \(max_tokens is too large\)"):
            measured(engine, concurrency=1)
        assert engine.begun == 1


def test_a_server_that_dies_is_an_error():
    with FakeEngine() as engine:
        twice = QUICK.model_copy(update={"attempts": 2})
        server = attach(Attach(addresses=(engine.url,), limits=twice))[0].open(NO)
    with pytest.raises(MtplabError, match="cannot be reached"):
        server.measure(PROMPTS, DOMAINS, 3, SamplingConfig(max_new_tokens=TOKENS), NO, None)


def test_a_point_ends_at_its_limit_and_nothing_stays_under_way():
    with FakeEngine() as engine:
        engine.delay = 0.2
        began = time.monotonic()
        with pytest.raises(MtplabError, match=r"not done within 0\.3 s"):
            measured(engine, point=0.3, concurrency=1)
        assert time.monotonic() - began < 3
        asked = engine.begun
        time.sleep(0.5)
        assert engine.begun == asked and engine.running == 0


def test_a_cancel_ends_it_at_once():
    cancel = threading.Event()
    with FakeEngine() as engine:
        engine.delay = 0.5
        threading.Timer(0.7, cancel.set).start()
        began = time.monotonic()
        with pytest.raises(MtplabError):
            measured(engine, cancel=cancel, concurrency=1)
        assert time.monotonic() - began < 3


def test_figures_that_never_come_are_an_error(monkeypatch):
    monkeypatch.setattr(Vllm, "lag", 0.2)
    with FakeEngine() as engine:
        engine.metrics = engine.exposition()  # and no others from now on
        with pytest.raises(MtplabError, match="vLLM shows 0 requests and 0 tokens 0.2 s after 2 requests of 40 tokens"):
            measured(engine, attempts=1)


# the depth is what was asked for


def test_a_server_that_drafts_otherwise_is_found_out():
    with FakeEngine(3) as engine:
        with pytest.raises(MtplabError, match="was to draft none"):
            measured(engine, depth=0)
        with pytest.raises(MtplabError, match="drafts 3 tokens a round; it was to draft 2"):
            measured(engine, depth=2)
    with FakeEngine(0) as engine, pytest.raises(MtplabError, match="speculation is off"):
        measured(engine, depth=3)


# attaching


def test_an_attached_server_says_what_it_is():
    with FakeEngine(4) as engine:
        (found,) = attach(Attach(addresses=(engine.url + "/v1/",), limits=QUICK))
    assert (found.engine, found.version, found.depth, found.model) == ("vllm", "0.32.0", 4, "fake")
    assert found.contradiction("none", "none") is None
    assert "its cache is none" in found.contradiction("int8", "int8")


def test_what_is_no_engine_is_said_to_be_none():
    with FakeEngine() as engine:
        engine.metrics = "python_gc_objects_collected_total 4.0\n"
        with pytest.raises(MtplabError, match="metrics are of no engine that is known"):
            attach(Attach(addresses=(engine.url,), limits=QUICK))
        engine.metrics = "<html>"
        with pytest.raises(MtplabError, match="no engine|no metrics"):
            attach(Attach(addresses=(engine.url,), limits=QUICK))
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(MtplabError, match="cannot be reached"):
            attach(Attach(addresses=(f"http://127.0.0.1:{nobody.getsockname()[1]}",), limits=QUICK))


def test_the_key_is_sent_and_never_shown(monkeypatch):
    with FakeEngine(key="sk-very-secret") as engine:
        monkeypatch.delenv("MTPLAB_API_KEY", raising=False)
        with pytest.raises(MtplabError, match="wants an API key"):
            attach(Attach(addresses=(engine.url,), limits=QUICK))
        monkeypatch.setenv("MTPLAB_API_KEY", "sk-other-secret")
        with pytest.raises(MtplabError, match="wants an API key") as error:
            attach(Attach(addresses=(engine.url,), limits=QUICK))
        assert "sk-other" not in str(error.value)
        monkeypatch.setenv("KEY_OF_MINE", "sk-very-secret")
        settings = Attach(addresses=(engine.url,), limits=QUICK, key_variable="KEY_OF_MINE")
        (found,) = attach(settings)
        assert "secret" not in repr(found) + repr(settings)
        assert found.encode("ab") == [97, 98]


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:8000", "ftp://a", "http://", "http://a/?b=c", "http://a b", "http://a:99999", "", "http://[::1", None],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="address"):
        Attach.of(addresses=(address,))


def test_a_password_in_an_address_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="MTPLAB_API_KEY") as error:
        Attach.of(addresses=("http://me:hunter2@host:80",))
    assert "hunter2" not in str(error.value)
