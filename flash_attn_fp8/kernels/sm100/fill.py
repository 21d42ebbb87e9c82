"""Rows of packed outputs that belong to no sequence: 0, with LSE -inf.

They lie before the first sequence and after the last; mostly there are none.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.kernels.sm100.geometry import VECTOR
from flash_attn_fp8.kernels.sm100.schedule import part_of
from flash_attn_fp8.specs import WARP


@cute.jit
def fill_role(ctx: Context):
    """One warp of every CTA; its lanes share a row of a head, or a few where rows are short."""
    starts, out = ctx.tensors.cu_seqlens_q, ctx.tensors.out
    parts = ctx.scalars.num_splits if const_expr(ctx.geometry.spec.split) else 1
    total, heads = out.shape[len(out.shape) - 3], out.shape[len(out.shape) - 2]
    before = starts[0]
    last = starts[starts.shape[0] - 1]
    rows = (before + total - last) * heads
    sharing = min(_pieces(ctx), WARP)
    at_once = WARP // sharing
    lane = cute.arch.lane_idx()
    # By CTA, not by unit of work: the two of a pair share these as well.
    index = cute.arch.block_idx()[0] * at_once + lane // sharing
    if lane >= at_once * sharing:
        index = rows * parts  # a lane too many
    while index < rows * parts:
        part, rest = index // rows, index % rows
        row, head = rest // heads, rest % heads
        if row >= before:
            row += last - before
        _fill(ctx, part, row, head, lane % sharing, sharing)
        index += cute.arch.grid_dim()[0] * at_once


def _pieces(ctx) -> int:
    """Stores of an output row."""
    return ctx.geometry.head_dim_v * ctx.geometry.out_element // VECTOR


@cute.jit
def _fill(ctx, part: Int32, row: Int32, head: Int32, first: Int32, step: cutlass.Constexpr):
    """Some pieces of a row: every `step`th from the first on."""
    elements = cute.make_layout(VECTOR // ctx.geometry.out_element)
    zeros = cute.make_rmem_tensor(elements, ctx.out_dtype)
    zeros.fill(0.0)
    target = part_of(ctx, ctx.tensors.out, part)[row, head, None]
    target = cute.logical_divide(target, elements)
    for offset in cutlass.range_constexpr(0, _pieces(ctx), step):
        if offset + first < _pieces(ctx):
            cute.autovec_copy(zeros, target[None, offset + first])
    if const_expr(ctx.geometry.spec.writes_lse):
        lse = part_of(ctx, ctx.tensors.lse, part)
        if first == 0:
            lse[head, row] = NEG_INF
