"""GPUs and the sizes of real models' products, as their makers publish them.

A catalogue: knows no arithmetic and measures nothing. Rates are dense (a datasheet that gives them with 2:4 sparsity is
halved) and with float32 accumulation. Links are one direction, of one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtplab.errors import ConfigError

__all__ = ["GPUS", "SHAPES", "GemmShape", "Gpu", "by_device_name", "gpu", "shape_of"]


@dataclass(frozen=True)
class Gpu:
    """One GPU: dense matrix rates in TFLOP/s, memory bandwidth in TB/s, memory in GB, link to its neighbours in GB/s.

    A card without FP8 units multiplies FP8 weights in BF16, and its `fp8` is that rate. `fp4` None: likewise products
    of 4-bit weights.
    """

    name: str
    fp8: float
    bf16: float
    bandwidth: float
    memory: int
    source: str
    link: float
    fp4: float | None = None
    fast_link: bool = True  # NVLink or Infinity Fabric; False: PCIe

    def rate(self, dtype: str) -> float:
        """TFLOP/s of "fp8", "bf16" or "fp4"."""
        return {"fp8": self.fp8, "bf16": self.bf16, "fp4": self.fp4 or self.bf16}[dtype]


GPUS = {
    found.name: found
    for found in (
        Gpu("H100 SXM", 1979, 989, 3.35, 80, "NVIDIA H100 datasheet, halved for sparsity", 450),
        Gpu("H200 SXM", 1979, 989, 4.8, 141, "NVIDIA H200 datasheet, halved for sparsity", 450),
        Gpu("H20", 296, 148, 4.0, 96, "NVIDIA H20 datasheet", 450),
        Gpu("B200", 4500, 2250, 8.0, 180, "NVIDIA DGX B200 datasheet, an eighth of it, halved for sparsity", 900, 9000),
        Gpu("B300", 4500, 2250, 8.0, 288, "NVIDIA DGX B300 datasheet, an eighth of it, dense", 900, 13500),
        Gpu("GB200", 5000, 2500, 8.0, 186, "NVIDIA GB200 NVL72 datasheet, half a superchip, dense", 900, 10000),
        Gpu("GB300", 5000, 2500, 8.0, 279, "NVIDIA GB300 NVL72 datasheet, a 72nd of it, dense", 900, 15000),
        Gpu("L40S", 733, 362, 0.864, 48, "NVIDIA L40S datasheet, halved for sparsity", 32, fast_link=False),
        Gpu("RTX 3090", 71, 71, 0.936, 24, "NVIDIA GA102 architecture paper, no FP8 units", 32, fast_link=False),
        Gpu("RTX 4090", 330, 165, 1.008, 24, "NVIDIA AD102 architecture paper, float32 sums", 32, fast_link=False),
        Gpu(
            "RTX 5090", 419, 209.5, 1.792, 32, "NVIDIA RTX Blackwell architecture paper, float32 accumulation",
            64, 1676, False,
        ),
        Gpu(
            "RTX PRO 6000", 1007, 503.8, 1.792, 96, "NVIDIA RTX PRO Blackwell architecture paper, halved for sparsity",
            64, 2015, False,
        ),
        Gpu("MI300X", 2615, 1307, 5.3, 192, "AMD Instinct MI300X datasheet", 448),
        Gpu("MI325X", 2615, 1307, 6.0, 256, "AMD Instinct MI325X datasheet", 448),
        Gpu("MI355X", 5033, 2516, 8.0, 288, "AMD Instinct MI355X datasheet", 537, 10066),
        Gpu("Arc Pro B60", 98, 98, 0.456, 24, "Intel Arc Pro B60 datasheet, half its INT8 rate", 32, fast_link=False),
        Gpu("Arc Pro B70", 183, 183, 0.608, 32, "Intel Arc Pro B70 datasheet, half its INT8 rate", 32, fast_link=False),
    )
}  # fmt: skip

# cards of the same name that are slower
_LESSER = {"PCIe", "NVL", "Laptop", "Max-Q", "Mobile"}


def gpu(name: str) -> Gpu:
    """The GPU of that name; "h200" means "H200 SXM". Raises ConfigError, listing those there are, for another."""
    wanted = name.casefold().removesuffix(" sxm") if isinstance(name, str) else None
    found = next((card for card in GPUS.values() if card.name.casefold().removesuffix(" sxm") == wanted), None)
    if found is None:
        raise ConfigError(f"GPU {name!r:.60} is not in the catalogue; it has {', '.join(GPUS)}")
    return found


def by_device_name(name: str) -> Gpu | None:
    """The catalogue's entry for what a driver calls a device, such as "NVIDIA H200"; None where it has none."""
    words = set(name.split())
    if words & _LESSER:
        return None
    return next((card for card in GPUS.values() if set(card.name.removesuffix(" SXM").split()) <= words), None)


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
