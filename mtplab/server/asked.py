"""What a request asks for, out of its JSON: which fields there are, which values they take, and how one is refused.

OpenAI's names, and vLLM's for what OpenAI has none for. What would change the answer and is not done here is refused,
never ignored. Knows nothing of HTTP beyond the status, and nothing of models: what only a model can tell (an id out of
its vocabulary) is for `service.py`.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, Field

from mtplab.checkpoint.strict_json import load_object, shown
from mtplab.config import FrozenConfig
from mtplab.errors import CheckpointError, ConfigError, printable

__all__ = ["CompletionRequest", "Refused", "TokenizeRequest", "read_body"]

# fields that a client may send as long as they ask for nothing
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "stop": ([],),
    "stop_token_ids": ([],),
    "logit_bias": ({},),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "skip_special_tokens": (True,),
    "logprobs": (),
    "prompt_logprobs": (),
    "stream_options": (),
    "suffix": (),
}
_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "server_error"}


class Refused(Exception):
    """A request that is answered with an error: the HTTP status, and OpenAI's `code` for programs."""

    def __init__(self, status: int, message: str, code: str = "invalid_request"):
        super().__init__(printable(message))
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "code": self.code}}


def read_body(data: bytes) -> dict[str, Any]:
    """The JSON object of a request, fields that are null left out. Raises Refused."""
    if not data.strip():
        raise Refused(400, "the request has no body; expected a JSON object", "invalid_json")
    try:
        found = load_object(data, "the request's body")
    except CheckpointError as problem:
        raise Refused(400, str(problem), "invalid_json") from None
    return {name: value for name, value in found.items() if value is not None}


class _Request(FrozenConfig):
    model_config = ConfigDict(strict=True)

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        """From a body's fields. Raises Refused naming the field, its value and what was expected."""
        unknown = next((name for name in body if name not in cls.model_fields), None)
        if unknown is not None:
            raise Refused(
                400,
                f"{shown(unknown, 60)} is not understood here; expected {', '.join(cls.model_fields)}",
                "unknown_field",
            )
        try:
            return cls.of(**body)
        except ConfigError as problem:
            raise Refused(400, str(problem), "invalid_value") from None


class CompletionRequest(_Request):
    """The body of `POST /v1/completions`; `prompt` is looked at where the model is."""

    prompt: Any
    model: str | None = None
    max_tokens: int = Field(default=16, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=-1)  # 0 and vLLM's -1 keep all
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    ignore_eos: bool = False
    return_token_ids: bool = False
    add_special_tokens: bool = False
    user: str | None = None

    @classmethod
    def read(cls, body: dict[str, Any]) -> Self:
        asked = {}
        for name, value in body.items():
            if name not in _NEUTRAL:
                asked[name] = value
            elif not any(type(value) is type(each) and value == each for each in _NEUTRAL[name]):
                neutral = " or ".join(["absent", *(repr(each) for each in _NEUTRAL[name][:1])])
                raise Refused(400, f"{name} is {value!r:.60}; this study server takes only {neutral}", "unsupported")
        return super().read(asked)


class TokenizeRequest(_Request):
    """The body of `POST /tokenize`, in vLLM's form. Special tokens are left out unless asked for, as a completion here
    reads its text without them; vLLM adds them unless told not to."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = False
