"""What a sweep gives back: its rows, and the ways to look at them as text, HTML or a data frame.

This module does not run or store anything, and draws no figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mtplab.errors import ConfigError
from mtplab.study.frame import frame
from mtplab.study.interval import length_error
from mtplab.study.number_table import Cell, number_lines, number_table, with_error
from mtplab.study.row import ResultRow
from mtplab.study.soundness import COLUMNS, quality_notes, quality_numbers
from mtplab.study.words import cache_words, engine_words, follows, prompts_words, weights_words

if TYPE_CHECKING:
    from mtplab.study.trace import Trace

__all__ = ["SweepResult"]

# column -> how a row shows it; a column on which all rows agree goes above the table
_COLUMNS = {
    "engine": lambda row: engine_words(row.engine),
    "checkpoint": lambda row: row.checkpoint,
    "exclusions": lambda row: weights_words(row.exclude_label, row.model_format),
    "KV cache": lambda row: cache_words(row.quant_policy),
    "draft's cache": lambda row: cache_words(row.draft_quant_policy),
    "temperature": lambda row: f"{row.temperature:g}",
    "prompt set": lambda row: row.prompt_set,
}
_ALWAYS = ("exclusions", "KV cache")
_BYTES = ("KV", "B/token")  # of the target's cache, shown where points differ in it
_PLUS_MINUS = "± is half a 95 % interval over prompts, of each number by itself and not of the difference of two"


class _Table(NamedTuple):
    """What all lines share, the titles, the lines, how many columns of them are text, and what failed."""

    common: str
    head: list[Cell]
    lines: list[list[Cell]]
    left: int
    errors: list[str]


@dataclass(frozen=True, repr=False)
class SweepResult:
    """Rows in the order of the grid, depths ascending within a point.

    `computed` and `reused` count rows, `judged` those of the reused whose target's quality was measured now; `notes`
    are findings about the results themselves, and faults where arithmetic was `exact`; `cancelled` says that rows are
    missing because the sweep was stopped. `folder` holds the point files and rows.jsonl.
    """

    rows: list[ResultRow]
    computed: int = 0
    reused: int = 0
    judged: int = 0
    seconds: float = 0.0
    cancelled: bool = False
    folder: Path | None = None
    notes: list[str] = field(default_factory=list)
    exact: bool = True

    def __repr__(self) -> str:
        return f"SweepResult({len(self.rows)} rows, {self.summary()})"

    def __str__(self) -> str:
        return self.to_table()

    def __add__(self, other: SweepResult) -> SweepResult:
        """Both sweeps' rows as one study, in this order; counts, seconds and notes are added up."""
        if not isinstance(other, SweepResult):
            return NotImplemented
        return SweepResult(
            rows=[*self.rows, *other.rows],
            computed=self.computed + other.computed,
            reused=self.reused + other.reused,
            judged=self.judged + other.judged,
            seconds=self.seconds + other.seconds,
            cancelled=self.cancelled or other.cancelled,
            folder=self.folder if self.folder == other.folder else None,
            notes=[*self.notes, *other.notes],
            exact=self.exact and other.exact,
        )

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[ResultRow]:
        return iter(self.rows)

    @property
    def failed(self) -> list[ResultRow]:
        """Rows that carry an error."""
        return [row for row in self.rows if row.error is not None]

    def summary(self) -> str:
        """One line: rows computed, read back, judged, failed, missing."""
        text = f"computed {self.computed}, read back {self.reused}"
        if self.judged:
            text += f" (of {self.judged} of them the target's quality was not there, and was measured)"
        if self.failed:
            text += f", failed {len(self.failed)}"
        if self.cancelled:
            text += ", cancelled before the rest"
        return text

    def to_table(self, by_domain: bool = False) -> str:
        """Acceptance length by depth as aligned text: one line per point, or one per point and prompt domain."""
        table = self._table(by_domain)
        text = [f"acceptance length by depth · {table.common}", ""]
        text += number_lines(table.head, table.lines, table.left, rule=True)
        text += [f"  failed: {error}" for error in table.errors]
        text += [f"  {remark}" for remark in self._remarks(by_domain)]
        return "\n".join(text)

    def _repr_html_(self) -> str:
        table = self._table()
        failed = [f"failed: {error}" for error in table.errors]
        foot = "".join(f"<div>{escape(text)}</div>" for text in [*failed, *self._remarks(), *self.notes])
        return (
            f"<div><div>acceptance length by depth · {escape(table.common)}</div>"
            f"{number_table(table.head, table.lines, 'Acceptance by depth', table.left)}"
            f"<div>{escape(self.summary())}</div>{foot}</div>"
        )

    def trace(self, point: ResultRow | str) -> Trace:
        """The trace behind a row, or behind a point named by its hash: ask it for any depth, schedule or gate.

        Raises ConfigError where there is none: rows of runs have none, and traces may have been deleted.
        """
        from mtplab.study.store import PointStore
        from mtplab.study.tracestore import TraceStore

        name = point if isinstance(point, str) else getattr(point, "point", None)
        if self.folder is None or not isinstance(name, str) or name not in {row.point for row in self.rows}:
            raise ConfigError(f"{point!r:.80}: expected a row of this result, or its point, and one results folder")
        found = TraceStore(PointStore(self.folder)).trace(name)
        if found is None:
            raise ConfigError(
                f"{self.folder}: no trace of point {name[:12]}…; rows with method 'trace' have one: sweep with "
                "method='trace' again, or trace with mtplab.trace"
            )
        return found

    def to_frame(self) -> Any:
        """A pandas DataFrame, one line per result row. Raises `ConfigError` without pandas."""
        return frame([json.loads(row.to_json()) for row in self.rows], ".rows and rows.jsonl do")

    def _varying(self) -> tuple[list[str], list[str]]:
        """(columns to show, values that all rows share)."""
        shown, shared = [], []
        for name, show in _COLUMNS.items():
            values = dict.fromkeys(show(row) for row in self.rows)
            same_as_target = name == "draft's cache" and all(
                follows(row.draft_quant_policy, row.quant_policy) for row in self.rows
            )
            if name in _ALWAYS or len(values) > 1:
                if not same_as_target:
                    shown.append(name)
            elif name == "engine" and values == {"mtplab": None}:
                pass  # its own runner is not worth a word
            elif values and not same_as_target and name != "checkpoint":  # which stands above the table anyway
                shared.append(f"{name} {next(iter(values))}")
        return shown, shared

    def _remarks(self, by_domain: bool = False) -> list[str]:
        """What to know beside the numbers: settings that turn out the same, and the rows' own remarks."""
        labels: dict[str, dict[str, None]] = {}
        for row in self.rows:
            labels.setdefault(row.point, {})[weights_words(row.exclude_label, row.model_format)] = None
        same = dict.fromkeys(" and ".join(group) for group in labels.values() if len(group) > 1)
        own = dict.fromkeys(f"{row.exclude_label}: {row.remark}" for row in self.rows if row.remark)
        own |= dict.fromkeys(f"{_named(row)}: {row.caveat}" for row in self.rows if row.caveat)
        shown = ((row, domain) for row in self.rows for domain in (row.by_domain if by_domain else [None]))
        chance = [_PLUS_MINUS] if any(length_error(row, domain) for row, domain in shown) else []
        chance = quality_notes(self.rows, columns=not by_domain) + chance
        return [f"{group}: the same modules in FP8, hence one result" for group in same] + list(own) + chance

    def _table(self, by_domain: bool = False) -> _Table:
        """A line per point, or per point and domain."""
        names, shared = self._varying()
        depths = sorted({row.depth for row in self.rows})
        points: dict[tuple[str, ...], dict[int, ResultRow]] = {}
        for row in self.rows:
            key = (row.point, *(_COLUMNS[name](row) for name in names))
            points.setdefault(key, {})[row.depth] = row
        # a target is judged over all prompts: by domain there is nothing to show
        judged = None if by_domain else quality_numbers(next(iter(by_depth.values())) for by_depth in points.values())
        sizes = [next(filter(None, (r.kv_bytes_per_token for r in each.values())), None) for each in points.values()]
        sized = not by_domain and len(set(filter(None, sizes))) > 1
        lines: list[list[Cell]] = []
        for number, (key, by_depth) in enumerate(points.items()):
            domains = dict.fromkeys(name for row in by_depth.values() for name in row.by_domain)
            for domain in domains if by_domain else [None]:
                cells = [_cell(by_depth.get(depth), domain) for depth in depths]
                own = ["–" if sizes[number] is None else f"{sizes[number]:g}"] if sized else []
                own += [] if judged is None else judged[number]
                lines.append([*key[1:], *([] if domain is None else [domain]), *own, *cells])
        if by_domain:
            names = [*names, "domain"]
        errors = [f"{_named(row)}: {row.error}" for row in self.failed]
        errors = list(dict.fromkeys(errors))  # two labels can share a point, and its failure
        checkpoints = dict.fromkeys(row.checkpoint for row in self.rows if "checkpoint" not in names)
        tokens = dict.fromkeys(map(prompts_words, self.rows))
        common = " · ".join([*checkpoints, *shared, *tokens]) or "no rows"
        judges: list[Cell] = [*([_BYTES] if sized else []), *([] if judged is None else COLUMNS)]
        return _Table(common, [*names, *judges, *(f"d={depth}" for depth in depths)], lines, len(names), errors)


def _named(row: ResultRow) -> str:
    """A row, where something is said of it alone."""
    engine = f"{engine_words(row.engine)} · " if row.engine else ""
    weights = _COLUMNS["exclusions"](row)
    return f"{engine}{weights} · {cache_words(row.quant_policy)} · T {row.temperature:g} · depth {row.depth}"


def _cell(row: ResultRow | None, domain: str | None = None) -> Cell:
    if row is None:
        return "–"
    if row.error is not None:
        return "failed"
    found = row if domain is None else row.by_domain.get(domain)
    if found is None:
        return "–"
    # plain decoding gives one token a round, whatever the prompts: it has no error
    return with_error(found.acceptance_length, length_error(row, domain))
