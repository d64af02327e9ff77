"""Accepted drafts of the bundled model in llama.cpp (through xllamacpp), depth by depth.

    python data/recipe/peers/llama_cpp.py WORK/tiny.gguf data/tiny-qwen3_5/tokenizer.json

In an environment with xllamacpp and tokenizers. Greedy, one thread, 256 tokens, no prompt cache; one JSON line per
prompt and depth. This script knows nothing of mtplab.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import xllamacpp
from tokenizers import Tokenizer

PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text())
TOKENS = 256


def serve(model: str, depth: int) -> xllamacpp.Server:
    """A server with `depth` MTP drafts a round; 0 drafts nothing."""
    p = xllamacpp.CommonParams()
    p.model.path = model
    p.n_ctx, p.n_parallel, p.n_batch, p.n_ubatch = 1024, 1, 512, 512
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = 1
    p.warmup, p.cache_prompt, p.verbosity = False, False, 0
    p.cache_type_k = p.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    if depth:
        p.load_mtp = True
        p.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        p.speculative.draft.n_max, p.speculative.draft.n_min, p.speculative.draft.p_min = depth, 0, 0.0
        p.speculative.draft.cpuparams.n_threads = p.speculative.draft.cpuparams_batch.n_threads = 1
        p.speculative.draft.cache_type_k = p.speculative.draft.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    return xllamacpp.Server(p)


def main() -> None:
    model, tokenizer = sys.argv[1], Tokenizer.from_file(sys.argv[2])
    for depth in range(5):
        server = serve(model, depth)
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt["text"]).ids
            request = {"prompt": ids, "n_predict": TOKENS, "temperature": 0.0, "top_k": 1, "samplers": ["top_k"],
                       "cache_prompt": False}  # fmt: skip
            began = time.perf_counter()
            answer = server.handle_completions(request)
            seconds = time.perf_counter() - began
            timings = answer["timings"]
            print(json.dumps({"engine": "llama.cpp", "prompt": prompt["text"], "domain": prompt["domain"],
                              "depth": depth, "tokens": answer["usage"]["completion_tokens"],
                              "drafted": timings.get("draft_n", 0), "accepted": timings.get("draft_n_accepted", 0),
                              "seconds": round(seconds, 3),
                              "text": answer["choices"][0]["text"]}), flush=True)  # fmt: skip
        del server


if __name__ == "__main__":
    main()
