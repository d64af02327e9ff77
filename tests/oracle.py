"""transformers' Qwen3.5 on the same weights: the oracle that models and decoding are compared with."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from mtplab import open_checkpoint
from mtplab.bench.peer import greedy, load_transformers


def oracle_config(path: Path) -> Qwen3_5TextConfig:
    """The text config of a checkpoint, without its quantisation."""
    config = dict(open_checkpoint(path).config)
    config.pop("quantization_config", None)
    return Qwen3_5TextConfig(**config)


def oracle(path: Path) -> Qwen3_5ForCausalLM:
    """transformers' model in float32 with eager attention, every target weight of the checkpoint loaded, strictly."""
    model = load_transformers(open_checkpoint(path))
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def oracle_hidden(model: Qwen3_5ForCausalLM, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden [t, h] after the final norm, logits [t, v]) of one sequence, no cache."""
    out = model.model(torch.tensor([ids]))
    return out.last_hidden_state[0], model.lm_head(out.last_hidden_state)[0]


def oracle_greedy(model: Qwen3_5ForCausalLM, ids: list[int], n: int) -> list[int]:
    """n greedy tokens by transformers' own cached generate."""
    return greedy(model, ids, n)
