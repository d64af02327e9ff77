"""`python -m mtplab.bench engines`: one study on engines that are started for it, and here; everything compared.

Each engine is started by a sweep's own `engine=Launch(…)`, with the bundled BF16 checkpoint, at every depth. What it
answered is held against our model and against its own metrics, and where `… peers` kept what the same engine gave in
its own process, against that. An engine that is not installed is named and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mtplab.bench.common import cpu_name, positive
from mtplab.bench.engines.heard import Ear, Heard
from mtplab.bench.engines.judged import Judged, judge
from mtplab.bench.peers import environments
from mtplab.bench.peers.command import BUNDLED, HERE, depths_of, endless, gguf, job_of
from mtplab.bench.peers.environments import PEERS
from mtplab.bench.peers.launch import Keeper, run_job
from mtplab.bench.peers.rounds import emitted_of_chunks, emitted_of_steps
from mtplab.bench.peers.table import counts_table, differences_table
from mtplab.bench.speed import all_prompts
from mtplab.engines import Attach, Launch, Limits
from mtplab.engines.attach import attach
from mtplab.engines.client import overheard
from mtplab.engines.registry import engine_of
from mtplab.errors import MtplabError
from mtplab.models import load_model
from mtplab.study.result import SweepResult
from mtplab.study.row import ResultRow
from mtplab.study.sweep import sweep
from mtplab.study.trace import Trace, trace

__all__ = ["launch_of", "main", "recorded_row"]

ROOT = Path(__file__).resolve().parents[3]
NAMES = ("vllm", "llamacpp")


def main(argv: list[str] | None = None) -> int:
    """Run what is asked for. Returns 0, 1 where a point failed or a difference stays unexplained, or 2 for what cannot
    be run."""
    parser = argparse.ArgumentParser(prog="python -m mtplab.bench engines", description=__doc__)
    parser.add_argument("--engine", action="append", choices=NAMES, help="which (all); may be given twice")
    parser.add_argument("--install", action="store_true", help="make the engines' environments first")
    parser.add_argument("--pip-flags", default="", help="more options for pip, with --install")
    parser.add_argument("--environments", type=Path, help=f"folder of them (${environments.FOLDER}, build/peers)")
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder with the bundled checkpoints")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "engines", help="where rows are written")
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers-runs", help="what `… peers` keeps")
    about = "0 to 8, as 0-8 or 0,3; at 0 is measured how near llama.cpp's near-ties are"
    parser.add_argument("--depths", type=depths_of, default=list(range(5)), metavar="0-4", help=about)
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep what engines answered, served_NAME.json")
    parser.add_argument("-o", "--output", "--json", type=Path, help="write the numbers as JSON too")
    args = parser.parse_args(argv)
    args.threads = 1  # what the engines are started with
    if args.tokens < 2:
        parser.error("--tokens is 1; expected at least 2, as the first belongs to no round")
    for option, folder in (("--output", args.output and args.output.parent), ("--record", args.record)):
        if folder and not folder.is_dir():
            parser.error(f"{option}: there is no folder {folder}")
    names = list(dict.fromkeys(args.engine or NAMES))
    folder = environments.environments_folder(args.environments, ROOT)
    try:
        if args.install:
            for name in names:
                environments.install(PEERS[name], folder, args.pip_flags)
        there = {name: python for name in names if (python := environments.python_of(PEERS[name], folder))}
        for name in names:
            if name not in there:
                print(f"{PEERS[name].title} is not installed in {folder / name} and is left out: make engines")
        return _Proof(args, there).run() if there else 0
    except MtplabError as error:
        print(f"mtplab.bench: {error}", file=sys.stderr)
        return 2


def launch_of(name: str, python: Path, data: Path, work: Path) -> Launch:
    """The settings that start an engine of the peers' environments on the bundled BF16 checkpoint, on one thread."""
    worker = str(HERE / "workers" / f"serve_{name}.py")
    if name == "vllm":
        # BF16 is all that its gated delta rule takes on a CPU
        arguments: tuple[str, ...] = ("--dtype", "bfloat16", "--enforce-eager", "--max-num-seqs", "16")
        return Launch.of(engine=name, command=(str(python), worker), arguments=arguments, start=300.0)
    caches = [word for flag in ("-ctk", "-ctv", "-ctkd", "-ctvd") for word in (flag, "f32")]
    return Launch.of(
        engine=name,
        command=(str(python), worker),
        arguments=("-t", "1", *caches),
        served=str(gguf(python, "float32", data, work)),
        start=60.0,
        # its head carries something from prompt to prompt, and answers have no counts by position
        limits=Limits(concurrency=1),
    )


@dataclass
class _Found:
    """One engine's: its sweep, what was heard of it, and what that is worth."""

    result: SweepResult
    heard: list[Heard]
    judged: Judged | None
    attached: list[str]


class _Proof:
    """One invocation."""

    def __init__(self, args: argparse.Namespace, there: dict[str, Path]) -> None:
        torch.set_num_threads(args.threads)
        self.args, self.there = args, there
        self.path = args.data.resolve() / BUNDLED
        self.model, self.in_bf16 = load_model(self.path), load_model(self.path, dtype="bfloat16")
        self.prompts = endless(self.model, all_prompts(args.data / "prompts"), args.prompts, args.tokens)
        self.study = {
            "prompts": self.prompts,
            "depths": args.depths,
            "max_new_tokens": args.tokens,
            "ignore_eos": True,
        }
        self.keeper = Keeper(args.peers)

    def run(self) -> int:
        """Sweep, compare, print, write."""
        args = self.args
        print(f"{cpu_name()}, one thread; {args.prompts} prompts × {args.tokens} tokens, greedy", flush=True)
        here = sweep(self.path, **self.study, quality=False, results=self._fresh("mtplab"))
        # at depth 0 alone there are texts to compare all the same
        deepest = max(1, *args.depths)
        ours = trace(self.model, self.prompts, deepest, max_new_tokens=args.tokens, ignore_eos=True, exact=True)
        out: dict[str, Any] = {}
        bad = 0
        for name in self.there:
            found = self._engine(name, ours)
            title, both = PEERS[name].title, here + found.result
            print(f"\n{both.to_table()}\n")
            print(f"{title} in {'float32' if name == 'llamacpp' else 'BF16'}, mtplab in exact float32")
            for row in found.result.rows:
                print(f"  depth {row.depth}: {_took(row)}")
            print("\n".join(f"  {line}" for line in found.attached))
            bad += len(found.result.failed)
            judged = found.judged
            if judged is None:
                continue
            if any(args.depths):
                print(counts_table(title, judged.compared, judged.told, args.prompts))
                print(differences_table(title, judged.compared, self.model.decode))
            for line in [*self._inside(name, judged), *judged.faults]:
                print(line)
            bad += judged.unexplained
            out[name] = {
                "rows": [json.loads(row.to_json()) for row in found.result.rows],
                "compared": dataclasses.asdict(judged.compared),
                "told": judged.told,
                "faults": judged.faults,
            }
            if args.record:
                self._record(name, found)
        if args.output:
            args.output.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
        print(f"\nfailed or unexplained: {bad}")
        return 1 if bad else 0

    def _engine(self, name: str, ours: Trace) -> _Found:
        """The study on an engine, started at every depth, and what came of it."""
        engine = engine_of(name)
        ear, attached = Ear(engine, self.args.depths), []

        def told(row: ResultRow) -> None:
            # the server is still there: is it known for what it is?
            ear.asking = False
            try:
                if row.error is None and ear.address is not None:
                    server = attach(Attach.of(addresses=(ear.address,)))[0]
                    known = {name: value for name, value in vars(server.known).items() if value is not None}
                    attached.append(f"asked what it is at depth {row.depth}: {server.title}, {known}")
            finally:
                ear.asking = True
                ear.turn()

        settings = launch_of(name, self.there[name], self.args.data, self.args.work)
        with overheard(ear):
            result = sweep(self.path, **self.study, engine=settings, results=self._fresh(name), on_row=told)
        judged = None
        if not result.failed:
            float32 = name == "llamacpp"
            judged = judge(
                engine, ear.heard, result.rows, self.model, self.in_bf16, self.prompts, ours, float32, self._leads(name)
            )
        return _Found(result, ear.heard, judged, attached)

    def _fresh(self, name: str) -> Path:
        """An empty folder: rows that are there would not be asked of an engine."""
        folder = self.args.work.resolve() / name
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def _leads(self, name: str) -> list[list[float]] | None:
        """By how much llama.cpp has its tokens of depth 0 lead, in its own process, so that what is near is known."""
        if name != "llamacpp":
            return None
        return [each["leads"] for each in self._kept(name, 0, True)["outputs"]]

    def _kept(self, name: str, depth: int, run: bool) -> dict[str, Any] | None:
        """What `… peers` kept of this engine, depth and prompts; where nothing is and `run` says so, it is run."""
        args, llama = self.args, name == "llamacpp"
        job = job_of(args, self.prompts, name, depth, 1 if llama else args.prompts)
        job |= {"model": str(gguf(self.there[name], "float32", args.data, args.peers) if llama else self.path)}
        job |= {"counts": True}
        kept = f"{name}-depth{depth}{'-counts' if llama else ''}-threads{args.threads}"
        found = self.keeper.recall(kept, job)
        if found is None and run:
            command = [str(self.there[name]), str(HERE / "workers" / f"run_{name}.py")]
            found = run_job(command, job, args.peers, kept, 300, {})
            self.keeper.keep(kept, job, found)
        return found

    def _inside(self, name: str, judged: Judged) -> list[str]:
        """The same prompts in the engine's own process, where they are kept: llama.cpp's, which take seconds, are run.
        Another text or round is a fault in float32; in BF16, how many prompts there are at once decides near-ties."""
        llama, tokens, lines = name == "llamacpp", self.args.tokens, []
        for depth in self.args.depths:
            found = self._kept(name, depth, llama)
            if found is None:
                continue
            outputs = found["outputs"]
            same = sum(x["ids"] == text for x, text in zip(outputs, judged.texts[depth], strict=True))
            line = f"depth {depth}, the same in its own process: {same} of {len(outputs)} texts equal"
            if depth:
                read: Callable[[Any], list[int]] = (
                    (lambda x, k=depth: emitted_of_chunks(x["chunks"], k, tokens))
                    if llama
                    else (lambda x: emitted_of_steps(x["accepted"], tokens))
                )
                rounds = [read(x) for x in outputs]
                equal = sum(a == b for a, b in zip(rounds, judged.rounds[depth], strict=True))
                accepted = sum(sum(each) - len(each) for each in rounds)
                line += f", {equal} with the same rounds; {accepted} accepted / {sum(map(len, rounds))}"
                if llama and equal < len(outputs):
                    judged.faults.append(f"{line}: served, it gave others")
            if llama and same < len(outputs):
                judged.faults.append(f"{line}: served, it gave others")
            lines.append(line)
        return lines

    def _record(self, name: str, found: _Found) -> None:
        """What the engine answered and the rows that came of it, without a path of this machine."""
        engine = engine_of(name)
        served = launch_of(name, self.there[name], self.args.data, self.args.work).served
        unsaid = {str(self.path): BUNDLED, **({served: Path(served).name} if served else {})}
        kept = {
            "note": f"python -m mtplab.bench engines --record, {PEERS[name].requirements[0]}: an engine's answers to a "
            "sweep, what of its metrics is read, and the rows",
            "prompts": self.prompts,
            "tokens": self.args.tokens,
            "leads": self._leads(name),
            "depths": [each.to_json(engine, unsaid) for each in found.heard],
            "rows": [recorded_row(row) for row in found.result.rows],
        }
        file = self.args.record / f"served_{name}.json"
        file.write_text(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
        print(f"wrote {file}")


def recorded_row(row: ResultRow) -> dict[str, Any]:
    """What an engine decides of a row: not how long it took, nor how it was started or found."""
    names = ("depth", "tokens", "rounds", "drafted", "accepted", "acceptance_length", "per_position", "conditional")
    whole = json.loads(row.to_json())
    return {name: whole[name] for name in (*names, "by_domain", "output_hash", "error")}


def _took(row: ResultRow) -> str:
    if row.error is not None:
        return f"failed: {row.error}"
    started = row.provenance["engine"].get("start_seconds")
    return f"started in {started} s, {row.seconds:.1f} s for {row.tokens} tokens of {row.rounds} rounds"
