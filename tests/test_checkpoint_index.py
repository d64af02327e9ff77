"""Which files make up a checkpoint: indexes, single files, folders of shards, hub caches, and bad ones of each."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mtplab.checkpoint import open_checkpoint
from mtplab.errors import CheckpointError, ConfigError
from tests.checkpoint_builders import qwen_fp8, qwen_tensors, tensor_file, write_checkpoint

INDEX = "model.safetensors.index.json"


def test_an_empty_path_is_not_the_current_folder(bundled, monkeypatch):
    monkeypatch.chdir(bundled)
    assert open_checkpoint(".").tensors
    with pytest.raises(ConfigError, match="path=''"):
        open_checkpoint("")


def refused(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    return str(caught.value)


def edit_index(folder: Path, **placed: Any) -> None:
    """Change where the index says tensors lie; None takes one out."""
    content = json.loads((folder / INDEX).read_text())
    for name, shard in placed.items():
        content["weight_map"][name] = shard
    content["weight_map"] = {name: shard for name, shard in content["weight_map"].items() if shard is not None}
    (folder / INDEX).write_text(json.dumps(content))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return qwen_fp8(tmp_path / "sharded", shards=3)


def test_one_file_shards_and_shards_without_index_hold_the_same(tmp_path: Path, sharded: Path) -> None:
    torch.manual_seed(0)
    single = open_checkpoint(qwen_fp8(tmp_path / "single"))
    torch.manual_seed(0)
    indexed = open_checkpoint(qwen_fp8(tmp_path / "again", shards=3))
    shutil.copytree(tmp_path / "again", tmp_path / "bare")
    (tmp_path / "bare" / INDEX).unlink()
    bare = open_checkpoint(tmp_path / "bare")
    for name in single.tensors:
        for other in (indexed, bare):
            assert other.tensors[name][1:3] == single.tensors[name][1:3]
            assert torch.equal(other.dequantize(name), single.dequantize(name))
    assert set(single.tensors) == set(indexed.tensors) == set(bare.tensors) == set(qwen_tensors())
    assert len(indexed.files.shards) == 3 and single.files.index is None


def test_a_path_may_be_the_folder_the_file_or_the_index(tmp_path: Path, sharded: Path) -> None:
    assert len(open_checkpoint(sharded / INDEX).tensors) == len(open_checkpoint(str(sharded)).tensors)
    single = qwen_fp8(tmp_path / "single")
    ckpt = open_checkpoint(single / "model.safetensors")
    assert ckpt.quantization is not None and ckpt.config["model_type"] == "qwen3_5_text"


def test_a_hub_caches_links_are_followed(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(qwen_fp8(tmp_path / "made", shards=2).iterdir())):
        path.rename(blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    ckpt = open_checkpoint(snapshot)
    assert ckpt.dequantize("mtp.norm.weight").shape == (160,)
    ckpt.plan()
    (blobs / f"{2:040x}").unlink()
    assert "does not exist" in refused(snapshot)


def test_a_missing_shard_is_named_with_what_it_held(sharded: Path) -> None:
    gone = sharded / "model-00002-of-00003.safetensors"
    gone.unlink()
    message = refused(sharded)
    assert str(gone) in message and "missing shard" in message
    assert "4 tensors" in message and "model.layers.0.input_layernorm.weight" in message


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    message = refused(sharded)
    assert str(shard) in message and "truncated" in message


@pytest.mark.parametrize(
    ("shard", "why"),
    [
        ("../elsewhere.safetensors", "leaves the folder"),
        ("sub/../../elsewhere.safetensors", "leaves the folder"),
        ("..\\elsewhere.safetensors", "leaves the folder"),
        ("/etc/passwd", "absolute"),
        ("C:\\windows\\x.safetensors", "absolute"),
        ("\\\\server\\share\\x.safetensors", "absolute"),
        ("", "not a file name"),
        ("sub/", "not a file name"),
        ("a\0b", "not a file name"),
        ("a\x1b[2Jb", "not a file name"),
        (7, "not a string"),
    ],
)
def test_an_index_that_points_outside_its_folder_is_refused(sharded: Path, shard: object, why: str) -> None:
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded.parent / "elsewhere.safetensors")
    edit_index(sharded, **{"mtp.fc.weight": shard})
    message = refused(sharded)
    assert str(sharded / INDEX) in message and "'mtp.fc.weight'" in message and why in message
    assert "\x1b" not in message


def test_shards_in_a_folder_below_are_read(tmp_path: Path, sharded: Path) -> None:
    (sharded / "below").mkdir()
    names = json.loads((sharded / INDEX).read_text())["weight_map"]
    moved = "model-00001-of-00003.safetensors"
    (sharded / moved).rename(sharded / "below" / moved)
    edit_index(sharded, **{name: f"below/{moved}" for name, shard in names.items() if shard == moved})
    assert set(open_checkpoint(sharded).tensors) == set(qwen_tensors())


def test_an_index_and_its_shards_must_agree(sharded: Path) -> None:
    edit_index(sharded, **{"mtp.fc.weight": "model-00002-of-00003.safetensors"})
    message = refused(sharded)
    assert "'mtp.fc.weight'" in message and "model-00002" in message and "it is in model-00001" in message
    edit_index(sharded, **{"mtp.fc.weight": None, "mtp.fcc.weight": "model-00001-of-00003.safetensors"})
    message = refused(sharded)
    assert "'mtp.fcc.weight'" in message and "no shard has it" in message


def test_tensors_on_disk_but_not_in_the_index_are_reported(sharded: Path) -> None:
    edit_index(sharded, **{"mtp.fc.weight": None, "mtp.norm.weight": None})
    ckpt = open_checkpoint(sharded)
    assert "mtp.fc.weight" not in ckpt.tensors
    (problem,) = ckpt.problems
    assert (problem.severity, problem.kind) == ("warning", "unindexed")
    assert "2 tensors are on disk but not in the index" in problem.message and INDEX in problem.message
    assert problem.message in ckpt.plan().warnings
    with pytest.raises(CheckpointError, match=r"on disk in model-00001-of-00003\.safetensors, but not in"):
        ckpt.dequantize("mtp.fc")


@pytest.mark.parametrize("indexed", [True, False])
def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, indexed: bool) -> None:
    folder = write_checkpoint(tmp_path / "x", {"a": torch.ones(2), "b": torch.ones(3)}, shards=2)
    tensor_file(folder / "model-00002-of-00002.safetensors", {"b": torch.ones(3), "a": torch.zeros(2)})
    if not indexed:
        (folder / INDEX).unlink()
    message = refused(folder)
    assert "'a'" in message and "model-00001" in message and "model-00002" in message


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{}", "weight_map"),
        ('{"weight_map": []}', "weight_map"),
        ('{"weight_map": {}}', "weight_map"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "twice"),
        ("[]", "object"),
        ("<html>", "HTML"),
        ("version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
    ],
)
def test_a_bad_index_is_refused(sharded: Path, content: str, word: str) -> None:
    (sharded / INDEX).write_text(content)
    message = refused(sharded)
    assert str(sharded / INDEX) in message and word in message


def test_folders_without_safetensors_say_what_is_there(tmp_path: Path) -> None:
    assert "no such path" in refused(tmp_path / "none")
    assert "an empty folder" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "'config.json'" in refused(tmp_path)
    (tmp_path / "m.gguf").touch()
    assert "GGUF" in refused(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "no pickles" in refused(tmp_path)
    with pytest.raises(ConfigError):
        open_checkpoint(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        open_checkpoint("a\0b")


def test_files_beside_the_checkpoint_are_not_mixed_in(tmp_path: Path, sharded: Path) -> None:
    tensor_file(sharded / "adapter.safetensors", {"x": torch.ones(1)})
    ckpt = open_checkpoint(sharded)
    assert "x" not in ckpt.tensors and ckpt.files.unused == (sharded / "adapter.safetensors",)
    single = qwen_fp8(tmp_path / "single")
    tensor_file(single / "adapter.safetensors", {"x": torch.ones(1)})
    ckpt = open_checkpoint(single)
    assert "x" not in ckpt.tensors and ckpt.files.unused == (single / "adapter.safetensors",)


def test_a_folder_needs_its_config(tmp_path: Path) -> None:
    folder = qwen_fp8(tmp_path / "x")
    (folder / "config.json").unlink()
    assert str(folder / "config.json") in refused(folder)
    assert open_checkpoint(folder / "model.safetensors").config == {}
    (folder / "config.json").write_text("{")
    assert "JSON" in refused(folder)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    tensor_file(tmp_path / "model.safetensors", {})
    (tmp_path / "config.json").write_text("{}")
    assert "without any" in refused(tmp_path)
