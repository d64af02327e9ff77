"""One safetensors file's header: what is read, and that nothing but CheckpointError comes out of a bad one."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from mtplab.checkpoint.header import DTYPE_BITS, read_header
from mtplab.errors import CheckpointError
from tests.checkpoint_builders import entry, raw_file, tensor_file

GOOD = {"a": entry("F32", [2, 3], 0, 24), "b": entry("BF16", [4], 24, 32), "c": entry("U8", [], 32, 33)}
DATA = bytes(33)


def refused(path: Path) -> str:
    """The message with which the file is refused; it always names the file."""
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert str(path) in message
    return message


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", {"__metadata__": {"format": "pt"}, **GOOD}, DATA)
    header = read_header(path)
    start = os.path.getsize(path) - len(DATA)
    assert [info.name for info in header.tensors] == ["a", "b", "c"]
    assert header.metadata == {"format": "pt"}
    first, second, third = header.tensors
    assert (first.dtype, first.shape, first.start, first.end) == ("F32", (2, 3), start, start + 24)
    assert (second.nbytes, third.nbytes, third.shape) == (8, 1, ())


def test_what_safetensors_writes_is_read(tmp_path: Path) -> None:
    tensors = {
        "w": torch.randn(5, 7).to(torch.float8_e4m3fn),
        "scale": torch.ones(1, 1),
        "none": torch.empty(0, 3),
        "half": torch.randn(3).half(),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    found = {info.name: (info.dtype, info.shape) for info in read_header(tmp_path / "x.safetensors").tensors}
    assert found == {
        "w": ("F8_E4M3", (5, 7)), "scale": ("F32", (1, 1)), "none": ("F32", (0, 3)), "half": ("F16", (3,)),
    }  # fmt: skip


def test_every_dtype_has_its_size(tmp_path: Path) -> None:
    for dtype, bits in DTYPE_BITS.items():
        path = raw_file(tmp_path / "x.safetensors", {"t": entry(dtype, [8], 0, bits)}, bytes(bits))
        assert read_header(path).tensors[0].nbytes == bits


BAD_HEADERS = {
    "overlap": ({**GOOD, "b": entry("BF16", [4], 20, 28)}, ["'b'", "overlaps", "'a'"]),
    "hole": ({**GOOD, "c": entry("U8", [], 33, 34)}, ["'c'", "hole"]),
    "shape and bytes differ": ({**GOOD, "b": entry("BF16", [5], 24, 32)}, ["'b'", "takes 10 bytes", "give 8"]),
    "begin after end": ({**GOOD, "b": entry("BF16", [4], 32, 24)}, ["'b'", "[32, 24]"]),
    "unknown dtype": ({**GOOD, "b": entry("F7_E3M3", [4], 24, 32)}, ["'b'", "'F7_E3M3'", "F8_E4M3"]),
    "dtype no string": ({**GOOD, "b": entry(["F32"], [4], 24, 32)}, ["'b'", "unknown dtype"]),
    "negative size": ({**GOOD, "b": entry("BF16", [-4], 24, 32)}, ["'b'", "[-4]"]),
    "size no whole number": ({**GOOD, "b": entry("BF16", [4.0], 24, 32)}, ["'b'", "[4.0]"]),
    "size a truth value": ({**GOOD, "b": entry("U16", [True, 4], 24, 32)}, ["'b'", "True"]),
    "size beyond 2**63": ({**GOOD, "b": entry("BF16", [2**64], 24, 32)}, ["'b'", "2**63"]),
    "sizes overflow": ({**GOOD, "b": entry("U8", [0, 2**40, 2**40], 24, 24)}, ["'b'", "overflow"]),
    "too many dimensions": ({"a": entry("U8", [1] * 65, 0, 1)}, ["'a'", "64"]),
    "offsets missing": ({"a": {"dtype": "U8", "shape": []}}, ["'a'", "data_offsets", "'dtype'"]),
    "entry no object": ({"a": [1, 2]}, ["'a'", "list"]),
    "metadata no strings": ({"__metadata__": {"n": 1}, **GOOD}, ["__metadata__"]),
    "key twice": (b'{"a":{"dtype":"U8","shape":[33],"data_offsets":[0,33]},"a":{}}', ["'a'", "twice"]),
    "inner key twice": (b'{"a":{"dtype":"U8","dtype":"I8","shape":[33],"data_offsets":[0,33]}}', ["'dtype'", "twice"]),
    "no json": (b"{'a': 1}", ["JSON"]),
    "no utf-8": (b'{"\xff": 1}', ["UTF-8"]),
    "half a surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[33],"data_offsets":[0,33]}}', ["surrogate"]),
    "nested too deep": (b'{"a":' + b"[" * 200_000, ["nested too deep"]),
    "number too long": (b'{"a":' + b"1" * 9000 + b"}", ["JSON"]),
    "no object": (b"{ ] }", ["JSON"]),
}


@pytest.mark.parametrize(("header", "words"), BAD_HEADERS.values(), ids=list(BAD_HEADERS))
def test_a_bad_header_is_refused(tmp_path: Path, header: object, words: list[str]) -> None:
    message = refused(raw_file(tmp_path / "x.safetensors", header, DATA))
    for word in words:
        assert word in message


def test_a_truncated_file_names_the_tensor_and_both_sizes(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "x.safetensors", GOOD, DATA)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    message = refused(path)
    assert "'b'" in message or "'c'" in message
    assert "truncated" in message and str(size - 5) in message
    path.write_bytes(path.read_bytes()[:40])
    assert "truncated" in refused(path)


def test_bytes_that_belong_to_no_tensor_are_refused(tmp_path: Path) -> None:
    assert "7 bytes after the last tensor" in refused(raw_file(tmp_path / "x.safetensors", GOOD, DATA + bytes(7)))


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001])
def test_an_absurd_length_is_refused_without_reading_it(tmp_path: Path, length: int) -> None:
    message = refused(raw_file(tmp_path / "x.safetensors", GOOD, DATA, length=length))
    assert str(length) in message and "100000000" in message


FOREIGN = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML"),
    "html, indented": (b"\n   <html lang='en'>", "HTML"),
    "xml error": (b'<?xml version="1.0"?><Error>AccessDenied</Error>', "XML"),
    "pickle": (b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00}\x94.", "pickle"),
    "zip of torch.save": (b"PK\x03\x04" + bytes(60), "torch.save"),
    "gguf": (b"GGUF\x03\x00\x00\x00" + bytes(60), "GGUF"),
    "json": (b'{"error": "not found"}', "JSON text"),
    "empty": (b"", "0 bytes"),
    "seven bytes": (b"\x01\x00\x00\x00\x00\x00\x00", "7 bytes"),
    "zeros": (bytes(4096), "'{'"),
}


@pytest.mark.parametrize(("content", "word"), FOREIGN.values(), ids=list(FOREIGN))
def test_another_kind_of_file_is_named(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    assert word in refused(path)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    assert "missing" in refused(tmp_path / "none.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    assert "a folder" in refused(tmp_path / "folder.safetensors")
    os.mkfifo(tmp_path / "pipe.safetensors")
    assert "pipe" in refused(tmp_path / "pipe.safetensors")  # and it does not wait for a writer
    (tmp_path / "link.safetensors").symlink_to("../blobs/gone")
    assert "../blobs/gone" in refused(tmp_path / "link.safetensors")
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    refused(tmp_path / "loop.safetensors")
    refused(tmp_path / ("x" * 400))


def test_a_name_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    message = refused(raw_file(tmp_path / "x.safetensors", {"\x1b[31mred": entry("U8", [2], 0, 1)}, b"x"))
    assert "\x1b" not in message and "x1b[31mred" in message


# mutations: only CheckpointError may come out

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
    | st.sampled_from(["F32", "F8_E4M3", "F4", "__metadata__", "a"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


def _only_our_error(path: Path) -> None:
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert str(path) in str(error)
        str(error).encode()  # printable anywhere
    else:
        size = path.stat().st_size
        assert all(0 <= info.start <= info.end <= size for info in header.tensors)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_headers_raise_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    header = json.loads(json.dumps(GOOD))
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(["a", "b", "c"]))
        where = data.draw(st.sampled_from(["entry", "dtype", "shape", "data_offsets", "new", "__metadata__"]))
        value = data.draw(JSON_VALUES)
        if where == "entry":
            header[name] = value
        elif where == "new":
            header[data.draw(st.text(max_size=6))] = value
        elif where == "__metadata__":
            header["__metadata__"] = value
        elif isinstance(header[name], dict):
            header[name][where] = value
    _only_our_error(raw_file(tmp_path / "x.safetensors", header, DATA))


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_bytes_raise_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    path = raw_file(tmp_path / "x.safetensors", GOOD, DATA)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    path.write_bytes(bytes(content[:cut] if data.draw(st.booleans()) else content))
    _only_our_error(path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=300), length=st.integers(0, 2**64 - 1) | st.integers(0, 300))
def test_random_bytes_raise_nothing_else(tmp_path: Path, content: bytes, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + content)
    _only_our_error(path)


def test_opening_and_planning_import_no_torch(repo: Path, tmp_path: Path) -> None:
    tensor_file(tmp_path / "model.safetensors", {"model.norm.weight": torch.ones(3)})
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from mtplab.checkpoint import open_checkpoint; "
        f"str(open_checkpoint({str(tmp_path)!r}).plan()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=repo, timeout=60).returncode == 0
