"""What a load takes in memory, said before: against what a process then holds, and needs at the worst moment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import mtplab
from conftest import REPO
from mtplab import CheckpointError, ConfigError, load_model
from mtplab.cli import main
from mtplab.decode.state import RunState
from mtplab.models import machine
from mtplab.models.cache import DeltaState, KVCache
from mtplab.models.held import held_weights, largest_product
from mtplab.models.memory import Memory
from tests.checkpoint_builders import CHECKPOINTS
from tests.tiny import write_tiny

BUNDLED = REPO / "data" / "tiny-qwen3_5"
# 237 MB in BF16, a third of it embedding and vocabulary head
LARGE = {
    "vocab_size": 24000, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 128, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
}  # fmt: skip

# a small model first, so that what libraries take once is not counted; VmHWM, the peak, is reset in between
CODE = """
import json, sys
import mtplab
path, small, copies, settings = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
def now(key):
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1])
kept = [mtplab.load_model(small, **settings)]
open("/proc/self/clear_refs", "w").write("5")
before = now("VmRSS")
kept += [mtplab.load_model(path, **settings) for _ in range(copies)]
print(json.dumps({"held": now("VmRSS") - before, "peak": now("VmHWM") - before}))
"""


def measured(path, small, settings, copies=1) -> dict[str, int]:
    command = [sys.executable, "-c", CODE, str(path), str(small), str(copies), json.dumps(settings)]
    ran = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("large"), **LARGE)


@linux
@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize(
    "settings",
    [{}, {"model_format": "fp8"}, {"dtype": "bfloat16"}],
    ids=["BF16", "FP8 at load", "in bfloat16"],
)
def test_a_load_holds_what_was_said_and_one_matrix_more_at_worst(large, settings):
    """Within 1.5 % and 1 MB: the objects around the tensors, and what a small model did not make libraries take. On the
    way there is no more than the one matrix that was announced and 13 MB: up to three buffers of 4 MB, used again by
    every tensor."""
    said, found = mtplab.memory(large, **settings).weights, measured(large, BUNDLED, settings)
    assert abs(found["held"] - said.nbytes) < 0.015 * said.nbytes + 1e6, (found, said)
    assert found["peak"] < said.nbytes + said.loading + 0.015 * said.nbytes + 13e6, (found, said)
    assert said.nbytes > 2.2e8 and said.loading == (4 * 24000 * 1024 if "dtype" not in settings else 0)


@linux
@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("name", ["tiny-qwen3_5", "tiny-qwen3_5-fp8"])
def test_the_bundled_model_holds_what_was_said(repo, name):
    """Eight copies, since one is of the size of what surrounds it. Beside its weights each has a tokenizer (0.5 MB), a
    plan and headers of its own: 1 MB a copy is allowed for them, and 2 % for whole pages."""
    path = repo / "data" / name
    said, found = 8 * mtplab.memory(path).weights.nbytes, measured(path, path, {}, copies=8)
    assert said < found["held"] < 1.02 * said + 8e6, (found, said)


def held_tensors(model) -> int:
    """Bytes of all tensors that a model's target and draft reach, each storage once; packed ones are not tensors."""
    seen: dict[int, int] = {}

    def walk(x, depth=0):
        if isinstance(x, torch.Tensor):
            if not x.is_mkldnn:
                seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        elif isinstance(x, list | tuple):
            for item in x:
                walk(item, depth + 1)
        elif type(x).__module__.startswith("mtplab.") and depth < 12:
            for item in vars(x).values():
                walk(item, depth + 1)

    walk([model.target, model.draft])
    return sum(seen.values())


@pytest.mark.parametrize("settings", [{}, {"model_format": "fp8", "exclude": "none"}], ids=["BF16", "FP8"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_tensor_is_counted_once(tmp_path, settings, tied):
    """In bfloat16 nothing is packed, so what is held can be added up. The norms of q and k are held for every head."""
    folder = write_tiny(tmp_path, vocab_size=640, hidden_size=256, intermediate_size=384, tie_word_embeddings=tied)
    model = load_model(folder, dtype="bfloat16", **settings)
    said = mtplab.memory(folder, dtype="bfloat16", **settings).weights.nbytes
    assert said == pytest.approx(held_tensors(model), rel=2e-3)


@pytest.mark.parametrize(
    "policy, draft_policy",
    [("none", None), ("int8", "int4"), ("fp8_e4m3", None), ("turboquant", "none/int8"), ("int8/int4@1", None)],
)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_caches_are_those_of_a_run(tmp_path, policy, draft_policy, dtype):
    folder = write_tiny(tmp_path)
    batch, context, depth = 3, 40, 2
    model = load_model(folder, dtype=dtype, quant_policy=policy, draft_quant_policy=draft_policy)
    said = mtplab.memory(
        folder, dtype=dtype, quant_policy=policy, draft_quant_policy=draft_policy,
        batch=batch, context=context, depth=depth,
    ).caches  # fmt: skip
    state = RunState(model, batch, context, model.policy("target"), model.policy("draft"), depth)
    caches = [cache for cache in (*state.target, *state.draft) if isinstance(cache, KVCache)]
    deltas = [cache for cache in state.target if isinstance(cache, DeltaState)]
    assert said.token == sum(cache.bytes_per_slot for cache in caches)
    assert said.batch * said.state == sum(
        x.nbytes for delta in deltas for x in (delta.conv, delta.recurrent, delta.step_buffer(depth + 1))
    )
    assert said.deployed_token == model.kv_bytes_per_token() + model.kv_bytes_per_token(part="draft")
    assert said.nbytes == batch * context * said.token + batch * said.state


def test_on_a_gpu_codes_stay_codes(bundled_fp8):
    """Nothing there can be measured here: the sum is the plan's, with what is no matrix in float32."""
    said = mtplab.memory(bundled_fp8, device="cuda:0")
    plan = mtplab.open_checkpoint(bundled_fp8).plan()
    assert said.weights.dtype == "bfloat16"
    codes = sum(each.nbytes for each in said.weights.held if each.dtype == "FP8 and float32 scales")
    stored = sum(m.nbytes for m in plan.modules if m.weight == "fp8")
    assert codes == stored  # its scales are stored as F32
    assert said.weights.nbytes == pytest.approx(plan.loaded_nbytes(), rel=0.02)
    if not torch.cuda.is_available():
        assert said.available is None and said.fits is None and "torch sees no GPU here" in said.sentence


def test_a_load_that_cannot_fit_is_refused_before_it_reads(monkeypatch, bundled):
    monkeypatch.setattr("mtplab.models.memory.available_memory", lambda device: (1_000_000, "memory of a thimble"))
    monkeypatch.setattr("mtplab.models.model.Parameters", None)  # what reads
    with pytest.raises(ConfigError) as refusal:
        load_model(bundled)
    for part in ("16.1 MB on cpu in float32", "at most 1 MB, memory of a thimble", "dtype='bfloat16'", "check_memory="):
        assert part in str(refusal.value)
    monkeypatch.undo()
    monkeypatch.setattr("mtplab.models.memory.available_memory", lambda device: (1_000_000, "memory of a thimble"))
    assert load_model(bundled, check_memory=False).config.vocab_size
    assert mtplab.memory(bundled).fits is False


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_memory_that_runs_out_is_said(monkeypatch, bundled, error):
    def run_out(*_):
        raise error

    monkeypatch.setattr("mtplab.models.model.build_target", run_out)
    with pytest.raises(ConfigError, match="memory ran out while its weights were read"):
        load_model(bundled)


def test_what_torch_says_of_a_shortage_is_known(monkeypatch, bundled):
    """More than any machine has; and an error of another kind is not taken for a shortage."""
    monkeypatch.setattr("mtplab.models.model.build_target", lambda *_: torch.empty(1 << 60, dtype=torch.uint8))
    with pytest.raises(ConfigError, match="memory ran out"):
        load_model(bundled)
    monkeypatch.setattr("mtplab.models.model.build_target", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        load_model(bundled)


def test_what_is_there_is_the_least_of_machine_and_container(tmp_path, monkeypatch):
    for name, text in {
        "meminfo": "MemTotal: 9 kB\nMemAvailable:    8000 kB\n", "max": "6000000\n", "current": "5000000\n",
        "stat": "anon 1\ninactive_file 2000000\n", "unlimited": "max\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(machine, "_CGROUPS", ())
    assert machine.available_memory() == (8_192_000, "memory available (MemAvailable)")
    group = [str(tmp_path / name) for name in ("max", "current", "stat")]
    monkeypatch.setattr(machine, "_CGROUPS", [group])
    size, source = machine.available_memory()
    assert size == 3_000_000 and "cgroup" in source
    monkeypatch.setattr(machine, "_CGROUPS", [[str(tmp_path / "unlimited"), *group[1:]]])
    assert machine.available_memory()[0] == 8_192_000
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "nothing")
    assert machine.available_memory()[0] is None
    assert mtplab.memory(BUNDLED).fits is None and load_model(BUNDLED)


def test_doctor_says_what_a_checkpoint_needs(capsys, bundled):
    assert main(["doctor", str(bundled), "--batch", "8", "--context", "1000", "--quant-policy", "int8"]) == 0
    said = capsys.readouterr().out
    assert "embedding" in said and "FP16, packed" in said and "8 × 1000 tokens" in said and "it fits in" in said
    assert main(["doctor", str(bundled), "--json", "--model-format", "fp8", "--dtype", "bfloat16", "--depth", "0"]) == 0
    found = json.loads(capsys.readouterr().out)["memory"]
    assert found["fits"] is True and found["weights"]["dtype"] == "bfloat16"
    assert found["needed"] == found["weight_bytes"] + max(found["weights"]["loading"], found["cache_bytes"])
    assert found["caches"]["deployed_token"] == load_model(bundled).kv_bytes_per_token()


def test_doctor_fails_where_it_does_not_fit(capsys, monkeypatch, bundled):
    monkeypatch.setattr("mtplab.models.memory.available_memory", lambda device: (10_000_000, "memory of a cup"))
    assert main(["doctor", str(bundled)]) == 1
    assert "it does NOT fit in 10 MB of memory of a cup" in capsys.readouterr().out


def test_of_an_architecture_that_is_not_run_the_weights_are_said(tmp_path, capsys):
    path = shutil.copytree(CHECKPOINTS / "ds-v3-ragged-mtp" / "ckpt", tmp_path / "other")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v9"}))
    said, plan = mtplab.memory(path, device="cuda"), mtplab.open_checkpoint(path).plan()
    assert said.caches is None and said.fits is None and "mtplab runs" in said.sentence
    # of a kv_b_proj values are held, BF16 in place of FP8
    expected = plan.loaded_nbytes() + sum(m.nbytes for m in plan.modules if m.name.endswith(".kv_b_proj"))
    assert said.stored == plan.nbytes() and said.weights.at_most == pytest.approx(expected, rel=0.05)
    copies = 2 * plan.by_name["model.embed_tokens"].nbytes  # the head's, which are the target's as far as is known
    assert said.weights.at_most - said.weights.nbytes == copies
    assert {each.part for each in said.weights.held} >= {"embedding", "target", "head", "draft"}
    assert main(["doctor", str(path)]) == 0
    assert "all weights" in (out := capsys.readouterr().out) and "mtplab runs" in out


def test_a_stack_of_experts_is_counted_as_its_matrices():
    plan = mtplab.open_checkpoint(CHECKPOINTS / "ds-v3-ragged-mtp" / "ckpt").plan()
    expert = next(m for m in plan.modules if m.kind == "linear" and m.weight == "bf16" and m.part == "target")
    one = replace(expert, name="model.layers.0.mlp.experts.gate_up_proj", shape=(96, 512))
    stack = replace(one, kind="other", shape=(8, 96, 512))
    for dtype, size in (("float32", 2), ("bfloat16", 2)):
        (held,) = held_weights(replace(plan, modules=(stack,)), "cpu", dtype)
        (each,) = held_weights(replace(plan, modules=(one,)), "cpu", dtype)
        assert held.nbytes == 8 * 96 * 512 * size == 8 * each.nbytes
    assert largest_product(replace(plan, modules=(stack,))) == 96 * 512


def test_settings_are_checked(bundled):
    for settings, words in [
        ({"batch": 0}, "batch is 0"), ({"context": 1.5}, "context is 1.5"), ({"depth": 17}, "at most 16"),
        ({"dtype": "int8"}, "expected one of"), ({"exclude": "mtp.*"}, "is not quantised"),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            mtplab.memory(bundled, **settings)
    with pytest.raises(CheckpointError):
        mtplab.memory(bundled / "nothing")


def test_it_shows_in_a_notebook_and_needs_no_torch(bundled):
    said = mtplab.memory(bundled)
    assert isinstance(said, Memory) and "<table>" in said._repr_html_() and said.sentence in str(said)
    code = f"import sys, mtplab; mtplab.memory({str(bundled)!r}); print('torch' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert ran.stdout.strip() == "False", ran.stderr


def test_a_context_beyond_the_models_positions_does_not_fit(bundled, capsys):
    """However much memory there is: a run of it is refused, and so it says."""
    positions = json.loads((bundled / "config.json").read_text())["max_position_embeddings"]
    for context, code in ((positions, 0), (positions + 1, 1)):
        assert main(["doctor", str(bundled), "--context", str(context)]) == code
        out = capsys.readouterr().out
        assert (f"longer than the model's {positions} positions" in out) == bool(code) and "it fits in" in out
    assert mtplab.memory(bundled, context=positions).fits
    found = mtplab.memory(bundled, context=positions + 1)
    assert found.fits is False and found.to_dict()["context_too_long"]
    # what it says is so
    model = load_model(bundled)
    with pytest.raises(ConfigError, match="max_position_embeddings"):
        mtplab.generate(model, [[1] * positions], depth=0, max_new_tokens=1)
