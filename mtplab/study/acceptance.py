"""What a trace says of acceptance: by depth, position, context and domain, and under a schedule or a gate of depths.

Every answer is one recursion over arrays (`renewal.py`), so all of them come at once and none needs the model again.
Counts are expectations given the traced outputs; at temperature 0 they are the runner's own counts.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np

from mtplab.errors import ConfigError
from mtplab.study.bootstrap import ratio_interval
from mtplab.study.frame import frame
from mtplab.study.interval import jackknife, without_one
from mtplab.study.number_table import number_table
from mtplab.study.questions import confidence_of, edges_of
from mtplab.study.renewal import Counts, expected_counts

if TYPE_CHECKING:
    from mtplab.decode import AcceptanceStats
    from mtplab.study.acceptance_views import View
    from mtplab.study.trace import Trace

__all__ = ["FEW_PROMPTS", "Acceptance", "caution"]

# a 95 % interval over fewer prompts holds the truth less often (LOG.md), and says so
FEW_PROMPTS = 8
# gates whose counts are kept: a slider comes back to them
MOST_GATES = 256


class Acceptance:
    """Acceptance of a traced set of prompts at any depth from 0 to the trace's."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._alpha, self._slots = trace.alpha()
        self._counts: dict[int, Counts] = {}
        self._gates: dict[tuple[float, int], Counts] = {}
        self._parts: dict[str, Acceptance] = {}

    @property
    def depths(self) -> range:
        """The depths that can be asked for."""
        return range(self.trace.max_depth + 1)

    @property
    def expected(self) -> bool:
        """Whether counts are expectations over drafts that were drawn, and so no whole numbers."""
        settings = self.trace.settings
        return settings["spec"]["draft_sampling"] == "sampled" and settings["sampling"]["temperature"] > 0

    def counts(self, depth: int | np.ndarray) -> Counts:
        """The counts of a depth, or of depths by slot [p, s]. Raises ConfigError past the trace's depth."""
        if isinstance(depth, np.ndarray):
            whole = depth.dtype.kind in "iu" and depth.shape == self._alpha.shape[:2]
            if not whole or ((depth < 0) | (depth > self.trace.max_depth)).any():
                raise ConfigError(
                    f"expected whole depths from 0 to {self.trace.max_depth}, as far as was traced, for each of "
                    f"{self._alpha.shape[:2]} slots; found {depth.dtype} {depth.shape}"
                )
            return expected_counts(self._alpha, self._slots, depth)
        if type(depth) is not int or not 0 <= depth <= self.trace.max_depth:
            raise ConfigError(f"depth is {depth!r}; expected 0 to {self.trace.max_depth}, as far as was traced")
        if depth not in self._counts:
            self._counts[depth] = expected_counts(self._alpha, self._slots, depth)
        return self._counts[depth]

    def per_prompt(self, depth: int) -> list[AcceptanceStats]:
        """Each prompt's counts at a depth, whole numbers where they are counts."""
        return _stats(self.counts(depth), depth, self.expected)

    def stats(self, depth: int) -> AcceptanceStats:
        """The counts of all prompts at a depth."""
        return reduce(operator.add, self.per_prompt(depth))

    def length(self, depth: int) -> float | None:
        """Acceptance length: tokens per round, the bonus counted; None without rounds."""
        return self.stats(depth).acceptance_length

    def interval(self, depth: int) -> tuple[float, float] | None:
        """The 95 % interval (low, high) of the acceptance length, bootstrapped over prompts; None with one."""
        counts = self.counts(depth)
        return ratio_interval(counts.emitted, counts.rounds)

    def half_interval(self, depth: int) -> float | None:
        """Half a 95 % interval of the acceptance length as rows have it, over prompts (jackknife): a ±."""
        counts = self.counts(depth)
        return jackknife(without_one(counts.emitted, counts.rounds))

    def change(self, base: Acceptance, depth: int) -> tuple[float, float | None] | None:
        """(this length less that of `base`, over the same prompts; half its 95 % interval, taken prompt by prompt, so
        that what makes a prompt easy cancels: None with one); None where either has no round."""
        mine, theirs = self.counts(depth), base.counts(depth)
        if not (mine.rounds.sum() and theirs.rounds.sum()):
            return None
        left = without_one(mine.emitted, mine.rounds) - without_one(theirs.emitted, theirs.rounds)
        return self.length(depth) - base.length(depth), jackknife(left)

    @property
    def temperature(self) -> float:
        """The temperature at which the outputs were drawn; 0 is greedy."""
        return float(self.trace.settings["sampling"]["temperature"])

    @property
    def domains(self) -> list[str]:
        """The domains that prompts were given, in the order in which they occur."""
        return list(dict.fromkeys(self.trace.domains))

    def only(self, domain: str) -> Acceptance:
        """Acceptance of one domain's prompts, with every view. Raises ConfigError for a name that no prompt has."""
        if not isinstance(domain, str) or domain not in self._parts:
            self._parts[domain] = Acceptance(self.trace.narrowed(domain))
        return self._parts[domain]

    @property
    def few(self) -> bool:
        """Whether there are so few prompts that an interval is a rough guess itself."""
        return len(self._slots) < FEW_PROMPTS

    def by_domain(self, depth: int) -> dict[str, AcceptanceStats]:
        """The counts of each domain, in the order in which they occur."""
        groups: dict[str, list[AcceptanceStats]] = {}
        for name, stats in zip(self.trace.domains, self.per_prompt(depth), strict=True):
            groups.setdefault(name, []).append(stats)
        return {name: reduce(operator.add, parts) for name, parts in groups.items()}

    def by_context(self, depth: int, edges: Sequence[int]) -> list[tuple[int, int, float | None]]:
        """(first position, position after the last, acceptance length) of rounds that begin there in the context.

        Positions count from the prompt's first token; `edges` are at least two, growing.
        """
        found = []
        for low, high, tokens, rounds in self.context_counts(depth, edges):
            n = rounds.sum()
            found.append((low, high, float(tokens.sum() / n) if n else None))
        return found

    def context_intervals(self, depth: int, edges: Sequence[int]) -> list[float | None]:
        """Half a 95 % interval of each length of `by_context`, over the prompts that have rounds there (jackknife)."""
        found = []
        for _, _, tokens, rounds in self.context_counts(depth, edges):
            some = rounds > 0
            found.append(jackknife(without_one(tokens[some], rounds[some])))
        return found

    def context_counts(self, depth: int, edges: Sequence[int]) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
        """The same as sums by prompt: (first position, position after the last, tokens [p], rounds [p])."""
        edges = edges_of(edges)
        counts, starts = self.counts(depth), self.starts
        found = []
        for low, high in itertools.pairwise(edges):
            inside = np.where((starts >= low) & (starts < high), counts.visits, 0.0)
            found.append((low, high, (inside * counts.length).sum(1), inside.sum(1)))
        return found

    @property
    def starts(self) -> np.ndarray:
        """[p, s]: how many tokens there are when a round begins at a slot, those of the prompt counted."""
        return self.trace.prompt_lengths[:, None] + 1 + np.arange(self._alpha.shape[1])

    def schedule(self, depth_at: Callable[[np.ndarray], np.ndarray]) -> AcceptanceStats:
        """The counts under a depth that follows the context: `depth_at` maps positions [p, s] to whole depths.

        Raises ConfigError for depths that are none.
        """
        return self._together(self.schedule_counts(depth_at))

    def schedule_counts(self, depth_at: Callable[[np.ndarray], np.ndarray]) -> Counts:
        """The same by prompt."""
        if not callable(depth_at):
            raise ConfigError(
                f"depth_at is {depth_at!r:.60}; expected a function from positions to depths, such as "
                "lambda at: np.where(at < 64, 1, 4)"
            )
        return self.counts(np.asarray(depth_at(self.starts)))

    def gate(self, confidence: float, depth: int | None = None) -> AcceptanceStats:
        """The counts where drafting stops at the first draft whose probability is below `confidence`, which is dropped.

        Confidence is the draft's largest probability at temperature 1. Of a chain that has missed it is not known:
        drafts past a miss are counted as drafted up to `depth`, so `drafted` is an upper bound.
        """
        return self._together(self.gate_counts(confidence, depth))

    def gate_counts(self, confidence: float, depth: int | None = None) -> Counts:
        """The same by prompt."""
        most = self.trace.max_depth if depth is None else depth
        confidence = confidence_of(confidence)
        self.counts(most)  # which checks it
        if (confidence, most) in self._gates:
            return self._gates[confidence, most]
        with np.errstate(invalid="ignore"):
            below = np.exp(self.trace.top[:, :most].astype(np.float64)) < confidence  # NaN: not below
        # argmax of nothing is an error, and at depth 0 there is nothing
        first = np.where(below.any(1), below.argmax(1), most) if most else np.zeros(len(below), int)
        found = self.counts(self._by_slot(first))
        if len(self._gates) >= MOST_GATES:
            self._gates.pop(next(iter(self._gates)))
        self._gates[confidence, most] = found
        return found

    def least_drafted(self, confidence: float, depth: int) -> np.ndarray:
        """[p]: the fewest drafts that the gate may have drafted, where every chain that missed stops right there."""
        visits = self.gate_counts(confidence, depth).visits
        with np.errstate(invalid="ignore"):
            sure = np.exp(self.trace.top[:, :depth].astype(np.float64)) >= confidence  # NaN, past a miss: no
        return (visits * self._by_slot(np.logical_and.accumulate(sure, axis=1).sum(1))).sum(1)

    def _by_slot(self, flat: np.ndarray) -> np.ndarray:
        """[p, s] of what lies one behind the other; 0 past a prompt's slots."""
        found = np.zeros(self._alpha.shape[:2], flat.dtype)
        for row, part in enumerate(np.split(flat, np.cumsum(self._slots)[:-1])):
            found[row, : len(part)] = part
        return found

    def _together(self, counts: Counts) -> AcceptanceStats:
        return reduce(operator.add, _stats(counts, self.trace.max_depth, True))

    def view(self, name: str, **options: Any) -> View:
        """One view of it as lines of numbers, as `AcceptanceSet.view` has it."""
        from mtplab.study.acceptance_set import AcceptanceSet

        return AcceptanceSet([self]).view(name, **options)

    def plot(self, name: str = "depth", **options: Any) -> Any:
        """The same as a picture; `import mtplab.report` brings what draws it."""
        return self.view(name, **options).plot()

    def to_frame(self) -> Any:
        """A pandas frame, one row per depth: temperature, counts, length, its interval (`low`, `high`), shares by
        position as lists, and whether there are `few` prompts, so that an interval is a rough guess itself.

        Raises ConfigError where pandas is not installed.
        """
        return frame(self.to_records(), "to_records() does")

    def to_records(self) -> list[dict[str, Any]]:
        """The same as dictionaries."""
        found = []
        for depth in self.depths:
            stats = self.stats(depth)
            low, high = self.interval(depth) or (None, None)
            found.append(
                {
                    "temperature": self.temperature,
                    "depth": depth,
                    "rounds": stats.rounds,
                    "tokens": stats.emitted,
                    "drafted": stats.drafted,
                    "accepted": stats.accepted,
                    "acceptance_length": stats.acceptance_length,
                    "low": low,
                    "high": high,
                    "few": self.few,
                    "approximate": self.approximate,
                    "per_position": stats.per_position,
                    "conditional": stats.conditional,
                }
            )
        return found

    @property
    def approximate(self) -> bool:
        """Whether the traced output was given, and is not the target's own (`Trace.approximate`)."""
        return self.trace.approximate

    def __repr__(self) -> str:
        said = ", approximate: the output was given" if self.approximate else ""
        return f"<Acceptance: {len(self._slots)} prompts, depths 0 to {self.trace.max_depth}{said}>"

    def _repr_html_(self) -> str:
        names = ["depth", "rounds", "tokens", "tokens per round", "95 % interval"]
        most = self.trace.max_depth
        names += [f"draft {j}" for j in range(1, most + 1)]
        lines = []
        for record in self.to_records():
            length = record["acceptance_length"]
            shares = ["–" if share is None else f"{100 * share:.0f} %" for share in record["per_position"]]
            cells = [f"{record['depth']}", f"{record['rounds']:.5g}", f"{record['tokens']:.5g}"]
            cells += ["–" if length is None else f"{length:.3f}", _span(record) or "–"]
            lines.append([*cells, *shares, *[""] * (most - len(shares))])
        return (
            f"<div><div>acceptance over {len(self._slots)} prompts; draft <i>j</i>: rounds in which drafts 1 to "
            f"<i>j</i> were accepted</div>{number_table(names, lines, 'Acceptance by depth')}"
            f"<div>{'; '.join(self.cautions)}</div></div>"
        )

    @property
    def cautions(self) -> list[str]:
        """What to know of the numbers; none where there are prompts enough and the output is the target's own."""
        said = [caution(len(self._slots))]
        if self.approximate:
            own = self.trace.settings["given"]["agreement"]
            told = f"approximate: of an output that was given, {100 * own:.1f} % of whose tokens are the target's own"
            said.insert(0, told)
        return [each for each in said if each]

    def __str__(self) -> str:
        lines = ["depth  rounds  tokens  length  95 % interval"]
        for record in self.to_records():
            length = record["acceptance_length"]
            lines.append(
                f"{record['depth']:5}  {record['rounds']:6.5g}  {record['tokens']:6.5g}  "
                f"{'' if length is None else f'{length:6.3f}'}  {_span(record)}".rstrip()
            )
        return "\n".join([*lines, *filter(None, ["; ".join(self.cautions)])])


def caution(prompts: int) -> str:
    """What to know of intervals over so many prompts; empty where there are enough."""
    if prompts < 2:
        return "one prompt only: nothing says how far another would be off"
    return f"over {prompts} prompts only: the intervals are rough" if prompts < FEW_PROMPTS else ""


def _span(record: dict[str, Any]) -> str:
    low, high = record["low"], record["high"]
    # plain decoding gives one token a round, whatever the prompts
    return "" if low is None or low == high else f"{low:.3f} to {high:.3f}"


def _stats(counts: Counts, depth: int, expected: bool) -> list[AcceptanceStats]:
    from mtplab.decode import AcceptanceStats

    def number(value: float) -> Any:
        return float(value) if expected else round(float(value))

    return [
        AcceptanceStats(
            depth=depth,
            rounds=number(counts.rounds[row]),
            drafted=number(counts.drafted[row]),
            accepted=number(counts.accepted[row]),
            emitted=number(counts.emitted[row]),
            accepted_per_position=tuple(number(value) for value in counts.accepted_per_position[row, :depth]),
        )
        for row in range(len(counts.rounds))
    ]
