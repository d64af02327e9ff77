"""A run's caches, target and draft together: making them, rolling them back after a round, dropping what has finished.

Knows nothing of tokens or acceptance: it is told how many tokens of the last pass to keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from mtplab.models import Model
from mtplab.models.cache import DeltaState, KVCache
from mtplab.quant.policy import QuantPolicy


class RunState:
    """Caches of b sequences. Attention caches roll back by length: slots past a sequence's length are never attended
    before they are written again. Delta-rule states roll back by position (`DeltaState.commit`)."""

    def __init__(
        self,
        model: Model,
        batch: int,
        capacity: int,
        policy: QuantPolicy,
        draft_policy: QuantPolicy,
        depth: int,
        kernels: bool = False,
    ):
        self.target = model.target_caches(batch, capacity, policy, kernels)
        self.draft = model.draft_caches(depth, batch, capacity, draft_policy, kernels)
        if depth:
            for cache in self.target:
                if isinstance(cache, DeltaState):
                    cache.step_buffer(depth + 1)  # now, so that a compiled pass finds it there

    def commit(self, keep: Tensor, uniform: int | None) -> None:
        """Keep the first keep[i] tokens of the target's last pass for sequence i (`uniform` if all are equal)."""
        for cache in self.target:
            if isinstance(cache, DeltaState):
                cache.commit(keep, uniform)

    @contextmanager
    def reading_segments(self) -> Iterator[None]:
        """While a prompt is read in several segments by the target: each slot is decoded once, not once for every
        segment that follows it."""
        with ExitStack() as held:
            for cache in self.target:
                if isinstance(cache, KVCache):
                    held.enter_context(cache.holding_values())
            yield

    def select(self, rows: Tensor) -> None:
        """Keep these sequences, in this order."""
        for cache in self.target:
            cache.select(rows)
        for cache in self.draft:
            cache.select(rows)


def memory_account(model: Model, policy: QuantPolicy, draft_policy: QuantPolicy) -> dict:
    """Bytes a sequence costs, as they would be stored in the checkpoint's dtype and the policy's codes.

    Keys: `kv_bytes_per_token` and `draft_kv_bytes_per_token` (all layers together), `layers` (bytes per token of each
    layer, target then draft; 0 for a delta-rule layer), `state_bytes` per sequence, and the policies' names. Of a head
    with a layer per depth every layer counts; drafting past the last one keeps more caches, which no engine does.
    """
    return {
        "quant_policy": policy.name,
        "draft_quant_policy": draft_policy.name,
        "kv_bytes_per_token": model.kv_bytes_per_token(policy, "target"),
        "draft_kv_bytes_per_token": model.kv_bytes_per_token(draft_policy, "draft"),
        "layers": model.kv_layer_bytes(policy) + model.kv_layer_bytes(draft_policy, "draft"),
        "state_bytes": model.state_bytes(),
    }
