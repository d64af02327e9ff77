"""One engine's answers to a sweep held against our model and against what the engine itself counted.

Every token must be ours or a near-tie, every round must end where our head's drafts on that text end or at a near-tie
(`mtplab/bench/peers/compare.py`), a row must say what the answers say, and the answers what the server's metrics say.
Prints nothing and starts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mtplab.bench.engines.heard import Heard
from mtplab.bench.engines.likely import emitted_of_counts
from mtplab.bench.peers.compare import FLOAT32_TIE, Compared, compare, is_tie
from mtplab.bench.peers.forced import Forced, force
from mtplab.bench.peers.rounds import walk
from mtplab.engines.accounts import counts_between
from mtplab.engines.engine import Answer, Engine
from mtplab.engines.figures import look, samples_of
from mtplab.models import Model
from mtplab.study.point import digest_of
from mtplab.study.row import ResultRow
from mtplab.study.trace import Trace

__all__ = ["Judged", "judge"]


# margins of float32 engines lie within 0.007 of ours; what is farther is no matter of arithmetic
FLOAT32_FARTHEST = 0.02
# drafted and accepted, as an answer itself has them
_SAID: dict[str, Callable[[Any], tuple[int, int]]] = {
    "vllm": lambda given: (
        given["metrics"]["speculative_decoding"]["num_draft_tokens"],
        given["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"],
    ),
    "llamacpp": lambda given: (given["timings"].get("draft_n", 0), given["timings"].get("draft_n_accepted", 0)),
}


@dataclass
class Judged:
    """`rounds`: depth → tokens emitted by each round [p][r]. `told`: depth → what the server's metrics counted, in
    words. `faults`: what does not fit, in words; empty where all does."""

    compared: Compared
    texts: dict[int, list[list[int]]] = field(default_factory=dict)
    rounds: dict[int, list[list[int]]] = field(default_factory=dict)
    told: dict[int, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def unexplained(self) -> int:
        """Differences that nothing accounts for."""
        return self.compared.unexplained + len(self.faults)


def judge(
    engine: Engine,
    heard: Sequence[Heard],
    rows: Sequence[ResultRow],
    model: Model,
    in_bf16: Model,
    prompts: list[list[int]],
    ours: Trace,
    float32: bool,
    leads: list[list[float]] | None = None,
) -> Judged:
    """Of one engine at the depths it was heard at, `rows` being the sweep's of these. `float32`, `leads`: as of
    `compare`; an engine in float32 is taken to be llama.cpp, whose head carries a slot from prompt to prompt."""
    out = Judged(Compared())
    tie = FLOAT32_TIE if float32 else None
    forced: dict[tuple, Forced] = {}
    for each in heard:
        answers = each.answers(engine, prompts)
        texts = out.texts[each.depth] = [list(answer.ids or ()) for answer in answers]
        if leads is not None and not each.depth:
            plain = force(model, prompts, texts, ours.max_depth)
            tie = float(np.abs(np.asarray(leads) - plain.target.lead).max())
            if tie > FLOAT32_FARTHEST:
                out.faults.append(f"its margins lie up to {tie:.3g} from ours, so that nothing would not be a near-tie")
    for each, row in zip(heard, rows, strict=True):
        answers, texts, depth = each.answers(engine, prompts), out.texts[each.depth], each.depth
        if depth and any(answer.emitted is None for answer in answers):
            key = tuple(map(tuple, texts))
            if key not in forced:
                forced[key] = force(model, prompts, texts, ours.max_depth, carried=float32)
            places = _places(engine, each, answers, prompts)
            out.rounds[depth], faults = _likely(engine.title, depth, places, forced[key], tie)
            out.faults += faults
        elif depth:
            out.rounds[depth] = [list(answer.emitted or ()) for answer in answers]
        out.told[depth], faults = _accounts(engine, each, answers, row, out.rounds.get(depth))
        out.faults += faults
    found = {depth: (texts, out.rounds.get(depth, [])) for depth, texts in out.texts.items()}
    out.compared = compare(model, in_bf16, prompts, ours, found, float32, carries=float32, leads=leads)
    return out


def _places(
    engine: Engine, heard: Heard, answers: Sequence[Answer], prompts: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Drafts accepted by position of each prompt, from the metrics before it and after it: it ran alone."""
    looks = [look(engine.figures, samples_of(heard.looks[n])) for n in range(len(answers) + 1)]
    order = [tuple(body["prompt"]) for body, _ in heard.completions]
    found = []
    for ids, answer in zip(prompts, answers, strict=True):
        n = order.index(tuple(ids))
        counts = counts_between(engine, looks[n + 1].since(looks[n]), [answer], heard.depth)
        found.append(counts.per_position or ())
    return found


def _likely(
    title: str, depth: int, places: Sequence[tuple[int, ...]], forced: Forced, tie: float | None
) -> tuple[list[list[int]], list[str]]:
    """Rounds of prompts of which drafts accepted by position alone are known; ours where there is no way to these, and
    then a fault."""
    found, faults = [], []
    lead, size = np.nan_to_num(forced.draft.lead, nan=np.inf), np.nan_to_num(forced.draft.size)
    ties = np.vectorize(lambda a, b: is_tie(a, b, tie))(lead, size)
    for p, per_position in enumerate(places):
        emitted = emitted_of_counts(forced.hits[p][:, :depth], ties[p][:, :depth], per_position)
        if emitted is None:
            emitted = walk(forced.hits[p], depth)
            faults.append(
                f"depth {depth}, prompt {p}: {title} accepted {per_position} drafts by position, which no way through "
                "its text gives that parts from ours at near-ties alone"
            )
        found.append(emitted)
    return found, faults


def _accounts(
    engine: Engine, heard: Heard, answers: Sequence[Answer], row: ResultRow, rounds: list[list[int]] | None
) -> tuple[str, list[str]]:
    """What the metrics counted, in words, and where row, answers and metrics are not of one mind."""
    counted, depth = heard.counted(engine), heard.depth
    tokens = sum(answer.completion_tokens for answer in answers)
    facts = {
        "generated tokens, metrics and answers": (counted.generation_tokens, tokens),
        "tokens of rounds, row and answers": (row.tokens, tokens - len(answers)),
        "texts, row and answers": (row.output_hash, digest_of([list(answer.ids or ()) for answer in answers])),
        "drafted, metrics and row": (counted.drafted or 0, row.drafted),
    }
    if depth and rounds is not None:
        emitted = [each for prompt in rounds for each in prompt]
        places = [sum(each > j for each in emitted) / len(emitted) for j in range(1, depth + 1)]
        shown = [None if share is None else round(share, 9) for share in row.per_position]
        facts["rounds, row and answers"] = row.rounds, len(emitted)
        facts["by position, row and answers"] = shown, [round(share, 9) for share in places]
        facts["accepted, row and answers"] = row.accepted, sum(emitted) - len(emitted)
    if depth:
        said = [_SAID[engine.name](given) for _, given in heard.completions]
        drafted, accepted = (sum(each) for each in zip(*said, strict=True))
        facts["drafted, metrics and answers"] = counted.drafted, drafted
        facts["accepted before any cut, metrics and answers"] = counted.accepted, accepted
    told = (
        f"{counted.rounds} rounds, {counted.drafted} drafted, {counted.accepted} accepted, "
        f"{' '.join(map(str, counted.per_position or ()))}"
    )
    faults = [f"depth {depth}: {what}: {a} and {b}" for what, (a, b) in facts.items() if a != b]
    return told, faults
