"""Rows of packed outputs that belong to no sequence: 0, with LSE -inf.

They lie before the first sequence and after the last; mostly there are none.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.kernels.sm100.geometry import WARP


@cute.jit
def fill_role(ctx: Context):
    """One warp of every CTA; a lane takes a row of a head."""
    starts, out = ctx.tensors.cu_seqlens_q, ctx.tensors.out
    parts = ctx.scalars.num_splits if const_expr(ctx.geometry.spec.split) else 1
    total, heads = out.shape[len(out.shape) - 3], out.shape[len(out.shape) - 2]
    before = starts[0]
    last = starts[starts.shape[0] - 1]
    rows = (before + total - last) * heads
    index = ctx.first * WARP + cute.arch.lane_idx()
    while index < rows * parts:
        part, rest = index // rows, index % rows
        row, head = rest // heads, rest % heads
        if row >= before:
            row += last - before
        _fill(ctx, part, row, head)
        index += ctx.stride * WARP


@cute.jit
def _fill(ctx: Context, part: Int32, row: Int32, head: Int32):
    split = ctx.geometry.spec.split
    out, lse = ctx.tensors.out, ctx.tensors.lse
    target = out[part, row, head, None] if const_expr(split) else out[row, head, None]
    zero = Float32(0.0).to(ctx.out_dtype)
    for i in cutlass.range_constexpr(ctx.geometry.head_dim_v):
        target[i] = zero
    if const_expr(ctx.geometry.spec.writes_lse):
        if const_expr(split):
            lse[part, head, row] = -Float32.inf
        else:
            lse[head, row] = -Float32.inf
