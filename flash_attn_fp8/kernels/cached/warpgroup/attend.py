"""A warpgroup's rows over its key tiles: scores, online softmax, output.

A lane has two keys of a tile and a quarter of its rows, which are those it has of the output; the
other keys of a row are other lanes' and warps'. So nobody knows a row's maximum of a tile, nor has
to: as long as no score exceeds the row's maximum so far by more than the policy's threshold, that
one stays. All warps are asked whether any score does, and only then maxima are exchanged.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, const_expr
from cutlass import select_ as select
from cutlass.cute.nvgpu import warpgroup
from cutlass.cutlass_dsl import T, dsl_user_op

from flash_attn_fp8.formats import FP32
from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.load import INDEX, numbers_view
from flash_attn_fp8.kernels.cached.scores import in_log2, is_masked, log2_and_inverse, seen_keys
from flash_attn_fp8.kernels.cached.walk import GROUP_BARRIER
from flash_attn_fp8.kernels.cached.warpgroup.products import (
    Shared,
    Tiles,
    add_values,
    ask_for_scores,
    new_tiles,
    take_values,
    word_of,
)
from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.encode import packed
from flash_attn_fp8.kernels.online import raised
from flash_attn_fp8.kernels.ptx import asm, once_if, opaque
from flash_attn_fp8.specs import WARP, WarpgroupTile

_THREADS = WARP * WarpgroupTile.m_warps
LOWEST = -FP32.max  # the maximum of a row that saw no key


class State(NamedTuple):
    """Of a lane's rows, (row of two, eight): maxima, and sums over the lane's keys.

    The maximum of a row that saw no key is `LOWEST`: finite, so that -inf less it is -inf.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    tiles: Tiles
    shared: Shared


def new_state(ctx: Context, memory: Shared) -> State:
    """Before the first key."""
    layout = cute.make_layout((2, ctx.geometry.row_tiles))
    state = State(
        cute.make_rmem_tensor(layout, Float32),
        cute.make_rmem_tensor(layout, Float32),
        new_tiles(ctx, memory),
        memory,
    )
    state.row_max.fill(LOWEST)
    state.row_sum.fill(0.0)
    return state


@cute.jit
def attend_tile(ctx, queries, factors, state, n_block, stage):
    """A tile's keys: scores, probabilities, and what they add to the output.

    `queries` are in shared memory. K and V have the same registers, one after the other, so that
    two CTAs fit a multiprocessor: one's products run beside the other's softmax.
    """
    t = state.tiles
    ask_for_scores(ctx, t, stage)
    scales = _scales_of_keys(ctx, stage)
    warpgroup.wait_group(0)
    _to_log2(ctx, t.s, factors, scales)
    for _ in cutlass.range(once_if(is_masked(ctx, n_block)), unroll=1):
        _mask(ctx, t.s, n_block, stage)
    exceeds = _any_of_warpgroup(_barrier(ctx), _exceeds(ctx, state))
    for _ in cutlass.range(once_if(exceeds != 0), unroll=1):
        _raise_maxima(ctx, state)
    take_values(ctx, t, stage)
    _exponentiate(ctx, state, scales)
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=_barrier(ctx), number_of_threads=_THREADS)
    add_values(ctx, t)
    warpgroup.wait_group(0)


def _barrier(ctx):
    """Of the warpgroup; `walk` has one for each as well."""
    return GROUP_BARRIER + ctx.spec.tile.key_warps + ctx.key_warp


def _key_in_tile(ctx, half: int):
    return ctx.m_warp * 16 + half * 8 + ctx.lane // 4


class _Scales(NamedTuple):
    """Of a lane's two keys: K's, log2 of V's and one over V's; None where there are none."""

    k: tuple | None
    v_log2: tuple | None
    v_inverse: tuple | None


def _scales_of_keys(ctx, stage) -> _Scales:
    k, v = (
        _of_keys(ctx, stage, kind) if per_token else None
        for kind, per_token in enumerate(ctx.geometry.scales_per_token)
    )
    if v is None:
        return _Scales(k, None, None)
    return _Scales(k, *zip(*(log2_and_inverse(x) for x in v), strict=True))


def _of_keys(ctx, stage, kind: int) -> tuple:
    """A number of each of a lane's keys."""
    view = numbers_view(ctx, stage, kind, Float32)
    return tuple(view[key % 2, key // 2] for key in (_key_in_tile(ctx, half) for half in range(2)))


@cute.jit
def _to_log2(ctx, s, factors, scales: cutlass.Constexpr):
    of_rows = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for eight in cutlass.range_constexpr(ctx.geometry.row_tiles):
        cute.autovec_copy(factors[None, eight], of_rows)
        for half in cutlass.range_constexpr(2):
            of_key = [None if x is None else x[half] for x in (scales.k, scales.v_log2)]
            for i in cutlass.range_constexpr(2):
                number = i + 2 * half + 4 * eight
                s[number] = in_log2(ctx, s[number], of_rows[i], *of_key)


@cute.jit
def _mask(ctx, s, n_block, stage):
    """Keys that a row does not see become -inf."""
    # Or bounds of rows would be computed for every tile, masked or not, and kept in registers.
    first_row, n_block = opaque(ctx.work.row), opaque(n_block)
    keys = [_key(ctx, n_block, stage, half) for half in range(2)]
    for eight in cutlass.range_constexpr(ctx.geometry.row_tiles):
        for i in cutlass.range_constexpr(2):
            row = first_row + row_of_lane(ctx, eight, i)
            lo, hi = seen_keys(ctx, row // ctx.traits.q_heads_per_kv_head)
            for half in cutlass.range_constexpr(2):
                sees = (keys[half] >= lo) & (keys[half] < hi)
                number = i + 2 * half + 4 * eight
                s[number] = select(sees, s[number], NEG_INF)


def _key(ctx, n_block, stage, half: int):
    """The number of a key in its sequence."""
    key = _key_in_tile(ctx, half)
    if ctx.traits.selection is not None:
        return numbers_view(ctx, stage, INDEX, Int32)[key % 2, key // 2]
    return n_block * ctx.spec.tile.n_block + key


def _highest(s, eight: int, i: int):
    """The higher score of a row's that a lane has of a tile; NaN if one is."""
    return cute.arch.fmax(s[i + 4 * eight], s[i + 2 + 4 * eight], nan=True)


@cute.jit
def _exceeds(ctx, state):
    """Whether a score of the lane exceeds its row's maximum by more than is allowed, or is NaN."""
    s = state.tiles.s
    within = Boolean(True)
    for eight in cutlass.range_constexpr(ctx.geometry.row_tiles):
        for i in cutlass.range_constexpr(2):
            highest = _highest(s, eight, i)
            # As `raised` computes it: a row must not be raised because another one is.
            lag = highest - state.row_max[i, eight]
            within = within & (lag <= ctx.traits.policy.rescale_threshold)
    return select(within, Int32(0), Int32(1))


@dsl_user_op
def _any_of_warpgroup(barrier, flag, *, loc=None, ip=None) -> Int32:
    """Whether any thread of the group has a flag; a barrier of the group."""
    text = f"""{{ .reg .pred p, q; setp.ne.b32 p, $2, 0;
barrier.cta.red.or.pred q, $1, {_THREADS}, p; selp.b32 $0, 1, 0, q; }}"""
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (barrier, flag)]
    return Int32(asm(T.i32(), operands, text, "=r,r,r,~{memory}", loc, ip, side_effects=True))


@cute.jit
def _raise_maxima(ctx, state):
    """Exchange the tile's maxima; rows that lag too far get theirs, and what they have follows."""
    g, s = ctx.geometry, state.tiles.s
    maxima = row_numbers(ctx, state.shared)[None, None, 0, ctx.key_warp]
    for eight in cutlass.range_constexpr(g.row_tiles):
        for i in cutlass.range_constexpr(2):
            highest = _highest(s, eight, i)
            for apart in cutlass.range_constexpr(2, 5):
                other = cute.arch.shuffle_sync_bfly(highest, 1 << apart)
                highest = cute.arch.fmax(highest, other, nan=True)
            if ctx.lane < 4:
                maxima[row_of_lane(ctx, eight, i), ctx.m_warp] = highest
    cute.arch.barrier(barrier_id=_barrier(ctx), number_of_threads=_THREADS)
    for eight in cutlass.range_constexpr(g.row_tiles):
        for i in cutlass.range_constexpr(2):
            row = row_of_lane(ctx, eight, i)
            highest = maxima[row, 0]
            for warp in cutlass.range_constexpr(1, 4):
                highest = cute.arch.fmax(highest, maxima[row, warp], nan=True)
            row_max, rescale = raised(ctx.traits.policy, state.row_max[i, eight], highest)
            state.row_max[i, eight] = row_max
            state.row_sum[i, eight] = state.row_sum[i, eight] * rescale
            for o in state.tiles.o:
                for half in cutlass.range_constexpr(2):
                    number = i + 2 * half + 4 * eight
                    o[number] = o[number] * rescale


@cute.jit
def _exponentiate(ctx, state, scales: cutlass.Constexpr):
    """P = 2 ** (x - m + offset) to shared memory; sums of P without V's scales."""
    g, policy, s = ctx.geometry, ctx.traits.policy, state.tiles.s
    p = cute.recast_ptr(state.shared.p_of(ctx), dtype=Uint32)
    p = cute.make_tensor(p, cute.make_layout(g.p_bytes // 4))
    for eight in cutlass.range_constexpr(g.row_tiles):
        for i in cutlass.range_constexpr(2):
            shift = Float32(policy.max_offset) - state.row_max[i, eight]
            for half in cutlass.range_constexpr(2):
                number = i + 2 * half + 4 * eight
                s[number] = cute.math.exp2(s[number] + shift, fastmath=True)
                of_sum = s[number]
                if const_expr(scales.v_inverse is not None):
                    of_sum = of_sum * scales.v_inverse[half]
                state.row_sum[i, eight] = state.row_sum[i, eight] + of_sum
        row = row_of_lane(ctx, eight, 0)
        for half in cutlass.range_constexpr(2):
            first = 2 * half + 4 * eight
            word = packed(policy.p_format, [s[first], s[first + 1]])
            p[word_of(g, row, _key_in_tile(ctx, half), True)] = word


def row_numbers(ctx, memory: Shared) -> cute.Tensor:
    """(row, warp, maximum or sum, group) that warps tell one another."""
    g = ctx.geometry
    start = cute.recast_ptr(memory.numbers, dtype=Float32) + g.rows
    return cute.make_tensor(start, cute.make_layout((g.rows, 4, 2, g.spec.tile.key_warps)))


def row_factors(ctx, memory: Shared) -> cute.Tensor:
    """(row,) factors of scores, and in the end of output."""
    start = cute.recast_ptr(memory.numbers, dtype=Float32)
    return cute.make_tensor(start, cute.make_layout(ctx.geometry.rows))


def row_of_lane(ctx, eight: int, i: int):
    """A row of a lane."""
    return eight * 8 + ctx.lane % 4 * 2 + i
