"""Whether a model's decoding passes run Triton's kernels.

Prompts run torch on every device: the chunked delta rule has no kernel, nor has attention of many queries.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mtplab.models.spec import AttentionSpec, ModelConfig
from mtplab.quant.fp8_products import uses_kernels
from mtplab.quant.policy import QuantPolicy

# how `kernels/kv_write.py` and `attention.py` store and read rows
KERNEL_STORAGE = ("none", "int4", "int8", "fp8_e4m3", "fp8_e5m2")
_LARGEST, _STEP = 256, 16
_TAPS = (2, 3, 4)


def decodes_with_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, policies: Iterable[QuantPolicy]
) -> bool:
    """Whether this device has the kernels and they take this model, computed in `dtype`, and caches of `policies`.

    They take attention over all that came before, heads whose sizes are multiples of 16 up to 256, convolutions of 2 to
    4 taps, K and V stored alike, FP8 with one scale for K and one for V of a layer, and, where a cache has scales and
    zeros beside its codes, those in the dtype that is computed in or under float32; they have the checkpoint's dtype.
    There is no kernel for turboquant.
    Raises ConfigError for a MTPLAB_KERNELS that cannot be obeyed.
    """
    kernels = uses_kernels(device)
    same = str(dtype).removeprefix("torch.") in ("float32", config.dtype)
    policies = list(policies)
    if not all(_readable(policy) for policy in policies):
        return False
    if not same and any(side.storage.meta for policy in policies for side in policy.sides):
        return False
    mixers = [layer.mixer for layer in (*config.layers, *config.draft_layers)]
    attention = [mixer for mixer in mixers if mixer not in config.deltas]
    if not all(isinstance(mixer, AttentionSpec) and mixer.window is None for mixer in attention):
        return False
    sizes = {mixer.head_dim for mixer in attention}
    for delta in config.deltas:
        sizes |= {delta.k_dim, delta.v_dim}
        if delta.conv_kernel not in _TAPS:
            return False
    return kernels and all(size % _STEP == 0 and size <= _LARGEST for size in sizes)


def _readable(policy: QuantPolicy) -> bool:
    """Whether the kernels read such a cache; one whose scales are a tensor per KV head they do not."""
    scales = [scale for pair in (policy.scales or {}).values() for scale in pair if scale is not None]
    heads = any(side.scales == "calibrated-head" for side in policy.sides) or any(x.numel() > 1 for x in scales)
    return policy.one_storage and policy.k.storage.name in KERNEL_STORAGE and not heads
