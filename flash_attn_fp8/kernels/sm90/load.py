"""The load warp: Q, K and V from global to shared memory, by TMA, in the order of their use."""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_fp8.kernels.forward.boxes import Loads, load_keys, load_queries
from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.kernels.forward.schedule import each_unit
from flash_attn_fp8.kernels.sm90.transposed import first_column
from flash_attn_fp8.specs import TILE


@cute.jit
def load_role(ctx: Context, loads: Loads):
    """Fill the rings, one unit of work after another."""
    each_unit(ctx, partial(_unit, ctx, loads))
    _await_transposed(ctx)  # however little there was to load: no grid ends before that one


@cute.jit
def _unit(ctx: Context, loads: cutlass.Constexpr, work, units: Int32, tiles: Int32):
    """K of the first tile, Q, and then V of a tile after K of the next one."""
    n = work.tiles
    if const_expr(ctx.geometry.spec.widened and ctx.traits.kv_layout == "varlen"):
        work = work._replace(offset_k=first_column(TILE, work.offset_k, work.batch))
    _keys(ctx, loads, work, Int32(0), tiles)
    _queries(ctx, loads, work, units)
    _await_transposed(ctx)
    for i in cutlass.range(n, unroll=1):
        if i + 1 < n:
            _keys(ctx, loads, work, i + 1, tiles)
        _values(ctx, loads, work, i, tiles)


@cute.jit
def _await_transposed(ctx: Context):
    """Until the kernel before has made V^T."""
    if const_expr(ctx.geometry.transposes_v):
        cute.arch.griddepcontrol_wait()


@cute.jit
def _queries(ctx: Context, loads: Loads, work, units: Int32):
    g, ring = ctx.geometry, ctx.barriers.q
    for stage in cutlass.range_constexpr(g.q_stage):
        use = units * g.q_stage + stage
        ring.wait_empty(use)
        _expect(ring.full(use), g.rows * g.head_dim * g.element)
        block = work.token // g.tokens + stage
        tile = ctx.buffers.q + stage * (g.q_bytes // g.element)
        load_queries(ctx, loads.q, work, block, tile, ring.full(use))


@cute.jit
def _keys(ctx: Context, loads: cutlass.Constexpr, work, i: Int32, tiles: Int32):
    g, ring, use = ctx.geometry, ctx.barriers.k, tiles + i
    n_block = work.n_max - 1 - i
    ring.wait_empty(use)
    _expect(ring.full(use), g.k_bytes)
    tile = ctx.buffers.k + ring.slot(use) * (g.k_bytes // g.element)
    load_keys(ctx, loads.k, work, n_block, n_block, tile, ring.full(use), 0)


@cute.jit
def _values(ctx: Context, loads: cutlass.Constexpr, work, i: Int32, tiles: Int32):
    g, ring, use = ctx.geometry, ctx.barriers.v, tiles + i
    n_block = work.n_max - 1 - i
    ring.wait_empty(use)
    _expect(ring.full(use), g.tile_n * g.head_dim_v * g.element)
    tile = ctx.buffers.v + ring.slot(use) * (g.v_bytes // g.element)
    if const_expr(g.transposes_v):
        atom, tensor, box = loads.v
        head = ctx.schedule.kv_head(work.head)
        if const_expr(ctx.traits.kv_layout == "varlen"):
            tensor = cute.domain_offset(
                (first_column(ctx.geometry.tile_n, work.offset_k, work.batch), 0, 0), tensor
            )
            where = 0, head
        else:
            where = 0, head, work.batch
        box.load(atom, tensor, where, tile, 0, ring.full(use), n_block * box.chunks)
    else:
        load_keys(ctx, loads.v, work, n_block, n_block, tile, ring.full(use), 0)


@cute.jit
def _expect(barrier, size: cutlass.Constexpr):
    """Announce a transfer of so many bytes."""
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
