"""Quantisation methods that are recognised by name, so that an error can say what was found.

This is a list of words; it reads nothing.
"""

from __future__ import annotations

KNOWN_METHODS: dict[str, str] = {
    "mxfp8": "MXFP8 (E8M0 scales over 32 columns)",
    "fbgemm_fp8": "FBGEMM FP8 (per-channel scales)",
    "compressed-tensors": "compressed-tensors (llm-compressor)",
    "modelopt": "NVIDIA ModelOpt",
    "modelopt_fp4": "NVIDIA ModelOpt NVFP4",
    "quark": "AMD Quark",
    "auto-round": "Intel auto-round",
    "torchao": "torchao",
    "gptq": "GPTQ (integer codes)",
    "awq": "AWQ (integer codes)",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
    "gguf": "GGUF",
}
