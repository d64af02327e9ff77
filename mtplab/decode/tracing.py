"""The target's own output, decoded plainly, with what a draft would read of it kept beside the tokens.

The target does the same whatever drafts: its output is made once, and `chains.py` asks any draft about it, also one of
other weights or with another cache. Knows nothing of drafts, rounds or depths.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtplab.decode.accept import Verdict
from mtplab.decode.runner import Run
from mtplab.decode.sampling import distribution
from mtplab.decode.settings import RunSettings
from mtplab.decode.stats import Progress
from mtplab.models import Model

__all__ = ["TargetOutput", "TargetRun", "target_output"]


@dataclass(frozen=True)
class TargetOutput:
    """What the target did with prompts. Those lie one behind the other: `hidden` [n, h] has what the draft reads of
    every token of the prompt and the output but the last one, `log_p` [s] float32 the log-probability of each
    token of the output but the first, after temperature, top-k and top-p (NaN at temperature 0)."""

    tokens: list[list[int]]
    hidden: Tensor
    log_p: np.ndarray

    @classmethod
    def joined(cls, parts: list[TargetOutput]) -> TargetOutput:
        """Batches as one."""
        return cls(
            [tokens for part in parts for tokens in part.tokens],
            torch.cat([part.hidden for part in parts]),
            np.concatenate([part.log_p for part in parts]),
        )


def target_output(
    model: Model,
    asked: RunSettings,
    on_round: Callable[[Progress], None] | None = None,
    cancel: threading.Event | None = None,
) -> tuple[TargetOutput, dict[str, float]]:
    """What the target does with the prompts asked for, and the seconds that "prompts" and "decode" took. Raises
    Cancelled."""
    plain = asked.spec.model_copy(update={"depth": 0})
    seconds = {"prompts": 0.0, "decode": 0.0}
    each = asked.sampling.max_new_tokens
    parts: list[TargetOutput] = []
    rounds = 0
    for first in range(0, len(asked.ids), asked.max_batch):
        batch = asked.ids[first : first + asked.max_batch]
        run = TargetRun(model, batch, plain, asked.sampling, asked.policy, asked.draft_policy, asked.exact, first)
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
