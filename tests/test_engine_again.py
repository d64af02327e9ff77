"""What is asked again, how often, and what a request that was given up does to the next: nothing that is not said."""

import asyncio
import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import mtplab
import study_fakes
from fake_engine import FakeEngine, in_a_thread, rounds_of
from mtplab.engines import Attach, Limits, ServerSlot, client
from mtplab.engines.client import Client
from mtplab.engines.figures import FiguresFull
from mtplab.engines.launch import launched
from mtplab.engines.vllm import Vllm
from mtplab.errors import MtplabError
from tests.misbehaving_engine import fake, measure, wanted
from tests.test_engine_asking import PROMPTS, TOKENS, always, measured, total

__all__ = ["fake"]

ROUNDS = len(PROMPTS) * len(rounds_of(TOKENS, 3))


# a request that was given up


def test_a_request_that_was_given_up_is_waited_for(monkeypatch):
    monkeypatch.setattr(Vllm, "lag", 0.3)

    def hangs(engine, number, handler):
        if number == 1:
            time.sleep(2.0)
        return False

    with FakeEngine(fault=hangs) as engine:
        found = measured(engine, attempts=2, request=1.0)
    assert found.remarks == () and total(found).rounds == ROUNDS


def test_one_that_outlasts_the_wait_is_said_to_be_perhaps_our_own(monkeypatch):
    monkeypatch.setattr(Vllm, "figures", dataclasses.replace(Vllm.figures, busy=()))
    again = threading.Event()

    def hangs(engine, number, handler):
        if number == 1:
            again.wait(20)
        if number == 3:
            again.set()
            time.sleep(0.5)
        return False

    with FakeEngine(fault=hangs) as engine:
        began = time.monotonic()
        found = measured(engine, attempts=2, request=1.0)
    assert time.monotonic() - began > 2.7  # its counts were still for a second
    (remark,) = found.remarks
    assert "of it, or a request of these that was given up and asked again" in remark and "1 request and 2" in remark


# how often


def test_what_is_always_put_off_is_asked_as_often_as_is_said(bundled, tmp_path):
    def later(engine, number, handler):
        handler.send(503, "later", {"Retry-After": "0"})
        return True

    with FakeEngine(fault=later) as engine:
        settings = Attach(addresses=(engine.url,), limits=Limits(attempts=3))
        (row,) = mtplab.sweep(bundled, [[1]], depths=[3], max_new_tokens=9, results=tmp_path, engine=settings).rows
        assert engine.begun == 3
    assert row.error == "vLLM /v1/completions: status 503 (later), 3 times in all"


def test_a_request_waits_for_as_long_as_it_was_told_itself():
    asked = []

    def later(engine, number, handler):
        asked.append(time.monotonic())
        if number > 1:
            return False
        handler.send_response(429)
        handler.send_header("Retry-After", "1.5")
        handler.send_header("Content-Length", "2")
        handler.end_headers()
        handler.wfile.flush()
        time.sleep(0.5)
        handler.wfile.write(b"no")
        return True

    async def both():
        async with Client(engine.url, None, 2) as one:

            async def another():
                await asyncio.sleep(0.25)  # between the head and the body of the first one's answer
                await one.get("/health")

            await asyncio.gather(one.post("/v1/completions", {"prompt": [1], "max_tokens": 3}), another())

    with FakeEngine(fault=later) as engine:
        in_a_thread(both())
    assert asked[1] - asked[0] > 1.9


# what is not taken


def test_a_server_that_sends_elsewhere_is_not_followed():
    with FakeEngine() as other:

        def sends(engine, handler):
            handler.send(307, "", {"Location": f"{other.url}/v1/completions"})
            return True

        with FakeEngine(fault=always(sends)) as engine, pytest.raises(MtplabError, match="sends elsewhere"):
            measured(engine)
        assert other.begun == 0


def test_an_answer_without_an_end_is_not_read_to_it(monkeypatch):
    def endless(engine, handler):
        handler.send(200, "x" * 30_000)
        return True

    with FakeEngine(fault=always(endless)) as engine:
        monkeypatch.setattr(client, "MAX_BODY", 20_000)
        with pytest.raises(MtplabError, match="an answer of more than 20000 bytes"):
            measured(engine, attempts=1)


def test_answers_and_figures_that_are_not_of_the_same_requests_are_an_error():
    def counts_more(engine, number, handler):
        with engine.lock:
            engine.rounds, engine.drafted = engine.rounds + 5, engine.drafted + 15
        return False

    with FakeEngine(own=True, fault=counts_more) as engine:
        with pytest.raises(MtplabError, match="rounds meanwhile, its answers .* not of the same requests"):
            measured(engine, attempts=1)


# servers that are had, and not


class NeverThere:
    """A `Serving` that fails; `opened` counts how often it was tried."""

    key, opened = "a", 0

    def open(self, cancel):
        self.opened += 1
        raise MtplabError("no such device")


def test_what_could_not_be_had_is_not_tried_again():
    slot, serving = ServerSlot(), NeverThere()
    for _ in range(3):
        with pytest.raises(MtplabError, match="no such device"):
            slot.get(serving, threading.Event())
    assert serving.opened == 1


def test_a_server_whose_figures_are_full_is_started_anew(fake, monkeypatch):
    monkeypatch.setattr(Vllm, "figures", dataclasses.replace(Vllm.figures, digits=6))
    slot, serving = ServerSlot(), launched(fake.settings("full"), wanted())
    try:
        first, _ = slot.get(serving, threading.Event())
        with pytest.raises(FiguresFull, match="6 digits only.*it is started anew for the next point") as found:
            measure(first)
        assert "start the server anew" not in str(found.value)
        before = fake.pids()
        second, _ = slot.get(serving, threading.Event())
        assert second is not first and fake.pids() != before and not first.alive()
    finally:
        slot.close()


def test_a_server_that_runs_already_is_to_be_started_anew_by_its_owner(monkeypatch):
    monkeypatch.setattr(Vllm, "figures", dataclasses.replace(Vllm.figures, digits=6))
    with FakeEngine() as engine:
        engine.prompt_tokens = 10**6
        with pytest.raises(FiguresFull, match="vLLM: its vllm:prompt_tokens_total is 1e.06.*; start the server anew"):
            measured(engine)


class Counting(ThreadPoolExecutor):
    """How many futures there were; `dies` loses what each gave, as a worker that is killed at its end does."""

    def __init__(self, dies: bool = False):
        super().__init__(2)
        self.futures, self.dies = 0, dies

    def submit(self, work, *arguments):
        self.futures += 1

        def done():
            found = work(*arguments)
            if self.dies:
                raise RuntimeError("the worker is gone")
            return found

        return super().submit(done)


@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_one_future_is_all_that_a_server_does_and_what_it_had_done_is_there(tmp_path, dies):
    found = study_fakes.make_checkpoint(tmp_path / "fake")
    with FakeEngine(1) as one, FakeEngine(3) as other, Counting(dies) as executor:
        engine = Attach(addresses=(one.url, other.url), limits=Limits(request=5.0, attempts=1))
        settings = {"depths": [1, 3], "temperature": [0, 0.5], "max_new_tokens": TOKENS, "results": tmp_path / "r"}
        rows = mtplab.sweep(found, PROMPTS, engine=engine, executor=executor, **settings).rows
    assert executor.futures == 2  # a server each, both temperatures in it
    assert [(row.temperature, row.depth, row.error) for row in rows] == [
        (0.0, 1, None), (0.0, 3, None), (0.5, 1, None), (0.5, 3, None)
    ]  # fmt: skip
