"""What no server can have counted is no result, and what is too much to read is not read.

The server is `fake_engine`, spoilt.
"""

import time

import pytest

from fake_engine import FakeEngine
from mtplab.engines.accounts import impossible
from mtplab.engines.measured import Counts
from mtplab.engines.vllm import Vllm
from mtplab.errors import MtplabError
from test_engine_asking import measured, total


def spoilt(**values):
    """A fault by which the counters are changed after the second answer, for good."""

    def fault(engine, number, handler):
        if number == 2:
            for name, value in values.items():
                setattr(engine, name, value(engine))
        return False

    return fault


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rounds": lambda e: 1000, "drafted": lambda e: 3000}, "rounds give 38 tokens; at depth 3"),
        ({"rounds": lambda e: e.rounds - 3, "drafted": lambda e: e.drafted - 9}, "rounds give 38 tokens"),
        ({"accepted": lambda e: 10**6}, "of .* drafts are accepted"),
        ({"places": lambda e: [0, 0, 9]}, "started anew|by position|expected fewer and fewer"),
        ({"accepted": lambda e: e.accepted - 2}, "by position"),
    ],
    ids=["many", "few", "accepted", "rising", "sum"],
)
def test_counts_that_cannot_be_are_no_result(values, said, monkeypatch):
    monkeypatch.setattr(Vllm, "lag", 0.3)
    with FakeEngine(fault=spoilt(**values)) as engine, pytest.raises(MtplabError, match=said):
        measured(engine, attempts=1)


@pytest.mark.parametrize("given", [(50, 30, 12), (3, 9, 12), (5, 15, 16)], ids=["many", "few", "accepted"])
def test_an_answers_own_counts_are_held_to_the_same(given):
    rounds, drafted, accepted = given
    assert impossible(Counts(19, rounds, drafted, accepted, None), 3) is not None
    assert impossible(Counts(19, 7, 21, 12, (6, 4, 2)), 3) is None


def test_nothing_packed_is_unpacked():
    def bomb(engine, number, handler):
        handler.send(200, "x", {"Content-Encoding": "gzip", "Content-Length": "1"})
        return True

    with FakeEngine(fault=bomb) as engine, pytest.raises(MtplabError, match="an answer in gzip, which was not asked"):
        measured(engine, attempts=1)


def test_metrics_that_are_mostly_others_are_read_and_giant_ones_are_not():
    with FakeEngine() as engine:
        own = engine.exposition
        engine.exposition = lambda: 'other:bytes_bucket{le="1"} 1\n' * 100_000 + own()
        began = time.monotonic()
        assert total(measured(engine)).rounds and time.monotonic() - began < 10
        for giant in ('vllm:x{a="b"} 1\n' * 400_000, f'vllm:x{{a="{"b" * 30_000}"}} 1\n'):
            engine.exposition = lambda giant=giant: giant + own()
            with pytest.raises(MtplabError, match="no engine that is known|metrics are more than"):
                measured(engine)


@pytest.mark.parametrize("version", [["0.32"], 3, "x" * 300, "0.32\x1b[31m"], ids=repr)
def test_a_version_that_is_none_is_an_error_of_the_server(version, monkeypatch):
    monkeypatch.setattr("fake_engine.VERSION", version)
    with FakeEngine() as engine, pytest.raises(MtplabError, match="says that its version is"):
        measured(engine)
