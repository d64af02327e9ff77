"""How many CPU threads a run takes, and that torch's setting is as before afterwards."""

from __future__ import annotations

import pytest
import torch

from mtplab import ConfigError, generate, load_model
from mtplab.decode.threads import SMALL_WEIGHTS, running_with, thread_count

CPU = torch.device("cpu")


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_a_small_model_gets_one_thread_unless_the_user_says_otherwise(four_threads, monkeypatch):
    assert thread_count(None, SMALL_WEIGHTS // 4 - 1, CPU) == 1
    assert thread_count(None, SMALL_WEIGHTS // 4, CPU) == 4
    assert thread_count(None, 1, torch.device("cuda")) == 4
    assert thread_count(3, 1, CPU) == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert thread_count(None, 1, CPU) == 4
    for nonsense in ("", "many", "0", "-3", "1.5"):
        monkeypatch.setenv("OMP_NUM_THREADS", nonsense)
        assert thread_count(None, 1, CPU) == 1


@pytest.mark.parametrize("threads", [0, -1, 1.0, True, "2", 100_000, 2**40])
def test_a_number_that_is_none(threads):
    with pytest.raises(ConfigError, match="threads is"):
        thread_count(threads, 1, CPU)


def test_the_setting_comes_back(four_threads):
    with pytest.raises(KeyError), running_with(2):
        assert torch.get_num_threads() == 2
        raise KeyError
    assert torch.get_num_threads() == 4


def test_generate_says_how_many_it_took(four_threads, bundled):
    seen = []
    model = load_model(bundled)
    how = {"depth": 1, "max_new_tokens": 3, "on_round": lambda p: seen.append(torch.get_num_threads())}
    assert generate(model, [[1, 2]], **how).settings["threads"] == 1
    assert generate(model, [[1, 2]], **how, threads=2).settings["threads"] == 2
    assert set(seen) == {1, 2} and torch.get_num_threads() == 4
