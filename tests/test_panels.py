"""Panels without a browser: setting a widget in Python does what a click does.

Runs are gated on events: a test decides when a row is there, so nothing here depends on how fast a machine is.
"""

from __future__ import annotations

import base64
import inspect
import io
import json
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import ipywidgets as widgets
import pytest
import torch
from PIL import Image

from mtplab.errors import ConfigError
from mtplab.report.audit_panel import EDIT, NOTHING, OWN, WRITE, AuditPanel
from mtplab.report.checkpoint_panel import CheckpointPanel
from mtplab.report.module_globs import module_globs
from mtplab.report.panels import Panel
from mtplab.report.sweep_panel import SweepPanel
from mtplab.study import sweep
from mtplab.study.prompts import Prompt, PromptSet
from tests.audit_checkpoints import make
from tests.checkpoint_builders import CHECKPOINTS, qwen_fp8, qwen_tensors, write_checkpoint
from tests.report_fakes import FakeSweep, module, plan

PATIENCE = 60  # seconds before a test gives up; nothing waits for them when it works


class Adder(Panel):
    """The smallest panel: doubles a number once the gate opens."""

    title = "Adder"

    def __init__(self):
        self.gate, self.entered = threading.Event(), threading.Event()
        self.problem: Exception | None = None
        self.drawn: list[int] = []
        self.thread_name = ""
        super().__init__()

    def inputs(self):
        return {"number": widgets.IntSlider(value=3)}

    def work(self, config, progress, cancel):
        self.thread_name = threading.current_thread().name
        progress(1, 2, "half way")
        self.entered.set()
        while not self.gate.wait(0.01):
            if cancel.is_set():
                return None
        if self.problem:
            raise self.problem
        return 2 * config["number"]

    def draw(self, result):
        self.drawn.append(result)
        self.table.value = f"<b>{result}</b>"


def test_blocking_run_gives_the_result_and_shows_it():
    panel = Adder()
    panel.gate.set()
    assert panel.run(block=True) == 6 == panel.result
    assert panel.state == "done" and panel.drawn == [6] and "6" in panel.table.value
    assert panel.bar.value == panel.bar.max and panel.bar.bar_style == "success"
    assert panel.thread_name == threading.current_thread().name


def test_a_click_runs_in_a_thread_on_the_settings_of_that_moment():
    panel = Adder()
    panel.run_button.click()
    assert panel.entered.wait(PATIENCE)
    assert panel.state == "running" and panel.run_button.disabled and not panel.cancel_button.disabled
    assert panel.bar.value == 500 and "half way" in panel.status.value
    panel._widgets["number"].value = 50  # too late for the run under way
    panel.gate.set()
    assert panel.wait(PATIENCE) and panel.result == 6
    assert panel.thread_name == "Adder"
    panel.run_button.click()
    assert panel.wait(PATIENCE) and panel.result == 100


def test_a_second_run_while_one_is_under_way_is_refused():
    panel = Adder()
    panel.run()
    with pytest.raises(ConfigError, match="is running"):
        panel.run()
    panel.gate.set()
    assert panel.wait(PATIENCE) and panel.result == 6


def test_cancel_stops_the_run_and_allows_the_next():
    panel = Adder()
    panel.run_button.click()
    assert panel.entered.wait(PATIENCE)
    panel.cancel_button.click()
    assert panel.wait(PATIENCE)
    assert panel.state == "cancelled" and panel.result is None and "Cancelled" in panel.status.value
    assert not panel.run_button.disabled and panel.cancel_button.disabled
    panel.gate.set()
    assert panel.run(block=True) == 6


def test_buttons_are_ready_before_done_is_said():
    panel = Adder()
    panel.gate.set()
    seen = []
    panel.status.observe(
        lambda change: seen.append((change["new"], panel.run_button.disabled, panel.state)), names="value"
    )
    panel.run(block=True)
    text, disabled, state = seen[-1]
    assert text.startswith("Done") and not disabled and state == "done"


def test_a_failure_shows_in_the_panel_and_is_raised_when_blocking():
    panel = Adder()
    panel.gate.set()
    panel.problem = ConfigError("depth 17 is <too> deep")
    with pytest.raises(ConfigError, match="too"):
        panel.run(block=True)
    assert panel.state == "failed" and "&lt;too&gt;" in panel.status.value and panel.bar.bar_style == "danger"
    assert "where" not in panel.status.value, "one of our own errors needs no traceback"
    panel.problem = ZeroDivisionError("a bug")
    panel.run()
    assert panel.wait(PATIENCE) and panel.state == "failed"
    assert "ZeroDivisionError" in panel.status.value and "where" in panel.status.value
    panel.problem = None
    assert panel.run(block=True) == 6 and panel.error is None


# the sweep panel


def sweep_panel(sweep, **options):
    return SweepPanel("tiny", modules=module_globs(plan()), sweep=sweep, depths=(0, 2), **options)


def test_config_is_what_the_sweep_takes():
    panel = sweep_panel(FakeSweep(), model_format="fp8", results="somewhere")
    w = panel._widgets
    w["depths"].value = (1, 3)
    w["preset none"].value = True
    w["modules"].value = ("*.mlp.down_proj", "mtp.fc")
    w["policies"].value = ("none", "int4")
    w["draft_policy"].value = "int8"
    w["temperature"].value = 0.7
    assert dict(panel.config) == {
        "depths": (1, 2, 3),
        "exclude": ("published", "none", ["*.mlp.down_proj", "mtp.fc"]),
        "quant_policy": ("none", "int4"),
        "draft_quant_policy": ("int8",),
        "temperature": (0.7,),
        "max_new_tokens": 48,
        "prompts": None,
        "model_format": "fp8",
        "results": "somewhere",
    }
    with pytest.raises(TypeError):
        panel.config["depths"] = ()
    inspect.signature(sweep).bind("tiny", on_row=None, on_progress=None, cancel=None, **panel.config)


def test_nothing_chosen_is_said_and_nothing_starts():
    fake = FakeSweep()
    panel = sweep_panel(fake)
    panel._widgets["preset published"].value = False
    panel.run_button.click()
    assert "exclusion set" in panel.status.value and panel.state == "idle" and not panel.run_button.disabled
    panel._widgets["preset mtp.*"].value = True
    panel._widgets["policies"].value = ()
    with pytest.raises(ConfigError, match="cache policy"):
        panel.run(block=True)
    assert fake.calls == []


def test_own_text_and_domains_become_prompts():
    prompts = PromptSet("two", (Prompt("a", "letters", "Dear Tom"), Prompt("b", "python", "def f(")))
    panel = sweep_panel(FakeSweep(), prompts=prompts, domains=prompts.domains)
    assert panel.config["prompts"] is prompts
    panel._widgets["prompts"].value = "python"
    assert [prompt.text for prompt in panel.config["prompts"].prompts] == ["def f("]
    panel._widgets["prompts"].value = "my own text below"
    with pytest.raises(ConfigError, match="box is empty"):
        _ = panel.config
    panel._widgets["text"].value = "One day\n\n\n  Another day \n"
    assert panel.config["prompts"] == ["One day", "Another day"]


def test_a_sweep_draws_its_rows_and_keeps_them():
    panel = sweep_panel(FakeSweep())
    result = panel.run(block=True)
    assert len(result.rows) == 3 and panel.result is result
    data, alt = re.fullmatch(
        r'<img src="data:image/png;base64,([^"]+)" alt="([^"]+)" style="[^"]+">', panel.figure.value
    ).groups()
    assert Image.open(io.BytesIO(base64.b64decode(data))).size[0] > 500
    assert "at depth 2" in alt
    assert f"{result.rows[2].acceptance_length:.2f}" in panel.table.value


def test_rows_show_as_they_come_and_cancel_keeps_them():
    fake = FakeSweep(gated=True)
    panel = sweep_panel(fake)
    drawn = threading.Event()
    panel.figure.observe(lambda _: drawn.set(), names="value")
    panel.run_button.click()
    assert fake.started.wait(PATIENCE)
    panel._last_draw = float("-inf")  # the next row is drawn at once, whatever the time since the last
    fake.gate.release()
    assert drawn.wait(PATIENCE), "the first row is drawn while the sweep runs"
    assert panel.state == "running"
    panel.cancel_button.click()
    assert panel.wait(PATIENCE) and panel.state == "cancelled"
    assert len(panel.result.rows) == 1 and "k = 0" in panel.table.value
    fake.gate.release(10)
    assert len(panel.run(block=True).rows) == 3


def test_a_sweep_that_raises_when_cancelled_keeps_its_rows_too():
    class Raising(FakeSweep):
        def __call__(self, *args, **options):
            done = super().__call__(*args, **options)
            if options["cancel"].is_set():
                raise RuntimeError("cancelled")
            return done

    fake = Raising(gated=True)
    panel = sweep_panel(fake)
    shown = threading.Event()
    panel.bar.observe(lambda change: change["new"] > 0 and shown.set(), names="value")
    panel.run()
    fake.gate.release()
    assert shown.wait(PATIENCE)
    panel.cancel()
    assert panel.wait(PATIENCE) and panel.state == "cancelled" and len(panel.result) == 1


def test_a_sweep_that_fails_says_why():
    panel = sweep_panel(FakeSweep(fail_at=1))
    with pytest.raises(RuntimeError, match="no more memory"):
        panel.run(block=True)
    assert "no more memory" in panel.status.value and panel.state == "failed"


def test_names_in_the_panel_are_inert():
    hostile = "<script>alert(1)</script>\u202e"
    panel = SweepPanel("tiny", modules=[hostile], sweep=FakeSweep(), depths=(0, 1))
    label, value = panel._widgets["modules"].options[0]
    assert "\u202e" not in label and value == hostile
    panel._widgets["modules"].value = (hostile,)
    panel.run(block=True)
    assert "<script>" not in panel.table.value and "&lt;script&gt;" in panel.table.value


def test_panels_show_as_widgets():
    bundle = sweep_panel(FakeSweep())._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in (bundle[0] if isinstance(bundle, tuple) else bundle)


def test_no_panel_uses_pyplot():
    """pyplot is not safe in a thread, and importing it is how one would notice."""
    code = (
        "import mtplab.report.sweep_panel, mtplab.report.checkpoint_panel, sys;"
        "sys.exit('matplotlib.pyplot' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


# the checkpoint panel


class FakeCheckpoint:
    draft_globs = ("mtp.*",)

    def __init__(self):
        self.asked = []

    def plan(self, exclude=None, model_format=None):
        self.asked.append((exclude, model_format))
        return plan()


def test_checkpoint_panel_follows_every_choice():
    checkpoint = FakeCheckpoint()
    panel = CheckpointPanel(checkpoint)
    assert "9 of 9 modules" in panel.table.value and panel.figure.value
    panel._widgets["exclude"].value = "mtp.*"
    panel._widgets["format"].value = "FP8, quantised as it is loaded"
    panel._widgets["modules"].value = ("*.mlp.down_proj",)
    panel._widgets["exclude"].value = "the modules picked below"
    assert checkpoint.asked[-1] == (["*.mlp.down_proj"], "fp8")
    assert (["mtp.*"], None) in checkpoint.asked and (None, None) in checkpoint.asked
    panel._widgets["search"].value = "MTP.FC"
    assert "1 of 9 modules, 1 kB as stored, 1 kB as planned" in panel.table.value


def test_checkpoint_panel_shows_a_choice_that_fails():
    checkpoint = FakeCheckpoint()
    panel = CheckpointPanel(checkpoint)

    def refuse(**_):
        raise ConfigError("no module matches")

    checkpoint.plan = refuse
    panel._widgets["exclude"].value = "none"
    assert panel.state == "failed" and "no module matches" in panel.status.value


def test_globs_stand_for_a_kind_over_all_layers():
    assert module_globs(plan(module("lm_head", "head"))) == [
        "*.mlp.down_proj",
        "*.self_attn.q_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
        "mtp.layers.0.mlp.down_proj",
        "mtp.fc",
        "lm_head",
    ]
    assert module_globs(SimpleNamespace(modules=())) == []
    experts = [module(f"model.layers.{n}.mlp.experts.{e}.up_proj") for n in range(2) for e in range(400)]
    assert module_globs(SimpleNamespace(modules=experts)) == ["*.mlp.experts.*.up_proj"]


# the audit panel


def test_audit_panel_shows_what_is_not_read():
    panel = AuditPanel(CHECKPOINTS / "ct-nvfp4-reject" / "ckpt")
    assert panel.state == "done" and "not-read" in panel.findings.value and "in all" in panel.table.value


def test_audit_panel_shows_a_checkpoint_with_errors(tmp_path):
    made = make("qwen3.5")
    made.drop("mtp.layers.0.self_attn.q_proj.weight_scale_inv")
    panel = AuditPanel(made.write(tmp_path / "x"))
    assert panel.state == "done" and "missing-scale" in panel.findings.value
    panel._widgets["what"].value = WRITE
    assert panel.state == "failed" and "scale" in panel.status.value
    panel._widgets["what"].value = EDIT
    assert panel.state == "done"
    made.quantization = None
    panel = AuditPanel(made.write(tmp_path / "y"))
    assert panel.state == "done" and "unexplained-fp8" in panel.findings.value


def test_audit_panel_writes_everything_in_fp8_under_an_empty_list(bundled_fp8):
    panel = AuditPanel(bundled_fp8)
    before = panel.result.bytes_by_part["target"]
    panel._widgets["what"].value = WRITE
    assert panel.result.bytes_by_part["target"] == before
    panel._widgets["exclude"].value = NOTHING
    linears = [module.weight for module in panel.result.modules if module.kind == "linear"]
    assert panel.state == "done" and linears and set(linears) == {"fp8"}
    panel._widgets["modules"].value = ("mtp.layers.0.mlp.down_proj",)
    panel._widgets["exclude"].value = OWN
    kept = next(m for m in panel.result.modules if m.name == "mtp.layers.0.mlp.down_proj")
    assert panel.state == "done" and kept.stored == "BF16"


def test_audit_panel_counts_every_kind_of_fp8(tmp_path):
    tensors = qwen_tensors()
    for name, tensor in tensors.items():
        if tensor.dtype is torch.float8_e4m3fn:
            tensors[name] = tensor.float().to(torch.float8_e5m2)
    quantization = json.loads((qwen_fp8(tmp_path / "x") / "config.json").read_text())["quantization_config"]
    folder = write_checkpoint(tmp_path / "y", tensors, {**quantization, "fmt": "e5m2"})
    both = [AuditPanel(path).table.value for path in (tmp_path / "x", folder)]
    assert both[0] == both[1] and "draft" in both[0]
