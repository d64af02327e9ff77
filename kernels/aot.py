"""Compile kernels for GPUs that are not there, and read the machine code.

Runs in a process without torch and without TRITON_INTERPRET, whose patches would break it; `python -m
mtplab.kernels.aot` is that process. Prints one JSON object a line. Knows no kernel; `variants.py` finds them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mtplab.kernels.targets import TARGETS, Target
from mtplab.kernels.variants import Variant, kernel_modules

__all__ = ["Facts", "compile_variant", "find_variants"]


@dataclass(frozen=True)
class Facts:
    """What became of one variant on one target. `error` is the compiler's message where it failed.

    registers: per thread (VGPRs on AMD); spills: spilled registers, or bytes of stack on NVIDIA, either of which is
    memory traffic nobody asked for; shared: bytes per block; mma: matrix instructions found, with their number.
    """

    kernel: str
    label: str
    target: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    mma: dict[str, int] | None = None
    error: str | None = None

    def faults(self, variant: Variant, target: Target) -> list[str]:
        """What of it may not be."""
        if self.error is not None:
            return [f"does not compile: {self.error}"]
        found = []
        if self.spills:
            found.append(f"{self.spills} spilled registers or bytes of stack, expected none")
        if self.shared > target.shared_limit:
            found.append(f"{self.shared} bytes of shared memory, the limit is {target.shared_limit}")
        if variant.fp8_mma and not any(re.search(target.fp8_mma, name) for name in self.mma or {}):
            found.append(f"no FP8 matrix instruction, found {self.mma or 'none at all'}")
        return found


def find_variants(target: Target, modules: list[str] | None = None) -> list[Variant]:
    """All variants of the kernels beside this file that can be chosen on the target."""
    found = []
    for name in modules or kernel_modules():
        found += importlib.import_module(f"mtplab.kernels.{name}").variants(target)
    return found


def compile_variant(variant: Variant, target: Target) -> Facts:
    """Compile, disassemble and count."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = variant.kernel
    names = kernel.arg_names
    signature = {name: variant.signature.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): told for name, told in variant.attributes(target).items()}
    constants = {(names.index(name),): value for name, value in variant.constants.items()}
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, **variant.options}
    where = {"kernel": kernel.__name__, "label": variant.label, "target": target.name}
    try:
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget(target.backend, target.arch, target.warp), options=options)
        read = _read_nvidia if target.backend == "cuda" else _read_amd
        registers, spills, code = read(compiled)
    except Exception as error:  # a compiler's failure is the finding
        return Facts(**where, error=f"{type(error).__name__}: {str(error).strip()[:300]}")
    mma: dict[str, int] = {}
    for match in re.finditer(target.any_mma, code):
        mma[match.group(0)] = mma.get(match.group(0), 0) + 1
    return Facts(**where, registers=registers, spills=spills, shared=compiled.metadata.shared, mma=mma)


def _read_nvidia(compiled: Any) -> tuple[int, int, str]:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([tools / "nvdisasm", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (max(map(int, re.findall(rf"{key}:(\d+)", usage))) for key in ("REG", "STACK"))
    local = len(re.findall(r"\b(?:LDL|STL)\b", code))
    return registers, stack + local, code


def _read_amd(compiled: Any) -> tuple[int, int, str]:
    code = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return sum(map(int, re.findall(rf"\.{name}:\s+(\d+)", code)))

    spilled = field("vgpr_spill_count") + field("sgpr_spill_count") + field("private_segment_fixed_size")
    return field("vgpr_count"), spilled, code


def _one(job: tuple[str, str, int]) -> dict[str, Any]:
    module, target_name, index = job
    target = TARGETS[target_name]
    variant = find_variants(target, [module])[index]
    facts = compile_variant(variant, target)
    return asdict(facts) | {"module": module, "quick": variant.quick, "faults": facts.faults(variant, target)}


def run(targets: list[str], modules: list[str], quick: bool, workers: int) -> Iterator[dict[str, Any]]:
    """Facts and faults of every variant, as plain data."""
    jobs = [
        (module, name, index)
        for module in modules
        for name in targets
        for index, variant in enumerate(find_variants(TARGETS[name], [module]))
        if variant.quick or not quick
    ]
    if workers == 1:
        yield from map(_one, jobs)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(_one, jobs)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 where something may not be."""
    parser = argparse.ArgumentParser(prog="python -m mtplab.kernels.aot", description=__doc__.splitlines()[0])
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="all by default; may be repeated")
    parser.add_argument("--module", action="append", choices=kernel_modules(), help="all by default; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one variant for each kernel and target")
    parser.add_argument("--workers", type=int, default=1)
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET is set: kernels cannot be compiled in a process that interprets them", file=sys.stderr)
        return 2
    faults = 0
    for row in run(given.target or list(TARGETS), given.module or kernel_modules(), given.quick, given.workers):
        print(json.dumps(row), flush=True)
        faults += bool(row["faults"])
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
