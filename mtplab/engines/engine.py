"""What a description of a serving engine holds: what it counts under which names, how it is asked, how it is started.

One subclass an engine, in a file of its own, with its sources and the version they were read at. A description holds
facts and translates; it sends nothing and starts nothing. What an engine has no name for stays None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from mtplab.checkpoint.config_json import read_config, text_config
from mtplab.config import SamplingConfig
from mtplab.engines.measured import Counts
from mtplab.engines.settings import Launch
from mtplab.errors import ConfigError
from mtplab.quant.policy import resolve_policy

__all__ = [
    "Answer",
    "Engine",
    "Figures",
    "Known",
    "NotAnAnswer",
    "Wanted",
    "count_of",
    "counts_of_histogram",
    "object_of",
    "text_of",
    "whole_numbers",
]

#: a figure's name, or (name, label, its value) where only samples of that label are meant
Name = str | tuple[str, str, str]


@dataclass(frozen=True)
class Figures:
    """Names of an engine's figures in its Prometheus text, each cumulative since the server started and summed over all
    labels but those named. None: not exported.

    `rounds`: verifications. `drafted`, `accepted`: draft tokens, no bonus among them. `positions`: (name, label) of
    accepted tokens by position, the label counting from 0. `requests`: requests that have ended. `busy`: gauges of
    requests under way or waiting, where they are of the moment. `plain_steps`: whether a request's steps without drafts
    are left out of `rounds`, such as the last token's where nothing is left to draft, or the first one's after it was
    put off. `cut`: whether drafts accepted beyond the end of a text count. `lossy`: whether rounds may go uncounted.
    `digits`: how many a value is written with, None where always all. `shortens`: whether a request's last rounds draft
    no more than its budget leaves. `all_positions`: whether every position has a sample once there was a round, one
    at which nothing was accepted too.
    """

    rounds: Name
    drafted: Name | None
    accepted: Name | None
    positions: tuple[str, str] | None
    requests: Name | None
    prompt_tokens: Name | None
    generation_tokens: Name | None
    busy: tuple[str, ...]
    plain_steps: bool = False
    cut: bool = True
    lossy: bool = False
    digits: int | None = None
    shortens: bool = False
    all_positions: bool = False


@dataclass(frozen=True)
class Answer:
    """One completion. `ids`: its tokens, None where the engine gives none; the one that ends a text may be missing.
    `completion_tokens` counts that one. `counts`: of this request alone, None where it says nothing; drafts beyond its
    end are left out where the engine says what each round accepted, else they are in as `Figures.cut` says. `emitted`:
    tokens that each round gave, where the engine says."""

    text: str
    ids: tuple[int, ...] | None
    prompt_tokens: int
    completion_tokens: int
    counts: Counts | None
    emitted: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Known:
    """What a server says of itself; None where it does not. `quant_policy` and `draft_quant_policy` are names of ours,
    or where none is meant, the engine's own word; `exclusions` is a label of ours."""

    version: str | None = None
    depth: int | None = None
    quant_policy: str | None = None
    draft_quant_policy: str | None = None
    exclusions: str | None = None
    tp: int | None = None
    ep: int | None = None
    dp: int | None = None


@dataclass(frozen=True)
class Wanted:
    """What a server is started for. `checkpoint`: the folder. `converted`: (names of modules kept out of FP8, folder)
    where the engine needs the checkpoint quantised anew. `longest`: tokens of the longest prompt and its text.
    `logs`: the folder in which the log of one that fails is kept."""

    checkpoint: str
    converted: tuple[tuple[str, ...], str] | None
    depth: int
    quant_policy: str
    draft_quant_policy: str
    longest: int
    logs: str | None = None

    @property
    def served(self) -> str:
        """The folder that the engine is to load."""
        return self.checkpoint if self.converted is None else self.converted[1]

    @property
    def context(self) -> int:
        """Tokens that the engine must be able to hold of one request: more than the longest has, for engines draft less
        where a draft would reach beyond what they can hold. A power of two, so that prompts alike share a server; no
        more than the checkpoint says the model takes, where the longest is not more itself.

        Raises CheckpointError for a config.json that cannot be read.
        """
        tokens = max(2048, 1 << (self.longest + 64 - 1).bit_length())
        most = text_config(read_config(Path(self.checkpoint), required=False)).get("max_position_embeddings")
        return min(tokens, most) if type(most) is int and most >= self.longest else tokens


class NotAnAnswer(Exception):
    """An answer that is not what the engine's endpoint gives; says what is wrong with it."""


class Engine:
    """A serving engine. What is here is OpenAI's own and what most do alike."""

    name: ClassVar[str]
    title: ClassVar[str]
    version: ClassVar[str]  # that was read
    sources: ClassVar[tuple[str, ...]]  # project, path and what stands there
    figures: ClassVar[Figures]

    metrics_path: ClassVar[str] = "/metrics"
    completions_path: ClassVar[str] = "/v1/completions"
    models_path: ClassVar[str] = "/v1/models"
    health_path: ClassVar[str] = "/health"
    # what else is asked of a server to know it: path -> what `known` gets under that name
    about_paths: ClassVar[tuple[str, ...]] = ()
    tokenize_path: ClassVar[str | None] = None
    # beginnings of names of figures by which a server's metrics are known for this engine's
    prefixes: ClassVar[tuple[str, ...]]
    # what a server must be started with (or without) for it to show them; None where nothing
    metrics_flag: ClassVar[str | None] = None
    # what it must be started with for answers to have counts of their own; None where they have none, or always
    answers_flag: ClassVar[str | None] = None
    # seconds within which a finished request is in the figures
    lag: ClassVar[float] = 5.0

    def described(self) -> dict[str, Any]:
        """Facts of a server of this engine, for the rows' provenance."""
        return {"title": self.title, "description": f"{self.title} {self.version}"}

    # attaching

    def known(self, about: Mapping[str, Any], samples: Mapping[str, list[tuple[dict[str, str], float]]]) -> Known:
        """What a server says of itself, from its answers to `about_paths` (those that it gave) and its figures."""
        return Known()

    def model(self, models: Any) -> list[str]:
        """Names of the models that a server has, from its `/v1/models`. Raises NotAnAnswer."""
        data = models.get("data") if isinstance(models, dict) else None
        names = [each.get("id") for each in data if isinstance(each, dict)] if isinstance(data, list) else []
        if not names or not all(isinstance(name, str) and name for name in names):
            raise NotAnAnswer("its list of models has none with an id")
        return names

    # asking

    #: what top_k is where it cuts nothing
    every_token: ClassVar[int] = 0
    #: more of what chooses tokens, as it changes nothing
    idle: ClassVar[Mapping[str, Any]] = {}

    def request(self, model: str, ids: Sequence[int], sampling: SamplingConfig, seed: int) -> dict[str, Any]:
        """The body of a completion of one prompt."""
        body: dict[str, Any] = {
            "model": model,
            "prompt": list(ids),
            "max_tokens": sampling.max_new_tokens,
            **self.chosen(sampling, seed),
            "stream": False,
        }
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        return body

    def chosen(self, sampling: SamplingConfig, seed: int) -> dict[str, Any]:
        """How tokens are chosen, all of it: engines take what is left out from the checkpoint's generation_config."""
        if sampling.greedy:
            return {"temperature": 0.0, "top_k": 1, "top_p": 1.0, **self.idle}
        top_k = sampling.top_k or self.every_token
        return {
            "temperature": sampling.temperature,
            "top_k": top_k,
            "top_p": sampling.top_p,
            **self.idle,
            "seed": seed,
        }

    def answer(self, body: Any, depth: int) -> Answer:
        """What the endpoint gave. Raises NotAnAnswer."""
        choices = object_of(body, "answer").get("choices")
        if not isinstance(choices, list) or len(choices) != 1:
            raise NotAnAnswer("it has no choices of one element")
        choice, usage = object_of(choices[0], "choice"), object_of(body.get("usage"), "usage")
        ids, completion = self.ids(choice), count_of(usage, "completion_tokens")
        if ids is not None and len(ids) != completion:
            raise NotAnAnswer(f"it has {len(ids)} ids, and its usage counts {completion} tokens")
        counts = self.own_counts(body, choice, completion, depth)
        emitted = self.emitted(body, max(0, completion - 1), depth) if depth else None
        return Answer(text_of(choice, "text"), ids, count_of(usage, "prompt_tokens"), completion, counts, emitted)

    def emitted(self, body: Mapping[str, Any], tokens: int, depth: int) -> tuple[int, ...] | None:
        """How many of its `tokens` after the first one each round of this request gave; None where the engine does not
        say. Raises NotAnAnswer."""
        return None

    def own_counts(
        self, body: Mapping[str, Any], choice: Mapping[str, Any], completion: int, depth: int
    ) -> Counts | None:
        """`counts` where there can be any: a text's first token comes of its prompt. Raises NotAnAnswer."""
        tokens = max(0, completion - 1)
        if not depth:
            return Counts(tokens, tokens, 0, 0, ())
        if not tokens:
            return Counts(0, 0, 0, 0, (0,) * depth)
        return self.counts(body, choice, tokens, depth)

    def ids(self, choice: Mapping[str, Any]) -> tuple[int, ...] | None:
        """The completion's tokens, as `token_ids` of its choice; None where it gives none. Raises NotAnAnswer."""
        found = choice.get("token_ids")
        return None if found is None else whole_numbers(found, "token_ids")

    def counts(self, body: Mapping[str, Any], choice: Mapping[str, Any], tokens: int, depth: int) -> Counts | None:
        """What the engine counted for this request alone, of `tokens` tokens after the first one. Raises
        NotAnAnswer."""
        return None

    def tokenize(self, model: str, text: str) -> dict[str, Any]:
        """The body that asks `tokenize_path` for a text's ids, no special tokens among them."""
        return {"model": model, "prompt": text, "add_special_tokens": False}

    def tokens(self, body: Any) -> list[int]:
        """The ids that `tokenize_path` gave. Raises NotAnAnswer."""
        found = body.get("tokens") if isinstance(body, dict) else None
        return list(whole_numbers(found, "tokens"))

    # starting

    #: our cache policies -> the engine's word for them
    caches: ClassVar[Mapping[str, str]] = {}
    #: whether a draft's cache can differ from its target's
    draft_cache: ClassVar[bool] = False
    #: what starts it, as installed
    program: ClassVar[tuple[str, ...]] = ()
    #: the Python package whose version is the engine's, None where it is not one
    package: ClassVar[str | None] = None
    #: beginnings of names of variables that would set its options; it is started without them
    unset: ClassVar[tuple[str, ...]] = ()
    #: the environment variable that a started server takes its key from, None where there is none
    key_variable: ClassVar[str | None] = None
    #: its options that are set for a point, or would make it another server than is asked: nobody gives them beside
    reserved: ClassVar[tuple[str, ...]] = ()
    #: whether it takes an option by the beginning of its name
    abbreviations: ClassVar[bool] = False

    def refusal(self, wanted: Wanted, settings: Launch) -> str | None:
        """Why the engine cannot do what is wanted, naming the setting; None where it can, as far as is known."""
        for setting, policy in (
            ("quant_policy", wanted.quant_policy),
            ("draft_quant_policy", wanted.draft_quant_policy),
        ):
            if self.cache(policy) is None:
                return (
                    f"{setting} {policy}: {self.title} {self.version} has no such cache; it has "
                    f"{', '.join(self.caches)}"
                )
        follows = wanted.draft_quant_policy == resolve_policy(wanted.quant_policy).everywhere.name
        if wanted.depth and not follows and not self.draft_cache:
            return (
                f"draft_quant_policy {wanted.draft_quant_policy}: {self.title} {self.version} keeps its draft's cache "
                f"as the target's, {wanted.quant_policy}"
            )
        return None

    def program_here(self) -> tuple[str, ...]:
        """What starts it on this machine, unless a command is given."""
        return self.program

    def cache(self, policy: str) -> str | None:
        """The engine's word for a cache policy; None where it has none."""
        return self.caches.get(policy)

    def remark(self, wanted: Wanted) -> str | None:
        """What a reader must know of a setting's meaning here."""
        return None

    def arguments(self, wanted: Wanted, settings: Launch, name: str, port: int) -> list[str]:
        """The engine's arguments after its program, `settings.arguments` not among them."""
        raise NotImplementedError(f"{self.title} is attached only: nothing starts it")

    def environment(self) -> dict[str, str]:
        """Variables that it is started with, beside ours."""
        return {}


def object_of(value: Any, name: str) -> Mapping[str, Any]:
    """A JSON object. Raises NotAnAnswer."""
    if value is None:
        raise NotAnAnswer(f"it has no {name}")
    if not isinstance(value, dict):
        raise NotAnAnswer(f"its {name} is {value!r:.40}, not an object")
    return value


def text_of(holder: Mapping[str, Any], name: str) -> str:
    """A text in it. Raises NotAnAnswer."""
    value = holder.get(name)
    if not isinstance(value, str):
        raise NotAnAnswer(f"its {name} is {value!r:.40}, no text")
    return value


def count_of(holder: Mapping[str, Any], name: str) -> int:
    """A count in it. Raises NotAnAnswer."""
    value = holder.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise NotAnAnswer(f"its {name} is {value!r:.40}, no count")
    return value


def counts_of_histogram(
    histogram: Sequence[int], drafted: int, tokens: int, depth: int, said: tuple[int, int] | None = None
) -> Counts:
    """A request's counts from how many of its rounds accepted exactly j drafts, for each j.

    Args:
        said: what the engine says beside it of rounds and accepted drafts.
        tokens: emitted after the first; what rounds and accepted drafts do not give came of steps without drafts.

    Raises:
        NotAnAnswer: these cannot be counts of so many tokens at this depth.
    """
    rounds, accepted = sum(histogram), sum(j * count for j, count in enumerate(histogram))
    if said is not None and said != (rounds, accepted):
        raise NotAnAnswer(
            f"its histogram {list(histogram)!r:.40} is not of {said[0]} rounds and {said[1]} accepted drafts"
        )
    if any(histogram[depth + 1 :]) or drafted > rounds * depth or accepted > drafted:
        raise NotAnAnswer(f"it drafted {drafted} and accepted {accepted} in {rounds} rounds, at depth {depth}")
    if rounds > tokens:  # each gives one token at least
        raise NotAnAnswer(f"it has {rounds} rounds for {tokens} tokens")
    places = tuple(sum(histogram[j:]) for j in range(1, depth + 1))
    return Counts(tokens, max(rounds, tokens - accepted), drafted, accepted, places)


def whole_numbers(value: Any, name: str, most: int = 2**31) -> tuple[int, ...]:
    """A list of counts or ids. Raises NotAnAnswer."""
    if not isinstance(value, list) or any(type(each) is not int or not 0 <= each < most for each in value):
        raise NotAnAnswer(f"its {name} are {value!r:.40}, not a list of whole numbers")
    return tuple(value)


def check(engine: Engine, wanted: Wanted, settings: Launch) -> None:
    """Raises ConfigError where an engine cannot do what is wanted, naming it and the setting."""
    why = engine.refusal(wanted, settings)
    if why is not None:
        raise ConfigError(f"engine {engine.name}: {why}")
