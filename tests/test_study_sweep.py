"""Sweeps with a fake runner: what is run, what is read back, what survives, what is told."""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

import study_fakes as fakes
from mtplab.config import EngineConfig, SpecConfig
from mtplab.errors import ConfigError, MtplabError
from mtplab.study import Prompt, ResultRow, read_rows, sweep

PROMPTS = [[1, 2, 3], [4, 5], [6]]


@pytest.fixture
def checkpoint(tmp_path):
    return fakes.make_checkpoint(tmp_path / "model")


def run(checkpoint, tmp_path, **changes):
    settings = {
        "prompts": PROMPTS,
        "depths": (0, 1, 2, 3),
        "quant_policy": ("none", "int8"),
        "exclude": (None, "none"),
        "results": tmp_path / "results",
        "max_new_tokens": 16,
        "load_model": fakes.load_model,
        "generate": fakes.generate,
        **changes,
    }
    return sweep(checkpoint, **settings)


def test_every_cell_once_in_grid_order(checkpoint, tmp_path):
    result = run(checkpoint, tmp_path)
    assert (result.computed, result.reused, len(result)) == (16, 0, 16)
    cells = [(row.exclude_label, row.quant_policy, row.depth) for row in result]
    assert cells == [(e, p, d) for e in ("as stored", "none") for p in ("none", "int8") for d in range(4)]
    assert len(fakes.calls(checkpoint.path, "generate")) == 16
    # two sets of weights, each loaded once, whatever the policy
    assert fakes.calls(checkpoint.path, "load") == ["load None None", "load none fp8"]


def test_numbers_of_a_row(checkpoint, tmp_path):
    row = run(checkpoint, tmp_path, depths=[3], exclude=(None,), quant_policy="int8").rows[0]
    # 15 tokens after the first; at 3 drafts the fake accepts 2, 3, 3, 3, so 4 rounds a prompt
    assert (row.n_prompts, row.tokens, row.rounds, row.drafted, row.accepted) == (3, 45, 12, 36, 33)
    assert row.acceptance_length == 45 / 12 == 1 + 33 / 12
    assert row.per_position == [1.0, 1.0, 0.75]
    assert row.conditional == [1.0, 1.0, 0.75]
    assert row.by_domain["given"].acceptance_length == row.acceptance_length
    assert (row.target_weight_bytes, row.draft_weight_bytes) == (3000, 1000)
    assert (row.kv_bytes_per_token, row.draft_kv_bytes_per_token, row.state_bytes) == (272, 136, 4096)
    assert (row.seconds, row.tokens_per_second) == (0.25, 180.0)
    assert (row.kl, row.top1_agreement, row.perplexity) == (None, None, None)
    assert row.provenance["versions"]["numpy"]
    assert row.provenance["config"]["quant_policy"] == "int8"
    assert "prompts" not in row.provenance["config"]


def test_depth_zero_is_plain_decoding(checkpoint, tmp_path):
    row = run(checkpoint, tmp_path, depths=0, exclude=None, quant_policy="none").rows[0]
    assert (row.rounds, row.tokens, row.drafted, row.accepted) == (45, 45, 0, 0)
    assert (row.acceptance_length, row.per_position, row.conditional) == (1.0, [], [])


def test_domains_are_counted_apart(checkpoint, tmp_path):
    prompts = [Prompt("1", "a", ids=(1,)), Prompt("2", "b", ids=(2, 3)), Prompt("3", "a", ids=(4,))]
    row = run(checkpoint, tmp_path, prompts=prompts, depths=[1], exclude=(None,), quant_policy="none").rows[0]
    assert {name: stats.tokens for name, stats in row.by_domain.items()} == {"a": 30, "b": 15}


def test_a_table_by_domain(checkpoint, tmp_path):
    prompts = [Prompt("1", "a", ids=(1,)), Prompt("2", "b", ids=(2, 3)), Prompt("3", "a", ids=(4,))]
    result = run(checkpoint, tmp_path, prompts=prompts, exclude=None)
    header, _, *lines = result.to_table(by_domain=True).splitlines()[2:]
    assert re.split(" {2,}", header) == ["exclusions", "KV cache", "domain", "d=0", "d=1", "d=2", "d=3"]
    caches = [(cache, domain) for cache in ("unquantised", "int8") for domain in "ab"]
    assert [tuple(line.split()[2:4]) for line in lines[:4]] == caches
    assert lines[1].split()[-1] == f"{result.rows[3].by_domain['b'].acceptance_length:.2f}"


def test_a_second_run_reads_everything_back(checkpoint, tmp_path):
    first = run(checkpoint, tmp_path)
    seen = []
    second = run(
        checkpoint,
        tmp_path,
        on_row=seen.append,
        load_model=lambda *a, **k: pytest.fail("loaded"),
        generate=lambda *a, **k: pytest.fail("ran"),
    )
    assert (second.computed, second.reused) == (0, 16)
    assert second.rows == first.rows == seen
    assert {row.point for row in read_rows(tmp_path / "results")} == {row.point for row in first}


def test_only_new_depths_and_policies_are_run(checkpoint, tmp_path):
    run(checkpoint, tmp_path, depths=(1, 2), quant_policy=("none",))
    wider = run(checkpoint, tmp_path, depths=(0, 1, 2, 3), quant_policy=("none", "int8"))
    assert (wider.computed, wider.reused) == (12, 4)
    assert len(fakes.calls(checkpoint.path, "generate")) == 16


def test_another_seed_or_other_weights_are_other_points(checkpoint, tmp_path):
    run(checkpoint, tmp_path, depths=[1], temperature=[0, 0.5])
    again = run(checkpoint, tmp_path, depths=[1], temperature=[0, 0.5], seed=3)
    assert [row.seed for row in again] == [0, 0, 3, 3] * 2  # greedy decoding draws nothing
    assert (again.computed, again.reused) == (4, 4)
    retrained = fakes.make_checkpoint(tmp_path / "model", b"x" * 64)
    assert run(retrained, tmp_path, depths=[1]).reused == 0


def test_one_point_under_two_labels_is_run_once(checkpoint, tmp_path):
    result = run(
        checkpoint,
        tmp_path,
        depths=[1],
        quant_policy=("fp8", "fp8_e4m3", 16),
        exclude=("published", ["lm_head", "mtp.fc"]),
    )
    assert [row.exclude_label for row in result] == ["published", "lm_head, mtp.fc"]
    assert [row.exclude for row in result] == [["published"], ["lm_head", "mtp.fc"]]
    assert len(fakes.calls(checkpoint.path, "generate")) == 1
    assert (result.computed, result.reused) == (1, 1)
    said = "published and lm_head, mtp.fc: the same modules in FP8, hence one result"
    assert said in result.to_table()
    assert said in result._repr_html_()


def test_the_export_is_derived(checkpoint, tmp_path):
    result = run(checkpoint, tmp_path)
    path = tmp_path / "results" / "rows.jsonl"
    by_cell = {(row.point, row.depth): row for row in result}
    lines = path.read_text().splitlines()
    assert {(r.point, r.depth): r for r in map(ResultRow.from_json, lines)} == by_cell
    path.write_text("nonsense")
    run(checkpoint, tmp_path)
    assert path.read_text().splitlines() == lines


def test_a_wreck_is_computed_again(checkpoint, tmp_path):
    result = run(checkpoint, tmp_path)
    path = tmp_path / "results" / f"{result.rows[0].point}.json"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.warns(UserWarning, match="set aside"):
        again = run(checkpoint, tmp_path)
    assert (again.computed, again.reused) == (4, 12)
    assert [row.acceptance_length for row in again] == [row.acceptance_length for row in result]


def test_a_failed_point_is_recorded_and_the_rest_go_on(checkpoint, tmp_path):
    result = run(checkpoint, tmp_path, generate=fakes.broken_at_int8)
    assert [(row.quant_policy, row.depth, row.error) for row in result.failed] == [
        ("int8", 0, "RuntimeError: no kernel for int8")
    ] * 2
    assert sum(row.error is None for row in result) == 8
    assert "failed 2" in result.summary()
    assert "failed: as stored · int8 · T 0 · depth 0: RuntimeError: no kernel for int8" in result.to_table()
    # the error is on disk, and tried again when asked again
    assert sum(row.error is not None for row in read_rows(tmp_path / "results")) == 2
    mended = run(checkpoint, tmp_path)
    assert (mended.computed, mended.reused, mended.failed) == (8, 8, [])


def test_a_model_that_does_not_load_fails_its_points_only(checkpoint, tmp_path):
    def load(path, **settings):
        if settings["exclude"] == "none":
            raise MemoryError
        return fakes.load_model(path, **settings)

    result = run(checkpoint, tmp_path, load_model=load)
    assert {row.exclude_label for row in result.failed} == {"none"}
    assert result.failed[0].error == "MemoryError: no message"
    assert sum(row.error is None for row in result) == 8


def test_cancel_from_another_thread_keeps_what_was_done(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.02")
    cancel = threading.Event()
    seen = []

    def third(row):
        seen.append(row)
        if len(seen) == 3:
            threading.Thread(target=cancel.set).start()
            time.sleep(0.05)

    result = run(checkpoint, tmp_path, cancel=cancel, on_row=third)
    assert result.cancelled
    assert 3 <= result.computed < 16
    assert len(read_rows(tmp_path / "results")) == result.computed
    rest = run(checkpoint, tmp_path)
    assert (rest.computed, rest.reused, rest.cancelled) == (16 - result.computed, result.computed, False)


def test_cancel_within_a_row(checkpoint, tmp_path):
    cancel = threading.Event()

    def tell(progress):
        if "depth 2" in progress.current:
            cancel.set()

    result = run(checkpoint, tmp_path, cancel=cancel, on_progress=tell)
    assert result.cancelled
    assert [row.depth for row in result] == [0, 1]
    assert result.failed == []


def test_progress_counts_up_and_estimates_from_what_was_measured(checkpoint, tmp_path):
    told = []
    run(checkpoint, tmp_path, on_progress=told.append)
    assert [p.done for p in told] == sorted(p.done for p in told)
    assert (told[-1].done, told[-1].total, told[-1].remaining) == (16, 16, 0.0)
    assert told[0].remaining is None  # nothing has been measured yet
    assert all(p.remaining is not None for p in told if p.done)
    assert all(0 <= p.fraction <= 1 for p in told)


def test_greedy_output_that_depends_on_depth_is_a_finding(checkpoint, tmp_path):
    def lossy(model, prompts, depth, **rest):
        generation = fakes.generate(model, prompts, depth=depth, **rest)
        if depth == 2:
            generation.tokens[0][-1] += 1
        return generation

    result = run(checkpoint, tmp_path, generate=lossy, exclude=None, quant_policy="none")
    assert result.notes == ["as stored · none: greedy output differs between depths 0, 1, 3 | 2 (a fault)"]
    assert result.exact
    for inexact in ({"dtype": "bfloat16"}, {"device": "cuda"}, {"exact": False}):
        tie = run(checkpoint, tmp_path, exclude=None, generate=lossy, quant_policy="none", **inexact)
        assert "(near-ties may part the fast path" in tie.notes[0] and not tie.exact, inexact
    assert run(checkpoint, tmp_path, exclude="none").notes == []
    # sampled output may differ
    assert run(checkpoint, tmp_path, temperature=0.5, exclude=None).notes == []


def test_a_loaded_model_stands_for_no_exclusion(checkpoint, tmp_path):
    model = fakes.FakeModel(str(checkpoint.path))
    model.checkpoint = checkpoint
    model.engine = EngineConfig(exclude=("mtp.*",), model_format="fp8")
    model.spec = SpecConfig.from_target(model.engine)
    model.plan.modules = checkpoint.plan(exclude=["mtp.*"], model_format="fp8").modules
    result = run(model, tmp_path, depths=[1])
    assert [row.exclude_label for row in result] == ["mtp.*", "mtp.*", "none", "none"]
    assert fakes.calls(checkpoint.path, "load") == ["load none fp8"]


def test_prompt_sets_and_draft_axes_multiply(checkpoint, tmp_path):
    result = run(
        checkpoint,
        tmp_path,
        prompts={"short": [[1]], "long": [[1, 2, 3]]},
        depths=[2],
        exclude=("published",),
        draft_exclude=("published", "none"),
        quant_policy=("int8",),
        draft_quant_policy=("int8", "none"),
        temperature=(0.0, 1.0),
    )
    assert len(result) == len({row.point for row in result}) == 2 * 2 * 2 * 2
    table = result.to_table()
    for word in ("published (draft: all FP8)", "short", "long", "draft's cache", "temperature"):
        assert word in table


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"depths": [17]}, "depth is 17"),
        ({"depths": []}, "no depth"),
        ({"depths": [1.5]}, "depth is 1.5"),
        ({"depths": "0-8"}, "depths are '0-8'"),
        ({"quant_policy": ["int3"]}, "int3"),
        ({"quant_policy": []}, "quant_policy is empty"),
        ({"temperature": [-1]}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_p": 0}, "top_p is 0"),
        ({"top_k": -1}, "top_k is -1"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"draft_sampling": "both"}, "draft_sampling is 'both'"),
        ({"model_format": "fp4"}, "model_format is 'fp4'"),
        ({"device": "cpu:7"}, "device is 'cpu:7'"),
        ({"dtype": "float33"}, "dtype is 'float33'"),
        ({"results": ""}, "results folder is an empty string"),
        ({"exclude": [3]}, "exclude has 3"),
        ({"exclude": [["mtp.*", ""]]}, "exclude has"),
        ({"prompts": {}}, "prompt sets is empty"),
        ({"domains": ["x"]}, "no domain 'x'"),
    ],
    ids=str,
)
def test_bad_settings_are_refused_before_anything_runs(checkpoint, tmp_path, change, says):
    with pytest.raises(ConfigError, match=says):
        run(checkpoint, tmp_path, **change)
    assert not (checkpoint.path / "calls.log").exists()


def test_not_a_model(tmp_path):
    with pytest.raises(ConfigError, match="first argument is a int"):
        sweep(3)


def test_text_and_html_tables(checkpoint, tmp_path):
    result = run(checkpoint, tmp_path, exclude=(None, ["<b>*"]))
    assert repr(result) == "SweepResult(16 rows, computed 16, read back 0)"
    assert str(result) == result.to_table()
    lines = result.to_table().splitlines()
    assert "3 prompts × 16 tokens" in lines[0]
    header, body = lines[2], lines[4:]
    assert re.split(" {2,}", header) == ["exclusions", "KV cache", "KV B/token", "d=0", "d=1", "d=2", "d=3"]
    assert len(body) == 4
    assert len({len(line) for line in lines[2:]}) == 1  # aligned
    assert body[0].split()[-1] == f"{result.rows[3].acceptance_length:.2f}"
    page = result._repr_html_()
    assert "&lt;b&gt;*" in page
    assert "<b>*" not in page


def test_to_frame_has_a_line_per_row_or_says_what_is_missing(checkpoint, tmp_path, monkeypatch):
    result = run(checkpoint, tmp_path, depths=[1])
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    frame = result.to_frame()
    assert [line["acceptance_length"] for line in frame] == [row.acceptance_length for row in result]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MtplabError, match="pip install pandas"):
        result.to_frame()


def processes(count: int) -> concurrent.futures.Executor:
    # torch's threads in this process make a plain fork unsafe
    return concurrent.futures.ProcessPoolExecutor(count, multiprocessing.get_context("spawn"))


@pytest.mark.parametrize("kind", [concurrent.futures.ThreadPoolExecutor, processes], ids=["threads", "processes"])
def test_executors_give_the_same_rows(checkpoint, tmp_path, kind):
    here = run(checkpoint, tmp_path / "here")
    with kind(2) as executor:
        there = run(checkpoint, tmp_path / "there", executor=executor)
    volatile = {"provenance"}
    assert [r.model_dump(exclude=volatile) for r in there] == [r.model_dump(exclude=volatile) for r in here]
    assert (there.computed, there.reused) == (16, 0)
    pids = {line.split()[-1] for line in fakes.calls(checkpoint.path, "generate")[16:]}
    assert (str(os.getpid()) in pids) == (kind is concurrent.futures.ThreadPoolExecutor)
    with kind(2) as executor:
        assert run(checkpoint, tmp_path / "there", executor=executor).reused == 16


def dies_at_int8(model, prompts, quant_policy, **rest):
    if quant_policy == "int8":
        os.kill(os.getpid(), signal.SIGKILL)
    return fakes.generate(model, prompts, quant_policy=quant_policy, **rest)


def test_a_worker_that_dies_is_a_failed_point(checkpoint, tmp_path):
    with processes(1) as executor:
        result = run(checkpoint, tmp_path, exclude=None, executor=executor, generate=dies_at_int8)
    assert [row.quant_policy for row in result.failed] == ["int8"]
    assert "BrokenProcessPool" in result.failed[0].error


def test_cancel_reaches_a_process_pool(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_SECONDS", "0.4")
    cancel = threading.Event()
    with processes(2) as executor:
        threading.Timer(2.5, cancel.set).start()
        started = time.monotonic()
        result = run(checkpoint, tmp_path, depths=range(9), executor=executor, cancel=cancel)
    assert result.cancelled
    assert time.monotonic() - started < 5
    assert not list((tmp_path / "results" / ".locks").glob("cancel-*"))
    monkeypatch.setenv("FAKE_SECONDS", "0")
    assert run(checkpoint, tmp_path, depths=range(9)).reused >= result.computed


SWEEP = """
import sys
from pathlib import Path
import study_fakes as fakes
from mtplab.study import sweep
checkpoint = fakes.make_checkpoint(Path(sys.argv[1]))
result = sweep(checkpoint, prompts=[[1, 2, 3], [4, 5], [6]], depths=(0, 1, 2, 3), quant_policy=("none", "int8"),
               exclude=(None, "none"), results=sys.argv[2], max_new_tokens=16,
               load_model=fakes.load_model, generate=fakes.generate)
print(result.computed, result.reused)
"""


def start(checkpoint, results) -> subprocess.Popen:
    tests = os.path.dirname(os.path.abspath(__file__))
    path = os.pathsep.join([tests, os.path.dirname(tests)])
    env = {**os.environ, "FAKE_SECONDS": "0.02", "PYTHONPATH": path}
    arguments = [sys.executable, "-c", SWEEP, str(checkpoint.path), str(results)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def test_two_processes_share_the_work_and_double_none(checkpoint, tmp_path):
    both = [start(checkpoint, tmp_path / "results") for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    counted = [tuple(map(int, out.split())) for out, _ in outputs]
    assert sum(computed for computed, _ in counted) == 16, outputs
    assert [computed + reused for computed, reused in counted] == [16, 16]
    assert len(fakes.calls(checkpoint.path, "generate")) == 16
    assert len(read_rows(tmp_path / "results")) == 16


def test_killed_anywhere_it_resumes_and_loses_nothing(checkpoint, tmp_path):
    draw = random.Random(11)
    results = tmp_path / "results"
    kept = 0
    for _ in range(6):
        process = start(checkpoint, results)
        # from before the first row to well into the sweep
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.3 + draw.random() * 0.4)
        process.kill()
        process.communicate()
        found = len(read_rows(results)) if results.exists() else 0
        assert found >= kept
        kept = found
    last = start(checkpoint, results)
    out, err = last.communicate(timeout=60)
    assert tuple(map(int, out.split())) == (16 - kept, kept), err
    rows = read_rows(results)
    assert len({(row.point, row.depth) for row in rows}) == len(rows) == 16
    # at most the row that each kill interrupted was run twice
    assert len(fakes.calls(checkpoint.path, "generate")) <= 16 + 6
