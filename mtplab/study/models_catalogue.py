"""Sizes of models with an MTP head, from their published `config.json`.

A catalogue: knows no arithmetic and reads no file. Where a config is not public the source says from what it was taken.
"""

from __future__ import annotations

from mtplab.errors import ConfigError
from mtplab.study.model_sizes import Attention, DeltaRule, Experts, ModelSizes

__all__ = ["MODELS", "model"]

_CARD = "config.json of huggingface.co/"


def _qwen(
    name: str, hidden: int, layers: int, heads: int, kv_heads: int, v_heads: int, inner: int = 0,
    experts: Experts | None = None, vocabulary: int = 248_320, repo: str = "",
) -> ModelSizes:  # fmt: skip
    """Qwen3-Next and later: every fourth layer attends in full, with an output gate; the others carry a state."""
    return ModelSizes(
        name, hidden, vocabulary, Attention(heads, kv_heads, 256, gate=True), layers // 4,
        _CARD + (repo or f"Qwen/{name}"), DeltaRule(16, v_heads, 128, 128), layers - layers // 4, inner, experts,
    )  # fmt: skip


def _glm(name: str, hidden: int, layers: int, heads: int, experts: Experts, dense: int, inner: int) -> ModelSizes:
    attention = Attention(heads, 8, 128)
    return ModelSizes(
        name, hidden, 151_552, attention, layers, f"{_CARD}zai-org/{name}", None, 0, inner, experts, dense
    )


_MLA = Attention(128, q_lora=1536, kv_lora=512, nope=128, rope=64, v_dim=128)

MODELS = {
    found.name: found
    for found in (
        _qwen("Qwen3.5-27B", 5120, 64, 24, 4, 48, 17408),
        # the same dimensions as Qwen3.5-27B: 64 layers, 16 of them attending, 51.7 GiB in BF16 with a vision tower
        _qwen("Qwen3.8-27B", 5120, 64, 24, 4, 48, 17408),
        _qwen("Qwen3.5-35B-A3B", 2048, 40, 16, 2, 32, 0, Experts(256, 8, 512, 512)),
        _qwen("Qwen3.5-122B-A10B", 3072, 48, 32, 2, 64, 0, Experts(256, 8, 1024, 1024)),
        _qwen("Qwen3.5-397B-A17B", 4096, 60, 32, 2, 64, 0, Experts(512, 10, 1024, 1024)),
        _qwen("Qwen3.8-2.4T-A95B", 8192, 92, 64, 4, 128, 0, Experts(512, 10, 2048, 2048)),
        _qwen(
            "Qwen3-Next-80B-A3B", 2048, 48, 16, 2, 32, 0, Experts(512, 10, 512, 512), 151_936,
            "Qwen/Qwen3-Next-80B-A3B-Instruct",
        ),
        ModelSizes(
            "DeepSeek-V3", 7168, 129_280, _MLA, 61, _CARD + "deepseek-ai/DeepSeek-V3, and so R1's", None, 0, 18432,
            Experts(256, 8, 2048, 2048), 3,
        ),
        _glm("GLM-4.7", 5120, 92, 96, Experts(160, 8, 1536, 1536), 3, 12288),
        _glm("GLM-4.5-Air", 4096, 46, 96, Experts(128, 8, 1408, 1408), 1, 10944),
        ModelSizes(
            "MiMo-7B", 4096, 151_680, Attention(32, 8, 128), 36, _CARD + "XiaomiMiMo/MiMo-7B-RL", None, 0, 11008,
        ),
    )
}  # fmt: skip

_ALSO = {"DeepSeek-R1": "DeepSeek-V3", "Qwen3.6-27B": "Qwen3.5-27B", "Qwen3.6-35B-A3B": "Qwen3.5-35B-A3B"}


def model(name: str) -> ModelSizes:
    """The model of that name, in any case. Raises ConfigError, listing those there are, for another."""
    known = {found.casefold(): found for found in (*MODELS, *_ALSO)}
    found = known.get(name.casefold()) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"model {name!r:.60} is not in the catalogue; it has {', '.join((*MODELS, *_ALSO))}; "
            "for another give its checkpoint"
        )
    return MODELS[_ALSO.get(found, found)]
