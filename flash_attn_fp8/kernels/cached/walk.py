"""A group of warps visits its key tiles, whose rows are copied to shared memory in advance."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.load import choose, copy_tile, locate, new_place

GROUP_BARRIER = 1  # named barriers of groups of warps: this one and those after it


class Visits(NamedTuple):
    """What is done with a group's key tiles, in turn; each is told the stage of its tile.

    With `first` and `last` a round of `each` ends what the round before began: it is told that
    tile's stage as well, whose keys stay until then; `first` begins, and `last` ends.
    """

    each: Callable[..., None]
    first: Callable[..., None] | None = None
    last: Callable[..., None] | None = None

    @property
    def held(self) -> int:
        """Tiles that are in use in a round."""
        return 1 if self.first is None else 2


@cute.jit
def each_tile(ctx: Context, load_queries: cutlass.Constexpr, visits: cutlass.Constexpr, state):
    """Visit the group's key tiles right to left: `key_warp`, and every key_warps-th before it.

    Queries are loaded while the first keys are on their way.
    """
    tile = ctx.spec.tile
    visit, visit_first, visit_last = visits
    first, count = _tiles(ctx)
    place, step = new_place(ctx), tile.key_warps
    # With `at_once` tiles on their way, what happens to tile i in the round of tile ...
    #   i - at_once - 2: `choose` asks which tokens are chosen
    #   i - at_once - 1: `locate` asks for their pages, with the answer
    #   i - at_once:     `copy_tile` asks for the rows, with the answer
    #   i:               the rows are there
    at_once = tile.stages - visits.held
    for ahead in cutlass.range_constexpr(at_once):
        if ahead < count:
            choose(ctx, first - ahead * step, place)
            locate(ctx, first - ahead * step, place)
            copy_tile(ctx, first - ahead * step, Int32(ahead), place)
        cute.arch.cp_async_commit_group()
    queries, factors = load_queries(ctx)
    next_block = first - at_once * step  # what is asked for next, if it exists
    if count > at_once:
        choose(ctx, next_block, place)
        locate(ctx, next_block, place)
        choose(ctx, next_block - step, place)
    stage, free = Int32(0), Int32(at_once)
    done = Int32(0)
    if const_expr(visit_first is not None):
        if count > 0:
            _begin_round(ctx, at_once, count, next_block, free, place)
            visit_first(ctx, queries, factors, state, first, stage)
        next_block, done, stage = next_block - step, Int32(1), Int32(1)
        free = select(free == tile.stages - 1, Int32(0), free + 1)
    for i in cutlass.range(done, count, unroll=1):
        _begin_round(ctx, at_once, count - i, next_block, free, place)
        next_block -= step
        before = select(stage == 0, Int32(tile.stages - 1), stage - 1)
        visit(ctx, queries, factors, state, first - i * step, stage, before)
        free = select(free == tile.stages - 1, Int32(0), free + 1)
        stage = select(stage == tile.stages - 1, Int32(0), stage + 1)
    if const_expr(visit_last is not None):
        if count > 0:
            visit_last(ctx, state, select(stage == 0, Int32(tile.stages - 1), stage - 1))
    cute.arch.cp_async_wait_group(0)


@cute.jit
def _begin_round(ctx, at_once: cutlass.Constexpr, left, next_block, free, place):
    """Wait for a tile, with `left` of them to do, and ask for the one that follows those asked."""
    cute.arch.cp_async_wait_group(at_once - 1)
    meet(ctx)  # the tile is there, and everyone has left the one whose stage is free
    if at_once < left:
        copy_tile(ctx, next_block, free, place)
        locate(ctx, next_block - ctx.spec.tile.key_warps, place)
        choose(ctx, next_block - 2 * ctx.spec.tile.key_warps, place)
    cute.arch.cp_async_commit_group()


def _tiles(ctx: Context):
    """(the group's last key tile, how many it has)."""
    tile, work = ctx.spec.tile, ctx.work
    n_min, n_max = work.first // tile.n_block, cute.ceil_div(work.last, tile.n_block)
    last = n_max - 1
    first = last - (last + tile.key_warps - ctx.key_warp) % tile.key_warps
    count = cute.ceil_div(first - n_min + 1, tile.key_warps)
    return first, cutlass.max(select(work.last > work.first, count, Int32(0)), 0)


@cute.jit
def meet(ctx: Context):
    """A barrier of all that share a ring."""
    if const_expr(ctx.spec.tile.m_warps == 1):
        cute.arch.sync_warp()
    else:
        cute.arch.barrier(
            barrier_id=GROUP_BARRIER + ctx.key_warp, number_of_threads=ctx.geometry.group_threads
        )
