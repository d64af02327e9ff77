"""What draft depth pays on the machine at hand: the same prompts decoded at every depth, timed, by batch.

Times are of whole runs on whatever device the model is on; `advice.py` is for a GPU that is not here. Knows no figures
and no command line.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mtplab.errors import ConfigError
from mtplab.study.questions import whole_numbers
from mtplab.study.words import cache_words

if TYPE_CHECKING:
    from mtplab.models import Model

__all__ = ["DepthTime", "DepthTimes", "time_depths"]

_AT_LEAST = 8  # prompts that a batch is timed over: what one prompt accepts says little


@dataclass(frozen=True)
class DepthTime:
    """One depth at one batch: tokens a round, tokens a second of all sequences (median over repeats, prompts' passes
    left out), and the speed-up over depth 0 in the same repeat: median, least and most."""

    batch: int
    depth: int
    length: float | None
    tokens_per_second: float
    speedup: float
    low: float
    high: float


@dataclass(frozen=True)
class DepthTimes:
    """Every depth at every batch; `settings` are those of the runs."""

    lines: tuple[DepthTime, ...]
    repeats: int
    settings: dict[str, Any]

    def at(self, batch: int) -> tuple[DepthTime, ...]:
        """The lines of one batch, by depth."""
        return tuple(line for line in self.lines if line.batch == batch)

    @property
    def batches(self) -> tuple[int, ...]:
        """In the order they were asked for."""
        return tuple(dict.fromkeys(line.batch for line in self.lines))

    def best(self, batch: int) -> DepthTime:
        """The fastest depth by the median."""
        return max(self.at(batch), key=lambda line: line.speedup)

    def sentence(self, batch: int) -> str:
        """What pays, and whether every repeat said so."""
        best = self.best(batch)
        where = f"Batch {batch}, KV cache {cache_words(self.settings['quant_policy'])}: "
        if best.depth == 0:
            return f"{where}no depth pays; plain decoding is fastest, {best.tokens_per_second:.0f} tokens/s."
        said = (
            f"{where}depth {best.depth} pays most, {best.speedup:.2f} times plain decoding ({best.low:.2f} to "
            f"{best.high:.2f} over {self.repeats} repeats), {best.tokens_per_second:.0f} tokens/s."
        )
        if best.low <= 1:
            said += " Not in every repeat: that is no gain to count on."
        near = [str(x.depth) for x in self.at(batch) if x.depth and x is not best and x.high >= best.low]
        if near:
            said += f" Depth {', '.join(near)} cannot be told from it."
        return said

    def to_records(self) -> list[dict[str, Any]]:
        """One dict a line."""
        return [vars(line).copy() for line in self.lines]


def time_depths(
    model: Model,
    prompts: Sequence[Any],
    depths: Sequence[int] = tuple(range(9)),
    batches: Sequence[int] = (1,),
    repeats: int = 3,
    max_new_tokens: int = 64,
    on_step: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
    **settings: Any,
) -> DepthTimes:
    """Decode at every depth and batch, in turn, `repeats` times over.

    Args:
        prompts: strings or lists of ids. A batch is timed over max(batch, 8) of them, spread evenly over those given
            and taken again where there are fewer, `batch` at a time; end-of-text is ignored, so that all depths emit
            the same number of tokens.
        depths: 0, which the others are held against, is timed whether it is named or not.
        batches: sequences decoded at once.
        on_step: called with (runs done, runs in all).
        settings: further ones of `generate`.

    Raises ConfigError for numbers that are none, and what `generate` raises.
    """
    from mtplab.decode import generate

    depths = sorted({0, *whole_numbers("depths", depths, 0)})
    batches = list(dict.fromkeys(whole_numbers("batches", batches, 1)))
    (repeats,) = whole_numbers("repeats", [repeats], 1)
    if not len(prompts) or not batches:
        raise ConfigError(f"{len(prompts)} prompts and {len(batches)} batches; expected at least one of each")
    settings |= {"max_new_tokens": max_new_tokens, "ignore_eos": True, "cancel": cancel}
    seconds: dict[tuple[int, int], list[float]] = {}
    lengths: dict[tuple[int, int], float | None] = {}
    emitted: dict[tuple[int, int], int] = {}
    used: dict[str, Any] = {}
    done, total = 0, len(batches) * (1 + repeats * len(depths))
    for batch in batches:
        texts = _spread(prompts, max(batch, _AT_LEAST))
        # the first run of a process pays for what later ones find ready
        rounds: list[int] = [depths[-1], *(depths * repeats)]
        for number, depth in enumerate(rounds):
            run = generate(model, texts, depth=depth, max_batch=batch, **settings)
            if number:
                seconds.setdefault((batch, depth), []).append(run.decode_seconds)
                lengths[batch, depth], emitted[batch, depth] = run.stats.acceptance_length, run.stats.emitted
            used = run.settings
            done += 1
            if on_step is not None:
                on_step(done, total)
    lines = []
    for (batch, depth), took in seconds.items():
        tokens = emitted[batch, depth]
        rates = [tokens / each for each in took]
        gains = [
            rate / (emitted[batch, 0] / plain) for rate, plain in zip(rates, seconds[batch, 0], strict=True)
        ]
        middle = statistics.median(gains)
        lines.append(
            DepthTime(batch, depth, lengths[batch, depth], statistics.median(rates), middle, min(gains), max(gains))
        )
    return DepthTimes(tuple(lines), repeats, used)


def _spread(prompts: Sequence[Any], count: int) -> list[Any]:
    """`count` of the prompts, evenly over all of them."""
    return [prompts[i * len(prompts) // count if count <= len(prompts) else i % len(prompts)] for i in range(count)]
