"""FP8 products read nothing beyond their operands, checked where that ends a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from conftest import REPO


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "code"), [([], 0), (["beyond"], -signal.SIGSEGV)], ids=["kernels", "the guard"])
def test_nothing_beyond_the_operands_is_read(arguments, code):
    script = [sys.executable, "tests/gemm_guarded.py", *arguments]
    environment = os.environ | {"PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}"}
    done = subprocess.run(script, cwd=REPO, env=environment, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
