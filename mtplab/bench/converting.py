"""How fast checkpoints are written anew, and in how much memory: a synthetic one of Qwen3.5-27B's layer shapes.

Each conversion runs in a process of its own, so that one's peak is not another's. Reads from the page cache and flushes
what is written to disk, so the disk's speed is in the time. Memory is read from Linux's /proc. Knows nothing of models.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from mtplab.checkpoint import SafetensorsWriter

__all__ = ["CASES", "convert_report"]

HIDDEN, INNER = 5120, 17408
LAYERS = 0  # of the checkpoint; 0: as many as the gigabytes asked for
CASES: dict[str, dict[str, str]] = {
    "fp8-block": {"format": "fp8-block"},
    "fp8-block, ue8m0": {"format": "fp8-block", "scales": "ue8m0"},
    "fp8-channel": {"format": "fp8-channel", "layout": "compressed-tensors"},
    "fp8-tensor": {"format": "fp8-tensor", "layout": "compressed-tensors"},
    "bf16, of fp8-block": {"format": "bf16"},
}
_CODE = """
import json, sys, time, torch
from mtplab.checkpoint.convert import quantize_checkpoint
def memory(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024
torch.ones(4096).to(torch.float8_e4m3fn)
base = memory("VmRSS")
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of starting up
read = [0]
def progress(done, total): read[0] = total
started, cpu = time.perf_counter(), time.process_time()
quantize_checkpoint(sys.argv[1], sys.argv[2], progress=progress, **json.loads(sys.argv[3]))
taken = time.perf_counter() - started, time.process_time() - cpu
print(json.dumps([read[0], *taken, memory("VmHWM") - base]))
"""


def convert_report(gigabytes: int, folder: Path | None, rounds: int = 1) -> str:
    """The table: GB of the source read a second, best of `rounds`, processor seconds, and memory above the start's."""
    lines = [f"{'':20}  {'read':>8}  {'seconds':>8}  {'GB/s':>6}  {'cpu s':>6}  {'memory':>8}"]
    with tempfile.TemporaryDirectory(dir=folder) as work:
        plain = Path(work) / "plain"
        _synthetic(plain, gigabytes)
        for name, options in CASES.items():
            source = Path(work) / "fp8" if name.startswith("bf16") else plain
            best: list[float] = []
            for _ in range(rounds):
                target = Path(work) / "made"
                shutil.rmtree(target, ignore_errors=True)
                command = [sys.executable, "-c", _CODE, str(source), str(target), json.dumps(options)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found = json.loads(done.stdout)
                best = min(best, found, key=lambda row: row[1]) if best else found
            if name == "fp8-block":
                (Path(work) / "made").rename(Path(work) / "fp8")
            read, seconds, cpu, peak = best
            lines.append(
                f"{name:20}  {read / 1e9:5.2f} GB  {seconds:8.2f}  {read / seconds / 1e9:6.2f}  {cpu:6.2f}  "
                f"{peak / 1e6:5.0f} MB"
            )
    largest = 2 * HIDDEN * INNER
    return "\n".join([*lines, f"the largest tensor takes {largest / 1e6:.0f} MB"])


def _synthetic(folder: Path, gigabytes: int) -> None:
    """At least so many GB of BF16 layers, four to a shard: feed-forward weights and a norm."""
    folder.mkdir()
    values = torch.randn(INNER * HIDDEN).mul_(0.02).bfloat16()
    layers = LAYERS or max(1, -(-gigabytes * 10**9 // (6 * INNER * HIDDEN)))
    weight_map: dict[str, str] = {}
    for first in range(0, layers, 4):
        file = f"model-{first:05d}.safetensors"
        layout: dict[str, tuple[str, tuple[int, ...]]] = {}
        for layer in range(first, min(layers, first + 4)):
            stem = f"model.layers.{layer}"
            for which, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
                layout[f"{stem}.mlp.{which}_proj.weight"] = ("BF16", shape)
            layout[f"{stem}.input_layernorm.weight"] = ("BF16", (HIDDEN,))
        with SafetensorsWriter(folder / file, layout) as writer:
            for name, (_, shape) in layout.items():
                count = shape[0] * shape[-1] if len(shape) > 1 else shape[0]
                writer.put(name, values[:count].view(shape))
        weight_map |= dict.fromkeys(layout, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": layers}))
