"""`generate`: the public way to run a model, plainly or with drafts.

Checks and translates what the caller gave, splits prompts into batches, gathers the result; `runner.py` does the work.
Knows nothing of rounds, caches or how a token is chosen.
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable, Sequence

import torch

from mtplab.config import SamplingConfig, SpecConfig
from mtplab.decode.runner import Run
from mtplab.decode.state import memory_account
from mtplab.decode.stats import Generation, Progress
from mtplab.decode.threads import on_device, running_with, thread_count
from mtplab.errors import ConfigError, not_text
from mtplab.models import Model
from mtplab.quant.fp8_products import uses_kernels
from mtplab.quant.policy import QuantPolicy, resolve_policy

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


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
    target_hidden: str = "post_norm",
    draft_hidden: str = "post_norm",
    exact: bool | None = None,
    compile: bool = False,
    ignore_eos: bool = False,
    max_batch: int = 64,
    threads: int | None = None,
    on_round: Callable[[Progress], None] | None = None,
    cancel: threading.Event | None = None,
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
        target_hidden, draft_hidden: hidden states that the head reads and feeds back, "post_norm" or "pre_norm".
        exact: arithmetic whose rows do not depend on each other (the model's setting if None); on a CPU in float32
            only, and `settings["exact"]` says whether it was.
        compile: run the passes through torch.compile: faster at batch 1, after some seconds for each new depth, batch
            or 256 tokens of context; never exact.
        max_batch: prompts decoded at once.
        threads: of the CPU; None means one for a small model, else torch's setting (`threads.thread_count` says why).
        on_round: called after every batched round; cancel: an event that ends the run with Cancelled.

    Returns a Generation. Raises ConfigError for settings and prompts that cannot be run.
    """
    if not isinstance(model, Model):
        raise ConfigError(f"model is {model!r:.60}; expected what mtplab.load_model(path) returns")
    if cancel is not None and not hasattr(cancel, "is_set"):
        raise ConfigError(f"cancel is {cancel!r:.60}; expected a threading.Event")
    if on_round is not None and not callable(on_round):
        raise ConfigError(f"on_round is {on_round!r:.60}; expected something to call")
    policy = resolve_policy(quant_policy) if quant_policy is not None else model.policy("target")
    if draft_quant_policy is not None:
        draft_policy = resolve_policy(draft_quant_policy)
    else:
        draft_policy = policy if model.spec.quant_policy is None else model.policy("draft")
    asked = {
        "depth": depth,
        "draft_sampling": draft_sampling,
        "target_hidden": target_hidden,
        "draft_hidden": draft_hidden,
        "quant_policy": draft_policy.name,
    }
    spec = SpecConfig.of(**model.spec.model_dump() | asked)
    sampling = SamplingConfig.of(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_new_tokens=max_new_tokens,
        ignore_eos=ignore_eos,
    )
    if depth and model.draft is None:
        raise ConfigError(
            f"depth is {depth}, but {model.checkpoint.path} has no MTP head (mtp_num_hidden_layers is "
            f"{model.config.mtp_layers}); use depth=0"
        )
    if not isinstance(max_batch, int) or isinstance(max_batch, bool) or max_batch < 1:
        raise ConfigError(f"max_batch is {max_batch!r}; expected a whole number of at least 1")
    for name, flag in (("exact", exact), ("compile", compile)):
        if flag not in (None, True, False):
            raise ConfigError(f"{name} is {flag!r}; expected True or False")
    if compile and exact:
        raise ConfigError("compile and exact are both true; compiled arithmetic is not exact: choose one")
    if compile and uses_kernels(model.device):
        raise ConfigError(
            "compile is true, and this run uses Triton's kernels, which torch.compile would only wrap: leave compile "
            "out, or set MTPLAB_KERNELS=reference for torch's own operators"
        )
    wanted = model.engine.exact and not compile if exact is None else exact
    exact = bool(wanted) and model.can_be_exact
    ids = token_ids(model, prompts)
    room = model.config.max_position - max_new_tokens
    long = next((i for i, prompt in enumerate(ids) if len(prompt) > room), None)
    if long is not None:
        raise ConfigError(
            f"prompt {long} has {len(ids[long])} tokens, and with {max_new_tokens} new ones passes the model's "
            f"max_position_embeddings of {model.config.max_position}; shorten it or lower max_new_tokens"
        )

    threads = thread_count(threads, sum(math.prod(module.shape) for module in model.plan.modules), model.device)
    called = time.perf_counter()
    tokens, records, prefill_seconds, decode_seconds = [], [], 0.0, 0.0
    total, rounds_before = len(ids) * max_new_tokens, 0
    with torch.inference_mode(), running_with(threads), on_device(model.device):
        for first in range(0, len(ids), max_batch):
            batch = ids[first : first + max_batch]
            run = Run(model, batch, spec, sampling, policy, draft_policy, exact, first, compile)
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
        settings={
            "spec": spec.model_dump(),
            "sampling": sampling.model_dump(),
            "quant_policy": policy.name,
            "exact": exact,
            "threads": threads,
        },
    )


def token_ids(model: Model, prompts: Prompts) -> list[list[int]]:
    """Prompts as lists of ids. Raises ConfigError naming the prompt that is empty or out of the vocabulary."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise ConfigError(
            f"prompts is {prompts!r}; expected a string, or a non-empty list of strings or of lists of ids"
        )
    out = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            fault = not_text(prompt)
            if fault is not None:
                raise ConfigError(f"prompt {i} {fault}")
            ids = model.encode(prompt)
        elif isinstance(prompt, bytes | bytearray):
            raise ConfigError(f"prompt {i} is bytes; expected a string or a list of token ids")
        else:
            try:
                ids = [_token_id(t) for t in prompt]
            except TypeError:
                raise ConfigError(f"prompt {i} is {prompt!r:.60}; expected a string or a list of token ids") from None
        if not ids:
            raise ConfigError(f"prompt {i} is empty; expected at least one token")
        wrong = next((t for t in ids if not 0 <= t < model.config.vocab_size), None)
        if wrong is not None:
            raise ConfigError(f"prompt {i} has token id {wrong}; expected 0 to {model.config.vocab_size - 1}")
        out.append(ids)
    return out


def _token_id(value: object) -> int:
    """A whole number as it is; a float, a string or a bool is a mistake, not an id. Raises TypeError."""
    if isinstance(value, bool):
        raise TypeError("a bool")
    return operator.index(value)
