"""Hostile names and texts in every panel: whatever reaches the browser is text, none of it markup or a hidden sign."""

from __future__ import annotations

from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import ipywidgets as widgets
import pytest

import mtplab
from mtplab.report.acceptance_panel import AcceptancePanel
from mtplab.report.advise_panel import AdvisePanel
from mtplab.report.audit_panel import WRITE, AuditPanel
from mtplab.report.cache_panel import CachePanel
from mtplab.report.checkpoint_panel import CheckpointPanel
from mtplab.report.gemm_panel import GemmPanel
from mtplab.report.module_tree import ModuleTree
from mtplab.report.sweep_panel import OWN_TEXT, SweepPanel
from mtplab.study.cache_study import compare_caches
from mtplab.study.curve import Curve
from mtplab.study.prompts import Prompt, PromptSet
from tests.checkpoint_builders import FP8_CONFIG, LISTED, qwen_tensors, write_checkpoint
from tests.report_fakes import FakeSweep, row

# no slash, so that a folder can have this name
HOSTILE = "<script>alert(1)<script><img src=x onerror=alert(2)>\"' onload='alert(3)\u202e\u2066\x1b[31m\x9b2J\x07"
FORBIDDEN = {"script", "iframe", "object", "embed", "link", "meta", "base", "form", "style", "foreignobject", "a"}
LOADS = {"href", "xlink:href", "srcdoc", "srcset", "action", "formaction", "data"}
HIDDEN = {"\u202e", "\u2066", "\x1b", "\x9b", "\x07"}


class Markup(HTMLParser):
    """What a browser would make of a text that could run, load or lead elsewhere."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.wrong: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.wrong += [tag] if tag in FORBIDDEN else []
        for name, value in attrs:
            outside = name == "src" and not (value or "").startswith("data:image/png;base64,")
            if outside or name in LOADS or name.startswith("on"):
                self.wrong.append(f"{tag} {name}={value}")


def every_widget(widget: widgets.Widget) -> list[widgets.Widget]:
    below = [one for child in getattr(widget, "children", ()) for one in every_widget(child)]
    return [widget, *below]


def strings(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [text for one in value for text in strings(one)]
    return [value] if isinstance(value, str) else []


def inert(root: widgets.Widget) -> int:
    """Looks at the state that every widget sends to the browser; how many of them show the hostile text, as text."""
    shown = 0
    for widget in every_widget(root):
        state = widget.get_state()
        if isinstance(widget, widgets.Text | widgets.Textarea):
            del state["value"]  # what the reader typed stands in a box for typing
        sent = "\n".join(strings(state))
        assert not HIDDEN & set(sent), sent
        assert not state.get("description_allow_html")
        if isinstance(widget, widgets.HTML):
            assert not Markup(widget.value).wrong, widget.value
        shown += "alert(1)" in sent
    return shown


def test_the_look_itself_sees_what_is_not_inert():
    for bad in (HOSTILE, f"<b>{HOSTILE}</b>", "<img src=x>", '<p onclick="x">', "a\u202eb", "\x1b[31m"):
        with pytest.raises(AssertionError):
            inert(widgets.VBox([widgets.HTML(bad)]))
    with pytest.raises(AssertionError):
        inert(widgets.Dropdown(options=[("a\u202e", 1)]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in a folder with a hostile name, with a hostile name in every place that a module's can be."""
    tensors = {}
    for name, tensor in qwen_tensors().items():
        tensors[name] = tensor
        if "layers.0.mlp" in name or "q_proj" in name or name == "lm_head.weight":
            module, _, last = name.rpartition(".")
            tensors[f"{module}.{HOSTILE}.{last}"] = tensor.clone()
    listed = [*LISTED, "<script>alert\u202e\x07"]
    return write_checkpoint(
        tmp_path_factory.mktemp("x") / HOSTILE, tensors, {**FP8_CONFIG, "modules_to_not_convert": listed}
    )


@pytest.fixture(scope="module")
def model(bundled):
    return mtplab.load_model(bundled)


@pytest.mark.parametrize("kind", [CheckpointPanel, AuditPanel, GemmPanel])
def test_of_a_checkpoint(folder, kind):
    panel = kind(folder)
    assert panel.state == "done" and inert(panel.controls) >= 1
    chosen = next((value for _, value in panel._widgets.get("module", panel._widgets.get("modules")).options
                   if HOSTILE in value))  # fmt: skip
    if kind is GemmPanel:
        panel._widgets["module"].value = chosen
    else:
        panel._widgets["modules"].value = (chosen,)
        panel._widgets["exclude"].index = len(panel._widgets["exclude"].options) - 1
    inert(panel.controls)
    if kind is CheckpointPanel:
        panel._widgets["search"].value = HOSTILE
    if kind is AuditPanel:
        panel._widgets["what"].value = WRITE
    inert(panel.controls)

    def refuse(*_, **__):
        raise ValueError(HOSTILE)

    panel.work = refuse
    panel.run()
    assert panel.wait(60) and panel.state == "failed" and inert(panel.controls)
    assert "&lt;script&gt;" in panel.status.value


def test_of_a_sweep(folder):
    prompts = PromptSet(HOSTILE, (Prompt("a", HOSTILE, HOSTILE), Prompt("b", "python", "def f(")))

    def sweep(checkpoint, **options):
        done = FakeSweep()(checkpoint, **options)
        options["on_progress"](SimpleNamespace(done=1, fraction=0.5, total=9, current=HOSTILE, remaining=1.0))
        done.rows += [row(1, exclude=HOSTILE, checkpoint=HOSTILE, prompt_set=HOSTILE)]
        done.rows += [row(1, "int8", exclude=HOSTILE, checkpoint=HOSTILE, error=HOSTILE)]
        return done

    panel = SweepPanel(folder, sweep=sweep, prompts=prompts, domains=prompts.domains, depths=(0, 1))
    tree = panel._widgets["modules"]
    tree.search.value = "script"
    assert inert(panel.controls) >= 2
    tree.value = tuple(unit.pattern for unit in tree.choice.units if HOSTILE in unit.name)
    assert inert(tree) >= 3 and panel.config["exclude"][-1]
    panel._widgets["prompts"].value = HOSTILE
    assert [prompt.domain for prompt in panel.config["prompts"].prompts] == [HOSTILE]
    panel._widgets["text"].value = HOSTILE
    panel._widgets["prompts"].value = OWN_TEXT
    said: list[str] = []
    panel.status.observe(lambda change: said.append(change["new"]), names="value")
    panel.run(block=True)
    assert any("alert" in text for text in said) and inert(widgets.VBox([widgets.HTML(text) for text in said]))
    assert "&lt;script&gt;" in panel.table.value and inert(panel.controls)


def test_of_a_tree_of_modules(folder):
    plan = mtplab.open_checkpoint(folder).plan()
    tree = ModuleTree(plan, ["*.<script>*"], why=HOSTILE, title=HOSTILE)
    tree.presets["recommended"].click()
    assert "&lt;script&gt;alert(1)" in tree.summary.value and inert(tree) >= 3

    def refuse():
        raise mtplab.ConfigError(HOSTILE)

    tree = ModuleTree(plan, refuse)
    tree.presets["recommended"].click()
    assert "alert(1)" in tree.summary.value and inert(tree) >= 1


def test_of_traces(model):
    trace = mtplab.trace(model, [HOSTILE, "def main():"], 2, max_new_tokens=6, domains=[HOSTILE, "code"])
    panel = AcceptancePanel([trace])
    panel._widgets["domain"].value = panel._widgets["domain"].options[-1][1]
    assert "alert" in panel.table.value and inert(panel.controls) >= 2
    for view in panel._widgets["view"].options:
        panel._widgets["view"].value = view[1]
        assert panel.state == "done" and inert(panel.controls)
    cache = CachePanel(compare_caches(model, [HOSTILE], ["none", 8], max_depth=2, max_new_tokens=6, text_tokens=60))
    assert cache.state == "done" and inert(cache.controls) == 0


def test_of_advice():
    panel = AdvisePanel({HOSTILE: Curve({1: 1.8, 2: 2.4}, HOSTILE)})
    assert panel.state == "done" and panel._widgets["curve"].value == HOSTILE and inert(panel.controls) >= 1
    panel._widgets["curve"].value = ""
    assert panel.state == "done" and inert(panel.controls)


def test_advice_starts_with_the_curve_that_is_named():
    assert AdvisePanel({"a": Curve({1: 1.8}, "a"), "b": Curve({1: 1.7}, "b")}, "a")._widgets["curve"].value == "a"
    with pytest.raises(mtplab.ConfigError, match="expected one of a"):
        AdvisePanel({"a": Curve({1: 1.8}, "a")}, "c")
