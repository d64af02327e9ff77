"""Between the two phases of train.py: teach the trunk not to fall into loops.

    python data/recipe/unloop.py --work WORK --minutes 8      # state-trunk.pt -> state-unloop.pt

A model this small repeats itself when decoded greedily, and drafts follow a loop with ease: acceptance would say
little. Sequence-level unlikelihood (Welleck et al., "Neural Text Generation with Unlikelihood Training", 2020):
continue prompts from the training text greedily, and lower the probability of every token that completes a 4-gram
seen before in the same text; each such step goes with one step's worth of ordinary training. One process, one thread;
elapsed time decides. This module does not know the network's layers, the head or how text is measured.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from network import HERE, Linear, Network, read_config
from optim import descend, make_optimizers
from torch import Tensor
from train import BATCH, SEED, SHARES, WINDOW, corpora, evaluate, losses, write_log

sys.path.insert(0, str(HERE.parent.parent))

import mtplab
from mtplab.checkpoint import write_safetensors

RATES = (0.004, 8e-4)  # Muon, AdamW
PROMPTS, PROMPT_TOKENS, NEW_TOKENS, REAL = 36, 32, 128, BATCH
GRAM = 4
WEIGHT = 1.0  # of the unlikelihood beside the ordinary loss


def repeated(tokens: list[int], start: int, n: int = GRAM) -> list[bool]:
    """For each token from `start` on: does it complete an n-gram that occurred earlier in `tokens`?"""
    seen, out = set(), []
    for i in range(len(tokens)):
        gram = tuple(tokens[max(0, i - n + 1) : i + 1])
        if i >= start:
            out.append(len(gram) == n and gram in seen)
        seen.add(gram)
    return out


def continuations(net: Network, prompts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Greedy texts [b, PROMPT_TOKENS + NEW_TOKENS], prompts included, and which of their tokens repeat (bool)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text((HERE / "config.json").read_text())
        write_safetensors(Path(folder) / "model.safetensors", {n: x.detach() for n, x in net.state_dict().items()})
        model = mtplab.load_model(folder)
        made = mtplab.generate(model, prompts, depth=0, max_new_tokens=NEW_TOKENS, ignore_eos=True, exact=False)
    texts = [p + t for p, t in zip(prompts, made.tokens, strict=True)]
    marks = [[False] * PROMPT_TOKENS + repeated(t, PROMPT_TOKENS) for t in texts]
    return torch.tensor(texts), torch.tensor(marks)


def unlikelihood(net: Network, texts: Tensor, marks: Tensor) -> Tensor:
    """Mean over all generated tokens of -log(1 - p) at the marked ones."""
    logits = net.logits(net.model(texts[:, :-1]))
    p = logits.log_softmax(-1).gather(-1, texts[:, 1:, None]).squeeze(-1).exp()
    return -((1 - p).clamp_min(1e-4).log() * marks[:, 1:]).sum() / (len(texts) * NEW_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--state", default="state-trunk.pt")
    parser.add_argument("--out", default="state-unloop.pt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    Linear.bf16 = torch.cpu._is_avx512_bf16_supported()
    sources, held = corpora(args.work)
    for source in sources.values():
        source.at(200, 0)
    net = Network(read_config())
    net.load_state_dict(torch.load(args.work / args.state, weights_only=True)["net"])
    optimizers = make_optimizers(dict(net.named_parameters()), *RATES)
    rng, log_path = np.random.default_rng(SEED), args.work / f"log-{Path(args.out).stem.removeprefix('state-')}.jsonl"
    began, step, tokens, queue = time.monotonic(), 0, 0, []

    def log(**entry: object) -> None:
        write_log(log_path, time.monotonic() - began, step=step, tokens=tokens, **entry)

    log(event="start", bf16=Linear.bf16, minutes=args.minutes, torch=torch.__version__)
    while (progress := (time.monotonic() - began) / (args.minutes * 60)) < 1:
        if not queue:
            names = rng.choice(list(SHARES), PROMPTS, p=list(SHARES.values()))
            texts, marks = continuations(net, [sources[n].next()[:PROMPT_TOKENS].tolist() for n in names])
            queue = list(zip(texts.split(BATCH), marks.split(BATCH), strict=True))
            log(progress=round(progress, 3), repeating=round(marks[:, PROMPT_TOKENS:].float().mean().item(), 4))
        names = rng.choice(list(SHARES), REAL, p=list(SHARES.values()))
        ids = torch.from_numpy(np.stack([sources[n].next() for n in names]))
        total, parts = losses(net, ids, "trunk", 1.0)
        against = unlikelihood(net, *queue.pop())
        factor = min(1.0, (step + 1) / 10) * (1 - progress)
        descend(optimizers, net.parameters(), total + WEIGHT * against, factor)
        step, tokens = step + 1, tokens + REAL * WINDOW
        if step % 10 == 0:
            log(**{k: round(v, 4) for k, v in parts.items()}, against=round(against.item(), 4))
    torch.save({"net": net.state_dict(), "step": step, "tokens": tokens}, args.work / args.out)
    log(event="end", **evaluate(net, held, windows=32))


if __name__ == "__main__":
    main()
