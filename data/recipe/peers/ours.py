"""Accepted drafts of the bundled model in mtplab, depth by depth, on the prompts that the other engines are given.

    python data/recipe/peers/ours.py data/tiny-qwen3_5 [bfloat16]

Greedy, one thread, 256 tokens, float32 unless told otherwise; one JSON line per prompt and depth.
This script does not know the other engines.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent.parent))

import mtplab  # noqa: E402

PROMPTS = json.loads((HERE / "prompts.json").read_text())
TOKENS = 256


def main() -> None:
    torch.set_num_threads(1)
    dtype = sys.argv[2] if len(sys.argv) > 2 else "float32"
    model = mtplab.load_model(sys.argv[1], dtype=dtype)
    mtplab.generate(model, PROMPTS[0]["text"], depth=1, max_new_tokens=8)
    for depth in range(5):
        for prompt in PROMPTS:
            began = time.perf_counter()
            made = mtplab.generate(model, prompt["text"], depth=depth, max_new_tokens=TOKENS)
            seconds, s = time.perf_counter() - began, made.stats
            print(json.dumps({"engine": f"mtplab {dtype}", "prompt": prompt["text"], "domain": prompt["domain"],
                              "depth": depth, "tokens": len(made.tokens[0]), "rounds": s.rounds, "drafted": s.drafted,
                              "accepted": s.accepted, "accepted_per_pos": list(s.accepted_per_position),
                              "seconds": round(seconds, 3), "text": made.texts[0]}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
