"""Small checkpoints for tests, whole or broken in one chosen way; files are put together byte by byte.

Uses nothing of mtplab, so that a fault in its writer cannot hide one in its reader.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

CHECKPOINTS = Path(__file__).parent / "checkpoints"

NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}
E4M3 = torch.float8_e4m3fn
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def raw_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with this header (an object, or the text itself), claiming `length` bytes of it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def tensor_file(path: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    """A valid file with these tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = entry(NAMES[tensor.dtype], list(tensor.shape), len(data), len(data) + len(raw))
        data += raw
    return raw_file(path, header, data)


def qwen_tensors() -> dict[str, torch.Tensor]:
    """A one-layer Qwen3.5 by name: block-FP8 linears, everything else BF16, `mtp.fc` BF16 and its block FP8."""
    made: dict[str, torch.Tensor] = {}

    def plain(name: str, *shape: int) -> None:
        made[name] = torch.randn(*shape).bfloat16()

    def scaled(module: str, n: int, k: int) -> None:
        made[f"{module}.weight"] = (torch.randn(n, k) * 60).to(E4M3)
        made[f"{module}.weight_scale_inv"] = torch.rand(-(-n // 128), -(-k // 128)) + 0.01

    plain("model.embed_tokens.weight", 32, 160)
    plain("model.layers.0.input_layernorm.weight", 160)
    plain("model.layers.0.linear_attn.in_proj_a.weight", 4, 160)
    scaled("model.layers.0.mlp.up_proj", 130, 160)
    scaled("model.layers.0.mlp.down_proj", 160, 130)
    plain("model.norm.weight", 160)
    plain("lm_head.weight", 32, 160)
    plain("mtp.fc.weight", 160, 320)
    scaled("mtp.layers.0.self_attn.q_proj", 256, 160)
    plain("mtp.norm.weight", 160)
    return made


LISTED = ["lm_head", "model.embed_tokens", "model.layers.0.linear_attn.in_proj_a", "mtp.fc"]


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    quantization: Any = None,
    shards: int = 1,
    config: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint folder: config.json and one file, or several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": "qwen3_5_text", "num_hidden_layers": 1, "mtp_num_hidden_layers": 1, **(config or {})}
    if quantization is not None:
        content["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(content))
    if shards == 1:
        tensor_file(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    names = list(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        members = names[shard::shards]
        tensor_file(folder / file, {name: tensors[name] for name in members})
        weight_map |= dict.fromkeys(members, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def qwen_fp8(folder: Path, shards: int = 1, **changed: Any) -> Path:
    """The block-FP8 checkpoint of `qwen_tensors`, with keys of its quantization_config changed (None drops one)."""
    quantization = {**FP8_CONFIG, "modules_to_not_convert": LISTED, **changed}
    quantization = {key: value for key, value in quantization.items() if value is not None}
    return write_checkpoint(folder, qwen_tensors(), quantization, shards)


def dequantised(codes: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32 [n, k], one element after another in double precision: the definition, slowly."""
    n, k = codes.shape
    row = torch.arange(n) // block[0]
    column = torch.arange(k) // block[1]
    return (codes.double() * scale.double()[row][:, column]).float()
