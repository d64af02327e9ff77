"""FP8 matrix products of mixture-of-experts layers: which rows go to which expert, and the launcher.

Knows nothing of how experts are chosen, nor of how their results are weighted and added. The torch reference is in
`gemm_reference.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from mtplab.kernels.gemm_plan import aligned, check_operands, check_target, operand
from mtplab.kernels.gemm_reference import gemm_grouped_reference
from mtplab.kernels.gemm_tiles import BLOCK, choose_grouped
from mtplab.kernels.launch import check, check_together, chosen, interpreted, step, target

__all__ = ["MOST_ROWS", "Routing", "gemm_grouped", "route"]

# of all experts' weights together, which the kernel counts in 32 bits
MOST_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert, s tokens with p experts each, t = s · p rows.

    token: int64 [t], the token whose row each is: `x[routing.token]` is what the first projection takes.
    slot: int64 [t], which of its token's p choices each is.
    offsets: int32 [e + 1]; rows offsets[i] to offsets[i + 1] are expert i's, and there may be none.
    """

    token: torch.Tensor
    slot: torch.Tensor
    offsets: torch.Tensor
    _tiles: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def experts(self) -> int:
        """Number of experts, chosen or not."""
        return len(self.offsets) - 1

    def tiles(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts' rows in tiles of at most `rows`: expert of each and its first row, both int32 [tiles].

        How many are needed is known on the GPU only, and asking would be waiting: there are as many as any routing may
        need, and those left over have expert -1.
        """
        if rows not in self._tiles:
            self._tiles[rows] = _tiles(self.offsets, len(self.token), rows)
        return self._tiles[rows]


def route(chosen_experts: torch.Tensor, experts: int) -> Routing:
    """Sort tokens by expert.

    Args:
        chosen_experts: int64 [s, p], the experts of each token, each 0 to experts - 1 (looked at on a CPU only, where
            it costs no waiting: rows of other numbers stay unwritten).
        experts: how many there are.

    A token's rows keep their order within an expert, so the same choice gives the same routing. Raises ValueError.
    """
    check("chosen_experts", chosen_experts, (None, None), (torch.int64,))
    if experts < 1:
        raise ValueError(f"experts is {experts}; expected at least one")
    flat = chosen_experts.reshape(-1)
    if flat.device.type == "cpu" and flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < experts:
        raise ValueError(f"chosen_experts has {int(flat.min())} to {int(flat.max())}; expected 0 to {experts - 1}")
    order = flat.argsort(stable=True)
    bounds = torch.arange(experts + 1, device=flat.device)
    offsets = torch.searchsorted(flat[order], bounds).int()
    width = chosen_experts.shape[1]
    return Routing(order // width, order % width, offsets)


def _tiles(offsets: torch.Tensor, t: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    experts = len(offsets) - 1
    count = (offsets.diff() + rows - 1) // rows
    ends = count.cumsum(0)
    # each expert with rows has at most one tile that is not full
    i_tile = torch.arange(t // rows + min(experts, t), device=offsets.device)
    expert = torch.searchsorted(ends, i_tile, right=True)
    last = expert.clamp_max(experts - 1)
    row = offsets[last] + (i_tile - ends[last] + count[last]) * rows
    return expert.masked_fill(expert == experts, -1).int(), row.int()


def gemm_grouped(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    w: torch.Tensor,
    w_scale: torch.Tensor,
    routing: Routing,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """x · wᵀ of block-scaled FP8, each row of x with its expert's w.

    Args:
        x: E4M3 codes [t, k], sorted by expert, k at least 1 (FNUZ on gfx942, see `fnuz.py`).
        x_scale: float32 [t, ceil(k / 128)], of any strides.
        w: E4M3 codes [e, n, k], contiguous, e · n at most MOST_ROWS.
        w_scale: float32 [e, ceil(n / 128), ceil(k / 128)].
        routing: of t rows to e experts, from `route`.
        out_dtype: BF16, FP16 or FP32.

    Returns: [t, n] of out_dtype, sums as `gemm_block` makes them. The same arguments give the same bits. A row's bits
    depend on that row, its expert's w and the tile, which t, e, n, k and the GPU choose; not on where the other rows
    go.

    Raises ValueError for shapes and dtypes other than these.
    """
    t, k = check_operands(x, w, out_dtype)
    experts, blocks = routing.experts, -(-k // BLOCK)
    check("w", w, (experts, None, k), (x.dtype,))
    n = w.shape[1]
    check("x", x, (len(routing.token), k), (x.dtype,))
    check("x_scale", x_scale, (t, blocks), (torch.float32,))
    check("w_scale", w_scale, (experts, -(-n // BLOCK), blocks), (torch.float32,))
    if experts * n > MOST_ROWS:
        raise ValueError(f"w has {experts} experts of {n} rows, {experts * n} in all; expected at most {MOST_ROWS}")
    check_together(x=x, x_scale=x_scale, w=w, w_scale=w_scale, offsets=routing.offsets)
    if chosen(x.device) == "reference":
        return gemm_grouped_reference(x, x_scale, w, w_scale, routing.offsets).to(out_dtype)
    y = torch.empty(t, n, dtype=out_dtype, device=x.device)
    if y.numel() == 0:
        return y
    interpreted()
    from mtplab.kernels.gemm_block_jit import constants
    from mtplab.kernels.gemm_grouped_jit import gemm_grouped as kernel

    check_target(x)
    if not w.is_contiguous():
        raise ValueError(f"w has strides {w.stride()}; expected contiguous experts")
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = choose_grouped(t, experts, aligned(n, x, w), target(x.device))
    expert, row = routing.tiles(tile.rows)
    unit = tile.unit
    kernel[(len(expert) * -(-n // tile.columns),)](
        operand(x, tile.rows, tile), operand(w.view(experts * n, k), tile.columns, tile), y, x_scale, w_scale,
        routing.offsets, expert, row, len(expert), n // unit, k // unit, step(x) // unit,
        *x_scale.stride(), *w_scale.stride(),
        **constants(tile), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y
