"""Which scale belongs to which weight, and everything about the pair that headers alone can prove wrong.

Knows nothing of values (no torch) and of names no more than the suffixes a format declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from mtplab.checkpoint.formats import Format, QuantizationConfig
from mtplab.checkpoint.header import TensorInfo
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

__all__ = ["FP8_DTYPES", "Pairing", "Problem"]

FP8_DTYPES = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_MAX_LISTED = 6


class Problem(NamedTuple):
    """One thing wrong with a checkpoint. An "error" makes a tensor unusable, a "warning" does not."""

    severity: str
    kind: str  # one word per kind of fault, e.g. "missing-scale"
    tensor: str
    message: str


class Pairing:
    """Weights and their scales under one format; `format` and `config` are None for a plain checkpoint."""

    def __init__(
        self, tensors: Mapping[str, TensorInfo], fmt: Format | None, config: QuantizationConfig | None
    ) -> None:
        self._tensors = tensors
        self._format = fmt
        self._config = config

    def is_quantised(self, info: TensorInfo) -> bool:
        """Whether the tensor holds FP8 codes, which mean nothing without a scale."""
        return info.dtype in FP8_DTYPES

    def is_scale(self, name: str) -> bool:
        return self._format is not None and name.endswith(self._format.scale_suffix)

    def scale_of(self, weight: str) -> TensorInfo | None:
        """The scale tensor named for this weight, whatever the weight's dtype."""
        if self._format is None or not weight.endswith(self._format.weight_suffix):
            return None
        return self._tensors.get(weight.removesuffix(self._format.weight_suffix) + self._format.scale_suffix)

    def checked(self, info: TensorInfo) -> tuple[TensorInfo, tuple[int, int]]:
        """(scale, (bm, bn)) of a weight of FP8 codes.

        Raises CheckpointError naming file, tensor, expected and actual where the pair is not what the format
        asks for.
        """
        problem = self._fault(info)
        if problem is not None:
            raise CheckpointError(problem.message)
        scale = self.scale_of(info.name)
        assert scale is not None and self._config is not None
        return scale, self._config.weight_block_size

    def problems(self) -> Iterator[Problem]:
        """Every fault that the headers show, in the tensors' own order."""
        seen_codes = False
        for info in self._tensors.values():
            if self.is_quantised(info):
                seen_codes = True
                fault = self._fault(info)
                if fault is not None:
                    yield fault
            elif self.is_scale(info.name):
                yield from self._scale_fault(info)
        if self._config is not None and not seen_codes:
            dtypes = ", ".join(sorted({info.dtype for info in self._tensors.values()}))
            yield Problem(
                "warning", "nothing-quantised", "",
                f"{self._config.where} says quant_method {self._config.method!r}, but no tensor is FP8: found "
                f"{dtypes}. The tensors count: all of it is read as it is stored.",
            )  # fmt: skip

    def _fault(self, info: TensorInfo) -> Problem | None:
        if self._format is None or self._config is None:
            return _error(
                "unexplained-fp8", info,
                f"is {_stored(info)}, but config.json has no quantization_config: expected one to give the method "
                "and the block size. Restore the config.json the weights were published "
                f"with{self._scale_like(info.name, '; the file has ')}.",
            )  # fmt: skip
        if not info.name.endswith(self._format.weight_suffix) or len(info.shape) != 2:
            return _error(
                "unknown-layout", info,
                f"is {_stored(info)}: expected FP8 only in 2-D tensors named *{self._format.weight_suffix} "
                f"({self._format.name}). Stacked and transposed layouts are not read yet.",
            )  # fmt: skip
        if info.dtype not in self._format.code_dtypes:
            return _error(
                "dtype", info,
                f"is {info.dtype}, expected {' or '.join(self._format.code_dtypes)}, as {self._config.where} says "
                f"{self._config.method} {self._config.fmt}.",
            )  # fmt: skip
        scale = self.scale_of(info.name)
        if scale is None:
            scale_name = info.name.removesuffix(self._format.weight_suffix) + self._format.scale_suffix
            return _error(
                "missing-scale", info,
                f"is {_stored(info)} without its scale: expected {shown(scale_name)}, found "
                f"none{self._scale_like(info.name, ' but ')}. Raw codes would be read as values up to 448; download "
                "or export the checkpoint again.",
            )  # fmt: skip
        if scale.dtype not in self._format.scale_dtypes:
            return _error(
                "scale-dtype", scale,
                f"is {scale.dtype}, expected {', '.join(self._format.scale_dtypes)} ({self._format.name}).",
            )  # fmt: skip
        expected = self._format.scale_shape(info.shape, self._config)
        if scale.shape != expected:
            return _error(
                "scale-grid", scale,
                f"has shape {list(scale.shape)}, expected {list(expected)}: its weight is {list(info.shape)} and "
                f"weight_block_size is {list(self._config.weight_block_size)}. Correct the block size, or export the "
                "weight again.",
            )  # fmt: skip
        return None

    def _scale_fault(self, scale: TensorInfo) -> Iterator[Problem]:
        assert self._format is not None
        weight_name = scale.name.removesuffix(self._format.scale_suffix) + self._format.weight_suffix
        weight = self._tensors.get(weight_name)
        if weight is None:
            yield _error(
                "missing-weight", scale,
                f"is a scale without its weight: expected {shown(weight_name)}, found none. A shard is missing or "
                "the export dropped the weight.",
            )  # fmt: skip
        elif not self.is_quantised(weight):
            yield Problem(
                "warning", "junk-scale", scale.name,
                f"{scale.file}: tensor {shown(scale.name)} lies beside a weight stored as {weight.dtype}: a "
                "high-precision weight has no scale (transformers leaves uninitialised ones behind). It is ignored.",
            )  # fmt: skip

    def _scale_like(self, weight: str, lead: str) -> str:
        """`lead` and what else beside the weight has "scale" in its name, or nothing."""
        found = self._scales_by_module.get(weight.rpartition(".")[0], [])
        return lead + ", ".join(map(shown, found[:_MAX_LISTED])) if found else ""

    @cached_property
    def _scales_by_module(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._tensors:
            module, _, parameter = name.rpartition(".")
            if "scale" in parameter:
                found.setdefault(module, []).append(name)
        return found


def _stored(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _error(kind: str, info: TensorInfo, what: str) -> Problem:
    return Problem("error", kind, info.name, f"{info.file}: tensor {shown(info.name)} {what}")
