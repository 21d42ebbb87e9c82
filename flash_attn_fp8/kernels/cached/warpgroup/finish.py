"""The end of a CTA: warpgroups merge what they have of a row; normalise; store."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.merge import output_factor, output_row, write_lse
from flash_attn_fp8.kernels.cached.warpgroup.attend import (
    LOWEST,
    row_factors,
    row_numbers,
    row_of_lane,
)
from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.online import finished, sink_logit

_COLUMNS = 8  # that a thread stores at once


@cute.jit
def finish(ctx: Context, state):
    """Write output and LSE of the CTA's rows."""
    _share_sums(ctx, state)
    cute.arch.sync_threads()  # the rings are no longer in use
    _share_output(ctx, state)
    cute.arch.sync_threads()
    _store(ctx, state)


@cute.jit
def _share_sums(ctx, state):
    maxima, sums = (row_numbers(ctx, state.shared, which) for which in range(2))
    for eight in cutlass.range_constexpr(ctx.geometry.row_tiles):
        for i in cutlass.range_constexpr(2):
            total = state.row_sum[i, eight]
            for apart in cutlass.range_constexpr(2, 5):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << apart)
            if ctx.lane < 4:
                row = eight * 8 + ctx.lane * 2 + i
                row_max = state.row_max[i, eight]
                row_max = select(row_max == LOWEST, NEG_INF, row_max)
                maxima[row, ctx.m_warp], sums[row, ctx.m_warp] = row_max, total


def _of_all(ctx, memory):
    """(row, warp, maximum or sum, group) of the warpgroups that have the same rows."""
    g = ctx.geometry
    start = cute.recast_ptr(memory.numbers, dtype=Float32) + g.rows
    layout = cute.make_layout(
        (g.rows, 4, 2, g.spec.tile.key_warps),
        stride=(1, g.rows, 4 * g.rows, 8 * g.rows),
    )
    return cute.make_tensor(start, layout)


@cute.jit
def _merged(ctx, memory: cutlass.Constexpr, row):
    """(maximum, sum) of a row."""
    of_all, groups = _of_all(ctx, memory), ctx.spec.tile.key_warps
    highest = Float32(NEG_INF)
    for group in cutlass.range_constexpr(groups):
        highest = cute.arch.fmax(highest, of_all[row, 0, 0, group], nan=True)
    finite = select(highest == NEG_INF, Float32(0.0), highest)
    total = Float32(0.0)
    for group in cutlass.range_constexpr(groups):
        weight = cute.math.exp2(of_all[row, 0, 0, group] - finite, fastmath=True)
        of_warps = of_all[row, 0, 1, group] + of_all[row, 1, 1, group]
        of_warps = of_warps + (of_all[row, 2, 1, group] + of_all[row, 3, 1, group])
        total = total + weight * of_warps
    return highest, total


def _parts(ctx):
    """(column, row, group) of partial output."""
    g = ctx.geometry
    layout = cute.make_layout(
        (g.head_dim_v, g.rows, g.spec.tile.key_warps),
        stride=(1, g.part_stride, g.part_stride * g.rows),
    )
    return cute.make_tensor(cute.recast_ptr(ctx.rings, dtype=Float32), layout)


@cute.jit
def _share_output(ctx, state):
    """Each group's O in units of the common maximum; what normalises a row, and its LSE."""
    g = ctx.geometry
    of_rows, parts = row_factors(ctx, state.shared), _parts(ctx)
    first = (ctx.m_warp * 8 + ctx.lane // 4) * g.columns
    mine = cute.make_rmem_tensor(cute.make_layout(g.columns), Float32)
    for eight in cutlass.range_constexpr(g.row_tiles):
        for i in cutlass.range_constexpr(2):
            row = row_of_lane(ctx, eight, i)
            highest, total = _merged(ctx, state.shared, row)
            finite = select(highest == NEG_INF, Float32(0.0), highest)
            weight = cute.math.exp2(state.row_max[i, eight] - finite, fastmath=True)
            for column in cutlass.range_constexpr(g.columns):
                o = state.tiles.o[column // 2]
                mine[column] = o[i + column % 2 * 2 + 4 * eight] * weight
            target = parts[None, row, ctx.key_warp]
            target = cute.logical_divide(target, cute.make_layout(g.columns))
            cute.autovec_copy(mine, target[None, first // g.columns])
            if (ctx.key_warp == 0) & (ctx.m_warp == 0) & (ctx.lane < 4):
                of_rows[row] = _normalizer(ctx, row, highest, total)


@cute.jit
def _normalizer(ctx, row, row_max, row_sum):
    token, head = _token(ctx, row)
    logit = sink_logit(ctx.tensors, head, ctx.work.split if ctx.spec.split else None)
    factor, lse = finished(row_max, row_sum, row_sum, logit, ctx.traits.policy.max_offset)
    if const_expr(ctx.spec.writes_lse):
        if token < ctx.work.extent_q:
            write_lse(ctx, token, head, select(token < ctx.work.seqlen_q, lse, NEG_INF))
    return factor * output_factor(ctx)


def _token(ctx, row):
    group = ctx.traits.q_heads_per_kv_head
    row = ctx.work.row + row
    return row // group, ctx.work.kv_head * group + row % group


@cute.jit
def _store(ctx, state):
    """Sum over the groups, in their order."""
    g = ctx.geometry
    of_rows, parts = row_factors(ctx, state.shared), _parts(ctx)
    thread = cute.arch.thread_idx()[0]
    per_row = g.head_dim_v // _COLUMNS
    total = per_row * g.rows
    for first in cutlass.range_constexpr(0, total, g.threads):
        number = first + thread
        row, part = number // per_row, number % per_row
        token, head = _token(ctx, row)
        if (number < total) & (token < ctx.work.extent_q):
            sums = cute.make_rmem_tensor(cute.make_layout(_COLUMNS), Float32)
            sums.fill(0.0)
            for group in cutlass.range_constexpr(g.spec.tile.key_warps):
                values = cute.make_rmem_tensor(cute.make_layout(_COLUMNS), Float32)
                source = cute.logical_divide(parts[None, row, group], cute.make_layout(_COLUMNS))
                cute.autovec_copy(source[None, part], values)
                for i in cutlass.range_constexpr(_COLUMNS):
                    sums[i] = sums[i] + values[i]
            factor = of_rows[row]
            for i in cutlass.range_constexpr(_COLUMNS):
                x = sums[i] * factor
                sums[i] = select(token < ctx.work.seqlen_q, x, Float32(0.0))
            converted = cute.make_rmem_tensor(cute.make_layout(_COLUMNS), ctx.out_dtype)
            converted.store(sums.load().to(ctx.out_dtype))
            target = cute.logical_divide(output_row(ctx, token, head), cute.make_layout(_COLUMNS))
            cute.autovec_copy(converted, target[None, part])
