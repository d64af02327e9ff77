"""What is recognised and not read: methods by name, and tensors whose names give a packed format away.

This is a list of words; it reads nothing.
"""

from __future__ import annotations

KNOWN_METHODS: dict[str, str] = {
    "modelopt_fp4": "NVIDIA ModelOpt NVFP4",
    "auto-awq": "AWQ (integer codes)",
    "gptqmodel": "GPTQ (integer codes)",
    "bitsandbytes_4bit": "bitsandbytes",
    "bitsandbytes_8bit": "bitsandbytes",
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

# the end of the name of tensors that hold codes → what they are
PACKED_SUFFIXES: dict[str, str] = {
    ".weight_packed": "packed codes of compressed-tensors (NVFP4, MXFP4 or INT4)",
    ".qweight": "packed integer codes (GPTQ or AWQ)",
    "_blocks": "MXFP4 blocks, as gpt-oss writes them",
}

# what lies beside `X.weight` → what that weight's integers are
PACKED_BESIDE: dict[str, str] = {
    ".weight_scale_2": "NVFP4, as ModelOpt writes it",
    ".weight_global_scale": "NVFP4, as compressed-tensors writes it",
    ".weight.quant_map": "bitsandbytes' 4-bit codes",
    ".weight.absmax": "bitsandbytes' codes",
    ".SCB": "bitsandbytes' INT8",
}
