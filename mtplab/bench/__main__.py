"""`python -m mtplab.bench speed`: the table of `make bench`. `… products`: matrix products of few rows on a CPU.
`… kernels`: FP8 kernels on a GPU. `… convert`: checkpoints written anew, GB a second and memory. `… peers`: llama.cpp
and vLLM on the bundled model, with options of its own (`… peers --help`). `… engines`: both as servers of a sweep,
likewise."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import torch

from mtplab.bench.common import cpu_name, positive
from mtplab.bench.products import KINDS, ProductLine, products
from mtplab.bench.speed import Line, decoding, loading, prompts
from mtplab.bench.tracing import tracing
from mtplab.errors import MtplabError
from mtplab.models import load_model

ROOT = Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Run a benchmark and print its table. Returns 0, or 2 for what cannot be run."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["peers"]:
        from mtplab.bench.peers import command

        return command.main(given[1:])
    if given[:1] == ["engines"]:
        from mtplab.bench.engines import command as engines

        return engines.main(given[1:])
    parser = argparse.ArgumentParser(prog="python -m mtplab.bench", description=__doc__)
    parser.add_argument("what", choices=["speed", "products", "kernels", "convert", "peers", "engines"])
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="folder with the bundled checkpoints")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--tokens", type=positive, default=128)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--prompts", type=positive, default=32)
    parser.add_argument("--max-depth", type=int, choices=range(17), metavar="0…16", default=5)
    parser.add_argument("--gigabytes", type=positive, default=2, help="of the checkpoint that `convert` writes anew")
    parser.add_argument("--work", type=Path, help="folder `convert` works in (a temporary one, three times the size)")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out (it takes minutes)")
    parser.add_argument("-o", "--output", "--json", type=Path, help="write the numbers as JSON too")
    args = parser.parse_args(given)
    if args.output and not args.output.parent.is_dir():
        parser.error(f"--output is {args.output}: there is no folder {args.output.parent}")
    if args.what == "kernels":
        from mtplab.bench import kernels_report

        return kernels_report.run(args.output)
    if args.what == "convert":
        from mtplab.bench.converting import convert_report

        print(convert_report(args.gigabytes, args.work, args.rounds))
        print(f"{cpu_name()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
        return 0
    torch.set_num_threads(args.threads)
    load_before = os.getloadavg()[0]
    if args.what == "products":
        print(products_table(products(load_model(args.data / "tiny-qwen3_5"), 5 * args.rounds)))
        return 0
    try:
        texts = prompts(args.data / "prompts", args.prompts)
        depths = range(args.max_depth + 1)
        compiled = not args.no_compile
        lines = decoding(args.data / "tiny-qwen3_5", texts, args.tokens, args.rounds, depths, compiled)
        load_lines = loading(args.data / "tiny-qwen3_5-fp8", 4 * args.rounds)
        trace_lines = tracing(args.data / "tiny-qwen3_5", texts, args.tokens, args.rounds)
    except MtplabError as error:
        print(f"mtplab.bench: {error}", file=sys.stderr)
        return 2
    machine = {
        "cpu": cpu_name(),
        "threads": args.threads,
        "load before": round(load_before, 2),
        "load after": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "safetensors")},
    }
    print(" · ".join(f"{key} {value}" for key, value in machine.items()))
    rounds = f"medians of {args.rounds} interleaved rounds (quickest in brackets)"
    print(f"\ngreedy, float32, {args.tokens} tokens, {rounds}")
    print(decoding_table(lines))
    print(f"\nloading every weight of the FP8 checkpoint as float32, medians of {4 * args.rounds} rounds")
    print(loading_table(load_lines))
    print(f"\nacceptance at every depth from one trace, greedy, exact, {args.tokens} tokens, {rounds}")
    print(tracing_table(trace_lines))
    if args.output:
        rows = {"machine": machine, "decoding": as_rows(lines), "loading": as_rows(load_lines)}
        rows["tracing"] = as_rows(trace_lines)
        args.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


def decoding_table(lines: list[Line]) -> str:
    """Tokens a second and the ratio to transformers, line by line."""
    out = [f"{'':44}  {'tokens/s':>16}  {'ratio':>6}  goal"]
    for line in lines:
        rate = f"{line.timing.rate:7.0f} ({line.timing.best_rate:6.0f})" if line.timing else "not timed"
        ratio = f"{line.ratio:5.2f}×" if line.ratio else ""
        goal = f"{line.goal:g}× {line.verdict}" if line.goal else ""
        out.append(f"{line.name:44}  {rate:>16}  {ratio:>6}  {goal}  {line.note}".rstrip())
    return "\n".join(out)


def products_table(lines: list[ProductLine]) -> str:
    """Milliseconds of all products of a pass, and how many have rows that depend on how many there are."""
    out = ["rows" + "".join(f"{name:>14}" for name in KINDS) + "   products whose rows differ from those of 256"]
    for x in lines:
        times = "".join(f"{x.milliseconds[name]:11.2f} ms" for name in KINDS)
        out.append(f"{x.rows:4}{times}   " + ", ".join(f"{name} {x.differ[name]}" for name in KINDS))
    return "\n".join(out)


def loading_table(lines: list[Line]) -> str:
    """Milliseconds, and how many times as long as each baseline our loading takes."""
    out = []
    for line in lines:
        ratio = f"ours takes {line.ratio:.2f}× of it, goal at most {line.goal:g}×: {line.verdict}" if line.ratio else ""
        out.append(f"{line.name:44}  {line.timing.median * 1e3:7.1f} ms  {ratio}".rstrip())
    return "\n".join(out)


def tracing_table(lines: list[Line]) -> str:
    """Milliseconds, a trace's as times of plain decoding, and the runs' as times of a trace."""
    out = []
    for line in lines:
        took = f"{line.timing.median * 1e3:8.1f} ms" if line.timing else "not timed"
        against = "of plain decoding, goal at most" if line.at_most else "of the trace, goal at least"
        ratio = f"{line.ratio:.2f}× {against} {line.goal:g}×: {line.verdict}" if line.ratio else line.note
        out.append(f"{line.name:44}  {took:>11}  {ratio}".rstrip())
    return "\n".join(out)


def as_rows(lines: list[Line]) -> list[dict]:
    """Plain data of a report's lines."""
    return [
        {
            "name": line.name,
            "seconds": list(line.timing.seconds) if line.timing else None,
            "rate": line.timing.rate if line.timing else None,
            "ratio": line.ratio,
            "goal": line.goal,
            "verdict": line.verdict,
            "note": line.note,
        }
        for line in lines
    ]


if __name__ == "__main__":
    sys.exit(main())
