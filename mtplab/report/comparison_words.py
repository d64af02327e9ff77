"""What a comparison says, in sentences, and all of it as text for a terminal and as Markdown.

Every number comes from the `Comparison`. Draws nothing; the tables are `comparison_tables.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill

from mtplab.report.comparison import Against, Comparison, Point
from mtplab.report.comparison_tables import (
    byte_pairs,
    listed,
    quality_lines,
    setting_varies,
    size_known,
    speed_pairs,
    tables,
    with_error,
)
from mtplab.report.row_sizes import SIZES
from mtplab.report.text import in_markdown, one_line
from mtplab.study.matching import AXES, Difference, Pair
from mtplab.study.numbers import NATS
from mtplab.study.soundness import CRITERION, MARK, kl_words

__all__ = ["markdown_of", "sentences", "text_of"]

WIDTH = 110  # columns of a sentence in a terminal
_SHOWN = 12  # differences that are told one by one


def sentences(against: Against) -> list[str]:
    """What was matched, what differs, how it was compared and what came out."""
    parts = (_matched(against), _differences(against), _broken(against), _how(against), _verdict(against))
    return [said for said in (*parts, _quality(against), _bytes(against), _speed(against)) if said]


def text_of(comparison: Comparison, positions: bool = False) -> str:
    """Everything as text, one part for each file that is compared with the baseline."""
    parts = []
    for against in comparison.against:
        parts.append("\n".join(fill(sentence, WIDTH, subsequent_indent="  ") for sentence in sentences(against)))
        parts += [table.to_text() for table in tables(against, positions)]
    return "\n\n".join(parts)


def markdown_of(comparison: Comparison, positions: bool = False) -> str:
    """The same as Markdown, a heading for each file that is compared with the baseline."""
    parts = []
    for against in comparison.against:
        parts.append(f"### {in_markdown(against.other.name)} against {in_markdown(against.base.name)}")
        parts.append("\n".join(f"- {in_markdown(sentence)}" for sentence in sentences(against)))
        parts += [table.to_markdown() for table in tables(against, positions)]
    return "\n\n".join(parts) + "\n"


def _matched(against: Against) -> str:
    found, base, other = against.matched, against.base.name, against.other.name
    on = ["depth", *(AXES[name][0] for name in found.on if setting_varies(found.pairs, AXES[name][0]))]
    count = len(found.pairs)
    text = f"{other} against {base}: {count} point{'s' * (count != 1)} matched on {listed(on)}"
    left = [(len(found.only_base), base), (len(found.only_other), other)]
    missing = [f"{n} row{'s' * (n != 1)} of {name}" for n, name in left if n]
    if missing:
        text += f"; {' and '.join(missing)} {'have' if sum(n for n, _ in left) > 1 else 'has'} no partner"
    if not count:
        text += f". {_why_nothing(against)}"
    return text.rstrip(".") + "."


def _why_nothing(against: Against) -> str:
    """Settings on which the two files have no value in common."""
    apart = []
    for name in against.matched.on:
        title, read = AXES[name]
        mine, theirs = ({read(row): None for row in side.rows} for side in (against.base, against.other))
        if not mine.keys() & theirs.keys():
            apart.append(f"{title} ({_some(mine)} against {_some(theirs)})")
    if not apart:
        return "They have no combination of settings and depth in common"
    return f"They have nothing in common in {listed(apart)}: say what to match by, such as depth alone"


def _differences(against: Against) -> str:
    settings = [d for d in against.differences if d.setting]
    others = [d for d in against.differences if not d.setting]
    if not against.matched.pairs:
        return ""
    if not settings and not others:
        return "Settings, checkpoint, versions and machine are the same, as far as the rows say."
    said = []
    if settings:
        said.append(f"What is compared: {'; '.join(_instead(d, against) for d in settings)}.")
    if others:
        more = f"; and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        said.append(f"Also different: {'; '.join(_instead(d, against) for d in others[:_SHOWN])}{more}.")
    return " ".join(said)


def _instead(difference: Difference, against: Against) -> str:
    every = difference.pairs == len(against.matched.pairs)
    of = "" if every else f" (in {difference.pairs} of {len(against.matched.pairs)} points)"
    return f"{difference.name} {one_line(difference.other)} instead of {one_line(difference.base)}{of}"


def _how(against: Against) -> str:
    if not any(point.pair.depth for point in against.points):
        return ""
    told = [point.change.paired for point in against.points if point.change is not None]
    if not told:
        return "No interval can be told: it takes counts by prompt, of two prompts or more, in both files."
    if all(told):
        how = "Both ran the same prompts, so they are compared prompt by prompt"
    elif not any(told):
        how = "They did not run the same prompts: each file's own spread counts, and only large differences show"
    else:
        how = f"{sum(told)} of {len(told)} points ran the same prompts in both and are compared prompt by prompt"
    return f"{how}; ± is half a 95 % interval."


def _verdict(against: Against) -> str:
    compared = against.compared
    same = sum(point.change is not None and not point.compared and point.pair.depth > 0 for point in against.points)
    alike = f" {same} further points are equal, prompt by prompt." if same and compared else ""
    if not compared:
        which = f"all {same} points with drafts are" if same > 1 else "the one point with drafts is"
        return f"Acceptance length: {which} equal, prompt by prompt." if same else ""
    beyond = [point for point in compared if point.beyond]
    count, outside = len(compared), len(beyond)
    if not beyond:
        whole = "the difference lies" if count == 1 else f"all {count} differences lie"
        return f"Acceptance length: {whole} within chance.{alike}"
    holds = [point for point in beyond if point.holds]
    lie = "lies" if outside == 1 else "lie"
    still = f"{len(holds)} still {'does' if len(holds) == 1 else 'do'}" if holds else "none still does"
    where = f": {_extremes(holds)}" if holds else ""
    return (
        f"Acceptance length: {outside} of {count} difference{'s' * (count > 1)} {lie} outside chance one by "
        f"one, where about {0.05 * count:.2g} would by chance alone; {still} with all looked at{where}.{alike}"
    )


def _extremes(points: Sequence[Point]) -> str:
    """The largest loss and the largest gain."""
    low = min(points, key=lambda point: point.difference)
    high = max(points, key=lambda point: point.difference)
    chosen = [("largest loss", low)] if low.difference < 0 else []
    chosen += [("largest gain", high)] if high.difference > 0 else []
    return "; ".join(f"{what} {with_error(p)} at depth {p.pair.depth}{_where(p.pair)}" for what, p in chosen)


def _broken(against: Against) -> str:
    """A good acceptance length over a broken target is no gain: that is said first."""
    told = list(dict.fromkeys(f"{_where(pair).strip(' ()') or 'all'}: {why}" for pair, why in _newly_broken(against)))
    if not told:
        return ""
    more = f"; and {len(told) - 3} more" if len(told) > 3 else ""
    name = against.other.name
    return f"{MARK} {name} broke the target, and its acceptance says nothing: {'; '.join(told[:3])}{more}. {CRITERION}."


def _newly_broken(against: Against) -> list[tuple[Pair, str]]:
    return [(point.pair, why) for point, why in zip(against.points, against.broke, strict=True) if why is not None]


def _quality(against: Against) -> str:
    lines = [pair for pair in quality_lines(against) if None not in (pair.base.kl, pair.other.kl)]
    if not lines:
        return ""
    pair = max(lines, key=lambda pair: abs(pair.other.kl - pair.base.kl))
    if pair.base.quality_text != pair.other.quality_text:
        return "KL, top-1 agreement and perplexity are over different texts, and do not compare."
    if pair.base.kl == pair.other.kl:
        return "KL from the unquantised target is the same in both."
    where = f"{_where(pair)}, where it differs most" if len(lines) > 1 else ""
    before, now = map(kl_words, (pair.base, pair.other))
    return f"KL from the unquantised target was {before} and is {now} {NATS}{where}."


def _bytes(against: Against) -> str:
    if not against.points:
        return ""
    same = [name for name, read in SIZES if size_known(against, read) and not byte_pairs(against, read)]
    return f"The same in both: {listed(same)}." if same else ""


def _speed(against: Against) -> str:
    if not speed_pairs(against):
        return ""
    apart = [d.name for d in against.differences if d.name in ("CPU", "device", "threads", "torch", "platform")]
    if apart:
        return f"Tokens per second were measured with another {listed(apart)}: the ratio is of that too."
    return "Tokens per second have no interval: one run each."


def _where(pair: Pair) -> str:
    words = ", ".join(one_line(pair.settings[title]) for title in ("exclusions", "KV cache") if title in pair.settings)
    return f" ({words})" if words else ""


def _some(values: Iterable[str]) -> str:
    words = [one_line(value, 30) for value in values]
    return ", ".join(words[:3]) + (", …" if len(words) > 3 else "")
