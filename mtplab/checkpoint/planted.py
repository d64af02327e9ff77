"""A planted variant of a Qwen3.5 checkpoint: the same function in float, hard to quantise in modules known beforehand.

E4M3 with a scale spans about 2^17 before its subnormals run out, so a few enlarged channels cost nothing; a wide spread
over *all* input channels does. Each input channel of the chosen modules is divided by a power of two, and the
RMSNorm in front multiplies it back. Powers of two change no mantissa, so in float32 every product, and therefore
every logit, stays as it was, bit for bit; the norms are stored in F32, since `(1 + w) * f - 1` rounds in BF16.

A search for exclusions has a known answer on such a checkpoint: exactly the planted modules. Knows the names of
Qwen3.5's modules and which norm feeds which; nothing of quantisation or of how a model is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtplab.checkpoint.checkpoint import Checkpoint, open_checkpoint
from mtplab.checkpoint.names import nearest, normalised
from mtplab.checkpoint.write import sync_folder, write_safetensors
from mtplab.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_SPREAD", "Planted", "plant"]

MAX_SPREAD = 60  # 2^60 of spread leaves BF16's exponents room on both sides; float32 products stay finite
RECORD = "planted.json"

# (norm, the projections that read it) within a decoder layer; every reader of a norm must be divided alike
_READERS = (
    ("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
    ("input_layernorm", tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "a", "b"))),
    ("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
)
_FC, _FC_NORMS = "mtp.fc", ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")  # in the order of fc's columns


@dataclass(frozen=True)
class Planted:
    """What was planted: the folder, the linear modules whose columns were spread, and the norms that pay for it.

    `modules` are names as they stand on disk: the known answer to "which modules must stay in high precision".
    """

    path: Path
    modules: tuple[str, ...]
    norms: tuple[str, ...]
    spread: int
    seed: int


def plant(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    modules: Sequence[str] = ("mtp.fc",),
    spread: int = 20,
    seed: int = 0,
) -> Planted:
    """Write the checkpoint `src` to the folder `dst` with a wide channel spread in `modules`, its float function kept.

    Args:
        src: a Qwen3.5 checkpoint in BF16 or F32 (a folder). A quantised one is refused.
        dst: a folder. Where it already holds the same planting of the same source, it is used as it stands.
        modules: names or globs (`mtp.fc`, `mtp.layers.0.mlp.*`) of linear modules behind an RMSNorm, under either root.
            Whatever reads the same norm is planted with them (q, k and v; gate and up), since all must be divided.
        spread: factors are 2^e, e uniform over 0, 1, ... `spread`, one per input channel.
        seed: of the factors; every norm has its own stream, so a module's factors do not depend on the other modules.

    Raises CheckpointError where the source is quantised, is no Qwen3.5, or has a norm or weight whose values cannot
    carry the factors exactly; ConfigError for a module that is not there or is not behind a norm, a spread outside
    0 ... 60, and a destination that holds something else.
    """
    if type(spread) is not int or not 0 <= spread <= MAX_SPREAD:
        raise ConfigError(f"spread={spread!r}: expected a whole number of powers of two, 0 to {MAX_SPREAD}.")
    if type(seed) is not int or seed < 0:
        raise ConfigError(f"seed={seed!r}: expected a whole number, 0 or more.")
    source, target = open_checkpoint(src), Path(dst)
    if source.quantization is not None:
        raise CheckpointError(
            f"{source.path}: expected a BF16 or F32 checkpoint, found quant_method {source.quantization.method!r}: "
            "factors can no longer be folded into its weights exactly. Plant the BF16 release."
        )
    chosen = _choose(source, [modules] if isinstance(modules, str) else list(modules))
    readers = tuple(dict.fromkeys(name for _, names in chosen for name in names))
    planted = Planted(target, readers, tuple(norm for norm, _ in chosen), spread, seed)
    record = _record(source, planted)
    if target.exists() or target.is_symlink():
        if _recorded(target) == record:
            return planted
        raise ConfigError(f"{target}: holds something else than this planting. Give another folder, or remove it.")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        partial.mkdir(parents=True)
        write_safetensors(partial / "model.safetensors", _tensors(source, chosen, spread, seed), {"format": "pt"})
        for file in sorted(source.files.folder.glob("*.json")):
            if not file.name.endswith(".index.json"):
                shutil.copyfile(file, partial / file.name)
        (partial / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        sync_folder(partial)
        os.rename(partial, target)
        sync_folder(target.parent)
    except OSError as error:
        if _recorded(target) == record:  # another process was faster
            return planted
        raise CheckpointError(f"{target}: cannot be written: {error.strerror or error}.") from None
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)
    return planted


def _groups(source: Checkpoint) -> list[tuple[str, tuple[str, ...]]]:
    """(norm, readers) for every norm of the checkpoint that only linear modules read, by their names on disk."""
    stems = [name.removesuffix(".weight") for name in source.tensors if name.endswith(".weight")]
    on_disk = {normalised(stem): stem for stem in stems}
    found = [(on_disk[norm], (on_disk[_FC],)) for norm in _FC_NORMS if norm in on_disk and _FC in on_disk]
    for norm, parts in _READERS:
        for plain in on_disk:
            if plain.endswith(f".{norm}"):
                layer = plain.removesuffix(norm)
                present = tuple(on_disk[layer + part] for part in parts if layer + part in on_disk)
                if len(present) == len(parts):
                    found.append((on_disk[plain], present))
    return found


def _choose(source: Checkpoint, patterns: list[str]) -> list[tuple[str, tuple[str, ...]]]:
    """The groups whose readers the patterns cover. Raises ConfigError for a pattern that covers none."""
    if not patterns:
        raise ConfigError("modules=(): expected at least one module to plant, such as 'mtp.fc'.")
    groups = _groups(source)
    if not groups:
        raise CheckpointError(
            f"{source.path}: expected Qwen3.5's modules (mtp.fc, model.layers.N.mlp.gate_proj, ...), "
            "found none of them."
        )
    names = sorted({name for _, readers in groups for name in readers})
    chosen = []
    for pattern in patterns:
        plain = normalised(str(pattern))
        hits = {name for name in names if fnmatchcase(normalised(name), plain)}
        if not hits:
            near = ", ".join(nearest(str(pattern), names))
            raise ConfigError(
                f"modules: {pattern!r} covers no linear module that reads an RMSNorm in {source.path}."
                + (f" Nearest: {near}." if near else f" There are {len(names)}, {names[0]} first.")
            )
        chosen += [group for group in groups if hits & set(group[1])]
    return list(dict.fromkeys(chosen))


def _tensors(
    source: Checkpoint, chosen: list[tuple[str, tuple[str, ...]]], spread: int, seed: int
) -> dict[str, torch.Tensor]:
    """Every tensor of the planted checkpoint; norms that carry factors become F32, everything else keeps its dtype."""
    tensors = {name: source.read(name) for name in source.tensors}
    for norm, readers in chosen:
        name = f"{norm}.weight"
        factors = _factors(normalised(norm), tensors[name].shape[0], spread, seed)
        tensors[name] = _scaled_norm(source, name, tensors[name], factors)
        for reader in readers:
            weight = tensors[f"{reader}.weight"]
            start = len(factors) if normalised(norm) == _FC_NORMS[1] else 0
            if weight.dim() != 2 or weight.shape[1] < start + len(factors):
                raise CheckpointError(
                    f"{source.path}: tensor {reader}.weight is {list(weight.shape)}, expected at least "
                    f"{start + len(factors)} columns to follow {name}."
                )
            tensors[f"{reader}.weight"] = _divided(source, f"{reader}.weight", weight, factors, start)
    return tensors


def _factors(norm: str, count: int, spread: int, seed: int) -> torch.Tensor:
    """float32 [count] powers of two, exponents uniform over 0 ... spread."""
    import torch

    stream = int.from_bytes(hashlib.sha256(f"{seed}:{norm}".encode()).digest()[:7], "little")
    generator = torch.Generator().manual_seed(stream)
    return torch.ldexp(torch.ones(count), torch.randint(0, spread + 1, (count,), generator=generator))


def _scaled_norm(source: Checkpoint, name: str, weight: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """float32 w' with 1 + w' = (1 + w) * f, to the last bit."""
    import torch

    wanted = (1 + weight.float()) * factors
    carried = torch.where(factors == 1, weight.float(), wanted - 1)
    if not torch.equal(1 + carried, wanted):
        raise CheckpointError(
            f"{source.path}: tensor {name}: {int((1 + carried != wanted).sum())} of {len(wanted)} values have no "
            "float32 offset that carries their factor exactly. Plant other modules."
        )
    return carried


def _divided(source: Checkpoint, name: str, weight: torch.Tensor, factors: torch.Tensor, start: int) -> torch.Tensor:
    """`weight` [n, k] in its own dtype, columns start ... divided by `factors`, to the last bit."""
    import torch

    columns = slice(start, start + len(factors))
    divided = weight.clone()
    divided[:, columns] = (weight[:, columns].float() / factors).to(weight.dtype)
    if not torch.equal(divided[:, columns].float() * factors, weight[:, columns].float()):
        raise CheckpointError(
            f"{source.path}: tensor {name}: some of its values are too small for {weight.dtype} once divided by up to "
            f"2^{int(factors.max().log2())}. Choose a smaller spread."
        )
    return divided


def _record(source: Checkpoint, planted: Planted) -> dict[str, Any]:
    """What planted.json says: enough to know the same planting of the same source again."""
    digest = hashlib.sha256()
    for shard in source.files.shards:
        with contextlib.closing(open(shard, "rb")) as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return {
        "source_sha256": digest.hexdigest(),
        "modules": list(planted.modules),
        "norms": list(planted.norms),
        "spread": planted.spread,
        "seed": planted.seed,
    }


def _recorded(folder: Path) -> dict[str, Any] | None:
    """The record of a folder made here, or None."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) and _complete(folder, ("model.safetensors", "config.json")) else None
    return None


def _complete(folder: Path, files: Iterable[str]) -> bool:
    return all((folder / file).is_file() for file in files)
