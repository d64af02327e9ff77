"""The GPU benchmark of kernels, on a CPU and interpreted: what is right gets a time, what is wrong does not.

The clock is a stub: no figure of these tests says anything about speed.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

from kernel_tools import interpreted
from mtplab.bench import kernels_report
from mtplab.bench.__main__ import main
from mtplab.bench.gemm_cases import make_case, wrong
from mtplab.bench.kernels import OURS, Limits, Measured, goals, limits, measure, measure_memory
from mtplab.bench.memory_cases import MemoryCase, Sizes
from mtplab.study.gpus import GemmShape, by_device_name

pytestmark = interpreted
CPU = torch.device("cpu")
SMALL = GemmShape("toy", "weight", 192, 256)


def clock(call):
    call()
    return 1e-6, 2e-6, 3e-6


def test_what_is_right_is_timed():
    found = list(measure(CPU, clock, Limits(1e12, 1e15), [SMALL], [3, 20]))
    timed = {(line.name, line.m) for line in found if line.seconds}
    assert {(name, m) for name in (*OURS, "torch.matmul BF16") for m in (3, 20)} <= timed
    ours = next(line for line in found if line.name == "block scales" and line.m == 3)
    assert ours.tflops == pytest.approx(2 * 3 * 192 * 256 / 2e-6 / 1e12)
    nbytes = 192 * 256 + 3 * 256 + 2 * 3 * 192
    assert ours.gbytes == pytest.approx(nbytes / 2e-6 / 1e9) and ours.of_copy == pytest.approx(nbytes / 2e-6 / 1e12)
    assert all(line.note for line in found if not line.seconds), "what has no time says why"
    text = kernels_report.table(found)
    assert "toy weight [192, 256]" in text and "block scales" in text


def test_what_is_wrong_is_not(monkeypatch):
    case = make_case(SMALL, 3, CPU)
    right = case.contestants["block scales"]
    assert wrong(case, "block scales") is None
    case.contestants["block scales"] = lambda: right() * 1.01
    assert "relative error 1.0e-02" in wrong(case, "block scales")
    case.contestants["block scales"] = lambda: torch.full_like(right(), float("nan"))
    assert "relative error nan" in wrong(case, "block scales")
    runs = iter([right(), right() + 1e-4])
    case.contestants["block scales"] = lambda: next(runs)
    assert wrong(case, "block scales") == "two runs differ"


SIZES = Sizes(2, 2, 70, 256, 4, 2, 32, 1, 2, 16, 300, 64)


@pytest.mark.slow
def test_what_memory_bounds_is_right_and_timed():
    found = list(measure_memory(CPU, clock, Limits(1e12, None), SIZES, budget=3600))
    assert len(found) == 2 + 3 * 5 + 2 and {line.note for line in found} == {""}
    attention = next(line for line in found if line.name == "attend 2 over 70 in int8")
    assert attention.gbytes == pytest.approx(2 * 2 * 2 * 70 * (32 + 4) / 2e-6 / 1e9)
    assert "attend 2 over 70 in int8" in kernels_report.table(found)


def test_a_wrong_kernel_of_a_round_is_not_timed():
    case = MemoryCase(1.0, lambda: (torch.full((3,), 1.0 + (os.environ["MTPLAB_KERNELS"] == "triton")),))
    assert "relative error 1.0e+00" in case.wrong()
    runs = iter(range(3))
    assert MemoryCase(1.0, lambda: (torch.tensor([float(next(runs))]),)).wrong() == "two runs differ"
    assert os.environ["MTPLAB_KERNELS"] == "triton", "the choice is put back"


def test_what_is_not_measured_is_not_made(monkeypatch):
    """By default its operands are gigabytes."""
    made = []
    for name in ("_quantise", "_write", "_attend", "_delta", "_accept"):
        monkeypatch.setattr(f"mtplab.bench.memory_cases.{name}", lambda *rest, name=name: made.append(name))
    monkeypatch.setattr("mtplab.bench.kernels.make_case", lambda *rest: made.append("product"))
    lines = list(measure_memory(CPU, clock, Limits(1e12, None), budget=-1))
    lines += measure(CPU, clock, Limits(1e12, None), budget=-1)
    assert len(lines) > 19 and all("not measured" in line.note for line in lines) and made == []


def test_a_case_that_cannot_be_made_is_noted_and_the_rest_goes_on(monkeypatch):
    def broken(*arguments):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr("mtplab.bench.memory_cases._attend", broken)
    notes = {line.name: line.note for line in measure_memory(CPU, clock, Limits(1e12, None), SIZES, budget=3600)}
    assert "OutOfMemoryError" in notes["attend 1 over 70 in int4"] and not notes["accept 1 greedy drafts"]


def test_time_that_is_up_is_said():
    assert all("not measured" in line.note for line in measure_memory(CPU, clock, Limits(1e12, None), SIZES, budget=-1))
    (line,) = measure(CPU, clock, Limits(1e12, None), [SMALL], [3], budget=-1)
    assert line.seconds is None and "not measured" in line.note


def test_the_copy_is_the_limit():
    assert limits(CPU, clock, nbytes=1 << 10).copy == pytest.approx(2 * 1024 / 2e-6)
    assert by_device_name("NVIDIA H200").name == "H200 SXM"
    assert not any(map(by_device_name, ("NVIDIA GeForce RTX 9999", "NVIDIA H100 PCIe", "NVIDIA H200 NVL")))


def line(name: str, m: int, seconds: float, **more) -> Measured:
    return Measured("model", "weight", 8192, 8192, m, name, (seconds,) * 3, **more)


def test_goals_are_held_against_the_worst_case():
    found = [
        line("block scales", 4096, 1.0, of_fp8=0.6, of_copy=0.1),
        line("token and channel scales", 4096, 1.0, of_fp8=0.5, of_copy=0.1),
        line("quantise + block scales", 4096, 1.2, of_fp8=0.5, of_copy=0.1),
        line("torch.matmul BF16", 4096, 1.5, of_copy=0.1),
        line("block scales", 1, 1.0, of_fp8=0.01, of_copy=0.9),
        line("torch._scaled_mm, blocks", 1, 0.9, of_fp8=0.01, of_copy=0.9),
    ]
    met = {goal: (is_met, worst) for goal, is_met, worst in goals(found)}
    verdicts = {goal.split(":")[0] + goal.split(":")[1][:12]: is_met for goal, (is_met, _) in met.items()}
    assert [is_met for is_met, _ in met.values()] == [True, False, True, True, False], verdicts
    assert "0.90 on model weight [8192, 8192], m 1, expected 1" in next(reversed(met.values()))[1]
    assert goals([]) == []
    unmeasured = Measured("model", "weight", 8192, 8192, 64, "block scales", note="cannot run: OutOfResources")
    assert not any(is_met for _, is_met, _ in goals([*found, unmeasured])), "a goal met without its hardest case"


def test_what_cannot_run_is_noted_and_the_rest_goes_on(monkeypatch):
    def broken(*arguments, **settings):
        raise ZeroDivisionError("compiler says no\nand more")

    monkeypatch.setattr("mtplab.bench.gemm_cases.gemm_scaled", broken)
    found = list(measure(CPU, clock, Limits(1e12, 1e15), [SMALL], [3]))
    notes = {line.name: line.note for line in found}
    assert "ZeroDivisionError" in notes["token and channel scales"] and not notes["block scales"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the command measures")
def test_without_a_gpu_no_number_is_invented(capsys, tmp_path):
    assert main(["kernels", "-o", str(tmp_path / "out.json")]) == 2
    assert "no GPU here: nothing is measured" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_rows_are_plain_data():
    assert json.loads(json.dumps(line("block scales", 1, 1.0).row()))["seconds"] == [1.0, 1.0, 1.0]
