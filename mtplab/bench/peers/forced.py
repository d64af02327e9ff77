"""What our model makes of another engine's text: how far each token leads, and what the head would have drafted there.

The text is fed to our decoder as if it had chosen it, so that every position and every slot can be looked at, also
past the first token where the engine's text is not ours. Knows nothing of engines or their rounds.

What the runner and its chains see on the way they keep to themselves, so both are subclassed here, with what is theirs
alone: `_choose` and `_note` of `decode/tracing.py`, `_Batch` and `_judge_band` of `decode/chains.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtplab.decode.chains import SlotTable, _Batch, _Chains
from mtplab.decode.settings import RunSettings, resolve_run
from mtplab.decode.tracing import GivenRun
from mtplab.models import Model
from mtplab.models.rows import pad_rows, row_count

__all__ = ["Forced", "Leads", "force"]


@dataclass(frozen=True)
class Leads:
    """By how much a token's logit leads the largest of the others (negative: how far it lies behind), and the size of
    the logits there. `lead` and `size` are float32 of one shape; NaN where nobody looked."""

    lead: np.ndarray
    size: np.ndarray


@dataclass(frozen=True)
class Forced:
    """Of prompts with texts of n tokens each: `target` leads [p, n] of the text's tokens, `rivals` [p, n] the token
    that is likeliest besides; `hits` [p, n − 1, k] as in a trace, and `draft` leads [p, n − 1, k] of the token that
    draft j stands for (NaN past a miss)."""

    target: Leads
    rivals: np.ndarray
    hits: np.ndarray
    draft: Leads


def force(
    model: Model,
    prompts: list[list[int]],
    texts: list[list[int]],
    depth: int,
    carried: bool = False,
    stages: tuple[str | None, str | None] = (None, None),
) -> Forced:
    """Read texts of equal length n > 1 after prompts, exactly, in the model's dtype. `stages`: target_hidden and
    draft_hidden of the engine, as `generate` has them; None: the family's.

    `carried`: the head's cache begins with one more slot, as llama.cpp's does: the prompt's first token, with the
    hidden state that the prompt before it ended in (zeros for the first).
    """
    tokens = len(texts[0])
    assert all(len(text) == tokens for text in texts), "texts of equal length are forced together"
    assert depth == 1 or not model.draft.per_depth, "one module drafts every step"
    asked = _settings(model, prompts, depth, tokens, stages)
    with torch.inference_mode():
        run = _ForcedRun(model, asked, texts)
        run.go(None, None)
        hidden = run.output.hidden
        if carried:
            hidden = _with_carried(list(hidden.split([len(ids) + tokens - 1 for ids in prompts])))
            prompts = [[0, *ids] for ids in prompts]
            asked = _settings(model, prompts, depth, tokens, stages)
        table = SlotTable.empty(len(texts) * (tokens - 1), depth)
        chains = _Measured(_Batch(model, asked, prompts, texts, hidden), table, asked, None)
        chains.run()
    shape = (len(texts), tokens - 1, depth)
    lead, size, rivals = (torch.stack(list(x), 1).numpy() for x in zip(*run.seen, strict=True))
    draft = Leads(chains.lead.reshape(shape), chains.size.reshape(shape))
    return Forced(Leads(lead, size), rivals, table.hits.reshape(shape), draft)


def _settings(
    model: Model, prompts: list[list[int]], depth: int, tokens: int, stages: tuple[str | None, str | None]
) -> RunSettings:
    plain = {"temperature": 0.0, "seed": 0, "max_new_tokens": tokens, "top_k": 0, "top_p": 1.0, "quant_policy": "none"}
    rest = {"draft_quant_policy": None, "draft_sampling": "greedy", "target_hidden": stages[0]}
    last = {"draft_hidden": stages[1], "exact": True, "compile": False, "ignore_eos": True, "threads": None}
    return resolve_run(
        model, prompts, depth, **plain, **rest, **last, max_batch=len(prompts), on_round=None, cancel=None
    )


def _with_carried(parts: list[Tensor]) -> Tensor:
    before = [torch.zeros_like(parts[0][:1]), *(part[-1:] for part in parts)]
    return torch.cat([x for pair in zip(before, parts, strict=False) for x in pair])


def leads(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [m, v] and tokens [m] → (lead [m], size [m], the likeliest other token [m]), on the CPU."""
    logits = logits.float()
    mine = logits.gather(1, ids[:, None])[:, 0]
    best, rival = logits.scatter(1, ids[:, None], -torch.inf).max(1)
    return (mine - best).cpu(), torch.maximum(mine.abs(), best.abs()).cpu(), rival.cpu()


class _ForcedRun(GivenRun):
    """Reads texts, whatever the target would say, and notes the leads of their tokens as it goes."""

    def __init__(self, model: Model, asked: RunSettings, texts: list[list[int]]) -> None:
        plain = asked.spec.model_copy(update={"depth": 0})
        super().__init__(texts, model, asked.ids, plain, asked.sampling, asked.policy, asked.draft_policy, asked.exact)
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def _choose(self, logits: Tensor, positions: np.ndarray) -> Tensor:
        after = super()._choose(logits, positions)
        self.seen.append(leads(logits[:, 0], after[:, 0]))
        return after

    def _note(self, take: np.ndarray, given: Tensor, logits: Tensor, after: Tensor) -> None:
        super()._note(take, given, logits, after)
        self.seen += [leads(logits[:, at], after[:, at]) for at in range(int(take.max()))]


class _Measured(_Chains):
    """Chains that note by how much each draft's token leads."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.lead = np.full(self.table.hits.shape, np.nan, np.float32)
        self.size = self.lead.copy()

    def _judge_band(self, at: np.ndarray, normed: Tensor, step: int) -> None:
        batch = self.batch
        logits = batch.model.draft.logits(pad_rows(normed, row_count(len(normed), batch.exact)))[: len(normed)]
        rows = torch.from_numpy(self.rows[at]).to(logits.device)
        ids = batch.output[rows, torch.from_numpy(self.slots[at] + step).to(logits.device)]
        lead, size, _ = leads(logits, ids)
        self.lead[at, step - 1], self.size[at, step - 1] = lead.numpy(), size.numpy()
        super()._judge_band(at, normed, step)
