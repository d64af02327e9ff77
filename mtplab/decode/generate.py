"""`generate`: the public way to run a model, plainly or with drafts.

Splits prompts into batches and gathers the result; `settings.py` checks what was asked, `runner.py` does the work.
Knows nothing of rounds, caches or how a token is chosen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from mtplab.decode.runner import Run
from mtplab.decode.settings import Prompts, resolve_run
from mtplab.decode.state import memory_account
from mtplab.decode.stats import Generation, Progress
from mtplab.decode.threads import on_device, running_with
from mtplab.models import Model
from mtplab.quant.policy import QuantPolicy


def generate(
    model: Model,
    prompts: Prompts,
    depth: int = 3,
    temperature: float = 0.0,
    seed: int = 0,
    max_new_tokens: int = 128,
    *,
    top_k: int = 0,
    top_p: float = 1.0,
    quant_policy: str | int | QuantPolicy | None = None,
    draft_quant_policy: str | int | QuantPolicy | None = None,
    draft_sampling: str = "greedy",
    target_hidden: str | None = None,
    draft_hidden: str | None = None,
    exact: bool | None = None,
    compile: bool = False,
    ignore_eos: bool = False,
    max_batch: int = 64,
    threads: int | None = None,
    on_round: Callable[[Progress], None] | None = None,
    cancel: threading.Event | None = None,
    calibration: Prompts | None = None,
) -> Generation:
    """Continue prompts with speculative decoding.

    Args:
        prompts: a string, strings, or lists of token ids; none empty.
        depth: draft tokens per round, 0 (plain decoding) to 16.
        temperature: 0 is greedy; above, the output's distribution is the target's after top_k and top_p.
        seed: the same call gives the same tokens; with exact arithmetic, however prompts are batched.
        quant_policy: KV-cache policy of the target (the model's default if None); draft_quant_policy: of the draft
            (the target's of this run if None, unless the model was loaded with one of its own).
        draft_sampling: "greedy" drafts are the draft's likeliest tokens at any temperature, "sampled" ones are drawn.
        target_hidden, draft_hidden: hidden states that the head reads and feeds back, "post_norm" or "pre_norm"; None
            for those that the model's family is served with.
        exact: arithmetic whose rows do not depend on each other (the model's setting if None); on a CPU in float32
            only, and `settings["exact"]` says whether it was.
        compile: run the passes through torch.compile: faster at batch 1, after some seconds for each new depth, batch
            or 256 tokens of context; never exact.
        max_batch: prompts decoded at once.
        threads: of the CPU; None means one for a small model, else torch's setting (`threads.thread_count` says why).
        calibration: texts that the scales of a calibrated policy are taken from, as prompts are given.
        on_round: called after every batched round; cancel: an event that ends the run with Cancelled.

    Returns a Generation. Raises ConfigError for settings and prompts that cannot be run.
    """
    asked = resolve_run(
        model,
        prompts,
        depth,
        temperature=temperature,
        seed=seed,
        max_new_tokens=max_new_tokens,
        top_k=top_k,
        top_p=top_p,
        quant_policy=quant_policy,
        draft_quant_policy=draft_quant_policy,
        draft_sampling=draft_sampling,
        target_hidden=target_hidden,
        draft_hidden=draft_hidden,
        exact=exact,
        compile=compile,
        ignore_eos=ignore_eos,
        max_batch=max_batch,
        threads=threads,
        on_round=on_round,
        cancel=cancel,
        calibration=calibration,
    )
    ids, spec, sampling = asked.ids, asked.spec, asked.sampling
    policy, draft_policy = asked.policy, asked.draft_policy
    called = time.perf_counter()
    tokens, records, prefill_seconds, decode_seconds = [], [], 0.0, 0.0
    total, rounds_before = len(ids) * max_new_tokens, 0
    with torch.inference_mode(), running_with(asked.threads), on_device(model.device):
        for first in range(0, len(ids), max_batch):
            batch = ids[first : first + max_batch]
            run = Run(model, batch, spec, sampling, policy, draft_policy, asked.exact, first, compile)
            report = None
            if on_round is not None:

                def report(p: Progress, done: int = first * max_new_tokens, before: int = rounds_before) -> None:
                    nonlocal decode_seconds
                    told = time.perf_counter()
                    on_round(Progress(done + p.tokens_done, total, before + p.rounds))
                    decode_seconds -= time.perf_counter() - told

            began = time.perf_counter()
            prompts_took = run.go(report, cancel)
            prefill_seconds += prompts_took
            decode_seconds += time.perf_counter() - began - prompts_took
            rounds_before += run.batched_rounds
            tokens += run.tokens
            records += run.records
    return Generation(
        tokens=tokens,
        texts=[model.decode(t) if model.tokenizer is not None else "" for t in tokens],
        rounds=records,
        depth=depth,
        seconds=time.perf_counter() - called,
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        memory=memory_account(model, policy, draft_policy),
        settings=asked.to_dict(),
    )
