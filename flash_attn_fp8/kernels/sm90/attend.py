"""The consumer warpgroups: S = Q K^T, softmax, O = O * rescale + P V, 64 query rows each.

A tile's P V and the next tile's Q K^T run on the tensor core while this one's softmax runs: P of
tile i is multiplied after S of tile i + 1 was asked for. In 16 bits P V adds to O, which was
rescaled just before. In fp8 it does not: Hopper's fp8 tensor cores keep 13 fraction bits of a sum,
so a tile's product begins at 0, and is added to O in fp32, which also rescales O, for one FMA an
element (docs/numerics.md). `_make_room` is where the two ways part.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.kernels.forward.finish import finish, nothing_seen, write_lse
from flash_attn_fp8.kernels.forward.rings import arrive
from flash_attn_fp8.kernels.forward.schedule import each_unit
from flash_attn_fp8.kernels.ptx import once_if
from flash_attn_fp8.kernels.sm90 import in_sequence
from flash_attn_fp8.kernels.sm90.context import Products, multiply, words_of
from flash_attn_fp8.kernels.sm90.geometry import ROWS, WARPGROUP
from flash_attn_fp8.kernels.sm90.output import store
from flash_attn_fp8.kernels.sm90.queries import convert_queries
from flash_attn_fp8.kernels.sm90.softmax import Rows, encode, key_scales, softmax
from flash_attn_fp8.kernels.sm90.tiles import Tiles


@cute.jit
def attend_role(ctx: Context, products: Products, stage: Int32):
    """Rows of query tile `stage` of one unit of work after another."""
    _begin_turns(ctx, stage)
    each_unit(ctx, partial(_unit, ctx, products, stage), partial(_without_keys, ctx, stage))
    _end_turns(ctx, stage)


@cute.jit
def _unit(ctx, products: cutlass.Constexpr, stage, work, units: Int32, tiles: Int32):
    rows = Rows.of(ctx, work, stage)
    q = ctx.barriers.q
    q.wait_full(units * ctx.geometry.q_stage + stage)
    convert_queries(ctx, rows)
    if const_expr(ctx.geometry.in_sequence):
        o = in_sequence.key_tiles(ctx, products, rows, tiles)
        arrive(q.empty(units * ctx.geometry.q_stage + stage))
    else:
        t = Tiles.of(ctx, products)
        _key_tiles(ctx, t, rows, units, tiles)
        arrive(q.empty(units * ctx.geometry.q_stage + stage))
        _last_values(ctx, t, tiles + work.tiles - 1)
        o = t.o
    normalizers = [_finish(ctx, o, rows, r) for r in range(2)]
    store(ctx, rows, o, normalizers)


@cute.jit
def _without_keys(ctx, stage, work):
    rows = Rows.of(ctx, work, stage)
    for r in cutlass.range_constexpr(2):
        _, lse = finish(ctx, work, rows.head(r), nothing_seen())
        _write_lse(ctx, rows, r, lse)
    store(ctx, rows, None, None)


@cute.jit
def _key_tiles(ctx, t, rows, units, tiles):
    """All key tiles of the rows, right to left; P of the last one is not multiplied yet.

    Those that some row sees in part, then those that all rows see whole, whose code has no mask;
    with a bound on the left, again some that are seen in part.
    """
    t.o.fill(0.0)
    if const_expr(not ctx.geometry.accumulates_in_mma):
        t.pv[0].fill(0.0)
        t.pv_rescale.fill(1.0)
    work = rows.work
    n_left, n_right = ctx.schedule.whole_tiles(work, rows.stage)
    _first_scores(ctx, t, rows, tiles)
    _await_clean_values(ctx, units, tiles)
    # The first tile is done, with a mask, whether it needs it or not.
    n_right = cutlass.min(n_right, work.n_max - 1)
    n_left = cutlass.min(n_left, n_right)
    for i in cutlass.range(1, work.n_max - n_right, unroll=1):
        _step(ctx, t, rows, tiles, i, True)
    for i in cutlass.range(work.n_max - n_right, work.n_max - n_left, unroll=1):
        _step(ctx, t, rows, tiles, i, False)
    if const_expr(ctx.traits.bounded_left):
        for i in cutlass.range(work.n_max - n_left, work.tiles, unroll=1):
            _step(ctx, t, rows, tiles, i, True)


@cute.jit
def _first_scores(ctx, t, rows, tiles):
    k = ctx.barriers.k
    k.wait_full(tiles)
    multiply(t.products.qk, t.s, t.q[None, None, None, rows.stage], t.k, k.slot(tiles))
    warpgroup.wait_group(0)
    arrive(k.empty(tiles))
    scales = key_scales(ctx, rows, tiles, Int32(0))
    softmax(ctx, rows, t.s, scales, t.rescale, tiles, Int32(0), True)
    encode(ctx, rows, t.s, t.rescale, words_of(t.p))


@cute.jit
def _await_clean_values(ctx, units: Int32, tiles: Int32):
    """Until what lies past the sequence in the unit's first V tile is 0; not in one's turn."""
    if const_expr(ctx.geometry.cleans_tail):
        ctx.barriers.v.wait_full(tiles)
        arrive(ctx.barriers.tail_asked.at(0))
        ctx.barriers.tail_clean.wait(0, units)


@cute.jit
def _step(ctx, t, rows, tiles, i: Int32, masked: cutlass.Constexpr):
    """Scores and P of tile `i`, while P V of the tile before is made; then that one is added."""
    k, v, tile = ctx.barriers.k, ctx.barriers.v, tiles + i
    k.wait_full(tile)
    _await_turn(ctx, rows.stage)
    multiply(t.products.qk, t.s, t.q[None, None, None, rows.stage], t.k, k.slot(tile))
    _make_room(ctx, t)
    v.wait_full(tile - 1)
    _multiply_values(ctx, t, v.slot(tile - 1))
    _pass_turn(ctx, rows.stage)
    scales = key_scales(ctx, rows, tile, i)
    warpgroup.wait_group(1)
    arrive(k.empty(tile))
    softmax(ctx, rows, t.s, scales, t.rescale, tile, i, masked)
    warpgroup.wait_group(0)
    arrive(v.empty(tile - 1))
    # Not before: registers that a wgmma reads must not change from its start to its end.
    encode(ctx, rows, t.s, t.rescale, words_of(t.p))


@cute.jit
def _last_values(ctx, t, tile):
    v = ctx.barriers.v
    _make_room(ctx, t)
    v.wait_full(tile)
    _multiply_values(ctx, t, v.slot(tile))
    warpgroup.wait_group(0)
    arrive(v.empty(tile))
    if const_expr(not ctx.geometry.accumulates_in_mma):
        _add(t)


@cute.jit
def _multiply_values(ctx, t, slot):
    """Start P V."""
    multiply(t.products.pv(0), t.pv[0], t.p, t.v[0], slot, ctx.geometry.accumulates_in_mma)


@cute.jit
def _begin_turns(ctx, stage: Int32):
    """Warpgroups take turns to issue, so that one's softmax runs beside the other's products."""
    if const_expr(ctx.geometry.takes_turns):
        if stage == ctx.geometry.q_stage - 1:
            _pass_turn(ctx, stage)


@cute.jit
def _end_turns(ctx, stage: Int32):
    if const_expr(ctx.geometry.takes_turns):
        if stage == 0:
            _await_turn(ctx, stage)


@cute.jit
def _await_turn(ctx, stage: Int32):
    if const_expr(ctx.geometry.takes_turns):
        cute.arch.barrier(barrier_id=1 + stage, number_of_threads=2 * WARPGROUP)


@cute.jit
def _pass_turn(ctx, stage: Int32):
    if const_expr(ctx.geometry.takes_turns):
        following = (stage + 1) % ctx.geometry.q_stage
        cute.arch.barrier_arrive(barrier_id=1 + following, number_of_threads=2 * WARPGROUP)


@cute.jit
def _make_room(ctx, t):
    """Before the next P V: O in units of its P, to be added to; or what was there, added to O."""
    if const_expr(ctx.geometry.accumulates_in_mma):
        _rescale(t.o, t.rescale)
    else:
        _add(t)


@cute.jit
def _rescale(o, rescale):
    """O = O * rescale, where it is not 1 in all of the warp's rows."""
    raises = (rescale[0] != 1.0) | (rescale[1] != 1.0)
    rounds = once_if(cute.arch.vote_any_sync(raises))
    for _ in cutlass.range(rounds, unroll=1):
        for i in cutlass.range_constexpr(cute.size(o)):
            o[i] = o[i] * rescale[i // 2 % 2]


@cute.jit
def _add(t):
    """O = O * rescale + P V, in fp32; then what belongs to P is about to belong to P V."""
    for i in cutlass.range_constexpr(cute.size(t.o)):
        t.o[i] = t.o[i] * t.pv_rescale[i // 2 % 2] + t.pv[0][i]
    for r in cutlass.range_constexpr(2):
        t.pv_rescale[r] = t.rescale[r]


@cute.jit
def _finish(ctx, o, rows, r: cutlass.Constexpr):
    """What normalises row `r` of a lane; its LSE is written."""
    g = ctx.geometry
    if const_expr(g.sums_by_mma):
        quantized = o[2 * r + ROWS * g.head_dim_v // WARPGROUP]
    else:
        quantized = rows.of_quad(rows.rounded_sum[r])
    state = rows.row_max[r], rows.of_quad(rows.row_sum[r]), quantized
    normalizer, lse = finish(ctx, rows.work, rows.head(r), state)
    _write_lse(ctx, rows, r, lse)
    return normalizer


@cute.jit
def _write_lse(ctx, rows, r: cutlass.Constexpr, lse):
    if const_expr(ctx.geometry.spec.writes_lse):
        if rows.lane % 4 == 0:
            write_lse(ctx, rows.work, rows.stage, rows.row(r), lse)
