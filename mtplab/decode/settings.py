"""What a caller asks of a run, checked and translated once, for `generate` and `trace` alike.

Knows nothing of rounds or caches.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.config import SamplingConfig, SpecConfig
from mtplab.decode.calibration import bound
from mtplab.decode.threads import model_threads, running_with
from mtplab.errors import ConfigError, not_text
from mtplab.models import Model
from mtplab.models.asked import as_served
from mtplab.quant.fp8_products import uses_kernels
from mtplab.quant.policy import QuantPolicy, resolve_policy

__all__ = ["Prompts", "RunSettings", "resolve_run", "token_ids"]

Prompts = str | Sequence[str] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class RunSettings:
    """A run's settings as they will be: prompts as ids, the draft's and the sampling's configs, cache policies."""

    ids: list[list[int]]
    spec: SpecConfig
    sampling: SamplingConfig
    policy: QuantPolicy
    draft_policy: QuantPolicy
    exact: bool
    max_batch: int
    threads: int

    def to_dict(self) -> dict[str, Any]:
        """The settings without the prompts, as JSON can hold them."""
        return {
            "spec": self.spec.model_dump(),
            "sampling": self.sampling.model_dump(),
            "quant_policy": self.policy.name,
            "exact": self.exact,
            "threads": self.threads,
        }


def resolve_run(
    model: Model,
    prompts: Prompts,
    depth: int,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
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
    on_round: Callable[..., None] | None = None,
    cancel: threading.Event | None = None,
    calibration: Prompts | None = None,
) -> RunSettings:
    """Arguments and defaults as `generate` has them. Raises ConfigError for settings and prompts that cannot be run."""
    if not isinstance(model, Model):
        raise ConfigError(f"model is {model!r:.60}; expected what mtplab.load_model(path) returns")
    if model.config.sliced:
        raise ConfigError(
            f"the model is a slice: {len(model.config.layers)} of {model.config.num_layers} layers of "
            f"{model.checkpoint.path}, whose outputs would not be the model's. Load it without layers=, or study the "
            "slice's arithmetic with mtplab.numerics"
        )
    if cancel is not None and not hasattr(cancel, "is_set"):
        raise ConfigError(f"cancel is {cancel!r:.60}; expected a threading.Event")
    if on_round is not None and not callable(on_round):
        raise ConfigError(f"on_round is {on_round!r:.60}; expected something to call")
    policy = resolve_policy(quant_policy) if quant_policy is not None else model.policy("target")
    if draft_quant_policy is not None:
        draft_policy = resolve_policy(draft_quant_policy)
    else:
        draft_policy = policy.everywhere if model.spec.quant_policy is None else model.policy("draft")
    asked = {
        "depth": depth,
        "draft_sampling": draft_sampling,
        "target_hidden": target_hidden,
        "draft_hidden": draft_hidden,
        "quant_policy": draft_policy.name,
    }
    spec = as_served(SpecConfig.of(**model.spec.model_dump() | asked), model.checkpoint.config)
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
            f"depth is {depth}, but {model.checkpoint.path} has no MTP head (its config.json counts no layer of one); "
            "use depth=0"
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
    threads = model_threads(model, threads)
    texts = None if calibration is None else token_ids(model, calibration, "calibration", "calibration text")
    hidden = spec.target_hidden, spec.draft_hidden
    with running_with(threads):
        policy = bound(model, policy, "target", texts, hidden)
        if depth:
            draft_policy = bound(model, draft_policy, "draft", texts, hidden)
    return RunSettings(ids, spec, sampling, policy, draft_policy, exact, max_batch, threads)


def token_ids(model: Model, prompts: Prompts, name: str = "prompts", one: str = "prompt") -> list[list[int]]:
    """Prompts as lists of ids. Raises ConfigError naming the prompt that is empty or out of the vocabulary; `name` and
    `one` are what its messages call the argument and one of its parts."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Sequence) or not prompts:
        raise ConfigError(
            f"{name} is {prompts!r:.60}; expected a string, or a non-empty list of strings or of lists of ids"
        )
    out = []
    for i, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            fault = not_text(prompt)
            if fault is not None:
                raise ConfigError(f"{one} {i} {fault}")
            ids = model.encode(prompt)
        elif isinstance(prompt, bytes | bytearray):
            raise ConfigError(f"{one} {i} is bytes; expected a string or a list of token ids")
        else:
            try:
                ids = [_token_id(t) for t in prompt]
            except TypeError:
                raise ConfigError(f"{one} {i} is {prompt!r:.60}; expected a string or a list of token ids") from None
        if not ids:
            raise ConfigError(f"{one} {i} is empty; expected at least one token")
        wrong = next((t for t in ids if not 0 <= t < model.config.vocab_size), None)
        if wrong is not None:
            raise ConfigError(f"{one} {i} has token id {wrong}; expected 0 to {model.config.vocab_size - 1}")
        out.append(ids)
    return out


def _token_id(value: object) -> int:
    """A whole number as it is; a float, a string or a bool is a mistake, not an id. Raises TypeError."""
    if isinstance(value, bool):
        raise TypeError("a bool")
    return operator.index(value)
