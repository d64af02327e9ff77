"""`python -m mtplab.bench peers`: a sweep over depths in other engines and in one trace, timed, and counts compared.

Every depth of every engine is a process of its own, and its result is kept: an interrupted run goes on where it was,
and `--depths` may come in parts. An engine that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from mtplab.bench.common import cpu_name, positive
from mtplab.bench.peers import environments
from mtplab.bench.peers.compare import Compared, compare
from mtplab.bench.peers.environments import PEERS, Peer
from mtplab.bench.peers.launch import Keeper, digest_of, run_job
from mtplab.bench.peers.rounds import emitted_of_chunks, emitted_of_steps
from mtplab.bench.peers.table import Race, counts_table, differences_table, races_table
from mtplab.bench.speed import all_prompts
from mtplab.decode import generate
from mtplab.errors import ConfigError, MtplabError
from mtplab.models import Model, load_model
from mtplab.study.trace import Trace, trace

__all__ = ["BUNDLED", "depths_of", "endless", "gguf", "job_of", "main"]

ROOT = Path(__file__).resolve().parents[3]
HERE = Path(__file__).resolve().parent
BUNDLED = "tiny-qwen3_5"
DEPTHS = range(9)
# seconds that ours are to take less, in times: one prompt at a time, at its best batching, and with restarts
ALONE, BATCHED, RESTARTED = 10.0, 4.0, 20.0


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for. Returns 0, 1 where a difference stays unexplained, or 2 for what cannot be run."""
    parser = argparse.ArgumentParser(prog="python -m mtplab.bench peers", description=__doc__)
    parser.add_argument("--peer", action="append", choices=list(PEERS), help="which (all); may be given twice")
    parser.add_argument("--install", action="store_true", help="make the engines' environments, and nothing else")
    parser.add_argument("--pip-flags", default="", help="more options for pip, with --install")
    parser.add_argument("--environments", type=Path, help=f"folder of them (${environments.FOLDER}, build/peers)")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder with the bundled checkpoints")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "peers-runs", help="where results are kept")
    parser.add_argument("--depths", type=depths_of, default=list(DEPTHS), metavar="0-8", help="0 to 8, as 0-8 or 0,3")
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--batches", type=batches_of, default=[32], metavar="8,32", help="prompts at once in llama.cpp")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--rounds", type=positive, default=3, help="of ours; the median counts")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds of one process")
    parser.add_argument("--fresh", action="store_true", help="run again what is kept")
    parser.add_argument("-o", "--output", "--json", type=Path, help="write the numbers as JSON too")
    args = parser.parse_args(argv)
    if args.tokens < 2:
        parser.error("--tokens is 1; expected at least 2, as the first belongs to no round")
    if args.output and not args.output.parent.is_dir():
        parser.error(f"--output is {args.output}: there is no folder {args.output.parent}")
    peers = [PEERS[name] for name in dict.fromkeys(args.peer or PEERS)]
    folder = environments.environments_folder(args.environments, ROOT)
    try:
        if args.install:
            for peer in peers:
                environments.install(peer, folder, args.pip_flags)
            return 0
        there = {peer.name: python for peer in peers if (python := environments.python_of(peer, folder))}
        for peer in peers:
            if peer.name not in there:
                print(f"{peer.title} is not installed in {folder / peer.name} and is left out: make peers")
        return _Bench(args, there).run() if there else 0
    except MtplabError as error:
        print(f"mtplab.bench: {error}", file=sys.stderr)
        return 2


def depths_of(text: str) -> list[int]:
    """`0-8` or `0,3,8`, each 0 to 8. Raises ValueError for others."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    if not found or not found <= set(DEPTHS):
        raise ValueError(text)
    return sorted(found)


def batches_of(text: str) -> list[int]:
    """Numbers of prompts at once."""
    return sorted({positive(part) for part in text.split(",")})


def endless(model: Model, texts: list[str], n: int, tokens: int) -> list[list[int]]:
    """Ids of the first n prompts whose greedy text does not end within `tokens`: engines that are told to ignore an end
    either go on after it or never choose it, and that would be another text. Raises ConfigError for too few."""
    ids = [model.encode(text) for text in texts]
    made = generate(model, ids, depth=0, max_new_tokens=tokens, ignore_eos=True, exact=True).tokens
    ends = set(model.config.eos_token_ids)
    found = [prompt for prompt, out in zip(ids, made, strict=True) if not ends & set(out)]
    if len(found) < n:
        raise ConfigError(f"{n} prompts were asked for; the text of {len(found)} goes on for {tokens} tokens")
    return found[:n]


class _Bench:
    """One invocation."""

    def __init__(self, args: argparse.Namespace, there: dict[str, Path]) -> None:
        torch.set_num_threads(args.threads)
        self.args, self.there = args, there
        self.path = args.data.resolve() / BUNDLED
        self.model = load_model(self.path)
        self.prompts = endless(self.model, all_prompts(args.data / "prompts"), args.prompts, args.tokens)
        self.keeper = Keeper(args.work, args.fresh)
        self.shares: list[float] = []  # of a processor that each process got, less than one where others run
        self.versions: dict[str, str] = {}

    def run(self) -> int:
        """Measure, compare, print, write."""
        args = self.args
        races, found = [], {}
        for name in self.there:
            found[name] = {"llamacpp": self._llamacpp, "vllm": self._vllm}[name]()
        mine = self._ours()
        inside = statistics.median(each["load"] + each["work"] for each in mine)
        outside = statistics.median(each["wall"] for each in mine)
        whole = args.depths == list(DEPTHS)
        for seconds in found.values():
            for name, (by_depth, goal) in seconds["races"].items():
                restarted = goal == RESTARTED
                ours, what = (outside, "whole processes") if restarted else (inside, "loading and work")
                races.append(Race(name, by_depth, ours, what, goal, whole))
        machine = {
            "cpu": cpu_name(),
            "threads": args.threads,
            "processors, at least": round(min(self.shares), 2),
            "python": platform.python_version(),
            "torch": torch.__version__,
            **self.versions,
        }
        print(" · ".join(f"{key} {value}" for key, value in machine.items()))
        print(f"\n{args.prompts} prompts × {args.tokens} tokens, greedy; ours: depths 0 to 8 from one trace, float32")
        print("; ".join(f"{PEERS[name].title} in {PEERS[name].arithmetic}" for name in found))
        print(races_table(races))
        ours = trace(
            self.model, self.prompts, DEPTHS[-1], max_new_tokens=args.tokens, ignore_eos=True, exact=True
        )
        in_bf16 = load_model(self.path, dtype="bfloat16")
        out: dict[str, Any] = {"machine": machine, "races": [_race(x) for x in races], "compared": {}}
        unexplained = 0
        for name in found:
            compared = self._compared(PEERS[name], ours, in_bf16, found[name])
            print(f"\n{PEERS[name].title} against mtplab, drafts as accepted of tokens emitted (docs/peers.md)")
            print(counts_table(PEERS[name].title, compared, found[name]["reported"], args.prompts))
            print(differences_table(PEERS[name].title, compared, self.model.decode))
            out["compared"][name] = dataclasses.asdict(compared)
            out["compared"][name] |= {"rounds": compared.rounds, "unexplained": compared.unexplained}
            unexplained += compared.unexplained
        if args.output:
            args.output.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        return 1 if unexplained else 0

    def _compared(self, peer: Peer, ours: Trace, in_bf16: Model, found: dict[str, Any]) -> Compared:
        llama = peer.name == "llamacpp"
        texts, leads = found["rounds"], found.get("leads")
        return compare(self.model, in_bf16, self.prompts, ours, texts, float32=llama, carries=llama, leads=leads)

    def _llamacpp(self) -> dict[str, Any]:
        """Seconds one prompt at a time and at the best of the batches, with a BF16 file, and the rounds of prompts that
        ran alone in float32."""
        python, args = self.there["llamacpp"], self.args
        files = {kind: gguf(python, kind, args.data, args.work) for kind in ("float32", "bf16")}
        command = [str(python), str(HERE / "workers" / "run_llamacpp.py")]
        alone, batched, rounds, reported, leads = {}, {}, {}, {}, None
        for depth in args.depths:
            took = {}
            for batch in sorted({1, *args.batches}):
                job = self._job("llamacpp", depth, batch) | {"model": str(files["bf16"])}
                result = self._result(f"llamacpp-depth{depth}-batch{batch}", command, job)
                took[batch] = result["load"] + result["work"]
            alone[depth] = took[1]
            batched[depth] = min(took[batch] for batch in args.batches)
            job = self._job("llamacpp", depth, 1) | {"model": str(files["float32"]), "counts": True}
            outputs = self._result(f"llamacpp-depth{depth}-counts", command, job)["outputs"]
            texts = [each["ids"] for each in outputs]
            emitted = [emitted_of_chunks(x["chunks"], depth, args.tokens) for x in outputs] if depth else []
            rounds[depth] = texts, emitted
            if not depth:
                leads = [each["leads"] for each in outputs]
            last = [each["chunks"][-1] for each in outputs]
            if depth:
                reported[depth] = f"{sum(x[2] for x in last)} drafted, {sum(x[3] for x in last)} accepted"
        batches = " or ".join(map(str, args.batches))
        races = {
            "llama.cpp, one prompt at a time": (alone, ALONE),
            f"llama.cpp, {batches} at once": (batched, BATCHED),
        }
        return {"races": races, "rounds": rounds, "reported": reported, "leads": leads}

    def _vllm(self) -> dict[str, Any]:
        """Seconds of whole processes, all prompts at once, and the rounds of the same runs."""
        python, args = self.there["vllm"], self.args
        command = [str(python), str(HERE / "workers" / "run_vllm.py")]
        took, rounds, reported = {}, {}, {}
        for depth in args.depths:
            job = self._job("vllm", depth, args.prompts) | {"model": str(self.path), "counts": True}
            result = self._result(f"vllm-depth{depth}", command, job, {"PYTHONPATH": str(HERE / "site")})
            took[depth] = result["wall"]
            texts = [each["ids"] for each in result["outputs"]]
            steps = [emitted_of_steps(x["accepted"], args.tokens) for x in result["outputs"]] if depth else []
            rounds[depth] = texts, steps
            told = result["counters"]
            if told:
                reported[depth] = (
                    f"{told['num_drafts']} rounds, {told['num_draft_tokens']} drafted, "
                    f"{told['num_accepted_tokens']} accepted"
                )
        races = {"vLLM, all at once, a restart a depth": (took, RESTARTED)}
        return {"races": races, "rounds": rounds, "reported": reported}

    def _ours(self) -> list[dict[str, Any]]:
        """Processes of ours, run now."""
        job = self._job("mtplab", DEPTHS[-1], max(64, self.args.prompts)) | {"model": str(self.path)}
        command = [sys.executable, "-m", "mtplab.bench.peers.workers.run_ours"]
        env = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
        found = []
        for number in range(self.args.rounds):
            found.append(run_job(command, job, self.args.work, f"mtplab-{number}", self.args.timeout, env))
            self.shares.append(found[-1]["cpu"] / found[-1]["wall"])
        return found

    def _job(self, name: str, depth: int, batch: int) -> dict[str, Any]:
        return job_of(self.args, self.prompts, name, depth, batch)

    def _result(self, name: str, command: list[str], job: dict[str, Any], env: dict[str, str] | None = None) -> dict:
        """What is kept of the job, or what running it gives."""
        name = f"{name}-threads{self.args.threads}"
        result = self.keeper.recall(name, job)
        if result is None:
            print(f"{name} …", file=sys.stderr, flush=True)
            result = run_job(command, job, self.args.work, name, self.args.timeout, env or {})
            self.keeper.keep(name, job, result)
        wanted = job["tokens"] * len(job["prompts"])
        if result.get("tokens", wanted) != wanted:
            raise MtplabError(f"{name}: gave {result['tokens']} tokens, expected {wanted}")
        self.shares.append(result["cpu"] / result["wall"])
        engine, _, number = result["version"].partition(" ")
        self.versions[engine] = number
        return result


def job_of(args: argparse.Namespace, prompts: list[list[int]], name: str, depth: int, batch: int) -> dict[str, Any]:
    """A worker's job but for its model; what it gave is kept for this very job."""
    return {
        "prompts": prompts,
        "tokens": args.tokens,
        "depth": depth,
        "batch": batch,
        "threads": args.threads,
        "counts": False,
        "requirements": list(PEERS[name].requirements) if name in PEERS else [],
        "weights": digest_of(args.data.resolve() / BUNDLED / "model.safetensors"),
    }


def gguf(python: Path, kind: str, data: Path, work: Path) -> Path:
    """The bundled checkpoint as llama.cpp reads it, in `work`, written anew where the checkpoint or its recipe changed.
    Raises MtplabError where llama.cpp's environment cannot."""
    recipe, source = data.resolve() / "recipe" / "peers" / "to_gguf.py", data.resolve() / BUNDLED
    inputs = (source / "model.safetensors", recipe)
    target = work.resolve() / f"{kind}-{'-'.join(digest_of(x)[:12] for x in inputs)}.gguf"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_suffix(".tmp")
        command = [str(python), str(recipe), str(source), str(part), kind]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MtplabError(f"{recipe} failed: {done.stderr.strip()[-500:]}")
        part.replace(target)
    return target


def _race(race: Race) -> dict[str, Any]:
    return dataclasses.asdict(race) | {"total": race.total, "ratio": race.ratio, "verdict": race.verdict}
