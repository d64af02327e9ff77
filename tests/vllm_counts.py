"""vLLM's texts and accepted drafts against mtplab's, on a tiny checkpoint of each family: python -m tests.vllm_counts

Run by hand, in minutes: every family at every depth is a process of vLLM's CPU build, greedy, one thread, all prompts
at once, no prefix cache; in float32, or BF16 where its gated delta rule takes no other. Each of its tokens must be the
one that mtplab would choose there or tie with it, and each of its rounds must end where mtplab's drafts on that text
end, or at a draft that ties (docs/peers.md). A tie is a margin no larger than the farthest that vLLM's own margins
without drafts lie from ours. Results are kept in `--work`.

Exit code 1 where a difference stays unexplained, 2 where nothing could be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mtplab import load_model, trace
from mtplab.bench.peers import command, environments
from mtplab.bench.peers.compare import Compared, compare
from mtplab.bench.peers.launch import Keeper, digest_of, run_job
from mtplab.bench.peers.rounds import emitted_of_steps
from mtplab.bench.peers.table import counts_table, differences_table
from mtplab.errors import MtplabError

sys.path.insert(0, str(Path(__file__).resolve().parent))
import family_checkpoints

ROOT = Path(__file__).resolve().parent.parent
PEER = environments.PEERS["vllm"]
WORKER = Path(command.__file__).parent / "workers" / "run_vllm.py"
SITE = Path(command.__file__).parent / "site"


@dataclass(frozen=True)
class Case:
    """How a family is served. `stages`: the hidden states that vLLM's head reads, of the target and its own."""

    write: Callable[..., Path]
    stages: tuple[str, str]
    sizes: dict[str, Any] = field(default_factory=dict)  # what the CPU kernels ask for
    config: dict[str, Any] = field(default_factory=dict)  # of config.json, for vLLM alone
    changes: dict[str, Any] = field(default_factory=dict)  # of the config that vLLM read
    dtype: str = "float32"
    deepest: int = 3


_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
_STEP = {
    "text_only": True, "swiglu_limits": None, "moe_num_experts": 1, "moe_top_k": 1, "moe_router_scaling_factor": 1.0,
}  # fmt: skip
# stages: model_executor/models/*_mtp.py of vLLM 0.32.0, and what the targets' `forward` returns
CASES = {
    "qwen3_5_moe": Case(family_checkpoints.write_qwen3_5_moe, ("post_norm", "post_norm"), _DELTA, dtype="bfloat16"),
    "qwen3_next": Case(family_checkpoints.write_qwen3_next, ("post_norm", "post_norm"), _DELTA, dtype="bfloat16"),
    "deepseek_v3": Case(
        family_checkpoints.write_deepseek_v3,
        ("post_norm", "post_norm"),
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "seed": 2},
    ),
    "glm4_moe": Case(family_checkpoints.write_glm4_moe, ("post_norm", "pre_norm")),
    # its config class is not transformers'; the architecture is what vLLM goes by
    "mimo": Case(family_checkpoints.write_mimo, ("pre_norm", "post_norm"), {"seed": 7}, config={"model_type": "qwen2"}),
    # its CPU build routes no sigmoids without groups and clamps no experts, so there is one, unclamped; its config
    # class cuts layer_types to the target's layers, and then no head can be built; layers of the head behind its first
    # read a cache that was never filled for the prompt (v1/spec_decode/step3p5.py)
    "step3p7": Case(
        family_checkpoints.write_step3p7,
        ("pre_norm", "pre_norm"),
        _STEP,
        changes={"moe_router_activation": "softmax", "layer_types": family_checkpoints.STEP_TEXT["layer_types"]},
        deepest=1,
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Serve, compare, print."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_counts", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="family", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--python", type=Path, help="of vLLM's environment (what `make peers` made)")
    parser.add_argument("--depths", type=command.depths_of, default=[1, 2, 3], metavar="1-3")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "vllm-counts")
    parser.add_argument("--record", type=Path, help="keep what vLLM gave in this file, as tests/peers/families.json is")
    parser.add_argument("--timeout", type=int, default=600, help="seconds of one process")
    args = parser.parse_args(argv)
    python = args.python or environments.python_of(PEER, environments.environments_folder(None, ROOT))
    if python is None or not python.is_file():
        parser.error(f"there is no vLLM at {python}: `make peers`, or --python")
    if unknown := set(args.families) - set(CASES):
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    torch.set_num_threads(1)
    done, unexplained = 0, 0
    for name in args.families or CASES:
        print(f"\n{name}", flush=True)
        try:
            folder, found = serve(name, CASES[name], python, args)
            if args.record:
                record(args.record, name, folder, found)
            compared = compared_with(folder, CASES[name], found)
            _print(compared, found)
        except MtplabError as error:
            print(f"not compared: {error}")
            continue
        done, unexplained = done + 1, unexplained + compared.unexplained
    return 2 if not done else 1 if unexplained else 0


def prompts_of(count: int) -> list[list[int]]:
    """Random prompts of 1 to 40 ids, most of them short: where a head reads the first slot it shows there."""
    draw = torch.Generator().manual_seed(20)
    lengths = [(1, 2, 3, 1, 5, 9, 1, 2, 17, 1, 3, 40)[i % 12] for i in range(count)]
    return [torch.randint(2, family_checkpoints.VOCABULARY, (n,), generator=draw).tolist() for n in lengths]


@dataclass
class Found:
    """What vLLM gave a family's prompts: leads without drafts, and texts [p][n], accepted drafts [p][r] and counters by
    depth."""

    leads: list[list[float]]
    texts: dict[int, list[list[int]]]
    accepted: dict[int, list[list[int]]]
    counters: dict[int, dict[str, Any]]

    def rounds(self, depth: int) -> list[list[int]]:
        """Tokens that each round emitted [p][r]."""
        both = zip(self.accepted[depth], self.texts[depth], strict=True)
        return [emitted_of_steps(accepted, len(text)) for accepted, text in both]


def serve(name: str, case: Case, python: Path, args: argparse.Namespace) -> tuple[Path, Found]:
    """The checkpoint as mtplab reads it, and what vLLM makes of it."""
    ours, served = _folders(name, case, args.work.resolve())
    found = Found([], {}, {}, {})
    for depth in (0, *(depth for depth in args.depths if 0 < depth <= case.deepest)):
        result = _served(f"{name}-depth{depth}", served, case, prompts_of(args.prompts), depth, python, args)
        found.texts[depth] = [each["ids"] for each in result["outputs"]]
        if depth:
            found.accepted[depth] = [each["accepted"] for each in result["outputs"]]
            found.counters[depth] = result["counters"]
        else:
            found.leads = [each["leads"] for each in result["outputs"]]
    return ours, found


def compared_with(folder: Path, case: Case, found: Found) -> Compared:
    """vLLM's texts and rounds against mtplab's. Raises CheckpointError for a family that mtplab does not run."""
    prompts, depths = prompts_of(len(found.leads)), list(found.accepted)
    model, stages = load_model(folder), {"target_hidden": case.stages[0], "draft_hidden": case.stages[1]}
    tokens = len(found.texts[0][0])
    mine = trace(model, prompts, max(depths), max_new_tokens=tokens, ignore_eos=True, exact=True, **stages)
    in_bf16, exact = load_model(folder, dtype="bfloat16"), case.dtype == "float32"
    rounds = {0: (found.texts[0], [])} | {depth: (found.texts[depth], found.rounds(depth)) for depth in depths}
    return compare(model, in_bf16, prompts, mine, rounds, exact, False, leads=found.leads, stages=case.stages)


def _print(compared: Compared, found: Found) -> None:
    reported = {
        depth: f"{told['num_draft_tokens']} drafted, {told['num_accepted_tokens']} accepted"
        for depth, told in found.counters.items()
    }
    print(counts_table(PEER.title, compared, reported, len(found.leads)))
    print(differences_table(PEER.title, compared, lambda ids: " ".join(map(str, ids))))


def digest_of_values(folder: Path) -> str:
    """SHA-256 of a checkpoint's tensors by name, however the file orders them."""
    tensors, found = load_file(folder / "model.safetensors"), hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].float().numpy().tobytes())
    return found.hexdigest()


def record(file: Path, name: str, folder: Path, found: Found) -> None:
    """Add what vLLM gave to a file of families, for `tests/test_vllm_counts.py`."""
    kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    kept[name] = {
        "by": ", ".join(PEER.requirements),
        "weights": digest_of_values(folder),
        "leads": [[float(f"{lead:.7g}") for lead in each] for each in found.leads],
        "texts": {depth: text for depth, text in found.texts.items() if not depth or text != found.texts[0]},
        "accepted": found.accepted,
    }
    lines = (f"{json.dumps(key)}: {json.dumps(kept[key])}" for key in sorted(kept))
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def recorded(file: Path, name: str) -> tuple[str, Found]:
    """(digest of the weights, what vLLM gave) of a family, as `record` wrote it."""
    kept = json.loads(file.read_text(encoding="utf-8"))[name]
    accepted = {int(depth): each for depth, each in kept["accepted"].items()}
    texts = {depth: kept["texts"].get(str(depth), kept["texts"]["0"]) for depth in (0, *accepted)}
    return kept["weights"], Found(kept["leads"], texts, accepted, {})


def _folders(name: str, case: Case, work: Path) -> tuple[Path, Path]:
    """The checkpoint as mtplab reads it, and as vLLM does."""
    ours = case.write(work / name / "ours", **case.sizes)
    if not case.config:
        return ours, ours
    served = case.write(work / name / "served", **case.sizes)
    config = json.loads((served / "config.json").read_text()) | case.config
    (served / "config.json").write_text(json.dumps(config, indent=1))
    return ours, served


def _served(
    name: str, folder: Path, case: Case, prompts: list[list[int]], depth: int, python: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """What is kept of a depth, or what running it gives."""
    keeper = Keeper(args.work.resolve())
    job = {
        "prompts": prompts, "tokens": args.tokens, "depth": depth, "batch": len(prompts), "threads": 1, "length": 256,
        "dtype": case.dtype, "ids alone": True, "leads": not depth, "model": str(folder),
        "requirements": list(PEER.requirements),
        "files": [digest_of(folder / each) for each in ("config.json", "model.safetensors")],
    } | ({"config": case.changes} if case.changes else {})  # fmt: skip
    result = keeper.recall(name, job)
    if result is None:
        print(f"{name} …", file=sys.stderr, flush=True)
        env = {"PYTHONPATH": str(SITE)}
        result = run_job([str(python), str(WORKER)], job, args.work.resolve(), name, args.timeout, env)
        keeper.keep(name, job, result)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
