"""Sweeps of the bundled model in child processes of one that has it loaded: killed at random moments, or two at once.

`python sweep_killer.py CHECKPOINT FOLDER kill|pair TIMES SEED METHOD` prints one JSON line of what was seen. Forked, so
that twenty children cost twenty sweeps and not twenty imports of torch; told by its caller, a test, what must hold.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

from mtplab.models import load_model
from mtplab.study import read_rows, sweep
from mtplab.study.trace import Trace

PROMPTS = ["Once upon a time", "def add(a, b):", "In the"]


def swept(model, folder: Path, method: str, on_progress=None):
    return sweep(
        model,
        prompts=PROMPTS,
        depths=range(4),
        quant_policy=("none", "int8", "fp8"),
        draft_quant_policy=("none", "int4"),
        temperature=(0.0, 0.7),
        results=folder,
        max_new_tokens=10,
        method=method,
        on_progress=on_progress,
    )


def child(model, folder: Path, method: str, answer: Path | None = None) -> tuple[int, int]:
    """A fork that sweeps, and writes what it computed and read back to `answer`: its process id, and a pipe that gives
    a byte for every round decoded, and ends with it."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    code = 1
    try:
        found = swept(model, folder, method, lambda p: os.write(writing, b".") if p.fraction else None)
        if answer is not None:
            answer.write_text(json.dumps([found.computed, found.reused, len(found.failed)]))
        code = 0
    finally:
        os._exit(code)


def facts(rows) -> dict[str, str]:
    """What rows say but for when and how fast they were made."""
    untold = {"provenance", "seconds", "tokens_per_second"}
    return {f"{row.point} {row.depth}": row.model_dump_json(exclude=untold) for row in rows}


def killed(model, folder: Path, method: str, times: int, draw: random.Random) -> dict:
    """Kills, each some rounds into what its child found to do; where one came to its end, the next begins anew."""
    whole = facts(swept(model, folder / "whole", method))
    here = folder / "killed"
    lost = wrong = kills = laps = 0
    kept: dict[str, str] = {}
    while kills < times:
        pid, reading = child(model, here, method)
        # rounds, so that a busy machine moves no kill to where nothing happens; then a moment, to hit what is between
        rounds = draw.randrange(30)
        while rounds and os.read(reading, 1):
            rounds -= 1
        time.sleep(draw.random() * 0.02)
        os.kill(pid, signal.SIGKILL)
        ended = os.WIFEXITED(os.waitpid(pid, 0)[1])
        os.close(reading)
        found = facts(read_rows(here)) if here.exists() else {}
        lost += len(kept.keys() - found.keys())
        wrong += sum(whole.get(key) != value for key, value in found.items())
        kept = found
        if ended:
            wrong += found != whole
            laps += 1
            kept = {}
            shutil.rmtree(here)
        else:
            kills += 1
    rest = swept(model, here, method)
    return {
        "lost": lost,
        "wrong": wrong,
        "laps": laps,
        "kept": len(kept),
        "computed": rest.computed,
        "reused": rest.reused,
        "same": facts(rest) == whole,
        "traces": len([Trace.load(path) for path in here.glob("traces/*.safetensors")]),
        "left": len(list(here.rglob("*.partial"))),
    }


def pair(model, folder: Path, method: str) -> dict:
    whole = facts(swept(model, folder / "whole", method))
    answers = [folder / "one", folder / "two"]
    codes = [os.waitpid(pid, 0)[1] for pid, _ in [child(model, folder / "both", method, answer) for answer in answers]]
    return {
        "codes": codes,
        "counts": [json.loads(answer.read_text()) for answer in answers],
        "same": facts(read_rows(folder / "both")) == whole,
    }


def main() -> None:
    checkpoint, folder, what, times, seed, method = sys.argv[1:]
    torch.set_num_threads(1)
    model = load_model(checkpoint)
    Path(folder).mkdir(exist_ok=True)
    if what == "kill":
        found = killed(model, Path(folder), method, int(times), random.Random(int(seed)))
    else:
        found = pair(model, Path(folder), method)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
