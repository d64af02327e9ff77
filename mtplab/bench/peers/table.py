"""The report of `python -m mtplab.bench peers`: seconds and ratios, counts side by side, and every difference.

Knows nothing of how they were found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtplab.bench.peers.compare import Compared, Spread
from mtplab.bench.peers.rounds import Counts

__all__ = ["Race", "counts_table", "differences_table", "races_table"]


@dataclass(frozen=True)
class Race:
    """One way of an engine through the depths: seconds by depth, what of ours they are held against and the goal."""

    name: str
    seconds: dict[int, float]
    ours: float
    ours_is: str
    goal: float
    whole: bool  # every depth that the goal speaks of was run

    @property
    def total(self) -> float:
        """Seconds of all depths."""
        return sum(self.seconds.values())

    @property
    def ratio(self) -> float:
        """How many times as long as ours."""
        return self.total / self.ours

    @property
    def verdict(self) -> str:
        """Whether the goal is met; empty where depths are missing."""
        if not self.whole:
            return f"depths {', '.join(map(str, self.seconds))} alone"
        return f"goal {self.goal:g}×: {'met' if self.ratio >= self.goal else 'not met'}"


def races_table(races: Sequence[Race]) -> str:
    """Seconds by depth, in all, and the ratio to ours."""
    depths = sorted({depth for race in races for depth in race.seconds})
    wide = max(len(race.name) for race in races)
    out = [f"{'seconds at depth':{wide}}" + "".join(f"{depth:7}" for depth in depths) + "    in all     ours   ratio"]
    for race in races:
        cells = "".join(f"{race.seconds[d]:7.2f}" if d in race.seconds else " " * 7 for d in depths)
        line = f"{race.name:{wide}}{cells}{race.total:10.2f}{race.ours:9.2f}{race.ratio:7.1f}×  {race.verdict}"
        out.append(f"{line} ({race.ours_is})")
    return "\n".join(out)


def counts_table(title: str, compared: Compared, reported: dict[int, str], prompts: int) -> str:
    """Counts of an engine and of ours by depth, in tokens emitted, beside what the engine itself reports."""
    out = [f"depth  texts equal  {'':26}  rounds  accepted  drafts 1…k accepted"]
    for x in compared.depths:
        rows = [(title, x.theirs), ("mtplab", x.ours)]
        if x.equal_texts < prompts:
            rows.append((f"mtplab on {title}'s texts", x.ours_on_their_text))
        for place, (name, counts) in enumerate(rows):
            first = f"{x.depth:5}  {x.equal_texts:5} of {prompts:2}" if not place else ""
            note = f"   reported: {reported[x.depth]}" if not place and x.depth in reported else ""
            out.append(f"{first:20}{name:26}  {_counts(counts)}{note}")
    return "\n".join(out)


def _counts(counts: Counts) -> str:
    return f"{counts.rounds:6}  {counts.accepted:8}  {' '.join(map(str, counts.per_position))}"


def differences_table(title: str, compared: Compared, decode: Callable[[list[int]], str]) -> str:
    """Every difference by prompt, and what BF16 does to margins."""
    out = []
    if compared.partings:
        out.append(f"where texts part: {title}'s token, ours, its lead over ours in float32 and in BF16, a BF16 step")
    for x in compared.partings:
        pair = f"{decode([x.token])!r} {decode([x.rival])!r}"
        out.append(
            f"  prompt {x.prompt:2}, token {x.at:3}: {pair:24} {x.lead:+9.5f} {x.lead_bf16:+8.4f} {x.step:7.4f}  "
            f"{_tie(x.tie)}"
        )
    worst = max(compared.behind, key=lambda x: -x.lead / (x.step or 1), default=None)
    if worst is not None:
        ties = sum(x.tie for x in compared.behind)
        out.append(
            f"tokens of {title}'s texts that mtplab would not have chosen there: {len(compared.behind)}, near-ties "
            f"{ties}; the farthest behind by {-worst.lead:.4f} (prompt {worst.prompt}, token {worst.at})"
        )
    for x in (x for x in compared.behind if not x.tie):
        text = repr(decode([x.token]))
        out.append(f"  prompt {x.prompt:2}, token {x.at:3}: {text} lies {-x.lead:.4f} behind: unexplained")
    if compared.drafts:
        out.append("drafts accepted by one alone (margin of the text's token among the head's logits)")
    for x in compared.drafts:
        who = "mtplab" if x.what.ours else title
        text = "same text" if x.same_text else f"{title}'s text"
        out.append(
            f"  prompt {x.what.prompt:2}, slot {x.what.slot:3}, draft {x.what.step}: by {who}, {text}, "
            f"{x.lead:+.4f}, in BF16 {x.lead_bf16:+.4f}, step {x.step:.4f}, depths {_list(x.depths)}: {x.why}"
        )
    tie = "two BF16 steps" if compared.tie is None else f"{compared.tie:.2g}"
    out.append(f"rounds compared: {compared.rounds}; near-ties are margins up to {tie}")
    out.append(f"differences unexplained: {compared.unexplained}")
    for name, spread in (("tokens", compared.target_spread), ("drafts", compared.draft_spread)):
        out.append(f"margins of {name}: {_spread(spread)}")
    return "\n".join(out)


def _tie(tie: bool) -> str:
    return "near-tie" if tie else "unexplained"


def _list(values: Sequence[int]) -> str:
    return ",".join(map(str, values))


def _spread(spread: Spread | None) -> str:
    assert spread is not None
    return (
        f"our BF16 moves them by {spread.rms:.3f} (root mean square), {spread.most_of_99:.3f} (99 % of them), "
        f"{spread.most:.3f} at most; near-ties are {100 * spread.ties:.2g} % of all"
    )
