"""Servers that run already: which engine each is, what it serves, how deep it drafts, whether that is what was asked.

Asks a server a few questions once; what it does not say is taken as told, and said to be. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mtplab.engines.asking import Server
from mtplab.engines.clean import hides, key_of
from mtplab.engines.client import Client
from mtplab.engines.engine import Engine, Known, NotAnAnswer
from mtplab.engines.figures import Samples, samples_of
from mtplab.engines.loop import OutOfTime, in_loop
from mtplab.engines.registry import ENGINES, engine_of
from mtplab.engines.settings import Attach, Limits
from mtplab.errors import ConfigError, MtplabError, printable

__all__ = ["Attached", "NoSuchModel", "attach", "recognised"]

_SECONDS = 30.0  # of one question
_WORD, _NAME = 200, 1000  # characters of a version, and of a model's name, which may be a path
_ALL = 120.0  # of all questions to one server


class NoSuchModel(ConfigError):
    """The server has no model of that name."""


@dataclass(frozen=True)
class Attached:
    """A server that answered (`Serving`); picklable. `engine` is its name; `known` what it says of itself."""

    address: str
    engine: str
    model: str
    known: Known
    limits: Limits
    key_variable: str

    @property
    def key(self) -> str:
        """Points that ask this server."""
        return self.address

    @property
    def title(self) -> str:
        """The engine's, in words."""
        return engine_of(self.engine).title

    @property
    def version(self) -> str | None:
        return self.known.version

    @property
    def depth(self) -> int | None:
        return self.known.depth

    def contradiction(self, quant_policy: str, draft_quant_policy: str, exclusions: str | None = None) -> str | None:
        """What the server says of itself against what a point is said to be; None where nothing does. `exclusions`: the
        label of what is kept out of FP8, None where nobody says."""
        told = self.known.exclusions
        if None not in (told, exclusions) and told != exclusions:
            return (
                f"exclusions are {exclusions!r:.80}, and {self.title} at {self.address} was started with {told!r:.80}; "
                "give what it was started with, or another server"
            )
        for name, asked in (("quant_policy", quant_policy), ("draft_quant_policy", draft_quant_policy)):
            told = getattr(self.known, name)
            # names that one word of the engine's stands for may differ; of two without a word nothing is alike
            alike = told == asked or (self._word(told) is not None and self._word(told) == self._word(asked))
            if told is not None and not alike:
                return (
                    f"{name} is {asked}, and {self.title} at {self.address} says that its cache is {told}; give what "
                    "it was started with, or another server"
                )
        return None

    def untold(self, quant_policy: str, draft_quant_policy: str | None = None, depth: int | None = None) -> str | None:
        """What is taken as told, of the settings that a point is said to have; None where the server says it all."""
        known, engine, told = self.known, engine_of(self.engine), {}
        if depth is not None and known.depth is None:
            told["how deep it drafts"] = f"depth {depth}"
        if known.quant_policy is None:
            told["how its cache is stored"] = f"quant_policy {quant_policy}"
        # with one cache for both, the target's is the draft's too
        if depth and draft_quant_policy is not None and known.draft_quant_policy is None and engine.draft_cache:
            told["how its draft's cache is stored"] = f"draft_quant_policy {draft_quant_policy}"
        if not told:
            return None
        verb = "is" if len(told) == 1 else "are"
        return f"{self.title} does not say {', '.join(told)}: {', '.join(told.values())} {verb} as told"

    def encode(self, text: str) -> list[int]:
        """A text's ids by the server's own tokenizer. Raises ConfigError where it gives none."""
        engine = engine_of(self.engine)
        if engine.tokenize_path is None:
            raise ConfigError(
                f"{engine.title} gives no ids of a text: give the checkpoint's folder, for its tokenizer, or prompts "
                "as lists of ids"
            )

        async def ask() -> list[int]:
            async with self._client() as client:
                given = await client.post(engine.tokenize_path, engine.tokenize(self.model, text))
            try:
                return engine.tokens(given)
            except NotAnAnswer as problem:
                raise MtplabError(f"{self.address}{engine.tokenize_path}: no tokens: {problem}") from None

        return in_loop(ask, None, _ALL)

    def open(self, cancel: Any) -> Server:
        """As it runs (`Serving`)."""
        engine = engine_of(self.engine)
        told = {name: value for name, value in vars(self.known).items() if value is not None}
        facts = {"attached": True, **engine.described(), **told}
        return Server(self.address, engine, self.model, self.limits, key_of(self.key_variable), facts)

    def _client(self) -> Client:
        return Client(self.address, key_of(self.key_variable), seconds=min(_SECONDS, self.limits.request))

    def _word(self, policy: str | None) -> str | None:
        return None if policy is None else engine_of(self.engine).cache(policy)


def attach(settings: Attach) -> list[Attached]:
    """Every server of the settings, in their order. Raises MtplabError where one does not answer or is no engine that
    is known, ConfigError where the settings do not fit it."""
    return [_recognised(address, settings) for address in settings.addresses]


def _recognised(address: str, settings: Attach) -> Attached:
    async def ask() -> Attached:
        key, seconds = key_of(settings.key_variable), min(_SECONDS, settings.limits.request)
        async with Client(address, key, seconds=seconds) as client:
            return await recognised(client, settings)

    try:
        return in_loop(ask, None, _ALL)
    except OutOfTime as problem:
        raise OutOfTime(f"{address}: what it is could not be asked: {problem}") from None
    except MtplabError as problem:
        # whatever was made of what it said
        raise type(problem)(hides(filter(None, [key_of(settings.key_variable)]))(str(problem))) from None


async def recognised(client: Client, settings: Attach) -> Attached:
    """What a client's server is. Raises Broken, Refused; NoSuchModel where it has not the settings' model; MtplabError
    where it is no engine that is known, or not the one that was said."""
    address = client.address
    # first, for what is known by its name alone
    model = _model(await client.get_json(Engine.models_path), settings, address)
    engine, samples = await _engine(client, settings)
    about = {}
    for path in engine.about_paths:
        try:
            about[path] = await client.get_json(path)
        except MtplabError:
            about[path] = None  # closed to us, or not this build's
    known = _sound(engine.known(about, samples), engine, address)
    return Attached(address, engine.name, model, known, settings.limits, settings.key_variable)


def _sound(known: Known, engine: Engine, address: str) -> Known:
    """What a server says of itself, where it can be that. Raises MtplabError."""
    for name, value in vars(known).items():
        number = name in ("depth", "tp", "ep", "dp")
        fits = type(value) is int and 0 <= value < 10_000 if number else isinstance(value, str) and len(value) <= _WORD
        if value is not None and not (fits and (number or printable(value) == value)):
            raise MtplabError(
                f"{address}: {engine.title} says that its {name} is {printable(repr(value)[:60])}; expected "
                f"{'a whole number' if number else f'at most {_WORD} characters of text'}"
            )
    return known


async def _engine(client: Client, settings: Attach) -> tuple[Engine, Samples]:
    """Which engine's figures a server shows."""
    asked = engine_of(settings.engine) if settings.engine is not None else None
    engines = [asked] if asked is not None else list(ENGINES.values())
    statuses: dict[str, int] = {}
    for path in dict.fromkeys(engine.metrics_path for engine in engines):
        status, text = await client.get(path)
        statuses[path] = status
        if status != 200:
            continue
        try:
            samples = samples_of(text, tuple(prefix for engine in engines for prefix in engine.prefixes))
        except MtplabError:
            continue  # another engine's path for something else
        for engine in engines:
            if engine.metrics_path == path and (asked is not None or _shows(engine, samples)):
                return engine, samples
    raise MtplabError(_unknown(client.address, statuses, asked))


def _shows(engine: Engine, samples: Samples) -> bool:
    return any(name.startswith(engine.prefixes) for name in samples)


def _unknown(address: str, statuses: Mapping[str, int], asked: Engine | None) -> str:
    tried = ", ".join(f"{path}: status {status}" for path, status in statuses.items())
    if 200 not in statuses.values():
        flags = [f"{each.title} {each.metrics_flag}" for each in ENGINES.values() if each.metrics_flag]
        hint = asked.metrics_flag if asked is not None and asked.metrics_flag else "; ".join(flags)
        return f"{address} shows no metrics ({tried}), and acceptance is counted from them; they need: {hint}"
    known = ", ".join(engine.title for engine in ENGINES.values())
    return f"{address}: its metrics are of no engine that is known ({tried}); known are {known}"


def _model(models: Any, settings: Attach, address: str) -> str:
    try:
        names = Engine().model(models)
    except NotAnAnswer as problem:
        raise NoSuchModel(f"{address}{Engine.models_path}: {problem}") from None
    if any(len(name) > _NAME for name in names):
        raise NoSuchModel(f"{address}{Engine.models_path}: a model's name of more than {_NAME} characters")
    if settings.model is not None:
        if settings.model not in names:
            there = ", ".join(map(printable, names[:5]))
            raise NoSuchModel(f"{address} has no model {settings.model!r:.80}; it has {there}")
        return settings.model
    if len(names) > 1:
        raise ConfigError(f"{address} has {len(names)} models: say which, of {', '.join(map(printable, names[:5]))}")
    return names[0]
