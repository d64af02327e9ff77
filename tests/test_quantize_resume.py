"""A run that is stopped, refused or short of room leaves nothing that looks whole, and goes on where it stood."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mtplab import cli
from mtplab.checkpoint import SafetensorsWriter, open_checkpoint, write_safetensors
from mtplab.checkpoint.convert import engine, quantize_checkpoint
from mtplab.errors import CheckpointError, ConfigError

REPO = Path(__file__).resolve().parent.parent
SHARDS = 3


def source_of(folder: Path) -> Path:
    """A checkpoint of three shards, one linear weight and one norm in each."""
    folder.mkdir()
    weight_map = {}
    for shard in range(SHARDS):
        module = f"model.layers.{shard}"
        tensors = {
            f"{module}.mlp.up_proj.weight": torch.randn(300, 200).bfloat16(),
            f"{module}.input_layernorm.weight": torch.randn(200).bfloat16(),
        }
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        write_safetensors(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": SHARDS}))
    return folder


def stop_in_shard(number: int):
    """A progress callback that interrupts the run within the shard of this number, counted from 0."""

    def progress(done: int, total: int) -> None:
        if done > total * (number + 0.1) / SHARDS:
            raise KeyboardInterrupt

    return progress


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def stopped(tmp_path: Path, **options: object) -> Path:
    """A run that was stopped in its last shard, for tests that go on from there."""
    source = source_of(tmp_path / "src")
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, tmp_path / "dst", progress=stop_in_shard(2), **options)
    assert left_behind(tmp_path) == [".dst.partial", "src"]
    return source


def test_a_stopped_run_goes_on_from_its_finished_shards(tmp_path: Path) -> None:
    source = stopped(tmp_path)
    with pytest.raises(CheckpointError):  # what it left does not look whole
        open_checkpoint(tmp_path / ".dst.partial" / "checkpoint")
    finished = tmp_path / ".dst.partial" / "checkpoint" / "model-00001-of-00003.safetensors"
    before = finished.stat().st_ino, finished.stat().st_mtime_ns
    steps: list[int] = []
    written = quantize_checkpoint(source, tmp_path / "dst", progress=lambda done, total: steps.append(done))
    assert written.resumed == 2 and left_behind(tmp_path) == ["dst", "src"]
    after = (tmp_path / "dst" / finished.name).stat()
    assert (after.st_ino, after.st_mtime_ns) == before
    assert steps[0] > 0.6 * steps[-1]  # what was done counts as done
    quantize_checkpoint(source, tmp_path / "fresh")
    assert contents(tmp_path / "dst") == contents(tmp_path / "fresh")


def test_a_killed_run_goes_on_too(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src")
    code = f"""
import os, signal
from mtplab.checkpoint.convert import quantize_checkpoint
def progress(done, total):
    if done > 0.7 * total:
        os.kill(os.getpid(), signal.SIGKILL)
quantize_checkpoint({str(source)!r}, {str(tmp_path / "dst")!r}, progress=progress)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment())
    assert done.returncode == -signal.SIGKILL
    assert left_behind(tmp_path) == [".dst.partial", "src"]
    # as it stood in the middle of a shard
    assert [name for name in left_behind(tmp_path / ".dst.partial" / "checkpoint") if name.startswith(".")]
    assert quantize_checkpoint(source, tmp_path / "dst").resumed >= 1
    quantize_checkpoint(source, tmp_path / "fresh")
    assert left_behind(tmp_path) == ["dst", "fresh", "src"]
    assert contents(tmp_path / "dst") == contents(tmp_path / "fresh")


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO)}


def test_other_settings_are_refused_by_name_and_restart_starts_over(tmp_path: Path) -> None:
    source = stopped(tmp_path)
    with pytest.raises(ConfigError, match=r"other settings: scales was 'float', now 'ue8m0'.*--restart"):
        quantize_checkpoint(source, tmp_path / "dst", scales="ue8m0")
    with pytest.raises(ConfigError, match=r"other settings: exclude was 'None', now .*up_proj"):
        quantize_checkpoint(source, tmp_path / "dst", exclude=["*.1.mlp.up_proj"])
    assert left_behind(tmp_path) == [".dst.partial", "src"]
    written = quantize_checkpoint(source, tmp_path / "dst", scales="ue8m0", restart=True)
    assert written.resumed == 0 and left_behind(tmp_path) == ["dst", "src"]


def test_a_source_that_changed_is_refused_by_file(tmp_path: Path) -> None:
    source = stopped(tmp_path)
    os.utime(source / "model-00002-of-00003.safetensors", (1, 1))
    with pytest.raises(ConfigError, match=r"other source: model-00002-of-00003\.safetensors changed"):
        quantize_checkpoint(source, tmp_path / "dst")


@pytest.mark.parametrize("damage", ["truncated", "another header", "gone"])
def test_a_finished_shard_that_is_not_what_it_was_is_written_again(tmp_path: Path, damage: str) -> None:
    source = stopped(tmp_path)
    shard = tmp_path / ".dst.partial" / "checkpoint" / "model-00001-of-00003.safetensors"
    if damage == "truncated":
        os.truncate(shard, 100)
    elif damage == "gone":
        shard.unlink()
    else:
        shard.write_bytes(b"\x00" * shard.stat().st_size)
    written = quantize_checkpoint(source, tmp_path / "dst")
    assert written.resumed == 1
    quantize_checkpoint(source, tmp_path / "fresh")
    assert contents(tmp_path / "dst") == contents(tmp_path / "fresh")


def test_two_runs_do_not_write_one_folder(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src")
    seen: list[str] = []

    def second(done: int, total: int) -> None:
        if not seen:
            with pytest.raises(CheckpointError, match="another run is writing it") as caught:
                quantize_checkpoint(source, tmp_path / "dst")
            seen.append(str(caught.value))

    quantize_checkpoint(source, tmp_path / "dst", progress=second)
    assert seen and left_behind(tmp_path) == ["dst", "src"]


def test_too_little_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path / "src")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"0\.00 GB are to be written and 0\.00 GB are free. Make room"):
        quantize_checkpoint(source, tmp_path / "dst")
    assert left_behind(tmp_path) == ["src"]


def test_a_disk_that_fills_up_is_an_error_of_ours(tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk: the kernel refuses the write in the same place."""
    source = source_of(tmp_path / "src")
    code = f"""
import resource, signal
from mtplab import cli
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
raise SystemExit(cli.main(["quantize", {str(source)!r}, {str(tmp_path / "dst")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "model-00001-of-00003.safetensors: cannot be written: File too large." in done.stderr
    assert "Traceback" not in done.stderr and left_behind(tmp_path) == ["src"]


def test_a_folder_that_cannot_be_written_is_an_error_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = source_of(tmp_path / "src")
    (tmp_path / "file").write_text("")
    assert cli.main(["quantize", str(source), str(tmp_path / "file" / "dst")]) == 2
    assert "cannot be written: Not a directory" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="does not exist yet"):
        quantize_checkpoint(source, tmp_path / "file")


def test_values_that_are_no_numbers_are_counted_and_finished_shards_stay(tmp_path: Path) -> None:
    source = source_of(tmp_path / "src")
    name = "model.layers.2.mlp.up_proj.weight"
    weight = open_checkpoint(source).read(name)
    weight[7, 3], weight[250, 1] = float("nan"), float("inf")
    tensors = {name: weight, "model.layers.2.input_layernorm.weight": torch.ones(200).bfloat16()}
    write_safetensors(source / "model-00003-of-00003.safetensors", tensors)
    for options in ({}, {"format": "fp8-tensor"}, {"format": "fp8-channel", "layout": "modelopt"}):
        with pytest.raises(CheckpointError, match=rf"'{name}': 2 of 60000 values are NaN .* first is at \[7, 3\]"):
            quantize_checkpoint(source, tmp_path / "dst", restart=True, **options)
        assert not (tmp_path / "dst").exists()
    written = quantize_checkpoint(source, tmp_path / "dst", exclude=["*.2.mlp.up_proj"], restart=True)
    assert written.actions == {"copied": 4, "to FP8": 2}


def test_a_part_put_twice_or_left_out_is_noticed(tmp_path: Path) -> None:
    layout = {"a": ("F32", (4,))}
    with pytest.raises(ConfigError, match="1 tensors were never put"):
        with SafetensorsWriter(tmp_path / "x.safetensors", layout) as file:
            file.put_bytes("a", 0, torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(AssertionError):
        with SafetensorsWriter(tmp_path / "x.safetensors", layout) as file:
            for _ in range(3):
                file.put_bytes("a", 0, torch.zeros(8, dtype=torch.uint8))
    assert left_behind(tmp_path) == []


MEMORY = """
import sys, threading, torch
from mtplab.checkpoint.convert import quantize_checkpoint
def field(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
torch.ones(1 << 16).to(torch.float8_e4m3fn)
for format in ("fp8-block", "fp8-tensor"):
    before = field("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    quantize_checkpoint(sys.argv[1], sys.argv[2] + format, format=format)
    print(field("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_memory_is_a_few_bands_whatever_the_tensor(tmp_path: Path) -> None:
    """A weight of 210 MB takes less than half of itself: the bound asked for, three times it, is far away."""
    folder = tmp_path / "src"
    folder.mkdir()
    rows, columns = 12800, 8192
    layout = {"model.layers.0.mlp.up_proj.weight": ("BF16", (rows, columns))}
    with SafetensorsWriter(folder / "model.safetensors", layout) as file:
        part = torch.randn(100, columns).bfloat16().view(torch.uint8).reshape(-1)
        for start in range(0, rows, 100):
            file.put_bytes("model.layers.0.mlp.up_proj.weight", start * columns * 2, part)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 1}))
    size = 2 * rows * columns
    assert size > 200_000_000
    command = [sys.executable, "-c", MEMORY, str(folder), str(tmp_path / "made-")]
    done = subprocess.run(command, cwd=REPO, env=environment(), capture_output=True, text=True, check=True)
    taken = list(map(int, done.stdout.split()))
    assert len(taken) == 2 and max(taken) < size / 2, taken


def test_a_failing_band_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread writes into a file that is closed already, whatever else failed."""
    source = source_of(tmp_path / "src")
    running: list[int] = []
    encode = engine.encode

    def slow(*arguments: object) -> None:
        running.append(1)
        time.sleep(0.05)
        encode(*arguments)
        running.pop()

    monkeypatch.setattr(engine, "encode", slow)
    monkeypatch.setattr(engine, "BAND", 128 * 200)

    def fail(done: int, total: int) -> None:
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        quantize_checkpoint(source, tmp_path / "dst", progress=fail)
    assert running == [] and left_behind(tmp_path) == ["src"]
