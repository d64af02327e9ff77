"""Step-3.5 and 3.7: target, head and drafts are transformers', windows and clamps included, and runs stay lossless."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.models.step3p7.modeling_step3p7 import Step3p7DecoderLayer, Step3p7RMSNorm

from family_checkpoints import load_target, longer, model_of, write_step3p7
from family_checks import (
    PROMPTS,
    changed,
    check_drafts,
    check_head_setting,
    check_lossless,
    check_transformers_drafts,
    quantised_here,
)
from family_definition import Definition, HeadModule, assembled, weights_of
from family_suite import EVERY_STAGE, RunsAsTransformers, family_fixtures
from mtplab import CheckpointError, generate, load_model, open_checkpoint, quantize_checkpoint, trace
from mtplab.checkpoint.draft_layouts import DEEPSEEK_V3, STEP
from mtplab.study.checkpoint_sizes import sizes_of

LAYERS, WINDOW = 5, 8
# Step-3.5's file, text alone; one head layer, which drafts every step; nothing clamped; rotations alike, unscaled
SHAPES = {
    "step-3.7": {},
    "step-3.5": {"text_only": True},
    "one layer": {"heads": 1},
    "plain": {
        "swiglu_limits": None, "swiglu_limits_shared": None, "rope_scaling": None, "rope_theta": 10000.0,
        "partial_rotary_factors": None, "moe_layers_enum": [1, 3], "norm_expert_weight": True,
    },
}  # fmt: skip

each, folder, pair = family_fixtures("step3p7", SHAPES)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A head of one layer, which is a sliding one: its chain is a cache that forks."""
    folder = write_step3p7(tmp_path_factory.mktemp("single"), heads=1)
    return load_model(folder), load_target(folder)


class TestStep(RunsAsTransformers):
    family, layout = "step3p7", "Step-3.5"
    stages = EVERY_STAGE
    # all three layers of the head, and past the last one
    depth = 5
    faults = (
        ("layer_types", ["full_attention"] * 5, "layer_types has 5 entries; expected 8"),
        ("layer_types", ["full_attention", "chunked"] * 4, "each full_attention or sliding_attention, found chunked"),
        ("sliding_window", None, "sliding_window is missing"),
        ("attention_other_setting", {"attention_type": "full_attention"}, "attention_type sliding_attention"),
        ("use_rope_layers", [True] * 7 + [False], "use_rope_layers is .* expected true for every layer"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "rope_type is 'yarn'; expected 'default' or 'llama3'"),
        ("yarn_only_types", None, "yarn_only_types is None; expected a list"),
        ("rope_theta", [1.0, 0], "rope_theta has 2 entries; expected 8"),
        ("moe_layers_enum", "2,x", "moe_layers_enum is '2,x'; expected numbers of the layers"),
        ("moe_top_k", 9, "moe_top_k is 9; expected at most moe_num_experts, 8"),
        ("moe_router_activation", "softmax", "moe_router_activation is 'softmax'; expected 'sigmoid'"),
        ("swiglu_limits", [0.0, -1.0], "swiglu_limits is -1.0; expected a positive float"),
    )

    def heads_of(self, oracle, folder) -> list[HeadModule]:
        """Decoder layers of a text model that counts them, and what the file holds."""
        config = json.loads((folder / "config.json").read_text())
        count = config.get("text_config", config)["num_nextn_predict_layers"]
        shell = model_of(longer(config, count))
        text, found = shell.config.get_text_config(), []
        text._attn_implementation = "eager"
        rotary = shell.get_decoder().rotary_emb
        names = ("enorm", "hnorm", "eh_proj", "transformer.shared_head.norm")
        for i in range(LAYERS, LAYERS + count):
            weights, kind = weights_of(folder, f"model.layers.{i}."), text.layer_types[i]
            head = weights.pop("transformer.shared_head.output.weight")
            norms = [Step3p7RMSNorm(text.hidden_size, text.rms_norm_eps) for _ in range(3)]
            window = WINDOW if kind == "sliding_attention" else None
            turned = functools.partial(rotary, layer_type=kind)
            layer = Step3p7DecoderLayer(text, i)
            found.append(assembled(weights, names, norms, layer, turned, window=window, head=head))
        return found

    def test_one_layers_chain_is_the_definitions(self, single):
        model, oracle = single
        check_drafts(model, Definition(oracle, self.heads_of(oracle, model.checkpoint.path), "pre_norm"), depth=4)


def test_layers_are_what_the_config_says(pair):
    """Every fourth layer sees all and has a rotation of half its features, scaled; others a window and more heads."""
    layers, head = pair[0].config.layers, pair[0].config.draft_layers
    assert [each.mixer.window for each in (*layers, *head)] == [None, 8, 8, 8, None, 8, 8, 8]
    assert [each.mixer.heads for each in layers] == [4, 6, 6, 6, 4]
    assert [each.mixer.rotary.dim for each in layers] == [16, 32, 32, 32, 16]
    assert [each.mixer.rotary.scaling is not None for each in layers] == [True, False, False, False, True]
    assert [getattr(each.feed, "limit", None) for each in layers] == [None] * 4 + [1.5]
    assert layers[4].feed.shared_limit == 1.0 and len(pair[0].config.geometries) == 2


def test_what_is_steps_own_changes_the_output(folder, tmp_path, pair):
    """Windows, clamps and scaled frequencies are there to be seen: without one the logits are others."""
    ids = PROMPTS[3]
    own = generate(pair[0], [ids], depth=0, max_new_tokens=24, ignore_eos=True).tokens
    for i, change in enumerate(
        (
            {"sliding_window": 64},
            {"swiglu_limits": None},
            {"swiglu_limits_shared": None},
            {"rope_scaling": None},
            {"moe_router_scaling_factor": 1.0},
        )
    ):
        other = load_model(changed(folder, tmp_path / f"{i}", lambda _, c, new=change: c["text_config"].update(new)))
        found = trace(other, [ids], 1, output=own)
        ours = trace(pair[0], [ids], 1, output=own)
        assert np.nanmax(abs(found.top - ours.top)) > 1e-4, change


def test_served_as_vllm_does(pair):
    spec = generate(pair[0], PROMPTS[:1], depth=2, max_new_tokens=4).settings["spec"]
    assert (spec["target_hidden"], spec["draft_hidden"]) == ("pre_norm", "pre_norm")
    head = pair[0].draft
    assert head.per_depth and head.chained and not head.first_masked and not head.hidden_first
    heads = [module.head.weights()[0] for module in head.modules]
    assert all(not torch.equal(one, pair[0].target.head.weights()[0]) for one in heads)
    assert not torch.equal(heads[0], heads[1])


def test_drafts_are_transformers(pair, folder, tmp_path):
    """`generate(use_mtp=True)`, which uses the target's output matrix, and finds the head's norms under other names."""
    named = write_step3p7(tmp_path / "named", infix="")
    one, other = (load_file(each / "model.safetensors") for each in (folder, named))
    assert all(torch.equal(value, other[name.replace("transformer.shared", "shared")]) for name, value in one.items())
    check_transformers_drafts(pair[0], load_target(named))


@pytest.mark.parametrize("policy", ["none", "int4"])
def test_a_chain_over_a_window_is_traced_exactly(single, policy):
    """Of one head layer, whose trace forks a cache that only a window of is seen."""
    check_lossless(single[0], policy, count=16)


def test_quantised_here_it_loads_as_quantised_at_load(tmp_path):
    """Stacks are taken apart into experts one by one, which are read under those names."""
    written, _ = quantised_here("step3p7", tmp_path, depth=4)
    fp8 = {m.name for m in written.plan.modules if m.weight == "fp8"}
    assert "model.layers.2.moe.experts.7.down_proj" in fp8 and "model.layers.6.self_attn.q_proj" in fp8
    assert not [name for name in fp8 if name.endswith(("g_proj", "moe.gate", "eh_proj", "output"))]
    said = open_checkpoint(tmp_path / "out").audit(deep=True)
    assert {each.kind for each in said.at_least("warning")} <= {"random-head"} and said.head.complete


def test_other_exclusions_are_exchanged_in_a_loaded_model(folder):
    """Experts too, whose stacks have names of their own."""
    model = load_model(folder, model_format="fp8")
    direct = load_model(folder, model_format="fp8", exclude=["*.moe.up_proj", "model.layers.6.*"])
    other = model.with_exclusions(["*.moe.up_proj", "model.layers.6.*"])
    runs = [generate(each, PROMPTS[:3], depth=4, max_new_tokens=10) for each in (other, direct, model)]
    assert runs[0].tokens == runs[1].tokens and runs[0].rounds == runs[1].rounds
    assert other.target.layers[2].mlp.experts is not model.target.layers[2].mlp.experts


def test_sizes_of_layers_that_differ_are_not_said(folder):
    with pytest.raises(CheckpointError, match="differ in heads, rotation or how far they see"):
        sizes_of(open_checkpoint(folder))


@pytest.mark.parametrize("lost", ["transformer.shared_head.norm", "eh_proj", "mlp.up_proj"])
def test_what_a_head_lacks_is_named(folder, tmp_path, lost):
    """And it is still told from DeepSeek-V3's, which names all but that alike."""
    name = f"model.layers.6.{lost}"

    def lose(tensors, config):
        tensors.pop(f"{name}.weight")

    bare = changed(folder, tmp_path / "bare", lose)
    head = open_checkpoint(bare).audit().head
    assert head.family == STEP.family and not head.complete and head.missing == (name,)
    with pytest.raises(CheckpointError, match="is missing"):
        load_model(bare)


def test_heads_behind_the_target_are_told_apart(folder, tmp_path):
    def renamed(tensors, config):
        for name in [name for name in tensors if "transformer.shared_head" in name]:
            tensors[name.replace("transformer.", "").replace("output", "head")] = tensors.pop(name)

    other = changed(folder, tmp_path / "other", renamed)
    assert open_checkpoint(folder).audit().head.family == STEP.family
    assert open_checkpoint(other).audit().head.family == DEEPSEEK_V3.family


def test_experts_twice_are_refused(folder, tmp_path):
    def both(tensors, config):
        tensors["model.layers.2.moe.experts.0.up_proj.weight"] = tensors["model.layers.2.moe.up_proj.weight"][0].clone()

    with pytest.raises(CheckpointError, match="holds experts twice"):
        load_model(changed(folder, tmp_path / "twice", both))


def test_a_module_for_each_draft_is_chained(pair):
    """A step reads what the one before gave; were it given the target's state again, drafts would be others."""
    check_head_setting(pair[0], PROMPTS, depth=3, count=16, first=1, chained=False)


def test_a_stack_that_is_kept_beside_single_experts(folder, tmp_path):
    """A file written with one projection's stacks excluded lists them, and is read, each projection its own way."""
    kept = ["published", "*.moe.down_proj"]
    quantize_checkpoint(folder, tmp_path / "out", format="fp8-block", exclude=kept)
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert "model.layers.3.moe.down_proj.weight" in tensors and "model.layers.3.moe.experts.0.up_proj.weight" in tensors
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "model.layers.3.moe.down_proj" in config["quantization_config"]["modules_to_not_convert"]
    runs = [
        generate(each, PROMPTS, depth=4, max_new_tokens=12)
        for each in (load_model(tmp_path / "out"), load_model(folder, model_format="fp8", exclude=kept))
    ]
    assert runs[0].tokens == runs[1].tokens and runs[0].rounds == runs[1].rounds
