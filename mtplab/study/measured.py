"""Constants of the cost model from what was measured: the JSON of `python -m mtplab.bench kernels`, or a few numbers.

Reads a document; measures nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from mtplab.checkpoint.strict_json import read_json_object
from mtplab.errors import CheckpointError, ConfigError
from mtplab.study.cost import Constants
from mtplab.study.gpus import Gpu, by_device_name

__all__ = ["constants_of", "read_measured"]

_MEGA = 1 << 20


def read_measured(path: str | Path, gpu: Gpu) -> tuple[Constants, dict[str, str]]:
    """Constants and, for each that was measured, how. Raises ConfigError for a file that is not such a document, or is
    another GPU's."""
    try:
        document = read_json_object(Path(path), "the JSON of mtplab.bench kernels")
    except CheckpointError as problem:
        raise ConfigError(f"{problem} Give what `python -m mtplab.bench kernels -o FILE` writes.") from None
    return constants_of(document, gpu, str(path))


def constants_of(document: Any, gpu: Gpu, name: str = "measured") -> tuple[Constants, dict[str, str]]:
    """The same from what the file holds: bench rows, or a flat dict of constants."""
    if not isinstance(document, Mapping):
        raise ConfigError(f"{name}: holds {type(document).__name__}; expected an object with rows, or with constants")
    if "rows" not in document:
        return Constants.of(document), {key: name for key in document}
    machine = document.get("machine")
    device = machine.get("gpu") if isinstance(machine, Mapping) else None
    if not isinstance(device, str) or by_device_name(device) != gpu:
        raise ConfigError(f"{name}: was measured on {device!r:.60}; expected {gpu.name}, the GPU that was asked for")
    found = _from_rows(document["rows"], gpu, name)
    if not found:
        raise ConfigError(f"{name}: no row in it has a time that says something of {gpu.name}; measure again")
    return Constants.of(found), {key: f"{name} on {device}" for key in found}


def _from_rows(rows: Any, gpu: Gpu, name: str) -> dict[str, float]:
    """Of each product the best contestant, of all products the median."""
    try:
        timed = [row for row in rows if row["seconds"] is not None]
        products: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        for row in timed:
            if row["n"] and not row["name"].startswith("quantise"):
                products.setdefault((row["n"], row["k"], row["m"]), []).append(row)
        reads = [
            max(row["gbytes"] for row in group) / (1e3 * gpu.bandwidth)
            for (n, k, m), group in products.items()
            if m <= 16 and n * k >= 64 * _MEGA
        ]
        sums = [
            max(row["tflops"] / gpu.rate("bf16" if "BF16" in row["name"] else "fp8") for row in group)
            for (n, k, m), group in products.items()
            if m >= 2048 and n >= 4096 and k >= 4096
        ]
        found = {"bandwidth": _middle(reads), "compute": _middle(sums)}
        for key, begins in (("cache_bandwidth", "attend"), ("state_bandwidth", "delta rule")):
            found[key] = _middle(
                [row["gbytes"] / (1e3 * gpu.bandwidth) for row in timed if row["name"].startswith(begins)]
            )
        if found["bandwidth"] is not None:
            rate = 1e12 * gpu.bandwidth * found["bandwidth"]
            # what a small product takes beyond its bytes
            over = [
                min(row["seconds"][1] - 1e9 * row["gbytes"] * row["seconds"][1] / rate for row in group)
                for (n, k, m), group in products.items()
                if m <= 4 and n * k <= 16 * _MEGA
            ]
            found["product_latency"] = max(0.0, median(over)) if over else None
    except (KeyError, TypeError, IndexError, AttributeError) as problem:
        raise ConfigError(f"{name}: its rows are not those of mtplab.bench kernels ({problem!r:.80})") from None
    return {key: value for key, value in found.items() if value is not None}


def _middle(shares: list[float]) -> float | None:
    # what lies in a cache can be read faster than the memory gives it
    return min(1.0, median(shares)) if shares else None
