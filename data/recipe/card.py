"""Write the model card data/README.md from what was measured; no number in it is typed by hand.

    python data/recipe/card.py --work WORK     # first WORK's training logs and corpus sizes -> results/training.json
    python data/recipe/card.py                 # only results/*.json and *.jsonl -> data/README.md

This module does not know how anything was measured; `card.md` holds the words.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from string import Template

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
CORPORA = ("scripture", "python", "docs")
PHASES = ("trunk", "unloop", "head")
ENGINES = ("llama_cpp", "mtplab_float32", "vllm_cpu", "mtplab_bfloat16")


def training(work: Path) -> dict:
    """Tokens, wall-clock and CPU minutes of each phase, and the losses it evaluated, from WORK's logs."""
    out: dict = {}
    for phase in PHASES:
        entries = [json.loads(line) for line in (work / f"log-{phase}.jsonl").read_text().splitlines()]
        # the CPU clock restarts with every process that resumed the phase: add up the last reading of each
        cpu, last = 0.0, 0.0
        for entry in entries:
            if entry["cpu_seconds_this_process"] < last:
                cpu += last
            last = entry["cpu_seconds_this_process"]
        end = entries[-1]
        repeating = [e["repeating"] for e in entries if "repeating" in e]
        keep = ("step", "tokens", "seconds", *(k for k in end if k.startswith(CORPORA)))
        evaluated = [{k: e[k] for k in keep} for e in entries if e.get("event") in ("evaluate", "end")]
        out[phase] = {
            "steps": end["step"], "tokens": end["tokens"], "minutes": round(end["seconds"] / 60, 1),
            "cpu_minutes": round((cpu + last) / 60, 1), "runs": sum(e.get("event") == "start" for e in entries),
            **({"repeating": [repeating[0], repeating[-1]]} if repeating else {}),
            "bf16_gemms": entries[0]["bf16"], "torch": entries[0]["torch"], "evaluated": evaluated,
        }  # fmt: skip
    sizes: dict = {c: {"train": [0, 0], "held out": [0, 0]} for c in CORPORA}
    for line in (work / "corpus.jsonl").read_text().splitlines():
        document = json.loads(line)
        cell = sizes[document["corpus"]]["held out" if document["held_out"] else "train"]
        cell[0] += 1
        cell[1] += len(document["text"].encode())
    out["corpora"] = sizes
    out["packages"] = sorted(deb.stem for deb in (work / "corpora").glob("*.deb"))
    return out


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def share(values: list[float]) -> str:
    return " ".join(f"{v:.2f}".replace("0.", ".", 1) if v < 1 else "1.0" for v in values)


def acceptance(runs: dict[str, dict[str, dict]]) -> str:
    """One row per text source and temperature."""
    rows = [
        [source, "greedy" if float(t) == 0 else t, share(run["per_position"]), f"{run['acceptance_length']:.2f}",
         f"{run['distinct_4_grams']['together']:.2f}", f"{run['distinct_4_grams']['each']:.2f}"]
        for source, by_temperature in runs.items() for t, run in by_temperature.items()
    ]  # fmt: skip
    head = ["text", "temperature", "accepted, drafts 1…4", "AL", "distinct 4-grams, all together", "within each"]
    return table(head, rows)


def side_by_side(runs: dict[str, dict[str, dict]]) -> str:
    """Acceptance of one column per variant, one row per corpus."""
    variants = list(runs)
    rows = [
        [c, *(f"{share(runs[v][c]['per_position'])} (AL {runs[v][c]['acceptance_length']:.2f})" for v in variants)]
        for c in CORPORA
    ]
    return table(["text", *variants], rows)


def peers() -> str:
    """Accepted / drafted of every engine, one row per prompt and depth."""
    seen: dict = {}
    for engine in ENGINES:
        for line in (RESULTS / f"{engine}.jsonl").read_text().splitlines():
            row = json.loads(line)
            seen[engine, row["prompt"], row["depth"]] = row
    prompts = [(p["domain"], p["text"]) for p in json.loads((HERE / "peers" / "prompts.json").read_text())]
    rows = []
    for domain, prompt in prompts:
        for depth in range(1, 5):
            cells = []
            for engine in ENGINES:
                row = seen[engine, prompt, depth]
                cells.append(f"{row['accepted']}/{row['drafted']}")
            first = json.dumps(prompt)[1:-1].replace("|", "\\|")
            name = f"{domain}: `{first if len(first) <= 34 else first[:33] + '…'}`"
            rows.append([name if depth == 1 else "", str(depth), *cells])
    return table(["prompt", "depth", *(e.replace("_", " ") for e in ENGINES)], rows)


def same_texts() -> str:
    """How many of the 30 outputs are equal, text by text, between engines of like arithmetic."""
    texts = {}
    for engine in ENGINES:
        for line in (RESULTS / f"{engine}.jsonl").read_text().splitlines():
            row = json.loads(line)
            texts[engine, row["prompt"], row["depth"]] = row["text"]
    keys = sorted({k[1:] for k in texts})

    def same(a: str, b: str) -> str:
        return f"{sum(texts[a, *k] == texts[b, *k] for k in keys)} of {len(keys)}"

    return (
        f"llama.cpp and mtplab, both float32: {same('llama_cpp', 'mtplab_float32')} texts identical; "
        f"vLLM and mtplab, both BF16: {same('vllm_cpu', 'mtplab_bfloat16')}"
    )


def margins() -> dict[str, str]:
    """The widest logit margin at which an engine's text parted from ours, by engine."""
    rows = json.loads((RESULTS / "partings.json").read_text())
    return {f"margin_{e}": f"{max((r['margin'] for r in rows if r['engine'] == e), default=0):.4f}" for e in ENGINES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path)
    args = parser.parse_args()
    if args.work:
        (RESULTS / "training.json").write_text(json.dumps(training(args.work), indent=1) + "\n")
    t = json.loads((RESULTS / "training.json").read_text())
    m = json.loads((RESULTS / "measured.json").read_text())
    sizes = {f.parent.name: f.stat().st_size / 1e6 for f in HERE.parent.glob("tiny-*/model.safetensors")}
    phase = {
        f"{name}_{key}": f"{value:,}" if isinstance(value, int) else str(value)
        for name in PHASES for key, value in t[name].items() if key != "evaluated"
    }  # fmt: skip
    last, final = t["unloop"]["evaluated"][-1], t["head"]["evaluated"]
    words = {
        **phase,
        "total_tokens": f"{sum(t[name]['tokens'] for name in PHASES):,}",
        "total_cpu": f"{sum(t[name]['cpu_minutes'] for name in PHASES):.0f}",
        "packages": ", ".join(f"`{p}`" for p in t["packages"]),
        "bf16_mb": f"{sizes['tiny-qwen3_5']:.1f}",
        "fp8_mb": f"{sizes['tiny-qwen3_5-fp8']:.1f}",
        "corpora": table(
            ["corpus", "training documents", "MB", "held out", "MB"],
            [[c, *(f"{x:,}" if i == 0 else f"{x / 1e6:.2f}" for part in ("train", "held out")
                   for i, x in enumerate(t["corpora"][c][part]))] for c in CORPORA],
        ),
        "loss": table(
            ["held-out corpus", "nats per token", "bits per byte", "head's argmax = trunk's, depth 1, 2, 3"],
            [[c, f"{m['loss'][c]['nats_per_token']:.2f}", f"{m['loss'][c]['bits_per_byte']:.2f}",
              share([final[-1][f"{c}_agree{j}"] for j in (1, 2, 3)])] for c in CORPORA],
        ),
        "repeating_before": f"{t['unloop']['repeating'][0]:.0%}",
        "repeating_after": f"{t['unloop']['repeating'][1]:.0%}",
        "loss_change": ", ".join(
            f"{t['trunk']['evaluated'][-1][f'{c}_loss']:.2f} → {t['unloop']['evaluated'][-1][f'{c}_loss']:.2f}"
            for c in CORPORA
        ),
        "corpora_order": ", ".join(CORPORA),
        "agree_before": ", ".join(share([last[f"{c}_agree1"]]) for c in CORPORA),
        "agree_after": ", ".join(share([final[-1][f"{c}_agree1"]]) for c in CORPORA),
        "held_out": acceptance(m["held_out"]),
        "prompts": acceptance(m["prompts"]),
        "variants": side_by_side({
            "BF16 checkpoint": {c: m["held_out"][c]["0.0"] for c in CORPORA},
            "FP8 checkpoint, W8A8": m["fp8"],
            "hidden states before the final norms": m["pre_norm"],
        }),
        "planted": table(
            ["planted in mtp.fc", "accepted, drafts 1…4", "AL"],
            [[label, share(r["per_position"]), f"{r['acceptance_length']:.2f}"] for label, r in m["planted"].items()],
        ),
        "peers": peers(),
        "same_texts": same_texts(),
        **margins(),
        "seconds": f"{m['seconds']:.0f}",
    }  # fmt: skip
    text = Template((HERE / "card.md").read_text()).substitute(words)
    (HERE.parent / "README.md").write_text(text)
    print(f"wrote {HERE.parent / 'README.md'}, {len(text.split())} words")


if __name__ == "__main__":
    main()
