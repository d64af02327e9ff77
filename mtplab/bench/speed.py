"""Greedy decoding and loading of the bundled model, against transformers and safetensors on the same weights.

Correctness first: a contestant whose tokens are not transformers' own gets no time, unless it parted from them at a
near-tie, which is named. Knows nothing of how the report is printed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from mtplab.bench import peer
from mtplab.bench.timing import Timing, interleave
from mtplab.checkpoint import Checkpoint, open_checkpoint
from mtplab.decode import generate
from mtplab.decode.peek import next_logits
from mtplab.errors import ConfigError
from mtplab.kernels.fp8_reference import dequantize_block
from mtplab.models import Model, load_model

PEER = "transformers, batch 1"
# logits closer than this are a tie that another order of summation decides
NEAR_TIE = 1e-3


@dataclass(frozen=True)
class Line:
    """One line of the report: a contestant, its rate, its ratio to the peer, and the goal it is held to, if any."""

    name: str
    timing: Timing | None
    ratio: float | None
    goal: float | None
    note: str = ""
    at_most: bool = False  # the goal is an upper bound: the ratio is of times, not of rates

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty without one."""
        if self.goal is None or self.ratio is None:
            return ""
        met = self.ratio <= self.goal if self.at_most else self.ratio >= self.goal
        return "met" if met else "not met"


def all_prompts(folder: Path) -> list[str]:
    """Every prompt of a folder, taken from the domains in turn. Raises ConfigError where there are none."""
    files = [f.read_text(encoding="utf-8").splitlines() for f in sorted(folder.glob("*.jsonl"))]
    rows = [json.loads(line)["text"] for lines in zip_longest(*files) for line in lines if line is not None]
    if not rows:
        raise ConfigError(f"{folder}: expected *.jsonl files of prompts, found none")
    return rows


def prompts(folder: Path, n: int) -> list[str]:
    """The first n of `all_prompts`. Raises ConfigError where there are not as many."""
    rows = all_prompts(folder)
    if n > len(rows):
        raise ConfigError(f"{n} prompts were asked for, {folder} has {len(rows)}")
    return rows[:n]


def parting(model: Model, ids: list[int], expected: list[int], got: list[int]) -> str | None:
    """None where the outputs agree; a note where they part at a near-tie; raises ValueError where they do not."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b), None)
    if at is None:
        return None
    logits = next_logits(model, ids + expected[:at])
    margin = float(logits[expected[at]] - logits[got[at]])
    if not abs(margin) <= NEAR_TIE:  # a NaN is no tie
        raise ValueError(f"token {at} is {got[at]}, expected {expected[at]}; their logits differ by {margin:.4f}")
    # what follows is another text: what the model itself likes best after its own tokens, each by one pass
    for i in range(at, len(got)):
        logits = next_logits(model, ids + got[:i])
        behind = float(logits.max() - logits[got[i]])
        if not behind <= NEAR_TIE:
            raise ValueError(
                f"token {i} is {got[i]}, after parting at token {at}; the likeliest leads it by {behind:.4f}"
            )
    return f"parts at token {at}, a near-tie of {margin:+.1e}"


def decoding(path: Path, texts: list[str], tokens: int, rounds: int, depths: range, compiled: bool) -> list[Line]:
    """Batch 1 at each depth, eager, exact and compiled, and all prompts at once, against transformers at batch 1."""
    model = load_model(path)
    reference = peer.load_transformers(model.checkpoint)
    first = model.encode(texts[0])
    settings: dict[str, Any] = {"max_new_tokens": tokens, "ignore_eos": True}
    runs: dict[str, tuple[list, dict]] = {}
    for depth in depths:
        runs[f"batch 1, depth {depth}"] = ([first], {"depth": depth, "exact": False})
        if compiled:
            runs[f"batch 1, depth {depth}, compiled"] = ([first], {"depth": depth, "compile": True})
    runs["batch 1, depth 0, exact"] = ([first], {"depth": 0, "exact": True})
    together = [model.encode(t) for t in texts]
    many = f"{len(texts)} prompts at once"
    runs[many] = (together, {"depth": 0, "exact": False})
    runs[f"{many}, exact"] = (together, {"depth": 0, "exact": True})

    expected = [peer.greedy(reference, ids, tokens) for ids in together]
    notes, contestants = {}, {PEER: (tokens, lambda: peer.greedy(reference, first, tokens))}
    for name, (ids, how) in runs.items():
        out = generate(model, ids, **how, **settings).tokens
        try:
            parted = [parting(model, *row) for row in zip(ids, expected, out, strict=False)]
        except ValueError as wrong:
            notes[name] = f"wrong, so not timed: {wrong}"
            continue
        notes[name] = "; ".join(f"prompt {i} {note}" for i, note in enumerate(parted) if note)
        contestants[name] = (
            len(ids) * tokens,
            lambda ids=ids, how=how: generate(model, ids, **how, **settings),
        )
    timings = interleave(contestants, rounds)
    base = timings[PEER]
    goals = {"batch 1, depth 0": 2.0, "batch 1, depth 0, compiled": 4.0, many: 20.0, f"{many}, exact": 20.0}
    lines = [Line(PEER, base, 1.0, None)]
    for name in runs:
        timing = timings.get(name)
        ratio = timing.rate / base.rate if timing else None
        lines.append(Line(name, timing, ratio, goals.get(name), notes[name]))
    timed = [line for line in lines[1:] if line.timing and line.name.startswith("batch 1")]
    if timed:
        best = max(timed, key=lambda line: line.ratio)
        lines.append(Line(f"best at batch 1: {best.name}", best.timing, best.ratio, 5.0))
    return lines


def loading(path: Path, rounds: int) -> list[Line]:
    """Every weight of an FP8 checkpoint as float32, against safetensors reading the same bytes plus dequantising.

    Ratios are times here: how many times as long as the baseline; the goal is at most 1.5.
    """

    def ours() -> None:
        checkpoint = open_checkpoint(path)
        checkpoint.plan()
        for name in weights:
            checkpoint.dequantize(name)

    def theirs(dequantise) -> None:
        files = sorted({str(checkpoint.tensors[n].file) for n in checkpoint.tensors})
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if name in weights:
                        value = opened.get_tensor(name)
                        scale = f"{name}_scale_inv"
                        dequantise(value, opened.get_tensor(scale) if scale in checkpoint.tensors else None)

    def with_ours(value: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return value.float() if scale is None else dequantize_block(value, scale)

    def with_torch(value: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is None:
            return value.float()
        n, k = value.shape
        spread = scale.float().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        return value.float().mul_(spread)

    checkpoint: Checkpoint = open_checkpoint(path)
    weights = {n for n in checkpoint.tensors if not n.endswith("_scale_inv")}
    size = sum(info.nbytes for info in checkpoint.tensors.values())
    names = ("open, plan and dequantise", "safetensors + torch's dequantisation", "safetensors + dequantize_block")
    timings = interleave(
        {
            names[0]: (size, ours),
            names[1]: (size, lambda: theirs(with_torch)),
            names[2]: (size, lambda: theirs(with_ours)),
        },
        rounds,
    )
    mine = timings[names[0]]
    return [Line(names[0], mine, None, None)] + [
        Line(name, timings[name], mine.median / timings[name].median, 1.5, at_most=True) for name in names[1:]
    ]
