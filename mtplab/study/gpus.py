"""GPUs and the sizes of real models' products, as their makers publish them.

A catalogue: knows no arithmetic and measures nothing. Rates are dense (a datasheet that gives them with 2:4 sparsity is
halved) and with float32 accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtplab.errors import ConfigError

__all__ = ["GPUS", "SHAPES", "Gpu", "GemmShape", "gpu", "shape_of"]


@dataclass(frozen=True)
class Gpu:
    """One GPU: dense matrix rates in TFLOP/s, memory bandwidth in TB/s, memory in GB."""

    name: str
    fp8: float
    bf16: float
    bandwidth: float
    memory: int
    source: str

    def rate(self, dtype: str) -> float:
        """TFLOP/s of "fp8" or "bf16"."""
        return {"fp8": self.fp8, "bf16": self.bf16}[dtype]


GPUS = {
    found.name: found
    for found in (
        Gpu("H100 SXM", 1979, 989, 3.35, 80, "NVIDIA H100 datasheet, halved for sparsity"),
        Gpu("H200 SXM", 1979, 989, 4.8, 141, "NVIDIA H200 datasheet, halved for sparsity"),
        Gpu("B200", 4500, 2250, 8.0, 180, "NVIDIA DGX B200 datasheet, an eighth of it, halved for sparsity"),
        Gpu("L40S", 733, 362, 0.864, 48, "NVIDIA L40S datasheet, halved for sparsity"),
        Gpu("RTX 5090", 419, 209.5, 1.792, 32, "NVIDIA RTX Blackwell architecture paper, float32 accumulation"),
        Gpu("MI300X", 2615, 1307, 5.3, 192, "AMD Instinct MI300X datasheet"),
        Gpu("MI355X", 5033, 2516, 8.0, 288, "AMD Instinct MI355X datasheet"),
    )
}


def gpu(name: str) -> Gpu:
    """The GPU of that name. Raises ConfigError, listing those there are, for another."""
    if not isinstance(name, str) or name not in GPUS:
        raise ConfigError(f"GPU {name!r:.60} is not in the catalogue; it has {', '.join(GPUS)}")
    return GPUS[name]


def shape_of(name: str, model: str | None = None) -> GemmShape:
    """The first shape of that name, of `model` if one is given. Raises ConfigError, listing those there are."""
    found = next((shape for shape in SHAPES if shape.name == name and model in (None, shape.model)), None)
    if found is None:
        raise ConfigError(f"product {name!r:.60} is not in the catalogue; it has {'; '.join(map(str, SHAPES))}")
    return found


@dataclass(frozen=True)
class GemmShape:
    """One weight [n, k] of a real model; `experts` copies of it where it is one expert's."""

    model: str
    name: str
    n: int
    k: int
    experts: int = 1

    def __str__(self) -> str:
        return f"{self.model} {self.name} [{self.n}, {self.k}]"


# from the models' config.json: widths of projections that share an input are added up
SHAPES = (
    GemmShape("Qwen3.5-27B", "attention qkv", 14336, 5120),
    GemmShape("Qwen3.5-27B", "attention out", 5120, 6144),
    GemmShape("Qwen3.5-27B", "delta rule qkvz", 16384, 5120),
    GemmShape("Qwen3.5-27B", "MLP gate, up", 34816, 5120),
    GemmShape("Qwen3.5-27B", "MLP down", 5120, 17408),
    GemmShape("Qwen3.5-27B", "mtp.fc", 5120, 10240),
    GemmShape("Qwen3.5-35B-A3B", "attention qkv", 9216, 2048),
    GemmShape("Qwen3.5-35B-A3B", "delta rule qkvz", 12288, 2048),
    GemmShape("Qwen3.5-35B-A3B", "attention out", 2048, 4096),
    GemmShape("Qwen3.5-35B-A3B", "expert gate, up", 1024, 2048, 256),
    GemmShape("Qwen3.5-35B-A3B", "expert down", 2048, 512, 256),
    GemmShape("DeepSeek-V3", "attention q_a, kv_a", 2112, 7168),
    GemmShape("DeepSeek-V3", "attention q_b", 24576, 1536),
    GemmShape("DeepSeek-V3", "attention out", 7168, 16384),
    GemmShape("DeepSeek-V3", "dense MLP gate, up", 36864, 7168),
    GemmShape("DeepSeek-V3", "expert gate, up", 4096, 7168, 256),
    GemmShape("DeepSeek-V3", "expert down", 7168, 2048, 256),
)
