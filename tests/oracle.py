"""transformers' Qwen3.5 on the same weights: the oracle that models and decoding are compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from mtplab import open_checkpoint


def oracle_config(path: Path) -> Qwen3_5TextConfig:
    """The text config of a checkpoint, without its quantisation."""
    config = dict(open_checkpoint(path).config)
    config.pop("quantization_config", None)
    return Qwen3_5TextConfig(**config)


def oracle(path: Path) -> Qwen3_5ForCausalLM:
    """transformers' model in float32 with eager attention, every target weight of the checkpoint loaded, strictly."""
    checkpoint, config = open_checkpoint(path), oracle_config(path)
    config._attn_implementation = "eager"
    model = Qwen3_5ForCausalLM(config).float().eval()
    scales = ("_scale_inv", "_scale")
    state = {
        name.replace("model.language_model.", "model."): checkpoint.dequantize(name)
        for name in checkpoint.tensors
        if not name.startswith("mtp.") and not name.endswith(scales)
    }
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


@torch.no_grad()
def oracle_hidden(model: Qwen3_5ForCausalLM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [t, h] after the final norm, logits [t, v]) of one sequence, no cache."""
    out = model.model(torch.tensor([ids]))
    return out.last_hidden_state[0], model.lm_head(out.last_hidden_state)[0]


@torch.no_grad()
def oracle_greedy(model: Qwen3_5ForCausalLM, ids: list[int], n: int) -> list[int]:
    """n greedy tokens by transformers' own cached generate."""
    out = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=n,
        do_sample=False, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return out[0, len(ids) :].tolist()
