"""Which files make up a checkpoint, and which tensor lies in which: an index, one file, or a folder of
shards.

Knows nothing of what the tensors mean. Links are followed (a hub cache is made of them:
`snapshots/<rev>/x -> ../../blobs/<hash>`); names in an index that leave the folder are refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from mtplab.checkpoint.header import Header, TensorInfo, read_header
from mtplab.checkpoint.hub import hub_hint
from mtplab.checkpoint.strict_json import read_json_object, shown
from mtplab.errors import CheckpointError

__all__ = ["Files", "find_files"]

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


class Files(NamedTuple):
    """The tensors of a checkpoint and the files they came from."""

    folder: Path
    index: Path | None
    shards: tuple[Path, ...]
    tensors: dict[str, TensorInfo]
    unindexed: dict[str, TensorInfo]  # in a shard, but not in the index: what follows the index never sees them
    unused: tuple[Path, ...]  # safetensors files beside the checkpoint that belong to none of the above
    metadata: dict[Path, dict[str, str]]  # by shard, where there is any


def find_files(path: Path) -> Files:
    """The files of the checkpoint at `path`: a folder, a single .safetensors file, or an index file.

    Raises CheckpointError for a missing or unreadable shard, an index that contradicts its shards or points
    outside the folder, and a tensor in two shards.
    """
    if os.path.isdir(path):
        return _from_folder(path)
    if path.name.endswith(".index.json"):
        return _from_index(path)
    if not os.path.lexists(path):
        raise CheckpointError(
            f"{path}: expected a checkpoint folder or a .safetensors file, found nothing: no such path.{hub_hint(path)}"
        )
    header = read_header(path)
    return _gather(path.parent, None, [header], unused=())


def _from_folder(folder: Path) -> Files:
    try:
        names = sorted(item.name for item in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"{folder}: the folder cannot be listed: {error.strerror}.") from None
    shards = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
    indexes = [name for name in names if name.endswith(".safetensors.index.json")]
    if INDEX_NAME in indexes or len(indexes) == 1:
        return _from_index(folder / (INDEX_NAME if INDEX_NAME in indexes else indexes[0]), shards)
    if SINGLE_NAME in shards:
        unused = tuple(folder / name for name in shards if name != SINGLE_NAME)
        return _gather(folder, None, [read_header(folder / SINGLE_NAME)], unused)
    if not shards:
        raise CheckpointError(f"{folder}: expected {SINGLE_NAME}, {INDEX_NAME} or *.safetensors, {_instead(names)}")
    return _gather(folder, None, [read_header(folder / name) for name in shards], unused=())


def _instead(names: list[str]) -> str:
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl"))]
    if pickles:
        return f"found {shown(pickles[0])}: mtplab reads no pickles. Convert it to safetensors first."
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return f"found {shown(gguf[0])}: mtplab reads no GGUF. Take the checkpoint it was made from."
    return f"found {', '.join(map(shown, names[:8])) if names else 'an empty folder'}."


def _from_index(index: Path, present: Iterable[str] = ()) -> Files:
    weight_map = _weight_map(index, read_json_object(index, "a safetensors index"))
    names = sorted(set(weight_map.values()))
    headers = [_shard_header(index, name, weight_map) for name in names]
    unused = tuple(index.parent / name for name in present if name not in set(names))
    return _gather(index.parent, index, headers, unused, weight_map)


def _weight_map(index: Path, content: dict[str, Any]) -> dict[str, str]:
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected a weight_map from tensor to file, found {shown(weight_map)}.")
    judged: dict[str, str | None] = {}
    for name, shard in weight_map.items():
        if isinstance(shard, str) and shard not in judged:
            judged[shard] = _leaves_folder(shard)
        problem = judged[shard] if isinstance(shard, str) else "not a string"
        if problem:
            raise CheckpointError(
                f"{index}: tensor {shown(name)} is said to lie in {shown(shard)}: {problem}. Expected the name of a "
                "file in the index's own folder."
            )
    return weight_map


def _leaves_folder(name: str) -> str | None:
    """Why a shard's name is refused, or None. Both path styles are judged, whatever this machine uses."""
    if not name or name.endswith(("/", "\\")) or not name.isprintable():
        return "not a file name"
    for path in (PurePosixPath(name), PureWindowsPath(name)):
        if path.is_absolute() or path.drive or path.root:
            return "an absolute path, outside the folder"
        if ".." in path.parts:
            return "a path that leaves the folder"
    return None


def _shard_header(index: Path, name: str, weight_map: dict[str, str]) -> Header:
    path = index.parent / name
    if not os.path.lexists(path):
        tensors = [tensor for tensor, shard in weight_map.items() if shard == name]
        raise CheckpointError(
            f"{path}: missing shard: {index.name} places {len(tensors)} tensors in it ({shown(tensors[0])} first), "
            "the folder does not have it. Download it again."
        )
    return read_header(path)


def _gather(
    folder: Path,
    index: Path | None,
    headers: list[Header],
    unused: tuple[Path, ...],
    weight_map: dict[str, str] | None = None,
) -> Files:
    found: dict[str, TensorInfo] = {}
    for header in headers:
        for info in header.tensors:
            other = found.setdefault(info.name, info)
            if other is not info:
                raise CheckpointError(
                    f"{info.file}: tensor {shown(info.name)} is in {other.file.name} too, expected it in one file: "
                    "readers disagree which copy counts. Remove one."
                )
    unindexed: dict[str, TensorInfo] = {}
    if weight_map is not None and index is not None:
        paths = {shard: index.parent / shard for shard in set(weight_map.values())}
        for name, shard in weight_map.items():
            _check_place(index, name, paths[shard], found.get(name))
        unindexed = {name: info for name, info in found.items() if name not in weight_map}
        found = {name: found[name] for name in weight_map}
    if not found:
        raise CheckpointError(f"{headers[0].file}: expected tensors, found a header without any.")
    metadata = {header.file: header.metadata for header in headers if header.metadata}
    return Files(folder, index, tuple(header.file for header in headers), found, unindexed, unused, metadata)


def _check_place(index: Path, name: str, shard: Path, info: TensorInfo | None) -> None:
    if info is not None and (info.file is shard or info.file == shard):
        return
    where = f"it is in {info.file.name}" if info is not None else "no shard has it"
    raise CheckpointError(
        f"{index}: tensor {shown(name)} is said to lie in {shown(shard.name)}, but {where}. The index and the shards "
        "do not belong together; rebuild the index or download both again."
    )
