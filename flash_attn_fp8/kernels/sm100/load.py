"""The load warp: Q, K and V from global to shared memory, by TMA, in the order of their use."""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_fp8.kernels.forward.boxes import Loads, load_keys, load_queries
from flash_attn_fp8.kernels.forward.schedule import each_unit
from flash_attn_fp8.kernels.sm100.barriers import k_use, v_use
from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.specs import TILE


@cute.jit
def load_role(ctx: Context, loads: Loads):
    """Fill the rings, one unit of work after another."""
    units, tiles = each_unit(ctx, partial(_unit, ctx, loads))
    # The tensor core's last commits arrive here after the MMA warp is done, also from the other CTA
    # of a pair: shared memory must outlive them, and nobody else waits for them.
    ctx.barriers.q.wait_all_empty(units * ctx.geometry.q_stage)
    ctx.barriers.kv.wait_all_empty(tiles * 2)


@cute.jit
def _unit(ctx: Context, loads: cutlass.Constexpr, work, units: Int32, tiles: Int32):
    _queries(ctx, loads, work, units)
    _keys_and_values(ctx, loads, work, tiles)


@cute.jit
def _queries(ctx: Context, loads: Loads, work, units: Int32):
    g, ring = ctx.geometry, ctx.barriers.q
    for stage in cutlass.range_constexpr(g.q_stage):
        use = units * g.q_stage + stage
        ring.wait_empty(use)
        _expect(ctx, ring.full(use), g.rows * g.head_dim)
        block = work.token // g.tokens + ctx.schedule.row_tile(stage)
        tile = ctx.buffers.q + ring.slot(use) * (TILE * g.head_dim)
        load_queries(ctx, loads.q, work, block, tile, ring.full(use))


@cute.jit
def _keys_and_values(ctx: Context, loads: Loads, work, tiles: Int32):
    g, n = ctx.geometry, work.tiles
    for i in cutlass.range_constexpr(g.lookahead):
        if i < n:
            _tile(ctx, loads.k, work, i, k_use(g, tiles, i), True)
    for i in cutlass.range(n, unroll=1):
        _tile(ctx, loads.v, work, i, v_use(g, tiles, n, i), False)
        ahead = i + g.lookahead
        if ahead < n:
            _tile(ctx, loads.k, work, ahead, k_use(g, tiles, ahead), True)


@cute.jit
def _tile(
    ctx: Context, load: cutlass.Constexpr, work, i: Int32, use: Int32, is_k: cutlass.Constexpr
):
    """Key tile `i` of a unit's K or V, or this CTA's half of it, into the slot of use `use`.

    Of a pair of CTAs, each has half the rows of K and half the columns of V.
    """
    g, ring = ctx.geometry, ctx.barriers.kv
    n_block = work.n_max - 1 - i
    tile = ctx.buffers.kv + ring.slot(use) * (g.kv_bytes // g.element)
    ring.wait_empty(use)
    _expect(ctx, ring.full(use), g.k_rows * g.head_dim if is_k else TILE * g.v_columns)
    part = n_block * g.ctas + ctx.schedule.rank if const_expr(is_k) else n_block
    first_chunk = 0 if const_expr(is_k) else ctx.schedule.rank * load[2].chunks
    load_keys(ctx, load, work, n_block, part, tile, ring.full(use), first_chunk)


@cute.jit
def _expect(ctx: Context, barrier, elements: cutlass.Constexpr):
    """Announce a transfer of so many elements to each CTA; all count on the leader's barrier."""
    if ctx.schedule.rank == 0:
        with cute.arch.elect_one():
            size = elements * ctx.geometry.element * ctx.geometry.ctas
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
