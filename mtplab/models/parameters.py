"""Parameters of a model, taken from a checkpoint by the names on disk and checked against the shapes expected.

The one place where names on disk become weights in memory, and where a plan's decision (FP8 or not, input rounded or
not) is carried out. Knows nothing of what a model does with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mtplab.checkpoint import Checkpoint, Plan, TensorInfo
from mtplab.checkpoint.experts import single_experts
from mtplab.checkpoint.values import read_tensor
from mtplab.errors import CheckpointError
from mtplab.quant.block import ScaledTensor, quantize_block
from mtplab.quant.experts import Experts, make_experts
from mtplab.quant.linear import LinearWeight, PackedLinear
from mtplab.quant.rounding import Rounding

# the text tower's names, alone or inside the multimodal wrapper
_ROOTS = ("model.", "model.language_model.")


class Parameters:
    """Reads one checkpoint's tensors under one plan, in one compute dtype, onto one device."""

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, dtype: torch.dtype, device: torch.device, activation_rounding: bool
    ):
        self.checkpoint, self.plan, self.dtype, self.device = checkpoint, plan, dtype, device
        self.activation_rounding = activation_rounding
        found = [r for r in _ROOTS if f"{r}embed_tokens.weight" in checkpoint.tensors]
        if len(found) != 1:
            raise CheckpointError(
                f"{checkpoint.path}: found {'both' if found else 'neither'} of "
                f"{' and '.join(f'{r}embed_tokens.weight' for r in _ROOTS)}; expected exactly one, the embedding of "
                "the text model"
            )
        self.root = found[0]

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name."""
        return name in self.checkpoint.tensors

    def vector(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor of this shape, in `dtype` or the compute dtype."""
        self._expect(name, shape)
        return self._values(name).to(dtype or self.dtype).to(self.device)

    def one_plus(self, name: str, size: int) -> Tensor:
        """1 + w of a zero-centred RMSNorm [size], in float32: 1 + w does not fit BF16's mantissa."""
        return 1.0 + self.vector(name, (size,), torch.float32)

    def linear(self, members: list[tuple[str, int]], in_features: int) -> PackedLinear:
        """Weights that share an input: (module name, out features) each, with the plan's dtype and rounding."""
        return PackedLinear([self._weight(n, (rows, in_features)) for n, rows in members], self.dtype, self.device)

    def experts(self, at: str, count: int, inner: int, hidden: int) -> Experts:
        """The experts at `at`: files hold them one by one, `{at}.{e}.gate_proj` and so on, or stacked [e, n, k] as
        `{at}.gate_up_proj` [count, 2·inner, hidden] (gate above up) and `{at}.down_proj` [count, hidden, inner]."""
        if self.has(f"{at}.gate_up_proj"):
            up, down = f"{at}.gate_up_proj", f"{at}.down_proj"
            self._expect(up, (count, 2 * inner, hidden))
            self._expect(down, (count, hidden, inner))
            weights = [
                (*gate_up, one) for gate_up, (one,) in zip(self._stack(up, 2), self._stack(down, 1), strict=True)
            ]
        else:
            shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
            weights = [
                tuple(self._weight(f"{at}.{e}.{name}", shape) for name, shape in shapes.items()) for e in range(count)
            ]
        return make_experts(weights, self.dtype, self.device)

    def tied(self, embedding: Tensor) -> PackedLinear:
        """A vocabulary head that shares the embedding's weight."""
        return PackedLinear([LinearWeight("lm_head", embedding, rounded=False)], self.dtype, self.device)

    def _stack(self, name: str, parts: int) -> Iterator[tuple[LinearWeight, ...]]:
        """Each expert's matrices of a stack, which holds `parts` of them one below the other."""
        decided = self.plan.by_name[name]
        rounded = decided.activation == "fp8" and self.activation_rounding
        rounding = Rounding(decided.activation_group)
        if decided.weight == "fp8" and decided.scale is not None:
            data, scale, block = self.checkpoint.scaled(name)
            for codes, scales in zip(data, scale, strict=True):
                rows = len(codes) // parts
                grid = [self._rows(ScaledTensor(codes, scales, block[1:]), i * rows, rows, name) for i in range(parts)]
                yield tuple(LinearWeight(name, value, rounded, rounding) for value in grid)
            return
        singles = iter(single_experts(self.checkpoint.tensors[name], self.checkpoint.config))
        for group in zip(*[singles] * parts, strict=True):
            found = []
            for _, info in group:
                value = self._finite(info, read_tensor(info).float())
                packed = quantize_block(value, name=f"{info.file}: {name}") if decided.weight == "fp8" else value
                found.append(LinearWeight(name, packed, rounded, rounding))
            yield tuple(found)

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
        if decided.weight != "fp8":
            value: Tensor | ScaledTensor = self._values(name)
        elif decided.scale is not None:
            value = ScaledTensor(*self.checkpoint.scaled(name))
        else:
            file = self.checkpoint.tensors[name].file
            value = quantize_block(self.checkpoint.dequantize(name), name=f"{file}: {name}")
        rounded = decided.activation == "fp8" and self.activation_rounding
        stored = self._input_scale(decided.input_scale) if rounded and decided.input_scale is not None else None
        return LinearWeight(module, value, rounded, Rounding(decided.activation_group if stored is None else 0, stored))

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

    def _values(self, name: str) -> Tensor:
        """A tensor's float32 values, which must be real numbers: one NaN would make every token of a run id 0."""
        info = self.checkpoint.tensors[name]
        if not info.dtype.startswith(("BF16", "F16", "F32", "F64", "F8_")):
            raise CheckpointError(
                f"{info.file}: tensor {name} is stored as {info.dtype}; expected BF16, F16, F32 or FP8 with a scale. "
                "Bytes of an old FP8 writer or a packed format are not read as numbers; export it again."
            )
        return self._finite(info, self.checkpoint.dequantize(name))

    @staticmethod
    def _finite(info: TensorInfo, value: Tensor) -> Tensor:
        finite = value.isfinite()
        if not bool(finite.all()):
            at = (~finite).nonzero()[0].tolist()
            raise CheckpointError(
                f"{info.file}: tensor {info.name}: {int((~finite).sum())} of {value.numel()} values are NaN or "
                f"infinite, expected none; the first is at {at}. The export is damaged; download or convert it again."
            )
        return value

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
