"""The cache study: pairs of policies, each as `trace` and `quality` give it alone; its figures, and its panel."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest

import mtplab
from mtplab import ConfigError
from mtplab.decode import Cancelled
from mtplab.report.cache_figures import (
    MEASURES,
    cache_by_context,
    cache_bytes_and_cost,
    cache_pictures,
    cache_table,
    draft_cache_grid,
)
from mtplab.report.cache_panel import CachePanel
from mtplab.study.cache_study import compare_caches, context_edges
from mtplab.study.interval import student
from mtplab.study.quality import own_texts, quality

PROMPTS = ["Once upon a time there was a king who", "def main():", "In the beginning"]
SETTINGS = {"max_depth": 3, "max_new_tokens": 24, "text_tokens": 90}


@pytest.fixture(scope="module")
def model(bundled):
    return mtplab.load_model(bundled)


@pytest.fixture(scope="module")
def study(model):
    return compare_caches(model, PROMPTS, ["none", 8, "int4@3", "turboquant"], ["turboquant", "none"], **SETTINGS)


def test_each_pair_is_what_a_trace_of_it_alone_is(model, study):
    assert study.policies == ["none", "int8", "int4@3", "turboquant"] and len(study.lines) == 2 + 3 + 3 + 2
    for (policy, draft), line in study.lines.items():
        alone = mtplab.trace(
            model, PROMPTS, 3, quant_policy=policy, draft_quant_policy=draft, max_new_tokens=24
        ).acceptance()
        assert [alone.stats(k) for k in range(4)] == [line.acceptance.stats(k) for k in range(4)]
        assert line.nbytes == model.kv_bytes_per_token(policy)
        assert line.draft_nbytes == model.kv_bytes_per_token(draft, "draft")
    assert study.line("int8").draft_policy == "int8" and study.line("int4@3").draft_policy == "int4"
    assert [line.policy for line in study.alike] == study.policies


def test_quality_is_the_targets_over_the_texts_it_wrote_unquantised(model, study):
    texts = own_texts(model, PROMPTS, 90, 0, quant_policy="none")
    skip = [len(model.encode(prompt)) - 1 for prompt in PROMPTS]
    for line in study.alike:
        alone = quality(model, texts, model, quant_policy=line.policy, skip=skip)
        np.testing.assert_array_equal(line.quality.kl, alone.kl)
    kept = {line.policy: line.quality.mean_kl for line in study.alike}
    assert kept["none"] == kept["int4@3"] == 0.0, "the only layer with a cache is kept"
    assert 0 < kept["int8"] < kept["turboquant"]
    assert study.line("int8", "turboquant").quality is study.line("int8").quality


def test_by_context_adds_up_to_the_whole(study):
    edges = context_edges(study.longest)
    assert edges[:3] == [0, 64, 128] and edges[-1] >= study.longest > edges[-2]
    line = study.line("turboquant")
    records = study.by_context(line, 3, edges)
    tokens = np.array([record["tokens"] for record in records])
    kls = np.array([record["kl"] or 0.0 for record in records])
    assert tokens.sum() == len(line.quality.kl)
    np.testing.assert_allclose((tokens * kls).sum() / tokens.sum(), line.quality.mean_kl)
    whole = study.by_context(line, 3, [0, edges[-1]])[0]
    assert whole["acceptance_length"] == pytest.approx(line.acceptance.length(3))
    assert whole["half_interval"] == pytest.approx(line.acceptance.half_interval(3))
    assert whole["kl_half_interval"] == pytest.approx(line.quality.kl_interval())


def test_the_interval_of_a_range_is_over_the_texts_that_reach_it(study):
    """Jackknife by hand over the texts with tokens there; none where one text is left."""
    found = study.line("int8").quality
    record = found.by_context([0, 64])[0]
    inside = found.position < 64
    texts = sorted(set(found.text[inside]))
    left = [found.kl[inside & (found.text != text)].mean() for text in texts]
    n = len(texts)
    by_hand = student(n - 1) * np.sqrt((n - 1) / n * ((left - np.mean(left)) ** 2).sum())
    assert record["kl_half_interval"] == pytest.approx(by_hand)
    longest = max(found.position[found.text == text].max() for text in texts)
    alone = [text for text in texts if found.position[found.text == text].max() == longest]
    last = found.by_context([int(longest), int(longest) + 1])[0]
    assert (last["kl_half_interval"] is None) == (len(alone) == 1)


def test_changes_are_from_an_unquantised_pair_prompt_by_prompt(study):
    line = study.line("turboquant")
    change, half = study.change(line, 2)
    assert change == pytest.approx(line.acceptance.length(2) - study.line("none").acceptance.length(2)) and half > 0
    of_draft, _ = study.change(line, 2, of_draft=True)
    assert of_draft == pytest.approx(line.acceptance.length(2) - study.line("turboquant", "none").acceptance.length(2))
    assert study.change(study.line("none"), 2) == (0.0, 0.0)
    record = next(r for r in study.to_records(2) if (r["policy"], r["draft_policy"]) == ("turboquant", "turboquant"))
    assert (record["change"], record["bytes"], record["kl"]) == (change, 54, line.quality.mean_kl)


def test_calibration_is_not_of_the_prompts(model, monkeypatch):
    """Left out, the scales are those of the bundled prompts, whatever is studied."""
    from mtplab.study.prompts import load_prompts

    given = {}
    for texts in (None, load_prompts(), PROMPTS):
        settings = SETTINGS | {"text_tokens": 20, "calibration": texts}
        found = compare_caches(model, PROMPTS[:1], ["fp8:calibrated"], **settings)
        given[str(type(texts))] = found.line("fp8:calibrated").quality.kl.tolist()
    assert given["<class 'NoneType'>"] == given["<class 'mtplab.study.prompts.PromptSet'>"] != given["<class 'list'>"]


def test_steps_cancel_and_mistakes(model):
    seen = []
    stop = threading.Event()

    def step(done: int, total: int, what: str) -> None:
        seen.append((done, total, what))
        stop.set()

    with pytest.raises(Cancelled):
        compare_caches(model, PROMPTS, ["int8"], on_step=step, cancel=stop, **SETTINGS)
    assert seen == [(0, 4, "texts")]
    with pytest.raises(ConfigError, match="policies is empty"):
        compare_caches(model, PROMPTS, [])
    with pytest.raises(ConfigError, match="unknown quant_policy 'int3'"):
        compare_caches(model, PROMPTS, ["int3"])


def test_a_pair_that_is_not_there_is_named(study):
    with pytest.raises(ConfigError, match=r"int8 \(draft int4\) was not measured; there is none \(draft none\)"):
        study.line("int8", "int4")


def test_figures_say_what_they_show(study):
    line = study.line("turboquant")
    said = cache_bytes_and_cost(study, 3).alt
    assert f"turboquant 54 bytes, KL {line.quality.mean_kl:.3g}, {line.acceptance.length(3):.2f} tokens a round" in said
    for measure, (name, _) in MEASURES.items():
        picture = cache_by_context(study, 2, measure=measure, draft="turboquant")
        assert picture.alt.startswith(f"{name} by position in the context. ") and "turboquant" in picture.alt
    grid = draft_cache_grid(study, 3).alt
    apart = study.line("int8", "turboquant")
    change = study.change(apart, 3, of_draft=True)[0]
    told = f"target int8, draft turboquant: {apart.acceptance.length(3):.2f} {change:+.2f}".replace("-", "−")
    assert told in grid
    table = cache_table(study, 3)
    assert table.count("<tr>") == 1 + len(study.policies) and ">int4@3<" in table
    drawn = cache_pictures(study, ["turboquant"], None, 3, [0, 16, 32, 64, 128], "kl")
    assert drawn.png.startswith(b"\x89PNG")
    assert f"Tokens a round at depth 3: turboquant {line.acceptance.length(3):.2f}" in drawn.alt


def test_every_control_moves_the_panels_figure(study):
    panel = CachePanel(study)
    seen = {panel.figure.value}
    values = {"depth": 1, "measure": "perplexity", "first": 16, "draft": "turboquant"}
    values["policies"] = ("int8", "turboquant")
    assert set(values) == set(panel._widgets)
    for name, value in values.items():
        panel._widgets[name].value = value
        assert panel.state == "done" and panel.figure.value not in seen, name
        seen.add(panel.figure.value)
    assert re.findall(r"<td [^>]*left\">([^<]*)</td>", panel.table.value) == ["int8 (draft turboquant)", "turboquant"]
    panel._widgets["policies"].value = ()
    assert panel.state == "failed" and "no policy is chosen" in panel.status.value


@pytest.mark.serial
def test_a_control_is_followed_within_a_quarter_of_a_second(study):
    panel = CachePanel(study)
    took = []
    for depth in (1, 2, 3, 1, 2, 3, 1):
        began = time.process_time()  # what it costs, whatever else the machine does
        panel._widgets["depth"].value = depth
        took.append(time.process_time() - began)
    assert sorted(took)[len(took) // 2] < 0.25, took
