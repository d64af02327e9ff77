"""The target's own output, decoded plainly, with what a draft would read of it kept beside the tokens.

The target does the same whatever drafts: its output is made once, and `chains.py` asks any draft about it, also one of
other weights or with another cache. Or the output is given, another model's, and the target reads it. Knows nothing of
drafts, rounds or depths.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mtplab.decode.accept import Verdict
from mtplab.decode.runner import Run
from mtplab.decode.sampling import distribution
from mtplab.decode.settings import RunSettings
from mtplab.decode.stats import Progress
from mtplab.models import Model

__all__ = ["GivenRun", "TargetOutput", "TargetRun", "target_output"]

# an output that is given is read in passes of so many tokens of a sequence, fewer where a delta-rule layer's states
# after each of them would take more than this
_GIVEN_TOKENS = 64
_STEP_BYTES = 64 << 20


@dataclass(frozen=True)
class TargetOutput:
    """What the target did with prompts. Those lie one behind the other: `hidden` [n, h] has what the draft reads of
    every token of the prompt and the output but the last one, `log_p` [s] float32 the log-probability of each
    token of the output but the first, after temperature, top-k and top-p (NaN at temperature 0)."""

    tokens: list[list[int]]
    hidden: Tensor
    log_p: np.ndarray
    chosen: int = 0  # of an output that was given: tokens that the target chooses itself at their place

    @classmethod
    def joined(cls, parts: list[TargetOutput]) -> TargetOutput:
        """Batches as one."""
        return cls(
            [tokens for part in parts for tokens in part.tokens],
            torch.cat([part.hidden for part in parts]),
            np.concatenate([part.log_p for part in parts]),
            sum(part.chosen for part in parts),
        )


def target_output(
    model: Model,
    asked: RunSettings,
    on_round: Callable[[Progress], None] | None = None,
    cancel: threading.Event | None = None,
    given: list[list[int]] | None = None,
) -> tuple[TargetOutput, dict[str, float]]:
    """What the target does with the prompts asked for, and the seconds that "prompts" and "decode" took. With outputs
    `given`, what it makes of those. Raises Cancelled."""
    plain = asked.spec.model_copy(update={"depth": 0})
    seconds = {"prompts": 0.0, "decode": 0.0}
    each = asked.sampling.max_new_tokens
    parts: list[TargetOutput] = []
    rounds = 0
    for first in range(0, len(asked.ids), asked.max_batch):
        batch = asked.ids[first : first + asked.max_batch]
        settings = (model, batch, plain, asked.sampling, asked.policy, asked.draft_policy, asked.exact, first)
        run = TargetRun(*settings) if given is None else GivenRun(given[first : first + asked.max_batch], *settings)
        report = None
        if on_round is not None:

            def report(p: Progress, done: int = first * each, before: int = rounds) -> None:
                on_round(Progress(done + p.tokens_done, len(asked.ids) * each, before + p.rounds))

        began = time.perf_counter()
        took = run.go(report, cancel)
        seconds["prompts"] += took
        seconds["decode"] += time.perf_counter() - began - took
        rounds += run.batched_rounds
        parts.append(run.output)
    return TargetOutput.joined(parts), seconds


class TargetRun(Run):
    """A batch decoded plainly; afterwards `output` says what came of it."""

    output: TargetOutput

    def go(self, on_round: Callable[[Progress], None] | None, cancel: threading.Event | None) -> float:
        """As `Run.go`; then gathers what was seen."""
        assert not self.k, "the target decodes plainly here"
        self._seen: list[tuple[list[int], Tensor]] = []
        self._log_p: list[tuple[list[int], np.ndarray]] = []
        seconds = super().go(on_round, cancel)
        self.output = TargetOutput(self.tokens, self._gathered(), self._probabilities())
        self._seen.clear()
        return seconds

    def _prompts_read(self, ids: Tensor, hidden: Tensor, chosen: Tensor) -> None:
        self._of_prompts = self._given(hidden)

    def _saw(self, hidden: Tensor, normed: Tensor, logits: Tensor, verdict: Verdict) -> None:
        given = normed if self.spec.target_hidden == "post_norm" else hidden
        self._seen.append((list(self.live), given[:, 0]))
        if not self.sampling.greedy:
            p = distribution(logits[:, 0], self.sampling).gather(1, verdict.tokens)[:, 0]
            self._log_p.append((list(self.live), p.log().float().cpu().numpy()))

    def _gathered(self) -> Tensor:
        """[n, h]: prompts and outputs one behind the other."""
        lengths = [len(prompt) + len(tokens) - 1 for prompt, tokens in zip(self.prompts, self.tokens, strict=True)]
        first = np.concatenate([[0], np.cumsum(lengths)])
        found = self._of_prompts.new_empty(int(first[-1]), self._of_prompts.shape[-1])
        after = [0] * len(lengths)
        for row, prompt in enumerate(self.prompts):
            after[row] = int(first[row]) + len(prompt)
            found[first[row] : after[row]] = self._of_prompts[row, : len(prompt)]
        del self._of_prompts
        for at, (live, given) in enumerate(self._seen):
            # a sequence's round i read token i of its output
            found[torch.tensor([after[row] + at for row in live], device=found.device)] = given
        return found

    def _probabilities(self) -> np.ndarray:
        slots = np.array([len(tokens) - 1 for tokens in self.tokens])
        first = np.concatenate([[0], np.cumsum(slots)])
        found = np.full(int(first[-1]), np.nan, np.float32)
        for at, (live, values) in enumerate(self._log_p):
            found[first[live] + at] = values
        return found


class GivenRun(TargetRun):
    """A batch whose outputs are there: read many tokens to a pass, with the arithmetic of decoding, so that exact
    arithmetic gives of a target's own output what decoding it gave, to the last bit."""

    def __init__(self, given: list[list[int]], model: Model, *settings):
        self.given = given
        super().__init__(model, *settings)
        self.chosen = 0

    def _most_tokens(self, batch: int) -> int:
        state = 4 * batch * max((delta.state_size for delta in self.model.config.deltas), default=0)
        return max(1, min(_GIVEN_TOKENS, max(map(len, self.given)), _STEP_BYTES // max(1, state)))

    def go(self, on_round: Callable[[Progress], None] | None, cancel: threading.Event | None) -> float:
        """As `TargetRun.go`; the output also says how much of it the target chooses itself."""
        seconds = super().go(on_round, cancel)
        self.output = replace(self.output, chosen=self.chosen)
        return seconds

    def _choose(self, logits: Tensor, positions: np.ndarray) -> Tensor:
        mine = super()._choose(logits, positions)
        after = torch.tensor([tokens[0] for tokens in self.given], device=mine.device)[:, None]
        self.chosen += int((mine == after).sum())
        return after

    def _append(self, verdict: Verdict, accepted: np.ndarray, tokens: list[list[int]], prompt: bool = False) -> None:
        """After the prompts: the first token of every output."""
        assert prompt
        for i in self.live:
            self.tokens[i].append(self.given[i][0])
        self._go_on(np.ones(len(self.live), int))

    def _go_on(self, read: np.ndarray) -> None:
        """So many tokens more of each row are there; rows that are through leave the batch."""
        self.lengths = self.lengths + read
        self._ends = self._ends + torch.from_numpy(read).to(self.device)
        going = [row for row, i in enumerate(self.live) if len(self.tokens[i]) < len(self.given[i])]
        if len(going) < len(self.live):
            self._keep(going)

    def round(self) -> None:
        """Read the next tokens of every output."""
        there = [len(self.tokens[i]) for i in self.live]
        left = np.array([len(self.given[i]) - count for i, count in zip(self.live, there, strict=True)])
        width = min(self.passes.most_tokens, int(left.max()))
        take = np.minimum(left, width)
        tokens = torch.zeros(2, len(self.live), width, dtype=torch.int64)
        for row, (i, count, n) in enumerate(zip(self.live, there, take, strict=True)):
            mine = torch.tensor(self.given[i][count - 1 : count + n])
            tokens[0, row, :n], tokens[1, row, :n] = mine[:-1], mine[1:]
        read, after = tokens.to(self.device)
        hidden, normed, logits = self.steps.verify(read, self._ends - 1, int(self.lengths.max()) - 1 + width)
        chosen = super()._choose(logits, self.lengths[:, None] + np.arange(width))
        real = torch.arange(width, device=self.device) < torch.from_numpy(take).to(self.device)[:, None]
        self._tell(Verdict(torch.zeros_like(self._ends), chosen), logits)
        self.chosen += int(((chosen == after) & real).sum())
        self._note(take, normed if self.spec.target_hidden == "post_norm" else hidden, logits, after)
        self.state.commit(torch.from_numpy(take).to(self.device), width if (take == width).all() else None)
        for i, count, n in zip(self.live, there, take, strict=True):
            self.tokens[i].extend(self.given[i][count : count + n])
        self.batched_rounds += 1
        self._go_on(take)

    def _note(self, take: np.ndarray, given: Tensor, logits: Tensor, after: Tensor) -> None:
        """What a pass gave, token by token: rows that are live have read equally many."""
        for at in range(int(take.max())):
            rows = np.flatnonzero(take > at)
            live, index = [self.live[row] for row in rows], torch.from_numpy(rows).to(self.device)
            self._seen.append((live, given[index, at]))
            if not self.sampling.greedy:
                p = distribution(logits[index, at], self.sampling).gather(1, after[index, at, None])[:, 0]
                self._log_p.append((live, p.log().float().cpu().numpy()))
