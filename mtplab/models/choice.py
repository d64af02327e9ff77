"""Whether a model's decoding passes run Triton's kernels.

Prompts run torch on every device: the chunked delta rule has no kernel, nor has attention of many queries.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mtplab.models.config import ModelConfig
from mtplab.quant.fp8_products import uses_kernels
from mtplab.quant.policy import QuantPolicy

_LARGEST, _STEP = 256, 16
_TAPS = (2, 3, 4)


def decodes_with_kernels(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, policies: Iterable[QuantPolicy]
) -> bool:
    """Whether this device has the kernels and they take this model, computed in `dtype`, and caches of `policies`.

    They take heads whose sizes are multiples of 16 up to 256, convolutions of 2 to 4 taps, and, where a cache has
    scales and zeros beside its codes, those in the dtype that is computed in or under float32; they have the
    checkpoint's dtype. Raises ConfigError for a MTPLAB_KERNELS that cannot be obeyed.
    """
    kernels = uses_kernels(device)
    same = str(dtype).removeprefix("torch.") in ("float32", config.dtype)
    if not same and any(policy.meta for policy in policies):
        return False
    sizes = {config.head_dim}
    if "linear_attention" in config.layer_types:
        sizes |= {config.linear_k_dim, config.linear_v_dim}
        if config.conv_kernel not in _TAPS:
            return False
    return kernels and all(size % _STEP == 0 and size <= _LARGEST for size in sizes)
