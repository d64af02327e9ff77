"""Traces beside the results: `<folder>/traces/<point>.safetensors`, and what targets did in `<folder>/targets/`.

A file is written whole or not at all, by whoever holds the lock of what it is about, and read mapped into memory. One
that cannot be read counts as none: it is made again. Both folders may be deleted at any time; rows stay what they are.
Does not run anything.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mtplab.errors import ConfigError, MtplabError
from mtplab.study.store import PointStore
from mtplab.study.trace import Trace

if TYPE_CHECKING:
    from mtplab.decode.tracing import TargetOutput

__all__ = ["TraceStore"]

TARGET_SCHEMA = 1
# hidden states take much more room than a trace: past this they are not kept, and made again when asked for
LARGEST_TARGET = 1 << 30


class TraceStore:
    """The traces of a results folder."""

    def __init__(self, store: PointStore):
        self.store = store
        self.traces, self.targets = store.folder / "traces", store.folder / "targets"

    def path(self, point: str) -> Path:
        """Where a point's trace is kept."""
        return self.traces / f"{point}.safetensors"

    def trace(self, point: str, depth: int = 0) -> Trace | None:
        """A point's trace if it reaches this depth; None where there is none that can be read."""
        try:
            found = Trace.load(self.path(point)) if self.path(point).is_file() else None
        except MtplabError:
            return None
        return found if found is not None and found.max_depth >= depth else None

    def keep(self, point: str, trace: Trace) -> None:
        """Replaces a point's trace; only for who holds its lock."""
        trace.save(_in(self.path(point)))

    def target(self, key: str) -> TargetOutput | None:
        """What a target did; None where it is not there."""
        import torch

        from mtplab.checkpoint.header import read_header
        from mtplab.checkpoint.values import TORCH_DTYPES
        from mtplab.decode.tracing import TargetOutput

        path = self.targets / f"{key}.safetensors"
        try:
            header = read_header(path) if path.is_file() else None
        except MtplabError:
            return None
        if header is None or header.metadata.get("mtplab_target") != str(TARGET_SCHEMA):
            return None
        found: dict[str, Any] = {}
        for info in header.tensors:
            if info.dtype not in TORCH_DTYPES:
                return None
            # copy on write: torch takes no array that it may not write to
            raw = np.memmap(path, np.uint8, "c", info.start, (info.nbytes,)) if info.nbytes else np.zeros(0, np.uint8)
            found[info.name] = torch.from_numpy(raw).view(TORCH_DTYPES[info.dtype]).view(info.shape)
        kinds = {"tokens": (torch.int32, 1), "lengths": (torch.int64, 1), "log_p": (torch.float32, 1)}
        fits = found.keys() == {*kinds, "hidden"} and found["hidden"].dim() == 2
        if not fits or any((found[name].dtype, found[name].dim()) != kind for name, kind in kinds.items()):
            return None
        lengths = found["lengths"]
        slots = int(lengths.sum()) - len(lengths)
        if lengths.lt(1).any() or int(lengths.sum()) != len(found["tokens"]) or len(found["log_p"]) != slots:
            return None
        tokens = [part.tolist() for part in found["tokens"].split(found["lengths"].tolist())]
        return TargetOutput(tokens, found["hidden"], found["log_p"].numpy())

    def keep_target(self, key: str, output: TargetOutput) -> None:
        """Keeps what a target did, unless it is large; only for who holds its lock."""
        import torch

        from mtplab.checkpoint import write_safetensors

        if output.hidden.nbytes > LARGEST_TARGET:
            return
        tensors = {
            "tokens": torch.tensor([token for tokens in output.tokens for token in tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(tokens) for tokens in output.tokens]),
            "hidden": output.hidden,
            "log_p": torch.from_numpy(output.log_p),
        }
        path = _in(self.targets / f"{key}.safetensors")
        write_safetensors(path, tensors, {"mtplab_target": str(TARGET_SCHEMA)})


def _in(path: Path) -> Path:
    """The path, its folder made, and freed of what killed writers left: who holds the lock is the only one alive."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.*.partial"):
            left.unlink(missing_ok=True)
    except OSError as problem:
        raise ConfigError(f"{path.parent}: cannot be made ({problem.strerror}); give another folder") from None
    return path
