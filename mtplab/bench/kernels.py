"""FP8 products on a GPU, against torch's and other libraries', on the shapes of real models.

Correctness first: a contestant whose product is wrong, or differs between two runs, gets no time. What the chip can do
is the bandwidth of a copy in the same run and, for the matrix unit, the datasheet's rate. Knows nothing of printing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mtplab.bench.gemm_cases import GemmCase, make_case, wrong
from mtplab.bench.memory_cases import MemoryCase, Sizes, memory_cases
from mtplab.study.gpus import SHAPES, GemmShape, by_device_name

__all__ = ["ROWS", "Limits", "Measured", "goals", "limits", "measure", "measure_memory"]

ROWS = (1, 4, 16, 64, 256, 4096)
Timer = Callable[[Callable[[], Any]], tuple[float, float, float]]
OURS = ("block scales", "quantise + block scales", "token and channel scales")


@dataclass(frozen=True)
class Limits:
    """What the chip allows: bytes a second copied (read and written) in this run, FP8 FLOP/s of its datasheet."""

    copy: float
    fp8: float | None


@dataclass(frozen=True)
class Measured:
    """One contestant on one product: seconds at the 20th, 50th and 80th percentile, or why there are none."""

    model: str
    weight: str
    n: int
    k: int
    m: int
    name: str
    seconds: tuple[float, float, float] | None = None
    tflops: float | None = None
    gbytes: float | None = None  # GB/s
    of_copy: float | None = None
    of_fp8: float | None = None
    note: str = ""

    def row(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def gpu_timer() -> Timer:
    """Percentiles over repeated calls, L2 flushed before each."""
    from triton.testing import do_bench

    def timed(call: Callable[[], Any]) -> tuple[float, float, float]:
        p20, p50, p80 = do_bench(call, warmup=5, rep=25, quantiles=(0.2, 0.5, 0.8))
        return p20 / 1e3, p50 / 1e3, p80 / 1e3

    return timed


def limits(device: torch.device, timed: Timer, nbytes: int = 1 << 30) -> Limits:
    """Copy bandwidth of a GiB each way, and the datasheet's FP8 rate where the catalogue has the card."""
    source = torch.empty(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = timed(lambda: target.copy_(source))[1]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    card = by_device_name(name)
    return Limits(2 * nbytes / seconds, card.fp8 * 1e12 if card else None)


def measure(
    device: torch.device,
    timed: Timer,
    chip: Limits,
    shapes: Sequence[GemmShape] = SHAPES,
    rows: Sequence[int] = ROWS,
    budget: float = 160.0,
) -> Iterator[Measured]:
    """Every contestant on every product. Past `budget` seconds the rest is named as not measured, not left out."""
    begun = time.monotonic()
    for shape in shapes:
        for m in rows:
            if time.monotonic() - begun > budget:
                note = f"not measured: {budget:g} s are up"
                yield Measured(shape.model, shape.name, shape.n, shape.k, m, "all", note=note)
                continue
            try:
                case = make_case(shape, m, device)
            except Exception as problem:  # out of memory, say; the other products go on
                yield Measured(shape.model, shape.name, shape.n, shape.k, m, "all", note=_cannot(problem))
                continue
            yield from _measure_case(case, timed, chip)
            del case  # before the next one's operands are made


def measure_memory(
    device: torch.device, timed: Timer, chip: Limits, sizes: Sizes | None = None, budget: float = 40.0
) -> Iterator[Measured]:
    """The operations that memory bounds; bytes are those that must move, not those that a kernel moves."""
    begun = time.monotonic()
    for name, make in memory_cases(device, sizes):
        where = {"model": "memory", "weight": "operations of a round", "n": 0, "k": 0, "m": 0, "name": name}
        if time.monotonic() - begun > budget:
            yield Measured(**where, note=f"not measured: {budget:g} s are up")
            continue
        try:
            line = _measured_memory(make(), where, timed, chip)
        except Exception as problem:
            line = Measured(**where, note=_cannot(problem))
        yield line


def _measured_memory(case: MemoryCase, where: dict[str, Any], timed: Timer, chip: Limits) -> Measured:
    fault = case.wrong()
    if fault is not None:
        return Measured(**where, note=f"wrong, so not timed: {fault}")
    seconds = timed(case.call)
    rate = case.nbytes / seconds[1]
    return Measured(**where, seconds=seconds, gbytes=rate / 1e9, of_copy=rate / chip.copy)


def _measure_case(case: GemmCase, timed: Timer, chip: Limits) -> Iterator[Measured]:
    shape = case.shape
    where = {"model": shape.model, "weight": shape.name, "n": shape.n, "k": shape.k, "m": case.m}
    for name, why in case.refused.items():
        yield Measured(**where, name=name, note=f"cannot run: {why}")
    for name, call in case.contestants.items():
        try:
            fault = wrong(case, name)
            seconds = timed(call) if fault is None else None
        except Exception as problem:
            yield Measured(**where, name=name, note=_cannot(problem))
            continue
        if seconds is None:
            yield Measured(**where, name=name, note=f"wrong, so not timed: {fault}")
            continue
        operations, nbytes = case.operations / seconds[1], case.nbytes(name) / seconds[1]
        of_fp8 = operations / chip.fp8 if chip.fp8 and case.group[name] != "bf16" else None
        yield Measured(**where, name=name, seconds=seconds, tflops=operations / 1e12, gbytes=nbytes / 1e9,
                       of_copy=nbytes / chip.copy, of_fp8=of_fp8)  # fmt: skip


def _cannot(problem: Exception) -> str:
    return f"cannot run: {type(problem).__name__}: {str(problem).strip().splitlines()[:1]}"[:180]


def goals(found: Sequence[Measured]) -> list[tuple[str, bool, str]]:
    """What an H200 is held to: (goal, met, the worst case). Empty where nothing of it was measured; with a case of ours
    that has no time no goal is met."""
    cases: dict[tuple, dict[str, Measured]] = {}
    for line in found:
        if line.seconds is not None:
            cases.setdefault((line.model, line.weight, line.n, line.k, line.m), {})[line.name] = line
    out: list[tuple[str, bool, str]] = []
    missing = sum(line.seconds is None and line.name in (*OURS, "all") for line in found)

    def hold(goal: str, values: list[tuple[float, tuple]], least: float) -> None:
        if values:
            value, case = min(values, key=lambda pair: pair[0])
            where = f"{case[0]} {case[1]} [{case[2]}, {case[3]}], m {case[4]}"
            lost = f"; {missing} cases have no time" if missing else ""
            out.append((goal, value >= least and not missing, f"{value:.2f} on {where}, expected {least:g}{lost}"))

    large = {case: lines for case, lines in cases.items() if case[2] >= 4096 and case[3] >= 4096}
    for name, least in (("block scales", 0.55), ("token and channel scales", 0.70)):
        values = [(x[name].of_fp8, c) for c, x in large.items() if c[4] == 4096 and name in x and x[name].of_fp8]
        hold(f"{name}: share of the datasheet's FP8 rate, m 4096, n and k ≥ 4096", values, least)
    heavy = {c: x for c, x in cases.items() if c[2] * c[3] >= 64 << 20 and c[4] <= 16}
    for name in ("block scales", "token and channel scales"):
        values = [(x[name].of_copy, c) for c, x in heavy.items() if name in x]
        hold(f"{name}: share of the copy bandwidth, m ≤ 16, weights of 64 MB and more", values, 0.85)
    whole, bf16 = "quantise + block scales", "torch.matmul BF16"
    values = [(_times(x, bf16, whole), c) for c, x in cases.items() if c[4] >= 64 and whole in x and bf16 in x]
    hold("quantise + block scales: speed over BF16, m ≥ 64", values, 1.0)
    for ours, theirs in (
        ("block scales", "torch._scaled_mm, blocks"),
        ("token and channel scales", "torch._scaled_mm, token and channel"),
    ):
        values = [(_times(x, theirs, ours), c) for c, x in cases.items() if ours in x and theirs in x]
        hold(f"{ours}: speed over {theirs}", values, 1.0)
    return out


def _times(lines: dict[str, Measured], slow: str, fast: str) -> float:
    return lines[slow].seconds[1] / lines[fast].seconds[1]
