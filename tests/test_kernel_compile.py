"""Kernels compiled for real GPUs: FP8 matrix instructions, no spills, shared memory within the chip's limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from conftest import REPO
from mtplab.kernels.targets import TARGETS


def bare_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """In a process that does not interpret."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | variables
    return subprocess.run([sys.executable, *arguments], cwd=REPO, env=environment, capture_output=True, text=True)


def compiled(target: str, cache: str) -> list[dict]:
    """One variant of every kernel, compiled in a process without torch and with an empty cache."""
    done = bare_python("-m", "mtplab.kernels.aot", "--quick", "--target", target, TRITON_CACHE_DIR=cache)
    assert done.returncode in (0, 1), done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
def test_every_kernel_compiles_as_it_should(target, tmp_path):
    rows = compiled(target, str(tmp_path))
    modules = {row["module"] for row in rows}
    assert modules == {path.stem for path in (REPO / "kernels").glob("*_jit.py")}, "a kernel has no quick variant"
    assert {f"{row['kernel']} {row['label']}": row["faults"] for row in rows if row["faults"]} == {}


def test_no_torch_is_needed():
    code = (
        "import sys; from mtplab.kernels import aot; from mtplab.kernels.targets import TARGETS\n"
        "assert aot.find_variants(TARGETS['sm_90']); print('torch' in sys.modules)"
    )
    assert bare_python("-c", code).stdout == "False\n"


def test_an_interpreting_process_refuses():
    done = bare_python("-m", "mtplab.kernels.aot", TRITON_INTERPRET="1")
    assert done.returncode == 2 and "TRITON_INTERPRET is set" in done.stderr
