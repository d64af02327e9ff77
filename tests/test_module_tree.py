"""The tree of modules to keep out of FP8, without a browser: boxes, search, presets, globs, bytes, and time."""

from __future__ import annotations

import random
import time

import ipywidgets as widgets
import pytest

from mtplab import ConfigError, open_checkpoint
from mtplab.checkpoint.convert.foresee import never_fp8_anywhere
from mtplab.report.module_choice import ModuleChoice, cost_of
from mtplab.report.module_tree import LINES, ModuleTree
from mtplab.report.sweep_panel import SweepPanel
from tests.family_checkpoints import FAMILIES
from tests.report_fakes import FakeSweep
from tests.sparse_checkpoints import write_deepseek_v3

SECONDS = 0.25  # an interaction at most


@pytest.fixture(scope="module")
def checkpoint(bundled):
    return open_checkpoint(bundled)


@pytest.fixture
def tree(checkpoint):
    return ModuleTree(checkpoint.plan(), recommended=lambda: never_fp8_anywhere(checkpoint), why="what engines need")


@pytest.fixture(scope="module")
def bundled():
    from conftest import REPO

    return REPO / "data" / "tiny-qwen3_5"


def shown(tree) -> list[str]:
    return [line.tick.description for line in tree.lines if line.box.layout.display != "none"]


def line(tree, label):
    return next(l for l in tree.lines if l.box.layout.display != "none" and l.tick.description == label)


def kept(checkpoint, exclude) -> set[str]:
    """What the plan makes of it: linear modules that are not FP8."""
    plan = checkpoint.plan(exclude=list(exclude) or "none", model_format="fp8")
    return {m.name for m in plan.modules if m.kind == "linear" and m.weight != "fp8"}


def test_what_is_chosen_is_what_the_plan_keeps_out(tree, checkpoint):
    """For choices at random the globs cover exactly the units chosen, as the plan reads them, and cost what it says."""
    rng, choice = random.Random(0), tree.choice
    none = checkpoint.plan(exclude="none", model_format="fp8").loaded_nbytes()
    for _ in range(60):
        share = rng.random()
        bits = sum(1 << at for at in range(len(choice.units)) if rng.random() < share)
        tree._choose(bits)
        names = {module for at, unit in enumerate(choice.units) if bits >> at & 1 for module in unit.modules}
        assert kept(checkpoint, tree.value) == names
        assert len(tree.value) <= max(1, len(names))
        held = checkpoint.plan(exclude=list(tree.value) or "none", model_format="fp8").loaded_nbytes()
        assert tree.extra_bytes == held - none


@pytest.mark.parametrize(
    "exclude, compact",
    [
        ("*", ("*",)),
        ("none", ()),
        ("mtp.*", ("mtp.*",)),
        (["*.o_proj", "*.out_proj"], ("*.linear_attn.out_proj", "*.self_attn.o_proj")),
        (["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.down_proj"],
         ("model.layers.1.mlp.*",)),
        (["model.layers.0.mlp.down_proj.weight"], ("model.layers.0.mlp.down_proj",)),
        (["model.language_model.layers.0.mlp.down_proj"], ("model.layers.0.mlp.down_proj",)),
    ],
)  # fmt: skip
def test_the_value_is_as_short_as_globs_allow(tree, exclude, compact):
    tree.value = [exclude] if isinstance(exclude, str) and exclude != "none" else () if exclude == "none" else exclude
    assert tree.value == compact


def test_presets(tree, checkpoint):
    tree.presets["published"].click()
    assert kept(checkpoint, tree.value) == kept(checkpoint, ["published"])
    tree.presets["recommended"].click()
    assert kept(checkpoint, tree.value) == set(never_fp8_anywhere(checkpoint))
    tree.presets["none"].click()
    assert tree.value == () and "0 of 39 linear modules" in tree.summary.value
    assert ModuleTree(checkpoint.plan()).presets["recommended"].disabled
    assert "what engines need" in tree.presets["recommended"].tooltip


def test_boxes_of_groups_have_three_states(tree):
    assert shown(tree)[:3] == ["target", "layer 0", "layer 1"]
    line(tree, "layer 1").opener.click()
    line(tree, "mlp").opener.click()
    assert shown(tree)[2:8] == ["layer 1", "linear_attn", "mlp", "down_proj", "gate_proj", "up_proj"]
    line(tree, "gate_proj").tick.value = True
    assert tree.value == ("model.layers.1.mlp.gate_proj",)
    assert not line(tree, "mlp").tick.value and line(tree, "mlp").text.value.startswith("1 of 3, 131 kB of 393 kB")
    line(tree, "mlp").tick.value = True
    assert tree.value == ("model.layers.1.mlp.*",) and line(tree, "up_proj").tick.value
    assert line(tree, "mlp").text.value.startswith("all of 3")
    line(tree, "layer 1").tick.value = True
    assert tree.value == ("model.layers.1.*",)
    line(tree, "layer 1").tick.value = False
    assert tree.value == () and line(tree, "mlp").text.value.startswith("none of 3")


def test_a_search_narrows_what_is_seen_and_what_a_box_chooses(tree):
    tree.search.value = "GATE_proj"
    assert [label for label in shown(tree) if not label.startswith("layer")] == [
        "target", *["mlp", "gate_proj"] * 4, "draft", "mlp", "gate_proj",
    ]  # fmt: skip
    assert "5 modules found" in tree.where.value
    line(tree, "target").tick.value = True
    assert tree.value == ("model.layers.*.mlp.gate_proj",)
    tree.search.value = "*.[kv]_proj"
    assert "4 modules found" in tree.where.value and line(tree, "target").text.value.startswith("none of 2")
    tree.search.value = "nothing like it"
    assert shown(tree) == [] and "0 modules found" in tree.where.value
    tree.search.value = ""
    assert line(tree, "target").text.value.startswith("4 of 31")


def test_the_value_is_observed_and_can_be_set(tree):
    seen = []
    tree.observe(lambda change: seen.append(change["new"]), names="value")
    tree.value = ("mtp.fc",)
    tree.set("published")
    assert seen[0] == ("mtp.fc",) and "mtp.fc" in seen[1] and len(seen) == 2
    before = tree.value
    with pytest.raises(ConfigError, match=r"'mtp.fx' covers no linear module .* Nearest: mtp.fc"):
        tree.value = ("mtp.fx",)
    assert tree.value == before


def test_names_are_inert_and_globs_in_them_are_quoted(checkpoint):
    class Module:
        multiplies, part, stored, weight, shape, loaded_nbytes = True, "target", "BF16", "bf16", (128, 128), 32768

        def __init__(self, name):
            self.name = name

    hostile = "model.layers.0.<b>[x]\u202e"

    class Plan:
        modules = [Module(hostile), Module("model.layers.0.<b>x\u202e")]  # noqa: RUF012

    tree = ModuleTree(Plan())
    tree.value = ("model.layers.0.<b>[[]x]\u202e",)
    assert tree.choice.count(tree._bits) == 1 and "<b>" not in tree.summary.value
    tree.toggle(tree.choice.root.children["target"].children["layer 0"])
    assert all("\u202e" not in label for label in shown(tree))


def test_everything_is_reachable_by_keyboard_and_has_a_name(tree):
    """Core widgets that browsers focus: buttons and boxes, each with a description or a tooltip."""
    assert tree.search.description and all(button.description for button in tree.presets.values())
    for each in tree.lines[: len(shown(tree))]:
        assert isinstance(each.opener, widgets.Button) and isinstance(each.tick, widgets.Checkbox)
        assert each.tick.description and each.tick.tooltip and each.opener.tooltip


def test_of_a_quantised_checkpoint_inputs_are_what_changes(bundled_fp8):
    tree = ModuleTree(open_checkpoint(bundled_fp8).plan(), recommended=())
    tree.value = ("*.o_proj",)
    assert "they only stop rounding their inputs" in tree.summary.value
    tree.presets["published"].click()
    assert tree.value == ()  # what the file holds in BF16 stays so
    assert "mtp.fc" not in {unit.name for unit in tree.choice.units}


def test_a_cost_is_bf16_over_fp8_with_a_scale_a_block():
    assert cost_of((256, 300)) == 256 * 300 - 4 * 2 * 3 and cost_of((8, 128, 128)) == 8 * (128 * 128 - 4)


def test_the_sweep_panel_has_the_tree(bundled, checkpoint):
    panel = SweepPanel(bundled, sweep=FakeSweep(), exclude=(), depths=(0, 1), recommended=["*.out_proj"])
    tree = panel._widgets["modules"]
    assert isinstance(tree, ModuleTree)
    tree.presets["recommended"].click()
    assert panel.config["exclude"] == (["*.linear_attn.out_proj"],)
    own = SweepPanel(bundled, sweep=FakeSweep(), depths=(0, 1))._widgets["modules"]
    own.presets["recommended"].click()
    assert kept(checkpoint, own.value) == set(never_fp8_anywhere(checkpoint))


@pytest.mark.slow
@pytest.mark.serial
def test_a_mixture_of_91_000_tensors_answers_at_once(tmp_path):
    write_deepseek_v3(tmp_path)
    plan = open_checkpoint(tmp_path).plan()
    begun = time.process_time()
    tree = ModuleTree(plan, recommended=[m.name for m in plan.modules if m.name.endswith("down_proj")])
    assert time.process_time() - begun < 3
    assert len(tree.choice.units) < 1000 and tree.choice.count(tree.choice.all) > 45_000
    assert len(tree.lines) == LINES < 50
    rng = random.Random(0)
    half = sum(1 << at for at in range(len(tree.choice.units)) if rng.random() < 0.5)
    actions = {
        "tick": lambda: setattr(line(tree, "target").tick, "value", True),
        "untick": lambda: setattr(line(tree, "target").tick, "value", False),
        "open": lambda: line(tree, "layer 3").opener.click(),
        "search": lambda: setattr(tree.search, "value", "*experts*"),
        "tick found": lambda: setattr(line(tree, "draft" if "draft" in shown(tree) else "target").tick, "value", True),
        "all again": lambda: setattr(tree.search, "value", ""),
        "page": tree.next.click,
        "recommended": tree.presets["recommended"].click,
        "uneven": lambda: tree._choose(half),
        "set": lambda: setattr(tree, "value", ("*.self_attn.*", "model.layers.61.*", "*.experts.*.up_proj")),
    }
    for name, act in actions.items():
        begun = time.process_time()
        act()
        spent = time.process_time() - begun
        assert spent < SECONDS, (name, spent)
    assert tree.value == ("*.self_attn.*", "*.mlp.experts.*.up_proj", "model.layers.61.*")
    with pytest.raises(ConfigError, match=r"1 of 256 experts of its layer"):
        tree.value = ("model.layers.5.mlp.experts.7.up_proj",)
    choice = ModuleChoice(plan)
    assert choice.chosen("model.layers.5.mlp.experts.*") == choice.root.children["target"].children["layer 5"].children[
        "mlp"
    ].children["experts × 256"].bits


def test_layers_of_a_head_with_another_name_are_layers(tmp_path):
    """MiMo's `model.mtp_layers`: one glob covers it, and it stands under its layer's number."""
    opened = open_checkpoint(FAMILIES["mimo"](tmp_path / "mimo"))
    choice = ModuleChoice(opened.plan())
    assert choice.patterns(choice.chosen(opened.draft_globs)) == ["model.mtp_layers.*"]
    assert list(choice.root.children["draft"].children) == ["layer 0"]
