"""The tail warp: zeroes the rows of V past the end of a sequence.

P is 0 there, but what lies there may be NaN (another sequence's rows, stale pages), and 0 * NaN is
NaN. Only a unit's first key tile, the last of the sequence, can have such rows.

It waits for the word of those who wait for V that the tile is there, not for the ring's barrier:
who does not wait for every use of a ring cannot tell a phase from the one two rounds before.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.kernels.forward.rings import arrive
from flash_attn_fp8.kernels.forward.schedule import each_unit
from flash_attn_fp8.kernels.forward.shared_memory import zero_rows
from flash_attn_fp8.specs import WARP


@cute.jit
def tail_role(ctx: Context, first_values: cutlass.Constexpr):
    """Clean the first V tile of each unit of work, if it needs to be.

    `first_values(work, tiles)` is where it lies, `tiles` key tiles after the CTA's first.
    """
    each_unit(ctx, partial(_unit, ctx, first_values))


@cute.jit
def _unit(ctx: Context, first_values: cutlass.Constexpr, work, units: Int32, tiles: Int32):
    g = ctx.geometry
    valid = work.seqlen_k - (work.n_max - 1) * g.tile_n
    ctx.barriers.tail_asked.wait(0, units)
    if valid < g.tile_n:
        tile = first_values(work, tiles)
        zero_rows(g, tile, g.tile_n, g.head_dim_v, valid, cute.arch.lane_idx(), WARP)
        cute.arch.fence_view_async_shared()
    arrive(ctx.barriers.tail_clean.at(0))
