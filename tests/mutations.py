"""Mutated checkpoints: committed ones, of which config, index, headers or bytes are changed at random; and their use.

Knows the shape of the files, so that what comes out is mostly well-formed and gets far. Uses nothing of mtplab but to
read what it made. `tests/fuzz.py` runs this for minutes, `tests/test_mutations.py` for seconds.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from mtplab.checkpoint import open_checkpoint
from mtplab.errors import MtplabError
from tests.checkpoint_builders import CHECKPOINTS

FIXTURES = sorted(path.name for path in CHECKPOINTS.iterdir())
SECONDS = 1.0
JSON_FILES = ("config.json", "hf_quant_config.json", "quantization_config.json", "model.safetensors.index.json")
WORDS = [
    "", "fp8", "e4m3", "e5m2", "dynamic", "static", "modelopt", "compressed-tensors", "quark", "torchao", "auto-round",
    "mxfp8", "fbgemm_fp8", "gptq", "tensor", "channel", "block", "group", "per_tensor", "float", "128x128", "Linear",
    "lm_head", "mtp.fc", "mtp.*", "re:.*", "re:(a+)+$", r"re:([a-z_.]|[a-z]{2})*[0-9]!", "(", "[z-a]", "*" * 40,
    "model.layers.0", "model.layers.0.self_attn.q_proj", "../x", "/etc/passwd", "a\0b", "\x1b[31m", "\u202ex", "\ud800",
    "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "BF16", "F32", "F4", "I64", "C64", "BOOL", "FP8", "NVFP4",
    "MIXED_PRECISION", "FP8_PB_WO", "PerRow", "PerTensor", "ue8m0", "x" * 5000,
]  # fmt: skip
NUMBERS = [0, 1, -1, 2, 3, 7, 8, 16, 32, 64, 127, 128, 129, 255, 2**20, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64,
           10**40, -(10**40), 0.5, 1e308, math.inf, -math.inf, math.nan]  # fmt: skip
KEYS = [
    "quantization_config", "text_config", "llm_config", "compression_config", "num_hidden_layers", "model_type",
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "quant_method", "weight_block_size", "activation_scheme",
    "fmt", "modules_to_not_convert", "ignored_layers", "ignore", "config_groups", "targets", "weights", "strategy",
    "block_structure", "group_size", "input_activations", "kv_cache_scheme", "quant_algo", "quantized_layers",
    "exclude_modules", "global_quant_config", "layer_quant_config", "exclude", "qscheme", "dtype", "quant_type",
    "granularity", "extra_config", "bits", "data_type", "quantization", "weight_map", "shape", "data_offsets",
    "__metadata__", "metadata", "tie_word_embeddings", "architectures",
]  # fmt: skip
SUFFIXES = [
    ".weight", ".weight_scale", ".weight_scale_inv", ".scale", ".qscale_weight", ".input_scale", ".activation_scale",
    ".k_scale", ".v_scale", ".output_scale", "_scale", "_scale_inv", "_weight_scale", "_input_scale", ".weight_packed",
    ".weight_scale_2", ".weight_global_scale", ".qweight", "_blocks", ".SCB", "._weight_qdata", "._weight_scale", "",
]  # fmt: skip


class Case:
    """One checkpoint taken apart: JSON files as objects, and of each shard header and data."""

    def __init__(self, name: str) -> None:
        self.folder = CHECKPOINTS / name / "ckpt"
        self.json: dict[str, Any] = {}
        self.shards: dict[str, tuple[dict[str, Any], bytes]] = {}
        for path in sorted(self.folder.iterdir()):
            if path.name in JSON_FILES:
                self.json[path.name] = json.loads(path.read_text())
            elif path.suffix == ".safetensors":
                content = path.read_bytes()
                length = int.from_bytes(content[:8], "little")
                self.shards[path.name] = (json.loads(content[8 : 8 + length]), content[8 + length :])


@cache
def case(name: str) -> Case:
    return Case(name)


def value(rng: Random, depth: int = 3) -> Any:
    """Any JSON value, mostly one that means something somewhere."""
    kind = rng.randrange(9 if depth else 6)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind in (1, 2):
        return rng.choice(NUMBERS)
    if kind in (3, 4, 5):
        return rng.choice(WORDS)
    if kind in (6, 7):
        return [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS + WORDS): value(rng, depth - 1) for _ in range(rng.randrange(4))}


def places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            found.append((node, key))
            left.append(node[key])
    return found


def change(rng: Random, tree: Any) -> None:
    """One change somewhere in a tree of JSON: delete, retype, resize, rename, exchange, nest."""
    spots = places(tree)
    if not spots:
        return
    node, key = rng.choice(spots)
    old = node[key]
    what = rng.randrange(9)
    if what == 0:
        del node[key]
    elif what == 1 and isinstance(node, dict):
        node[rng.choice(KEYS + WORDS)] = node.pop(key)
    elif what == 2 and isinstance(old, int) and not isinstance(old, bool):
        node[key] = rng.choice([old + 1, old - 1, -old, old * 2, old // 2, old << 64, float(old), str(old), bool(old)])
    elif what == 3 and isinstance(old, list):
        node[key] = rng.choice([old * 2, old[:-1], old[::-1], [*old, value(rng)], [old], old * 500])
    elif what == 4 and isinstance(old, str):
        node[key] = rng.choice([old * 2, old[:-1], old.upper(), old + rng.choice(SUFFIXES), [old], f"re:{old}"])
    elif what == 5:
        other, at = rng.choice(spots)
        if type(other) is type(node) and (at in other if isinstance(other, dict) else at < len(other)):
            node[key] = copy.deepcopy(other[at])
    elif what == 6 and isinstance(node, dict):
        node[rng.choice(KEYS)] = value(rng)
    elif what == 7:
        for _ in range(rng.choice([1, 20, 200])):
            old = [old]
        node[key] = old
    else:
        node[key] = value(rng)


def change_tensors(rng: Random, header: dict[str, Any]) -> None:
    """One change of a header after which it is still consistent: other names, dtypes of the same size, other shapes."""
    names = [name for name in header if name != "__metadata__"]
    if not names:
        return
    name = rng.choice(names)
    entry = header[name]
    if not isinstance(entry, dict) or not isinstance(entry.get("shape"), list):
        return
    what = rng.randrange(5)
    if what == 0:
        stem = name
        for suffix in SUFFIXES:
            stem = stem.removesuffix(suffix) if suffix else stem
        header[stem + rng.choice(SUFFIXES)] = header.pop(name)
    elif what == 1:
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
    elif what == 2:
        alike = [["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "U8", "I8", "BOOL"],
                 ["BF16", "F16", "I16", "U16"], ["F32", "I32", "U32"]]  # fmt: skip
        entry["dtype"] = rng.choice(next((group for group in alike if entry.get("dtype") in group), alike[0]))
    elif what == 3:
        shape = entry["shape"]
        size = math.prod(dim for dim in shape if isinstance(dim, int))
        options = [shape[::-1], [size], [*shape, 1], [1, *shape], [1] * 4 + [size]]
        entry["shape"] = rng.choice([*options, [0, *shape], [2, size // 2], [size, 1, 1]])
    else:
        header[rng.choice(WORDS) + rng.choice(SUFFIXES)] = header.pop(name)


def text_of(rng: Random, tree: Any) -> bytes:
    """A tree as JSON, now and then with a key twice, a byte-order mark, a cut, or bytes changed."""
    text = json.dumps(tree)
    what = rng.randrange(24)
    if what == 0 and text.startswith("{") and len(text) > 2:
        body = text[1:-1]
        text = "{" + body + ", " + body + "}"
    raw = text.encode()
    if what == 1:
        raw = b"\xef\xbb\xbf" + raw
    elif what == 2:
        raw = raw[: rng.randrange(len(raw) + 1)]
    elif what == 3:
        raw = flipped(rng, raw)
    elif what == 4:
        raw = rng.choice([b"", b"[]", b"null", b"<!DOCTYPE html>", b"version https://git-lfs.github.com/spec/v1\n",
                          b"\x80\x04}.", b"[" * 100_000, b'{"a":' * 5000, text.encode("utf-16")])  # fmt: skip
    return raw


def flipped(rng: Random, raw: bytes) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 6)):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def write(rng: Random, name: str, folder: Path) -> None:
    """A mutated copy of the fixture; what is not changed is linked."""
    whole = case(name)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    target = rng.choice([*whole.json, *whole.shards, "config.json", "header", "header"])
    if target == "header":
        target = rng.choice(list(whole.shards))
    for path in whole.folder.iterdir():
        if path.name != target:
            (folder / path.name).symlink_to(path)
    if target in whole.json:
        tree = copy.deepcopy(whole.json[target])
        inner = tree.get("quantization_config") if isinstance(tree, dict) else None
        for _ in range(rng.randrange(1, 4)):
            # most of a config.json is none of a reader's business
            change(rng, inner if isinstance(inner, dict) and inner and rng.random() < 0.7 else tree)
        (folder / target).write_bytes(text_of(rng, tree))
        return
    header, data = whole.shards[target]
    header = copy.deepcopy(header)
    for _ in range(rng.randrange(1, 4)):
        (change_tensors if rng.random() < 0.7 else change)(rng, header)
    text = text_of(rng, header)
    if rng.random() < 0.2:
        data = rng.choice([flipped(rng, data), data[:-1], data + b"x", bytes(len(data)), b"\xff" * len(data)])
    length = rng.choice([0, 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1]) if rng.random() < 0.03 else len(text)
    (folder / target).write_bytes(length.to_bytes(8, "little") + text + data)


def use(rng: Random, folder: Path) -> str:
    """Everything a reader does with a checkpoint; whatever is wrong has to end in a MtplabError. Returns how far it
    got."""
    try:
        ckpt = open_checkpoint(folder, lenient=rng.random() < 0.3)
        assert repr(ckpt) and all(problem.message.encode() for problem in ckpt.problems)
        ckpt.kv_scales()
    except MtplabError as error:
        assert str(error).encode()
        return "refused"
    reached = "opened"
    for look in (ckpt.plan, ckpt.look, ckpt.audit, lambda: ckpt.plan(exclude=["*"], model_format="fp8")):
        try:
            found = look()
            assert str(found).encode() and found._repr_html_().encode() and repr(found).encode()
            reached = "planned"
        except MtplabError as error:
            assert str(error).encode()
    for name in rng.sample(sorted(ckpt.tensors), min(6, len(ckpt.tensors))):
        try:
            values = ckpt.dequantize(name)
            assert values.dtype.is_floating_point and tuple(values.shape) == ckpt.info(name).shape
            assert sum(band.numel() for _, _, band in ckpt.bands(name)) == values.numel()
        except MtplabError as error:
            assert str(error).encode()
    return reached


def run(seed: int, folder: Path, name: str | None = None) -> str:
    """One mutated checkpoint, used. Raises whatever is no MtplabError, and AssertionError where it takes too long."""
    rng = Random(seed)
    name = name or rng.choice(FIXTURES)
    write(rng, name, folder)
    begun = time.thread_time()
    reached = use(rng, folder)
    took = time.thread_time() - begun
    assert took < SECONDS, f"took {took:.2f} s of a processor, expected less than {SECONDS}"
    return reached
