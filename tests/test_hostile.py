"""Files made to do harm: each ends in a clear error, in less than a second and in little memory, or is simply read."""

import gc
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.errors import CheckpointError
from tests.checkpoint_builders import E4M3, FP8_CONFIG, entry, qwen_fp8, qwen_tensors, raw_file, write_checkpoint

SECONDS, MEGABYTES = 1.0, 200
MODULE = "model.layers.0.mlp.up_proj"


def used(folder: Path) -> str:
    """The first error of opening, planning and reading the checkpoint, or ""; within the bounds of time and memory."""
    open_checkpoint(qwen_fp8(folder.parent / "warm")).dequantize(MODULE)  # what is imported on first use
    # a collection goes through all that earlier tests left, which is no fault of this file: what it makes is still seen
    gc.freeze()
    begun = time.thread_time()
    said = _use(folder)
    took = time.thread_time() - begun
    gc.unfreeze()
    tracemalloc.start()
    assert _use(folder) != "" or said == ""
    peak = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    assert took < SECONDS and peak < MEGABYTES, (took, peak)
    assert said.isprintable() and len(said) < 3000
    return said


def _use(folder: Path) -> str:
    try:
        ckpt = open_checkpoint(folder)
        assert all(problem.message.isprintable() for problem in ckpt.problems)
        plan = ckpt.plan()
        assert str(plan) and plan._repr_html_()
        ckpt.dequantize(MODULE)
    except CheckpointError as error:
        return str(error)
    return ""


def configured(folder: Path, **changes: Any) -> Path:
    """The FP8 checkpoint with keys of its config.json changed."""
    qwen_fp8(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return folder


# configs


WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel"}


def ct(**group: Any) -> dict[str, Any]:
    given = {"targets": ["Linear"], "weights": WEIGHTS, **group}
    return {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": given}}}


def fp8(**changes: Any) -> dict[str, Any]:
    return {"quantization_config": {**FP8_CONFIG, **changes}}


NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]

# what stands in config.json, and a word of the error; "" where it is read all the same
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "dtype an object": ({"dtype": {}}, ""),
    "layers a word": ({"num_hidden_layers": "x"}, ""),
    "heads a truth value": ({"mtp_num_hidden_layers": True}, ""),
    "text_config a number": ({"text_config": 1}, ""),
    "text_config a list": ({"text_config": [{"quantization_config": 1}]}, ""),
    "layers infinite": ({"num_hidden_layers": 1e999, "num_nextn_predict_layers": 10**40}, ""),
    "architectures a number": ({"architectures": 7, "model_type": ["x"]}, ""),
    "quantization a list": ({"quantization_config": [1]}, "quantization_config to be an object"),
    "quantization a word": ({"quantization_config": "fp8"}, "quantization_config to be an object"),
    "method an object": ({"quantization_config": {"quant_method": {"a": 1}}}, "quant_method"),
    "weights null": (ct(weights=None), "no weight quantisation"),
    "weights a list": (ct(weights=[8]), "weights, expected an object"),
    "targets a number": (ct(targets=5), "targets, expected a list"),
    "targets of numbers": (ct(targets=[5]), "targets, expected a list"),
    "strategy an object": (ct(weights={**WEIGHTS, "strategy": {}}), "strategy"),
    "inputs a word": (ct(input_activations="x"), "without its scale"),
    "inputs' strategy a list": (ct(input_activations={"strategy": [], "dynamic": {}}), "without its scale"),
    "block_structure nested": (ct(weights={**WEIGHTS, "strategy": "block", "block_structure": NESTED}), "structure"),
    "block_structure words": (ct(weights={**WEIGHTS, "strategy": "block", "block_structure": "1x" * 90}), "structure"),
    "group_size infinite": (ct(weights={**WEIGHTS, "strategy": "group", "group_size": 1e999}), "group_size"),
    "group_size huge": (ct(weights={**WEIGHTS, "strategy": "group", "group_size": 10**30}), "group_size"),
    "group_size a truth value": (ct(weights={**WEIGHTS, "strategy": "group", "group_size": True}), "group_size"),
    "groups a list": ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [1]}}, "groups"),
    "block sizes huge": (fp8(weight_block_size=[10**30, 128]), "weight_block_size"),
    "block sizes nested": (fp8(weight_block_size=[[128, 128]]), "weight_block_size"),
    "list of objects": (fp8(modules_to_not_convert=[{}]), "modules_to_not_convert"),
    "both lists": (fp8(modules_to_not_convert=["a"], ignored_layers=[None]), "ignored_layers"),
    "100 000 names": (fp8(modules_to_not_convert=[f"a.{i}.b" for i in range(100_000)]), ""),
    "100 000 patterns": (fp8(modules_to_not_convert=[f"re:.*{i}$" for i in range(100_000)]), "its 100000 patterns"),
    "100 000 globs": (fp8(modules_to_not_convert=[f"*{i}x" for i in range(100_000)]), "its 100000 patterns"),
    "100 000 targets": (ct(targets=[f"re:.*{i}$" for i in range(100_000)]), "its 100000 patterns"),
    "an entry of 1e6 characters": (fp8(modules_to_not_convert=["m" * 1_000_000, "a." * 500_000]), ""),
    "a pattern of 1e6 characters": (fp8(modules_to_not_convert=["re:" + "m" * 1_000_000]), "1000003 characters"),
    "control characters": (fp8(modules_to_not_convert=["\x1b[2J\u202e", "\ud800", "a\0b", "re:\x07.*"]),
                           "neither a module name"),
    "names that are not printable": (fp8(modules_to_not_convert=["\u202e", "\ud800", "a\0b", "re:\x07.*"]), ""),
    "a target that never ends": (ct(targets=["re:([.a-z0-9_]|[.a-z0-9_]{2})*[XYZ]"]), "takes more than 0.2 s"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_configs_of_odd_types_and_sizes(tmp_path: Path, case: str) -> None:
    changes, word = CONFIGS[case]
    said = used(configured(tmp_path / "x", **changes))
    if word:
        assert word in said and str(tmp_path / "x") in said
    else:
        assert said == ""


QUARK = {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}


@pytest.mark.parametrize(("method", "config"), [
    ("quark", {"global_quant_config": QUARK, "layer_quant_config": {"*[a-z]" * 150 + "!": QUARK}}),
    ("auto-round", {"bits": 8, "data_type": "fp", "group_size": 0,
                    "extra_config": {"([.a-z0-9_]|[.a-z0-9_]{2})*[XYZ]": {"bits": 16}}}),
])  # fmt: skip
def test_patterns_of_overrides_run_under_a_time_limit(tmp_path: Path, method: str, config: dict[str, Any]) -> None:
    names = [f"model.layers.{i}.{'a' * 60}" for i in range(30)]
    tensors = {f"{name}.weight": torch.ones(2, 2).to(E4M3) for name in names}
    tensors |= {f"{name}.weight_scale": torch.ones(1) for name in names}
    said = used(write_checkpoint(tmp_path / "x", tensors, {"quant_method": method, **config}))
    assert "takes more than 0.2 s" in said or (method == "quark" and "expected a tensor" in said)


TEXTS: dict[str, tuple[bytes, str]] = {
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git lfs pull"),
    "HTML": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"),
    "XML": (b'<?xml version="1.0"?><Error>AccessDenied</Error>', "XML"),
    "pickle": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.", "pickle"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip"),
    "gzip": (b"\x1f\x8b\x08" + bytes(60), "gzip"),
    "byte-order mark": (b'\xef\xbb\xbf{"model_type": "x"}', "byte-order mark (UTF-8)"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "byte-order mark (UTF-16)"),
    "empty": (b"", "nothing: the file is empty"),
    "blanks": (b" \n\n ", "blanks"),
    "list": (b"[1]", "object"),
    "word": (b'"fp8"', "object"),
    "key twice": (b'{"quantization_config": null, "quantization_config": {}}', "twice"),
    "nested too deep": (b'{"a":' * 100_000, "nested too deep"),
    "number too long": (b'{"num_hidden_layers": ' + b"9" * 100_000 + b"}", "JSON"),
    "half": (b'{"model_type": "qw', "JSON"),
    "zeros": (bytes(100), "JSON"),
}


@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json", "hf_quant_config.json"])
@pytest.mark.parametrize("case", TEXTS)
def test_what_is_no_json(tmp_path: Path, file: str, case: str) -> None:
    content, word = TEXTS[case]
    folder = write_checkpoint(tmp_path / "x", qwen_tensors(), shards=2)
    (folder / file).write_bytes(content)
    said = used(folder)
    assert str(folder / file) in said and word in said


# links


def test_links_are_followed_to_safetensors_only(tmp_path: Path) -> None:
    folder = qwen_fp8(tmp_path / "x")
    shard, outside = folder / "model.safetensors", tmp_path / "blob"
    shard.rename(outside)
    shard.symlink_to("../blob")
    assert used(folder) == ""
    secret = tmp_path / "secret"
    secret.write_text("hunter:x:0:0:password\n" * 20)
    shard.unlink()
    shard.symlink_to(secret)
    said = used(folder)
    assert "no safetensors file" in said and "hunter" not in said and "password" not in said
    for target in ("/dev/zero", "/dev/stdin", str(tmp_path), "model.safetensors", "../../" * 40 + "nowhere"):
        shard.unlink()
        shard.symlink_to(target)
        assert str(shard) in used(folder)
    shard.unlink()
    shard.symlink_to("../blob")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    assert "config.json" in used(folder)


def test_an_index_may_name_a_link_and_no_other_way_out(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "x", qwen_tensors(), FP8_CONFIG, shards=2)
    index = folder / "model.safetensors.index.json"
    (folder / "model-00001-of-00002.safetensors").rename(tmp_path / "blob")
    (folder / "model-00001-of-00002.safetensors").symlink_to("../blob")
    assert used(folder) == ""
    content = index.read_text().replace("model-00001-of-00002.safetensors", "./x/../../blob")
    index.write_text(content)
    assert "leaves the folder" in used(folder)


# headers


def one(name: str) -> Callable[[Path], Path]:
    return lambda path: raw_file(path, {name: entry("U8", [1], 0, 1)}, b"x")


HEADERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a name of 1e6 characters": (one("m" * 1_000_000), "1000000 characters, expected at most 4096"),
    "a name of 1e6 dots": (one("m." * 500_000), "1000000 characters"),
    "20 000 empty tensors": (
        lambda path: raw_file(path, {f"t{i}": entry("U8", [0], 0, 0) for i in range(20_000)}), ""),
    "an empty tensor of 2**59": (lambda path: raw_file(path, {"t": entry("U8", [0, 2**59], 0, 0)}), ""),
    "an empty tensor of 2**62": (lambda path: raw_file(path, {"t": entry("U8", [0, 2**62], 0, 0)}), "overflows"),
    "shapes that multiply to zero": (
        lambda path: raw_file(path, {"t": entry("F32", [2**40, 0, 2**40], 0, 0)}), "overflows"),
    "a length of 2**63": (lambda path: raw_file(path, {}, length=2**63), "9223372036854775808"),
    "a length of the file": (lambda path: raw_file(path, {}, bytes(40), length=50), "truncated"),
    "a float for an offset": (lambda path: raw_file(path, {"t": entry("U8", [1], 0, 1.0)}, b"x"), "data_offsets"),  # type: ignore[arg-type]
    "an offset of 1e400": (
        lambda path: raw_file(path, b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1e400]}}', b"x"), "offsets"),
    "bidirectional text": (one("\u202eweight\u2066"), ""),
    "control characters": (one("\x1b[2J\x00\r\n"), ""),
    "half a surrogate": (one("\ud800"), "surrogate"),
    "blanks before the brace": (lambda path: raw_file(path, b' {"t":{}}'), "begin with '{'"),
}  # fmt: skip


@pytest.mark.parametrize("case", HEADERS)
def test_headers_made_to_do_harm(tmp_path: Path, case: str) -> None:
    make, word = HEADERS[case]
    folder = tmp_path / "x"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    said = used(make(folder / "model.safetensors").parent)
    if word:
        assert word in said and str(folder) in said
    else:
        assert f"expected a tensor '{MODULE}'" in said  # it was read, and has none of that name


def test_an_empty_tensor_has_values_whatever_its_shape_claims(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"t": entry("F32", [0, 2**40], 0, 0), "u": entry("F8_E4M3", [0, 8], 0, 0)})
    (tmp_path / "config.json").write_text("{}")
    ckpt = open_checkpoint(tmp_path)
    assert ckpt.dequantize("t").shape == (0, 2**40) and list(ckpt.bands("t")) == []


def test_a_file_that_grows_a_header_of_100_megabytes_is_not_read_further(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little") + b"{")
        os.truncate(path, 2 << 30)
    (tmp_path / "config.json").write_text("{}")
    assert "100000001 bytes, expected at most 100000000" in used(tmp_path)
