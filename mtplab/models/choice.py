"""Whether a model's decoding passes run Triton's kernels.

Prompts run torch on every device: the chunked delta rule has no kernel, nor has attention of many queries.
"""

from __future__ import annotations

import torch

from mtplab.models.config import ModelConfig
from mtplab.quant.fp8_products import uses_kernels

_LARGEST, _STEP = 256, 16
_TAPS = (2, 3, 4)


def decodes_with_kernels(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this device has the kernels and they take this model, computed in `dtype`.

    They take heads whose sizes are multiples of 16 up to 256, convolutions of 2 to 4 taps, and a cache's scales and
    zeros, which have the checkpoint's dtype, in the dtype that is computed in or under float32. Raises ConfigError for
    a MTPLAB_KERNELS that cannot be obeyed.
    """
    kernels = uses_kernels(device)
    if str(dtype).removeprefix("torch.") not in ("float32", config.dtype):
        return False
    sizes = {config.head_dim}
    if "linear_attention" in config.layer_types:
        sizes |= {config.linear_k_dim, config.linear_v_dim}
        if config.conv_kernel not in _TAPS:
            return False
    return kernels and all(size % _STEP == 0 and size <= _LARGEST for size in sizes)
