"""The engine with Triton's kernels, interpreted: the same tokens and rounds as with torch."""

from __future__ import annotations

import pytest
import torch

from mtplab import ConfigError, MtplabError, generate, load_model
from mtplab.decode import runner
from mtplab.decode.peek import next_logits
from mtplab.kernels import launch
from mtplab.models import layers
from mtplab.models.cache import KVCache
from mtplab.quant import fp8_products
from mtplab.quant.policy import POLICIES, resolve_policy

PROMPTS = ["In the beginning God", "def f"]  # ragged


def run(path, monkeypatch, how: str, policy: str, **settings):
    """The run, once it is sure that kernels computed it, or did not."""
    monkeypatch.setenv("MTPLAB_KERNELS", how)
    launched = []

    def spied(module, name):
        launcher = getattr(module, name)

        def spy(*arguments, **keywords):
            launched.append((name, launch.chosen(arguments[0].device)))
            return launcher(*arguments, **keywords)

        monkeypatch.setattr(module, name, spy)

    with monkeypatch.context() as monkeypatch:
        for name in ("attend_cache", "write_kv", "delta_rule", "conv_update"):
            spied(layers, name)
        spied(runner, "emit_greedy")
        spied(runner, "emit_sampled")
        spied(fp8_products, "gemm_block")
        model = load_model(path, quant_policy=policy)
        out = generate(model, PROMPTS, **({"depth": 2, "max_new_tokens": 8} | settings))
    names = {"attend_cache", "write_kv", "delta_rule", "conv_update"}
    names |= {"emit_sampled" if settings.get("temperature") else "emit_greedy"}
    names |= {"gemm_block"} if path.name.endswith("fp8") else set()
    assert set(launched) == ({(name, "triton") for name in names} if how == "triton" else set())
    return out


@pytest.mark.slow
@pytest.mark.parametrize("policy", [p for p in POLICIES])
def test_greedy_rounds_are_the_same(bundled, monkeypatch, policy):
    """Attention over codes, cache writes, the delta rule, its convolution and acceptance, with rollback in two rows."""
    with_kernels = run(bundled, monkeypatch, "triton", policy)
    with_torch = run(bundled, monkeypatch, "reference", policy)
    assert with_kernels.tokens == with_torch.tokens and with_kernels.rounds == with_torch.rounds
    assert 0 < with_torch.stats.accepted < with_torch.stats.drafted, "nothing was rolled back"


@pytest.mark.slow
@pytest.mark.parametrize("draft_sampling", ["greedy", "sampled"])
def test_sampled_rounds_are_the_same(bundled, monkeypatch, draft_sampling):
    settings = {"temperature": 0.8, "top_p": 0.95, "seed": 3, "draft_sampling": draft_sampling}
    with_kernels = run(bundled, monkeypatch, "triton", "none", **settings)
    with_torch = run(bundled, monkeypatch, "reference", "none", **settings)
    assert with_kernels.tokens == with_torch.tokens and with_kernels.rounds == with_torch.rounds


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_as_gpus_compute(bundled, monkeypatch, dtype):
    """BF16 and FP16 sums part at near-ties; the logits stay close."""
    found = {}
    for how in ("triton", "reference"):
        monkeypatch.setenv("MTPLAB_KERNELS", how)
        model = load_model(bundled, dtype=dtype)
        assert generate(model, PROMPTS, depth=1, max_new_tokens=3).tokens
        found[how] = next_logits(model, [5, 6, 7])
    torch.testing.assert_close(found["triton"], found["reference"], rtol=0.05, atol=0.1)


@pytest.mark.slow
def test_fp8_layers_multiply_codes(bundled_fp8, monkeypatch):
    settings = {"depth": 1, "max_new_tokens": 3}
    with_kernels = run(bundled_fp8, monkeypatch, "triton", "fp8_e4m3", **settings)
    assert with_kernels.tokens == run(bundled_fp8, monkeypatch, "reference", "fp8_e4m3", **settings).tokens


def test_compiling_kernels_is_refused(bundled, monkeypatch):
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    with pytest.raises(ConfigError, match="MTPLAB_KERNELS=reference"):
        generate(load_model(bundled), "x", compile=True)


def test_nan_logits_are_told(bundled, monkeypatch):
    """The kernel says −1 for them; the run says what happened, as it does with torch."""
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    model = load_model(bundled)
    head = model.target.head
    calls = []

    class Broken:
        def __call__(self, x):
            calls.append(x)
            (out,) = head(x)
            return (out if len(calls) == 1 else out * float("nan"),)

    model.target.head = Broken()
    with pytest.raises(MtplabError, match="prompt 0: the target's logits are NaN or infinite"):
        generate(model, [[5, 6]], depth=0, max_new_tokens=4)


@pytest.mark.parametrize("policy", ["int8", "int4", "fp8_e5m2"])
def test_a_cache_read_by_kernels_keeps_no_copy(policy):
    """What a prompt's attention reads is decoded from the codes then, and is what a kept copy would hold."""
    made = [
        KVCache(resolve_policy(policy), 2, 1, 16, 32, torch.float32, torch.bfloat16, torch.device("cpu"), kernels)
        for kernels in (True, False)
    ]
    rows, slots = torch.randn(8, 32), torch.tensor([0, 1, 16, 17, 32, 33, 48, 49])
    for cache in made:
        cache.write(slots, rows)
        cache.select(torch.tensor([1, 0]))
    assert made[0].values is None and made[1].values is not None
    for a, b in zip(made[0].read(5), made[1].read(5), strict=True):
        assert torch.equal(a, b)
