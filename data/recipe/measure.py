"""Measure the bundled model: held-out loss, acceptance by depth and temperature, repetition, what FP8 does to it.

    python data/recipe/measure.py --work WORK --data data       # writes data/recipe/results/measured.json

Prompts are 32-token cuts of held-out documents (named in the output by source and token offset) and the prompts of
data/prompts. Everything runs through `mtplab.generate`. This module does not know about training or other engines.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))

from corpus import CORPORA, load  # noqa: E402
from network import Network, read_config  # noqa: E402
from train import WINDOW  # noqa: E402

import mtplab  # noqa: E402
from mtplab.checkpoint.planted import plant  # noqa: E402

PROMPTS, PROMPT_TOKENS, NEW_TOKENS, DEPTH = 16, 32, 160, 4
TEMPERATURES = (0.0, 0.5, 0.7, 1.0)


def held_out_prompts(work: Path, model: mtplab.models.Model) -> dict[str, list[dict]]:
    """Per corpus, cuts of PROMPT_TOKENS tokens from a third into held-out documents: source, offset and ids."""
    out: dict[str, list[dict]] = {}
    for corpus in CORPORA:
        held = [d for d in load(work) if d.corpus == corpus and d.held_out and len(d.text) > 1500]
        places = [(held[i % len(held)], (i // len(held) + 1) / 3) for i in range(PROMPTS)]
        out[corpus] = []
        for document, share in places:
            ids = model.encode(document.text)
            start = int(len(ids) * share)
            cut = {"source": document.source, "offset": start, "ids": ids[start : start + PROMPT_TOKENS]}
            out[corpus].append(cut)
    return out


def own_prompts(folder: Path) -> dict[str, list[str]]:
    """Per domain, the texts of data/prompts."""
    files = sorted(folder.glob("*.jsonl"))
    return {f.stem: [json.loads(line)["text"] for line in f.read_text().splitlines()] for f in files}


def distinct(texts: list[list[int]], n: int = 4) -> dict[str, float]:
    """Share of distinct n-grams, over all texts together and as the mean of the texts' own shares."""
    grams = [[tuple(t[i : i + n]) for i in range(len(t) - n + 1)] for t in texts]
    grams = [g for g in grams if g]
    together = {x for g in grams for x in g}
    return {
        "together": round(len(together) / sum(map(len, grams)), 3),
        "each": round(sum(len(set(g)) / len(g) for g in grams) / len(grams), 3),
    }


def run(model: mtplab.models.Model, prompts: list, **settings) -> dict:
    """One generation: acceptance by position, acceptance length, repetition."""
    made = mtplab.generate(model, prompts, depth=DEPTH, max_new_tokens=NEW_TOKENS, seed=1, **settings)
    s = made.stats
    return {
        "tokens": sum(map(len, made.tokens)), "rounds": s.rounds, "accepted": s.accepted,
        "per_position": [round(x, 3) for x in s.per_position], "acceptance_length": round(s.acceptance_length, 3),
        "distinct_4_grams": distinct(made.tokens),
    }  # fmt: skip


@torch.no_grad()
def held_out_loss(work: Path, path: Path) -> dict[str, dict[str, float]]:
    """Nats per token and bits per byte over 64 windows of each held-out corpus, in the training form."""
    checkpoint, net = mtplab.open_checkpoint(path), Network(read_config())
    net.load_state_dict({name: checkpoint.dequantize(name) for name in checkpoint.tensors})
    arrays, out = np.load(work / "tokens.npz"), {}
    for corpus in CORPORA:
        tokens = arrays[f"held_{corpus}"].astype(np.int64)
        size = sum(len(d.text.encode()) for d in load(work) if d.corpus == corpus and d.held_out)
        starts = np.linspace(0, len(tokens) - WINDOW - 1, 64).astype(int)
        ids = torch.from_numpy(np.stack([tokens[s : s + WINDOW + 1] for s in starts]))
        loss = torch.nn.functional.cross_entropy(
            net.logits(net.model(ids[:, :-1])).flatten(0, 1), ids[:, 1:].flatten()
        ).item()
        bits = loss / np.log(2) * len(tokens) / size
        out[corpus] = {"nats_per_token": round(loss, 3), "bits_per_byte": round(bits, 3)}
    return out


def planted_answer(path: Path, prompts: list) -> dict[str, dict]:
    """Greedy acceptance of the planted variant: as it is, in W8A8 FP8 with mtp.fc quantised, and with it excluded."""
    with tempfile.TemporaryDirectory() as folder:
        made = plant(path, Path(folder) / "planted")
        settings = {
            "float": {},
            "fp8, mtp.fc quantised": {"model_format": "fp8", "exclude": "none"},
            "fp8, mtp.fc excluded": {"model_format": "fp8", "exclude": ["mtp.fc"]},
        }
        return {label: run(mtplab.load_model(made.path, **s), prompts) for label, s in settings.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "measured.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    path = args.data / "tiny-qwen3_5"
    model = mtplab.load_model(path)
    held, own = held_out_prompts(args.work, model), own_prompts(args.data / "prompts")
    ids = {corpus: [p["ids"] for p in cuts] for corpus, cuts in held.items()}
    result = {
        "settings": {"prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS, "depth": DEPTH},
        "loss": held_out_loss(args.work, path),
        "held_out": {c: {str(t): run(model, ids[c], temperature=t) for t in TEMPERATURES} for c in CORPORA},
        "prompts": {d: {str(t): run(model, own[d], temperature=t) for t in (0.0, 0.7)} for d in own},
        "pre_norm": {c: run(model, ids[c], target_hidden="pre_norm", draft_hidden="pre_norm") for c in CORPORA},
    }
    fp8 = mtplab.load_model(args.data / "tiny-qwen3_5-fp8")
    result["fp8"] = {c: run(fp8, ids[c]) for c in CORPORA}
    result["planted"] = planted_answer(path, [x for c in CORPORA for x in ids[c][:8]])
    result["sources"] = {c: [f"{p['source']} @ {p['offset']}" for p in cuts] for c, cuts in held.items()}
    result["seconds"] = round(time.perf_counter() - began, 1)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "sources"}, indent=1))


if __name__ == "__main__":
    main()
