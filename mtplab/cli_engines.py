"""Options of commands that can run on a serving engine, and the settings they make.

Knows no engine: names and addresses are checked where settings are made.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli_common import path_of
from mtplab.errors import ConfigError

__all__ = [
    "ApiKeyVariable",
    "Concurrency",
    "Engine",
    "EngineArguments",
    "EngineCommand",
    "EngineFile",
    "Parallel",
    "PrintCommands",
    "RequestSeconds",
    "ServedModel",
    "StartSeconds",
    "engine_of_options",
]

Engine = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME|ADDRESS",
        help="A serving engine that runs the points: the address of a server that runs (http://host:port; repeat for "
        "servers of other depths), or vllm, sglang, lmdeploy, llamacpp or mtplab, which is then started for each "
        "point.  [default: mtplab's own runner, here]",
    ),
]
EngineCommand = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS", help="What starts the engine, where it is not on the path: '/opt/vllm/bin/vllm serve'."
    ),
]
EngineArguments = Annotated[
    str | None, typer.Option(metavar="WORDS", help="More of the engine's own options: '--max-model-len 4096'.")
]
EngineFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="What the engine is to load in place of PATH: a GGUF.", parser=path_of),
]
Parallel = Annotated[
    str | None, typer.Option(metavar="DEGREES", help="Of a started engine: 'tp=8', 'tp=4,dp=2,ep=8'.  [default: 1]")
]
Concurrency = Annotated[
    int | None,
    typer.Option(metavar="N", help="Requests at once; with 1, each prompt is counted by itself.  [default: 8]"),
]
RequestSeconds = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="A request may take.  [default: 600]")
]
StartSeconds = Annotated[
    float | None, typer.Option(metavar="SECONDS", help="An engine may take to start.  [default: 1800]")
]
ServedModel = Annotated[
    str | None, typer.Option(metavar="NAME", help="Which of a running server's models, where it has several.")
]
ApiKeyVariable = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="The environment variable that holds the API key.  [default: MTPLAB_API_KEY]"),
]
PrintCommands = Annotated[
    bool,
    typer.Option("--print-commands", help="Only print what would be started, for a cluster's own scheduler."),
]


def engine_of_options(
    engines: list[str] | None,
    command: str | None,
    arguments: str | None,
    file: Path | None,
    parallel: str | None,
    concurrency: int | None,
    request_seconds: float | None,
    start_seconds: float | None,
    model: str | None,
    key_variable: str | None,
) -> Any:
    """`sweep`'s `engine=`; None without `--engine`. Raises ConfigError for options that do not go together."""
    started = {
        "--engine-command": command,
        "--engine-args": arguments,
        "--engine-file": file,
        "--parallel": parallel,
        "--start-timeout": start_seconds,
    }
    attached = {"--served-model": model}
    both = {"--concurrency": concurrency, "--request-timeout": request_seconds, "--api-key-env": key_variable}
    if not engines:
        _refuse(started | attached | both, "is for a serving engine: give --engine too")
        return None
    from mtplab.engines import Attach, Launch, Limits, engine_settings  # which bring pydantic: help is printed without

    if key_variable is not None and not os.environ.get(key_variable):
        raise ConfigError(
            f"--api-key-env {key_variable[:60]!r}: no such variable in the environment, or an empty one; it names the "
            "variable that holds the key"
        )
    limits = Limits.of(**_given(concurrency=concurrency, request=request_seconds))
    common = {"limits": limits, **_given(key_variable=key_variable)}
    if all("://" in each for each in engines):
        _refuse(started, "is for an engine that is started; this one runs already")
        return Attach.of(addresses=tuple(engines), **common, **_given(model=model))
    if len(engines) > 1:
        raise ConfigError(
            f"--engine is given {len(engines)} times, {', '.join(engines)[:80]}; expected one engine, or addresses of "
            "servers only"
        )
    _refuse(attached, "is for a server that runs already")
    engine_settings(engines[0])
    return Launch.of(
        engine=engines[0],
        **common,
        **_degrees(parallel),
        **_given(
            command=_words("--engine-command", command),
            arguments=_words("--engine-args", arguments),
            served=None if file is None else str(file),
            start=start_seconds,
        ),
    )


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _refuse(options: dict[str, Any], why: str) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(f"{option} {str(value)[:60]} {why}")


def _words(option: str, text: str | None) -> tuple[str, ...] | None:
    try:
        return None if text is None else tuple(shlex.split(text))
    except ValueError as problem:
        raise ConfigError(f"{option} {text!r:.60}: {problem}; quote as in a shell") from None


def _degrees(text: str | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in text.split(",") if text is not None else []:
        name, equals, number = part.strip().partition("=")
        if name not in ("tp", "ep", "dp") or not equals or not (number.isascii() and number.isdigit()) or name in found:
            raise ConfigError(f"--parallel {text!r:.60}: {part.strip()!r:.20}; expected degrees such as tp=4,dp=2")
        found[name] = int(number[:9])
    return found
