"""A trace: every depth from one pass, as the real runner counts it; written, read back, and what is refused."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

import mtplab
from mtplab.checkpoint import write_safetensors
from mtplab.decode import AcceptanceStats
from mtplab.errors import ConfigError
from mtplab.study.trace import Trace, trace

PROMPTS = ["Once upon a time", "def main():", "In the beginning God created", "The"]


@pytest.fixture(scope="module")
def fp8_model(bundled_fp8):
    return mtplab.load_model(bundled_fp8)


def counted(model, found: Trace, depth: int, **settings) -> None:
    """The runner at this depth, round for round, prompt by prompt."""
    run = mtplab.generate(model, PROMPTS, depth=depth, **settings)
    assert run.tokens == found.outputs
    assert found.acceptance().per_prompt(depth) == run.per_prompt, depth


@pytest.mark.parametrize("policy", ["none", "int8", "int4", "fp8_e4m3", "fp8_e5m2"])
def test_every_depth_is_the_runners(fp8_model, policy):
    settings = {"quant_policy": policy, "max_new_tokens": 40, "exact": True}
    found = trace(fp8_model, PROMPTS, max_depth=16, **settings)
    for depth in (0, 1, 2, 3, 5, 8, 16):
        counted(fp8_model, found, depth, **settings)


@pytest.mark.parametrize("hidden", [("post_norm", "pre_norm"), ("pre_norm", "post_norm")])
def test_it_feeds_what_the_run_feeds(fp8_model, hidden):
    settings = {"target_hidden": hidden[0], "draft_hidden": hidden[1], "max_new_tokens": 24, "exact": True}
    found = trace(fp8_model, PROMPTS, max_depth=4, max_batch=3, **settings)
    counted(fp8_model, found, 4, max_batch=3, **settings)


def test_sampled_outputs_of_greedy_drafts_are_counts_too(fp8_model):
    found = trace(fp8_model, PROMPTS, max_depth=3, temperature=0.8, seed=5, max_new_tokens=24)
    stats = found.acceptance().stats(3)
    assert isinstance(stats.rounds, int) and stats.emitted == sum(map(len, found.outputs)) - len(PROMPTS)
    assert np.isfinite(found.log_p).all() and (found.log_p <= 0).all()


def test_written_and_read_back(fp8_model, tmp_path):
    found = trace(fp8_model, PROMPTS, max_depth=3, max_new_tokens=12, domains=["a", "b", "a", "b"])
    found.save(tmp_path / "trace.safetensors")
    again = Trace.load(tmp_path / "trace.safetensors")
    assert isinstance(again.hits, np.memmap) and again.outputs == found.outputs
    assert again.settings == found.settings and again.domains == ("a", "b", "a", "b")
    for depth in range(4):
        assert again.acceptance().per_prompt(depth) == found.acceptance().per_prompt(depth)
    assert sum(again.acceptance().by_domain(2).values(), AcceptanceStats(2, 0, 0, 0, 0, (0, 0))) == (
        found.acceptance().stats(2)
    )
    mtplab.checkpoint.write_safetensors(tmp_path / "other.safetensors", {})
    with pytest.raises(ConfigError, match="expected a trace"):
        Trace.load(tmp_path / "other.safetensors")


def test_one_token_has_no_rounds(fp8_model):
    found = trace(fp8_model, PROMPTS, max_depth=2, max_new_tokens=1)
    assert found.acceptance().stats(2).rounds == 0 and found.acceptance().length(2) is None


def test_gates_and_schedules_lie_between_their_depths(fp8_model):
    acceptance = trace(fp8_model, PROMPTS, max_depth=4, max_new_tokens=40).acceptance()
    assert acceptance.gate(0.0) == acceptance.stats(4)
    assert acceptance.gate(1.0).rounds >= acceptance.gate(0.5).rounds >= acceptance.stats(4).rounds
    assert acceptance.schedule(lambda at: np.full(at.shape, 2)).rounds == acceptance.stats(2).rounds
    edges = [0, 20, 1000]
    assert len(acceptance.by_context(4, edges)) == 2


@pytest.mark.parametrize(
    "arguments", [{"max_depth": 0}, {"max_depth": 17}, {"domains": ["a"]}, {"max_new_tokens": 0}, {"temperature": -1}]
)
def test_what_is_refused(fp8_model, arguments):
    with pytest.raises(ConfigError):
        trace(fp8_model, PROMPTS, **arguments)


def test_depths_that_were_not_traced_or_are_none(fp8_model):
    acceptance = trace(fp8_model, PROMPTS, max_depth=2, max_new_tokens=8).acceptance()
    assert acceptance.gate(0.5, depth=0).rounds == acceptance.stats(0).rounds
    for depths in (lambda at: np.full(at.shape, 3), lambda at: np.full(at.shape, 1.9), lambda at: np.zeros(1, int)):
        with pytest.raises(ConfigError, match="whole depths from 0 to 2"):
            acceptance.schedule(depths)


@pytest.mark.parametrize(
    "change",
    [
        {"log_p": torch.zeros(3, dtype=torch.float64)},
        {"log_p": torch.zeros(3)},
        {"hits": torch.zeros(5, 2, dtype=torch.bool)},
        {"output_lengths": torch.zeros(4, dtype=torch.int64)},
        {"hits": torch.tensor([[False, True]]).repeat(28, 1)},
        {"top": torch.full((28, 2), 0.5)},
    ],
)
def test_a_file_whose_arrays_do_not_belong_together(fp8_model, tmp_path, change):
    found = trace(fp8_model, PROMPTS, max_depth=2, max_new_tokens=8)
    found.save(tmp_path / "trace.safetensors")
    with safe_open(tmp_path / "trace.safetensors", "pt") as file:
        arrays, facts = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    write_safetensors(tmp_path / "trace.safetensors", arrays | change, facts)
    with pytest.raises(ConfigError, match="trace again"):
        Trace.load(tmp_path / "trace.safetensors")
