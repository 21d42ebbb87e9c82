"""Queries in shared memory, as the tensor core reads them, and the factors of their scores."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.queries import load_queries
from flash_attn_fp8.kernels.cached.warpgroup.attend import row_factors, row_of_lane
from flash_attn_fp8.kernels.cached.warpgroup.products import Shared, word_of


@cute.jit
def share_queries(ctx: Context, memory: Shared, common: Float32):
    """A warp of the first group has 16 rows. Returns a lane's factors, (row of two, eight)."""
    g = ctx.geometry
    of_rows = row_factors(ctx, memory)
    if (ctx.key_warp == 0) & (ctx.m_warp * 16 < g.rows):
        words = cute.make_tensor(
            cute.recast_ptr(memory.q, dtype=Uint32), cute.make_layout(g.q_bytes // 4)
        )
        fragment, factors = load_queries(ctx, 0)
        for half in cutlass.range_constexpr(2):
            row = ctx.m_warp * 16 + half * 8 + ctx.lane // 4
            if row < g.rows:
                for step in cutlass.range_constexpr(g.k_steps):
                    for pair in cutlass.range_constexpr(2):
                        column = step * 16 + pair * 8 + ctx.lane % 4 * 2
                        words[word_of(g, row, column, False)] = fragment[2 * pair + half, step]
                if ctx.lane % 4 == 0:
                    of_rows[row] = factors[half] * common
        cute.arch.fence_view_async_shared()
    cute.arch.sync_threads()
    first = row_of_lane(ctx, 0, 0)
    layout = cute.make_layout((2, g.row_tiles), stride=(1, 8))
    return cute.make_tensor((of_rows.iterator + first).align(8), layout)
