"""A checkpoint of DeepSeek-V3's size in sparse files: real names, dtypes and shapes, and no bytes on the disk.

Uses nothing of mtplab. Shapes are those of DeepSeek-V3's config.json and index (61 layers, the first three dense, 256
experts, one MTP layer behind them).
"""

import json
from collections.abc import Iterator
from pathlib import Path

HIDDEN, VOCABULARY, LAYERS, DENSE, EXPERTS = 7168, 129280, 61, 3, 256
BLOCK = 128
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
CONFIG = {
    "model_type": "deepseek_v3", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1,
    "n_routed_experts": EXPERTS, "vocab_size": VOCABULARY, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [BLOCK, BLOCK]},
}  # fmt: skip

Tensor = tuple[str, str, tuple[int, ...]]


def _fp8(module: str, n: int, k: int) -> Iterator[Tensor]:
    yield f"{module}.weight", "F8_E4M3", (n, k)
    yield f"{module}.weight_scale_inv", "F32", (-(-n // BLOCK), -(-k // BLOCK))


def _mlp(module: str, width: int) -> Iterator[Tensor]:
    yield from _fp8(f"{module}.gate_proj", width, HIDDEN)
    yield from _fp8(f"{module}.up_proj", width, HIDDEN)
    yield from _fp8(f"{module}.down_proj", HIDDEN, width)


def _layer(index: int) -> Iterator[Tensor]:
    stem = f"model.layers.{index}"
    if index == LAYERS:
        yield f"{stem}.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN)
        yield f"{stem}.enorm.weight", "BF16", (HIDDEN,)
        yield f"{stem}.hnorm.weight", "BF16", (HIDDEN,)
        yield f"{stem}.eh_proj.weight", "BF16", (HIDDEN, 2 * HIDDEN)
        yield f"{stem}.shared_head.norm.weight", "BF16", (HIDDEN,)
        yield f"{stem}.shared_head.head.weight", "BF16", (VOCABULARY, HIDDEN)
    yield f"{stem}.input_layernorm.weight", "BF16", (HIDDEN,)
    yield f"{stem}.post_attention_layernorm.weight", "BF16", (HIDDEN,)
    yield f"{stem}.self_attn.q_a_layernorm.weight", "BF16", (1536,)
    yield f"{stem}.self_attn.kv_a_layernorm.weight", "BF16", (512,)
    yield from _fp8(f"{stem}.self_attn.q_a_proj", 1536, HIDDEN)
    yield from _fp8(f"{stem}.self_attn.q_b_proj", 24576, 1536)
    yield from _fp8(f"{stem}.self_attn.kv_a_proj_with_mqa", 576, HIDDEN)
    yield from _fp8(f"{stem}.self_attn.kv_b_proj", 32768, 512)
    yield from _fp8(f"{stem}.self_attn.o_proj", HIDDEN, 16384)
    if index < DENSE:
        yield from _mlp(f"{stem}.mlp", 18432)
        return
    yield f"{stem}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
    yield f"{stem}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
    yield from _mlp(f"{stem}.mlp.shared_experts", 2048)
    for expert in range(EXPERTS):
        yield from _mlp(f"{stem}.mlp.experts.{expert}", 2048)


def deepseek_v3_tensors() -> Iterator[Tensor]:
    """(name, dtype, shape) of every tensor, in the model's order."""
    yield "model.embed_tokens.weight", "BF16", (VOCABULARY, HIDDEN)
    for index in range(LAYERS + 1):
        yield from _layer(index)
    yield "model.norm.weight", "BF16", (HIDDEN,)
    yield "lm_head.weight", "BF16", (VOCABULARY, HIDDEN)


def write_deepseek_v3(folder: Path, shards: int = 163, config: dict | None = None) -> int:
    """Write the checkpoint; returns how many tensors it has."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = list(deepseek_v3_tensors())
    weight_map: dict[str, str] = {}
    per_shard = -(-len(tensors) // shards)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:06d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, dtype, shape in tensors[shard * per_shard : (shard + 1) * per_shard]:
            size = BYTES[dtype]
            for dim in shape:
                size *= dim
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[name] = file
        text = json.dumps(header, separators=(",", ":")).encode()
        with open(folder / file, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(8 + len(text) + offset)
    index = {"metadata": {"total_size": 688586727753}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    return len(tensors)
