"""A BF16 checkpoint written out as block FP8, in the layout of Qwen's published releases.

Knows which files make up a checkpoint folder; what is quantised is decided by the plan, the same one that
`load_model(model_format="fp8")` follows, so a file written here holds what such a load would have computed.
Knows nothing of layers or runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mtplab.checkpoint import Checkpoint, ModulePlan, Plan, SafetensorsWriter, TensorInfo, open_checkpoint
from mtplab.checkpoint.write import data_bytes, sync_folder
from mtplab.errors import CheckpointError, ConfigError
from mtplab.quant.block import BLOCK, quantize_block

__all__ = ["quantize_checkpoint"]

# what a tokenizer, a processor or generation needs; never code, never pickles
_COPIED = (
    "tokenizer*.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt", "special_tokens_map.json",
    "added_tokens.json", "generation_config.json", "chat_template*", "preprocessor_config.json",
    "processor_config.json", "video_preprocessor_config.json", "LICENSE*",
)  # fmt: skip


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    exclude: str | Sequence[str] | None = None,
    draft_exclude: str | Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Plan:
    """Quantise the linear weights of the checkpoint `src` to E4M3 in 128x128 blocks and write it to the
    folder `dst`.

    Args:
        src: a checkpoint that is not quantised. Its shards keep their names.
        dst: a folder that does not exist yet. It appears whole, flushed to disk, or not at all.
        exclude, draft_exclude: as in `Checkpoint.plan`; None keeps what Qwen's releases keep (`mtp.fc` among
        it).
        progress: called with (tensors written, tensors in all).

    Returns: the plan that was followed. In config.json, `quantization_config.modules_to_not_convert` lists
    every linear, convolution and embedding kept, by its name on disk.

    Raises CheckpointError for a source that cannot be read, is quantised already or holds NaN or infinity in
    a weight to quantise, ConfigError for a destination that exists or a pattern that covers no module.
    """
    source = open_checkpoint(src)
    if source.quantization is not None:
        raise CheckpointError(
            f"{source.path}: expected a checkpoint that is not quantised, found quant_method "
            f"{source.quantization.method!r}. Quantise its BF16 release."
        )
    plan = source.plan(exclude=exclude, draft_exclude=draft_exclude, model_format="fp8")
    target = Path(dst)
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target}: expected a folder that does not exist yet. Choose another.")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        _write_tensors(source, plan, partial, progress)
        _copy_files(source.files.folder, partial)
        _write_json(partial / "config.json", _quantised_config(source.config, plan))
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}.") from None
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)
    return plan


def _write_tensors(source: Checkpoint, plan: Plan, folder: Path, progress: Callable[[int, int], None] | None) -> None:
    quantised = {f"{module.name}.weight": module for module in plan.modules if module.weight == "fp8"}
    weight_map: dict[str, str] = {}
    done, total, size = 0, len(source.tensors), 0
    for shard in source.files.shards:
        members = [info for info in source.tensors.values() if info.file == shard]
        layout = _layout(members, quantised)
        size += sum(data_bytes(dtype, shape) for dtype, shape in layout.values())
        name = shard.relative_to(source.files.folder)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        weight_map |= dict.fromkeys(layout, name.as_posix())
        # "format" is what transformers asks of a file it loads
        with SafetensorsWriter(folder / name, layout, {"format": "pt"}) as file:
            for info in members:
                tensor = source.read(info.name)
                if info.name in quantised:
                    scaled = quantize_block(tensor, BLOCK, f"{info.file}: tensor {info.name!r}")
                    file.put(info.name, scaled.data)
                    file.put(_scale_name(info.name), scaled.scale)
                else:
                    file.put(info.name, tensor)
                done += 1
                if progress is not None:
                    progress(done, total)
    if source.files.index is not None or len(source.files.shards) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def _scale_name(weight: str) -> str:
    return weight.removesuffix(".weight") + ".weight_scale_inv"


def _layout(members: list[TensorInfo], quantised: dict[str, ModulePlan]) -> dict[str, tuple[str, tuple[int, ...]]]:
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}
    for info in members:
        if info.name in quantised:
            (n, k), (bm, bn) = info.shape, BLOCK
            layout[info.name] = ("F8_E4M3", info.shape)
            layout[_scale_name(info.name)] = ("F32", (-(-n // bm), -(-k // bn)))
        else:
            layout[info.name] = (info.dtype, info.shape)
    return layout


def _quantised_config(config: dict[str, Any], plan: Plan) -> dict[str, Any]:
    kept = [
        module.name
        for module in plan.modules
        if module.kind in ("linear", "conv", "embedding") and module.weight != "fp8"
    ]
    # a tied head has no tensor of its own; releases list it all the same, since loaders build it as a linear
    if not any(module.part == "head" for module in plan.modules):
        kept.insert(0, "lm_head")
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
        "modules_to_not_convert": kept,
    }
    return {**config, "quantization_config": quantization}


def _copy_files(source: Path, target: Path) -> None:
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, target / path.name)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
