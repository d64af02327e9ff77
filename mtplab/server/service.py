"""Requests answered with a loaded model: prompts to `mtplab.generate`, its result in OpenAI's form.

One generation at a time, in the order of arrival; a request's prompts are one batch. What leaves here names no path of
this machine. Knows nothing of sockets: who asks says how to tell that the client has left.
"""

from __future__ import annotations

import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from mtplab.config import exclude_label
from mtplab.decode import Cancelled, Generation, generate, token_ids
from mtplab.decode.settings import Prompts, resolve_run
from mtplab.errors import ConfigError, MtplabError, printable
from mtplab.models import Model
from mtplab.quant.policy import QuantPolicy
from mtplab.server.asked import CompletionRequest, Refused, TokenizeRequest
from mtplab.server.counts import Counts

__all__ = ["ClientGone", "Service"]

MAX_PROMPTS = 256  # of one request: they are one batch
# seconds between two looks at whether the client is still there
_LOOK = 0.1
_MAX_MESSAGE = 600
_PATH = re.compile(r"(?<![\w./-])/(?:[^\s/'\":;,()]+/)+([^\s/'\":;,()]*)")


class ClientGone(Exception):
    """Whoever asked has left: nothing is to be answered."""


class Service:
    """A model and the settings that every request is run with.

    Arguments are `serve`'s. Raises ConfigError for settings that this model cannot be run with, before any request is.
    """

    def __init__(
        self,
        model: Model,
        depth: int = 3,
        *,
        quant_policy: str | int | QuantPolicy | None = None,
        draft_quant_policy: str | int | QuantPolicy | None = None,
        calibration: Prompts | None = None,
        seed: int = 0,
        exact: bool | None = None,
        name: str | None = None,
    ):
        self.settings = {
            "depth": depth,
            "quant_policy": quant_policy,
            "draft_quant_policy": draft_quant_policy,
            "exact": exact,
            "calibration": calibration,
        }
        asked = resolve_run(model, [[0]], max_new_tokens=1, seed=seed, **self.settings)
        self.model, self.depth, self.seed = model, depth, seed
        self.name = printable(model.checkpoint.path.resolve().name if name is None else name)
        if not self.name.strip():
            raise ConfigError(f"the served model's name is {self.name!r}; expected one that is not empty")
        self.policies = asked.policy.name, asked.draft_policy.name if depth else None
        self.exact = asked.exact
        self.counts = Counts(depth)
        self.started = int(time.time())
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="mtplab-serve")
        self._stopping = threading.Event()
        self._at_work = threading.Lock()

    @property
    def stopping(self) -> bool:
        """Whether no more requests are taken."""
        return self._stopping.is_set()

    def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        served = {"id": self.name, "object": "model", "created": self.started, "owned_by": "mtplab"}
        return {"object": "list", "data": [served | {"max_model_len": self.model.config.max_position}]}

    def info(self) -> dict[str, Any]:
        """`GET /server_info`: what an answer's acceptance depends on."""
        model = self.model
        quantised = bool(model.engine.model_format or model.spec.model_format or model.checkpoint.quantization)
        return {
            "model": self.name,
            "depth": self.depth,
            "quant_policy": self.policies[0],
            "draft_quant_policy": self.policies[1],
            "exclude": exclude_label(model.engine.exclude, quantised),
            "draft_exclude": exclude_label(model.spec.exclude, quantised),
            "model_format": model.engine.model_format,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "exact": self.exact,
            "seed": self.seed,
            "max_model_len": model.config.max_position,
        }

    def tokenize(self, body: dict[str, Any]) -> dict[str, Any]:
        """`POST /tokenize`. Raises Refused."""
        asked = TokenizeRequest.read(body)
        self._check_name(asked.model)
        try:
            ids = self._encode(asked.prompt, asked.add_special_tokens)
        except MtplabError as problem:
            raise Refused(400, self.said(problem), "invalid_value") from None
        return {"tokens": ids, "count": len(ids), "max_model_len": self.model.config.max_position}

    def complete(self, body: dict[str, Any], gone: Callable[[], bool]) -> dict[str, Any]:
        """`POST /v1/completions`, waited for. Raises Refused, and ClientGone once `gone` says so."""
        asked = CompletionRequest.read(body)
        self._check_name(asked.model)
        options = {
            "max_new_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": max(asked.top_k, 0),
            "seed": self.seed if asked.seed is None else asked.seed,
            "ignore_eos": asked.ignore_eos,
        }
        try:
            ids = self._prompts(asked.prompt, asked.add_special_tokens)
            # what cannot be run is refused before it waits for its turn
            resolve_run(self.model, ids, **self.settings, **options)
        except MtplabError as problem:
            raise Refused(400, self.said(problem), "invalid_value") from None
        return self._answer(asked, ids, self._in_turn(ids, options, gone))

    def said(self, problem: BaseException) -> str:
        """A failure in one line, with the names that a request uses and without a path of this machine."""
        text = " ".join(str(problem).split()) or type(problem).__name__
        for path in {str(self.model.checkpoint.path), str(self.model.checkpoint.path.resolve())}:
            text = text.replace(path, self.name)
        text = _PATH.sub(r"…/\1", text).replace("max_new_tokens", "max_tokens")
        return printable(text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…")

    def stop(self, wait: bool = True) -> None:
        """Takes no more requests and ends those that wait or run, after the current round; `wait`: for that round."""
        self._stopping.set()
        self._worker.shutdown(wait=wait, cancel_futures=True)

    def idle(self, within: float) -> bool:
        """Whether nothing runs any more, waited for that many seconds at most."""
        free = self._at_work.acquire(timeout=within)
        if free:
            self._at_work.release()
        return free

    def _check_name(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise Refused(404, f"model is {name!r:.120}; this server has {self.name!r:.120}", "model_not_found")

    def _encode(self, text: str, special: bool) -> list[int]:
        ids = self.model.encode(text)  # which checks that it is text, and that there is a tokenizer
        return self.model.tokenizer.encode(text, add_special_tokens=True).ids if special else ids

    def _prompts(self, prompt: Any, special: bool) -> list[list[int]]:
        """OpenAI's four forms as lists of ids. Raises ConfigError, CheckpointError."""
        if isinstance(prompt, dict):
            raise ConfigError(f"prompt is {prompt!r:.60}; expected a string, strings, ids, or lists of ids")
        if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
            prompt = [prompt]
        if isinstance(prompt, str):
            prompt = [prompt]
        if isinstance(prompt, list) and len(prompt) > MAX_PROMPTS:
            raise ConfigError(
                f"prompt holds {len(prompt)} prompts; expected at most {MAX_PROMPTS}: send several requests"
            )
        if special and isinstance(prompt, list):
            prompt = [self._encode(each, True) if isinstance(each, str) and each else each for each in prompt]
        return token_ids(self.model, prompt, "prompt", "prompt")

    def _in_turn(self, ids: list[list[int]], options: dict[str, Any], gone: Callable[[], bool]) -> Generation:
        cancel = threading.Event()
        self.counts.queued(len(ids))
        try:
            if self.stopping:
                raise RuntimeError
            future = self._worker.submit(self._run, ids, options, cancel)
        except RuntimeError:  # what a pool that is shut down raises
            self.counts.unqueued(len(ids))
            raise _stopped() from None
        left = False
        while not self._over(future) and not (left := gone()):
            if self.stopping:
                cancel.set()
        if left:
            cancel.set()
        if future.cancel() or future.cancelled():
            self.counts.unqueued(len(ids))
            raise ClientGone if left else _stopped()
        if left:
            raise ClientGone
        try:
            return future.result()
        except Cancelled:
            raise _stopped() from None
        except ConfigError as problem:
            raise Refused(400, self.said(problem), "invalid_value") from None

    @staticmethod
    def _over(future: Future[Generation]) -> bool:
        wait([future], timeout=_LOOK)
        return future.done()  # one that was cancelled while it waited is, though nothing tells `wait` of it

    def _run(self, ids: list[list[int]], options: dict[str, Any], cancel: threading.Event) -> Generation:
        self.counts.began(len(ids))
        try:
            if cancel.is_set():
                raise Cancelled("cancelled before the first round")
            with self._at_work:
                found = generate(self.model, ids, **self.settings, **options, max_batch=len(ids), cancel=cancel)
        except BaseException:
            self.counts.failed(len(ids))
            raise
        self.counts.finished(ids, found.tokens, found.stats)
        return found

    def _answer(self, asked: CompletionRequest, ids: list[list[int]], found: Generation) -> dict[str, Any]:
        ends = () if asked.ignore_eos else self.model.config.eos_token_ids
        choices = []
        for index, (tokens, text, stats) in enumerate(zip(found.tokens, found.texts, found.per_prompt, strict=True)):
            choice = {
                "index": index,
                "text": text,
                "logprobs": None,
                "finish_reason": "stop" if tokens[-1] in ends else "length",
            }
            if asked.return_token_ids:
                choice["token_ids"] = list(tokens)
            choice["spec_decode"] = (
                {
                    "rounds": stats.rounds,
                    "drafted": stats.drafted,
                    "accepted": stats.accepted,
                    "per_position": list(stats.accepted_per_position),
                }
                if self.depth
                else None
            )
            choices.append(choice)
        return {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
            "usage": _usage(ids, found.tokens),
        }


def _usage(ids: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> dict[str, int]:
    read, written = sum(map(len, ids)), sum(map(len, tokens))
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _stopped() -> Refused:
    return Refused(503, "the server is stopping; ask another one", "stopping")
