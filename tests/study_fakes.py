"""A checkpoint, a model and a runner of a few lines each, so that the study is tested without torch.

The fake runner is deterministic and follows the real one's rules: greedy output does not depend on the depth,
draft j of slot t is right when (t + j) % 4 != 0, and what the budget cuts off is not accepted. Every load and
every run leaves a line in `calls.log` in the checkpoint's folder, also from another process.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

NAMES = ("model.layers.0.mlp.up_proj", "model.layers.0.mlp.down_proj", "lm_head", "mtp.fc")
PARTS = {"lm_head": "head", "mtp.fc": "draft"}


@dataclass
class FakeCheckpoint:
    path: Path
    tensors: dict
    quantization: object = None
    plans: list = field(default_factory=list)
    config: dict = field(default_factory=lambda: {"model_type": "fake"})

    @property
    def files(self):
        return SimpleNamespace(folder=self.path)

    def plan(self, exclude=None, draft_exclude=None, model_format=None):
        self.plans.append((exclude, draft_exclude, model_format))
        modules = []
        for name in NAMES:
            globs = draft_exclude if name.startswith("mtp") and draft_exclude is not None else exclude
            globs = {"published": ["lm_head", "mtp.fc"], "none": [], None: []}.get(
                globs if not isinstance(globs, list) else "", globs
            )
            fp8 = model_format == "fp8" and not any(fnmatch(name, glob) for glob in globs)
            modules.append(
                SimpleNamespace(
                    name=name,
                    part=PARTS.get(name, "target"),
                    kind="linear",
                    multiplies=True,
                    weight="fp8" if fp8 else "bf16",
                    activation="fp8" if fp8 else "none",
                    shape=(4, 4),
                )
            )
        return SimpleNamespace(modules=tuple(modules))


def make_checkpoint(folder: Path, weights: bytes = b"w" * 64) -> FakeCheckpoint:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("config.json", b'{"model_type": "fake"}'), ("model.safetensors", weights)):
        # another process may be hashing the file: one that is right already is not touched
        if not (folder / name).exists() or (folder / name).read_bytes() != content:
            (folder / name).write_bytes(content)
    info = SimpleNamespace(
        dtype="BF16", shape=(len(weights) // 2,), file=folder / "model.safetensors", start=0, end=len(weights)
    )
    return FakeCheckpoint(folder, {"w": info})


def log(folder, line: str) -> None:
    with open(Path(folder) / "calls.log", "a") as file:
        file.write(line + "\n")


def calls(folder, kind: str) -> list[str]:
    path = Path(folder) / "calls.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if line.startswith(kind)]


class FakeModel:
    device = "cpu"

    def __init__(self, path, **settings):
        self.path = path
        self.settings = settings
        sizes = {None: 4000, "draft": 1000}
        self.plan = SimpleNamespace(loaded_nbytes=lambda part=None: sizes[part])

    def kv_bytes_per_token(self, policy, part):
        return {"none": 256, "int8": 136}.get(policy, 128) * {"target": 2, "draft": 1}[part]


def load_model(path, **settings):
    log(path, f"load {settings['exclude']} {settings['model_format']}")
    return FakeModel(path, **settings)


@dataclass
class FakeStats:
    """What a row takes of `AcceptanceStats`, which cannot be imported without torch; every run here has rounds."""

    rounds: int
    drafted: int
    accepted: int
    emitted: int
    at: list  # rounds that accepted drafts 1…j

    def __add__(self, other):
        mine, theirs = vars(self).values(), vars(other).values()
        *counts, at = zip(mine, theirs, strict=True)
        return FakeStats(*map(sum, counts), [sum(pair) for pair in zip(*at, strict=True)])

    @property
    def acceptance_length(self):
        return self.emitted / self.rounds

    @property
    def per_position(self):
        return [count / self.rounds for count in self.at]

    @property
    def conditional(self):
        return [self.at[j] / ([self.rounds, *self.at][j]) for j in range(len(self.at))]


class FakeCancelled(Exception):
    pass


def generate(model, prompts, depth, max_new_tokens, quant_policy, on_round=None, cancel=None, temperature=0.0, **rest):
    log(model.path, f"generate {quant_policy} depth {depth} pid {os.getpid()}")
    time.sleep(float(os.environ.get("FAKE_SECONDS", "0")))
    outputs, stats = [], []
    for prompt in prompts:
        tokens = [(sum(prompt) * 7 + i * i + int(temperature * 10) * depth) % 97 for i in range(max_new_tokens)]
        place, rounds, accepted, per_pos = 1, 0, 0, [0] * depth
        while place < max_new_tokens:
            if cancel is not None and cancel.is_set():
                raise FakeCancelled
            right = 0
            while right < depth and (place + right + 1) % 4:
                right += 1
            right = min(right, max_new_tokens - place - 1)
            for j in range(right):
                per_pos[j] += 1
            rounds, accepted, place = rounds + 1, accepted + right, place + right + 1
            if on_round is not None:
                on_round(SimpleNamespace(tokens_done=place, tokens_total=max_new_tokens, rounds=rounds))
        outputs.append(tokens)
        stats.append(FakeStats(rounds, rounds * depth, accepted, max_new_tokens - 1, per_pos))
    return SimpleNamespace(
        tokens=outputs,
        per_prompt=stats,
        decode_seconds=0.25,
        tokens_per_second=180.0,
        memory={"state_bytes": 4096},
        settings={"threads": 1},
    )


def broken_at_int8(model, prompts, quant_policy, **rest):
    """Fails like a library would: another family of errors, two lines, the first one empty."""
    if quant_policy == "int8":
        raise RuntimeError("\nno kernel for int8\n  in some file")
    return generate(model, prompts, quant_policy=quant_policy, **rest)
