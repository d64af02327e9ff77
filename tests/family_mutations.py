"""Checkpoints of the families that are run, of which config.json or one tensor is changed at random; and their use.

Knows the shape of the files alone. `tests/test_families_hostile.py` runs this for seconds, `python -m tests.fuzz
--families` for minutes.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mtplab import generate, load_model, memory, open_checkpoint
from mtplab.errors import MtplabError
from mtplab.study.grid import check_caches
from tests.family_checkpoints import FAMILIES
from tests.mutations import NUMBERS, change, value
from tests.tiny import MIXTURE, write_tiny

WRITERS = {
    "qwen3_5": lambda folder, **changes: write_tiny(folder, **changes),
    "qwen3_5_moe": lambda folder, **changes: write_tiny(folder, **MIXTURE, **changes),
    **FAMILIES,
}
SECONDS = 6.0  # of a processor, for all that is done with one
_KINDS = ["full_attention", "linear_attention", "sliding_attention", "yarn", "llama3", "sigmoid", "1" * 5000]
# keys that a family may read and its checkpoint here does not have
_UNUSED = [
    "head_dim", "layer_types", "rope_parameters", "rope_scaling", "rope_interleave", "attention_bias", "torch_dtype",
    "dtype", "mlp_only_layers", "attn_output_gate", "norm_topk_prob", "q_lora_rank", "use_rope_layers", "n_group",
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "sliding_window", "text_config", "swiglu_limits", "model_type",
]  # fmt: skip


def write_all(folder: Path) -> dict[str, Path]:
    """A tiny checkpoint of every family."""
    return {name: writer(folder / name) for name, writer in WRITERS.items()}


def change_config(rng: Random, config: dict[str, Any]) -> None:
    """One to three changes of what a family reads: mostly a key that is there, taken away or given another value."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        node = config.get("text_config", config)
        node = node if isinstance(node, dict) and rng.random() < 0.9 else config
        deeper = [each for each in node.values() if isinstance(each, dict) and each]
        if deeper and rng.random() < 0.25:
            node = rng.choice(deeper)
        keys = [*node, *_UNUSED] if node else _UNUSED
        key = rng.choice(keys)
        old, what = node.get(key), rng.randrange(8)
        if what == 0:
            node.pop(key, None)
        elif what == 1 and isinstance(old, list) and old:
            node[key] = rng.choice([old[:-1], old[1:], old * 2, [old[0]], [value(rng, 1), *old[1:]], old * 3000])
        elif what == 2:
            node[key] = rng.choice([[rng.choice([*NUMBERS, *_KINDS, None])] * rng.randrange(12)])
        elif what == 3:
            node[key] = rng.choice(_KINDS)
        elif what == 4:
            change(rng, node)
        elif what == 5:
            node[key] = value(rng, 2)
        else:
            node[key] = rng.choice([*NUMBERS, 4, 5, 10_000, 65_536, 10**6, 10**7, 1e-300, True, False, None])


def change_tensors(rng: Random, tensors: dict[str, torch.Tensor]) -> None:
    """One tensor lost, renamed, doubled under another name, reshaped, retyped, or with a value that is no number."""
    name = rng.choice(sorted(tensors))
    old, what = tensors[name], rng.randrange(9)
    other = rng.choice(sorted(tensors))
    if what == 0:
        del tensors[name]
    elif what == 1:
        tensors[rng.choice([f"{name}_x", name.replace(".weight", ""), f"mtp.{name}", "mtp.layers.9999.x.weight"])] = old
        del tensors[name]
    elif what == 2:
        tensors[name.replace("lm_head", "mtp.lm_head").replace("model.", "mtp.", 1)] = old.clone()
    elif what == 3:
        tensors[name] = rng.choice([old[:0], old[:-1], torch.cat([old, old[:1]]), old[None], old.flatten()]).clone()
    elif what == 4 and old.ndim > 1:
        tensors[name] = old.transpose(-1, -2).contiguous()
    elif what == 5:
        kinds = [torch.int8, torch.bool, torch.float64, torch.float16, torch.float8_e4m3fn, torch.int64]
        tensors[name] = old.to(rng.choice(kinds))
    elif what == 6:
        spoiled = old.clone()
        spoiled.view(-1)[rng.randrange(spoiled.numel())] = rng.choice([float("nan"), float("inf"), 3e38])
        tensors[name] = spoiled
    elif what == 7:
        tensors[name] = torch.zeros_like(old)
    else:
        tensors[name], tensors[other] = tensors[other].clone(), old.clone()


def write(rng: Random, source: Path, folder: Path) -> None:
    """A changed copy of a checkpoint."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    if rng.random() < 0.7:
        config = copy.deepcopy(config)
        change_config(rng, config)
        (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    else:
        tensors = load_file(source / "model.safetensors")
        change_tensors(rng, tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def use(folder: Path) -> str:
    """Everything that is done with a model before it is run, and a run of it; whatever is wrong has to end in a
    MtplabError of printable text. Returns how far it got."""
    reached = "refused"

    def ran() -> None:
        nonlocal reached
        model = load_model(folder)
        reached = "loaded"
        ids = [i % model.config.vocab_size for i in (2, 3, 4)]
        generate(model, [ids], depth=min(2, model.config.mtp_layers), max_new_tokens=3, ignore_eos=True)
        reached = "ran"

    for step in (
        lambda: open_checkpoint(folder).draft_globs,
        lambda: str(open_checkpoint(folder).audit()),
        lambda: str(memory(folder, context=64)),
        lambda: str(memory(folder, context=64, layers="0-1", quant_policy="int8", model_format="fp8")),
        lambda: check_caches(open_checkpoint(folder), ["none", "int8", "turboquant"], None, drafts=True),
        ran,
        lambda: load_model(folder, layers="0", model_format="fp8"),
    ):
        try:
            step()
        except MtplabError as error:
            text = str(error)
            assert text.encode() and (text.replace("\n", "").isprintable()), text
    return reached


def run(seed: int, sources: dict[str, Path], folder: Path, name: str | None = None) -> str:
    """One changed checkpoint, used. Raises whatever is no MtplabError, and AssertionError where it takes too long."""
    rng = Random(seed)
    write(rng, sources[name or rng.choice(sorted(sources))], folder)
    begun = time.thread_time()
    reached = use(folder)
    took = time.thread_time() - begun
    assert took < SECONDS, f"took {took:.2f} s of a processor, expected less than {SECONDS}"
    return reached
