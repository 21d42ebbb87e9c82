"""A group of warps visits its key tiles, whose rows are copied to shared memory in advance."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.load import choose, copy_tile, locate, new_place

GROUP_BARRIER = 1  # named barriers of groups of warps: this one and those after it


@cute.jit
def each_tile(ctx: Context, load_queries: cutlass.Constexpr, visit: cutlass.Constexpr, state):
    """Visit the group's key tiles right to left: `key_warp`, and every key_warps-th before it.

    `load_queries(ctx)` returns queries and factors while the first keys are on their way;
    `visit(ctx, queries, factors, state, n_block, stage)` is called for each tile, which is there.
    """
    tile = ctx.spec.tile
    first, count = _tiles(ctx)
    # What happens to tile i, in the round of tile ...
    #   i - stages - 1: `choose` asks which tokens are chosen
    #   i - stages:     `locate` asks for their pages, with the answer
    #   i - stages + 1: `copy_tile` asks for the rows, with the answer
    #   i:              the rows are there
    place, step = new_place(ctx), tile.key_warps
    for ahead in cutlass.range_constexpr(tile.stages - 1):
        if ahead < count:
            choose(ctx, first - ahead * step, place)
            locate(ctx, first - ahead * step, place)
            copy_tile(ctx, first - ahead * step, Int32(ahead), place)
        cute.arch.cp_async_commit_group()
    queries, factors = load_queries(ctx)
    next_block = first - (tile.stages - 1) * step  # what is asked for next, if it exists
    if count >= tile.stages:
        choose(ctx, next_block, place)
        locate(ctx, next_block, place)
        choose(ctx, next_block - step, place)
    stage, free = Int32(0), Int32(tile.stages - 1)
    for i in cutlass.range(count, unroll=1):
        cute.arch.cp_async_wait_group(tile.stages - 2)
        _meet(ctx)  # the tile is there, and everyone has left the one before
        if i + tile.stages - 1 < count:
            copy_tile(ctx, next_block, free, place)
            locate(ctx, next_block - step, place)
            choose(ctx, next_block - 2 * step, place)
        cute.arch.cp_async_commit_group()
        next_block -= step
        visit(ctx, queries, factors, state, first - i * step, stage)
        free = stage
        stage = select(stage == tile.stages - 1, Int32(0), stage + 1)
    cute.arch.cp_async_wait_group(0)


def _tiles(ctx: Context):
    """(the group's last key tile, how many it has)."""
    tile, work = ctx.spec.tile, ctx.work
    n_min, n_max = work.first // tile.n_block, cute.ceil_div(work.last, tile.n_block)
    last = n_max - 1
    first = last - (last + tile.key_warps - ctx.key_warp) % tile.key_warps
    count = cute.ceil_div(first - n_min + 1, tile.key_warps)
    return first, cutlass.max(select(work.last > work.first, count, Int32(0)), 0)


@cute.jit
def _meet(ctx: Context):
    """A barrier of all that share a ring."""
    if const_expr(ctx.spec.tile.m_warps == 1):
        cute.arch.sync_warp()
    else:
        cute.arch.barrier(
            barrier_id=GROUP_BARRIER + ctx.key_warp, number_of_threads=ctx.geometry.group_threads
        )
