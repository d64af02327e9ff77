"""How a serving engine is reached: one that runs already, or one that is started for each point.

Validated when made and never changed after; JSON-like and picklable, so that it goes to any worker. Knows no engine but
by name, and contacts nobody.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator

from mtplab.config import FrozenConfig
from mtplab.engines.clean import bracketed
from mtplab.errors import ConfigError

__all__ = ["KEY_VARIABLE", "LAUNCHED", "Attach", "Launch", "Limits", "engine_settings"]

#: where an API key is looked for unless told otherwise; the key itself is never in a setting
KEY_VARIABLE = "MTPLAB_API_KEY"
_Launched = Literal["vllm", "sglang", "lmdeploy", "llamacpp", "mtplab"]
LAUNCHED: tuple[str, ...] = get_args(_Launched)
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


class _Settings(FrozenConfig):
    """Made by a user in Python: what is wrong with them is a ConfigError."""

    def __init__(self, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as problem:
            raise ConfigError(type(self).faults(problem)) from None


class Limits(_Settings):
    """Bounds on asking a server. `concurrency`: requests under way at once; with 1, acceptance is counted prompt by
    prompt and rows get intervals. `request`: seconds of one request. `point`: seconds of a point at one depth, all its
    prompts and repetitions. `attempts`: how often a point is measured in all, where a request failed or the server's
    counters cannot be trusted."""

    concurrency: int = Field(default=8, ge=1, le=4096, strict=True)
    request: Seconds = 600.0
    point: Seconds = 6 * 3600.0
    attempts: int = Field(default=3, ge=1, le=100, strict=True)


class Attach(_Settings):
    """Servers that run already, each at a depth of its own. `engine`: its name where the server cannot be recognised;
    `model`: which of its models, where it serves several. The API key is read from the environment variable
    `key_variable`, where there is one."""

    addresses: tuple[str, ...] = Field(min_length=1)
    engine: str | None = None
    model: str | None = None
    key_variable: str = KEY_VARIABLE
    limits: Limits = Limits()

    @field_validator("addresses", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("addresses")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        found = tuple(_address(each) for each in value)
        if len(set(found)) < len(found):
            raise ValueError("names one server twice")
        return found


class Launch(_Settings):
    """An engine that is started for each point. `command`: what starts it, where that is not on the path
    (`("/opt/vllm/bin/vllm", "serve")`); `arguments`: more of its own options, at the end. `served`: the file it is
    given in place of the checkpoint, for engines that read another format (a GGUF). `tp`, `ep`, `dp`: degrees of
    tensor, expert and data parallelism. `start`: seconds until it must answer; `stop`: seconds it is given to end."""

    engine: _Launched
    command: tuple[str, ...] | None = None
    arguments: tuple[str, ...] = ()
    served: str | None = None
    tp: int = Field(default=1, ge=1, le=4096, strict=True)
    ep: int = Field(default=1, ge=1, le=4096, strict=True)
    dp: int = Field(default=1, ge=1, le=4096, strict=True)
    host: str = "127.0.0.1"
    start: Seconds = 1800.0
    stop: Seconds = 30.0
    key_variable: str = KEY_VARIABLE
    limits: Limits = Limits()

    @field_validator("command", "arguments", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else value

    @field_validator("command")
    @classmethod
    def _some(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and not (value and value[0].strip()):
            raise ValueError("expected a program and its arguments, such as ('vllm', 'serve')")
        return value


def engine_settings(given: Any) -> Attach | Launch:
    """What `engine=` means: an address or several, an engine's name, or settings as they are.

    Raises ConfigError for anything else.
    """
    if isinstance(given, Attach | Launch):
        return given
    if isinstance(given, str) and "://" not in given:
        if given not in LAUNCHED:
            raise ConfigError(
                f"engine is {given!r:.60}; expected a server's address (http://host:port), or one of "
                f"{', '.join(LAUNCHED)} to start it"
            )
        return Launch(engine=given)
    if isinstance(given, str | list | tuple):
        return Attach(addresses=given)
    raise ConfigError(
        f"engine is {given!r:.60}; expected a server's address or several, an engine's name, an Attach or a Launch"
    )


def _address(text: Any) -> str:
    """`scheme://host[:port][/path]`, without a slash at its end. Raises ValueError."""
    expected = "expected an address such as http://127.0.0.1:8000"
    try:
        found = urlsplit(text)
        port = found.port
    except (ValueError, TypeError, AttributeError):
        raise ValueError(expected) from None
    if found.username is not None or found.password is not None:
        raise ValueError(f"names or keys in an address would be written down: set {KEY_VARIABLE} in the environment")
    if found.scheme not in ("http", "https") or not found.hostname or found.query or found.fragment:
        raise ValueError(expected)
    if any(ord(sign) <= 32 or ord(sign) == 127 for sign in text):
        raise ValueError(expected)
    # where a client's base is asked for, people give it with /v1 at its end
    path = found.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{found.scheme}://{bracketed(found.hostname)}{'' if port is None else f':{port}'}{path}"
