"""What an engine is started with for a point: its command, what that needs first, and what is refused before any start.

Puts together an engine's description and the settings; how a process lives and answers is in `starting.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mtplab.engines.clean import key_of
from mtplab.engines.engine import Engine, Wanted, check
from mtplab.engines.registry import engine_of
from mtplab.engines.serving import Running
from mtplab.engines.settings import Launch
from mtplab.errors import ConfigError

__all__ = ["Launched", "launched"]


@dataclass(frozen=True)
class Launched:
    """An engine as a point needs it (`Serving`). Made by `launched`; picklable."""

    settings: Launch
    wanted: Wanted

    @property
    def engine(self) -> Engine:
        """Its description."""
        return engine_of(self.settings.engine)

    @property
    def key(self) -> str:
        """Equal where one server does: all that decides its command but the port."""
        command = self.command(_name(self.wanted), 0)
        said = [self.settings.engine, command, self.engine.environment(), self.wanted.converted]
        return hashlib.sha256(json.dumps(said).encode("ascii")).hexdigest()

    @property
    def remark(self) -> str | None:
        """What a reader must know of a setting's meaning on this engine."""
        return self.engine.remark(self.wanted)

    def command(self, name: str, port: int, program: tuple[str, ...] | None = None) -> list[str]:
        """The program and its arguments, of a server that calls its model `name`; `program` is what starts it where a
        command does not say, None for what does here."""
        settings = self.settings
        words = settings.command or program or self.engine.program_here()
        return [*words, *self.engine.arguments(self.wanted, settings, name, port), *settings.arguments]

    def commands(self, port: int) -> list[str]:
        """Lines for a shell that start the same on a port: a checkpoint that is to be written first, then the server,
        which others can reach. An API key is there by the name of its variable."""
        lines = []
        if self.wanted.converted is not None:
            kept, folder = self.wanted.converted
            exclude = ",".join(kept) or "none"
            lines.append(shlex.join(["mtplab", "quantize", self.wanted.checkpoint, folder, "--exclude", exclude]))
        words = [f"{name}={shlex.quote(value)}" for name, value in self.engine.environment().items()]
        if self.engine.key_variable is not None and key_of(self.settings.key_variable):
            words.append(f'{self.engine.key_variable}="${self.settings.key_variable}"')
        # what somebody else starts is for other machines to ask, unless a host was given
        elsewhere = self.settings.host == Launch.model_fields["host"].default
        settings = self.settings.model_copy(update={"host": "0.0.0.0"} if elsewhere else {})
        shown = replace(self, settings=settings)
        return [*lines, " ".join([*words, shlex.join(shown.command(_name(self.wanted), port, self.engine.program))])]

    def open(self, cancel: Any) -> Running:
        """Start it and wait until it answers; writes the checkpoint first where it is not there.

        Args:
            cancel: what `is_set()` of gives it up.

        Raises:
            MtplabError: there is no such program, it ends before it answers, or does not answer in time; with the last
                that it said.
            ConfigError, CheckpointError: the checkpoint cannot be written.
        """
        from mtplab.engines.starting import converted, start

        converted(self.wanted, cancel)
        return start(self.engine, self.settings, self.wanted, self.command, cancel)


def launched(settings: Launch, wanted: Wanted) -> Launched:
    """What starts the engine for this. Raises ConfigError, naming engine and setting, for what it cannot do; nothing is
    started."""
    engine = engine_of(settings.engine)
    if os.name != "posix":
        raise ConfigError(f"engine {engine.name}: engines are started on Linux and macOS only; attach to a running one")
    check(engine, wanted, settings)
    _check_arguments(engine, "arguments", settings.arguments)
    _check_arguments(engine, "command", _after_module(settings.command or ()))
    made = Launched(settings, wanted)
    if settings.served is not None:
        if wanted.converted is not None:
            raise ConfigError(
                f"engine {engine.name}: served {settings.served} is a file as it is, and the point's weights would be "
                "written from the checkpoint; leave out served, or exclusions and model_format"
            )
        if settings.served not in made.command("", 0):
            raise ConfigError(
                f"engine {engine.name}: served {settings.served}: it reads the checkpoint itself; leave it out"
            )
    return made


def _after_module(command: Sequence[str]) -> Sequence[str]:
    """A command without what says which Python module it is."""
    return command[3:] if command[1:2] == ("-m",) else command[1:]


def _check_arguments(engine: Engine, setting: str, arguments: Sequence[str]) -> None:
    """Refuses options that the point sets, in each of the ways they can be written."""
    for argument in arguments:
        if not argument.startswith("-"):
            continue
        # --a_b, --a=1, --a.b 1 and --no-a are ways to write --a
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        for form in {name, name.replace("--no-", "--", 1)}:
            for flag in engine.reserved:
                least = 4 if form.startswith("--") else 2
                short = engine.abbreviations and len(form) >= least and flag.startswith(form)
                # an option of one letter may have its value right behind it: -qfp8
                glued = engine.abbreviations and len(flag) == 2 and argument.startswith(flag)
                if form == flag or short or glued:
                    holds = "holds" if setting == "command" else "hold"
                    raise ConfigError(
                        f"engine {engine.name}: {setting} {holds} {argument}, and {flag} is set by mtplab: leave it "
                        "out, and give the point's own setting where there is one"
                    )


def _name(wanted: Wanted) -> str:
    return Path(wanted.checkpoint).name or "model"
