"""The engine with Triton's kernels, interpreted: the same tokens and rounds as with torch."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from mtplab import ConfigError, MtplabError, generate, load_model
from mtplab.config import SamplingConfig, SpecConfig
from mtplab.decode import runner
from mtplab.decode.peek import next_logits
from mtplab.kernels import launch
from mtplab.models import layers
from mtplab.models.cache import KVCache
from mtplab.models.choice import KERNEL_STORAGE
from mtplab.models.spec import CacheRows
from mtplab.quant import fp8_products
from mtplab.quant.policy import resolve_policy
from tiny import write_tiny

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
@pytest.mark.parametrize("policy", KERNEL_STORAGE)
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
    shape = CacheRows(heads=1, dim=32)
    made = [
        KVCache(resolve_policy(policy), 2, shape, 16, torch.float32, torch.bfloat16, torch.device("cpu"), kernels)
        for kernels in (True, False)
    ]
    rows, slots = torch.randn(8, 32), torch.tensor([0, 1, 16, 17, 32, 33, 48, 49])
    for cache in made:
        cache.write(slots, rows)
        cache.select(torch.tensor([1, 0]))
    assert made[0].values is None and made[1].values is not None
    for a, b in zip(made[0].read(5), made[1].read(5), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype, policy, fits", [
    ("float16", "none", True), ("float16", "fp8_e5m2", True), ("float16", "int8", False), ("float16", "int4", False),
    ("bfloat16", "int8", True), ("float32", "int8", True),
])  # fmt: skip
def test_which_caches_kernels_take(bundled, monkeypatch, dtype, policy, fits):
    """Only integer caches have scales, in the checkpoint's BF16: FP16 beside an unquantised cache is no obstacle."""
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    run = new_run(load_model(bundled, dtype=dtype), [[5, 6, 7]], policy)
    assert run.passes.kernels is fits
    quantised = [cache for cache in run.state.target if isinstance(cache, KVCache) and policy != "none"]
    assert all((cache.values is None) is fits for cache in quantised)


def test_fp16_beside_a_bf16_checkpoint_decodes_with_kernels(bundled, monkeypatch):
    launched = []
    attend = layers.attend_cache

    def spy(q, *arguments, **keywords):
        launched.append(q.dtype)
        return attend(q, *arguments, **keywords)

    monkeypatch.setattr(layers, "attend_cache", spy)
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    assert generate(load_model(bundled, dtype="float16"), [[5, 6]], depth=1, max_new_tokens=2).tokens
    assert set(launched) == {torch.float16}


def new_run(model, prompts, policy="none", depth=2, draft_policy=None, **sampling) -> runner.Run:
    spec = SpecConfig(depth=depth, draft_sampling=sampling.pop("draft_sampling", "greedy"))
    settings = SamplingConfig(max_new_tokens=40, ignore_eos=True, **sampling)
    policies = resolve_policy(policy), resolve_policy(draft_policy or policy)
    return runner.Run(model, prompts, spec, settings, *policies, exact=True)


# from the device, and to it
READS = ("cpu", "item", "tolist", "numpy", "nonzero", "__float__", "__int__", "__bool__", "__index__", "__array__")
SENDS = ("tensor", "from_numpy", "as_tensor")


@pytest.mark.parametrize("how", ["triton", "reference"])
@pytest.mark.parametrize(
    "settings, sent",
    [({}, 0), ({"temperature": 0.8}, 0), ({"temperature": 0.8, "draft_sampling": "sampled", "top_p": 0.9}, 1)],
    ids=["greedy", "drawn", "drafts drawn too"],
)
def test_a_round_waits_for_the_device_once(tmp_path, monkeypatch, how, settings, sent):
    """What mtplab itself asks of tensors: the interpreter of kernels asks for more, and a GPU does not have it."""
    monkeypatch.setenv("MTPLAB_KERNELS", how)
    run = new_run(load_model(write_tiny(tmp_path)), [[1, 2, 3], [4]], seed=3, **settings)
    crossings = []

    def spied(owner, name, kind):
        real = getattr(owner, name)

        def spy(*arguments, **keywords):
            file = sys._getframe(1).f_code.co_filename
            ours = f"{os.sep}mtplab{os.sep}" in file or f"{os.sep}kernels{os.sep}" in file
            if ours and not file.endswith("interpreter.py"):
                crossings.append((kind, name))
            return real(*arguments, **keywords)

        monkeypatch.setattr(owner, name, spy)

    with torch.inference_mode():
        run.prefill()
        run.round()
        for name in READS:
            spied(torch.Tensor, name, "read")
        for name in SENDS:
            spied(torch, name, "sent")
        run.round()
    kinds = [kind for kind, _ in crossings]
    # the references of a sampled verdict take numbers from the host
    verdict = 2 if how == "reference" and settings else 0
    # .cpu() and the .numpy() of what it gave
    assert kinds.count("read") == 2 and kinds.count("sent") == sent + verdict, crossings


@pytest.mark.parametrize("policy", ["int8", "int4", "fp8_e4m3"])
def test_a_prompt_of_many_segments_is_decoded_once(tmp_path, monkeypatch, policy):
    """Kernels keep no copy of a cache as read back; a prompt's later segments still do not decode the earlier again."""
    model = load_model(write_tiny(tmp_path, max_position_embeddings=4096))
    prompts = [[1 + i % 14 for i in range(5 * runner.SEGMENT)], [3, 4]]
    ends = []
    for how in ("triton", "reference"):
        monkeypatch.setenv("MTPLAB_KERNELS", how)
        run = new_run(model, prompts, policy)
        decoded: list[int] = []
        for cache in (run.state.target[1], run.state.draft[0]):
            part = cache.parts[0]
            part.codec = Counted(part.codec, lambda codes, decoded=decoded: decoded.append(len(codes.flatten(0, -2))))
        with torch.inference_mode():
            run.prefill()
        # K and V of one head, in the target's layer and in the draft's, padded to whole chunks
        assert sum(decoded) <= 2 * 2 * 2 * (5 * runner.SEGMENT), decoded
        assert (run.state.draft[0].values is None) == (how == "triton"), "a copy outlives the prompts"
        ends.append([run.last, run._unread.hidden, run.state.target[1].codes.view(torch.uint8)])
    for a, b in zip(*ends, strict=True):
        assert torch.equal(a, b)


class Counted:
    """A codec that says what it decodes."""

    def __init__(self, codec, tell):
        self.codec, self.tell = codec, tell

    def encode(self, rows, meta_dtype):
        return self.codec.encode(rows, meta_dtype)

    def decode(self, codes, meta, dtype):
        self.tell(codes)
        return self.codec.decode(codes, meta, dtype)
