"""The tail warp: zeroes the rows of V past the end of a sequence.

P is 0 there, but what lies there may be NaN (another sequence's rows, stale pages), and 0 * NaN is
NaN. Only a unit's first key tile, the last of the sequence, can have such rows.

It waits for the MMA warp's word that the tile is there, not for the ring's barrier: who does not
wait for every use of a ring cannot tell a phase from the one two rounds before.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from flash_attn_fp8.kernels.sm100.barriers import warp_arrives
from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.kernels.sm100.geometry import WARP
from flash_attn_fp8.kernels.sm100.schedule import each_unit
from flash_attn_fp8.specs import TILE


@cute.jit
def tail_role(ctx: Context):
    """Clean the first V tile of each unit of work, if it needs to be."""
    each_unit(ctx, partial(_unit, ctx))


@cute.jit
def _unit(ctx: Context, work, units: Int32, tiles: Int32):
    g = ctx.geometry
    first_v = tiles * 2 + cutlass.min(work.tiles, g.lookahead)
    valid = work.seqlen_k - (work.n_max - 1) * TILE
    ctx.barriers.tail_asked.wait(0, units)
    if valid < TILE:
        tile = ctx.buffers.kv + ctx.barriers.kv.slot(first_v) * (g.kv_bytes // g.element)
        zero_rows(g, tile, g.head_dim_v, valid, cute.arch.lane_idx(), WARP)
        cute.arch.fence_view_async_shared()
    warp_arrives(ctx.barriers.tail_clean, 0)


@cute.jit
def zero_rows(g: cutlass.Constexpr, tile, width: cutlass.Constexpr, first, thread, threads):
    """Rows from `first` on of a shared tile of `width` elements a row, by so many threads.

    In each column of chunks: swizzling stays within a row.
    """
    words = g.chunk(width) * g.element // 4
    start = cute.recast_ptr(tile, dtype=Uint32)
    for column in cutlass.range_constexpr(width // g.chunk(width)):
        shared = cute.make_tensor(start + column * TILE * words, cute.make_layout(TILE * words))
        word = first * words + thread
        while word < TILE * words:
            shared[word] = Uint32(0)
            word += threads
