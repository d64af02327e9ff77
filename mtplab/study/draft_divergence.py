"""How far a draft's first proposals lie from its target: KL, and the share that is accepted when they are drawn.

Measured at every slot of texts that are given, with the target's own hidden states, in one pass. Knows nothing of
rounds or deeper drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mtplab.errors import ConfigError

if TYPE_CHECKING:
    from mtplab.models import Model

__all__ = ["DraftDivergence", "draft_divergence"]


@dataclass(frozen=True, eq=False)
class DraftDivergence:
    """By text, float64 [texts], summed over its slots: `kl`(target ‖ first draft) in nats, and `accepted`, the
    expected number of first drafts that speculative sampling at temperature 1 accepts, Σ_v min(p_v, q_v) a slot
    (Leviathan, Kalman, Matias, 2023, theorem 3.5). `slots` are how many there were."""

    kl: np.ndarray
    accepted: np.ndarray
    slots: tuple[int, ...]


def draft_divergence(model: Model, texts: Sequence[Sequence[int]], skips: Sequence[int]) -> DraftDivergence:
    """What the model's head proposes for the tokens of texts (lists of ids), `skips[i]` + 2 and on of text i.

    Raises ConfigError for a text without a slot, and for a model without a head.
    """
    import torch

    from mtplab.decode.threads import model_threads, on_device, running_with
    from mtplab.study.text_batches import check_texts, text_batches

    if model.draft is None:
        raise ConfigError(f"{model.checkpoint.path}: there is no MTP head to ask")
    check_texts(model, texts, skips)
    found: list[np.ndarray] = []
    row_bytes = 4 * (8 * model.config.vocab_size + 64 * model.config.hidden_size)
    with torch.inference_mode(), running_with(model_threads(model)), on_device(model.device):
        for batch in text_batches(model, texts, skips, row_bytes):
            hidden = batch.target(model.target)
            log_p = _log_softmax(model.target.logits(model.target.normed(hidden[batch.judged]))[batch.before])
            log_q = _log_softmax(model.draft.logits(batch.draft(model.draft, model.given(hidden))))
            kl = (log_p.exp() * (log_p - log_q)).sum(-1)
            rows = torch.stack([kl, torch.minimum(log_p, log_q).exp().sum(-1)])
            sums = rows.new_zeros(2, batch.run.batch).index_add_(1, batch.owner[batch.slots], rows)
            found.append(sums.cpu().numpy())
    kl, accepted = np.concatenate(found, 1)
    return DraftDivergence(kl, accepted, tuple(len(text) - skip - 2 for text, skip in zip(texts, skips, strict=True)))


def _log_softmax(logits):
    return logits.double().log_softmax(-1)
