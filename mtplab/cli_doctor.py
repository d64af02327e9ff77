"""`mtplab doctor`: what is installed, which devices there are, and which implementation each operation uses, and why;
of a checkpoint, what it takes in memory.

Runs no model. Knows the names of the operations that kernels exist for, and nothing of how they work.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated, Any

import typer

from mtplab.cli_common import (
    AsJson,
    CachePolicy,
    Device,
    DraftCachePolicy,
    Exclude,
    Layers,
    ModelFormat,
    exclusion,
    path_of,
    print_json,
    say,
)
from mtplab.errors import ConfigError

__all__ = ["OPERATIONS", "doctor", "examine"]

# operation → the module under kernels/ that has a Triton kernel for it; None: torch on every device
OPERATIONS: dict[str, str | None] = {
    "quantising activations": "quantize_jit",
    "FP8 products, block scales": "gemm_block_jit",
    "FP8 products, tensor and channel scales": "gemm_scaled_jit",
    "FP8 products of experts": "gemm_grouped_jit",
    "experts' silu and quantisation": "silu_quantize_jit",
    "writing the KV cache": "kv_write_jit",
    "attention over the KV cache, decoding": "attention_jit",
    "gated delta rule, decoding": "delta_rule_jit",
    "short convolution, decoding": "conv_update_jit",
    "acceptance of drafts": "acceptance_jit",
    "decoding over a cache of turboquant, of K and V stored apart, or of FP8 with a scale per head": None,
    "decoding with latent attention, or with layers that have a window": None,
    "prompts: attention and the chunked gated delta rule": None,
    "unrounded inputs times FP8 weights (W8A16)": None,
    "norms, rotary embedding, gates, embedding, vocabulary head": None,
}


def doctor(
    path: Annotated[
        Path | None, typer.Argument(help="A checkpoint: say what it takes in memory.", metavar="[PATH]", parser=path_of)
    ] = None,
    batch: Annotated[int, typer.Option(metavar="N", help="Sequences decoded together.")] = 1,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of each, prompt and text.")] = 4096,
    depth: Annotated[int, typer.Option(metavar="N", help="Draft tokens per round.")] = 3,
    quant_policy: CachePolicy = "none",
    draft_quant_policy: DraftCachePolicy = None,
    exclude: Exclude = None,
    model_format: ModelFormat = None,
    layers: Layers = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="DTYPE", help="Computed in: float32, bfloat16 or float16.")
    ] = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Say what runs here: versions, devices, and for each operation whether a Triton kernel or torch does it, and why.

    With PATH: what that checkpoint takes in memory, by part and dtype, caches included, and whether it fits; from its
    headers. Exit code 1 if it does not fit, or the model has no positions for such a context.

    MTPLAB_KERNELS=triton or reference forces one or the other; auto, the default, takes Triton's kernels on a GPU.

    \b
    Examples:
      mtplab doctor
      MTPLAB_KERNELS=reference mtplab doctor --json
      mtplab doctor data/tiny-qwen3_5 --layers 0-1
      mtplab doctor data/tiny-qwen3_5-fp8 --batch 32 --context 4096 --quant-policy int8
    """
    if path is not None:
        from mtplab.checkpoint import open_checkpoint
        from mtplab.models.memory import memory
        from mtplab.study.grid import weight_format

        opened, kept = open_checkpoint(path), exclusion("--exclude", *(exclude or ()))
        model_format = weight_format(opened, model_format, kept)
        needs = memory(
            opened, device, dtype, kept, None, quant_policy, draft_quant_policy, model_format,
            batch=batch, context=context, depth=depth, layers=layers,
        )  # fmt: skip
        if as_json:
            print_json({"memory": needs.to_dict()})
        else:
            say(needs)
        if needs.fits is False:
            raise typer.Exit(1)
        return
    found = examine()
    if as_json:
        print_json(found)
        return
    for name, value in found["versions"].items():
        say(f"{name:14} {value or 'missing'}")
    say(f"{'platform':14} {found['platform']}, {found['cores']} cores, {found['threads']} torch threads")
    for device in found["devices"]:
        say(f"{'device':14} {device['name']}: {device['implementation']}, because {device['reason']}")
    for device in found["devices"]:
        say(f"\noperations on {device['name']}")
        width = max(map(len, device["operations"]))
        for name, how in device["operations"].items():
            say(f"  {name:{width}}  {how}")


def examine() -> dict[str, Any]:
    """What `doctor` prints, as plain data. Raises ConfigError for a MTPLAB_KERNELS that cannot be obeyed."""
    import os

    import torch

    from mtplab.kernels.launch import VARIABLE, chosen, reason
    from mtplab.study.provenance import PACKAGES, version

    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
    found = []
    for device in devices:
        try:
            implementation, why = chosen(device), reason(device)
        except ValueError as problem:
            raise ConfigError(str(problem)) from None
        kernel = implementation == "triton"
        found.append(
            {
                "name": _name(device),
                "implementation": "Triton kernels" if kernel else "torch references",
                "reason": why,
                "operations": {
                    name: "torch: there is no kernel for it"
                    if module is None
                    else ("Triton kernel" if kernel else "torch reference") + f" ({module.removesuffix('_jit')})"
                    for name, module in OPERATIONS.items()
                },
            }
        )
    return {
        "versions": {"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        VARIABLE: os.environ.get(VARIABLE, "auto"),
        "devices": found,
    }


def _name(device: Any) -> str:
    import torch

    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} ({torch.cuda.get_device_name(device)}, compute capability {major}.{minor})"
