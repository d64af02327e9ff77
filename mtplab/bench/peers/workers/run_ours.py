"""Every depth from one trace: `python -m mtplab.bench.peers.workers.run_ours RESULT < job`.

Loading the checkpoint, tracing all prompts at once in exact float32 and reading off every depth's counts; `depth` is
the deepest. Runs in mtplab's own environment, as a process like the engines'.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main() -> None:
    """Run the job on stdin."""
    job = json.load(sys.stdin)
    from mtplab import __version__
    from mtplab.models import load_model
    from mtplab.study.trace import trace

    began = time.perf_counter()
    model = load_model(job["model"])
    load = time.perf_counter() - began
    began = time.perf_counter()
    made = trace(
        model,
        job["prompts"],
        job["depth"],
        max_new_tokens=job["tokens"],
        max_batch=job["batch"],
        threads=job["threads"],
        ignore_eos=True,
        exact=True,
    )
    found = made.acceptance()
    rounds = [found.stats(depth).rounds for depth in found.depths]
    work = time.perf_counter() - began
    out = {"version": f"mtplab {__version__}", "load": load, "work": work, "rounds": rounds,
           "tokens": sum(map(len, made.outputs))}  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(out), encoding="utf-8")


if __name__ == "__main__":
    main()
