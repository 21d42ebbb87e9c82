"""The correction warps: rescale O when a row's maximum was raised; normalise and store it.

A thread has a row of O in tensor memory. Rescaling waits for nobody but the tile before; when no
row of a warp was raised, which is most of the time after the first tiles, it is skipped.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.forward.finish import finish
from flash_attn_fp8.kernels.forward.rings import arrive
from flash_attn_fp8.kernels.forward.schedule import each_unit, output_row
from flash_attn_fp8.kernels.sm100 import tensor_memory
from flash_attn_fp8.kernels.sm100.barriers import arrive_at_leader
from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.kernels.sm100.geometry import VECTOR
from flash_attn_fp8.specs import TILE, WARP

_COLUMNS = 16  # of O that are rescaled at once
_SUMS = 2  # of the columns of sums, all alike: as few as an instruction scales


@cute.jit
def correction_role(ctx: Context, tmem):
    """Both query tiles of one unit of work after another."""
    thread = cute.arch.thread_idx()[0] % TILE
    tmem = tensor_memory.of_warp(tmem, thread)
    each_unit(ctx, partial(_unit, ctx, tmem, thread), partial(_without_keys, ctx, thread))


@cute.jit
def _unit(ctx, tmem, thread, work, units: Int32, tiles: Int32):
    g, last = ctx.geometry, tiles + work.tiles - 1
    for stage in cutlass.range_constexpr(g.q_stage):
        _allow_output(ctx, tiles, stage)  # what was there before has been read
    for i in cutlass.range(1, work.tiles, unroll=1):
        for stage in cutlass.range_constexpr(g.q_stage):
            _correct(ctx, tmem, thread, stage, tiles + i)
    for stage in cutlass.range_constexpr(g.q_stage):
        factor = _receive(ctx, thread, stage, last)
        ctx.barriers.o_full.wait(stage, last)
        tensor_memory.fence_after_wait()
        if const_expr(g.sums_by_mma):
            factor = _normalizer(ctx, tmem, work, stage, thread, factor)
        _store(
            ctx, work, stage, thread, partial(_normalized, ctx, tmem, work, stage, thread, factor)
        )


@cute.jit
def _without_keys(ctx, thread, work):
    for stage in cutlass.range_constexpr(ctx.geometry.q_stage):
        _store(ctx, work, stage, thread, partial(_zeros, ctx))


@cute.jit
def _allow_output(ctx, tile, stage: cutlass.Constexpr):
    """Tell the MMA warp that key tile number `tile` may be added to O."""
    slot, _ = ctx.geometry.slot_and_use(tile, stage)
    tensor_memory.fence_before_arrive()
    arrive_at_leader(ctx.geometry, ctx.barriers.p_full.at(slot))


@cute.jit
def _receive(ctx, thread, stage: cutlass.Constexpr, message):
    ctx.barriers.scale_full.wait(stage, message)
    value = ctx.buffers.row_scale[thread, stage]
    arrive(ctx.barriers.scale_empty.at(stage))
    return value


@cute.jit
def _correct(ctx, tmem, thread, stage: cutlass.Constexpr, tile):
    """Rescale O before key tile number `tile` is added to it."""
    g = ctx.geometry
    factor = _receive(ctx, thread, stage, tile - 1)
    ctx.barriers.o_full.wait(stage, tile - 1)
    tensor_memory.fence_after_wait()
    if cute.arch.vote_any_sync(factor != 1.0):
        address = tmem + g.o_column(stage)
        for column in cutlass.range_constexpr(0, g.head_dim_v, _COLUMNS):
            _rescale(address + column, _COLUMNS, factor)
        if const_expr(g.sums_by_mma):
            _rescale(tmem + g.sum_column(stage), _SUMS, factor)
        cute.arch.fence_view_async_tmem_store()
    _allow_output(ctx, tile, stage)


@cute.jit
def _rescale(address, columns: cutlass.Constexpr, factor):
    o = tensor_memory.load(address, columns, columns)
    cute.arch.fence_view_async_tmem_load()
    _scale(o, factor)
    tensor_memory.store(o, address, columns, columns)


@cute.jit
def _normalizer(ctx, tmem, work, stage: cutlass.Constexpr, thread, row_max):
    """What normalises the output of a row, whose sum is in tensor memory."""
    total = tensor_memory.load(tmem + ctx.geometry.sum_column(stage), _SUMS, _SUMS)
    cute.arch.fence_view_async_tmem_load()
    _, head, _ = ctx.schedule.query(work, stage, thread)
    normalizer, _ = finish(ctx, work, head, (row_max, total[0], total[0]))
    return normalizer


@cute.jit
def _scale(o, factor):
    for i in cutlass.range_constexpr(0, cute.size(o), 2):
        o[i], o[i + 1] = cute.arch.mul_packed_f32x2((o[i], o[i + 1]), (factor, factor))


@cute.jit
def _store(ctx, work, stage: cutlass.Constexpr, thread, columns_from: cutlass.Constexpr):
    """Convert and store the rows of a query tile, whose columns `columns_from(first)` has.

    Staged through shared memory, a warp's 32 rows at a time, so that global stores are coalesced.
    """
    g = ctx.geometry
    for column in cutlass.range_constexpr(0, g.head_dim_v, g.staging_columns):
        _stage(ctx, columns_from(column), thread)
        cute.arch.sync_warp()
        _copy_out(ctx, work, stage, thread, column)
        cute.arch.sync_warp()


@cute.jit
def _normalized(ctx, tmem, work, stage, thread, factor, column: cutlass.Constexpr):
    """Some columns of O, times the row's factor; 0 where the row is not in use."""
    g = ctx.geometry
    columns = g.staging_columns
    token, _, _ = ctx.schedule.query(work, stage, thread)
    o = tensor_memory.load(tmem + g.o_column(stage) + column, columns)
    cute.arch.fence_view_async_tmem_load()
    _scale(o, factor)
    for i in cutlass.range_constexpr(columns):
        o[i] = select(token < work.seqlen_q, o[i], Float32(0.0))
    return o


def _zeros(ctx, column):
    o = cute.make_rmem_tensor(cute.make_layout(ctx.geometry.staging_columns), Float32)
    o.fill(0.0)
    return o


def _staged(ctx, warp):
    """The 32 rows of a correction warp as 16-byte pieces, (words, piece, row)."""
    g = ctx.geometry
    pieces = g.staging_columns * g.out_element // VECTOR
    words = VECTOR // 4
    layout = cute.make_layout((words, pieces, WARP), stride=(1, words, words * pieces))
    start = cute.recast_ptr(ctx.buffers.staging, dtype=Uint32) + warp * (WARP * pieces * words)
    return cute.make_tensor(start, layout), pieces


def _swizzled(piece, row, pieces: int):
    """Where a piece of a row lies, so that neither way through shared memory collides in a bank."""
    rows_per_line = max(1, 128 // (VECTOR * pieces))
    return piece ^ ((row // rows_per_line) % pieces)


@cute.jit
def _stage(ctx, o, thread):
    """A thread's row, converted, to shared memory."""
    g = ctx.geometry
    converted = cute.make_rmem_tensor(cute.make_layout(g.staging_columns), ctx.out_dtype)
    converted.store(o.load().to(ctx.out_dtype))
    words = cute.make_tensor(
        cute.recast_ptr(converted.iterator, dtype=Uint32),
        cute.make_layout((VECTOR // 4, g.staging_columns * g.out_element // VECTOR)),
    )
    staged, pieces = _staged(ctx, thread // WARP)
    row = thread % WARP
    for piece in cutlass.range_constexpr(pieces):
        cute.autovec_copy(words[None, piece], staged[None, _swizzled(piece, row, pieces), row])


@cute.jit
def _copy_out(ctx, work, stage: cutlass.Constexpr, thread, column: cutlass.Constexpr):
    """Staged rows to the output, neighbouring lanes to neighbouring bytes."""
    g = ctx.geometry
    warp, lane = thread // WARP, thread % WARP
    staged, pieces = _staged(ctx, warp)
    per_piece = VECTOR // g.out_element
    # A loop at run time: unrolled, the rows' addresses would be kept from one column to the next,
    # in more registers than there are (some divide by a group that is no power of two).
    for i in cutlass.range(pieces, unroll=1):
        number = i * WARP + lane
        row, piece = number // pieces, number % pieces
        token, head, exists = ctx.schedule.query(work, stage, warp * WARP + row)
        if exists:
            words = cute.make_rmem_tensor(cute.make_layout(VECTOR // 4), Uint32)
            cute.autovec_copy(staged[None, _swizzled(piece, row, pieces), row], words)
            target = output_row(ctx, work, token, head)
            target = cute.logical_divide(target, cute.make_layout(per_piece))
            target = target[None, column // per_piece + piece]
            source = cute.recast_ptr(words.iterator, dtype=ctx.out_dtype)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(per_piece)), target)
