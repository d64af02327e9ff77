"""Where another engine's greedy text parts from mtplab's, how near the two tokens were to a tie.

    python data/recipe/peers/partings.py data/tiny-qwen3_5 > data/recipe/results/partings.json

For every prompt whose depth-0 text differs between engines of like arithmetic: the logit margin, in float32 and in the
recipe's own network, between the likeliest token and the other one that the engines chose among.
This script does not run the other engines: it reads what they wrote.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent.parent)]

from network import Network, read_config  # noqa: E402

import mtplab  # noqa: E402

PAIRS = (("llama_cpp", "mtplab_float32"), ("vllm_cpu", "mtplab_bfloat16"))


def texts(engine: str) -> dict[str, str]:
    """Prompt -> text at depth 0."""
    lines = (HERE.parent / "results" / f"{engine}.jsonl").read_text().splitlines()
    return {row["prompt"]: row["text"] for row in map(json.loads, lines) if row["depth"] == 0}


@torch.inference_mode()
def main() -> None:
    torch.set_num_threads(1)
    checkpoint, net = mtplab.open_checkpoint(sys.argv[1]), Network(read_config())
    net.load_state_dict({name: checkpoint.dequantize(name) for name in checkpoint.tensors})
    found = []
    for theirs, ours in PAIRS:
        model = mtplab.load_model(sys.argv[1], dtype=ours.removeprefix("mtplab_"))
        for prompt, text in texts(theirs).items():
            out = mtplab.generate(model, prompt, depth=0, max_new_tokens=256).tokens[0]
            if model.decode(out) == text:
                continue
            common = max(k for k in range(len(out)) if text.startswith(model.decode(out[:k])))
            logits = net.logits(net.model(torch.tensor([model.encode(prompt) + out[:common]])))[0, -1]
            likeliest = logits.topk(2)
            found.append({
                "engine": theirs, "prompt": prompt, "token": common,
                "candidates": [model.decode([i]) for i in likeliest.indices.tolist()],
                "margin": round((likeliest.values[0] - likeliest.values[1]).item(), 5),
            })  # fmt: skip
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
