"""Whether what a server counted is what was asked of it: rounds in our terms, and other people's requests found out.

Between two looks at its figures, a server must have counted our prompts, our tokens and nothing else. Sends nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mtplab.engines.engine import Answer, Engine
from mtplab.engines.figures import Look
from mtplab.engines.measured import Counts
from mtplab.errors import MtplabError

__all__ = ["Traffic", "WrongDepth", "caught_up", "counts_between", "impossible", "lost", "traffic"]


class WrongDepth(MtplabError):
    """The server does not draft as deep as it was said to."""


@dataclass(frozen=True)
class Traffic:
    """What others asked of the server meanwhile: requests and tokens, None where it does not count them."""

    requests: int | None
    tokens: int | None

    def __str__(self) -> str:
        known = [
            f"{count} {what}{'s' * (count != 1)}"
            for count, what in ((self.requests, "request"), (self.tokens, "token"))
            if count
        ]
        return " and ".join(known)


def caught_up(counted: Look, answers: Sequence[Answer]) -> bool:
    """Whether the figures hold all of these answers; what is not exported is not waited for."""
    tokens = sum(answer.completion_tokens for answer in answers)
    return (
        (counted.requests is None or counted.requests >= len(answers))
        and (counted.generation_tokens is None or counted.generation_tokens >= tokens)
        and not counted.busy
    )


def traffic(counted: Look, answers: Sequence[Answer]) -> Traffic | None:
    """What is more than ours; None where nothing is, or nothing can be known."""
    tokens = sum(answer.completion_tokens + answer.prompt_tokens for answer in answers)
    theirs = None
    if counted.generation_tokens is not None:
        # prompts that others send and no one answers yet are seen by their tokens; cached ones may not be counted
        prompt = max(counted.prompt_tokens or 0, sum(answer.prompt_tokens for answer in answers))
        theirs = counted.generation_tokens + prompt - tokens
    requests = None if counted.requests is None else counted.requests - len(answers)
    found = Traffic(requests, theirs)
    return found if any(count is not None and count > 0 for count in (requests, theirs)) else None


def counts_between(engine: Engine, counted: Look, answers: Sequence[Answer], depth: int) -> Counts:
    """A group's counts from what the server counted around it. Raises WrongDepth where it drafts otherwise."""
    tokens = sum(max(0, answer.completion_tokens - 1) for answer in answers)
    if depth == 0:
        if counted.drafted:
            raise WrongDepth(f"{engine.title} drafted {counted.drafted} tokens; it was to draft none")
        return Counts(tokens, tokens, 0, 0, ())
    shown = (counted.rounds, counted.drafted, counted.accepted)
    if shown == (None, None, None) and any(answer.counts is None for answer in answers):
        name = engine.figures.rounds
        raise WrongDepth(
            f"{engine.title} shows no figure of drafts, such as {name if isinstance(name, str) else name[0]}: "
            f"speculation is off, or this build does not count it; it was to draft {depth} a round"
        )
    if counted.rounds == 0 and counted.drafted in (0, None) and tokens > len(answers):
        raise WrongDepth(
            f"{engine.title} verified no drafts in {tokens} tokens: speculation is off; it was to draft {depth} a round"
        )
    places = counted.per_position
    if places is not None and len(places) > depth and any(places[depth:]):
        raise WrongDepth(f"{engine.title} drafts {len(places)} tokens a round; it was to draft {depth}")
    _deep_enough(engine, counted, answers, depth)
    if places is not None and len(places) < depth:
        # a position that no draft was ever accepted at may have no sample yet
        places = (*places, *(0,) * (depth - len(places)))
    if None not in (counted.drafted, counted.rounds) and counted.drafted > counted.rounds * depth:
        raise WrongDepth(
            f"{engine.title} drafted {counted.drafted} tokens in {counted.rounds} rounds; at depth {depth} there can "
            f"be {counted.rounds * depth}"
        )
    rounds, more = counted.rounds, _beyond(counted, tokens)
    if more and engine.figures.lossy:
        return Counts(tokens, None, None, None, None)
    if more and engine.figures.plain_steps:
        rounds += more  # a token each
    return Counts(tokens, rounds, counted.drafted, counted.accepted, None if places is None else places[:depth])


def impossible(counts: Counts, depth: int) -> str | None:
    """Why these cannot be counts of rounds that gave these tokens and no others; None where they can be. What is not
    exported is not looked at."""
    rounds, drafted, accepted, places = counts.rounds, counts.drafted, counts.accepted, counts.per_position
    if rounds is not None and not rounds <= counts.tokens <= rounds * (depth + 1):
        return f"{rounds} rounds give {counts.tokens} tokens; at depth {depth} a round gives 1 to {depth + 1}"
    if None not in (drafted, accepted) and accepted > drafted:
        return f"{accepted} of {drafted} drafts are accepted"
    if None not in (rounds, accepted) and accepted > rounds * depth:
        return f"{accepted} drafts are accepted in {rounds} rounds of {depth}"
    if places is None:
        return None
    rising = any(a < b for a, b in itertools.pairwise(places))
    if rising or (rounds is not None and rounds < max(places, default=0)):
        return f"drafts up to each position are accepted in {places} of {rounds} rounds; expected fewer and fewer"
    if accepted is not None and sum(places) != accepted:
        return f"{accepted} drafts are accepted, and by position {sum(places)}"
    return None


def _deep_enough(engine: Engine, counted: Look, answers: Sequence[Answer], depth: int) -> None:
    """Raises WrongDepth where the server drafts less than it was to: positions that it never drafts would be read as
    positions where nothing is accepted."""
    figures, places = engine.figures, counted.per_position
    if not counted.rounds:
        return
    if figures.all_positions and places is not None and len(places) < depth:
        raise WrongDepth(f"{engine.title} drafts {len(places)} tokens a round; it was to draft {depth}")
    drafted, others = counted.drafted, traffic(counted, answers) is not None
    if drafted is None and not others and all(answer.counts is not None for answer in answers):
        drafted = sum(answer.counts.drafted or 0 for answer in answers)
    # a server of any lesser depth gives no more than this; of the right one, a few rounds may be shorter
    if drafted is None or drafted > counted.rounds * (depth - 1):
        return
    # each text's last rounds have at most depth - 1, depth - 2, … tokens left to draft
    short = len(answers) * depth * (depth - 1) // 2
    if figures.shortens and (others or drafted >= counted.rounds * depth - short):
        return
    raise WrongDepth(
        f"{engine.title} drafted {drafted} tokens in {counted.rounds} rounds; at depth {depth} there would be "
        f"{counted.rounds * depth}: it drafts less a round than it was to, or its context ends with the texts"
    )


def lost(engine: Engine, counted: Look, answers: Sequence[Answer], depth: int) -> str | None:
    """What must be said where the server did not count all rounds: tokens that no counted round gave. `counts_between`
    leaves counts out then: shares of the rounds that are there would be of those that happened to be counted last, and
    tokens over rounds would be too many."""
    more = _beyond(counted, sum(max(0, answer.completion_tokens - 1) for answer in answers))
    if not depth or not more or not engine.figures.lossy:
        return None
    return (
        f"{engine.title} did not count all rounds: {more} of its tokens came of none that it counted, so acceptance is "
        "not known; ask for less at once (concurrency)"
    )


def _beyond(counted: Look, tokens: int) -> int:
    """Tokens beyond what the counted rounds and accepted drafts give; as many are at least not of them, for drafts that
    the end of a text cut off may be among the accepted."""
    if None in (counted.rounds, counted.accepted):
        return 0
    return max(0, tokens - counted.rounds - counted.accepted)
