"""Train the bundled model: first trunk and head together, then (after unloop.py) the head alone.

    python data/recipe/train.py --work WORK --phase trunk --minutes 75
    python data/recipe/train.py --work WORK --phase head --minutes 14

One process, one thread. The schedule follows elapsed time, not steps, so a busy machine trains on fewer tokens and
still finishes; the state is saved every few minutes, and a killed run resumes where it was (time spent counts, time
between does not). WORK/tokens.npz comes from tokenizer.py; results are WORK/state-<phase>.pt and
WORK/log-<phase>.jsonl. This module does not know about checkpoint formats or mtplab.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from network import Linear, Network, read_config
from optim import descend, make_optimizers
from torch import Tensor

WINDOW, BATCH, SEED = 256, 12, 20
SHARES = {"scripture": 0.28, "python": 0.36, "docs": 0.36}
DEPTH = 3  # of the head-only phase
DEPTH_WEIGHTS = (0.4, 0.33, 0.27)
JOINT_FROM, JOINT_WEIGHT = 0.25, 0.3  # the head joins after a quarter of the trunk phase, at depth 1
TEACHER_TEMPERATURE = {"trunk": 1.0, "head": 0.5}
RATES = {"trunk": (0.02, 4e-3), "head": (0.01, 2e-3)}  # Muon, AdamW
DECAY_FROM = {"trunk": 0.4, "head": 0.2}  # linear decay to zero from here on
WARMUP_STEPS = 20
SAVE_SECONDS, EVALUATE_SECONDS = 180, 300


class Windows:
    """Windows of `size` tokens of one corpus, each epoch in a new order and from a new offset; resumes by position."""

    def __init__(self, tokens: np.ndarray, size: int, seed: int):
        self.tokens, self.size, self.seed = tokens, size, seed
        self.at(0, 0)

    def at(self, epoch: int, index: int) -> None:
        rng = np.random.default_rng((self.seed, epoch))
        self.epoch, self.index = epoch, index
        offset = int(rng.integers(WINDOW))
        self.starts = np.arange(offset, len(self.tokens) - self.size, WINDOW)
        rng.shuffle(self.starts)

    def next(self) -> np.ndarray:
        if self.index == len(self.starts):
            self.at(self.epoch + 1, 0)
        start = self.starts[self.index]
        self.index += 1
        return self.tokens[start : start + self.size].astype(np.int64)


def corpora(work: Path) -> tuple[dict[str, Windows], dict[str, np.ndarray]]:
    """Per corpus of WORK/tokens.npz: windows to train on, and the held-out tokens."""
    arrays = np.load(work / "tokens.npz")
    sources = {n: Windows(arrays[f"train_{n}"], WINDOW + 1 + DEPTH, SEED + i) for i, n in enumerate(SHARES)}
    return sources, {name: arrays[f"held_{name}"] for name in SHARES}


def write_log(path: Path, seconds: float, *, step: int, tokens: int, **entry: object) -> None:
    """One line to the log and to stdout: where training is, what it took, and the entry."""
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    line = {"step": step, "tokens": tokens, "seconds": round(seconds, 1),
            "cpu_seconds_this_process": round(cpu.ru_utime + cpu.ru_stime, 1), **entry}  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(line, flush=True)


class SoftCrossEntropy(torch.autograd.Function):
    """Mean over rows of -sum p log softmax(logits); logits and p [rows, v]. Keeps only the gradient."""

    @staticmethod
    def forward(ctx, logits: Tensor, p: Tensor) -> Tensor:
        logq = logits.log_softmax(-1)
        loss = -(p * logq).sum() / len(p)
        ctx.save_for_backward(logq.exp_().sub_(p).div_(len(p)))
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        (saved,) = ctx.saved_tensors
        return saved * grad, None


def losses(net: Network, ids: Tensor, phase: str, progress: float) -> tuple[Tensor, dict[str, float]]:
    """The loss to descend and its parts, for windows ids [b, WINDOW + 1 + DEPTH]."""
    inputs, parts = ids[:, :WINDOW], {}
    with torch.set_grad_enabled(phase == "trunk"):
        hidden = net.model(inputs)
        logits = net.logits(hidden)
    total = torch.zeros(())
    if phase == "trunk":
        main = F.cross_entropy(logits.flatten(0, 1), ids[:, 1 : WINDOW + 1].flatten())
        parts["main"], total = main.item(), main
    depth = DEPTH if phase == "head" else int(progress >= JOINT_FROM)
    if depth == 0:
        return total, parts
    teacher = (logits.detach() / TEACHER_TEMPERATURE[phase]).softmax(-1)
    embedded = net.model.embed_tokens(ids) if phase == "trunk" else net.model.embed_tokens(ids).detach()
    for j, x in enumerate(net.mtp(hidden, embedded, depth), 1):
        rows = WINDOW - j  # slot t at step j is taught by the trunk at t + j
        loss = SoftCrossEntropy.apply(net.logits(x[:, :rows]).flatten(0, 1), teacher[:, j:].flatten(0, 1))
        parts[f"mtp{j}"] = loss.item()
        total = total + loss * (JOINT_WEIGHT if phase == "trunk" else DEPTH_WEIGHTS[j - 1])
    return total, parts


@torch.no_grad()
def evaluate(net: Network, held: dict[str, np.ndarray], windows: int = 16) -> dict[str, float]:
    """Per corpus, on held-out windows: loss in nats per token, and how often the head's argmax is the trunk's."""
    out = {}
    for name, tokens in held.items():
        starts = np.linspace(0, len(tokens) - WINDOW - 1 - DEPTH, windows).astype(int)
        ids = torch.from_numpy(np.stack([tokens[s : s + WINDOW + 1 + DEPTH] for s in starts]).astype(np.int64))
        hidden = net.model(ids[:, :WINDOW])
        logits = net.logits(hidden)
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1 : WINDOW + 1].flatten())
        out[f"{name}_loss"] = round(loss.item(), 4)
        top = logits.argmax(-1)
        for j, x in enumerate(net.mtp(hidden, net.model.embed_tokens(ids), DEPTH), 1):
            same = net.logits(x[:, : WINDOW - j]).argmax(-1) == top[:, j:]
            out[f"{name}_agree{j}"] = round(same.float().mean().item(), 4)
    return out


def rate(phase: str, progress: float, step: int) -> float:
    """The learning-rate factor: a short warm-up, flat, then linear to zero."""
    decay = min(1.0, (1 - progress) / (1 - DECAY_FROM[phase]))
    return max(decay, 0.0) * min(1.0, (step + 1) / WARMUP_STEPS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--phase", choices=("trunk", "head"), required=True)
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock budget of this phase, in all its runs")
    parser.add_argument("--fp32", action="store_true", help="GEMMs in float32 even where the CPU has BF16 instructions")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    Linear.bf16 = not args.fp32 and torch.cpu._is_avx512_bf16_supported()

    sources, held = corpora(args.work)
    net = Network(read_config())
    state_path, log_path = args.work / f"state-{args.phase}.pt", args.work / f"log-{args.phase}.jsonl"
    if args.phase == "head":
        net.load_state_dict(torch.load(args.work / "state-unloop.pt", weights_only=True)["net"])
        net.model.requires_grad_(False)
    optimizers = make_optimizers({n: p for n, p in net.named_parameters() if p.requires_grad}, *RATES[args.phase])
    step, tokens, spent = 0, 0, 0.0
    if state_path.exists():
        saved = torch.load(state_path, weights_only=True)
        net.load_state_dict(saved["net"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step, tokens, spent = saved["step"], saved["tokens"], saved["spent"]
        for source, place in zip(sources.values(), saved["places"], strict=True):
            source.at(*place)
    elif args.phase == "head":
        for source in sources.values():
            source.at(100, 0)  # an order of its own
    began, last_save, last_eval = time.monotonic() - spent, spent, spent

    def save(progress: float) -> None:
        state = {
            "net": net.state_dict(), "optimizers": [o.state_dict() for o in optimizers], "step": step, "tokens": tokens,
            "spent": time.monotonic() - began, "progress": progress,
            "places": [(s.epoch, s.index) for s in sources.values()],
        }  # fmt: skip
        torch.save(state, state_path.with_suffix(".tmp"))
        os.replace(state_path.with_suffix(".tmp"), state_path)

    def log(**entry: object) -> None:
        write_log(log_path, time.monotonic() - began, step=step, tokens=tokens, **entry)

    log(event="start", bf16=Linear.bf16, minutes=args.minutes, torch=torch.__version__)
    while (progress := (time.monotonic() - began) / (args.minutes * 60)) < 1:
        rows = np.random.default_rng((SEED, step, args.phase == "head")).choice(
            list(SHARES), BATCH, p=list(SHARES.values())
        )
        ids = torch.from_numpy(np.stack([sources[name].next() for name in rows]))
        total, parts = losses(net, ids, args.phase, progress)
        factor = rate(args.phase, progress, step)
        norm = descend(optimizers, net.parameters(), total, factor)
        step, tokens = step + 1, tokens + BATCH * WINDOW
        if step % 25 == 0:
            log(progress=round(progress, 4), rate=round(factor, 4), grad=round(norm, 3),
                **{k: round(v, 4) for k, v in parts.items()})  # fmt: skip
        now = time.monotonic() - began
        if now - last_eval > EVALUATE_SECONDS:
            log(event="evaluate", **evaluate(net, held))
            last_eval = now
        if now - last_save > SAVE_SECONDS:
            save(progress)
            last_save = now
    save(1.0)
    log(event="end", **evaluate(net, held, windows=32))


if __name__ == "__main__":
    main()
