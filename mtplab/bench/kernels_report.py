"""What `python -m mtplab.bench kernels` prints and writes. Measures nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from mtplab.bench.kernels import OURS, Measured, goals, gpu_timer, limits, measure, measure_memory
from mtplab.study.provenance import version

__all__ = ["run", "table"]

NO_GPU = (
    "no GPU here: nothing is measured, and no number invented. On a machine with one: python -m mtplab.bench kernels "
    "-o kernels.json"
)


def run(output: Path | None) -> int:
    """Measure, print, write. Returns 0; 1 where one of our kernels was wrong or has no time; 2 without a GPU."""
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device, timed = torch.device("cuda"), gpu_timer()
    torch.backends.cuda.matmul.allow_tf32 = False
    chip = limits(device, timed)
    found: list[Measured] = []
    with torch.inference_mode():
        lines = chain(measure(device, timed, chip), measure_memory(device, timed, chip))
        for line in tqdm(lines, desc="measured", unit=" cases"):
            found.append(line)
            if output is not None:  # what is measured stays, whatever happens to the rest
                with output.with_suffix(".jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line.row()) + "\n")
    card = {
        "gpu": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda or torch.version.hip,
        "copy": f"{chip.copy / 1e12:.2f} TB/s",
    }
    print(" · ".join(f"{key} {value}" for key, value in card.items()))
    print(table(found))
    held = goals(found)
    for goal, met, worst in held:
        print(f"{'met    ' if met else 'NOT MET'}  {goal}: {worst}")
    if output is not None:
        document: dict[str, Any] = {
            "machine": card,
            "limits": vars(chip),
            "goals": [{"goal": goal, "met": met, "worst": worst} for goal, met, worst in held],
            "rows": [line.row() for line in found],
        }
        output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    ours = [line for line in found if line.name in OURS or line.model == "memory"]
    return 1 if any(line.note for line in ours) else 0


def table(found: Sequence[Measured]) -> str:
    """One block a weight, one line a contestant and number of rows: µs at p20, p50, p80, TFLOP/s, GB/s and shares."""
    out = []
    for (model, weight, n, k), group in groupby(found, key=lambda x: (x.model, x.weight, x.n, x.k)):
        out.append(f"\n{model} {weight}" + (f" [{n}, {k}]" if n else ""))
        out.append(f"  {'m':>5}  {'':36}  {'p20':>8} {'p50':>8} {'p80':>8} µs  TFLOP/s    GB/s  of copy  of FP8")
        for line in group:
            if line.seconds is None:
                out.append(f"  {line.m:5}  {line.name:36}  {line.note}")
                continue
            took = " ".join(f"{1e6 * s:8.1f}" for s in line.seconds)
            fp8 = f"{line.of_fp8:7.0%}" if line.of_fp8 is not None else "      –"
            tflops = f"{line.tflops:8.1f}" if line.tflops is not None else "       –"
            rates = f"{tflops} {line.gbytes:7.0f}  {line.of_copy:7.0%}"
            out.append(f"  {line.m:5}  {line.name:36}  {took}     {rates} {fp8}")
    return "\n".join(out)
