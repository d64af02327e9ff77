"""Write the bundled BF16 checkpoint as a GGUF file with its MTP head, for llama.cpp: float32, or matrices in BF16.

    python data/recipe/peers/to_gguf.py data/tiny-qwen3_5 WORK/tiny.gguf [bf16]      # needs: gguf numpy

The layout is what llama.cpp's own converter makes of Qwen3.5 (architecture `qwen35`): norms stored as 1 + w, A as
-exp(A_log), value heads in tiled order (k0 k1 k0 k1), the head as one more block with `nextn.*` tensors. Every BF16
value becomes the same float32 value, or stays as it is, so nothing is lost or gained; with a BF16 matrix, llama.cpp
rounds what it multiplies it with. This module does not know about mtplab or about inference.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

LINEAR = {
    "in_proj_qkv": "attn_qkv", "in_proj_z": "attn_gate", "in_proj_a": "ssm_alpha", "in_proj_b": "ssm_beta",
    "out_proj": "ssm_out", "norm": "ssm_norm", "conv1d": "ssm_conv1d",
}  # fmt: skip
BLOCK = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
HEAD = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}


def read(path: Path) -> dict[str, np.ndarray]:
    """Every tensor of a one-file BF16 / F32 safetensors checkpoint as float32."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    out = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + size + x for x in info["data_offsets"])
        if info["dtype"] == "BF16":
            values = (np.frombuffer(raw[start:end], np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif info["dtype"] == "F32":
            values = np.frombuffer(raw[start:end], np.float32)
        else:
            raise SystemExit(f"{path}: {name} is {info['dtype']}; give the BF16 checkpoint")
        out[name.replace("model.language_model.", "model.")] = values.reshape(info["shape"])
    return out


def tile(x: np.ndarray, axis: int, groups: int, each: int) -> np.ndarray:
    """Value heads from grouped by key head to tiled over key heads, along `axis` holding groups * each * d entries."""
    shape = list(x.shape)
    split = x.reshape(*shape[:axis], groups, each, -1, *shape[axis + 1 :])
    return np.ascontiguousarray(split.swapaxes(axis, axis + 1).reshape(shape))


def rename(name: str, x: np.ndarray, c: dict) -> tuple[str, np.ndarray]:
    """(GGUF name, values) of one checkpoint tensor."""
    groups, each = c["linear_num_key_heads"], c["linear_num_value_heads"] // c["linear_num_key_heads"]
    key = 2 * groups * c["linear_key_head_dim"]
    stem = name.removesuffix(".weight")
    if stem == "model.embed_tokens":
        return "token_embd.weight", x
    if stem == "model.norm":
        return "output_norm.weight", 1 + x
    if name.startswith("mtp.") and not name.startswith("mtp.layers."):
        part, block = stem.removeprefix("mtp."), c["num_hidden_layers"]
        return f"blk.{block}.nextn.{HEAD[part]}.weight", x if part == "fc" else 1 + x
    _, _, index, rest = stem.split(".", 3)
    block = int(index) + (c["num_hidden_layers"] if name.startswith("mtp.") else 0)
    if not rest.startswith("linear_attn."):
        return f"blk.{block}.{BLOCK[rest]}.weight", 1 + x if "norm" in rest else x
    part = rest.removeprefix("linear_attn.")
    if part == "A_log":
        return f"blk.{block}.ssm_a", tile(-np.exp(x), 0, groups, each)
    if part == "dt_bias":
        return f"blk.{block}.ssm_dt.bias", tile(x, 0, groups, each)
    if part in ("in_proj_qkv", "conv1d"):
        x = x.squeeze(1) if part == "conv1d" else x
        x = np.concatenate([x[:key], tile(x[key:], 0, groups, each)])
    elif part in ("in_proj_z", "in_proj_a", "in_proj_b"):
        x = tile(x, 0, groups, each)
    elif part == "out_proj":
        x = tile(x, 1, groups, each)
    return f"blk.{block}.{LINEAR[part]}.weight", x


def convert(source: Path, target: Path, bf16: bool = False) -> None:
    """Write the checkpoint folder `source` as one GGUF file, its matrices in BF16 if so asked and else in float32."""
    import gguf

    c = json.loads((source / "config.json").read_text())
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    w = gguf.GGUFWriter(target, "qwen35")
    w.add_name("tiny-qwen3_5")
    w.add_block_count(c["num_hidden_layers"] + c["mtp_num_hidden_layers"])
    w.add_nextn_predict_layers(c["mtp_num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    w.add_rope_dimension_count(int(c["head_dim"] * c["partial_rotary_factor"]))
    w.add_rope_dimension_sections([11, 11, 10, 0])  # required by the loader; all positions of a text coincide
    w.add_full_attention_interval(c["full_attention_interval"])
    w.add_ssm_conv_kernel(c["linear_conv_kernel_dim"])
    w.add_ssm_state_size(c["linear_key_head_dim"])
    w.add_ssm_group_count(c["linear_num_key_heads"])
    w.add_ssm_time_step_rank(c["linear_num_value_heads"])
    w.add_ssm_inner_size(c["linear_value_head_dim"] * c["linear_num_value_heads"])
    w.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if bf16 else gguf.LlamaFileType.ALL_F32)
    tokens = sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])
    special = {t["id"] for t in tokenizer["added_tokens"]}
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("qwen2")
    w.add_token_list([t for t, _ in tokens])
    w.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in tokens])
    w.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    w.add_eos_token_id(c["eos_token_id"])
    w.add_add_bos_token(False)
    for name, x in sorted(read(source / "model.safetensors").items()):
        new, values = rename(name, x, c)
        values = np.ascontiguousarray(values, dtype=np.float32)
        # the convolution's kernel is a matrix by shape alone
        if bf16 and values.ndim == 2 and "conv1d" not in new:
            kind = gguf.GGMLQuantizationType.BF16
            w.add_tensor(new, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            w.add_tensor(new, values)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    print(f"wrote {target}, {target.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:] == ["bf16"])
