"""A checkpoint of DeepSeek-V3's size: how long opening and planning take, how much memory, and what they find."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sparse_checkpoints import DENSE, EXPERTS, LAYERS, write_deepseek_v3

SECONDS, MEGABYTES = 5.0, 300

CODE = """
import json, sys, time
begun = time.perf_counter()
from mtplab.checkpoint import open_checkpoint
ckpt = open_checkpoint(sys.argv[1])
problems, plan = ckpt.problems, ckpt.plan()
# ru_maxrss would count what the process that started this one held
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]
print(json.dumps({
    "wall": time.perf_counter() - begun, "cpu": time.process_time(), "tensors": len(ckpt.tensors),
    "megabytes": int(peak) / 1024, "torch": "torch" in sys.modules,
    "problems": len(problems), "warnings": plan.warnings, "modules": len(plan.modules),
    "fp8": sum(module.weight == "fp8" for module in plan.modules), "bytes": plan.nbytes(),
    "draft": sum(module.part == "draft" for module in plan.modules),
}))
"""


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.parametrize("listed", [False, True], ids=["no list", "a list and a pattern"])
def test_a_checkpoint_of_91_000_tensors_opens_and_plans_in_seconds(tmp_path: Path, repo: Path, listed: bool) -> None:
    entries = [f"model.layers.{i}.mlp.gate" for i in range(DENSE, LAYERS + 1)] + ["lm_head", r"re:.*\.eh_proj$"]
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
                    "modules_to_not_convert": entries}  # fmt: skip
    count = write_deepseek_v3(tmp_path, config={"quantization_config": quantization} if listed else None)
    assert count > 91_000
    ran = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], cwd=repo, timeout=120, capture_output=True)
    assert ran.returncode == 0, ran.stderr.decode()
    found = json.loads(ran.stdout)
    assert not found["torch"] and found["problems"] == 0 and found["warnings"] == []
    assert found["tensors"] == count
    sparse = LAYERS + 1 - DENSE
    assert found["fp8"] == (LAYERS + 1) * 5 + DENSE * 3 + sparse * 3 * (EXPERTS + 1)
    assert found["draft"] == 6 + 4 + 5 + 2 + 3 * (EXPERTS + 1)
    # the processor's time, since a loaded machine stretches the other
    assert found["cpu"] < SECONDS, found
    assert found["megabytes"] < MEGABYTES, found
