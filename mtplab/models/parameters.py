"""Parameters of a model, taken from a checkpoint by the names on disk and checked against the shapes expected.

The one place where names on disk become weights in memory, and where a plan's decision (FP8 or not, input rounded or
not) is carried out. Knows nothing of what a model does with them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from mtplab.checkpoint import Checkpoint, ModulePlan, Plan, TensorInfo
from mtplab.checkpoint.experts import single_experts
from mtplab.checkpoint.names import module_of
from mtplab.checkpoint.values import plain_bands
from mtplab.errors import CheckpointError
from mtplab.models.config import ROOTS, roots_of, vocabulary_head
from mtplab.models.spec import MixtureSpec
from mtplab.quant.block import BLOCK, ScaledTensor, Unread, quantize_block
from mtplab.quant.experts import Experts, make_experts
from mtplab.quant.linear import LinearWeight, PackedLinear
from mtplab.quant.products import keeps_codes
from mtplab.quant.rounding import Rounding

# called with `multiple=` rows: (first row, row after the last, float32 [rows, k]), again and again
Bands = Callable[..., Iterator[tuple[int, int, Tensor]]]


class Parameters:
    """Reads one checkpoint's tensors under one plan, in one compute dtype, onto one device."""

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, dtype: torch.dtype, device: torch.device, activation_rounding: bool
    ):
        self.checkpoint, self.plan, self.dtype, self.device = checkpoint, plan, dtype, device
        self.activation_rounding = activation_rounding
        found = roots_of(checkpoint.tensors)
        if len(found) != 1:
            raise CheckpointError(
                f"{checkpoint.path}: found {len(found) or 'none'} of "
                f"{', '.join(f'{r}embed_tokens.weight' for r in ROOTS)}; expected exactly one, the embedding of "
                "the text model"
            )
        self.root = found[0]
        self.lm_head = vocabulary_head(checkpoint.tensors) or "lm_head"

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self.checkpoint.tensors

    def vector(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of this shape, in `dtype` or the compute dtype."""
        self._expect(name, shape)
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        self._fill(self.checkpoint.tensors[name], partial(self.checkpoint.bands, name), out)
        return out

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors of the file hold the same values; False where either is not there."""
        both = [self.checkpoint.tensors.get(each) for each in (name, other)]
        if None in both or both[0].shape != both[1].shape or both[0].dtype != both[1].dtype:
            return False
        # a band at a time: an embedding is the largest of a model's tensors
        bands = zip(*map(self.checkpoint.bands, (name, other)), strict=True)
        return all(torch.equal(mine, its) for (_, _, mine), (_, _, its) in bands)

    def linear(self, members: list[tuple[str, int]], in_features: int) -> PackedLinear:
        """Weights that share an input: (module name, out features) each, with the plan's dtype and rounding."""
        return PackedLinear([self._weight(n, (rows, in_features)) for n, rows in members], self.dtype, self.device)

    def experts(self, layer: str, spec: MixtureSpec, hidden: int) -> Experts:
        """The experts of a layer whose names begin so, each projection stacked or one by one (`MixtureNames`)."""
        at, shape, wide = f"{layer}{spec.names.experts}", (spec.size, hidden), (hidden, spec.size)
        found: list[Iterable[tuple[LinearWeight, ...]]] = []
        for stack, parts in spec.names.stacks:
            name, (n, k) = f"{layer}{stack}", wide if parts == ("down_proj",) else shape
            singles = [[f"{at}.{e}.{part}" for part in parts] for e in range(spec.count)]
            if not self.has(name):
                found.append([tuple(self._weight(each, (n, k)) for each in one) for one in singles])
                continue
            again = next((each for each in itertools.chain(*singles) if self.has(f"{each}.weight")), None)
            if again is not None:
                raise CheckpointError(
                    f"{self.checkpoint.path}: holds experts twice, stacked as {name} and singly as {again}.weight; "
                    "expected one of the two, for nothing says which counts. Remove those that a conversion left "
                    "behind."
                )
            self._expect(name, (spec.count, len(parts) * n, k))
            found.append(self._stack(name, len(parts)))
        weights = [tuple(itertools.chain(*members)) for members in zip(*found, strict=True)]
        return make_experts(weights, self.dtype, self.device, spec.limit)

    def tied(self, embedding: Tensor) -> PackedLinear:
        """A vocabulary head that shares the embedding's weight."""
        return PackedLinear([LinearWeight("lm_head", embedding, rounded=False)], self.dtype, self.device)

    def _stack(self, name: str, parts: int) -> Iterator[tuple[LinearWeight, ...]]:
        """Each expert's matrices of a stack, which holds `parts` of them one below the other."""
        module = module_of(name)
        decided = self.plan.by_name[module]
        rounding = self._rounding(decided)
        if decided.weight == "fp8" and decided.scale is not None:
            data, scale, block = self.checkpoint.scaled(name)
            for codes, scales in zip(data, scale, strict=True):
                rows = len(codes) // parts
                grid = [self._rows(ScaledTensor(codes, scales, block[1:]), i * rows, rows, name) for i in range(parts)]
                yield tuple(LinearWeight(module, value, *rounding) for value in grid)
            return
        singles = iter(single_experts(self.checkpoint.tensors[name], self.checkpoint.config))
        for group in zip(*[singles] * parts, strict=True):
            held = [self._plain(info, partial(plain_bands, info), decided.weight == "fp8") for _, info in group]
            yield tuple(LinearWeight(module, value, *rounding) for value in held)

    def _rows(self, whole: ScaledTensor, start: int, rows: int, name: str) -> ScaledTensor:
        """A band of a matrix's rows, whole blocks of it."""
        height = whole.block[0]
        if height >= whole.shape[0]:
            return ScaledTensor(whole.data[start : start + rows], whole.scale, (rows, whole.block[1]))
        if start % height:
            raise CheckpointError(
                f"{self.checkpoint.tensors[name].file}: tensor {name} has scales of blocks of {height} rows, and its "
                f"second matrix begins at row {start}: expected a multiple. Export the experts one by one."
            )
        first = start // height
        return ScaledTensor(
            whole.data[start : start + rows], whole.scale[first : first - (-rows // height)], whole.block
        )

    def _weight(self, module: str, shape: tuple[int, int]) -> LinearWeight:
        name = f"{module}.weight"
        self._expect(name, shape)
        decided = self.plan.by_name[module]
        value: ScaledTensor | Unread
        if decided.weight != "fp8" or decided.scale is None:
            bands = partial(self.checkpoint.bands, name)
            value = self._plain(self.checkpoint.tensors[name], bands, decided.weight == "fp8")
        elif keeps_codes(self.device):
            value = ScaledTensor(*self.checkpoint.scaled(name))
        else:
            value = Unread(shape, partial(self._fill_from_codes, name))
        return LinearWeight(module, value, *self._rounding(decided))

    def _rounding(self, decided: ModulePlan) -> tuple[bool, Rounding]:
        """Whether a module's input is rounded, and how."""
        rounded = decided.activation == "fp8" and self.activation_rounding
        stored = self._input_scale(decided.input_scale) if rounded and decided.input_scale is not None else None
        return rounded, Rounding(decided.activation_group if stored is None else 0, stored)

    def _input_scale(self, info: TensorInfo) -> float:
        """The scale stored for a module's activations, which must be one number that can be one."""
        values = self.checkpoint.dequantize(info.name).flatten().tolist()
        if len(values) != 1 or not 0 < values[0] < math.inf:
            found = f"{values[0]}" if len(values) == 1 else f"{len(values)} values"
            raise CheckpointError(
                f"{info.file}: tensor {info.name}, which scales activations, holds {found}; expected one finite "
                "positive number (transformers writes uninitialised memory here). Calibrate again, or load with "
                "activation_rounding=False."
            )
        return values[0]

    def _plain(self, info: TensorInfo, bands: Bands, at_load: bool) -> ScaledTensor | Unread:
        """A matrix that is stored without a scale, quantised as it is read where `at_load`."""
        if not at_load:
            return Unread(info.shape, partial(self._fill, info, bands))
        quantized = partial(self._quantized_bands, info, bands)
        if not keeps_codes(self.device):
            return Unread(info.shape, partial(_copy_bands, lambda: ((a, b, q.dequantize()) for a, b, q in quantized())))
        found = [codes for _, _, codes in quantized()]
        codes = torch.cat([band.data.view(torch.uint8) for band in found])
        return ScaledTensor(codes.view(found[0].data.dtype), torch.cat([band.scale for band in found]))

    @staticmethod
    def _quantized_bands(info: TensorInfo, bands: Bands) -> Iterator[tuple[int, int, ScaledTensor]]:
        """(first row, row after the last, those rows in FP8), whole blocks at a time."""
        for start, stop, values in bands(multiple=BLOCK[0]):
            yield start, stop, quantize_block(values, name=f"{info.file}: {info.name}")

    def _fill_from_codes(self, name: str, out: Tensor) -> None:
        """Write the values of a weight that is stored as FP8 to `out` [n, k]."""
        _copy_bands(partial(self.checkpoint.bands, name), out)

    def _fill(self, info: TensorInfo, bands: Bands, out: Tensor) -> None:
        """Write a tensor's values to `out`, a band at a time. They must be real numbers: one NaN would make every token
        of a run id 0."""
        if not info.dtype.startswith(("BF16", "F16", "F32", "F64", "F8_")):
            raise CheckpointError(
                f"{info.file}: tensor {info.name} is stored as {info.dtype}; expected BF16, F16, F32 or FP8 with a "
                "scale. Bytes of an old FP8 writer or a packed format are not read as numbers; export it again."
            )
        rows = out.view(-1, out.shape[-1])
        for start, stop, values in bands():
            # the extremes are NaN where any value is, and need no memory of their own
            if not all(map(math.isfinite, map(float, values.aminmax()))):
                self._refuse(info.name)
            rows[start:stop].copy_(values)

    def _refuse(self, name: str) -> None:
        """Raises CheckpointError for a tensor with values that are no numbers, having counted all of them."""
        info, value = self.checkpoint.tensors[name], self.checkpoint.dequantize(name)
        wrong = ~value.isfinite()
        raise CheckpointError(
            f"{info.file}: tensor {name}: {int(wrong.sum())} of {value.numel()} values are NaN or infinite, "
            f"expected none; the first is at {wrong.nonzero()[0].tolist()}. The export is damaged; download or "
            "convert it again."
        )

    def _expect(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"{self.checkpoint.path}: tensor {name} is missing; the config asks for it with shape {list(shape)}. "
                "If the checkpoint was converted, convert it again without dropping this tensor."
            )
        if tuple(info.shape) != shape:
            raise CheckpointError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}; the config asks for {list(shape)}"
            )


def _copy_bands(bands: Bands, out: Tensor) -> None:
    for start, stop, values in bands():
        out[start:stop].copy_(values)
