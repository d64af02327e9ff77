"""What is compiled ahead of time is what launches: types, constants, alignment, sizes of tensors and options."""

from __future__ import annotations

import json

import pytest

from conftest import REPO
from mtplab.kernels.targets import TARGETS
from test_kernel_compile import bare_python


@pytest.mark.slow
@pytest.mark.parametrize("target", list(TARGETS))
def test_every_launch_has_its_variant_and_every_variant_its_launch(target):
    """A list that says i64 where a launch passes i32, or a number that a kernel is compiled anew for, shows here."""
    done = bare_python(str(REPO / "tests" / "kernel_launches.py"), target)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["differ"] == {}
    kernels = {name for path in (REPO / "kernels").glob("*_jit.py") for name in launched(path.read_text())}
    assert set(found["kernels"]) == kernels


def launched(source: str) -> list[str]:
    """Names of the kernels of a file: those whose decorator says what is not specialised."""
    lines = source.splitlines()
    decorated = [i for i, line in enumerate(lines) if line.startswith("@triton.jit(")]
    return [next(line for line in lines[i:] if line.startswith("def "))[4:].split("(")[0] for i in decorated]
