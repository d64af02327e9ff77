"""The rules by which engines match an entry with a name: a table of cases for each.

Each was compared with the engine's own function on 15 000 random lists when it was written; transformers' is
compared in `test_lenses_oracle.py`.
"""

import time

import pytest

from lens_models import CT, FP8, LLAMA, QWEN_TEXT
from mtplab.checkpoint.lenses import View, look
from mtplab.checkpoint.lenses.matching import RULES, Unit

QKV = ("q_proj", "k_proj", "v_proj")


def unit(name, *members, experts=False):
    parent = name.rpartition(".")[0]
    return Unit(name, tuple(f"{parent}.{member}" for member in members) or (name,), experts)


LAYER = "model.layers.0"
QKV_UNIT = unit(f"{LAYER}.self_attn.qkv_proj", *QKV)
BA = unit(f"{LAYER}.linear_attn.in_proj_ba", "in_proj_b", "in_proj_a")
GATE_UP = unit(f"{LAYER}.mlp.gate_up_proj", "gate_proj", "up_proj")
OUT = unit(f"{LAYER}.self_attn.o_proj")
GATE = unit(f"{LAYER}.mlp.gate")
EXPERTS = Unit(
    f"{LAYER}.mlp.experts",
    tuple(f"{LAYER}.mlp.experts.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    True,
)


@pytest.mark.parametrize(
    ("rule", "entry", "asked", "expected"),
    [
        # vLLM: full names only, and names with "experts" inside an entry
        ("full name", f"{LAYER}.self_attn.o_proj", OUT, True),
        ("full name", "o_proj", OUT, False),
        ("full name", "model.layers.0", OUT, False),
        ("full name", f"{LAYER}.self_attn.o_proj.x", OUT, False),
        ("full name", f"{LAYER}.self_attn.qkv_proj", QKV_UNIT, True),
        ("full name", f"{LAYER}.self_attn.q_proj", QKV_UNIT, None),
        ("full name", f"{LAYER}.mlp.experts.7.down_proj", EXPERTS, True),
        ("full name", "model.layers.0", EXPERTS, False),
        # ModelOpt in vLLM: also a part of the name
        ("full name, inside, glob", "mlp.gate", GATE_UP, True),
        ("full name, inside, glob", "model.layers.0*", OUT, True),
        ("full name, inside, glob", "model.layers.0.?.o_proj", OUT, False),
        # compressed-tensors: from the start, not to the end
        ("full name or re:", "re:.*gate", GATE_UP, True),
        ("full name or re:", "re:.*gate$", GATE_UP, False),
        ("full name or re:", "re:mlp.*", GATE, False),
        ("full name or re:", "re:.*gate_proj", GATE_UP, None),
        ("full name or re:", "gate", GATE, False),
        ("full name or re:", "re:.*experts", EXPERTS, True),
        ("full name or re:", f"{LAYER}.mlp.experts", EXPERTS, False),
        ("full name or re:, any expert", f"{LAYER}.mlp.experts.3.down_proj", EXPERTS, True),
        ("end of name or re:", "gate", GATE, True),
        ("end of name or re:", "mlp", GATE, False),
        # SGLang: whole segments anywhere
        ("segments, fused", "gate", GATE, True),
        ("segments, fused", "mlp.gate", GATE_UP, False),
        ("segments, fused", "layers.0", QKV_UNIT, True),
        ("segments, fused", "layers.0", unit("model.layers.01.self_attn.o_proj"), False),
        ("segments, fused", "q_proj", QKV_UNIT, None),
        ("segments or glob", "mtp*", unit("mtp.layers.0.self_attn.o_proj"), True),
        ("segments or glob", "*gate", GATE, True),
        ("segments or glob", "ga", GATE, False),
        # lmdeploy: the asked name inside an entry
        ("name inside entry", f"{LAYER}.self_attn.q_proj", QKV_UNIT, True),
        ("name inside entry", f"{LAYER}.self_attn.k_proj", QKV_UNIT, False),
        ("name inside entry", "model.layers.0", OUT, False),
        ("name inside entry", f"x.{LAYER}.self_attn.o_proj.y", OUT, True),
        ("name inside entry", f"{LAYER}.mlp.experts.3.down_proj", EXPERTS, True),
        ("name inside entry", f"{LAYER}.mlp.experts.3.up_proj", EXPERTS, True),
        # TensorRT-LLM: globs over the whole name or one above it; one member is enough
        ("glob or above", "model.layers.0", OUT, True),
        ("glob or above", "model.layers.0.*", unit(LAYER), True),
        ("glob or above", "model.layers.*.self_attn", OUT, True),
        ("glob or above", "layers.0", OUT, False),
        ("glob or above", "re:.*o_proj", OUT, True),
        ("glob or above", "re:.*o_pro", OUT, False),
        ("glob or above", f"{LAYER}.self_attn.k_proj", QKV_UNIT, True),
        ("glob or above", f"{LAYER}.linear_attn.in_proj_a", BA, False),
        ("glob or above", f"{LAYER}.mlp.experts.0.up_proj", EXPERTS, False),
        # torchao in vLLM does not take fused modules apart
        ("segments", f"{LAYER}.self_attn.q_proj", QKV_UNIT, False),
        ("segments", "qkv_proj", QKV_UNIT, True),
        # `a*`
        ("glob or above", "model.layers.1*", unit("model.layers.11.mlp.down_proj"), True),
        ("glob or above", "model.layers.1.*", unit("model.layers.11.mlp.down_proj"), False),
    ],
)
def test_a_rule_reads_an_entry(rule, entry, asked, expected):
    assert RULES[rule]([entry], "test").answer(asked).excluded is expected


@pytest.mark.parametrize("rule", sorted(RULES))
def test_every_rule_reads_many_entries_as_it_reads_one(rule):
    """Patterns are tried side by side; that must change no answer."""
    names = [f"model.layers.{i}.mlp.{last}" for i in range(30) for last in ("gate", "down_down", "gate_up_proj")]
    entries = [f"re:.*layers\\.{i}\\.mlp\\.(gate|up_proj)$" for i in range(0, 30, 3)]
    entries += [f"model.layers.{i}.*" for i in range(0, 30, 7)] + [
        "*.5.mlp.down_dow[a-n]",
        "re:.*(down)_\\1$",
        "(?i)MODEL.LAYERS.5",
    ]
    together = RULES[rule](entries, "test")
    alone = [RULES[rule]([entry], "test") for entry in entries]
    for name in names:
        asked = Unit(name, (name,))
        expected = any(single.answer(asked).excluded for single in alone)
        assert together.answer(asked).excluded is expected, name


def test_a_pattern_that_takes_too_long_is_set_aside():
    slow, name = "re:(a|aa|aaa)+$", "a" * 60
    modules = [View(f"{name}.{i}", "linear", "target", True, True) for i in range(50)]
    begun = time.monotonic()
    found = look(modules, "compressed-tensors", {**CT, "ignore": [slow]}, LLAMA)["vLLM"]
    assert time.monotonic() - begun < 20  # 0.2 s for each engine, on a busy machine
    assert {verdict.built for verdict in found.verdicts} == {"unknown"}
    assert any("0.2 s" in note for note in found.notes)


def test_names_with_braces_are_only_names():
    modules = [View("model.{0}.layers.3.{x}_proj", "linear", "target", True, True)]
    verdict = look(modules, "fp8", FP8, LLAMA)["vLLM"].verdicts[0]
    assert (verdict.runtime_name, verdict.built) == ("model.{0}.layers.3.{x}_proj", "fp8")


def test_vllm_judges_scales_names_where_its_loader_was_seen():
    """Qwen3.5's stops at a scale without a parameter (tests/test_vllm_loads.py); of others' it is not known."""
    module = ("model.layers.0.mlp.down_proj", "linear", "target", True, True)
    names = ("weight_scale_inv", "weight_scale")
    for content, (name, other) in ((FP8, names), ({**FP8, "weight_block_size": None}, names[::-1])):
        for scale, expected in ((name, "right"), ("", "right"), (other, "load error")):
            modules = [View(*module, scale)]
            assert look(modules, "fp8", content, QWEN_TEXT)["vLLM"].worst == expected
            assert look(modules, "fp8", content, LLAMA)["vLLM"].worst == "right"
    listed = {**FP8, "modules_to_not_convert": ["mtp.fc"]}
    bare = View("mtp.fc", "linear", "draft", True, False)
    orphan = View("mtp.fc", "linear", "draft", False, False, names[0])
    assert look([bare], "fp8", FP8, QWEN_TEXT)["vLLM"].worst == "silent"
    assert look([orphan], "fp8", listed, QWEN_TEXT)["vLLM"].worst == "load error"
