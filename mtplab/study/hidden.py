"""Which hidden states the head should read: the A/B that engines disagree about, in one call.

For most families vLLM, SGLang and lmdeploy give the head the target's hidden state after its final norm, and feed the
head's own back after its norm; for some they take one or both before, and others assert so for Qwen3.5 too. Output is
the same either way, so acceptance is what tells them apart.
Knows nothing of what the hidden states hold or where the head gets them; keeps no results.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

from mtplab.config import SpecConfig
from mtplab.decode import AcceptanceStats, generate
from mtplab.decode.settings import Prompts
from mtplab.models import Model
from mtplab.models.asked import as_served

STAGES = ("post_norm", "pre_norm")


class HiddenStages(NamedTuple):
    """What the head read of the target, and what it was fed back of its own."""

    target: str
    draft: str


def compare_hidden(
    model: Model, prompts: Prompts, depth: int = 3, **settings: Any
) -> dict[HiddenStages, AcceptanceStats]:
    """Acceptance under all four choices, on the same prompts; `settings` are those of `generate`.

    What the model's family is served with comes first. A higher acceptance length is the better reading of this
    checkpoint. Raises what `generate` raises.
    """
    served = as_served(SpecConfig(), model.checkpoint.config)
    orders = (dict.fromkeys((first, *STAGES)) for first in (served.target_hidden, served.draft_hidden))
    return {
        HiddenStages(target, draft): generate(
            model, prompts, depth, target_hidden=target, draft_hidden=draft, **settings
        ).stats
        for target, draft in product(*orders)
    }
