"""Which kernels every launcher really launches on one GPU, as the compiler would get them, against their variants.

    python tests/kernel_launches.py gfx942

Triton's own binder looks at the arguments, for the target's own backend, and nothing is compiled or run; tensors are
on the CPU and their contents do not matter. Prints JSON: launches without a variant, and variants without a launch.
Wants a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from mtplab.kernels import (
    acceptance,
    attention,
    conv_update,
    delta_rule,
    gemm,
    gemm_grouped,
    gemm_plan,
    kv_write,
    launch,
    quantize,
    silu_quantize,
)
from mtplab.kernels.aot import find_variants
from mtplab.kernels.targets import TARGETS, Target
from mtplab.kernels.variants import Variant

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
# more storage than AMD's compiler bounds to 32 bits; no page of it is ever touched
LARGE = torch.empty(2**31 + 2**24, dtype=torch.uint8)


class Launches:
    """Stands in for `JITFunction.run`: keeps what a launch would be compiled from."""

    def __init__(self, target: Target):
        self.target = target
        self.backend = make_backend(GPUTarget(target.backend, target.arch, target.warp))
        self.binders: dict[JITFunction, Any] = {}
        self.seen: dict[str, set[str]] = {}

    def run(self, kernel: JITFunction, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
        if kernel not in self.binders:
            self.binders[kernel] = create_function_from_signature(kernel.signature, kernel.params, self.backend)
        bound, special, rest = self.binders[kernel](*arguments, **named)
        options, signature, constants, told = kernel._pack_args(self.backend, named, bound, special, rest)
        names = kernel.arg_names
        self.keep(
            kernel,
            {name: kind for name, kind in signature.items() if kind != "constexpr"},
            {names[i]: value for (i,), value in constants.items()},
            {names[i]: value for (i,), value in told.items() if value},
            options,
        )

    def keep(self, kernel: JITFunction, *what: Any) -> None:
        self.seen.setdefault(kernel.__name__, set()).add(_written(*what))

    def listed(self, variants: list[Variant]) -> dict[str, set[str]]:
        """The variants, written as the launches are."""
        found: dict[str, set[str]] = {}
        for x in variants:
            options = {"num_warps": x.num_warps, "num_stages": x.num_stages, **x.options}
            what = (x.signature, x.constants, x.attributes(self.target), self.backend.parse_options(options))
            found.setdefault(x.kernel.__name__, set()).add(_written(*what))
        return found


def _written(signature: dict, constants: dict, told: dict, options: Any) -> str:
    parts = [*(sorted(part.items(), key=str) for part in (signature, constants, told)), sorted(vars(options).items())]
    return " ".join(map(str, parts))


def some(*shape: int, dtype: torch.dtype = torch.float32, large: bool = False) -> torch.Tensor:
    """A tensor of any content; `large`: a part of more than 2 GiB."""
    if not large:
        return torch.empty(shape, dtype=dtype)
    count = torch.Size(shape).numel() * dtype.itemsize
    return LARGE[:count].view(dtype).view(shape)


def sizes(target: Target) -> tuple[bool, ...]:
    return (False, True) if target.backend == "hip" else (False,)


def launch_quantize(target: Target) -> None:
    codes = FP8[target.e4m3], FP8[target.e5m2]
    for x, m, k in itertools.product(FLOATS, (1, 2, 16, 63, 64, 65, 1024), (1, 50, 128, 4096)):
        for dtype, group, power, by_group in itertools.product(codes, (128, None), (False, True), (False, True)):
            quantize.quantize(some(m, k, dtype=x), group, dtype, power, by_group)
        for power in (False, True):
            silu_quantize.silu_quantize(some(m, 2 * k, dtype=x), codes[0], power)
    # one row of a larger tensor, whose stride torch may let be any number
    quantize.quantize(some(1, 4096).as_strided((1, 4096), (7, 1)), dtype=codes[0])


def launch_gemm(target: Target) -> None:
    dtype = FP8[target.e4m3]
    shapes = itertools.product((1, 16, 17, 64, 65, 2000), (50, 64, 4096), (50, 256, 4096))
    for (m, n, k), y, large in itertools.product(shapes, FLOATS, sizes(target)):
        blocks, x = [-(-size // 128) for size in (n, k)], some(m, k, dtype=dtype)
        w = some(n, k, dtype=dtype, large=large)
        for residual, scale in itertools.product((None, some(m, n, dtype=y)), (some(m, blocks[1]), None)):
            x_scale = some(blocks[1], m).t() if scale is None else scale
            gemm.gemm_block(x, x_scale, w, some(*blocks), y, residual)
        for x_scale, w_scale in itertools.product((some(m, 1), some()), (some(n, 1), some())):
            gemm.gemm_scaled(x, x_scale, w, w_scale, y)


def launch_grouped(target: Target) -> None:
    dtype = FP8[target.e4m3]
    for tokens, n, k, y in itertools.product((1, 16, 60, 500), (50, 64), (50, 256), FLOATS):
        routing = gemm_grouped.route(torch.arange(tokens * 2).view(tokens, 2) % 3, 3)
        blocks, x = [-(-size // 128) for size in (n, k)], some(tokens * 2, k, dtype=dtype)
        for large in sizes(target):
            w = some(3, n, k, dtype=dtype, large=large)
            gemm_grouped.gemm_grouped(x, some(tokens * 2, blocks[1]), w, some(3, *blocks), routing, y)


def caches(d: int, dtypes: tuple[torch.dtype, ...], large: bool, **shape: int) -> Iterator[tuple]:
    """Codes and meta of every format: laid out by head and by token, one page a sequence and many."""
    heads, pages, slots = shape["heads"], shape["pages"], shape["slots"]
    kinds = [(x, None, d) for x in (*dtypes, torch.float8_e4m3fn, torch.float8_e5m2)]
    kinds += [(torch.uint8, meta, width) for meta in FLOATS for width in (d, d // 2)]
    for dtype, meta, width in kinds:
        for by_token in (False, True):
            lines = (slots, heads) if by_token else (heads, slots)
            both = [some(2, pages, *lines, width, dtype=dtype, large=large)]
            both.append(some(2, pages, *lines, 2, dtype=meta) if meta else None)
            yield tuple(x.transpose(2, 3) if by_token and x is not None else x for x in both)


def launch_cache(target: Target) -> None:
    for d, large, (b, t, group) in itertools.product(
        (16, 64, 80, 128, 256), sizes(target), ((1, 1, 1), (3, 5, 8), (16, 2, 4))
    ):
        positions = torch.zeros(b, t, dtype=torch.int64)
        for x in FLOATS:
            for codes, meta in caches(d, FLOATS, large, heads=2, pages=b, slots=48):
                rows = some(b, t, 2, d, dtype=x)
                kv_write.write_kv(rows, rows, codes, meta, positions)
                kv_write.write_kv(rows[:, :1], rows[:, :1], codes, meta, positions[:, t - 1 :])
            for codes, meta in caches(d, (x,), large, heads=2, pages=b, slots=1024):
                if meta is None or x in (torch.float32, meta.dtype):
                    q = some(b, t, 2 * group, d, dtype=x)
                    for longest in (1, 1024):
                        attention.attend_cache(q, codes, meta, positions, longest=longest)


def launch_states(target: Target) -> None:
    for x, kept, dk, large in itertools.product(
        FLOATS, (torch.float32, torch.bfloat16), (16, 64, 96, 128, 256), sizes(target)
    ):
        for b, t, normalize, slots in itertools.product((1, 3), (1, 4), (False, True), (False, True)):
            ring = some(t, b * 2, dk, 32, dtype=kept, large=large)
            wide = some(b, t, 2 * dk + 64, dtype=x)
            parts = zip(wide.split((dk, dk, 64), 2), (dk, dk, 32), strict=True)
            q, k, v = (part.unflatten(2, (-1, size)) for part, size in parts)
            at = torch.zeros(b, dtype=torch.int64) if slots else None
            # a state apart is a slot's size, and the ring the first to be large
            for own in (False, True):
                state = some(*(ring if slots else ring[0]).shape, dtype=kept) if own else ring if slots else ring[0]
                delta_rule.delta_rule(
                    q, k, v, some(b, t, 2), some(b, t, 2), state, ring, slots=at, normalize=normalize, scale=1
                )
    for x, width, c, (b, t) in itertools.product(FLOATS, (2, 3, 4), (48, 50, 512), ((1, 1), (3, 1), (2, 5), (16, 16))):
        state, weight = some(b, width - 1, c, dtype=x), some(width, c, dtype=x)
        conv_update.conv_update(some(b, t, c, dtype=x), state, weight, some(b, width - 1 + t, c, dtype=x))
        if t == 1:
            conv_update.conv_update(some(b, t, 2 * c, dtype=x)[..., :c], state, weight)


def launch_acceptance(target: Target) -> None:
    for b, k, v, ragged in itertools.product((1, 2, 16), (0, 1, 15), (50, 4096, 10000), (False, True)):
        drafts, count = torch.zeros(b, k, dtype=torch.int64), torch.zeros(b, dtype=torch.int64)
        given = count if ragged else None
        for x in FLOATS:
            acceptance.emit_greedy(drafts, some(b, k + 1, v, dtype=x), given)
        for x, sampled in itertools.product((torch.float32, torch.float64), (False, True)):
            q = some(b, k, v, dtype=x) if sampled else None
            for seed in (1, 16, -1, 2**63):
                acceptance.emit_sampled(drafts, some(b, k + 1, v, dtype=x), q, seed, count, count, given)


def main(name: str) -> None:
    target = TARGETS[name]
    launches = Launches(target)
    JITFunction.run = lambda kernel, *arguments, **named: launches.run(kernel, *arguments, **named)
    launch._decide = lambda device: ("triton", "")
    for module in (attention, gemm, gemm_grouped, gemm_plan):
        module.target = lambda device: target
    for drive in (launch_quantize, launch_gemm, launch_grouped, launch_cache, launch_states, launch_acceptance):
        drive(target)
    listed = launches.listed(find_variants(target))
    kernels = sorted(listed.keys() | launches.seen.keys())
    differ = {
        kernel: {
            "launched, not listed": sorted(launches.seen.get(kernel, set()) - listed.get(kernel, set())),
            "listed, not launched": sorted(listed.get(kernel, set()) - launches.seen.get(kernel, set())),
        }
        for kernel in kernels
    }
    print(json.dumps({"kernels": kernels, "differ": {k: v for k, v in differ.items() if any(v.values())}}))


if __name__ == "__main__":
    main(sys.argv[1])
