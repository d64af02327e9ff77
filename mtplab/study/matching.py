"""Which rows of two files belong together, and what else differs between them.

Two rows belong together when their depth and their settings agree. A setting that has one value in the one file and
another in the other is what is being compared: rows are matched across it, and it is told. Where a setting varies
within a file, rows must agree on it. Does not look at what the rows measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mtplab.errors import ConfigError, printable
from mtplab.study.fields import fact_of
from mtplab.study.row import ResultRow
from mtplab.study.words import cache_words, engine_words, follows, weights_words

__all__ = ["AXES", "Difference", "Matched", "Pair", "display_order", "match_rows"]

Read = Callable[[ResultRow], str]


def _draft_cache(row: ResultRow) -> str:
    same = follows(row.draft_quant_policy, row.quant_policy)
    return "as the target's" if same else cache_words(row.draft_quant_policy)


#: A setting's name in `by=` and `--by` -> (its name in tables, how a row has it). Depth is always one.
AXES: dict[str, tuple[str, Read]] = {
    "engine": ("engine", lambda row: engine_words(row.engine)),
    "checkpoint": ("checkpoint", lambda row: row.checkpoint),
    "exclusions": ("exclusions", lambda row: weights_words(row.exclude_label, row.model_format)),
    "cache": ("KV cache", lambda row: cache_words(row.quant_policy)),
    "draft-cache": ("draft's cache", _draft_cache),
    "temperature": ("temperature", lambda row: f"{row.temperature:g}"),
    "top-k": ("top-k", lambda row: str(row.top_k)),
    "top-p": ("top-p", lambda row: f"{row.top_p:g}"),
    "seed": ("seed", lambda row: str(row.seed)),
    "prompts": ("prompts", lambda row: f"{row.prompt_set}, {row.n_prompts} in all"),
    "tokens": ("tokens a prompt", lambda row: str(row.max_new_tokens)),
    "method": ("method", lambda row: row.method),
}


def _fact(*path: str, short: int = 0) -> Read:
    def read(row: ResultRow) -> str:
        value = fact_of(row, *path)
        return _UNKNOWN if value is None else printable(str(value))[: short or 80]

    return read


# what a row says beside its settings: the first ones tell two rows of one file apart where settings do not
_TIES: dict[str, Read] = {
    "checkpoint's content": _fact("config", "checkpoint", short=17),
    "exact arithmetic": _fact("config", "exact"),
    "computed in": _fact("config", "dtype"),
    "device": _fact("device"),
    "target's hidden state": _fact("config", "target_hidden"),
    "draft's hidden state": _fact("config", "draft_hidden"),
    "drafts": _fact("config", "draft_sampling"),
    "activations rounded": _fact("config", "activation_rounding"),
    "beyond the end of text": _fact("config", "ignore_eos"),
    "prompts' ids": _fact("config", "prompt_digest", short=12),
    "cache calibrated on": _fact("config", "calibration", short=28),
}
_FACTS: dict[str, Read] = {
    **_TIES,
    "modules in FP8 (digest of the plan)": _fact("config", "plan", short=12),
    "mtplab's commit": lambda row: _commit(row),
    "mtplab": _fact("versions", "mtplab"),
    "torch": _fact("versions", "torch"),
    "triton": _fact("versions", "triton"),
    "numpy": _fact("versions", "numpy"),
    "tokenizers": _fact("versions", "tokenizers"),
    "python": _fact("python"),
    "platform": _fact("platform"),
    "CPU": _fact("cpu"),
    "threads": _fact("threads"),
    "engine's version": _fact("engine", "version"),
    "requests at once": _fact("engine", "concurrency"),
}
# differ with these settings, which say it better
_FOLLOWS = {
    "modules in FP8 (digest of the plan)": ("checkpoint", "exclusions"),
    "prompts' ids": ("prompts", "tokens", "checkpoint"),
    **dict.fromkeys(("exact arithmetic", "computed in", "device", "activations rounded", "threads"), ("engine",)),
}
_UNKNOWN = "unknown"


def _commit(row: ResultRow) -> str:
    commit, plus, changes = _fact("commit")(row).partition("+")
    return commit[:10] + plus + changes


@dataclass(frozen=True)
class Pair:
    """Two rows of the same settings (name in tables -> value) and depth."""

    settings: dict[str, str]
    depth: int
    base: ResultRow
    other: ResultRow


@dataclass(frozen=True)
class Difference:
    """Something that two files have differently: `base` and `other` are the values, `pairs` the matched rows it is true
    of. `setting`: it is one of `AXES`, not a circumstance."""

    name: str
    base: str
    other: str
    pairs: int
    setting: bool


@dataclass(frozen=True)
class Matched:
    """`on` are the settings that rows had to agree on; what is left over has no partner in the other file."""

    pairs: list[Pair]
    only_base: list[ResultRow]
    only_other: list[ResultRow]
    on: tuple[str, ...]
    differences: list[Difference]


def match_rows(
    base: Sequence[ResultRow],
    other: Sequence[ResultRow],
    by: Iterable[str] | None = None,
    names: tuple[str, str] = ("the first", "the second"),
) -> Matched:
    """Pairs the rows of two files, both in an order fit for tables.

    Args:
        by: names of `AXES` that rows must agree on, and no others; worked out as above when None. Depth always counts.
        names: what the files are called in messages.

    Raises:
        ConfigError: an unknown name in `by`, or a file has several different rows where one is looked for.
    """
    base, other = sorted(base, key=display_order), sorted(other, key=display_order)
    if by is None:
        on = tuple(name for name in AXES if not _compared(name, base, other))
    else:
        on = tuple(dict.fromkeys(name for name in by if name != "depth"))
        unknown = [name for name in on if name not in AXES]
        if unknown:
            raise ConfigError(f"there is no setting {unknown[0]!r} to match by; there are depth, {', '.join(AXES)}")
    read = [AXES[name][1] for name in on]
    if by is None:
        read += _tie_breakers(read, base, other)
    mine, theirs = (_index(rows, read, name, on) for rows, name in ((base, names[0]), (other, names[1])))
    pairs = [
        Pair({AXES[name][0]: AXES[name][1](row) for name in on}, row.depth, row, theirs[key])
        for key, row in mine.items()
        if key in theirs
    ]
    return Matched(
        pairs,
        [row for key, row in mine.items() if key not in theirs],
        [row for key, row in theirs.items() if key not in mine],
        on,
        _differences(pairs, on),
    )


def _compared(name: str, base: Sequence[ResultRow], other: Sequence[ResultRow]) -> bool:
    """Whether each file has one value of a setting, and not the same."""
    mine, theirs = ({AXES[name][1](row) for row in rows} for rows in (base, other))
    return len(mine) == 1 == len(theirs) and mine != theirs


def _tie_breakers(read: list[Read], *files: Sequence[ResultRow]) -> list[Read]:
    """Circumstances that tell rows of one file apart where their settings do not."""
    found: list[Read] = []
    for fact in _TIES.values():
        for rows in files:
            keys = {_key(row, [*read, *found]) for row in rows}
            if len({_key(row, [*read, *found, fact]) for row in rows}) > len(keys):
                found.append(fact)
                break
    return found


def _key(row: ResultRow, read: Iterable[Read]) -> tuple[Any, ...]:
    return row.depth, *(value(row) for value in read)


def _index(rows: Sequence[ResultRow], read: list[Read], name: str, on: tuple[str, ...]) -> dict[tuple, ResultRow]:
    found: dict[tuple, ResultRow] = {}
    for row in rows:
        before = found.setdefault(_key(row, read), row)
        if before is not row and _numbers(before) != _numbers(row):
            apart = [axis for axis, (_, value) in AXES.items() if value(before) != value(row)]
            if apart:
                what = f"they differ in {', '.join(apart)}: match by {'that' if len(apart) == 1 else 'those'} too"
            else:
                what = "their settings are the same and their numbers are not: give a file with one of them"
            settings = "".join(f", {AXES[axis][0]} {AXES[axis][1](row)}" for axis in on)
            raise ConfigError(f"{name} has two rows at depth {row.depth}{settings}; {what}")
    return found


def _numbers(row: ResultRow) -> dict[str, Any]:
    return row.model_dump(exclude={"provenance", "point", "exclude", "draft_exclude", "seconds", "tokens_per_second"})


def _differences(pairs: Sequence[Pair], on: tuple[str, ...]) -> list[Difference]:
    found = []
    axes = [(title, read, True) for name, (title, read) in AXES.items() if name not in on]
    for name, read, setting in [*axes, *((name, read, False) for name, read in _FACTS.items())]:
        counts: dict[tuple[str, str], int] = {}
        for pair in pairs:
            values = read(pair.base), read(pair.other)
            # what one of them does not say is not known to differ
            if values[0] != values[1] and _UNKNOWN not in values and not _said_already(name, pair):
                counts[values] = counts.get(values, 0) + 1
        found += [Difference(name, *values, count, setting) for values, count in counts.items()]
    return found


def _said_already(name: str, pair: Pair) -> bool:
    return any(AXES[axis][1](pair.base) != AXES[axis][1](pair.other) for axis in _FOLLOWS.get(name, ()))


_WEIGHTS = {"*": 0, "as stored": 0, "published": 1, "none": 3}
_CACHES = {name: place for place, name in enumerate(("none", "int8", "fp8_e4m3", "fp8_e5m2", "int4"))}


def display_order(row: ResultRow) -> tuple[Any, ...]:
    """A key to sort rows by: what is least quantised first, so that the first row of a study is what the others are
    compared with; depths ascend within a setting."""
    return (
        row.engine or "",
        row.checkpoint,
        row.prompt_set,
        row.n_prompts,
        row.max_new_tokens,
        row.method,
        row.temperature,
        _WEIGHTS.get(row.exclude_label, 2),
        row.exclude_label,
        row.model_format or "",
        _CACHES.get(row.quant_policy, len(_CACHES)),
        row.quant_policy,
        not follows(row.draft_quant_policy, row.quant_policy),
        row.draft_quant_policy,
        row.top_k,
        -row.top_p,
        row.seed,
        row.depth,
    )
