"""Acceptance at several temperatures as one result: by depth, temperature, position, context and domain.

Holds one `Acceptance` a temperature, over the same prompts; each answers from its trace. Traces nothing, draws nothing.
"""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mtplab.errors import ConfigError
from mtplab.study.acceptance import FEW_PROMPTS, Acceptance
from mtplab.study.acceptance_views import FEW_ROUNDS, VIEWS, Choice, View, lines_of
from mtplab.study.frame import frame
from mtplab.study.number_table import Cell, number_lines, number_table
from mtplab.study.questions import confidence_of, listed, pair_of, position_of
from mtplab.study.trace import Trace
from mtplab.study.words import DEPTH, LENGTH

__all__ = ["AcceptanceSet"]

_AXES = {
    "depth": (DEPTH, LENGTH),
    "position": ("Draft position j in the round", "Share of rounds (%)"),
    "conditional": ("Draft position j in the round", "Share of rounds that got so far (%)"),
    "context": ("Position in the context (tokens, prompt counted)", LENGTH),
    "gate": ("Drafts per round", LENGTH),
    "schedule": ("Drafts per round", LENGTH),
}
_HOLLOW = f"Hollow points are over fewer than {FEW_ROUNDS} rounds."


class AcceptanceSet:
    """Traced acceptance at one temperature or several, over the same prompts.

    Args:
        found: traces, or their `.acceptance()`, each at a temperature of its own.

    Raises:
        ConfigError: there is none, two have one temperature, or their prompts differ.
    """

    def __init__(self, found: Iterable[Acceptance | Trace]) -> None:
        each = [
            one.acceptance() if isinstance(one, Trace) else one
            for one in listed("the AcceptanceSet", found, Acceptance | Trace, "a list of traces, one or more")
        ]
        self._by = {one.temperature: one for one in sorted(each, key=lambda one: one.temperature)}
        if len(self._by) < len(each):
            raise ConfigError(f"{len(each)} traces at {len(self._by)} temperatures; expected one trace for each")
        first = each[0].trace
        for one in each[1:]:
            same = np.array_equal(one.trace.prompt_lengths, first.prompt_lengths)
            if not same or one.trace.domains != first.domains:
                raise ConfigError(
                    f"the traces at temperature {each[0].temperature:g} and {one.temperature:g} are of other prompts; "
                    "expected the same prompts in the same order"
                )

    @property
    def temperatures(self) -> list[float]:
        """Ascending."""
        return list(self._by)

    @property
    def domains(self) -> list[str]:
        """The domains that prompts were given, in the order in which they occur."""
        return next(iter(self._by.values())).domains

    @property
    def depths(self) -> range:
        """The depths that can be asked of every temperature."""
        return range(min(len(one.depths) for one in self._by.values()))

    def __getitem__(self, temperature: float) -> Acceptance:
        if not isinstance(temperature, numbers.Real) or temperature not in self._by:
            raise ConfigError(f"temperature {temperature!r} was not traced; there are {self.temperatures}")
        return self._by[temperature]

    def __iter__(self) -> Iterator[Acceptance]:
        return iter(self._by.values())

    def __len__(self) -> int:
        return len(self._by)

    def by_temperature(self, depth: int) -> dict[float, Any]:
        """The counts (`AcceptanceStats`) of all prompts at a depth, by temperature."""
        return {temperature: one.stats(depth) for temperature, one in self._by.items()}

    def only(self, domain: str) -> AcceptanceSet:
        """The same of one domain's prompts. Raises ConfigError for a name that no prompt has."""
        return AcceptanceSet(one.only(domain) for one in self)

    def view(
        self,
        name: str = "depth",
        *,
        temperatures: Sequence[float] | None = None,
        domains: Sequence[str | None] = (None,),
        depths: tuple[int, int] | None = None,
        confidence: float = 0.5,
        switch: int = 64,
    ) -> View:
        """One view as lines of numbers: a line for each temperature and domain.

        Args:
            name: "depth", "position", "conditional", "context", "gate" or "schedule" (`VIEWS` says what each shows).
            temperatures: which; all when None.
            domains: which; None stands for all prompts together.
            depths: lowest and highest. Views at one depth take the highest, a gate drafts as many at most, a schedule
                takes the lowest before `switch` and the highest from there on.
            confidence: the gate's, 0 to 1.
            switch: the schedule's position in the context, in tokens.

        Raises:
            ConfigError: there is no such view, temperature, domain or depth.
        """
        if name not in VIEWS:
            raise ConfigError(f"view is {name!r}; expected one of {', '.join(VIEWS)}")
        expected = f"lowest and highest of 0 to {self.depths[-1]}, as traced"
        low, high = (0, self.depths[-1]) if depths is None else pair_of("depths", depths, expected)
        if not (low in self.depths and high in self.depths):
            raise ConfigError(f"depths is {depths!r:.60}; expected {expected}")
        wanted = self.temperatures
        if temperatures is not None:
            wanted = listed("temperatures", temperatures, numbers.Real, f"at least one of {self.temperatures}")
        domains = listed("domains", domains, str | None, "a list of domains, None among them for all prompts")
        choice = Choice(low, high, confidence_of(confidence), position_of("switch", switch))
        chosen = [self[temperature] for temperature in wanted]
        each = [(one if domain is None else one.only(domain), domain) for one in chosen for domain in domains]
        lines = tuple(line for one, domain in each for line in lines_of(name, one, choice, domain))
        titles = {
            "depth": "Acceptance length by draft depth",
            "position": f"Drafts 1…j all accepted, of {high}",
            "conditional": f"Draft j accepted, given 1…j−1, of {high}",
            "context": f"Acceptance length by position in the context, depth {high}",
            "gate": f"Stop drafting below confidence {confidence:g} (ring), at most {high} drafts",
            "schedule": f"Depth {low} before position {switch} of the context (ring), {high} from there on",
        }
        notes = {
            "gate": "Line: thresholds from 0 to 1; dotted: fixed depths. A chain past its miss is not known: points "
            "stand at the most drafts there may be, bars to the left reach to the least.",
            "schedule": "Line: the switch at other positions; dotted: fixed depths.",
        }
        said = [notes.get(name, "")]
        if any(any(line.few) for line in lines if line.kind == "measured"):
            said.append(_HOLLOW)
        said += dict.fromkeys(text for one, _ in each for text in one.cautions)
        share = name in ("position", "conditional")
        title = titles[name]
        if len(chosen) == 1 and len(self) > 1:
            title += f", {'greedy' if not chosen[0].temperature else f'temperature {chosen[0].temperature:g}'}"
        return View(name, title, *_AXES[name], lines, " ".join(filter(None, said)), share)

    def plot(self, name: str = "depth", **options: Any) -> Any:
        """A view as a picture; `import mtplab.report` brings what draws it."""
        return self.view(name, **options).plot()

    def to_records(self) -> list[dict[str, Any]]:
        """One dictionary for each temperature, domain (None: all prompts) and depth, as `Acceptance.to_records`."""
        found = []
        for one in self:
            for domain in [None, *(self.domains if len(self.domains) > 1 else [])]:
                part = one if domain is None else one.only(domain)
                found += [{"domain": domain, **record} for record in part.to_records()]
        return found

    def to_frame(self) -> Any:
        """The same as a pandas frame; `.view(name).to_frame()` has the other views.

        Raises ConfigError where pandas is not installed.
        """
        return frame(self.to_records(), "to_records() does")

    def _cells(self) -> tuple[list[str], list[list[Cell]]]:
        header = ["temperature", *(f"d={depth}" for depth in self.depths)]
        lines = []
        for temperature, one in self._by.items():
            cells: list[Cell] = []
            for depth in self.depths:
                length, span = one.length(depth), one.interval(depth)
                wide = span is not None and span[1] > span[0]
                said = "–" if length is None else f"{length:.2f}"
                cells.append((said, f"({span[0]:.2f}–{span[1]:.2f})") if wide and length is not None else said)
            lines.append([f"{temperature:g}", *cells])
        return header, lines

    @property
    def few(self) -> bool:
        """Whether there are so few prompts that an interval is a rough guess itself."""
        return self._prompts < FEW_PROMPTS

    @property
    def _prompts(self) -> int:
        return len(next(iter(self)).trace.domains)

    def _cautions(self) -> list[str]:
        return list(dict.fromkeys(text for one in self for text in one.cautions))

    def __repr__(self) -> str:
        deepest = self.depths[-1]
        some = [f"{one.temperature:g}" for one in self if one.approximate]
        said = f", approximate at {', '.join(some)}: the output was given" if some else ""
        about = f"{self._prompts} prompts, temperatures {self.temperatures}, depths 0 to {deepest}"
        return f"<AcceptanceSet: {about}{said}>"

    def __str__(self) -> str:
        head = f"acceptance length over {self._prompts} prompts (95 % interval over prompts)"
        return "\n".join([head, "", *number_lines(*self._cells()), *self._cautions()])

    def _repr_html_(self) -> str:
        return (
            f"<div><div>acceptance length over {self._prompts} prompts, tokens per round (95 % interval over prompts)"
            f"</div>{number_table(*self._cells(), 'Acceptance by depth')}<div>{'; '.join(self._cautions())}</div></div>"
        )
