"""The cache of latent attention: one row a token that is key and value at once, its scales, and what it takes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

import mtplab
from family_checkpoints import write_deepseek_v3
from mtplab import ConfigError, compare_caches, generate, load_model
from mtplab.decode.calibration import bound
from mtplab.models.cache import KVCache
from mtplab.models.spec import CacheRows
from mtplab.quant.policy import resolve_policy
from mtplab.report.sweep_panel import SweepPanel
from test_memory import held_tensors

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_deepseek_v3(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder)


def test_what_is_kept_of_a_token_is_one_row(model):
    width = 32 + 16
    run = generate(model, PROMPTS, depth=1, max_new_tokens=4, quant_policy="int8")
    # a byte each, and scale and zero in BF16
    assert run.memory["layers"] == [width + 4] * 4
    for policy in ("none", "int4", "fp8"):
        caches = model.target_caches(2, 256, resolve_policy(policy))
        assert len(caches) == 3 and all(cache.parts[0].codes.shape[:4] == (1, 2, 1, 256) for cache in caches)
    for policy in ("int8/int4", "turboquant", "none/fp8", "fp8:calibrated/fp8"):
        with pytest.raises(ConfigError, match="stores K and V differently, but this model's cache keeps one row"):
            generate(model, PROMPTS, quant_policy=policy)
    with pytest.raises(ConfigError, match=r"no k_scale for 3 of 3 attention layers: model\.layers\.0\.self_attn"):
        generate(model, PROMPTS, quant_policy="fp8:checkpoint")


def test_a_study_of_caches_takes_the_policies_that_fit(model):
    settings = {"max_depth": 1, "max_new_tokens": 4, "text_tokens": 8}
    assert compare_caches(model, PROMPTS[:1], **settings).policies == ["none", "int8", "int4", "fp8_e4m3"]
    with pytest.raises(ConfigError, match="keeps one row"):
        compare_caches(model, PROMPTS[:1], ["turboquant"], **settings)


def test_the_sweep_panel_offers_the_policies_that_fit(folder, model):
    fit = ("none", "int8", "int4", "fp8_e4m3", "fp8_e5m2")
    for each in (folder, model):
        assert SweepPanel(each, modules=[])._widgets["policies"].options == fit
    assert SweepPanel("nowhere", modules=[])._widgets["policies"].options == (*fit, "turboquant")


@pytest.mark.parametrize("policy", ["none", "int8", "int4", "fp8_e5m2"])
@pytest.mark.parametrize("kernels", [False, True])
def test_a_cache_of_one_row_gives_back_what_was_written(policy, kernels):
    """With a copy as read back and without, at slots in any order, after picking sequences."""
    g = torch.Generator().manual_seed(0)
    rows, cpu = CacheRows(1, 24, sides=1), torch.device("cpu")
    own = resolve_policy(policy)
    cache = KVCache(own, 3, rows, 16, torch.float32, torch.float32, cpu, kernels)
    x, slots = torch.randn(6, 24, generator=g), torch.tensor([40, 3, 17, 0, 33, 31])
    cache.write(slots, x)
    keys, values = cache.read(16)
    assert keys.shape == (3, 1, 16, 24) and torch.equal(keys, values)
    wide = KVCache(own, 3, CacheRows(1, 24), 16, torch.float32, torch.float32, cpu, kernels)
    wide.write(torch.cat([slots, slots + 48]), torch.cat([x, x]))
    assert torch.equal(wide.read(16)[0], keys) and 2 * cache.bytes_per_slot == wide.bytes_per_slot
    assert torch.equal(cache.fork(torch.tensor([2, 0]), 8).read(8)[0], keys[[2, 0], :, :8])


def test_scales_of_a_row_are_calibrated_or_the_files(folder, model, tmp_path):
    texts = [PROMPTS[2]]
    policy = bound(model, resolve_policy("fp8:calibrated"), "target", texts)
    assert all(torch.equal(k, v) for k, v in policy.scales.values()) and len(policy.scales) == 3
    settings = {"max_new_tokens": 12, "draft_quant_policy": "none"}
    calibrated = generate(model, PROMPTS, depth=2, quant_policy="fp8:calibrated", calibration=texts, **settings)
    tensors = load_file(folder / "model.safetensors")
    for layer, (scale, _) in policy.scales.items():
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = scale.reshape(())
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    stored = generate(load_model(tmp_path), PROMPTS, depth=2, quant_policy="fp8:checkpoint", **settings)
    assert stored.tokens == calibrated.tokens and stored.rounds == calibrated.rounds


@pytest.mark.parametrize("settings", [{}, {"model_format": "fp8"}, {"dtype": "bfloat16"}])
def test_memory_is_what_is_held(folder, settings):
    model = load_model(folder, **settings)
    said = mtplab.memory(folder, quant_policy="int8", depth=2, batch=3, context=40, **settings)
    caches = [
        *model.target_caches(3, 40, resolve_policy("int8")), *model.draft_caches(2, 3, 40, resolve_policy("int8"))
    ]  # fmt: skip
    assert said.caches.token == sum(cache.bytes_per_slot for cache in caches)
    assert said.caches.deployed_token == 4 * (32 + 16 + 4)
    copies = 2 * 64 * 64 * (2 if "dtype" in settings else 4)
    assert said.weights.at_most - said.weights.nbytes >= copies / 2
    if "dtype" in settings:  # nothing is packed
        assert said.weights.nbytes == pytest.approx(held_tensors(model), rel=2e-3)
