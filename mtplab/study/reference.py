"""A trace of an output that is given, beside the exact one: what the cheaper way costs in truth.

A look over variants of one target need not decode each: the unquantised target's output, decoded once, is read by
every variant in a few passes (`trace(..., output=)`), and its draft asked about that text. What it misses is that a
variant writes another text. Knows nothing of passes or recursions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from mtplab.errors import ConfigError
from mtplab.study.number_table import number_table

if TYPE_CHECKING:
    from mtplab.models import Model
    from mtplab.study.trace import Trace

__all__ = ["Against", "against", "given_outputs"]


@dataclass(frozen=True)
class Against:
    """Tokens per round by depth, approximate and exact, and their difference with half its 95 % interval over prompts
    (None with one prompt); `seconds` of each trace."""

    lines: tuple[dict[str, Any], ...]
    agreement: float  # of the given tokens, those that the target chooses itself after the given ones before
    prompts: int
    seconds: tuple[float, float]

    def to_records(self) -> list[dict[str, Any]]:
        """By depth: depth, approximate, exact, difference, half_interval."""
        return [dict(line) for line in self.lines]

    @property
    def outside_chance(self) -> list[int]:
        """Depths at which the two differ by more than the interval."""
        return [
            line["depth"]
            for line in self.lines
            if line["half_interval"] is not None and abs(line["difference"]) > line["half_interval"]
        ]

    def _said(self) -> str:
        fast, slow = self.seconds
        return (
            f"{self.prompts} prompts; {100 * self.agreement:.1f} % of the given tokens are the target's own; "
            f"{fast:.2f} s against {slow:.2f} s"
        )

    def _cells(self) -> list[list[str]]:
        return [
            [
                f"{line['depth']}",
                *(f"{line[key]:.3f}" for key in ("approximate", "exact")),
                f"{line['difference']:+.3f}",
                "" if line["half_interval"] is None else f"{line['half_interval']:.3f}",
            ]
            for line in self.lines
        ]

    def __str__(self) -> str:
        rows = [["depth", "approximate", "exact", "difference", "± 95 %"], *self._cells()]
        return "\n".join(["  ".join(f"{cell:>11}" for cell in row) for row in rows] + [self._said()])

    def _repr_html_(self) -> str:
        head = ["depth", "approximate", "exact", "difference", "± (95 %)"]
        table = number_table(head, self._cells(), "Approximate and exact acceptance by depth")
        return (
            f"<div><div>tokens per round, of an output that was given and of the target's own ({escape(self._said())})"
            f"</div>{table}</div>"
        )


def against(approximate: Trace, exact: Trace) -> Against:
    """A trace of a given output beside the exact trace of the same variant and prompts, at every depth both have.

    The difference is taken prompt by prompt, so that what makes a prompt easy cancels. Raises ConfigError for traces of
    other prompts, and where the second is approximate itself.
    """
    if exact.approximate:
        raise ConfigError("the exact trace is approximate itself; trace the same model and prompts without output=")
    if approximate.prompt_lengths.tolist() != exact.prompt_lengths.tolist():
        raise ConfigError(
            f"the traces are of {len(approximate.prompt_lengths)} and {len(exact.prompt_lengths)} prompts, or of "
            "other lengths; expected the same prompts in the same order"
        )
    sides = [approximate.acceptance(), exact.acceptance()]
    lines = []
    for depth in range(1, min(approximate.max_depth, exact.max_depth) + 1):
        change = sides[0].change(sides[1], depth)
        if change is None:
            raise ConfigError("there is a trace without a round: every output is one token; give longer ones")
        lengths = [side.length(depth) for side in sides]
        names = ("depth", "approximate", "exact", "difference", "half_interval")
        lines.append(dict(zip(names, (depth, *lengths, *change), strict=True)))
    given = approximate.settings.get("given") or {"agreement": 1.0}
    fast, slow = (float(sum(each.seconds.values())) for each in (approximate, exact))
    return Against(tuple(lines), given["agreement"], len(exact.prompt_lengths), (fast, slow))


def given_outputs(model: Model, prompts: Any, output: Trace | Sequence[Sequence[int]]) -> list[list[int]]:
    """Outputs as lists of ids, one for each prompt. Raises ConfigError for what does not belong to them."""
    from mtplab.decode.settings import token_ids
    from mtplab.study.trace import Trace

    ids = token_ids(model, prompts)
    if isinstance(output, Trace):
        if output.prompt_lengths.tolist() != [len(prompt) for prompt in ids]:
            raise ConfigError(
                f"output is a trace of {len(output.prompt_lengths)} prompts, and there are {len(ids)} here, or of "
                "other lengths; expected a trace of the same prompts, by a model with the same tokenizer"
            )
        output = output.outputs
    if isinstance(output, str) or not isinstance(output, Sequence) or len(output) != len(ids):
        raise ConfigError(
            f"output is {output!r:.60}; expected a trace of these prompts, or token ids for each of {len(ids)}"
        )
    wrong = next((i for i, each in enumerate(output) if isinstance(each, str)), None)
    if wrong is not None:
        raise ConfigError(f"output {wrong} is text; expected a list of token ids, as Trace.outputs has them")
    return token_ids(model, output, "output", "output")
