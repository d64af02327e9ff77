"""Rows, plans and sweeps that look like real ones, for tests of what is drawn from them."""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace

from mtplab.study.row import ResultRow

QUALITY = {"none": 0.82, "int8": 0.81, "int4": 0.7, "fp8_e4m3": 0.8, "fp8_e5m2": 0.78}

_TENTH_LESS = ("tokens", "acceptance_length")


def row(depth=2, policy="none", exclude="published", temperature=0.0, rounds=200, **changes) -> ResultRow:
    """A consistent row: a draft is right with the policy's chance, whatever came before."""
    share = QUALITY.get(policy, 0.8) - 0.2 * temperature - (0.1 if exclude == "none" else 0.0)
    accepted_at = [round(rounds * share**j) for j in range(1, depth + 1)]
    accepted = sum(accepted_at)
    part = {
        "tokens": rounds + accepted,
        "rounds": rounds,
        "drafted": rounds * depth,
        "accepted": accepted,
        "acceptance_length": (rounds + accepted) / rounds,
        "per_position": [count / rounds for count in accepted_at],
    }
    before = [rounds, *accepted_at]
    half = {**part, **_by_prompt(part, f"{policy} {exclude}")}
    python = {key: value * 0.9 if depth and key in _TENTH_LESS else value for key, value in part.items()}
    fields = {
        "schema": 1,
        "point": f"{exclude}-{policy}-{temperature}",
        "method": "run",
        "checkpoint": "tiny",
        "depth": depth,
        "temperature": temperature,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "quant_policy": policy,
        "draft_quant_policy": policy,
        "exclude_label": exclude,
        "exclude": None,
        "draft_exclude": None,
        "model_format": "fp8",
        "prompt_set": "prompts",
        "n_prompts": 4,
        "max_new_tokens": 32,
        **part,
        "conditional": [now / then if then else None for then, now in itertools.pairwise(before)],
        "by_domain": {"letters": half, "python": {**python, **_by_prompt(python, f"{policy} {exclude} python")}},
        "target_weight_bytes": 2_600_000 if exclude != "*" else 5_200_000,
        "draft_weight_bytes": 880_000,
        "kv_bytes_per_token": {"none": 256, "int8": 136, "int4": 72}.get(policy, 128),
        "draft_kv_bytes_per_token": 128,
        "state_bytes": 4096,
        "seconds": 1.5,
        "tokens_per_second": (rounds + accepted) / 1.5,
        "provenance": {"versions": {"torch": "2.13"}, "config": {"seed": 0, "quant_policy": policy}},
    }
    return ResultRow.model_validate({**fields, **changes})


def _by_prompt(part, name, prompts=8):
    """The counts spread over prompts that differ, by the less the more rounds there are."""
    draw = random.Random(name)
    width = 2 / part["rounds"] ** 0.5 if part["accepted"] else 0
    shares = [1 + draw.uniform(-width, width) for _ in range(prompts)]
    rounds = [part["rounds"] / prompts] * prompts
    tokens = [part["tokens"] * share / sum(shares) for share in shares]
    accepted = [part["accepted"] / prompts] * prompts
    return {"prompt_rounds": rounds, "prompt_tokens": tokens, "prompt_accepted": accepted}


def counted(tokens, rounds, depth=2, **changes) -> ResultRow:
    """A row that holds just these counts, one of each a prompt, in one domain."""
    total, n = sum(tokens), sum(rounds)
    part = {
        "tokens": total,
        "rounds": n,
        "drafted": n * depth,
        "accepted": total - n,
        "acceptance_length": total / n,
        "per_position": [(total - n) / (n * depth)] * depth,
    }
    each = {
        "prompt_tokens": list(tokens),
        "prompt_rounds": list(rounds),
        "prompt_accepted": [a - b for a, b in zip(tokens, rounds, strict=True)],
    }
    changes = {"n_prompts": len(tokens), "by_domain": {"all": {**part, **each}}, **changes}
    return row(depth, **{**part, **changes})


def write_results(folder, study) -> Path:
    """A results folder with these rows, one file for each of their points."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    points = {}
    for each in study:
        points.setdefault(each.point, []).append(each)
    for name, found in points.items():
        config = {"point": name}
        point = hashlib.sha256(json.dumps(config, separators=(",", ":")).encode()).hexdigest()
        lines = [json.loads(each.model_copy(update={"point": point}).to_json()) for each in found]
        content = {"schema": 1, "hash": point, "config": config, "rows": lines}
        (folder / f"{point}.json").write_text(json.dumps(content))
    return folder


def rows(depths=range(5), policies=("none", "int8", "int4"), excludes=("published", "*"), temperatures=(0.0,)):
    """Every combination, in the order of a sweep."""
    return [
        row(depth, policy, exclude, temperature)
        for exclude, temperature, policy, depth in itertools.product(excludes, temperatures, policies, depths)
    ]


def module(name, part="target", weight="fp8", kind="linear", nbytes=1000):
    return SimpleNamespace(
        name=name,
        part=part,
        kind=kind,
        multiplies=kind in ("linear", "experts"),
        stored="F8_E4M3" if weight == "fp8" else "BF16",
        weight=weight,
        activation="fp8" if weight == "fp8" else "none",
        rule="stored so",
        shape=(128, 128),
        nbytes=nbytes,
        loaded_nbytes=nbytes,
    )


def plan(*more):
    """Two layers, a draft layer and what lies outside them."""
    modules = [module("model.embed_tokens", "embedding", "bf16", "embedding", 4000)]
    for layer in range(2):
        modules += [module(f"model.layers.{layer}.mlp.down_proj"), module(f"model.layers.{layer}.self_attn.q_proj")]
        modules += [module(f"model.layers.{layer}.input_layernorm", weight="bf16", kind="norm", nbytes=256)]
    modules += [module("mtp.layers.0.mlp.down_proj", "draft"), module("mtp.fc", "draft", "bf16")]
    return SimpleNamespace(modules=(*modules, *more))


class FakeSweep:
    """Stands where `mtplab.sweep` stands: gives a row when the gate is opened, stops when asked to.

    Gated on events, so that a test decides when a row is there; nothing depends on how long a sleep takes.
    """

    def __init__(self, gated=False, fail_at=None):
        self.gate = threading.Semaphore(0 if gated else 10_000)
        self.started = threading.Event()
        self.fail_at = fail_at
        self.calls = []

    def __call__(self, checkpoint, *, depths, exclude, quant_policy, temperature, on_row, on_progress, cancel, **rest):
        self.calls.append({"checkpoint": checkpoint, "depths": depths, "exclude": exclude, **rest})
        points = list(itertools.product(exclude, quant_policy, depths))
        done = []
        self.started.set()
        for at, (excluded, policy, depth) in enumerate(points):
            while not self.gate.acquire(timeout=0.01):
                if cancel.is_set():
                    break
            if cancel.is_set():
                break
            if at == self.fail_at:
                raise RuntimeError("no more memory")
            label = excluded if isinstance(excluded, str) else ", ".join(excluded)
            done.append(row(depth, policy, label, temperature[0]))
            on_row(done[-1])
            on_progress(SimpleNamespace(done=at + 1, fraction=0.0, total=len(points), current=label, remaining=1.0))
        return SimpleNamespace(rows=done, cancelled=cancel.is_set())
