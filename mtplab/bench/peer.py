"""transformers as the other side of a race: the same weights, through its own `generate`.

Knows nothing of timing. transformers is a development dependency; where it is missing, the error says so.
"""

from __future__ import annotations

from typing import Any

import torch

from mtplab.checkpoint import Checkpoint
from mtplab.errors import MtplabError


def load_transformers(checkpoint: Checkpoint) -> Any:
    """transformers' Qwen3.5 in float32 with torch's fused attention, holding this checkpoint's values."""
    try:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    except ImportError:
        raise MtplabError(
            "transformers is not installed, and it is what the benchmark measures against: pip install 'mtplab[dev]'"
        ) from None
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config)).float().eval()
    state = {
        name.replace("model.language_model.", "model."): checkpoint.dequantize(name)
        for name in checkpoint.tensors
        if not name.startswith("mtp.") and not name.endswith(("_scale_inv", "_scale"))
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise MtplabError(f"transformers does not take these weights: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


@torch.inference_mode()
def greedy(model: Any, ids: list[int], n: int) -> list[int]:
    """n greedy tokens of one prompt with a cache, end-of-text ignored."""
    prompt = torch.tensor([ids])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=n,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(ids) :].tolist()
