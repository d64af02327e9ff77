"""One look at the target: the logits after a sequence, by a single pass, outside any run.

Knows nothing of drafts, rounds or sampling.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtplab.decode.threads import on_device
from mtplab.models import Model
from mtplab.models.attend import KEY_BLOCK
from mtplab.models.delta_rule import CHUNK
from mtplab.models.passes import PassMaker
from mtplab.models.rows import round_up
from mtplab.quant.policy import resolve_policy


@torch.inference_mode()
def next_logits(model: Model, ids: list[int], policy: str = "none") -> Tensor:
    """Logits [v] of the token after `ids`, exact, from one prompt pass under a cache policy."""
    width = round_up(len(ids), CHUNK)
    capacity = round_up(width, KEY_BLOCK)
    passes = PassMaker(model.config, capacity, model.dtype, model.device)
    tokens = F.pad(torch.tensor([ids]), (0, width - len(ids))).to(model.device)
    positions = torch.arange(width, device=model.device)[None]
    run = passes.make(positions, width, True, torch.tensor([len(ids)], device=model.device))
    with on_device(model.device):
        hidden = model.target(tokens, run, model.target_caches(1, capacity, resolve_policy(policy)))
        return model.target.logits(model.target.normed(hidden))[len(ids) - 1]
