"""llama.cpp's server through xllamacpp, under `llama-server`'s own names of options: `python serve_llamacpp.py -m FILE
--port PORT …`. Knows nothing of mtplab.

xllamacpp starts that server, and reads no command line and takes no signals. Only options that a sweep gives are known.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from typing import Any

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
MTP = "draft-mtp"


def options() -> argparse.Namespace:
    """llama-server's, with its defaults but for threads."""
    p = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    p.add_argument("-m", "--model", required=True)
    p.add_argument("-a", "--alias", required=True)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8080)
    p.add_argument("-np", "--parallel", type=int, default=1)
    p.add_argument("-c", "--ctx-size", type=int, default=0)
    p.add_argument("-t", "--threads", type=int, default=1)
    for short, long in (("-ctk", "--cache-type-k"), ("-ctv", "--cache-type-v")):
        p.add_argument(short, long, choices=TYPES, default="f16")
        p.add_argument(f"{short}d", f"--spec-draft-type-{long[-1]}", choices=TYPES, default="f16")
    p.add_argument("--spec-type", choices=("none", MTP), default="none")
    p.add_argument("--spec-draft-n-max", type=int, default=3)
    p.add_argument("--spec-draft-n-min", type=int, default=0)
    p.add_argument("--spec-draft-p-min", type=float, default=0.0)
    p.add_argument("--metrics", action="store_true")
    p.add_argument("--no-cache-prompt", action="store_true")
    p.add_argument("-cram", "--cache-ram", type=int, default=8192)
    return p.parse_args()


def params(o: argparse.Namespace) -> Any:
    """The options as the server takes them."""
    import xllamacpp

    def stored(name: str) -> Any:
        return getattr(xllamacpp.ggml_type, f"GGML_TYPE_{name.upper()}")

    p = xllamacpp.CommonParams()
    p.model.path, p.model_alias, p.hostnames, p.port = o.model, {o.alias}, [o.host], o.port
    p.n_parallel, p.n_ctx = o.parallel, o.ctx_size
    p.n_batch, p.n_ubatch = 2048, 512
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = o.threads
    p.cache_type_k, p.cache_type_v = stored(o.cache_type_k), stored(o.cache_type_v)
    p.endpoint_metrics, p.endpoint_slots = o.metrics, True
    p.cache_prompt, p.cache_ram_mib = not o.no_cache_prompt, o.cache_ram
    if key := os.environ.get("LLAMA_API_KEY"):
        p.api_keys = [key]
    if o.spec_type == MTP:
        draft = p.speculative.draft
        p.load_mtp = True
        p.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        draft.n_max, draft.n_min, draft.p_min = o.spec_draft_n_max, o.spec_draft_n_min, o.spec_draft_p_min
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = o.threads
        draft.cache_type_k, draft.cache_type_v = stored(o.spec_draft_type_k), stored(o.spec_draft_type_v)
    return p


def main() -> None:
    """Serve until told to end."""
    import xllamacpp

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    server = xllamacpp.Server(params(options()))  # returns once the model is loaded
    print(f"listening on {server.listening_address}", file=sys.stderr, flush=True)
    while not ended.wait(0.1):
        pass


if __name__ == "__main__":
    main()
