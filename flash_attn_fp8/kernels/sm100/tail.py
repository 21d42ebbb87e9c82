"""The tail warp: zeroes the rows of V past the end of a sequence.

P is 0 there, but what lies there may be NaN (another sequence's rows, stale pages), and 0 * NaN is
NaN. Only a unit's first key tile, the last of the sequence, can have such rows.

It waits for the MMA warp's word that the tile is there, not for the ring's barrier: who does not
wait for every use of a ring cannot tell a phase from the one two rounds before.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32

from flash_attn_fp8.kernels.sm100.barriers import warp_arrives
from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.kernels.sm100.geometry import WARP
from flash_attn_fp8.specs import TILE


@cute.jit
def tail_role(ctx: Context):
    """Clean the first V tile of each unit of work, if it needs to be."""
    g = ctx.geometry
    units, tiles = Int32(0), Int32(0)
    index = ctx.first
    while index < ctx.schedule.total:
        work = ctx.schedule.work(index)
        n = work.n_max - work.n_min
        if n > 0:
            first_v = tiles * 2 + cutlass.min(n, g.lookahead)
            valid = work.seqlen_k - (work.n_max - 1) * TILE
            ctx.barriers.tail_asked.wait(0, units)
            if valid < TILE:
                _zero(ctx, ctx.barriers.kv.slot(first_v), valid)
                cute.arch.fence_view_async_shared()
            warp_arrives(ctx.barriers.tail_clean, 0)
            units += 1
            tiles += n
        index += ctx.stride


@cute.jit
def _zero(ctx: Context, slot: Int32, valid: Int32):
    """Rows from `valid` on, in each column of chunks; swizzling stays within a row."""
    g = ctx.geometry
    chunk = g.chunk(g.head_dim_v)
    words = chunk * g.element // 4
    tile = cute.recast_ptr(ctx.buffers.kv, dtype=Uint32) + slot * (g.kv_bytes // 4)
    for column in cutlass.range_constexpr(g.head_dim_v // chunk):
        start = tile + column * TILE * words
        shared = cute.make_tensor(start, cute.make_layout(TILE * words))
        word = valid * words + cute.arch.lane_idx()
        while word < TILE * words:
            shared[word] = Uint32(0)
            word += WARP
