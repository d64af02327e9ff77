"""Cache policies in runs: lossless, traced as they run, with scales, with layers kept, and what kernels read of them.

Numerics are `test_kv.py`'s and `test_turboquant.py`'s.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mtplab import CheckpointError, ConfigError, compare_caches, generate, load_model, memory, sweep, trace
from mtplab.checkpoint.write import write_safetensors
from mtplab.decode.calibration import bound
from mtplab.decode.reading import read_texts
from mtplab.models.cache import KVCache
from mtplab.models.choice import decodes_with_kernels
from mtplab.quant.policy import resolve_policy
from mtplab.study.point import PointConfig
from mtplab.study.prompts import load_prompts
from mtplab.study.quality import quality
from tiny import DEFAULTS, tiny_tensors, write_tiny

PROMPTS = ["Once upon a time there was a king who", "def main():", "In the"]
TEXTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 1], [5, 4, 3], [9, 9, 2, 4]]
# two attention layers, two KV heads
WIDE = {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "full_attention"],
        "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


@pytest.fixture(scope="module")
def model(bundled_fp8):
    return load_model(bundled_fp8)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return load_model(write_tiny(tmp_path_factory.mktemp("wide"), **WIDE))


@pytest.mark.parametrize(
    "policy, draft",
    [("turboquant", None), ("int8/int4", None), ("turboquant/fp8", "turboquant"), ("fp8:calibrated", None),
     ("fp8:calibrated/int4", "fp8:calibrated-head"), ("int4@3", None), ("none", "turboquant")],
)  # fmt: skip
def test_lossless_and_traced_as_it_runs(model, policy, draft):
    """Greedy text is plain decoding's at every depth, and a trace counts what the runner counts."""
    settings = {"quant_policy": policy, "draft_quant_policy": draft, "max_new_tokens": 24, "exact": True}
    settings["calibration"] = ["The quick brown fox jumps over", "import os"]
    plain = generate(model, PROMPTS, depth=0, max_batch=1, **settings).tokens
    found = trace(model, PROMPTS, max_depth=5, **settings)
    assert found.outputs == plain
    for depth in (1, 5):
        run = generate(model, PROMPTS, depth=depth, **settings)
        assert run.tokens == plain and run.per_prompt == found.acceptance().per_prompt(depth)
        assert run.memory["quant_policy"] == resolve_policy(policy).name == found.settings["quant_policy"]
        assert run.memory["draft_quant_policy"] == found.settings["draft_quant_policy"]


def test_random_heads_and_layers_are_traced_as_they_run(wide):
    for policy in ("fp8:calibrated-head", "turboquant@1", "fp8:calibrated-head/turboquant@2"):
        settings = {"quant_policy": policy, "max_new_tokens": 16, "exact": True, "calibration": TEXTS[:2]}
        found = trace(wide, TEXTS, max_depth=3, **settings)
        run = generate(wide, TEXTS, depth=3, max_batch=2, **settings)
        assert run.tokens == found.outputs == generate(wide, TEXTS, depth=0, **settings).tokens
        assert run.per_prompt == found.acceptance().per_prompt(3)


def rows_written(monkeypatch, model) -> dict[int, torch.Tensor]:
    """The largest |K| and |V| of each head of each cache over TEXTS, from the rows themselves: by order of writing."""
    largest: dict[int, torch.Tensor] = {}
    caches: list[KVCache] = []
    before = KVCache.write

    def write(cache, slots, rows):
        if not any(cache is known for known in caches):
            caches.append(cache)
        heads = rows.view(2, -1, cache.rows.heads, rows.shape[-1]).abs().amax(dim=(1, 3))
        at = next(i for i, known in enumerate(caches) if cache is known)
        largest[at] = torch.maximum(largest.get(at, heads), heads)
        before(cache, slots, rows)

    with monkeypatch.context() as patch:
        patch.setattr(KVCache, "write", write)
        generate(model, TEXTS, depth=1, max_new_tokens=1)
    return largest


def test_calibrated_scales_are_the_largest_value_over_448(wide, monkeypatch):
    largest = rows_written(monkeypatch, wide)
    assert len(largest) == 3, "the target's two attention layers, then the draft's"
    for part, layers in (("target", {1: 0, 2: 1}), ("draft", {0: 2})):
        by_head = bound(wide, resolve_policy("fp8:calibrated-head"), part, TEXTS)
        by_layer = bound(wide, resolve_policy("fp8:calibrated"), part, TEXTS)
        half = bound(wide, resolve_policy("int8/fp8_e5m2:calibrated"), part, TEXTS)
        assert set(by_head.scales) == set(layers)
        for layer, at in layers.items():
            for which in (0, 1):
                most = largest[at][which]
                assert torch.equal(by_head.scales[layer][which], most / 448)
                assert torch.equal(by_layer.scales[layer][which], most.amax(keepdim=True) / 448)
            assert half.scales[layer][0] is None
            assert torch.equal(half.scales[layer][1], largest[at][1].amax(keepdim=True) / 57344)
    assert by_head == resolve_policy("fp8:calibrated-head"), "scales are no part of what a policy is"


def test_calibration_is_of_the_texts_that_are_given_and_never_assumed(wide):
    policy = resolve_policy("fp8:calibrated")
    short, again, whole = (bound(wide, policy, "target", texts).scales[1][0] for texts in (TEXTS[:1], TEXTS[:1], TEXTS))
    assert torch.equal(short, again) and whole >= short
    with pytest.raises(ConfigError, match="calibrated on texts, and none are given; give calibration="):
        generate(wide, TEXTS, depth=0, max_new_tokens=2, quant_policy="fp8:calibrated")
    with pytest.raises(ConfigError, match="calibration text 1 has 600 tokens; expected at most 511"):
        generate(wide, TEXTS, depth=0, max_new_tokens=2, quant_policy="fp8:calibrated", calibration=[[1], [1] * 600])


def scaled(folder: Path, scales: dict[str, torch.Tensor]) -> Path:
    """The wide checkpoint with tensors of a quantised cache beside its weights."""
    write_tiny(folder, **WIDE)
    write_safetensors(folder / "model.safetensors", tiny_tensors(DEFAULTS | WIDE) | scales)
    return folder


STEMS = ("model.layers.1.self_attn", "model.layers.2.self_attn", "mtp.layers.0.self_attn")


@pytest.mark.parametrize(
    "names, shape",
    [(("k_scale", "v_scale"), (1,)), (("k_proj.k_scale", "v_proj.v_scale"), ()), (("k_scale", "v_scale"), (2, 1, 1)),
     (("k_proj.output_scale", "v_proj.output_scale"), (1,)), (("kv_scale",), ())],
)  # fmt: skip
def test_the_checkpoints_own_scales(tmp_path, names, shape):
    """Whatever they are called, and per head where there is one for each."""
    scales = {}
    for number, stem in enumerate(STEMS):
        for which, name in enumerate(names):
            count = 2 if len(shape) == 3 else 1
            values = torch.arange(1.0, count + 1) * (0.25 + 0.125 * which) * (number + 1)
            scales[f"{stem}.{name}"] = values.to(torch.bfloat16).reshape(shape)
    model = load_model(scaled(tmp_path, scales))
    for part, stems in (("target", {1: STEMS[0], 2: STEMS[1]}), ("draft", {0: STEMS[2]})):
        policy = bound(model, resolve_policy("fp8_e4m3:checkpoint"), part)
        for layer, stem in stems.items():
            for which in (0, 1):
                expected = scales[f"{stem}.{names[which % len(names)]}"].float().flatten()
                assert torch.equal(policy.scales[layer][which], expected)
    settings = {"quant_policy": "fp8:checkpoint", "max_new_tokens": 12, "exact": True}
    found = trace(model, TEXTS, max_depth=2, **settings)
    run = generate(model, TEXTS, depth=2, **settings)
    assert run.tokens == found.outputs and run.per_prompt == found.acceptance().per_prompt(2)


def test_scales_that_are_missing_or_none_are_named(tmp_path, wide):
    with pytest.raises(ConfigError, match=r"no k_scale for 2 of 2 attention layers: model.layers.1.self_attn, model"):
        generate(wide, TEXTS, depth=0, max_new_tokens=2, quant_policy="fp8:checkpoint")
    good = {f"{stem}.{name}": torch.ones(1) for stem in STEMS[:2] for name in ("k_scale", "v_scale")}
    model = load_model(scaled(tmp_path / "headless", good))
    said = r"1 of 1 attention layers: mtp.layers.0.self_attn \(the draft head; give it a draft_quant_policy"
    with pytest.raises(ConfigError, match=said):
        generate(model, TEXTS, depth=1, max_new_tokens=2, quant_policy="fp8:checkpoint")
    assert generate(model, TEXTS, 1, max_new_tokens=2, quant_policy="fp8:checkpoint", draft_quant_policy="fp8").tokens
    for fault, said in (
        (torch.tensor([-1.0]), r"k_scale is \[-1.0\]; expected positive numbers"),
        (torch.ones(3), "k_scale has 3 numbers; expected one, or one for each of 2 KV heads"),
    ):
        model = load_model(scaled(tmp_path / "bad", good | {f"{STEMS[0]}.k_scale": fault}))
        with pytest.raises(CheckpointError, match=said):
            generate(model, TEXTS, depth=0, max_new_tokens=2, quant_policy="fp8:checkpoint")


def test_a_layer_that_is_kept_needs_no_scale(tmp_path):
    """As vLLM's skipped layers, which store none; where it is not kept, it is named."""
    names = ("k_scale", "v_scale")
    model = load_model(scaled(tmp_path, {f"{stem}.{name}": torch.ones(1) for stem in STEMS[1:] for name in names}))
    policy = bound(model, resolve_policy("fp8:checkpoint@1"), "target")
    assert sorted(policy.scales) == [2]
    assert generate(model, TEXTS, depth=1, max_new_tokens=2, quant_policy="fp8:checkpoint@1").tokens
    with pytest.raises(ConfigError, match=r"no k_scale for 1 of 2 attention layers: model.layers.1.self_attn;"):
        bound(model, resolve_policy("fp8:checkpoint"), "target")


@pytest.mark.parametrize(
    "policies, draft, said",
    [
        (("none", "int8@0"), None, "int8@0 keeps layer 0 unquantised, which has no KV cache here; expected some of 3"),
        (("none",), ("int8@3",), "the draft's quant_policy is int8@3, which names layers of the target; use int8 or"),
        (("none", "fp8:checkpoint"), None, "no k_scale for 1 of 1 attention layers: model.layers.3.self_attn"),
        (("none",), ("fp8:checkpoint",), r"1 of 1 attention layers: mtp.layers.0.self_attn \(the draft head"),
    ],
)
def test_a_policy_that_no_run_could_have_is_refused_before_anything_runs(model, tmp_path, policies, draft, said):
    """In a sweep while it is planned, in a cache study before its first text, and where memory is worked out."""
    path = model.checkpoint.path

    def never(*arguments, **settings):
        raise AssertionError("a model was loaded")

    settings = {"prompts": PROMPTS[:1], "results": tmp_path, "load_model": never}
    with pytest.raises(ConfigError, match=said):
        sweep(path, quant_policy=policies, draft_quant_policy=draft, depths=(0, 1), **settings)
    assert not list(tmp_path.glob("*.json*"))
    steps = []
    with pytest.raises(ConfigError, match=said):
        compare_caches(model, PROMPTS[:1], policies, draft or (), on_step=lambda *step: steps.append(step))
    assert not steps
    with pytest.raises(ConfigError, match=said):
        memory(path, quant_policy=policies[-1], draft_quant_policy=None if draft is None else draft[0])


def test_a_draft_that_nobody_asks_is_not_checked(bundled, tmp_path):
    """At depth 0 there is no draft's cache, and its policy cannot be wrong."""
    found = sweep(bundled, PROMPTS[:1], 0, draft_quant_policy="fp8:checkpoint", max_new_tokens=2, results=tmp_path,
                  quality=False)  # fmt: skip
    assert not found.failed


def test_layers_that_are_kept(wide):
    """Their caches are unquantised, the account says so, and the draft that inherits the policy has none kept."""
    policy = resolve_policy("int4@2")
    caches = wide.target_caches(1, 64, policy)
    assert [c.policy.name for c in caches[1:]] == ["int4", "none"]
    run = generate(wide, TEXTS, depth=1, max_new_tokens=2, quant_policy="int4@2")
    quantised, plain = 2 * 2 * (8 + 4), 2 * 2 * 32
    assert run.memory["layers"] == [0, quantised, plain, quantised] and run.memory["draft_quant_policy"] == "int4"
    assert run.memory["kv_bytes_per_token"] == quantised + plain == wide.kv_bytes_per_token("int4@2")
    everything = generate(wide, TEXTS, depth=0, max_new_tokens=8, quant_policy="int4@1+2")
    assert everything.tokens == generate(wide, TEXTS, depth=0, max_new_tokens=8).tokens
    with pytest.raises(ConfigError, match=r"keeps layers 0, 7 unquantised, which have no KV cache .* some of 1, 2"):
        generate(wide, TEXTS, depth=0, max_new_tokens=2, quant_policy="int4@0+7")
    with pytest.raises(ConfigError, match="draft's quant_policy is int4@1, which names layers of the target; use int4"):
        generate(wide, TEXTS, depth=1, max_new_tokens=2, draft_quant_policy="int4@1")


def test_quality_reads_with_the_same_scales(wide):
    """A reading under a calibrated policy is the one under scales bound by hand, and unlike the one at scale 1."""
    texts = [TEXTS[0] * 3]
    found = quality(wide, texts, wide, quant_policy="fp8:calibrated-head", calibration=TEXTS)
    policy = bound(wide, resolve_policy("fp8:calibrated-head"), "target", TEXTS)
    logits = torch.cat([part for _, _, part in read_texts(wide, texts, policy)])[:-1].double().log_softmax(-1)
    expected = -logits.gather(1, torch.tensor(texts[0][1:])[:, None])[:, 0]
    assert found.nll.tolist() == expected.tolist()
    assert found.mean_kl > 0 and found.mean_kl != quality(wide, texts, wide, quant_policy="fp8").mean_kl


@pytest.mark.parametrize(
    "policy, read",
    [("int8", True), ("fp8:calibrated", True), ("int8@1", True), ("turboquant", False), ("int8/int4", False),
     ("fp8:calibrated-head", False), ("fp8:calibrated/fp8", True), ("turboquant@1", False)],
)  # fmt: skip
def test_kernels_are_only_used_for_caches_that_they_read(wide, monkeypatch, policy, read):
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    given = resolve_policy(policy)
    for each in (given, bound(wide, given, "target", TEXTS)):
        assert decodes_with_kernels(wide.config, wide.dtype, wide.device, [each]) is read
    assert decodes_with_kernels(wide.config, wide.dtype, wide.device, [resolve_policy("none"), given]) is read


def test_scales_per_head_of_a_checkpoint_are_not_the_kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    for count, read in ((1, True), (2, False)):
        scales = {f"{stem}.{name}": torch.ones(count) for stem in STEMS for name in ("k_scale", "v_scale")}
        model = load_model(scaled(tmp_path / str(count), scales))
        policy = bound(model, resolve_policy("fp8:checkpoint"), "target")
        assert decodes_with_kernels(model.config, model.dtype, model.device, [policy]) is read


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["fp8:calibrated@2", "turboquant"])
def test_with_kernels_interpreted(tmp_path, monkeypatch, policy):
    """The same tokens and rounds where kernels divide and multiply by the scales, and where they must not be used."""
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    settings = {"quant_policy": policy, "max_new_tokens": 8, "depth": 2, "calibration": TEXTS}
    path = write_tiny(tmp_path, **WIDE)
    with_kernels = generate(load_model(path), TEXTS, **settings)
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    with_torch = generate(load_model(path), TEXTS, **settings)
    assert with_kernels.tokens == with_torch.tokens and with_kernels.rounds == with_torch.rounds


POINT = {
    "method": "trace", "checkpoint": "full:0", "plan": "p", "excluded": ("a",), "draft_excluded": (),
    "model_format": None, "activation_rounding": True, "exact": True, "device": "cpu", "dtype": "float32",
    "quant_policy": "int8", "draft_quant_policy": "int8", "temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0,
    "draft_sampling": "greedy", "target_hidden": "post_norm", "draft_hidden": "post_norm", "max_new_tokens": 8,
    "ignore_eos": False, "prompts": ((1, 2),), "domains": ("d",),
}  # fmt: skip


def test_calibration_texts_are_part_of_a_points_hash_and_of_no_other():
    """Hashes of points from before there was any calibration are as they were (found at commit 94bb86d)."""
    point = PointConfig(**POINT)
    assert point.hash() == "84a013fc3eabb966962794f751afc0717aac8fddf56a3083fcb05bd0f5ca4378"
    assert point.target_hash("t") == "3bad1a0e502f3c269e5f83e40a3fbce829c34f2fd9361635abe8c6ed27725dd6"
    assert PointConfig(**POINT, calibration=((7,),)).hash() == point.hash(), "nothing there looks at it"
    calibrated = POINT | {"quant_policy": "fp8_e4m3:calibrated", "draft_quant_policy": "int8"}
    one, other = (PointConfig(**calibrated, calibration=texts) for texts in (((7,),), ((8,),)))
    assert one.hash() != other.hash() and one.target_hash("t") != other.target_hash("t")
    assert one.run_arguments()["calibration"] == [[7]] and "calibration" not in point.run_arguments()
    of_draft = POINT | {"draft_quant_policy": "fp8_e4m3:calibrated"}
    one, other = (PointConfig(**of_draft, calibration=texts) for texts in (((7,),), ((8,),)))
    assert one.hash() != other.hash() and one.target_hash("t") == other.target_hash("t") == point.target_hash("t")


def test_a_sweep_takes_every_policy_and_counts_what_the_runner_counts(bundled_fp8, tmp_path):
    settings = {"prompts": PROMPTS[:2], "depths": (0, 2), "max_new_tokens": 12, "results": tmp_path}
    policies = ("fp8:calibrated", "turboquant/int8", "int8@3")
    traced = sweep(bundled_fp8, quant_policy=policies, **settings)
    assert not traced.failed
    assert [row.quant_policy for row in traced.rows[::2]] == [resolve_policy(policy).name for policy in policies]
    assert [row.draft_quant_policy for row in traced.rows[::2]] == ["fp8_e4m3:calibrated", "turboquant/int8", "int8"]
    run = sweep(bundled_fp8, quant_policy=policies, method="run", **settings)
    for mine, theirs in zip(traced, run, strict=True):
        assert (mine.output_hash, mine.rounds, mine.accepted) == (theirs.output_hash, theirs.rounds, theirs.accepted)
    said = traced.rows[0].provenance["config"]["calibration"]
    assert re.fullmatch(rf"{len(load_prompts().prompts)} texts, [0-9a-f]{{64}}", said)
    again = sweep(bundled_fp8, quant_policy=("fp8_e4m3:calibrated/fp8:calibrated",), **settings)
    assert again.computed == 0, "another spelling of the same policy"
    other = sweep(bundled_fp8, quant_policy=("fp8:calibrated",), calibration=PROMPTS[2:], **settings)
    assert other.rows[0].point != traced.rows[0].point
