"""Sweeps from traces: the rows of a run, each target decoded once, traces kept, asked again and mended."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from mtplab.checkpoint.planted import plant
from mtplab.decode import tracing
from mtplab.errors import ConfigError
from mtplab.models import load_model
from mtplab.study import Prompt, sweep
from mtplab.study.trace import Trace, trace
from tests.tiny import write_tiny

TEXTS = ["Once upon a time there was", "def add(a, b):\n    return", "In the beginning"]
PROMPTS = [Prompt(str(i), "abb"[i], text) for i, text in enumerate(TEXTS)]
OWN = {"point", "method", "seconds", "tokens_per_second", "provenance"}


@pytest.fixture
def decoded(monkeypatch) -> list[int]:
    """Fresh for each test: the number of prompts of every batch that a target decodes for a trace."""
    batches = []
    go = tracing.TargetRun.go

    def counted(self, *arguments):
        batches.append(len(self.prompts))
        return go(self, *arguments)

    monkeypatch.setattr(tracing.TargetRun, "go", counted)
    return batches


def measured(bundled, folder, **changes):
    settings = {"prompts": PROMPTS, "max_new_tokens": 12, "depths": (0, 1, 4), **changes}
    return sweep(bundled, results=folder, **settings)


def test_rows_are_those_of_a_run(bundled, tmp_path):
    axes = {
        "exclude": (None, "none"),
        "draft_exclude": (None, "published"),
        "quant_policy": ("none", "int4"),
        "draft_quant_policy": ("int8",),
    }
    traced = measured(bundled, tmp_path, **axes)
    ran = measured(bundled, tmp_path, method="run", **axes)
    assert len(traced) == len(ran) == 24 and not traced.failed and not traced.notes
    assert traced.computed == ran.computed
    for mine, theirs in zip(traced, ran, strict=True):
        assert (mine.method, theirs.method) == ("trace", "run") and mine.point != theirs.point
        assert mine.model_dump(exclude=OWN) == theirs.model_dump(exclude=OWN)
        assert (mine.seconds, mine.tokens_per_second) == (None, None) and theirs.seconds
        assert mine.provenance["trace"]["max_depth"] == 4
        assert {k: v for k, v in mine.provenance.items() if k in ("versions", "device", "threads")} == {
            k: v for k, v in theirs.provenance.items() if k in ("versions", "device", "threads")
        }


@pytest.mark.parametrize("drafts", ["greedy", "sampled"])
def test_rows_above_temperature_0(bundled, tmp_path, drafts):
    found = measured(bundled, tmp_path, temperature=0.8, draft_sampling=drafts)
    plain = measured(bundled, tmp_path, temperature=0.8, depths=0).rows[0]
    assert (plain.method, plain.output_hash) == ("run", found.rows[0].output_hash)
    for row in found:
        acceptance = found.trace(row).acceptance()
        assert row.acceptance_length == acceptance.length(row.depth)
        assert isinstance(row.rounds, float) == (drafts == "sampled")
        assert list(row.by_domain) == ["a", "b"] and row.output_hash == plain.output_hash


def test_drafts_of_one_target_share_its_output(bundled, tmp_path, decoded):
    weights = {"exclude": ("published",), "draft_exclude": ("published", "none", ["mtp.*"])}
    found = measured(bundled, tmp_path, draft_quant_policy=("none", "int4"), **weights)
    assert len({row.point for row in found}) == 6 and decoded == [3]
    assert [row.provenance["trace"]["target_reused"] for row in found if row.depth == 4] == [False] + 5 * [True]
    assert len({row.output_hash for row in found}) == 1
    # whatever the target does otherwise is decoded anew
    for number, change in enumerate(
        (
            {"quant_policy": "int8"},
            {"temperature": 0.5},
            {"max_new_tokens": 11},
            {"prompts": PROMPTS[:2]},
            {"exclude": (["*.down_proj"],)},
            {"target_hidden": "pre_norm"},
            {"ignore_eos": True},
        ),
        start=2,
    ):
        measured(bundled, tmp_path, depths=[1], **{**weights, "draft_exclude": ("none",), **change})
        assert len(decoded) == number, change


def test_a_trace_serves_every_depth_up_to_its_own(bundled, tmp_path, decoded):
    first = measured(bundled, tmp_path, depths=(2, 5))
    fewer = measured(bundled, tmp_path, depths=range(5), load_model=lambda *a, **k: pytest.fail("loaded"))
    assert (fewer.computed, fewer.reused) == (4, 1)
    deeper = measured(bundled, tmp_path, depths=(5, 8))
    assert (deeper.computed, deeper.reused) == (1, 1)
    assert decoded == [3]  # the draft went deeper over the same output
    kept = deeper.trace(deeper.rows[0])
    assert kept.max_depth == 8 and isinstance(kept.hits, np.memmap)
    alone = trace(load_model(bundled), TEXTS, 8, max_new_tokens=12)
    assert kept.acceptance().to_records() == alone.acceptance().to_records()
    assert first.trace(first.rows[0].point).acceptance().length(5) == first.rows[1].acceptance_length


@pytest.mark.parametrize("wreck", [b"", b"{}", None], ids=["empty", "short", "cut"])
@pytest.mark.parametrize("which", ["traces", "targets"])
def test_a_wreck_is_made_again(bundled, tmp_path, decoded, which, wreck):
    measured(bundled, tmp_path)
    for path in (tmp_path / which).iterdir():
        path.write_bytes(path.read_bytes()[:-7] if wreck is None else wreck)
    again = measured(bundled, tmp_path, depths=(3, 6))
    assert not again.failed and len(decoded) == (2 if which == "targets" else 1)
    assert Trace.load(next((tmp_path / "traces").iterdir())).max_depth == 6


def test_only_what_can_be_traced_is(bundled, tmp_path, decoded):
    def own(model, prompts, depth, **rest):
        raise RuntimeError("asked")

    assert "asked" in measured(bundled, tmp_path, generate=own).failed[0].error
    with pytest.raises(ConfigError, match="a generate is given"):
        measured(bundled, tmp_path, generate=own, method="trace")
    with pytest.raises(ConfigError, match="method is 'fast'"):
        measured(bundled, tmp_path, method="fast")
    assert decoded == []
    ran = measured(bundled, tmp_path, method="run", depths=[1])
    with pytest.raises(ConfigError, match="no trace of point"):
        ran.trace(ran.rows[0])
    with pytest.raises(ConfigError, match="expected a row of this result"):
        ran.trace("nothing")


def test_a_failure_is_the_points_and_the_rest_go_on(bundled, tmp_path):
    def load(path, **settings):
        if settings["exclude"] == "none":
            raise MemoryError
        return load_model(path, **settings)

    found = measured(bundled, tmp_path, exclude=("none", "published"), load_model=load)
    assert [(row.exclude_label, row.depth, row.error) for row in found.failed] == [
        ("none", 0, "MemoryError: no message")
    ]
    assert sum(row.error is None for row in found) == 3
    assert measured(bundled, tmp_path, exclude=("none", "published")).computed == 3


def test_progress_and_cancel_within_a_trace(bundled, tmp_path):
    cancel, told = threading.Event(), []

    def tell(progress):
        told.append(progress)
        if progress.fraction > 0.5 and not cancel.is_set():
            other = threading.Thread(target=cancel.set)
            other.start()
            other.join()

    found = measured(bundled, tmp_path, on_progress=tell, cancel=cancel)
    assert found.cancelled and len(found) == 0 and not found.failed
    assert any("all depths" in progress.current for progress in told)
    whole = measured(bundled, tmp_path)
    assert (whole.computed, whole.cancelled) == (3, False)


def test_the_planted_weakness_is_seen(bundled, tmp_path):
    weak = plant(bundled, tmp_path / "weak").path
    found = measured(
        weak, tmp_path / "r", depths=[4], exclude="published", draft_exclude=("published", "none"), max_new_tokens=24
    )
    spared, hurt = (row.acceptance_length for row in found)
    assert spared > hurt


def test_a_model_without_a_draft_is_run(tmp_path, decoded):
    plain = write_tiny(tmp_path / "plain", mtp_num_hidden_layers=0)
    found = measured(plain, tmp_path / "r", prompts=[[1, 2, 3]], depths=(0, 2))
    assert [(row.method, row.depth, row.error is None) for row in found] == [("run", 0, True), ("run", 2, False)]
    assert "has no MTP head" in found.failed[0].error and decoded == []
