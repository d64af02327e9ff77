"""One depth in llama.cpp, through xllamacpp: `python run_llamacpp.py RESULT < job`. Knows nothing of mtplab.

Greedy, end of text ignored, no prompt cache, float32 caches. With `counts` every prompt runs alone, once streamed, for
the rounds (a chunk's timings change when a round ends), and once more with probabilities, for the ids.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path


def serve(job: dict):
    """A server with `batch` slots that drafts `depth` tokens a round; 0 drafts nothing."""
    import xllamacpp

    float32 = xllamacpp.ggml_type.GGML_TYPE_F32
    p = xllamacpp.CommonParams()
    p.model.path = job["model"]
    room = max(map(len, job["prompts"])) + job["tokens"] + 32
    p.n_parallel, p.n_ctx = job["batch"], room * job["batch"]
    p.n_batch, p.n_ubatch = 2048, 512
    p.cpuparams.n_threads = p.cpuparams_batch.n_threads = job["threads"]
    p.warmup, p.cache_prompt, p.verbosity = False, False, 0
    p.cache_type_k = p.cache_type_v = float32
    if job["depth"]:
        draft = p.speculative.draft
        p.load_mtp = True
        p.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_MTP]
        draft.n_max, draft.n_min, draft.p_min = job["depth"], 0, 0.0
        draft.cpuparams.n_threads = draft.cpuparams_batch.n_threads = job["threads"]
        draft.cache_type_k = draft.cache_type_v = float32
    return xllamacpp.Server(p)


def request(job: dict, ids: list[int]) -> dict:
    """A greedy completion of one prompt."""
    return {
        "prompt": ids,
        "n_predict": job["tokens"],
        "temperature": 0.0,
        "top_k": 1,
        "samplers": ["top_k"],
        "cache_prompt": False,
        "ignore_eos": True,
    }


def complete(server, job: dict) -> int:
    """All prompts, as many at once as the server has slots. Returns the tokens that came of them."""
    done: list[int] = []
    waiting, lock = iter(job["prompts"]), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                ids = next(waiting, None)
            if ids is None:
                return
            done.append(server.handle_completions(request(job, ids))["usage"]["completion_tokens"])

    crew = [threading.Thread(target=work) for _ in range(job["batch"])]
    for each in crew:
        each.start()
    for each in crew:
        each.join()
    return sum(done)


def counted(server, job: dict, ids: list[int]) -> dict:
    """Ids of one prompt's completion, [token, milliseconds, drafted, accepted] of each chunk of its stream, and without
    drafts by how much each token's log-probability leads the next likeliest's."""
    chunks: list[list] = []
    texts: list[str] = []

    def look(chunk: dict) -> bool:
        t = chunk["timings"]
        chunks.append([t["predicted_n"], t["predicted_ms"], t.get("draft_n", 0), t.get("draft_n_accepted", 0)])
        texts.append(chunk["choices"][0]["text"])
        return False

    server.handle_completions({**request(job, ids), "stream": True, "timings_per_token": True}, look)
    choice = server.handle_completions({**request(job, ids), "logprobs": 2})["choices"][0]
    if choice["text"] != "".join(texts):
        raise SystemExit("llama.cpp gave two texts for one prompt, streamed and not: its rounds cannot be told")
    tokens = choice["logprobs"]["content"]
    found = {"ids": [token["id"] for token in tokens], "chunks": chunks}
    if not job["depth"]:
        pairs = ([top["logprob"] for top in token["top_logprobs"]] for token in tokens)
        found["leads"] = [first - second for first, second in pairs]
    return found


def main() -> None:
    """Run the job on stdin."""
    job = json.load(sys.stdin)
    began = time.perf_counter()
    server = serve(job)
    load = time.perf_counter() - began
    found = {"version": f"xllamacpp {version('xllamacpp')}", "load": load}
    if job["counts"]:
        found["outputs"] = [counted(server, job, ids) for ids in job["prompts"]]
    else:
        began = time.perf_counter()
        tokens = complete(server, job)
        found |= {"work": time.perf_counter() - began, "tokens": tokens}
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
