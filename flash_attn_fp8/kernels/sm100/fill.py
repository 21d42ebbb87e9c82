"""Rows of packed outputs that belong to no sequence: 0, with LSE -inf.

They lie before the first sequence and after the last; mostly there are none.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.kernels.sm100.geometry import WARP
from flash_attn_fp8.kernels.sm100.schedule import part_of


@cute.jit
def fill_role(ctx: Context):
    """One warp of every CTA; a lane takes a row of a head."""
    starts, out = ctx.tensors.cu_seqlens_q, ctx.tensors.out
    parts = ctx.scalars.num_splits if const_expr(ctx.geometry.spec.split) else 1
    total, heads = out.shape[len(out.shape) - 3], out.shape[len(out.shape) - 2]
    before = starts[0]
    last = starts[starts.shape[0] - 1]
    rows = (before + total - last) * heads
    # By CTA, not by unit of work: the two of a pair share these as well.
    index = cute.arch.block_idx()[0] * WARP + cute.arch.lane_idx()
    while index < rows * parts:
        part, rest = index // rows, index % rows
        row, head = rest // heads, rest % heads
        if row >= before:
            row += last - before
        _fill(ctx, part, row, head)
        index += cute.arch.grid_dim()[0] * WARP


@cute.jit
def _fill(ctx: Context, part: Int32, row: Int32, head: Int32):
    target = part_of(ctx, ctx.tensors.out, part)[row, head, None]
    zero = Float32(0.0).to(ctx.out_dtype)
    for i in cutlass.range_constexpr(ctx.geometry.head_dim_v):
        target[i] = zero
    if const_expr(ctx.geometry.spec.writes_lse):
        part_of(ctx, ctx.tensors.lse, part)[head, row] = -Float32.inf
