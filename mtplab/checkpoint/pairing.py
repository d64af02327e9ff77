"""Which scale belongs to which weight, and everything about the pair that headers alone can prove wrong.

Knows nothing of values (no torch) and of names no more than the suffixes that formats declare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from mtplab.checkpoint.formats import Format, QuantizationConfig, Scheme, formats
from mtplab.checkpoint.formats.known import PACKED_BESIDE, PACKED_SUFFIXES
from mtplab.checkpoint.header import FP8_DTYPES, TensorInfo
from mtplab.checkpoint.names import module_of
from mtplab.checkpoint.scale_grid import expected_shapes, scale_block
from mtplab.checkpoint.strict_json import shown
from mtplab.errors import CheckpointError

__all__ = ["INPUT_SCALE_SUFFIXES", "KV_SCALE_SUFFIXES", "SCALE_SUFFIXES", "Pair", "Pairing", "Problem"]

# of activations: AutoFP8 and most others, transformers, ModelOpt's stacked experts
INPUT_SCALE_SUFFIXES = (".input_scale", ".activation_scale", ".qscale_act", "_input_scale")
# of the KV cache: compressed-tensors and ModelOpt, Quark and old compressed-tensors, AutoFP8
KV_SCALE_SUFFIXES = (
    ".k_scale", ".v_scale", ".k_proj.output_scale", ".v_proj.output_scale", ".kv_scale",
)  # fmt: skip
_SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_BYTES = ("I8", "U8")  # how writers stored FP8 codes before safetensors had dtypes for them
_INTEGERS = ("I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")
_UNQUALIFIED = ("_scale", ".scale")  # names that parameters other than scales have too
# every ending by which a tensor is a scale, of weights too, but for those that other parameters have as well
SCALE_SUFFIXES = tuple(
    dict.fromkeys(
        (
            *INPUT_SCALE_SUFFIXES,
            *KV_SCALE_SUFFIXES,
            *(scale for fmt in formats() for _, scale in fmt.pairs if scale not in _UNQUALIFIED),
        )
    )
)
_MAX_LISTED = 6


class Problem(NamedTuple):
    """One thing wrong with a checkpoint. An "error" makes a tensor unusable, a "warning" does not."""

    severity: str
    kind: str  # one word per kind of fault, e.g. "missing-scale"
    tensor: str
    message: str


class Pair(NamedTuple):
    """A weight's codes and the scale that makes values of them."""

    codes: TensorInfo
    dtype: str  # of the codes: the stored one, or F8_E4M3 where their bytes are stored as integers
    scale: TensorInfo  # the multiplier; as F8_E8M0 or U8 the exponent byte of a power of two
    block: tuple[int, ...]  # sizes, by axis of the codes, of what shares a scale
    part: tuple[tuple[int, int], ...]  # (start, stop) by axis where the scale tensor holds those of others; else ()
    scheme: Scheme


class Pairing:
    """Weights and their scales under one format; `format` and `config` are None for a plain checkpoint."""

    def __init__(
        self, tensors: Mapping[str, TensorInfo], fmt: Format | None, config: QuantizationConfig | None
    ) -> None:
        self._tensors = tensors
        self._format = fmt
        self._config = config
        self._pairs = fmt.pairs if fmt is not None else ()
        self._judged: dict[str, Pair | Problem] = {}
        self._pattern_fault = ""

    def weight_names(self) -> dict[str, str]:
        """Name of a weight's values → name of its codes, where a format calls them differently (torchao)."""
        if self._format is None or all(codes in (self._format.values_suffix, "") for codes, _ in self._pairs):
            return {}
        suffix = self._pairs[0][0]
        names = (name for name in self._tensors if name.endswith(suffix))
        return {name.removesuffix(suffix) + self._format.values_suffix: name for name in names}

    def is_quantised(self, info: TensorInfo) -> bool:
        """Whether the tensor holds FP8 codes, which mean nothing without a scale."""
        return info.name in self._codes

    @cached_property
    def _codes(self) -> frozenset[str]:
        return frozenset(info.name for info in self._tensors.values() if self._holds_codes(info))

    def _holds_codes(self, info: TensorInfo) -> bool:
        if info.name in self._scales:
            return False
        if info.dtype in _BYTES:
            scheme = self._scheme(info) if self._stem_scale(info.name) is not None else None
            mine = scheme is not None and not scheme.foreign
            return mine and not self._packs_two(info) and self._foreign_beside(info) is None
        return info.dtype in FP8_DTYPES and not (".weight_scale" in info.name and self._scales_packed(info.name))

    def is_scale(self, name: str) -> bool:
        """Whether the tensor is a scale of a weight, whether or not that weight is there."""
        return name in self._scales

    @cached_property
    def _scales(self) -> frozenset[str]:
        suffixes = tuple({scale for _, scale in self._pairs})
        return frozenset(name for name in self._tensors if name.endswith(suffixes) and self._scales_a_weight(name))

    def _scales_a_weight(self, name: str) -> bool:
        for weight, scale in self._pairs:
            if name.endswith(scale):
                owner = name.removesuffix(scale) + weight
                if owner in self._tensors:
                    return True
                if weight and scale not in _UNQUALIFIED:
                    return True
                if "experts." in name and self._has_experts(name):
                    return True
        return False

    def packed(self, info: TensorInfo) -> str | None:
        """What the tensor's integers are where they are codes that are not read, or None."""
        if info.dtype not in _INTEGERS or self.is_scale(info.name):
            return None
        for suffix, what in PACKED_SUFFIXES.items():
            if info.name.endswith(suffix):
                return what
        stem = info.name.removesuffix(".weight")
        if stem == info.name or not info.shape or self._holds_codes(info):
            return None
        what = self._foreign_beside(info)
        own = self._stem_scale(info.name)
        if what is None and own is not None:
            scheme = self._scheme(info)
            given = scheme.foreign if scheme is not None and scheme.foreign else "codes of another kind"
            packed = self._packs_two(info)
            what = "FP4 codes, two in a byte (MXFP4)" if packed else given
            what += f", with a scale {own[0].dtype} {list(own[0].shape)}"
        if what is None and len(info.shape) > 1:
            what = "integers, with no scale beside them"
        return what

    def packed_fault(self, info: TensorInfo) -> str | None:
        """The message about a tensor of codes that are not read, or None where it is none."""
        what = self.packed(info)
        return _not_read(info, what).message if what is not None else None

    def module_scaled_at_input(self, name: str) -> str | None:
        """The module whose activations this tensor scales, or None where it is no static scale of activations."""
        if self._format is None or not name.endswith(INPUT_SCALE_SUFFIXES):
            return None
        return next(name.removesuffix(suffix) for suffix in INPUT_SCALE_SUFFIXES if name.endswith(suffix))

    def input_scale_of(self, module: str) -> TensorInfo | None:
        """The static scale of this module's activations, or None."""
        found = (self._tensors.get(module + suffix) for suffix in INPUT_SCALE_SUFFIXES)
        return next((info for info in found if info is not None), None) if self._format is not None else None

    def scale_of(self, weight: str) -> TensorInfo | None:
        """The scale tensor of this weight's own, whatever the weight's dtype."""
        found = self._stem_scale(weight)
        return found[0] if found is not None else None

    def pair(self, info: TensorInfo) -> Pair:
        """The checked pair of a tensor of FP8 codes.

        Raises CheckpointError naming file, tensor, expected and actual where the pair is not what the format
        asks for.
        """
        found = self._verdict(info)
        if isinstance(found, Problem):
            raise CheckpointError(found.message)
        return found

    def _verdict(self, info: TensorInfo) -> Pair | Problem:
        found = self._judged.get(info.name)
        if found is None:
            found = self._judged[info.name] = self._judge(info)
        return found

    def problems(self) -> Iterator[Problem]:
        """Every fault that the headers show, in the tensors' own order."""
        seen_codes = False
        for info in self._tensors.values():
            if self.is_quantised(info):
                seen_codes = True
                found = self._verdict(info)
                if isinstance(found, Problem):
                    if found.kind != "pattern":
                        yield found
                elif found.dtype != info.dtype:
                    yield Problem(
                        "warning", "bytes-as-integers", info.name,
                        f"{info.file}: tensor {shown(info.name)} is {_stored(info)}, where the config says FP8: the "
                        f"bytes are read as {found.dtype}, as writers stored codes before safetensors had FP8. A "
                        "reader that takes them for integers is silently wrong; write the checkpoint again.",
                    )  # fmt: skip
            elif self.is_scale(info.name):
                yield from self._scale_fault(info)
            else:
                yield from self._other_codes(info)
        if self._pattern_fault:
            yield Problem("error", "pattern", "", self._pattern_fault)
        if self._config is not None and not seen_codes:
            dtypes = ", ".join(sorted({info.dtype for info in self._tensors.values()}))
            yield Problem(
                "warning", "nothing-quantised", "",
                f"{self._config.where} says quant_method {self._config.method!r}, but no tensor is FP8: found "
                f"{dtypes}. The tensors count: all of it is read as it is stored.",
            )  # fmt: skip

    def _stem_scale(self, weight: str) -> tuple[TensorInfo, str] | None:
        for codes, scale in self._pairs:
            if weight.endswith(codes):
                found = self._tensors.get(weight.removesuffix(codes) + scale)
                if found is not None and found.name != weight:
                    return found, scale
        return None

    def _scheme(self, info: TensorInfo) -> Scheme | None:
        if self._config is None or self._pattern_fault:
            return None
        name = self._values_name(info.name)
        try:
            return self._config.scheme_of(module_of(name))
        except CheckpointError as error:
            self._pattern_fault = str(error)  # a pattern that cannot be run: of no module is known what it is given
            return None

    def _values_name(self, codes: str) -> str:
        suffix = self._pairs[0][0] if self._pairs else ""
        if self._format is not None and suffix and codes.endswith(suffix):
            return codes.removesuffix(suffix) + self._format.values_suffix
        return codes

    def _packs_two(self, info: TensorInfo) -> bool:
        """Whether the integer bytes are 4-bit codes, two in each: their scales then reach over twice the columns."""
        found = self._stem_scale(info.name)
        return (
            found is not None
            and len(info.shape) == len(found[0].shape) == 2
            and found[0].shape[1] * 32 == info.shape[1] * 2
            and found[0].shape[0] == info.shape[0]
            and found[0].dtype in ("F8_E8M0", "U8")
        )

    def _foreign_beside(self, info: TensorInfo) -> str | None:
        """What the weight's integers are by what lies beside them, or None."""
        stem = info.name.removesuffix(".weight")
        return next((what for suffix, what in PACKED_BESIDE.items() if stem + suffix in self._tensors), None)

    def _scales_packed(self, name: str) -> bool:
        """Whether this is NVFP4's scale, FP8 itself, of a weight that is not read."""
        stem, suffix, _ = name.rpartition(".weight_scale")
        weights = (self._tensors.get(f"{stem}.weight"), self._tensors.get(f"{stem}.weight_packed")) if suffix else ()
        return any(weight is not None and self.packed(weight) is not None for weight in weights)

    def _has_experts(self, scale: str) -> bool:
        group = scale.partition("experts.")[0] + "experts.0."
        return any(f"{group}{which}_proj.weight" in self._tensors for which in ("gate", "down", "up"))

    def _judge(self, info: TensorInfo) -> Pair | Problem:
        if self._format is None or self._config is None:
            return _error(
                "unexplained-fp8", info,
                f"is {_stored(info)}, but config.json has no quantization_config: expected one to give the method "
                "and the block size. Restore the config.json the weights were published "
                f"with{self._scale_like(info.name, '; the file has ')}.",
            )  # fmt: skip
        own = self._stem_scale(info.name)
        named = own is not None or any(codes and info.name.endswith(codes) for codes, _ in self._pairs)
        if len(info.shape) not in (2, 3) or not named:
            suffix = self._pairs[0][0]
            return _error(
                "unknown-layout", info,
                f"is {_stored(info)}: expected FP8 in matrices named *{suffix}, or in stacked experts [e, n, k] with a "
                f"scale beside them ({self._format.name}){self._scale_like(info.name, '; the file has ')}.",
            )  # fmt: skip
        scheme = self._scheme(info)
        if self._pattern_fault:
            return Problem("error", "pattern", info.name, self._pattern_fault)
        if scheme is None or scheme.foreign:
            given = scheme.foreign if scheme is not None else "no weight scheme"
            return _error(
                "no-scheme", info,
                f"is {_stored(info)}, but {self._config.where} gives its module {given}: expected one of FP8. Correct "
                "the config's targets.",
            )  # fmt: skip
        dtype = scheme.code_dtypes[0] if info.dtype in _BYTES else info.dtype
        if dtype not in scheme.code_dtypes:
            return _error(
                "dtype", info,
                f"is {info.dtype}, expected {' or '.join(scheme.code_dtypes)}, as {self._config.where} says "
                f"{self._config.method} {scheme.codes}.",
            )  # fmt: skip
        part: tuple[tuple[int, int], ...] = ()
        if own is not None:
            scale, shape = own[0], own[0].shape
        else:
            shared = self._format.shared_scale and self._format.shared_scale(info, self._tensors, scheme)
            if not shared:
                return self._missing_scale(info, scheme)
            scale, part = shared
            shape = tuple(stop - start for start, stop in part)[1:]
        if scale.dtype not in _SCALE_DTYPES:
            return _error(
                "scale-dtype", scale,
                f"is {scale.dtype}, expected {', '.join(_SCALE_DTYPES)} ({self._format.name})."
                + (" Packed exponents are a layout of running kernels, not of files." if scale.dtype == "I32" else ""),
            )  # fmt: skip
        block = scale_block(info.shape, shape, scheme)
        if block is None:
            expected = " or ".join(str(list(one)) for one in expected_shapes(info.shape, scheme))
            return _error(
                "scale-grid", scale,
                f"has shape {list(shape)}, expected {expected}: its weight is {list(info.shape)} and "
                f"{self._config.where} gives {_said(scheme)}. Correct the config, or export the weight again.",
            )  # fmt: skip
        return Pair(info, dtype, scale, block, part, scheme)

    def _missing_scale(self, info: TensorInfo, scheme: Scheme) -> Problem:
        assert self._format is not None
        codes, scale = next(pair for pair in self._pairs if info.name.endswith(pair[0]))
        expected = info.name.removesuffix(codes) + scale
        group, experts, _ = info.name.rpartition("experts.")
        stacked = self._scales_by_module.get(group + experts.removesuffix("."), []) if experts else []
        if stacked:
            given = ", ".join(f"{shown(name)} {list(self._tensors[name].shape)}" for name in stacked[:_MAX_LISTED])
            return _error(
                "missing-scale", info,
                f"is {_stored(info)} without a scale of its own, expected {shown(expected)}; those of its experts are "
                f"stacked as {given} and cannot be told apart for this weight under {_said(scheme)}. Export it again.",
            )  # fmt: skip
        return _error(
            "missing-scale", info,
            f"is {_stored(info)} without its scale: expected {shown(expected)}, found "
            f"none{self._scale_like(info.name, ' but ')}. Raw codes would be read as values up to 448; download "
            "or export the checkpoint again.",
        )  # fmt: skip

    def _scale_fault(self, scale: TensorInfo) -> Iterator[Problem]:
        owners = [
            scale.name.removesuffix(suffix) + weight for weight, suffix in self._pairs if scale.name.endswith(suffix)
        ]
        weight = next((self._tensors[name] for name in owners if name in self._tensors), None)
        if weight is None:
            if "experts." in scale.name and self._has_experts(scale.name):
                return
            if any(name.removesuffix(".weight") + ".weight_packed" in self._tensors for name in owners):
                return  # whose packed codes are what is wrong
            yield _error(
                "missing-weight", scale,
                f"is a scale without its weight: expected {shown(owners[0])}, found none. A shard is missing or "
                "the export dropped the weight.",
            )  # fmt: skip
        elif not self.is_quantised(weight) and self.packed(weight) is None:
            yield Problem(
                "warning", "junk-scale", scale.name,
                f"{scale.file}: tensor {shown(scale.name)} lies beside a weight stored as {weight.dtype}: a "
                "high-precision weight has no scale (transformers leaves uninitialised ones behind). It is ignored.",
            )  # fmt: skip

    def _other_codes(self, info: TensorInfo) -> Iterator[Problem]:
        what = self.packed(info)
        if what is None and info.name.endswith(tuple(PACKED_BESIDE)):
            suffix = next(suffix for suffix in PACKED_BESIDE if info.name.endswith(suffix))
            stem = info.name.removesuffix(suffix)
            if f"{stem}.weight" not in self._tensors and f"{stem}.weight_packed" not in self._tensors:
                what = PACKED_BESIDE[suffix]
        if what is not None:
            yield _not_read(info, what)

    def _scale_like(self, weight: str, lead: str) -> str:
        """`lead` and what else beside the weight has "scale" in its name, or nothing."""
        found = self._scales_by_module.get(weight.rpartition(".")[0], [])
        found = [name for name in found if name != weight]
        return lead + ", ".join(map(shown, found[:_MAX_LISTED])) if found else ""

    @cached_property
    def _scales_by_module(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._tensors:
            module, _, parameter = name.rpartition(".")
            if "scale" in parameter:
                found.setdefault(module, []).append(name)
        return found


def _not_read(info: TensorInfo, what: str) -> Problem:
    return _error("packed", info, f"is {_stored(info)}: {what}; expected FP8. What is not FP8 is not read.")


def _said(scheme: Scheme) -> str:
    return f"weight_block_size {list(scheme.block)}" if scheme.granularity == "block" else str(scheme)


def _stored(info: TensorInfo) -> str:
    return f"{info.dtype} {list(info.shape)}"


def _error(kind: str, info: TensorInfo, what: str) -> Problem:
    return Problem("error", kind, info.name, f"{info.file}: tensor {shown(info.name)} {what}")
