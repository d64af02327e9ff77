"""The target's own output, and what the draft would propose at every slot of it, for all depths at once.

The output is decoded plainly, in a batch, and the head reads its slots with the target's hidden states, as it does
after a verification. A round that begins at a slot matters only as far as its drafts equal the output, so step j feeds
the output's own tokens down the chain: each slot gets a copy of the draft's cache up to itself, and one pass of the
head per step serves all slots. A slot whose draft missed is dropped: no round goes further from there. The passes are
the runner's, on the runner's caches, so that with exact arithmetic the drafts are the runner's to the last bit.

Knows nothing of rounds or depths; what follows for them is the study's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.config import SamplingConfig
from mtplab.decode.accept import Verdict
from mtplab.decode.runner import Cancelled, Run
from mtplab.decode.sampling import distribution
from mtplab.decode.stats import Progress
from mtplab.models.attend import KEY_BLOCK
from mtplab.models.passes import PassMaker
from mtplab.models.rows import pad_rows, round_up, row_count

__all__ = ["SlotTable", "TargetRun", "draft_table"]

_SLOT_TOKENS = 64  # slots of a sequence that one pass of the head reads
_FORK_BYTES = 64 << 20  # of copied cache, and of logits, that a group of slots may take


@dataclass
class SlotTable:
    """What one prompt's slots gave. Row i is the round that begins when i + 1 tokens of the output are there, column
    j − 1 its draft j, which stands for token i + j of the output (counted from 0); of n tokens there are n − 1 rows.

    hits [n−1, k] bool: draft j is the output's token, and so are all before it. log_q [n−1, k] float32: the draft's
    log-probability of that token after temperature, top-k and top-p (NaN where the chain had missed before, and at
    temperature 0). top [n−1, k] float32: the largest log-probability of the draft at temperature 1 (NaN likewise).
    log_p [n−1] float32: the target's log-probability of token i + 1 (NaN at temperature 0).
    """

    hits: np.ndarray
    log_q: np.ndarray
    top: np.ndarray
    log_p: np.ndarray

    @classmethod
    def empty(cls, slots: int, depth: int) -> SlotTable:
        """A table of nothing yet."""
        nan = np.full((slots, depth), np.nan, np.float32)
        return cls(np.zeros((slots, depth), bool), nan, nan.copy(), np.full(slots, np.nan, np.float32))


class TargetRun(Run):
    """A batch decoded plainly, with the hidden states that the draft reads kept beside the tokens.

    Afterwards `given` [b, n−1, h] holds them from each prompt's last token on (zero past a sequence's end), and
    `state.draft` the head's cache of the prompts.
    """

    def go(self, on_round: Callable[[Progress], None] | None, cancel: threading.Event | None) -> float:
        """As `Run.go`; then gathers what was seen."""
        self._seen: list[tuple[list[int], Tensor]] = []
        self._log_p: list[tuple[list[int], np.ndarray]] = []
        seconds = super().go(on_round, cancel)
        longest = max(len(tokens) for tokens in self.tokens) - 1
        hidden = self._seen[0][1].shape[-1]
        self.given = self._seen[0][1].new_zeros(len(self.prompts), max(longest, 1), hidden)
        for at, (live, given) in enumerate(self._seen[: max(longest, 1)]):
            self.given[live, at] = given
        self._seen.clear()
        return seconds

    def prefill(self) -> None:
        """As `Run.prefill`; the draft's cache of the prompts stays whole when sequences end."""
        everything = list(range(len(self.prompts)))
        super().prefill()
        assert self._unread is not None
        self._seen.append((everything, self._first_given))
        self._unread = None

    def _draft_prompt(self, hidden: Tensor, following: Tensor, lengths: Tensor) -> None:
        super()._draft_prompt(hidden, following, lengths)
        assert self._unread is not None and self.state.draft is not None
        self._first_given = self._unread.hidden[:, 0]
        # sequences that end are taken out of the target's caches only
        self.draft_cache, self.state.draft = self.state.draft, None

    def round(self) -> None:
        """One token of every live sequence."""
        hidden, normed, logits = self.steps.verify(self.last[:, None], self._ends - 1, int(self.lengths.max()))
        verdict = Verdict(torch.zeros_like(self._ends), self._choose(logits, self.lengths[:, None]))
        accepted, emitted = self._tell(verdict, logits)
        self.state.commit(verdict.accepted + 1, 1)
        given = normed if self.spec.target_hidden == "post_norm" else hidden
        self._seen.append((list(self.live), given[:, 0]))
        if not self.sampling.greedy:
            p = distribution(logits[:, 0], self.sampling).gather(1, verdict.tokens)[:, 0]
            self._log_p.append((list(self.live), p.log().float().cpu().numpy()))
        self.batched_rounds += 1
        self._append(verdict, accepted, emitted)

    def tables(self, depth: int) -> list[SlotTable]:
        """Empty tables, with the target's log-probabilities in them."""
        found = [SlotTable.empty(len(tokens) - 1, depth) for tokens in self.tokens]
        for at, (live, values) in enumerate(self._log_p):
            for row, value in zip(live, values, strict=True):
                found[row].log_p[at] = value
        return found


def draft_table(run: TargetRun, depth: int, cancel: threading.Event | None = None) -> list[SlotTable]:
    """The draft's proposals up to `depth` at every slot of a finished run, one table per prompt. Raises Cancelled."""
    return _Chains(run, depth, cancel).tables


class _Chains:
    def __init__(self, run: TargetRun, depth: int, cancel: threading.Event | None):
        self.run, self.model, self.depth, self.cancel = run, run.model, depth, cancel
        self.cache = run.draft_cache
        self.sampled = run.spec.draft_sampling == "sampled" and not run.sampling.greedy
        self.feeds_normed = run.spec.draft_hidden == "post_norm"
        self.starts = torch.tensor([len(prompt) for prompt in run.prompts], device=run.device)
        self.lengths = np.array([len(tokens) for tokens in run.tokens])
        longest = int(self.lengths.max())
        self.output = torch.zeros(len(run.tokens), longest, dtype=torch.int64)
        for row, tokens in enumerate(run.tokens):
            self.output[row, : len(tokens)] = torch.tensor(tokens)
        self.output = self.output.to(run.device)
        self.tables = run.tables(depth)
        if longest > 1 and depth:
            self._read_slots()

    def _read_slots(self) -> None:
        """Step 1: the head over the output's slots, with the target's hidden states."""
        run = self.run
        width = run.passes.most_tokens if run.passes.kernels else _SLOT_TOKENS
        slots = int(self.lengths.max()) - 1
        kept: list[Tensor] = []
        for first in range(0, slots, width):
            last = min(first + width, slots)
            # slot s holds the hidden state of token s and the embedding of s + 1; the first is the prompt's last
            positions = self.starts[:, None] - 1 + torch.arange(first, last, device=run.device)
            reach = int((self.starts.max()).item()) + last - 1
            out, normed = self._pass(
                run.passes, self.output[:, first:last], run.given[:, first:last], positions, reach, self.cache
            )
            fed = (normed if self.feeds_normed else out).view(len(positions), last - first, -1)
            kept.append(fed)
            self._judge(*self._where(first, last), normed.view(len(positions), last - first, -1), 1)
        hidden = torch.cat(kept, 1)
        alive = [
            (row, slot)
            for row, table in enumerate(self.tables)
            for slot in range(len(table.hits) - 1)
            if self._goes_on(table, slot, 1)
        ]
        self._follow(hidden, alive)

    def _where(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        rows = np.repeat(np.arange(len(self.tables)), last - first)
        slots = np.tile(np.arange(first, last), len(self.tables))
        return rows, slots

    def _goes_on(self, table: SlotTable, slot: int, step: int) -> bool:
        if slot + step >= len(table.hits):
            return False
        return bool(table.log_q[slot, step - 1] > -np.inf) if self.sampled else bool(table.hits[slot, step - 1])

    def _follow(self, hidden: Tensor, alive: list[tuple[int, int]]) -> None:
        """Steps 2 and on, for as many slots at a time as their copies of the cache may take."""
        run = self.run
        reach = int((self.starts.max()).item()) + hidden.shape[1] + self.depth
        capacity = min(round_up(reach, KEY_BLOCK), run.passes.capacity)
        each = self.cache.bytes_per_slot * capacity + 4 * self.model.config.vocab_size
        group = max(1, _FORK_BYTES // max(1, each))
        passes = PassMaker(
            self.model.config, capacity, self.model.dtype, run.device, run.passes.most_tokens, run.passes.kernels
        )
        for first in range(0, len(alive), group):
            self._chain(passes, capacity, hidden, alive[first : first + group])

    def _chain(self, passes: PassMaker, capacity: int, hidden: Tensor, alive: list[tuple[int, int]]) -> None:
        device = self.run.device
        rows, slots = (np.array(column) for column in zip(*alive, strict=True))
        at = torch.from_numpy(rows).to(device), torch.from_numpy(slots).to(device)
        fed = hidden[at]
        cache = self.cache.fork(at[0], capacity)
        for step in range(2, self.depth + 1):
            if self.cancel is not None and self.cancel.is_set():
                raise Cancelled(f"cancelled at step {step} of the draft's chains")
            # the draft of step − 1 is the output's token, by assumption
            tokens = self.output[at[0], at[1] + step - 1]
            positions = self.starts[at[0]] - 1 + at[1] + step - 1
            out, normed = self._pass(
                passes, tokens[:, None], fed[:, None], positions[:, None], int(positions.max()) + 1, cache
            )
            self._judge(rows, slots, normed[:, None], step)
            stay = [i for i in range(len(rows)) if self._goes_on(self.tables[rows[i]], slots[i], step)]
            if not stay or step == self.depth:
                return
            fed = normed if self.feeds_normed else out
            if len(stay) < len(rows):
                index = torch.tensor(stay, device=device)
                rows, slots = rows[stay], slots[stay]
                fed, at = fed[index], (at[0][index], at[1][index])
                cache.select(index)

    def _pass(self, passes: PassMaker, tokens, given, positions, longest, cache) -> tuple[Tensor, Tensor]:
        """The head over tokens [b, t] and hidden [b, t, h] → its hidden before and after its norm, [b·t, h]."""
        target, head, exact = self.model.target, self.model.draft, self.run.exact
        run = passes.make(positions, longest, exact)
        embedded = run.gather(F.embedding(tokens, target.embedding))
        out = head(embedded, run.gather(given), run, cache)[: run.rows]
        return out, head.normed(pad_rows(out, row_count(len(out), exact)))[: run.rows]

    def _judge(self, rows: np.ndarray, slots: np.ndarray, normed: Tensor, step: int) -> None:
        """Write column `step` of the tables for slots (rows, slots), whose normed hidden is [.., h]."""
        flat = normed.flatten(0, -2)
        band = max(8, _FORK_BYTES // (8 * self.model.config.vocab_size) // 8 * 8)
        for first in range(0, len(rows), band):
            part = slice(first, first + band)
            self._judge_band(rows[part], slots[part], flat[part], step)

    def _judge_band(self, rows: np.ndarray, slots: np.ndarray, normed: Tensor, step: int) -> None:
        target, exact, sampling = self.model.target, self.run.exact, self.run.sampling
        logits = target.logits(pad_rows(normed, row_count(len(normed), exact)))[: len(normed)]
        there = slots + step < self.lengths[rows]
        ids = self.output[torch.from_numpy(rows), torch.from_numpy(np.where(there, slots + step, 0))]
        best, chosen = logits.max(-1)
        hit = (chosen == ids).cpu().numpy()
        top = (best.double() - logits.double().logsumexp(-1)).float().cpu().numpy()
        log_q = _log_probability(logits, ids, sampling) if not sampling.greedy else None
        for i in np.flatnonzero(there):
            table, slot = self.tables[rows[i]], slots[i]
            before = table.hits[slot, step - 2] if step > 1 else True
            table.hits[slot, step - 1] = bool(hit[i]) and bool(before)
            table.top[slot, step - 1] = top[i]
            if log_q is not None:
                table.log_q[slot, step - 1] = log_q[i]


def _log_probability(logits: Tensor, ids: Tensor, sampling: SamplingConfig) -> np.ndarray:
    return distribution(logits, sampling).gather(1, ids[:, None])[:, 0].log().float().cpu().numpy()
