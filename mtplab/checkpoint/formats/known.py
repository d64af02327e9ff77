"""What is recognised and not read: methods by name, and tensors whose names give a packed format away.

This is a list of words; it reads nothing.
"""

from __future__ import annotations

KNOWN_METHODS: dict[str, str] = {
    "modelopt_fp4": "NVIDIA ModelOpt NVFP4",
    "gptq": "GPTQ (integer codes)",
    "awq": "AWQ (integer codes)",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "gguf": "GGUF",
    "hqq": "HQQ (integer codes)",
    "aqlm": "AQLM (codebooks)",
    "eetq": "EETQ (INT8)",
}

# the end of a tensor's name → what its module holds
PACKED_SUFFIXES: dict[str, str] = {
    ".weight_packed": "packed codes of compressed-tensors (NVFP4, MXFP4 or INT4)",
    ".weight_scale_2": "NVFP4, as ModelOpt writes it",
    ".weight_global_scale": "NVFP4, as compressed-tensors writes it",
    ".qweight": "packed integer codes (GPTQ or AWQ)",
    ".weight.quant_map": "bitsandbytes codes",
    "_blocks": "MXFP4 blocks, as gpt-oss writes them",
}
