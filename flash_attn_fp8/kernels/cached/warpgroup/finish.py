"""The end of a CTA: warpgroups merge what they have of a row; normalise; store."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32
from cutlass import select_ as select

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.merge import normalizer, output_row
from flash_attn_fp8.kernels.cached.scores import merged_sum, weight_of
from flash_attn_fp8.kernels.cached.warpgroup.attend import (
    LOWEST,
    row_factors,
    row_numbers,
    row_of_lane,
)
from flash_attn_fp8.kernels.dtypes import NEG_INF

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
    numbers = row_numbers(ctx, state.shared)
    for eight in cutlass.range_constexpr(ctx.geometry.row_tiles):
        for i in cutlass.range_constexpr(2):
            total = state.row_sum[i, eight]
            for apart in cutlass.range_constexpr(2, 5):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << apart)
            if ctx.lane < 4:
                row, row_max = row_of_lane(ctx, eight, i), state.row_max[i, eight]
                # All warps have the same maximum; the first one's is read.
                numbers[row, ctx.m_warp, 0, ctx.key_warp] = select(
                    row_max == LOWEST, NEG_INF, row_max
                )
                numbers[row, ctx.m_warp, 1, ctx.key_warp] = total


def _merged(ctx, numbers, row):
    """(maximum, sum) of a row over all groups."""
    groups = range(ctx.spec.tile.key_warps)
    sums = [[numbers[row, warp, 1, group] for warp in range(4)] for group in groups]
    return merged_sum(
        [numbers[row, 0, 0, group] for group in groups], [(a + b) + (c + d) for a, b, c, d in sums]
    )


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
    of_rows, numbers = row_factors(ctx, state.shared), row_numbers(ctx, state.shared)
    parts = _parts(ctx)
    first = (ctx.m_warp * 8 + ctx.lane // 4) * g.columns
    mine = cute.make_rmem_tensor(cute.make_layout(g.columns), Float32)
    for eight in cutlass.range_constexpr(g.row_tiles):
        for i in cutlass.range_constexpr(2):
            row = row_of_lane(ctx, eight, i)
            highest, total = _merged(ctx, numbers, row)
            weight = weight_of(state.row_max[i, eight], highest)
            for column in cutlass.range_constexpr(g.columns):
                o = state.tiles.o[column // 2]
                mine[column] = o[i + column % 2 * 2 + 4 * eight] * weight
            target = parts[None, row, ctx.key_warp]
            target = cute.logical_divide(target, cute.make_layout(g.columns))
            cute.autovec_copy(mine, target[None, first // g.columns])
            if (ctx.key_warp == 0) & (ctx.m_warp == 0) & (ctx.lane < 4):
                token, head = ctx.token_and_head(row)
                of_rows[row] = normalizer(ctx, token, head, highest, total, Boolean(True))


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
        token, head = ctx.token_and_head(row)
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
