"""The points of a sweep that runs on a serving engine: which server each depth needs, and what must be refused before
any is asked or started.

Turns the grid's units into units of one depth with a server each. Knows no engine: what one can do is asked of
`mtplab.engines`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtplab.config import SamplingConfig
from mtplab.engines import Attach, Launch
from mtplab.errors import ConfigError, printable
from mtplab.quant.policy import resolve_policy
from mtplab.study.grid import SERVED, SERVED_DRAFT, policy_axis, temperature_axis
from mtplab.study.identity import checkpoint_folder, file_identity
from mtplab.study.point import EngineFacts, PointConfig, digest_of, plan_digest
from mtplab.study.producer import Labels
from mtplab.study.prompts import PromptSet
from mtplab.study.words import cache_words, weights_words
from mtplab.study.worker import Unit

if TYPE_CHECKING:
    from mtplab.engines.attach import Attached

__all__ = ["Served", "check_served", "commands", "serve_units", "units_without_checkpoint"]

_AS_SERVED = "as served"


@dataclass(frozen=True)
class Served:
    """Units of an engine, in the grid's order, and what is to be known beside their rows: depths that were left out,
    what the engine will misread."""

    units: list[Unit]
    notes: list[str]


# of `sweep`'s arguments, what only mtplab's own runner has: as it is where nobody gives it, and what to do instead
_PROBABILITIES = "an engine does not give its target's probabilities: sweep the same points without engine= for that"
_OPTIONS = "is set by its own options: give them as arguments of a Launch"
_HIDDEN = "an engine reads the hidden state that its model's code reads"
_OUR_OWN: dict[str, tuple[tuple[Any, ...], str]] = {
    "method": ((None, "run"), "an engine has no trace; leave method out, or say 'run'"),
    "quality": ((None, False), _PROBABILITIES),
    "reference": ((None,), _PROBABILITIES),
    "calibration": (
        (None,),
        "an engine takes cache scales from its checkpoint: use quant_policy 'fp8:checkpoint'",
    ),
    "draft_sampling": (("greedy",), f"how an engine draws drafts {_OPTIONS}"),
    "target_hidden": ((None,), _HIDDEN),
    "draft_hidden": ((None,), _HIDDEN),
    "load_model": ((None,), "an engine loads its model itself"),
    "generate": ((None,), "an engine generates itself"),
    "device": (("cpu",), f"where an engine runs {_OPTIONS}"),
    "dtype": ((None,), f"what an engine computes in {_OPTIONS}"),
    "activation_rounding": ((True,), "an engine rounds as its checkpoint says"),
    "exact": ((True,), "an engine's arithmetic is its own"),
}


def check_served(asked: Any) -> None:
    """Refuse what a sweep can ask of mtplab's own runner only, of its arguments as attributes. Raises ConfigError,
    naming the setting."""
    for name, (usual, why) in _OUR_OWN.items():
        value = getattr(asked, name)
        if not any(value is each or value == each for each in usual):
            raise ConfigError(f"{name} is {value!r:.60} and an engine is given: {why}")


def serve_units(
    units: Sequence[Unit],
    settings: Attach | Launch,
    depths: tuple[int, ...],
    checkpoint: Any,
    results: Path,
    starts: bool = True,
) -> Served:
    """The grid's units at every depth that an engine serves.

    Args:
        units: as `build_units` made them.
        checkpoint: open.
        results: where checkpoints that an engine needs are written.
        starts: whether it will be started on this machine, where it must be then; else nothing is asked of its
            installation.

    Raises:
        ConfigError: a setting that the engine cannot do, by name; nothing has been started then.
        MtplabError: an attached server does not answer, or is no engine that is known.
    """
    if isinstance(settings, Attach):
        from mtplab.engines.attach import attach

        return _attached(units, attach(settings), depths)
    return _launched(units, settings, depths, checkpoint, results.resolve(), starts)


def units_without_checkpoint(
    settings: Attach,
    depths: tuple[int, ...],
    sets: Sequence[PromptSet],
    weights: dict[str, Any],
    quant_policy: Any,
    draft_quant_policy: Any,
    temperature: Any,
    sampling: SamplingConfig,
) -> Served:
    """Units of what attached servers serve, where no checkpoint is at hand: prompts become ids by the server's own
    tokenizer, and weights and modules are not known. Cache policies are what the servers are said to have been started
    with.

    Raises:
        ConfigError: `weights` (exclusions by argument) are asked for, which only a checkpoint can be held to.
        MtplabError: as `serve_units`.
    """
    for name, value in weights.items():
        if value not in (None, (None,), [None]):
            raise ConfigError(f"{name} is {value!r:.60} and there is no checkpoint: what a server has is as it is")
    policies = policy_axis("quant_policy", quant_policy)
    drafts = None if draft_quant_policy is None else policy_axis("draft_quant_policy", draft_quant_policy)
    from mtplab.engines.attach import attach

    servers = attach(settings)
    names = {server.model for server in servers}
    if len(names) > 1:
        raise ConfigError(f"the servers have {len(names)} models, {', '.join(sorted(names))}; expected one")
    model = names.pop()
    units = []
    for prompts in sets:
        ids = prompts.encoded(servers[0].encode)
        for degree, policy in itertools.product(temperature_axis(temperature), policies):
            for draft_policy in drafts or [resolve_policy(policy).everywhere.name]:
                config = PointConfig(
                    # the name may be a path, and another server's model may have it too
                    checkpoint=f"served:{digest_of([model, sorted(each.address for each in servers)])}",
                    plan=plan_digest([]),
                    excluded=(),
                    draft_excluded=(),
                    model_format=None,
                    activation_rounding=False,
                    exact=False,
                    device=SERVED,
                    dtype=SERVED,
                    quant_policy=policy,
                    draft_quant_policy=draft_policy,
                    **(sampling.model_dump() | {"temperature": degree}),
                    **SERVED_DRAFT,
                    prompts=ids,
                    domains=tuple(prompt.domain for prompt in prompts.prompts),
                )
                labels = Labels(_short(model), _AS_SERVED, None, None, prompts.label)
                units.append(Unit(config, None, labels, depths, target=""))
    return _attached(units, servers, depths)


def _attached(units: Sequence[Unit], servers: Sequence[Attached], depths: tuple[int, ...]) -> Served:
    by_depth: dict[int, Attached] = {}
    for server in servers:
        depth = server.depth
        if depth is None:
            if len(servers) > 1 or len(depths) > 1:
                raise ConfigError(
                    f"{server.title} at {server.address} does not say how deep it drafts; give the one depth that it "
                    "was started with (depths=[3], --depths 3), and one server at a time"
                )
            depth = depths[0]
        if depth in by_depth:
            raise ConfigError(
                f"{server.address} and {by_depth[depth].address} both draft {depth} tokens a round; expected servers "
                "of different depths"
            )
        by_depth[depth] = server
    there = [depth for depth in depths if depth in by_depth]
    if not there:
        served = ", ".join(map(str, sorted(by_depth)))
        raise ConfigError(f"the servers draft {served} tokens a round; depths {_listed(depths)} were asked for")
    missing = [depth for depth in depths if depth not in by_depth]
    notes = [f"no server drafts {_listed(missing)} tokens a round: left out"] if missing else []
    out = []
    for unit in units:
        for depth in there:
            server = by_depth[depth]
            label = None if unit.variant is None else unit.labels.exclude_label
            fault = server.contradiction(unit.config.quant_policy, unit.config.draft_quant_policy, label)
            if fault is not None:
                raise ConfigError(fault)
            facts = EngineFacts(name=server.engine, concurrency=server.limits.concurrency)
            untold = server.untold(unit.config.quant_policy, unit.config.draft_quant_policy, depth)
            remark = " · ".join(filter(None, [_weights_as_told(unit, server), untold]))
            out.append(_on(unit, depth, facts, server, remark, server.version))
    return Served(out, notes)


def _weights_as_told(unit: Unit, server: Attached) -> str | None:
    if unit.variant is None:
        return None
    return f"that {server.title}'s {_short(server.model)!r} has these weights and exclusions is as told"


def _short(name: str) -> str:
    """A model's name, of a path the last part."""
    return printable(name.rstrip("/").rpartition("/")[2] or name)[:80]


def _launched(
    units: Sequence[Unit],
    settings: Launch,
    depths: tuple[int, ...],
    checkpoint: Any,
    results: Path,
    starts: bool,
) -> Served:
    from mtplab.engines.engine import Wanted
    from mtplab.engines.installed import launch_version, program_of, remedy
    from mtplab.engines.launch import launched
    from mtplab.engines.registry import engine_of
    from mtplab.study.engine_reading import engine_reading

    folder = checkpoint_folder(checkpoint).resolve()
    if settings.served is not None:
        settings = settings.model_copy(update={"served": str(Path(settings.served).resolve())})
    engine = engine_of(settings.engine)
    command = settings.command or engine.program
    facts = EngineFacts(
        name=settings.engine,
        concurrency=settings.limits.concurrency,
        tp=settings.tp,
        ep=settings.ep,
        dp=settings.dp,
        arguments=tuple(map(_without_path, settings.arguments)),
        # where the program lies does not matter, what it is told does
        options=digest_of([*command[1:], "", *settings.arguments, "", _content(settings.served)]),
    )
    version = launch_version(settings) if starts else None
    longest = max(len(ids) + unit.config.max_new_tokens for unit in units for ids in unit.config.prompts)
    out, notes = [], {}
    # worked out once for each checkpoint that is served: of a large one its headers take seconds
    reading = cache(lambda kept: engine_reading(checkpoint, engine.title, kept))
    for unit in units:
        config = unit.config
        converted = None
        if _converts(unit, checkpoint.quantization is not None):
            kept = tuple(sorted({*config.excluded, *config.draft_excluded}))
            converted = kept, results / "checkpoints" / digest_of([config.checkpoint, config.plan])[:16]
        wrong = reading(None if converted is None else converted[0])
        if wrong is not None:
            notes[f"{unit.labels.exclude_label}: {wrong}"] = None
        for depth in depths:
            wanted = Wanted(
                checkpoint=str(folder),
                converted=None if converted is None else (converted[0], str(converted[1])),
                depth=depth,
                quant_policy=config.quant_policy,
                draft_quant_policy=config.draft_quant_policy,
                longest=longest,
                logs=str(results / "logs"),
            )
            server = launched(settings, wanted)
            remark = " · ".join(filter(None, [wrong, server.remark]))
            out.append(_on(unit, depth, facts, server, remark, version))
    if starts and program_of(settings) is None:
        raise ConfigError(f"engine {engine.name}: {command[0]} is not on this machine's path; {remedy(settings)}")
    return Served(out, list(notes))


def _converts(unit: Unit, stored_fp8: bool) -> bool:
    """Whether the engine needs another checkpoint than the one that was given: what it is to hold in FP8 is not what
    the files hold."""
    variant = unit.variant
    asked = (variant.exclude, variant.draft_exclude)
    return unit.config.model_format is not None or (
        stored_fp8 and any(each not in (None, "published") for each in asked)
    )


def _without_path(word: str) -> str:
    """An argument as a row may hold it: of a path the last part."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}…/{value.rstrip('/').rpartition('/')[2]}" if "/" in value else word


def _content(path: str | None) -> str:
    """What a file that an engine is given is; its name where it is not on this machine."""
    if path is None:
        return ""
    try:
        return file_identity(Path(path))
    except OSError:
        return path


def _on(
    unit: Unit, depth: int, facts: EngineFacts, serving: Any, remark: str | None, version: str | None
) -> Unit:
    """The unit at one depth, on this server."""
    config = unit.config.model_copy(update={"engine": facts, "method": "run"})
    said = " · ".join(filter(None, [unit.labels.remark, remark]))
    return replace(
        unit,
        config=config,
        labels=replace(unit.labels, remark=said or None),
        depths=(depth,),
        quality=None,
        serving=serving,
        engine_version=version,
    )


def _listed(depths: Iterable[int]) -> str:
    return ", ".join(map(str, depths))


def commands(units: Iterable[Unit]) -> list[str]:
    """Shell lines that start what the units need, each server once and on a port of its own, a comment before it that
    says what it is; what it needs written comes before, once."""
    lines: dict[str, None] = {}
    ports: dict[str, int] = {}
    for unit in units:
        if unit.serving.key in ports:
            continue
        ports[unit.serving.key] = port = 8000 + len(ports)
        weights = weights_words(unit.labels.exclude_label, unit.config.model_format)
        cache = cache_words(unit.config.quant_policy, unit.config.draft_quant_policy)
        *before, start = unit.serving.commands(port)
        lines |= dict.fromkeys([*before, f"# depth {unit.depths[0]} · {weights} · KV cache {cache}", start])
    return [*lines, "# then sweep them: the same line with --engine http://HOST:PORT for each, and no other --engine"]

