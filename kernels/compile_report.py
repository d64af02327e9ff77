"""`make kernels-report`: the whole matrix of kernels, variants and targets compiled, as a table and a CSV file.

Imports no torch. Knows no kernel.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Iterable
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtplab.kernels.aot import run
from mtplab.kernels.targets import TARGETS
from mtplab.kernels.variants import kernel_modules

__all__ = ["table", "update"]

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- compiled: begin (make kernels-report writes this) -->", "<!-- compiled: end -->"
COLUMNS = ("kernel", "label", "target", "registers", "spills", "shared", "mma", "faults")


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Markdown, one line a kernel and target: the range over its variants."""
    out = [
        "| kernel | target | variants | registers | spills | shared memory, limit | matrix instructions |",
        "|---|---|---|---|---|---|---|",
    ]
    for (kernel, target), group in groupby(rows, key=lambda row: (row["kernel"], row["target"])):
        found = list(group)
        least, most = (pick(row["registers"] for row in found) for pick in (min, max))
        shared, limit = max(row["shared"] for row in found), TARGETS[target].shared_limit
        mma = sorted({name for row in found for name in row["mma"] or {}})
        spills = sum(row["spills"] > 0 for row in found)
        out.append(
            f"| {kernel} | {target} | {len(found)} | {least if least == most else f'{least}–{most}'} | "
            f"{f'{spills} variants' if spills else 'none'} | {shared / 1024:.3g} of {limit // 1024} KiB | "
            f"{', '.join(f'`{name}`' for name in mma) or '–'} |"
        )
    return "\n".join(out)


def update(page: str, compiled: str) -> str:
    """The page with what stands between its two markers replaced. Raises ValueError where it has none."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"expected the lines {BEGIN!r} and {END!r} once each")
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{compiled}\n\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str] | None = None) -> int:
    """Compile everything, write README.md's table and compiled.csv; exit code 1 where something may not be."""
    parser = argparse.ArgumentParser(prog="python -m mtplab.kernels.compile_report", description=main.__doc__)
    parser.add_argument("--quick", action="store_true", help="one variant of each kernel a target, as the tests do")
    quick = parser.parse_args(arguments).quick
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("TRITON_INTERPRET is set: kernels cannot be compiled in a process that interprets them", file=sys.stderr)
        return 2
    compiling = run(list(TARGETS), kernel_modules(), quick=quick, workers=os.cpu_count() or 1)
    rows = list(tqdm(compiling, desc="compiled", unit=" variants"))
    rows.sort(key=lambda row: (row["module"], row["kernel"], list(TARGETS).index(row["target"])))
    with open(HERE / "compiled.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            mma = " ".join(f"{name}×{n}" for name, n in sorted((row["mma"] or {}).items()))
            writer.writerow([*(row[name] for name in COLUMNS[:6]), mma, "; ".join(row["faults"])])
    page = HERE / "README.md"
    what = "one for each kernel and target (`--quick`)" if quick else "all that can be chosen"
    head = f"{len(rows)} variants, {what}, triton {version('triton')}; every one of them in `compiled.csv`."
    page.write_text(update(page.read_text(encoding="utf-8"), f"{head}\n\n{table(rows)}"), encoding="utf-8")
    faulty = [row for row in rows if row["faults"]]
    for row in faulty:
        print(f"{row['kernel']} {row['label']} {row['target']}: {'; '.join(row['faults'])}", file=sys.stderr)
    print(f"{len(rows)} variants, {len(faulty)} with faults; kernels/README.md and kernels/compiled.csv are written")
    return 1 if faulty else 0


if __name__ == "__main__":
    sys.exit(main())
