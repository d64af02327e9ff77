"""What a draft would propose at every slot of an output that is there, for all depths at once.

A round that begins at a slot matters only as far as its drafts equal the output, so step j feeds the output's own
tokens down the chain: each slot gets a copy of the draft's cache up to itself, and one pass of the head per step
serves all slots. A slot whose draft missed is dropped: no round goes further from there. A head with a module per depth
needs no copies: its step j reads all slots with the output's tokens, and that is what it is (`models/head.py`). The
passes are the runner's, on the runner's caches, so that with exact arithmetic the drafts are the runner's to the last
bit.

Knows nothing of rounds or depths, nor of how the output came about; what follows for depths is the study's.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtplab.decode.runner import Cancelled, draft_reads_prompts
from mtplab.decode.sampling import distribution
from mtplab.decode.settings import RunSettings
from mtplab.decode.tracing import TargetOutput
from mtplab.models import Model
from mtplab.models.attend import KEY_BLOCK
from mtplab.models.choice import decodes_with_kernels
from mtplab.models.delta_rule import CHUNK
from mtplab.models.passes import PassMaker
from mtplab.models.rows import pad_rows, round_up, row_count

__all__ = ["SlotTable", "draft_table"]

_SLOT_TOKENS = 64  # slots of a sequence that one pass of the head reads
_FORK_BYTES = 16 << 20  # of copied cache, and of logits, that a group of slots may take


@dataclass
class SlotTable:
    """What the slots of prompts gave, one prompt behind the other: of n tokens of output there are n − 1. Row i of a
    prompt is the round that begins when i + 1 tokens of the output are there, column j − 1 its draft j, which stands
    for token i + j of the output (counted from 0).

    hits [s, k] bool: draft j is the output's token, and so are all before it. log_q [s, k] float32: the draft's
    log-probability of that token after temperature, top-k and top-p (NaN past a draft that cannot be accepted, and at
    temperature 0). top [s, k] float32: the largest log-probability of the draft at temperature 1 (NaN likewise).
    """

    hits: np.ndarray
    log_q: np.ndarray
    top: np.ndarray

    @classmethod
    def empty(cls, slots: int, depth: int) -> SlotTable:
        """A table of nothing yet."""
        nan = np.full((slots, depth), np.nan, np.float32)
        return cls(np.zeros((slots, depth), bool), nan, nan.copy())


def draft_table(
    model: Model, asked: RunSettings, output: TargetOutput, cancel: threading.Event | None = None
) -> SlotTable:
    """The draft's proposals up to the depth asked for at every slot of the target's output, in batches as the target
    read the prompts. Raises Cancelled."""
    depth, batch = asked.spec.depth, asked.max_batch
    slots = [len(tokens) - 1 for tokens in output.tokens]
    table = SlotTable.empty(sum(slots), depth)
    if not depth:
        return table
    done = read = 0
    for first in range(0, len(asked.ids), batch):
        prompts, tokens = asked.ids[first : first + batch], output.tokens[first : first + batch]
        count = sum(slots[first : first + batch])
        known = sum(map(len, prompts)) + count
        if count:
            part = SlotTable(*(x[done : done + count] for x in (table.hits, table.log_q, table.top)))
            held = _Batch(model, asked, prompts, tokens, output.hidden[read : read + known])
            (_ByDepth if model.draft.per_depth else _Chains)(held, part, asked, cancel).run()
        done, read = done + count, read + known
    return table


class _Batch:
    """Prompts with their outputs, and the head's caches of them."""

    def __init__(
        self,
        model: Model,
        asked: RunSettings,
        prompts: list[list[int]],
        tokens: list[list[int]],
        hidden: Tensor,
    ):
        self.model, self.exact, self.prompts, device = model, asked.exact, prompts, model.device
        depth, policy = asked.spec.depth, asked.draft_policy
        self.starts, self.lengths = np.array([len(p) for p in prompts]), np.array([len(t) for t in tokens])
        width, longest = round_up(int(self.starts.max()), CHUNK), int(self.lengths.max())
        kernels = decodes_with_kernels(model.config, model.dtype, device, (policy,))
        need = max(width, int(self.starts.max()) + longest + depth)
        again = model.config.draft_caches(depth) - 1
        most = depth + 1 + again
        self.passes = PassMaker(model.config, round_up(need, KEY_BLOCK), model.dtype, device, most, kernels)
        self.caches = model.draft_caches(depth, len(prompts), self.passes.capacity, policy, kernels)
        # slots of the prompt before its last one that are read again
        self.back = np.minimum(self.starts - 1, again)
        self.read = int((self.back + self.lengths).max()) - 1
        self.output = torch.zeros(len(tokens), longest, dtype=torch.int64)
        following = torch.zeros(len(prompts), width, dtype=torch.int64)
        for row, (prompt, out) in enumerate(zip(prompts, tokens, strict=True)):
            self.output[row, : len(out)] = torch.tensor(out)
            following[row, : len(prompt)] = torch.tensor([*prompt[1:], out[0]])
        self.output = self.output.to(device)
        given = hidden.new_zeros(len(prompts), width, hidden.shape[-1], device=device)
        # of the slots that are read again and of those behind: the hidden state of each one's token
        self.given = given.new_zeros(len(prompts), max(self.read, 1), hidden.shape[-1])
        read = 0
        for row, (start, length, back) in enumerate(zip(self.starts, self.lengths, self.back, strict=True)):
            mine = hidden[read : read + start + length - 1].to(device)
            given[row, :start] = mine[:start]
            again = mine[start - 1 - back :][: back + length - 1]
            self.given[row, : len(again)] = again
            read += int(start + length - 1)
        lengths = torch.from_numpy(self.starts).to(device)
        draft_reads_prompts(
            model, self.passes, asked.spec, given, following.to(device), lengths, self.exact, self.caches
        )

    def head(self, passes: PassMaker, tokens, given, positions, longest: int, cache, step=0) -> tuple[Tensor, Tensor]:
        """The head over tokens [b, t] and hidden [b, t, h] → its hidden before and after its norm, [b·t, h]."""
        head = self.model.draft
        run = passes.make(positions, longest, self.exact, room=cache.room)
        embedded = run.gather(head.embed(tokens, positions, step))
        out = head(embedded, run.gather(given), run, cache, step)[: run.rows]
        return out, head.normed(pad_rows(out, row_count(len(out), self.exact)), step)[: run.rows]


class _Chains:
    """One batch's slots, by their flat numbers in the table; `rows` and `slots` say where those are.

    `bench/peers/forced.py` extends `_judge_band`."""

    def __init__(self, batch: _Batch, table: SlotTable, asked: RunSettings, cancel: threading.Event | None):
        self.batch, self.table, self.cancel = batch, table, cancel
        spec, sampling = asked.spec, asked.sampling
        self.depth, self.sampling = spec.depth, sampling
        self.sampled = spec.draft_sampling == "sampled" and not sampling.greedy
        self.feeds_normed = spec.draft_hidden == "post_norm"
        counts = batch.lengths - 1
        self.rows = np.repeat(np.arange(len(counts)), counts)
        self.slots = np.arange(len(self.rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        self.left = counts[self.rows] - self.slots  # tokens of the output that a round here could emit

    def run(self) -> None:
        """Fill the table."""
        hidden = self._read_slots()
        alive = np.flatnonzero(self._goes_on(np.arange(len(self.rows)), 1))
        if self.depth > 1 and len(alive):
            self._follow(hidden, alive)

    def _read_slots(self) -> Tensor:
        """Step 1: the head over the output's slots, with the target's hidden states → what it feeds back [s, h]."""
        batch, device = self.batch, self.batch.model.device
        width = batch.passes.most_tokens if batch.passes.kernels else _SLOT_TOKENS
        longest = int(batch.lengths.max()) - 1
        starts = torch.from_numpy(batch.starts).to(device)
        fed: Tensor | None = None
        for first in range(0, longest, width):
            self._look_up("slot", first)
            last = min(first + width, longest)
            # slot s holds the hidden state of token s and the embedding of s + 1; the first is the prompt's last
            positions = starts[:, None] - 1 + torch.arange(first, last, device=device)
            reach = int(batch.starts.max()) + last - 1
            out, normed = batch.head(
                batch.passes, batch.output[:, first:last], batch.given[:, first:last], positions, reach, batch.caches[0]
            )
            mine = np.flatnonzero((self.slots >= first) & (self.slots < last))
            index = torch.from_numpy(self.rows[mine] * (last - first) + self.slots[mine] - first).to(device)
            if fed is None:
                fed = out.new_empty(len(self.rows), out.shape[-1])
            fed[torch.from_numpy(mine).to(device)] = (normed if self.feeds_normed else out)[index]
            self._judge(mine, normed[index], 1)
        assert fed is not None
        return fed

    def _goes_on(self, at: np.ndarray, step: int) -> np.ndarray:
        """[n] bool: whether step + 1 of these slots can matter: it has a token to stand for, and `step` a chance."""
        chance = self.table.log_q[at, step - 1] > -np.inf if self.sampled else self.table.hits[at, step - 1]
        return chance & (self.left[at] > step)

    def _look_up(self, what: str, number: int) -> None:
        """Stop where somebody asked for it."""
        if self.cancel is not None and self.cancel.is_set():
            raise Cancelled(f"cancelled at {what} {number} of the draft's chains")

    def _follow(self, hidden: Tensor, alive: np.ndarray) -> None:
        """Steps 2 and on, for as many slots at a time as their copies of the cache may take, the nearest first."""
        batch, model = self.batch, self.batch.model
        passes: dict[int, PassMaker] = {}
        ends = batch.starts[self.rows] + self.slots + self.depth
        alive = alive[np.argsort(ends[alive], kind="stable")]
        while len(alive):
            capacity = min(round_up(int(ends[alive[0]]), KEY_BLOCK), batch.passes.capacity)
            each = batch.caches[0].bytes_per_slot * capacity + 4 * model.config.vocab_size
            fits = ends[alive[: max(1, _FORK_BYTES // each)]] <= capacity
            group, alive = alive[: fits.sum()], alive[fits.sum() :]
            if capacity not in passes:
                passes[capacity] = PassMaker(
                    model.config, capacity, model.dtype, model.device, batch.passes.most_tokens, batch.passes.kernels
                )
            self._chain(passes[capacity], capacity, hidden, group)

    def _chain(self, passes: PassMaker, capacity: int, hidden: Tensor, at: np.ndarray) -> None:
        batch, device = self.batch, self.batch.model.device
        fed = hidden[torch.from_numpy(at).to(device)]
        cache = batch.caches[0].fork(torch.from_numpy(self.rows[at]).to(device), capacity)
        for step in range(2, self.depth + 1):
            self._look_up("step", step)
            rows, slots = self.rows[at], self.slots[at] + step - 1
            positions = batch.starts[rows] - 1 + slots
            # the draft of step − 1 is the output's token, by assumption
            tokens = batch.output[torch.from_numpy(rows).to(device), torch.from_numpy(slots).to(device)]
            where = torch.from_numpy(positions).to(device)[:, None]
            out, normed = batch.head(passes, tokens[:, None], fed[:, None], where, int(positions.max()) + 1, cache)
            self._judge(at, normed, step)
            stay = np.flatnonzero(self._goes_on(at, step))
            if not len(stay) or step == self.depth:
                return
            fed = normed if self.feeds_normed else out
            if len(stay) < len(at):
                index = torch.from_numpy(stay).to(device)
                if passes.kernels:
                    cache.select(index)
                else:
                    index = cache.shrink(index)
                at, fed = at[index.cpu().numpy()], fed[index]

    def _judge(self, at: np.ndarray, normed: Tensor, step: int) -> None:
        """Write column `step` of the table for slots `at` [n], whose normed hidden is [n, h]."""
        band = max(8, _FORK_BYTES // (8 * self.batch.model.config.vocab_size) // 8 * 8)
        for first in range(0, len(at), band):
            self._judge_band(at[first : first + band], normed[first : first + band], step)

    def _judge_band(self, at: np.ndarray, normed: Tensor, step: int) -> None:
        batch, table, device = self.batch, self.table, self.batch.model.device
        exact = batch.exact
        logits = batch.model.draft.logits(pad_rows(normed, row_count(len(normed), exact)), step - 1)[: len(normed)]
        rows, slots = torch.from_numpy(self.rows[at]).to(device), torch.from_numpy(self.slots[at] + step).to(device)
        ids = batch.output[rows, slots]
        best, chosen = logits.max(-1)
        hit = (chosen == ids).cpu().numpy()
        table.hits[at, step - 1] = hit & table.hits[at, step - 2] if step > 1 else hit
        if not self.sampling.greedy:
            q = distribution(logits, self.sampling).gather(1, ids[:, None])[:, 0]
            table.log_q[at, step - 1] = q.log().float().cpu().numpy()
        # the largest of log-softmax; in place, for the logits are many and have served
        table.top[at, step - 1] = -logits.sub_(best[:, None]).exp_().sum(-1).log_().float().cpu().numpy()


class _ByDepth(_Chains):
    """With a module per depth: every step over all slots, each step's cache filled as it goes."""

    def run(self) -> None:
        """Fill the table."""
        batch = self.batch
        given, alive = batch.given, np.arange(len(self.rows))
        text = self._text()
        for step in range(1, self.depth + 1):
            out, normed = self._step(step, text, given)
            at = torch.from_numpy(self.rows[alive] * batch.read + batch.back[self.rows[alive]] + self.slots[alive])
            self._judge(alive, normed.flatten(0, 1)[at.to(normed.device)], step)
            alive = alive[self._goes_on(alive, step)]
            if not len(alive):
                return
            if batch.model.draft.chained:
                given = normed if self.feeds_normed else out

    def _text(self) -> Tensor:
        """[b, t]: the token after the first slot that is read again, and those behind it; 0 past the output's end."""
        batch = self.batch
        text = torch.zeros(len(batch.starts), batch.read + self.depth - 1, dtype=torch.int64)
        for row, (prompt, back) in enumerate(zip(batch.prompts, batch.back, strict=True)):
            after = prompt[len(prompt) - back :]
            text[row, :back] = torch.tensor(after, dtype=torch.int64)
            length = batch.lengths[row]
            text[row, back : back + length - 1] = batch.output[row, : length - 1].cpu()
        return text.to(batch.model.device)

    def _step(self, step: int, text: Tensor, given: Tensor) -> tuple[Tensor, Tensor]:
        """A step over all slots → its hidden before and after its norm [b, t, h]."""
        batch, device = self.batch, self.batch.model.device
        width = batch.passes.most_tokens if batch.passes.kernels else _SLOT_TOKENS
        starts = torch.from_numpy(batch.starts - 1 - batch.back).to(device)
        parts: list[tuple[Tensor, Tensor]] = []
        for first in range(0, batch.read, width):
            self._look_up("step", step)
            last = min(first + width, batch.read)
            positions = starts[:, None] + torch.arange(first, last, device=device)
            reach = int((batch.starts - 1 - batch.back).max()) + last
            tokens = text[:, first + step - 1 : last + step - 1]
            found = batch.head(
                batch.passes, tokens, given[:, first:last], positions, reach, batch.caches[step - 1], step - 1
            )
            parts.append(tuple(x.view(len(starts), last - first, -1) for x in found))
        out, normed = (torch.cat(x, 1) for x in zip(*parts, strict=True))
        return out, normed
