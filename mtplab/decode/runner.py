"""Batched speculative decoding: prompts in, tokens and rounds out.

A sequence has n tokens, the last of which the target has not read yet; its caches hold n−1. A round drafts k tokens,
lets the target read the last token and the drafts in one pass, keeps what `accept` allows and rolls the rest back.
The draft's slot t holds (hidden t, embedding of token t+1): after a round it re-reads the accepted slots with the
target's hidden states, so that its cache never keeps what it imagined. A head with a module per depth re-reads the last
slots before those as well, whose later tokens were drafts (`models/head.py`).

Where sequences stand is known on both sides, the host's and the device's: a round waits for the device once, when it
reads what was emitted, and what it sends is at most the numbers that drafts are drawn with.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.config import SamplingConfig, SpecConfig
from mtplab.decode.accept import Verdict, accept_greedy, accept_sampled
from mtplab.decode.random import Purpose, uniform
from mtplab.decode.sampling import distribution, greedy, sample
from mtplab.decode.state import RunState
from mtplab.decode.stats import Progress, RoundRecord
from mtplab.decode.steps import Steps
from mtplab.errors import MtplabError
from mtplab.kernels.acceptance import emit_greedy, emit_sampled
from mtplab.models import Model
from mtplab.models.asked import as_served
from mtplab.models.attend import KEY_BLOCK
from mtplab.models.cache import KVCache
from mtplab.models.choice import decodes_with_kernels
from mtplab.models.delta_rule import CHUNK
from mtplab.models.passes import Pass, PassMaker
from mtplab.models.rows import pad_rows, round_up, row_count
from mtplab.quant.policy import QuantPolicy

# prompts are read in segments of this many tokens, so that attention scores stay small
SEGMENT = 32 * CHUNK


class Cancelled(Exception):
    """The run was cancelled through its event; nothing is wrong."""


class _Unread(NamedTuple):
    """What the draft has yet to read: `hidden` [b, t, h] and `tokens` [b, t]; the last of them at `at` [b], which is
    `last` on the host and lies two before the sequence's end."""

    hidden: Tensor
    tokens: Tensor
    at: Tensor
    last: np.ndarray


class Run:
    """One batch from prompts to finished sequences. `prompts` are non-empty lists of ids, `first` the call's index of
    the first of them, which names their random numbers and records."""

    def __init__(
        self,
        model: Model,
        prompts: list[list[int]],
        spec: SpecConfig,
        sampling: SamplingConfig,
        policy: QuantPolicy,
        draft_policy: QuantPolicy,
        exact: bool,
        first: int = 0,
        compiled: bool = False,
    ):
        self.model, self.sampling, self.exact, self.compiled = model, sampling, exact, compiled
        self.spec = as_served(spec, model.checkpoint.config)
        self.k = spec.depth
        self.device = model.device
        self.eos = frozenset() if sampling.ignore_eos else frozenset(model.config.eos_token_ids)
        longest = max(map(len, prompts))
        need = max(round_up(longest, CHUNK), longest + sampling.max_new_tokens + self.k + 1)
        block = KEY_BLOCK if exact or compiled else 64
        policies = (policy, draft_policy) if self.k else (policy,)
        kernels = decodes_with_kernels(model.config, model.dtype, self.device, policies)
        # slots before the unread ones that the draft reads again
        self.back = max(0, model.config.draft_caches(self.k) - 1)
        most = self._most_tokens(len(prompts))
        self.passes = PassMaker(model.config, round_up(need, block), model.dtype, self.device, most, kernels)
        self.state = RunState(model, len(prompts), self.passes.capacity, policy, draft_policy, self.k, kernels)
        self.steps = Steps(model, self.passes, self.state, exact, compiled)
        self.prompts = prompts
        self.tokens: list[list[int]] = [[] for _ in prompts]
        self.records: list[RoundRecord] = []
        self.first = first
        self.live = list(range(len(prompts)))  # index into `prompts` of each row of the batch
        self.lengths = np.array([len(p) for p in prompts])  # tokens of each row, the last one unread
        # the same on the device, as the indices of the prompts in the call and the last tokens
        self._ends = torch.from_numpy(self.lengths).to(self.device)
        self._indices = torch.arange(first, first + len(prompts), device=self.device)
        self.last = torch.zeros(len(prompts), dtype=torch.int64, device=self.device)
        self._unread: _Unread | None = None
        self.batched_rounds = 0

    def _most_tokens(self, batch: int) -> int:
        """Of a sequence, in any decoding pass."""
        return self.k + 1 + self.back

    @property
    def done(self) -> bool:
        """Whether every sequence has finished."""
        return not self.live

    def go(self, on_round: Callable[[Progress], None] | None, cancel: threading.Event | None) -> float:
        """Run to the end. Returns the seconds the prompts took. Raises Cancelled."""
        start = time.perf_counter()
        self.prefill()
        prefill_seconds = time.perf_counter() - start
        total = len(self.prompts) * self.sampling.max_new_tokens
        while not self.done:
            if cancel is not None and cancel.is_set():
                raise Cancelled(f"cancelled after {self.batched_rounds} rounds")
            self.round()
            if on_round is not None:
                open_budget = sum(self.sampling.max_new_tokens - len(self.tokens[i]) for i in self.live)
                on_round(Progress(total - open_budget, total, self.batched_rounds))
        return prefill_seconds

    def prefill(self) -> None:
        """Read the prompts and choose each sequence's first token, which belongs to no round."""
        b, lengths = len(self.prompts), self._ends
        t = round_up(int(self.lengths.max()), CHUNK)
        ids = torch.zeros(b, t, dtype=torch.int64)
        for row, prompt in enumerate(self.prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        ids = ids.to(self.device)
        starts = range(0, t, SEGMENT)
        with self.state.reading_segments() if len(starts) > 1 else nullcontext():
            hidden = torch.cat([self._read_segment(ids, lengths, s, min(s + SEGMENT, t)) for s in starts], 1)
        rows = torch.arange(b, device=self.device)
        last = hidden[rows, lengths - 1]
        normed = self._normed(last)
        logits = self._logits(normed)[:, None]
        verdict = Verdict(torch.zeros_like(lengths), self._choose(logits, self.lengths[:, None]))
        told = self._tell(verdict, logits)
        self._prompts_read(ids, hidden, verdict.tokens[:, 0])
        self._append(verdict, *told, prompt=True)

    def _read_segment(self, ids: Tensor, lengths: Tensor, start: int, stop: int) -> Tensor:
        run = _segment_pass(self.passes, start, stop, lengths, self.exact)
        hidden = self.model.target(ids[:, start:stop], run, self.state.target)
        return run.spread(hidden)

    def _prompts_read(self, ids: Tensor, hidden: Tensor, chosen: Tensor) -> None:
        """Let the draft read the prompts `ids` [b, t] with the target's hidden states [b, t, h], and what was chosen
        [b] after them."""
        if not self.k:
            return
        b, lengths = len(self.prompts), self._ends
        rows, at = torch.arange(b, device=self.device), lengths - 1
        following = torch.cat([ids[:, 1:], ids.new_zeros(b, 1)], dim=1)
        following[rows, at] = chosen
        given = self._given(hidden)
        draft_reads_prompts(self.model, self.passes, self.spec, given, following, lengths, self.exact, self.state.draft)
        # the last slot is read again, and those before whose later tokens are not there: they start the first chain
        before = at.clamp(max=self.back)
        slots = (at - before)[:, None] + torch.arange(self.back + 1, device=self.device)
        slots = slots.clamp(max=ids.shape[1] - 1)
        rows = rows[:, None]
        self._unread = _Unread(
            given[rows, slots], following[rows, slots], before, np.minimum(self.lengths - 1, self.back)
        )

    def round(self) -> None:
        """Draft, verify, keep, roll back."""
        drafts, draft_probs = self._draft() if self.k else (self.last.new_zeros(len(self.live), 0), None)
        tokens = torch.cat([self.last[:, None], drafts], dim=1)
        hidden, normed, logits = self.steps.verify(tokens, self._ends - 1, int(self.lengths.max()) + self.k)
        verdict = self._verdict(drafts, draft_probs, logits)
        accepted, emitted = self._tell(verdict, logits)
        self._saw(hidden, normed, logits, verdict)
        same = bool((accepted == accepted[0]).all())
        self.state.commit(verdict.accepted + 1, int(accepted[0]) + 1 if same else None)
        if self.k:
            given = normed if self.spec.target_hidden == "post_norm" else hidden
            # a compiled pass keeps its shape: slots past the accepted ones are read too, and written again later
            width = self.k + 1 if self.compiled else int(accepted.max()) + 1
            self._unread = self._to_read(given[:, :width], verdict.tokens[:, :width], verdict.accepted, accepted)
        self.batched_rounds += 1
        self._append(verdict, accepted, emitted)

    def _to_read(self, given: Tensor, tokens: Tensor, accepted: Tensor, told: np.ndarray) -> _Unread:
        """What a round gave [b, t, ..], up to slot accepted[i], behind the slots that are read again."""
        if not self.back:
            return _Unread(given, tokens, accepted, told)
        before = self._unread
        assert before is not None
        # a sequence of n tokens has had n − 1 slots
        kept, counted = (self._ends - 1).clamp(max=self.back), np.minimum(self.lengths - 1, self.back)
        width = self.back + tokens.shape[1] if self.compiled else int((counted + told).max()) + 1
        at, old = torch.arange(width, device=self.device), before.tokens.shape[1]
        kept = kept[:, None]
        index = torch.where(at < kept, before.at[:, None] + 1 - kept + at, old + at - kept)
        index = index.clamp(max=old + tokens.shape[1] - 1)
        rows = torch.arange(len(index), device=self.device)[:, None]
        hidden, tokens = torch.cat([before.hidden, given], 1), torch.cat([before.tokens, tokens], 1)
        return _Unread(hidden[rows, index], tokens[rows, index], kept[:, 0] + accepted, counted + told)

    def _saw(self, hidden: Tensor, normed: Tensor, logits: Tensor, verdict: Verdict) -> None:
        """What the target gave in a round, [b, t, ..], for who watches it."""

    def _draft(self) -> tuple[Tensor, Tensor | None]:
        """k drafts per sequence [b, k], and the distributions they were drawn from [b, k, v] if they were drawn."""
        hidden, tokens, at, last = self._unread
        # the last slot read is n−2: it drafts position n
        slots = self._ends - 2 - at
        longest = int((self.lengths - 2 - last).max()) + tokens.shape[1]
        drawn = self.spec.draft_sampling == "sampled" and not self.sampling.greedy
        numbers = self._uniform(self.lengths[:, None] + np.arange(self.k), Purpose.DRAFT) if drawn else None
        drafts, probs = [], []
        head = self.model.draft
        for step in range(self.k):
            if head.per_depth:
                out, normed, logits = self.steps.module(step, tokens, hidden, slots, longest, at)
            else:
                only = tokens.shape[1] == 1
                out, normed, logits = self.steps.draft(tokens, hidden, slots, longest, None if only else at)
            if numbers is not None:
                q = distribution(logits, self.sampling)
                drafts.append(sample(q, numbers[:, step]))
                probs.append(q)
            else:
                drafts.append(greedy(logits))
            fed = normed if self.spec.draft_hidden == "post_norm" else out
            if head.per_depth:
                # the next module reads the same slots, each with the token one later
                tokens = tokens.roll(-1, 1)
                tokens[torch.arange(len(tokens), device=self.device), at] = drafts[-1]
                hidden = fed if head.chained else hidden
                continue
            # the next slot reads the head's own hidden and the token just drafted
            hidden = fed[:, None]
            tokens, slots, longest = drafts[-1][:, None], self._ends + (step - 1), int(self.lengths.max()) + step
        return torch.stack(drafts, 1), torch.stack(probs, 1) if probs else None

    def _verdict(self, drafts: Tensor, draft_probs: Tensor | None, logits: Tensor) -> Verdict:
        if self.passes.kernels:
            return self._verdict_of_kernels(drafts, draft_probs, logits)
        if self.sampling.greedy:
            return accept_greedy(drafts, greedy(logits))
        positions = self.lengths[:, None] + np.arange(self.k + 1)
        return accept_sampled(
            drafts,
            distribution(logits, self.sampling),
            draft_probs,
            self._uniform(positions[:, : self.k], Purpose.ACCEPT),
            self._uniform(positions, Purpose.SAMPLE),
        )

    def _verdict_of_kernels(self, drafts: Tensor, draft_probs: Tensor | None, logits: Tensor) -> Verdict:
        if self.sampling.greedy:
            out = emit_greedy(drafts, logits)
        else:
            target = distribution(logits, self.sampling)
            out = emit_sampled(drafts, target, draft_probs, self.sampling.seed, self._indices, self._ends)
        # what lies past the emitted tokens is read by the draft and overwritten: any token will do
        return Verdict(out.num_emitted - 1, out.tokens.clamp_min(0))

    def _choose(self, logits: Tensor, positions: np.ndarray) -> Tensor:
        """The target's own token at each position: logits [b, t, v], positions [b, t] → [b, t]."""
        if self.sampling.greedy:
            return greedy(logits)
        return sample(distribution(logits, self.sampling), self._uniform(positions, Purpose.SAMPLE))

    def _tell(self, verdict: Verdict, logits: Tensor) -> tuple[np.ndarray, list[list[int]]]:
        """What a verdict on logits [b, t, v] says, on the host: accepted [b] and tokens [b, t], by the one copy of a
        round. Raises MtplabError where logits are not finite: a NaN would pass for the likeliest token."""
        # the largest logit is NaN if any is
        finite = logits.amax(dim=(1, 2)).isfinite()
        told = torch.cat([verdict.tokens, verdict.accepted[:, None], finite[:, None]], dim=1).cpu().numpy()
        if not told[:, -1].all():
            row = int(told[:, -1].argmin())
            raise MtplabError(
                f"prompt {self.first + self.live[row]}: the target's logits are NaN or infinite after "
                f"{int(self.lengths[row])} tokens. The weights are finite, so the arithmetic overflowed"
                f"{self.model.overflow_advice()}"
            )
        return told[:, -2], told[:, :-2].tolist()

    def _append(self, verdict: Verdict, accepted: np.ndarray, tokens: list[list[int]], prompt: bool = False) -> None:
        """Emit up to accepted[i] + 1 tokens of row i, end what has finished and drop it from the batch."""
        going = []
        for row, i in enumerate(self.live):
            mine = self.tokens[i]
            new = tokens[row][: accepted[row] + 1][: self.sampling.max_new_tokens - len(mine)]
            ends = next((j for j, token in enumerate(new) if token in self.eos), None)
            if ends is not None:
                new = new[: ends + 1]
            if not prompt:
                kept = min(int(accepted[row]), len(new))
                self.records.append(RoundRecord(self.first + i, int(self.lengths[row]), self.k, kept, len(new)))
            mine.extend(new)
            if ends is None and len(mine) < self.sampling.max_new_tokens:
                going.append(row)
        self.lengths, self._ends = self.lengths + accepted + 1, self._ends + verdict.accepted + 1
        # of a row that goes on nothing was cut off
        self.last = verdict.tokens.gather(1, verdict.accepted[:, None])[:, 0]
        if len(going) < len(self.live):
            self._keep(going)

    def _keep(self, rows: list[int]) -> None:
        self.live = [self.live[r] for r in rows]
        self.lengths = self.lengths[rows]
        if not rows:
            return
        index = torch.tensor(rows, device=self.device)
        self.last, self._ends, self._indices = self.last[index], self._ends[index], self._indices[index]
        self.state.select(index)
        if self._unread is not None:
            given, tokens, at, last = self._unread
            width = tokens.shape[1] if self.compiled else int(last[rows].max()) + 1
            self._unread = _Unread(given[index, :width], tokens[index, :width], at[index], last[rows])

    def _given(self, hidden: Tensor) -> Tensor:
        """What the draft reads of the target's hidden states [b, t, h]."""
        if self.spec.target_hidden == "pre_norm":
            return hidden
        return self.model.target.normed(hidden)

    def _normed(self, hidden: Tensor) -> Tensor:
        return self.model.target.normed(self._padded(hidden))[: hidden.shape[0]]

    def _logits(self, normed: Tensor) -> Tensor:
        return self.model.target.logits(self._padded(normed))[: normed.shape[0]]

    def _padded(self, x: Tensor) -> Tensor:
        return pad_rows(x, row_count(x.shape[0], self.exact))

    def _uniform(self, positions: np.ndarray, purpose: Purpose) -> Tensor:
        prompts = np.array([self.first + i for i in self.live])
        return torch.from_numpy(uniform(self.sampling.seed, prompts, positions, purpose)).to(self.device)


def draft_reads_prompts(
    model: Model,
    passes: PassMaker,
    spec: SpecConfig,
    given: Tensor,
    following: Tensor,
    lengths: Tensor,
    exact: bool,
    caches: list[KVCache],
) -> None:
    """Let the head read all slots of prompts into its caches: hidden states `given` [b, t, h], the token after each
    [b, t], of which sequence i has `lengths[i]`. Later modules find no token at the last slots, and read any there."""
    t, head = given.shape[1], model.draft
    following = F.pad(following, (0, len(caches) - 1))
    starts = range(0, t, SEGMENT)
    with ExitStack() as held:
        for cache in caches if len(starts) > 1 else ():
            held.enter_context(cache.holding_values())
        for start in starts:
            stop = min(start + SEGMENT, t)
            run = _segment_pass(passes, start, stop, lengths, exact)
            hidden = run.gather(given[:, start:stop])
            for step, cache in enumerate(caches):
                embedded = run.gather(head.embed(following[:, start + step : stop + step], run.positions, step))
                out = head(embedded, hidden, run, cache, step)
                if head.chained and step + 1 < len(caches):
                    hidden = head.normed(out, step) if spec.draft_hidden == "post_norm" else out


def _segment_pass(passes: PassMaker, start: int, stop: int, lengths: Tensor, exact: bool) -> Pass:
    positions = torch.arange(start, stop, device=lengths.device).expand(len(lengths), -1)
    return passes.make(positions, stop, exact, (lengths - start).clamp(0, stop - start))
