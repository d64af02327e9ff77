"""What vLLM makes of planted exclusion mistakes, against what its lens says: python -m tests.vllm_loads

Run by hand, in minutes: every checkpoint of `planted_loads.py` is loaded by a process of vLLM's CPU build, with drafts
at depth 3, and continued greedily. Three things are compared, none by eye: how every linear layer was built, under
which name; whether it loaded; and, where it did, whether texts and accepted drafts are about those of the layout's
sound checkpoint. Results are kept in `--work`, and answers in `tests/peers/vllm_loads.json` with `--record`.

Exit code 1 where the lens and vLLM differ, 2 where vLLM could not be asked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from mtplab.bench.peers import command, environments
from mtplab.bench.peers.launch import Keeper, run_job
from mtplab.checkpoint import open_checkpoint
from mtplab.checkpoint.audit import examine
from mtplab.checkpoint.lenses import Look
from mtplab.checkpoint.lenses.base import LOAD_ERROR, SILENT
from mtplab.checkpoint.text_table import aligned
from mtplab.errors import MtplabError
from mtplab.study.prompts import bundled_prompts, tokenizer_encoder

sys.path.insert(0, str(Path(__file__).resolve().parent))
import planted_loads

ROOT = Path(__file__).resolve().parent.parent
RECORDED = Path(__file__).parent / "peers" / "vllm_loads.json"
PEER = environments.PEERS["vllm"]
WORKER = Path(command.__file__).parent / "workers" / "load_vllm.py"
SITE = Path(command.__file__).parent / "site"
PROMPTS, PROMPT, TOKENS, DEPTH = 8, 24, 48, 3
RIGHT = "right"
# a text has parted where fewer of its tokens than this are the control's up to the first that is not, and drafts have
# fallen where fewer than this share of the control's are accepted; rounding alone moves neither so far
TEXT, DRAFTS = 0.25, 0.5


@dataclass(frozen=True)
class Answer:
    """What vLLM did with a checkpoint."""

    error: dict[str, str] | None
    modules: dict[str, dict[str, str]]  # part → name asked with → quantisation method
    unloaded: tuple[str, ...]  # parameters that no tensor was given to, but for those of the cache
    texts: tuple[tuple[int, ...], ...]
    rounds: int
    drafted: int
    accepted: int

    @property
    def acceptance(self) -> float:
        """Accepted drafts of all."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def alike(self, control: Answer) -> float:
        """The share of the tokens that are the control's up to where each text parts from it."""
        same = sum(_common(mine, other) for mine, other in zip(self.texts, control.texts, strict=True))
        return same / sum(map(len, control.texts))

    def outcome(self, control: Answer) -> str:
        """In the lens's words: "load error", "silent" or "right"."""
        if self.error is not None:
            return LOAD_ERROR
        fallen = self.acceptance < DRAFTS * control.acceptance
        return SILENT if fallen or self.alike(control) < TEXT else RIGHT


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def control_of(name: str) -> str:
    """The sound checkpoint that a case is held to: of its layout, or of blocks of 64 rows."""
    return "ct-sound" if planted_loads.CASES[name].layout == "ct" else "sound"


@dataclass(frozen=True)
class Said:
    """What the lens says of a checkpoint, and the audit's other findings by kind."""

    look: Look
    findings: frozenset[str]


def said_of(folder: Path) -> Said:
    """What an audit says of a checkpoint."""
    audit = examine(open_checkpoint(folder))
    assert audit.looks is not None
    return Said(audit.looks["vLLM"], frozenset(finding.kind for finding in audit.findings))


def differences(said: Said, did: Answer, control: Answer, beyond: str = "") -> Iterator[str]:
    """Where the lens and vLLM part: the outcome, and every module that vLLM came to build.

    Of an outcome `beyond` the lens, the audit's finding of that kind has to tell, and vLLM not to load.
    """
    look, outcome = said.look, did.outcome(control)
    told = beyond in said.findings and outcome == LOAD_ERROR
    if look.worst != outcome and not told:
        yield f"said {look.worst}, was {outcome}"
    drafts = {verdict.module for verdict in look.verdicts if verdict.module.startswith("mtp.")}
    asked: dict[str, dict[str, str]] = {"target": {}, "draft": {}}
    for verdict in look.verdicts:
        asked["draft" if verdict.module in drafts else "target"][verdict.runtime_name] = verdict.built
    for part, built in did.modules.items():
        for name, method in built.items():
            if name.endswith((".conv1d", "lm_head")):  # no matrix of the file, and the embedding, which is tied
                continue
            plain = method.startswith("Unquantized")
            expected = asked[part].get(name)
            if expected != ("plain" if plain else "fp8"):
                yield f"{name}: said {expected}, was {method}"
    for part, names in asked.items():
        for name in sorted(set(names) - set(did.modules.get(part, ()))):
            if did.error is None:
                yield f"{name}: said {names[name]}, was not built"


def digest_of(folder: Path) -> str:
    """SHA-256 of a checkpoint's tensors and of its quantisation config."""
    tensors, found = load_file(folder / "model.safetensors"), hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].float().numpy().tobytes())
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))["quantization_config"]
    found.update(json.dumps(said, sort_keys=True).encode())
    return found.hexdigest()


def ask(name: str, folder: Path, python: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What is kept of a case, or what vLLM makes of it."""
    encoded = bundled_prompts().encoded(tokenizer_encoder(planted_loads.SOURCE))
    prompts = [list(ids[:PROMPT]) for ids in encoded if len(ids) >= PROMPT][:: len(encoded) // PROMPTS][:PROMPTS]
    keeper = Keeper(args.work.resolve() / "results", args.fresh)
    job = {
        "prompts": prompts, "tokens": TOKENS, "depth": DEPTH, "threads": 1, "model": str(folder),
        "requirements": list(PEER.requirements), "digest": digest_of(folder),
        "worker": hashlib.sha256(WORKER.read_bytes()).hexdigest(),
    }  # fmt: skip
    result = keeper.recall(name, job)
    if result is None:
        env = {"PYTHONPATH": str(SITE)}
        result = run_job([str(python), str(WORKER)], job, args.work.resolve() / "results", name, args.timeout, env)
        keeper.keep(name, job, result)
    return result


def kept_of(result: Mapping[str, Any], digest: str) -> dict[str, Any]:
    """A result as it is recorded: what is asserted of it, and nothing that another run would give otherwise."""
    modules: dict[str, dict[str, str]] = {}
    for part, name, method in result["modules"]:
        modules.setdefault(part, {})[name] = method
    return {
        "digest": digest,
        "error": result["error"],
        "modules": modules,
        "unloaded": sorted(
            f"{part}: {name}" for part, names in result["unloaded"].items() for name in names if ".attn." not in name
        ),
        "texts": [each["ids"] for each in result["outputs"]],
        "rounds": sum(len(each["accepted"]) for each in result["outputs"]),
        "drafted": sum(sum(each["drafted"]) for each in result["outputs"]),
        "accepted": sum(sum(each["accepted"]) for each in result["outputs"]),
    }


def answer_of(kept: Mapping[str, Any], control: Mapping[str, Any]) -> Answer:
    """What was recorded of a case, its texts taken from the control where they are the same."""
    texts = control["texts"] if kept["texts"] == "control" else kept["texts"]
    return Answer(
        kept["error"], kept["modules"], tuple(kept["unloaded"]), tuple(map(tuple, texts)),
        kept["rounds"], kept["drafted"], kept["accepted"],
    )  # fmt: skip


def record(file: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what vLLM gave, a case a line."""
    lines = [f'"by": {json.dumps(", ".join(PEER.requirements))}']
    for name, kept in found.items():
        control = found[control_of(name)]
        same = kept is not control and kept["texts"] == control["texts"]
        lines.append(f"{json.dumps(name)}: {json.dumps({**kept, 'texts': 'control'} if same else kept)}")
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def recorded(file: Path = RECORDED) -> dict[str, dict[str, Any]]:
    """What `record` wrote, by case."""
    found = json.loads(file.read_text(encoding="utf-8"))
    del found["by"]
    return found


def row(name: str, said: Said, did: Answer, control: Answer, parted: list[str]) -> tuple[str, ...]:
    """A line of the table."""
    if did.error is not None:
        was = f"{did.error['type']} {did.error['stage']}: {did.error['said'][:90]}"
    else:
        was = f"{did.accepted}/{did.drafted}, text {100 * did.alike(control):.0f} %"
    case = planted_loads.CASES[name]
    worst = f"{said.look.worst}; {case.beyond}" if case.beyond in said.findings else said.look.worst
    return name, case.what, worst, did.outcome(control), was, "; ".join(parted[:2]) or "agree"


def main(argv: list[str] | None = None) -> int:
    """Write, load, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_loads", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(planted_loads.CASES)} (all)")
    parser.add_argument("--python", type=Path, help="of vLLM's environment (what `make peers` made)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "vllm-loads")
    parser.add_argument("--fresh", action="store_true", help="run again what is kept")
    parser.add_argument("--record", type=Path, help="keep what vLLM gave in this file; all cases only")
    parser.add_argument("--timeout", type=int, default=180, help="seconds of one process")
    args = parser.parse_args(argv)
    python = args.python or environments.python_of(PEER, environments.environments_folder(None, ROOT))
    if python is None or not python.is_file():
        parser.error(f"there is no vLLM at {python}: `make peers`, or --python")
    if unknown := set(args.cases) - set(planted_loads.CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(planted_loads.CASES)}")
    if args.record and args.cases:
        parser.error("--record keeps all cases: leave their names out")
    names = [n for n in planted_loads.CASES if not args.cases or n in {*args.cases, *map(control_of, args.cases)}]
    folder, found, said = args.work.resolve() / "checkpoints", {}, {}
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        made = planted_loads.write(name, folder)
        try:
            found[name] = kept_of(ask(name, made, python, args), digest_of(made))
        except MtplabError as error:
            print(f"{name}: not answered: {error}", file=sys.stderr)
            continue
        said[name] = said_of(made)
        print(f"{name}: {(found[name]['error'] or {}).get('said', 'loaded')}", file=sys.stderr, flush=True)
    if set(names) - set(found):
        return 2
    rows, parted = [], 0
    for name, kept in found.items():
        control = answer_of(found[control_of(name)], {})
        did = answer_of(kept, {})
        different = list(differences(said[name], did, control, planted_loads.CASES[name].beyond))
        parted += bool(different)
        rows.append(row(name, said[name], did, control, different))
    print("\n".join(aligned(("case", "planted", "said", "was", "what vLLM did", "lens and vLLM"), rows)))
    print(f"{len(rows)} checkpoints, {parted} where lens and vLLM part")
    if args.record:
        record(args.record, found)
    return 1 if parted else 0


if __name__ == "__main__":
    raise SystemExit(main())
