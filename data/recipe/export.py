"""Write the trained state as the two bundled checkpoints: BF16, and block FP8 in the layout of Qwen's releases.

    python data/recipe/export.py --work WORK --state state-head.pt --out data

Writes OUT/tiny-qwen3_5 and OUT/tiny-qwen3_5-fp8, replacing what is there. The FP8 one is made by
`quantize_checkpoint` from the BF16 one. Everything is BF16 except `A_log` and the gated norm, which Qwen's
releases keep in F32. This module does not know about training.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from tokenizer import tokenizer_config  # noqa: E402

from mtplab.checkpoint import write_safetensors  # noqa: E402
from mtplab.checkpoint.convert import quantize_checkpoint  # noqa: E402

GENERATION = {"eos_token_id": 0, "pad_token_id": 0, "do_sample": False}


def stored_dtype(name: str) -> torch.dtype:
    """F32 for A_log and the gated norm, BF16 for everything else."""
    return torch.float32 if name.endswith((".A_log", ".linear_attn.norm.weight")) else torch.bfloat16


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export(state: dict[str, torch.Tensor], tokenizer: Path, target: Path) -> None:
    """Write one BF16 checkpoint folder."""
    target.mkdir()
    tensors = {name: x.detach().to(stored_dtype(name)).contiguous() for name, x in state.items()}
    write_safetensors(target / "model.safetensors", tensors, {"format": "pt"})
    config = json.loads((HERE / "config.json").read_text())
    write_json(target / "config.json", config)
    write_json(target / "generation_config.json", GENERATION)
    write_json(target / "tokenizer_config.json", tokenizer_config(config["max_position_embeddings"]))
    shutil.copyfile(tokenizer, target / "tokenizer.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--state", default="state-head.pt")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    saved = torch.load(args.work / args.state, weights_only=True)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out) as scratch:
        made = {"tiny-qwen3_5": Path(scratch) / "bf16", "tiny-qwen3_5-fp8": Path(scratch) / "fp8"}
        export(saved["net"], args.work / "tokenizer.json", made["tiny-qwen3_5"])
        quantize_checkpoint(made["tiny-qwen3_5"], made["tiny-qwen3_5-fp8"])
        for name, folder in made.items():
            shutil.rmtree(args.out / name, ignore_errors=True)
            folder.rename(args.out / name)
            size = sum(f.stat().st_size for f in (args.out / name).iterdir())
            print(f"{args.out / name}: {size / 1e6:.2f} MB, step {saved['step']}, {saved['tokens']} tokens")


if __name__ == "__main__":
    main()
