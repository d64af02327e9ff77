"""Another engine's texts and rounds held against our model, and a reason for every difference.

The engine's own text is fed to our model: each of its tokens must be the one we would choose or nearly tie with it, and
each of its rounds must have ended where our head's drafts on that text end, or at a draft that nearly ties. Nothing
adds up over a text, since both are asked at every place anew. Knows nothing of how results came about or are printed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np

from mtplab.bench.peers.forced import Forced, Leads, force
from mtplab.bench.peers.rounds import Counts, Difference, counts_of, differences, walk
from mtplab.models import Model
from mtplab.study.trace import Trace

__all__ = ["SLOT", "Compared", "Depth", "Draft", "Parting", "Spread", "Token", "bf16_step", "compare", "is_tie"]

# logits of float32 engines closer than this are a tie that the order of summation decides, unless it was measured how
# far the engine's leads lie from ours
FLOAT32_TIE = 1e-3
# two logits rounded to BF16 come a step nearer or farther by that alone, and hidden states in BF16 add as much
BF16_TIE_STEPS = 2.0
SLOT = "slot left by the request before"


def bf16_step(size: float) -> float:
    """Distance of neighbouring BF16 values at this size, of 8 bits of precision."""
    return float(2.0 ** (np.floor(np.log2(abs(size))) - 7)) if size else 0.0


def is_tie(lead: float, size: float, tie: float | None) -> bool:
    """Whether a lead in float32 logits of this size is one that an engine's arithmetic does not resolve: at most `tie`,
    or where that is None, what BF16 does not."""
    return abs(lead) <= (BF16_TIE_STEPS * bf16_step(size) if tie is None else tie)


@dataclass(frozen=True)
class Token:
    """A token of an engine's text: `lead` in float32 logits over the likeliest other, `rival`; `lead_bf16` likewise."""

    prompt: int
    at: int
    token: int
    rival: int
    lead: float
    lead_bf16: float
    step: float
    tie: bool


@dataclass(frozen=True)
class Parting(Token):
    """The first token at which an engine's text is not ours; `rival` is then our token."""

    depths: tuple[int, ...] = ()


@dataclass(frozen=True)
class Draft:
    """A draft that one engine accepted and the other did not, at these depths; `lead` as of the text's token over the
    head's likeliest other. `why`: "near-tie", `SLOT` (gone once our head has that slot) or "unexplained"."""

    what: Difference
    depths: tuple[int, ...]
    same_text: bool
    lead: float
    lead_bf16: float
    step: float
    why: str


@dataclass(frozen=True)
class Spread:
    """How far BF16 moves our own leads on these texts: root mean square, 99th percentile and the most of it; and what
    share of all leads is a tie by `is_tie`."""

    rms: float
    most_of_99: float
    most: float
    ties: float


@dataclass
class Depth:
    """One depth: prompts of equal text, and counts of the engine and of ours, in tokens emitted."""

    depth: int
    equal_texts: int
    theirs: Counts
    ours: Counts
    ours_on_their_text: Counts
    differing_prompts: tuple[int, ...]  # of equal text and other rounds


@dataclass
class Compared:
    """All of one engine. `behind`: tokens of its texts that we would not have chosen, partings included. `tie`: the
    largest margin that counts as a near-tie, None where that is `BF16_TIE_STEPS` steps."""

    depths: list[Depth] = field(default_factory=list)
    partings: list[Parting] = field(default_factory=list)
    behind: list[Token] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    tie: float | None = None
    target_spread: Spread | None = None
    draft_spread: Spread | None = None

    @property
    def rounds(self) -> int:
        """The engine's rounds at all depths, each of which was held against ours."""
        return sum(x.theirs.rounds for x in self.depths)

    @property
    def unexplained(self) -> int:
        """Tokens and drafts that nothing accounts for."""
        return sum(not x.tie for x in self.behind) + sum(x.why == "unexplained" for x in self.drafts)


def compare(
    model: Model,
    in_bf16: Model,
    prompts: list[list[int]],
    ours: Trace,
    found: dict[int, tuple[list[list[int]], list[list[int]]]],
    float32: bool,
    carries: bool,
    leads: list[list[float]] | None = None,
    stages: tuple[str | None, str | None] = (None, None),
) -> Compared:
    """`found`: depth → texts [p][n] of an engine and tokens emitted by each of its rounds [p][r]; no rounds at depth 0.

    `float32`: what the engine computes in, else BF16. `carries`: its head's cache begins with a slot left by the
    prompt before (`force`). `leads` [p][n]: by how much the engine has its tokens of depth 0 lead; margins up to the
    farthest of these from ours are then its near-ties. `stages`: which hidden states its head reads (`force`).
    """
    out, deepest = Compared(tie=FLOAT32_TIE if float32 else None), ours.max_depth
    mine, our_hits = ours.outputs, np.split(np.asarray(ours.hits), len(prompts))
    looked: dict[tuple, _Look] = {}
    partings: dict[tuple[int, int, int], list[int]] = {}
    drafts: dict[tuple[tuple, Difference, bool], list[int]] = {}
    for depth, (texts, emitted) in sorted(found.items()):
        key = tuple(map(tuple, texts))
        if key not in looked:
            looked[key] = _Look(model, in_bf16, prompts, texts, deepest, carries, stages)
        look = looked[key]
        if leads is not None and not depth:
            out.tie = float(np.abs(np.asarray(leads) - look.plain.target.lead).max())
        same = [text == own for text, own in zip(texts, mine, strict=True)]
        for p, at in ((p, _parts(mine[p], texts[p])) for p, equal in enumerate(same) if not equal):
            partings.setdefault((p, at, texts[p][at]), []).append(depth)
        if not depth:
            continue
        differing = []
        for p in range(len(prompts)):
            parted = differences(p, emitted[p], look.plain.hits[p], depth)
            rest = differences(p, emitted[p], look.closest.hits[p], depth)
            left = {each.slot for each in rest}
            for each in rest:
                drafts.setdefault((key, each, False), []).append(depth)
            for each in (x for x in parted if x.slot not in left):
                drafts.setdefault((key, each, True), []).append(depth)
            if parted and same[p]:
                differing.append(p)
        out.depths.append(
            Depth(
                depth,
                sum(same),
                _total(emitted, depth),
                _total([walk(hits, depth) for hits in our_hits], depth),
                _total([walk(hits, depth) for hits in look.plain.hits], depth),
                tuple(differing),
            )
        )
    for (p, at, _), depths in sorted(partings.items()):
        look = next(x for x in looked.values() if x.texts[p][:at] == mine[p][:at] and x.texts[p][at] != mine[p][at])
        token = look.token(p, at, out.tie)
        out.partings.append(Parting(**{**vars(token), "rival": mine[p][at]}, depths=tuple(depths)))
    seen = {}
    for look in looked.values():
        for p, at in np.argwhere(look.plain.target.lead < 0).tolist():
            seen.setdefault((p, tuple(look.texts[p][: at + 1])), look.token(p, at, out.tie))
    out.behind = list(seen.values())
    for (key, what, mended), depths in sorted(drafts.items(), key=lambda x: dataclasses.astuple(x[0][1])):
        same = looked[key].texts[what.prompt] == mine[what.prompt]
        out.drafts.append(looked[key].draft(what, tuple(depths), same, out.tie, mended))
    looks = list(looked.values())
    out.target_spread = _spread([(x.plain.target, x.bf16.target) for x in looks], out.tie)
    out.draft_spread = _spread([(x.plain.draft, x.bf16.draft) for x in looks], out.tie)
    return out


class _Look:
    """One set of texts, fed to our model in float32 and in BF16, and where the engine carries a slot, with it."""

    def __init__(
        self,
        model: Model,
        in_bf16: Model,
        prompts: list[list[int]],
        texts: list[list[int]],
        depth: int,
        carries: bool,
        stages: tuple[str | None, str | None],
    ) -> None:
        self.texts = texts
        self.plain: Forced = force(model, prompts, texts, depth, stages=stages)
        self.bf16: Forced = force(in_bf16, prompts, texts, depth, stages=stages)
        self.closest = force(model, prompts, texts, depth, True, stages) if carries else self.plain

    def token(self, p: int, at: int, tie: float | None) -> Token:
        lead, size = float(self.plain.target.lead[p, at]), float(self.plain.target.size[p, at])
        return Token(
            prompt=p,
            at=at,
            token=self.texts[p][at],
            rival=int(self.plain.rivals[p, at]),
            lead=lead,
            lead_bf16=float(self.bf16.target.lead[p, at]),
            step=bf16_step(size),
            tie=is_tie(lead, size, tie),
        )

    def draft(
        self, what: Difference, depths: tuple[int, ...], same_text: bool, tie: float | None, mended: bool
    ) -> Draft:
        """`mended`: whether the difference is gone once our head has the slot that the engine carries."""
        where, leads = (what.prompt, what.slot, what.step - 1), (self.plain if mended else self.closest).draft
        lead, size = float(leads.lead[where]), float(leads.size[where])
        why = SLOT if mended else "near-tie" if is_tie(lead, size, tie) else "unexplained"
        return Draft(what, depths, same_text, lead, float(self.bf16.draft.lead[where]), bf16_step(size), why)


def _parts(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """The first place at which texts of equal length are not equal."""
    return next(at for at, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)


def _total(emitted: Sequence[Sequence[int]], depth: int) -> Counts:
    return reduce(add, (counts_of(rounds, depth) for rounds in emitted))


def _spread(pairs: list[tuple[Leads, Leads]], tie: float | None) -> Spread:
    """Of leads in float32 and in BF16, wherever both were looked at."""
    plain = np.concatenate([x.lead.ravel() for x, _ in pairs])
    size = np.concatenate([x.size.ravel() for x, _ in pairs])
    moved = np.concatenate([(y.lead - x.lead).ravel() for x, y in pairs])
    moved, there = np.abs(moved[~np.isnan(moved)]), ~np.isnan(plain)
    ties = [is_tie(lead, size, tie) for lead, size in zip(plain[there], size[there], strict=True)]
    return Spread(
        float(np.sqrt(np.mean(moved**2))),
        float(np.quantile(moved, 0.99)),
        float(moved.max()),
        float(np.mean(ties)),
    )
