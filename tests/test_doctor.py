"""`mtplab doctor`: every operation with a kernel is named, and the choice between kernel and torch with its reason."""

from __future__ import annotations

import json

import pytest
import torch

from conftest import REPO
from mtplab import ConfigError
from mtplab.cli import main
from mtplab.cli_doctor import OPERATIONS, examine
from mtplab.kernels import launch
from mtplab.kernels.launch import check, chosen, reason
from mtplab.kernels.targets import TARGETS


def test_every_kernel_is_an_operation():
    assert {module for module in OPERATIONS.values() if module} == {p.stem for p in (REPO / "kernels").glob("*_jit.py")}


def test_on_a_cpu_torch_computes(capsys, monkeypatch):
    monkeypatch.delenv("MTPLAB_KERNELS", raising=False)
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "cpu: torch references, because Triton compiles for GPUs only" in said
    assert "there is no kernel for it" in said and torch.__version__ in said


@pytest.mark.parametrize("kept", ["published", "mtp.*"])
def test_excluding_quantises_a_bf16_checkpoint_as_it_does_in_a_run(capsys, bundled, kept):
    said = []
    for options in (["--exclude", kept], ["--exclude", kept, "--model-format", "fp8"], []):
        assert main(["doctor", str(bundled), *options, "--json"]) == 0
        said.append(json.loads(capsys.readouterr().out)["memory"]["weights"])
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("choice, expected", [("reference", "torch references"), ("triton", "Triton kernels")])
def test_the_choice_can_be_forced(capsys, monkeypatch, choice, expected):
    monkeypatch.setenv("MTPLAB_KERNELS", choice)
    assert main(["doctor", "--json"]) == 0
    device = json.loads(capsys.readouterr().out)["devices"][0]
    assert device["implementation"] == expected and f"MTPLAB_KERNELS={choice}" in device["reason"]


def test_a_choice_that_is_none(capsys, monkeypatch):
    monkeypatch.setenv("MTPLAB_KERNELS", "fast")
    assert main(["doctor"]) == 2
    assert "MTPLAB_KERNELS is 'fast'; expected one of auto, triton, reference" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        examine()


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="set TRITON_INTERPRET=1 before Python starts"):
        chosen(torch.device("cpu"))


def test_a_gpu_gets_kernels_unless_told_otherwise(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(launch, "_architecture", lambda device: ("sm_90", TARGETS["sm_90"]))
    monkeypatch.delenv("MTPLAB_KERNELS", raising=False)
    assert (chosen(gpu), reason(gpu)) == ("triton", "a GPU, sm_90")
    monkeypatch.setenv("MTPLAB_KERNELS", "reference")
    assert chosen(gpu) == "reference"


def test_a_gpu_without_fp8_gets_torch(monkeypatch):
    gpu = torch.device("cuda")
    monkeypatch.setattr(launch, "_architecture", lambda device: ("sm_80", None))
    monkeypatch.delenv("MTPLAB_KERNELS", raising=False)
    assert chosen(gpu) == "reference" and "this GPU is sm_80, and the kernels are for sm_89" in reason(gpu)
    monkeypatch.setenv("MTPLAB_KERNELS", "triton")
    with pytest.raises(ValueError, match="this GPU is sm_80"):
        chosen(gpu)


def test_a_launcher_names_what_it_was_given():
    with pytest.raises(ValueError, match=r"w has shape \[2, 3\]; expected \[any, 4\]"):
        check("w", torch.ones(2, 3), (None, 4), (torch.float32,))
    with pytest.raises(ValueError, match="w is torch.int64; expected torch.float32 or torch.bfloat16"):
        check("w", torch.ones(2, dtype=torch.int64), (2,), (torch.float32, torch.bfloat16))
