"""What the converter promises whatever happens around it: one source, finite values, flushed files, its own errors."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import SafetensorsWriter, open_checkpoint, write_safetensors
from mtplab.checkpoint.convert import quantize_checkpoint
from mtplab.checkpoint.convert.state import Partial
from mtplab.errors import CheckpointError, ConfigError


def source_of(folder: Path, shards: tuple[str, ...] = ("a", "b", "c")) -> Path:
    """A plain checkpoint with one linear weight in each shard."""
    folder.mkdir()
    weight_map = {}
    for layer, shard in enumerate(shards):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        (folder / f"{shard}.safetensors").parent.mkdir(exist_ok=True)
        write_safetensors(folder / f"{shard}.safetensors", {name: torch.ones(256, 256).bfloat16()})
        weight_map[name] = f"{shard}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": len(shards)}))
    return folder


def fp8_source(folder: Path, scale: float, code: float = 448.0) -> Path:
    folder.mkdir()
    module = "model.layers.0.mlp.up_proj"
    tensors = {
        f"{module}.weight": torch.full((130, 130), code).to(torch.float8_e4m3fn),
        f"{module}.weight_scale_inv": torch.tensor([[1.0, 1.0], [1.0, scale]]),
    }
    write_safetensors(folder / "model.safetensors", tensors)
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantization}))
    return folder


@pytest.mark.parametrize("what", ["values", "header", "gone", "config"])
def test_a_source_that_changes_during_the_run_is_not_published(tmp_path: Path, what: str) -> None:
    source = source_of(tmp_path / "src")
    done: list[int] = []

    def change(*_: int) -> None:
        if done:
            return
        done.append(1)
        name = "model.layers.2.mlp.up_proj.weight"
        if what == "values":
            write_safetensors(source / "c.safetensors", {name: torch.full((256, 256), 7.0).bfloat16()})
        elif what == "header":  # a first byte that claims a header of 2^56 bytes must not be believed
            content = bytearray((source / "a.safetensors").read_bytes())
            content[7] = 1
            (source / "a.safetensors").write_bytes(content)
        elif what == "gone":
            (source / "a.safetensors").unlink()
        else:
            (source / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))

    with pytest.raises(CheckpointError, match="changed while it was converted") as raised:
        quantize_checkpoint(source, tmp_path / "dst", progress=change, threads=1)
    assert "--restart" in str(raised.value) and not (tmp_path / "dst").exists()
    if what == "values":
        assert "c.safetensors" in str(raised.value)
        with pytest.raises(ConfigError, match="other source"):  # nor is it taken up
            quantize_checkpoint(source, tmp_path / "dst")
        quantize_checkpoint(source, tmp_path / "dst", restart=True)
        values = [
            float(open_checkpoint(tmp_path / "dst").dequantize(f"model.layers.{i}.mlp.up_proj")[0, 0]) for i in (0, 2)
        ]
        assert values == [1.0, 7.0]


@pytest.mark.parametrize(
    ("scale", "code"),
    [(3e38, 448.0), (3.4e38, 1.0)],  # infinite as a product, and a float32 that rounds to infinity in BF16
)
def test_what_becomes_infinite_in_bf16_is_refused(tmp_path: Path, scale: float, code: float) -> None:
    source = fp8_source(tmp_path / "src", scale, code)
    with pytest.raises(CheckpointError, match=r"up_proj.weight.*4 of 16900 values.*in BF16.*\[128, 128\]"):
        quantize_checkpoint(source, tmp_path / "dst", format="bf16")
    assert not (tmp_path / "dst").exists()


def test_the_largest_bf16_value_is_written(tmp_path: Path) -> None:
    largest = float(torch.finfo(torch.bfloat16).max)
    quantize_checkpoint(fp8_source(tmp_path / "src", largest, 1.0), tmp_path / "dst", format="bf16")
    assert float(open_checkpoint(tmp_path / "dst").read("model.layers.0.mlp.up_proj")[129, 129]) == largest


def test_every_file_is_flushed_before_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path / "src")
    (source / "tokenizer.json").write_text("{}")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool.jinja").write_text("x")
    flushed: set[tuple[int, int]] = set()
    flush = os.fsync

    def noted(descriptor: int) -> None:
        found = os.fstat(descriptor)
        flushed.add((found.st_dev, found.st_ino))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    quantize_checkpoint(source, tmp_path / "dst")
    files = {p.name: (p.stat().st_dev, p.stat().st_ino) for p in (tmp_path / "dst").rglob("*")}
    assert {"tokenizer.json", "tool.jinja", "a.safetensors", "config.json"} < files.keys()
    assert [name for name, inode in files.items() if inode not in flushed] == []


def test_a_file_that_cannot_be_begun_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, old[1]))
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            SafetensorsWriter(tmp_path / "x.safetensors", {"a": ("U8", (1 << 20,))}).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == [] and set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("name", ["x" * 300, "x" * 250, "a\0b"])
def test_odd_names_of_the_target_are_errors_of_ours(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path / "src")
    with pytest.raises((CheckpointError, ConfigError), match="cannot be written|expected the path"):
        quantize_checkpoint(source, f"{tmp_path}/{name}")
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_safetensors(f"{tmp_path}/{name}", {"a": torch.zeros(1)})
    assert os.listdir(tmp_path) == ["src"]


def test_a_folder_that_may_not_be_searched_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path / "src")
    stat = os.lstat

    def refused(path: object, **options: object) -> os.stat_result:
        if str(path).endswith("closed/dst"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(os, "lstat", refused)
    with pytest.raises(CheckpointError, match="closed/dst.*cannot be written: Permission denied"):
        quantize_checkpoint(source, tmp_path / "closed" / "dst")


@pytest.mark.parametrize("name", ["tokenizer.json", "a.safetensors"])
def test_what_cannot_be_read_is_named_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    source = source_of(tmp_path / "src")
    (source / "tokenizer.json").write_text("{}")
    opened, seen = os.open, []

    def refused(path: object, *args: object, **options: object) -> int:
        if str(path) == str(source / name):
            seen.append(path)
            if name == "tokenizer.json" or len(seen) > 1:  # a shard's header was read before
                raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **options)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(CheckpointError, match=f"src/{name}.*cannot be read") as raised:
        quantize_checkpoint(source, tmp_path / "dst")
    assert "dst" not in str(raised.value)


def test_shards_of_one_name_keep_their_own_metadata(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src", ("x/m", "y/m"))
    for which, layer in (("x", 0), ("y", 1)):
        tensors = {f"model.layers.{layer}.mlp.up_proj.weight": torch.ones(2, 2).bfloat16()}
        write_safetensors(source / which / "m.safetensors", tensors, {"of": which})
    metadata = open_checkpoint(source).files.metadata
    assert [metadata[source / which / "m.safetensors"]["of"] for which in ("x", "y")] == ["x", "y"]


def test_a_lock_that_its_run_removed_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run publishes between our opening its lock and our taking it."""
    import fcntl

    target = tmp_path / "dst"
    other = Partial(target)
    running = other.opened({}, {}, False)
    running.__enter__()
    lock = fcntl.flock

    def ends_first(file: object, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        other.publish()
        running.__exit__(None, None, None)
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", ends_first)
    with pytest.raises(ConfigError, match="does not exist yet"), Partial(target).opened({}, {}, False):
        raise AssertionError("two runs made one target")
    assert sorted(os.listdir(tmp_path)) == ["dst"]


def test_a_lock_file_that_is_new_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run removed its folder without making the target: ours then holds the lock that has the name."""
    import fcntl

    target, lock = tmp_path / "dst", fcntl.flock
    other = Partial(target)
    other.folder.mkdir()

    def removed_first(file: object, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        other.remove()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", removed_first)
    with Partial(target).opened({}, {}, False):
        assert (other.folder / "lock").exists()
        with pytest.raises(CheckpointError, match="another run"), Partial(target).opened({}, {}, False):
            raise AssertionError("two runs at once")


def test_a_target_that_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src")
    target = tmp_path / "dst"

    def appear(*_: int) -> None:
        target.mkdir(exist_ok=True)

    with pytest.raises(ConfigError, match="does not exist yet"):
        quantize_checkpoint(source, target, progress=appear)
    assert os.listdir(target) == []
    target.rmdir()
    assert quantize_checkpoint(source, target).resumed == 3


def test_sources_that_differ_in_nothing_but_place_and_values_are_not_mixed(tmp_path: Path) -> None:
    """As out of a reproducible archive: the same names, shapes, sizes and times."""
    first, second = source_of(tmp_path / "a"), source_of(tmp_path / "b")
    for folder in (first, second):
        for path in folder.iterdir():
            os.utime(path, (0, 0))

    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(first, tmp_path / "out", progress=stop)
    with pytest.raises(ConfigError, match="restart"):
        quantize_checkpoint(second, tmp_path / "out")
    assert quantize_checkpoint(first, tmp_path / "out").resumed


def test_a_shard_of_an_odd_name_is_written_anew_and_not_copied(tmp_path: Path) -> None:
    folder = source_of(tmp_path / "src")
    for name in ("weights.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    os.replace(folder / "a.safetensors", folder / "weights.json")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.layers.0.mlp.up_proj.weight"] = "weights.json"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    made = quantize_checkpoint(folder, tmp_path / "out")
    found = open_checkpoint(tmp_path / "out")
    assert found.info("model.layers.0.mlp.up_proj").dtype == "F8_E4M3"
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}" and made.left == {}


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)])
@pytest.mark.parametrize("options", [{}, {"format": "fp8-tensor", "layout": "compressed-tensors", "scales": "ue8m0"}])
def test_a_weight_without_values_stays_as_it_is(tmp_path: Path, shape: tuple[int, int], options: dict) -> None:
    folder = source_of(tmp_path / "src", ("a",))
    name = "model.layers.0.mlp.down_proj.weight"
    held = {info.name: open_checkpoint(folder).read(info.name) for info in open_checkpoint(folder).tensors.values()}
    write_safetensors(folder / "a.safetensors", held | {name: torch.zeros(shape).bfloat16()})
    (folder / "model.safetensors.index.json").unlink()
    quantize_checkpoint(folder, tmp_path / "out", **options)
    found = open_checkpoint(tmp_path / "out")
    assert found.info(name).dtype == "BF16" and found.info(name).shape == shape
    assert not [f for f in found.audit(deep=True).findings if f.kind in ("bad-scale", "unreadable")]


@pytest.mark.parametrize("entries", [None, "lm_head", [{}], 3])
def test_a_list_that_is_none_is_refused(bundled_fp8: Path, entries: object) -> None:
    with pytest.raises(ConfigError, match="expected a list of module names"):
        open_checkpoint(bundled_fp8).with_exclusions(entries)
