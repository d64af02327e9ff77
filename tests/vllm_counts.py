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
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

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
    dtype: str = "float32"
    deepest: int = 3


_DELTA = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
# stages: model_executor/models/*_mtp.py of vLLM 0.32.0, and what the targets' `forward` returns
CASES = {
    "qwen3_5_moe": Case(family_checkpoints.write_qwen3_5_moe, ("post_norm", "post_norm"), _DELTA, dtype="bfloat16"),
    "qwen3_next": Case(family_checkpoints.write_qwen3_next, ("post_norm", "post_norm"), _DELTA, dtype="bfloat16"),
    "deepseek_v3": Case(
        family_checkpoints.write_deepseek_v3,
        ("post_norm", "post_norm"),
        {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
    ),
    "glm4_moe": Case(family_checkpoints.write_glm4_moe, ("post_norm", "pre_norm")),
    # its config class is not transformers'; the architecture is what vLLM goes by
    "mimo": Case(family_checkpoints.write_mimo, ("pre_norm", "post_norm"), config={"model_type": "qwen2"}),
    # layers behind the first read a cache that was never filled for the prompt (v1/spec_decode/step3p5.py); its CPU
    # build has no experts that are clamped, or chosen by sigmoids without groups: no layer has any
    "step3p7": Case(
        family_checkpoints.write_step3p7,
        ("pre_norm", "pre_norm"),
        {"text_only": True, "swiglu_limits": None, "moe_layers_enum": "99"},
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
            compared = _compare(name, CASES[name], python, args)
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


def _compare(name: str, case: Case, python: Path, args: argparse.Namespace) -> Compared:
    ours, served = _folders(name, case, args.work.resolve())
    prompts, depths = prompts_of(args.prompts), [depth for depth in args.depths if 0 < depth <= case.deepest]
    found, reported, leads = {}, {}, None
    for depth in (0, *depths):
        result = _served(f"{name}-depth{depth}", served, case.dtype, prompts, depth, python, args)
        texts = [each["ids"] for each in result["outputs"]]
        if not depth:
            leads = [each["leads"] for each in result["outputs"]]
        else:
            told = result["counters"]
            reported[depth] = f"{told['num_draft_tokens']} drafted, {told['num_accepted_tokens']} accepted"
        steps = [emitted_of_steps(each["accepted"], args.tokens) for each in result["outputs"]] if depth else []
        found[depth] = texts, steps
    model = load_model(ours)
    mine = trace(
        model, prompts, max(depths), max_new_tokens=args.tokens, ignore_eos=True, exact=True,
        target_hidden=case.stages[0], draft_hidden=case.stages[1],
    )  # fmt: skip
    in_bf16 = load_model(ours, dtype="bfloat16")
    compared = compare(
        model,
        in_bf16,
        prompts,
        mine,
        found,
        float32=case.dtype == "float32",
        carries=False,
        leads=leads,
        stages=case.stages,
    )
    print(counts_table(PEER.title, compared, reported, len(prompts)))
    print(differences_table(PEER.title, compared, lambda ids: " ".join(map(str, ids))))
    return compared


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
    name: str, folder: Path, dtype: str, prompts: list[list[int]], depth: int, python: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """What is kept of a depth, or what running it gives."""
    keeper = Keeper(args.work.resolve())
    job = {
        "prompts": prompts, "tokens": args.tokens, "depth": depth, "batch": len(prompts), "threads": 1, "length": 256,
        "dtype": dtype, "ids alone": True, "leads": not depth, "model": str(folder),
        "requirements": list(PEER.requirements),
        "files": [digest_of(folder / each) for each in ("config.json", "model.safetensors")],
    }  # fmt: skip
    result = keeper.recall(name, job)
    if result is None:
        print(f"{name} …", file=sys.stderr, flush=True)
        env = {"PYTHONPATH": str(SITE)}
        result = run_job([str(python), str(WORKER)], job, args.work.resolve(), name, args.timeout, env)
        keeper.keep(name, job, result)
    return result


if __name__ == "__main__":
    raise SystemExit(main())
