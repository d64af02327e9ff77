"""The engines that are known, by name. Each is described in a file of its own."""

from __future__ import annotations

from mtplab.engines.engine import Engine
from mtplab.engines.llamacpp import LlamaCpp
from mtplab.engines.lmdeploy import Lmdeploy
from mtplab.engines.own import Own
from mtplab.engines.sglang import Sglang
from mtplab.engines.tensorrt_llm import TensorrtLlm
from mtplab.engines.vllm import Vllm
from mtplab.errors import ConfigError

__all__ = ["ENGINES", "engine_of"]

_ALL: tuple[Engine, ...] = (Vllm(), Sglang(), Lmdeploy(), TensorrtLlm(), LlamaCpp(), Own())
ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}


def engine_of(name: str) -> Engine:
    """An engine by name. Raises ConfigError for one that is not known."""
    if name not in ENGINES:
        raise ConfigError(f"engine is {name!r:.60}; known are {', '.join(ENGINES)}")
    return ENGINES[name]
