"""The checkpoint as one object: open, look, plan, read.

Ties this room's modules together and knows nothing they know. Opening and planning read headers only and
import no torch; reading a value does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mtplab.checkpoint.collector import collector_still
from mtplab.checkpoint.config_json import CONFIG_FILE, find_quantization, read_config
from mtplab.checkpoint.draft_layouts import OWN_COUNT
from mtplab.checkpoint.formats import Format, QuantizationConfig, parse
from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.hub import is_hub_name, resolve_hub
from mtplab.checkpoint.index import Files, find_files
from mtplab.checkpoint.names import Reach, draft_globs, nearest, normalised
from mtplab.checkpoint.pairing import KV_SCALE_SUFFIXES, Pair, Pairing, Problem
from mtplab.checkpoint.plan import Plan, make_plan
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import torch

    from mtplab.checkpoint.audit import Audit
    from mtplab.checkpoint.values import ScaledWeight

__all__ = ["Checkpoint", "open_checkpoint"]


def open_checkpoint(path: str | os.PathLike[str], lenient: bool = False) -> Checkpoint:
    """Open a checkpoint: a folder, or a single .safetensors file beside a config.json. Reads headers only.

    `hf://org/name[@revision]` is the folder of that model in the Hugging Face cache, fetched where it is not there.

    `lenient`: a quantisation that is not read is no error; the checkpoint says why in `refused`, and its tensors can
    be looked at as they are stored.

    Raises CheckpointError, naming file and tensor, for files that are missing, truncated or no safetensors,
    headers, indexes and configs that contradict themselves, and quantisation methods that are not read.
    """
    try:
        where = Path(path)
    except TypeError:
        raise ConfigError(f"path={shown(path)}: expected the path of a checkpoint.") from None
    if not str(path) or "\0" in str(where):
        raise ConfigError(f"path={shown(path)}: expected the path of a checkpoint.")
    if is_hub_name(where):
        where = resolve_hub(where)
    with collector_still():
        files = find_files(where)
        config = read_config(files.folder, required=os.path.isdir(where))
        return Checkpoint(where, files, config, lenient)


class Checkpoint:
    """An opened checkpoint. Made by `open_checkpoint`; holds no file open.

    Attributes:
        path: what was opened. `files` says which shards that is, and what lies beside them unread.
        config: config.json as it stands.
        tensors: every tensor by its name on disk, with dtype and shape.
        quantization: the parsed quantisation config, or None for a plain checkpoint.
        found: the quantisation config as it stands, and where, or None.
        refused: why the quantisation is not read, of a checkpoint opened leniently.
    """

    quantization: QuantizationConfig | None
    _format: Format | None

    def __init__(self, path: Path, files: Files, config: dict[str, Any], lenient: bool = False) -> None:
        self.path = path
        self.config = config
        self.files = files
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(files.tensors)
        self.found = find_quantization(config, files.folder)
        self.refused: CheckpointError | None = None
        self._format, self.quantization = None, None
        try:
            if self.found is not None:
                self._format, self.quantization = parse(self.found)
        except CheckpointError as error:
            if not lenient:
                raise
            self.refused = error
        self._pairing = Pairing(files.tensors, self._format, self.quantization)
        self._codes_of = self._pairing.weight_names()
        self._values_of = {codes: values for values, codes in self._codes_of.items()}

    def __repr__(self) -> str:
        method = self.quantization.method if self.quantization is not None else "not quantised"
        return f"<Checkpoint {self.path}: {len(self.tensors)} tensors, {len(self.files.shards)} files, {method}>"

    def __str__(self) -> str:
        from mtplab.checkpoint.checkpoint_table import as_text

        return as_text(self)

    def _repr_html_(self) -> str:
        from mtplab.checkpoint.checkpoint_table import as_html

        return as_html(self)

    @cached_property
    def draft_globs(self) -> tuple[str, ...]:
        """Exclusions that cover the MTP head: `("mtp.*",)`, or in another family `("model.layers.61.*",)`."""
        return draft_globs(self.tensors, self.config)

    @cached_property
    def problems(self) -> tuple[Problem, ...]:
        """What the headers show to be wrong: errors make a tensor unusable, warnings do not."""
        # a pattern that cannot be run comes first: what its modules are said to be follows from it
        found = sorted(self._pairing.problems(), key=lambda problem: problem.kind != "pattern")
        if self.files.unindexed:
            names = list(self.files.unindexed)
            first = self.files.unindexed[names[0]]
            found.append(
                Problem(
                    "warning", "unindexed", names[0],
                    f"{self.files.index}: {len(names)} tensors are on disk but not in the index ({shown(names[0])} "
                    f"in {first.file.name} first): whatever follows the index never reads them. Rebuild the index.",
                )
            )  # fmt: skip
        return (*found, *self._layer_problems())

    def _layer_problems(self) -> Iterator[Problem]:
        """Where config.json counts other layers than the files hold."""
        reach, where = Reach(self.config), self.files.folder / CONFIG_FILE
        by_reason: dict[str, list[str]] = {}
        for name in self.tensors:
            why = reach.unread(name)
            if why is not None and "config.json" in why:
                by_reason.setdefault(why, []).append(name)
        for why, names in by_reason.items():
            yield Problem(
                "warning", "unused-layers", names[0],
                f"{where}: {len(names)} tensors ({shown(names[0])} first) are {why}, and are not loaded. If they "
                "belong to the model, correct the number.",
            )  # fmt: skip
        if reach.heads and not any(normalised(name).startswith("mtp.") for name in self.tensors):
            yield Problem(
                "warning", "missing-head", "",
                f"{where}: {OWN_COUNT} is {reach.heads}, but no tensor is named mtp.*: there is no head to "
                "load. Set it to 0 to run the model without one, or take a checkpoint that has its head.",
            )  # fmt: skip

    def info(self, name: str) -> TensorInfo:
        """The entry of a tensor, by its name or its module's (`mtp.fc` for `mtp.fc.weight`).

        Raises CheckpointError naming the nearest names where there is none.
        """
        for known in (name, f"{name}.weight"):
            info = self.tensors.get(self._codes_of.get(known, known))
            if info is not None:
                return info
        hidden = self.files.unindexed.get(name) or self.files.unindexed.get(f"{name}.weight")
        if hidden is not None:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} is on disk in {hidden.file.name}, but not in {self.files.index}, "
                "which decides. Rebuild the index."
            )
        near = ", ".join(map(shown, nearest(str(name), self.tensors)))
        raise CheckpointError(
            f"{self.path}: expected a tensor {shown(name)}, found none among {len(self.tensors)}."
            + (f" Nearest: {near}." if near else "")
        )

    def read(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, in memory of its own: FP8 stays codes, without their scale.

        Raises CheckpointError where there is no such tensor, or its file changed since it was opened.
        """
        from mtplab.checkpoint.values import read_tensor

        return read_tensor(self.info(name))

    def scaled(self, name: str) -> ScaledWeight:
        """FP8 codes [n, k], float32 scales [ceil(n/bm), ceil(k/bn)] and the block (bm, bn) of a weight.

        A scale per tensor is a block of (n, k), one per output channel a block of (1, k). Stacked experts have a third
        axis before, in codes, scales and block.

        Raises CheckpointError where the weight is not FP8, has no scale, has one that does not fit or is not
        finite and positive, or holds NaN codes.
        """
        from mtplab.checkpoint.values import read_scaled

        info = self.info(name)
        if not self._pairing.is_quantised(info):
            raise CheckpointError(
                f"{info.file}: tensor {shown(info.name)} is {info.dtype}, expected FP8 codes with a scale. Use "
                "dequantize or read."
            )
        return read_scaled(self._pairing.pair(info))

    def dequantize(self, name: str) -> torch.Tensor:
        """The tensor's values as float32: code times scale for FP8 weights, a cast for everything else.

        Raises CheckpointError as `scaled` and `read` do; raw codes are never taken for values.
        """
        info = self.info(name)
        if self._pairing.is_quantised(info):
            from mtplab.checkpoint.values import read_dequantized

            return read_dequantized(self._pairing.pair(info))
        self._refuse_codes(info)
        if info.dtype == "C64":
            raise CheckpointError(f"{info.file}: tensor {shown(info.name)} is complex: expected real values. Use read.")
        return self.read(info.name).float()

    def bands(self, name: str, multiple: int = 1) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The values `dequantize` gives, in bands of rows: (first row, row after the last, float32 [rows, k]).

        Every band but the last has a `multiple` of rows. Its memory (about 4 MB) is used again for the
        next; axes before the last are taken together as rows, and fewer than two dimensions are one row. Raises
        CheckpointError as `dequantize` does.
        """
        from mtplab.checkpoint.values import dequantized_bands, plain_bands

        info = self.info(name)
        if self._pairing.is_quantised(info):
            return dequantized_bands(self._pairing.pair(info), multiple)
        self._refuse_codes(info)
        return plain_bands(info, multiple)

    def _refuse_codes(self, info: TensorInfo) -> None:
        fault = self._pairing.packed_fault(info)
        if fault is not None:
            raise CheckpointError(fault)

    def pair(self, name: str) -> Pair | None:
        """The codes and the scale of an FP8 weight, or None where the tensor is not FP8.

        Raises CheckpointError where the weight has no scale or one that does not fit.
        """
        info = self.info(name)
        return self._pairing.pair(info) if self._pairing.is_quantised(info) else None

    def values_name(self, name: str) -> str:
        """How the values of the tensor `name` are called: its own name but where a format names codes otherwise."""
        return self._values_of.get(name, name)

    def role(self, name: str) -> str:
        """What the tensor is for: "scale" of a weight, "input scale" of activations, "KV scale", or "parameter"."""
        if self._pairing.is_scale(name):
            return "scale"
        if self.module_scaled_at_input(name) is not None:
            return "input scale"
        return "KV scale" if self.quantization is not None and name.endswith(KV_SCALE_SUFFIXES) else "parameter"

    def module_scaled_at_input(self, name: str) -> str | None:
        """The module whose activations the tensor `name` scales, or None where it is no static activation scale."""
        return self._pairing.module_scaled_at_input(name)

    def kv_scales(self) -> dict[str, TensorInfo]:
        """The tensors that scale a quantised KV cache, by name: a multiplier for a layer's keys or values."""
        return {name: info for name, info in self.tensors.items() if name.endswith(KV_SCALE_SUFFIXES)}

    def plan(
        self,
        exclude: str | Sequence[str] | None = None,
        draft_exclude: str | Sequence[str] | None = None,
        model_format: str | None = None,
    ) -> Plan:
        """What becomes of every module, and the rule that decided. Reads no values.

        Args:
            exclude: None, "published" (as the checkpoint was published; for a BF16 one quantised as it is loaded,
                what releases leave out, `exclusions.PUBLISHED`), "none", or a list of module names and globs over
                names as on disk, in which "published" may stand too. Either root matches: `model.layers.*` or
                `model.language_model.layers.*`.
            draft_exclude: the same for the draft head; None means the same as `exclude`.
            model_format: None, or "fp8" to quantise the linear weights of a BF16 checkpoint in 128x128 blocks as
                they are loaded. On an FP8 checkpoint it changes nothing, and the rule says so.

        Raises CheckpointError where headers show a weight to be unusable, ConfigError for a pattern that
        covers no module, and for exclusions where nothing is FP8 (a BF16 checkpoint without `model_format`).
        """
        errors = [problem for problem in self.problems if problem.severity == "error"]
        if errors:
            more = f" ({len(errors) - 1} tensors more are wrong.)" if len(errors) > 1 else ""
            raise CheckpointError(errors[0].message + more)
        return make_plan(
            self.tensors,
            self.config,
            self._pairing,
            self.quantization,
            exclude=exclude,
            draft_exclude=draft_exclude,
            model_format=model_format,
            warnings=tuple(problem.message for problem in self.problems),
        )

    def with_exclusions(self, entries: Sequence[str]) -> Checkpoint:
        """The same files under another exclusion list, as if their quantisation config had this one.

        Raises ConfigError where the checkpoint has no such config.
        """
        if isinstance(entries, str) or not isinstance(entries, Iterable) or not all(
            isinstance(entry, str) for entry in entries
        ):
            raise ConfigError(f"entries={shown(entries)}: expected a list of module names.")
        if self.found is None or self._format is None:
            raise ConfigError(f"{self.path}: there is no exclusion list to exchange in its quantisation config.")
        content = self._format.with_list(self.found.content, entries)
        # found before any other place that a config may stand in
        return Checkpoint(self.path, self.files, {**self.config, "quantization_config": content})

    def look(self) -> Plan:
        """The plan as published, with the modules that cannot be used in it as "unusable", and why as their rule."""
        return make_plan(self.tensors, self.config, self._pairing, self.quantization, faulty=True)

    def audit(
        self,
        deep: bool = False,
        progress: Callable[[int, int], None] | None = None,
        source: Checkpoint | str | os.PathLike[str] | None = None,
    ) -> Audit:
        """What is in the checkpoint, what is wrong with it, and how engines will read it (`mtplab audit`).

        Args:
            deep: read the values too; `progress` is then called with (bytes read, bytes in all).
            source: the checkpoint that this one was made from: what was lost on the way is found as well.

        Raises CheckpointError where `source` cannot be opened.
        """
        from mtplab.checkpoint.audit import examine

        origin = source if source is None or isinstance(source, Checkpoint) else open_checkpoint(source, lenient=True)
        return examine(self, deep, progress, origin)
