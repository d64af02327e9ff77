"""Mutates the committed checkpoints and opens, plans, audits and reads them for minutes: python -m tests.fuzz

With `--families`, checkpoints of the families that are run, which are loaded and run too.

Prints every seed whose checkpoint ended in anything but a MtplabError, took a second, or used more memory than allowed.
`--seed N` runs that one again with its traceback.
"""

from __future__ import annotations

import argparse
import collections
import resource
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from tests import family_mutations, mutations

MEMORY = 6 << 30


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run this one only")
    parser.add_argument("--families", action="store_true", help="of the families that are run, to the first tokens")
    options = parser.parse_args()
    warnings.simplefilter("error")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    counts: collections.Counter[str] = collections.Counter()
    failures: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "checkpoint"
        sources = family_mutations.write_all(Path(made) / "families") if options.families else {}

        def run(seed: int, folder: Path) -> str:
            return family_mutations.run(seed, sources, folder) if sources else mutations.run(seed, folder)

        if options.seed is not None:
            print(run(options.seed, folder))
            return 0
        run(0, folder)  # what is imported and compiled on first use counts for nobody
        seed, end = options.first, time.monotonic() + 60 * options.minutes
        while time.monotonic() < end:
            try:
                counts[run(seed, folder)] += 1
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                kind = f"{type(error).__name__} at {Path(where.filename).name}:{where.lineno}: {str(error)[:120]!r}"
                if kind not in failures:
                    print(f"seed {seed}: {kind}", flush=True)
                failures.setdefault(kind, []).append(seed)
            seed += 1
    print(f"{seed - options.first} checkpoints: {dict(counts)}")
    for kind, seeds in failures.items():
        print(f"{len(seeds)} x {kind}, first with --seed {seeds[0]}")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
