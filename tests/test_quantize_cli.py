"""`mtplab quantize`: what it prints, its JSON, its exit codes, and that a signal leaves something to go on from."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from mtplab.checkpoint import open_checkpoint, write_safetensors
from mtplab.checkpoint.convert import engine
from mtplab.cli import main


def test_a_report_says_what_was_written_and_what_was_not(
    bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target = tmp_path / "dst"
    options = ["--format", "fp8-channel", "--layout", "compressed-tensors", "--draft", "keep"]
    assert main(["quantize", str(bundled), str(target), *options]) == 0
    out = capsys.readouterr().out
    plan = open_checkpoint(target).plan()
    fp8 = [module for module in plan.modules if module.weight == "fp8"]
    assert f"to FP8\nFP8         target {len(fp8)}\n" in out and "draft" not in {module.part for module in fp8}
    assert f"{sum(info.nbytes for info in open_checkpoint(target).tensors.values()):,} bytes" in out
    assert "engines     Loads right in vLLM, SGLang and transformers" in out
    assert "GB/s read" in out


def test_json_is_pure_and_complete(bundled_fp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["quantize", str(bundled_fp8), str(tmp_path / "dst"), "--exclude", "*.o_proj,*.down_proj", "--json"]
    assert main(arguments) == 0
    said = json.loads(capsys.readouterr().out)
    made, source = open_checkpoint(tmp_path / "dst"), open_checkpoint(bundled_fp8)
    assert said["fp8"] == [module.name for module in made.plan().modules if module.weight == "fp8"]
    assert not [name for name in said["fp8"] if name.endswith(("o_proj", "down_proj"))]
    assert said["left"] == {} and said["resumed_shards"] == 0 and said["path"] == str(tmp_path / "dst")
    assert said["bytes_read"] <= sum(info.nbytes for info in source.tensors.values())
    assert sum(said["tensors"].values()) + said["tensors"]["to BF16"] == len(source.tensors)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--block", "128"], "--block '128': expected rows and columns"),
        (["--format", "fp8-channel"], "hf has no scale per channel"),
        (["--exclude", "a,,b"], "an empty name"),
        (["--format", "fp9"], "expected one of fp8-block"),
        (["--draft", "leave"], "expected one of like-target"),
    ],
)
def test_wrong_usage_is_one_line(
    bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture, options: list[str], said: str
) -> None:
    assert main(["quantize", str(bundled), str(tmp_path / "dst"), *options]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_a_run_to_go_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Ctrl-C in the second of two shards: one line, exit code 1, and the same command goes on."""
    source = tmp_path / "src"
    source.mkdir()
    weight_map = {}
    for shard in range(2):
        name, file = f"model.layers.{shard}.mlp.up_proj.weight", f"model-{shard + 1}.safetensors"
        write_safetensors(source / file, {name: torch.ones(256, 128).bfloat16()})
        weight_map[name] = file
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (source / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 2}))
    finished = tmp_path / ".dst.partial" / "checkpoint" / "model-1.safetensors"
    encode = engine.encode
    calls = []

    def interrupted(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            while not finished.exists():  # it is flushed beside the second's conversion
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
            assert seen.wait(60)  # the main thread may be long in coming where the machine is busy
        encode(*arguments)

    def on_interrupt(*arguments: object) -> None:
        seen.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "encode", interrupted)
    seen, before = threading.Event(), signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, on_interrupt)  # which whoever started the tests may have told them to ignore
    command = ["quantize", str(source), str(tmp_path / "dst")]
    try:
        assert main(command) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "mtplab: stopped\n" and not (tmp_path / "dst").exists()
    assert main(command) == 0
    assert "2 to FP8; 1 shards from the stopped run" in capsys.readouterr().out
    assert len(calls) == 3 and not (tmp_path / ".dst.partial").exists()
