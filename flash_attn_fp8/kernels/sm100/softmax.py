"""The softmax warps: a row of scores a thread, online, right to left; P into tensor memory.

With x the score in log2 units, m the running maximum (it may lag by the policy's threshold) and
offset the policy's max_offset,

    P = 2 ** (x - m + offset),    l += sum P,    l_q += sum of P as it was rounded.

A row's factor 2 ** (m_old - m), and at the end what normalises its output, go to the correction
warps through shared memory; where the tensor core makes l_q, they get m at the end instead.
docs/numerics.md derives the formulas.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.encode import (
    SUM_SCALE,
    SUMMED_WORDS,
    code_line,
    exp2_by_fma,
    mul_up,
    packed,
    packed_codes,
    sum_of_16bit,
    sum_of_fp8,
)
from flash_attn_fp8.kernels.forward.finish import finish, nothing_seen, write_lse
from flash_attn_fp8.kernels.forward.geometry import K_FACTOR, V_INVERSE, V_LOG2
from flash_attn_fp8.kernels.forward.rings import arrive
from flash_attn_fp8.kernels.forward.scales import (
    is_uniform,
    per_token,
    row_factor,
)
from flash_attn_fp8.kernels.forward.schedule import Work, each_unit
from flash_attn_fp8.kernels.online import capped, raised
from flash_attn_fp8.kernels.sm100 import tensor_memory
from flash_attn_fp8.kernels.sm100.barriers import arrive_at_leader
from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.specs import TILE

_SCALES_AT_ONCE = 16  # keys whose scales are in registers


class Row(NamedTuple):
    """A thread's row of a unit of work, and the factor of its scores."""

    tmem: cute.Pointer
    work: Work
    stage: Int32
    thread: Int32
    factor: Float32


@cute.jit
def softmax_role(ctx: Context, stage: Int32, tmem):
    """Rows of query tile `stage` of one unit of work after another."""
    thread = cute.arch.thread_idx()[0] % TILE
    at = tensor_memory.of_warp(tmem, thread), stage, thread
    each_unit(ctx, partial(_unit, ctx, at), partial(_without_keys, ctx, stage, thread))


@cute.jit
def _unit(ctx, at: cutlass.Constexpr, work, units: Int32, tiles: Int32):
    tmem, stage, thread = at
    token, head, _ = ctx.schedule.query(work, stage, thread)
    row = Row(tmem, work, stage, thread, row_factor(ctx, work, token, head))
    state = _key_tiles(ctx, row, tiles)
    last = tiles + work.tiles - 1
    if const_expr(ctx.geometry.sums_by_mma):
        row_max, _, _ = state
        _send(ctx, stage, thread, last, row_max)  # the sum comes to the correction warps, too
    else:
        normalizer, lse = finish(ctx, work, head, state)
        _send(ctx, stage, thread, last, normalizer)
        write_lse(ctx, work, stage, thread, lse)


@cute.jit
def _without_keys(ctx, stage, thread, work):
    _, head, _ = ctx.schedule.query(work, stage, thread)
    _, lse = finish(ctx, work, head, nothing_seen())
    write_lse(ctx, work, stage, thread, lse)


@cute.jit
def _key_tiles(ctx, row, tiles):
    """All key tiles of a row, right to left: (row_max, row_sum, row_sum_quantized).

    Those that some row of the query tile sees in part, then those that all rows see whole, whose
    code has no mask; with a bound on the left, again some that are seen in part.
    """
    row_max, row_sum, row_sum_quantized = nothing_seen()
    work = row.work
    n_left, n_right = ctx.schedule.whole_tiles(work, row.stage)
    tile = tiles
    for part in cutlass.range(2 if const_expr(ctx.traits.bounded_left) else 1, unroll=1):
        masked, whole = work.n_max - n_right, n_right - n_left
        if part > 0:
            masked, whole = n_left - work.n_min, Int32(0)
        for _ in cutlass.range(masked, unroll=1):
            state = row_max, row_sum, row_sum_quantized
            state = _tile(ctx, row, tile, tile - tiles, state, True)
            row_max, row_sum, row_sum_quantized = state
            tile += 1
        for _ in cutlass.range(whole, unroll=1):
            state = row_max, row_sum, row_sum_quantized
            state = _tile(ctx, row, tile, tile - tiles, state, False)
            row_max, row_sum, row_sum_quantized = state
            tile += 1
    return row_max, row_sum, row_sum_quantized


@cute.jit
def _tile(ctx, row, tile, i, state, masked: cutlass.Constexpr):
    """Key tile `i` of a row, number `tile` of the launch: the state after it."""
    g, policy = ctx.geometry, ctx.traits.policy
    stage, thread = row.stage, row.thread
    row_max, row_sum, row_sum_quantized = state
    slot, use = g.slot_and_use(tile, stage)
    ctx.barriers.s_full.wait(slot, use)
    tensor_memory.fence_after_wait()
    address = row.tmem + g.s_column(slot)
    s = tensor_memory.load(address, TILE)
    cute.arch.fence_view_async_tmem_load()
    scales = None
    if const_expr(g.scales_per_token):
        ctx.barriers.token_scales.wait_full(tile)
        scales = ctx.buffers.token_scale[None, None, ctx.barriers.token_scales.slot(tile)]
    factor = _to_log2(ctx, s, row.factor, scales)
    if const_expr(masked):
        _mask(ctx, s, row, row.work.n_max - 1 - i)
    row_max, rescale = raised(policy, row_max, _top(ctx, s, factor))
    if i > 0:
        _send(ctx, stage, thread, tile - 1, rescale)
    exact, rounded = _probabilities(ctx, s, scales, factor, row_max, address)
    cute.arch.fence_view_async_tmem_store()
    tensor_memory.fence_before_arrive()
    arrive_at_leader(ctx.geometry, ctx.barriers.p_full.at(slot))
    if const_expr(g.scales_per_token):
        arrive(ctx.barriers.token_scales.empty(tile))
    row_sum = row_sum * rescale + (exact[0] + exact[1])
    scale = SUM_SCALE.get(policy.p_format, 1.0)
    row_sum_quantized = row_sum_quantized * rescale + (rounded[0] + rounded[1]) * (1 / scale)
    return row_max, row_sum, row_sum_quantized


@cute.jit
def _probabilities(ctx, s, scales, factor, row_max, address):
    """P of a row's tile to tensor memory: (sums, sums of P as it was rounded)."""
    g, policy = ctx.geometry, ctx.traits.policy
    finite = select(row_max == NEG_INF, Float32(0.0), row_max)
    exponent = factor, Float32(policy.max_offset) - finite
    zero = Float32(0.0), Float32(0.0)
    exact, rounded = zero, zero
    for key in cutlass.range_constexpr(0, TILE, g.keys_at_once):
        if const_expr(g.makes_codes):
            line = code_line(policy, factor, finite)
            words, exact = _coded(g, s, key, line, exponent, exact)
        else:
            _exponentiate(g, s, key, *exponent)
            words = _rounded(ctx, s, key)
        column = key * g.element // 4
        tensor_memory.store(words, address + column, cute.size(words), cute.size(words))
        if const_expr(ctx.traits.v_scale_in_exponent):
            exact = _weighted_sum(g, s, key, scales, exact)
        elif const_expr(g.sums_exponentials and not g.makes_codes):
            exact = _sum(g, s, key, exact)
        if const_expr(g.sums_in_registers):
            rounded = _sum_of_rounded(ctx, words, rounded)
    return exact, rounded


@cute.jit
def _to_log2(ctx, s, factor, scales):
    """Scores that are no plain multiple of x become x, in place; what is left to multiply."""
    if const_expr(ctx.geometry.scales_per_token):
        for column in cutlass.range_constexpr(0, TILE, _SCALES_AT_ONCE):
            k_factor = _scales_of(scales, K_FACTOR, column)
            v_log2 = _scales_of(scales, V_LOG2, column)
            for i in cutlass.range_constexpr(0, _SCALES_AT_ONCE, 2):
                of_keys = (k_factor[i], k_factor[i + 1]), (v_log2[i], v_log2[i + 1])
                pair = s[column + i], s[column + i + 1]
                s[column + i], s[column + i + 1] = _scaled(ctx, pair, factor, *of_keys)
        factor = Float32(1.0)
    elif const_expr(ctx.traits.softcap):
        for i in cutlass.range_constexpr(TILE):
            s[i] = capped(s[i] * factor, ctx.scalars.softcap)
        factor = Float32(1.0)
    return factor


def _scaled(ctx, pair, factor, k_factor, v_log2):
    """x of two scores whose keys have scales of their own: the last multiplication adds V's."""
    traits = ctx.traits
    multiplier = factor, factor
    if per_token(traits.k_descale):
        multiplier = k_factor
        if not is_uniform(ctx):
            pair = cute.arch.mul_packed_f32x2(pair, (factor, factor))
    if traits.softcap:
        pair = cute.arch.mul_packed_f32x2(pair, multiplier)
        cap = ctx.scalars.softcap
        pair = capped(pair[0], cap), capped(pair[1], cap)
        multiplier = Float32(1.0), Float32(1.0)
    if per_token(traits.v_descale):
        return cute.arch.fma_packed_f32x2(pair, multiplier, v_log2)
    return pair if traits.softcap else cute.arch.mul_packed_f32x2(pair, multiplier)


def _scales_of(scales, kind: int, column: int):
    """Some keys' numbers of one kind, in registers; what nobody uses is not read."""
    values = cute.make_rmem_tensor(cute.make_layout(_SCALES_AT_ONCE), Float32)
    part = cute.logical_divide(scales[None, kind], cute.make_layout(_SCALES_AT_ONCE))
    cute.autovec_copy(part[None, column // _SCALES_AT_ONCE], values)
    return values


@cute.jit
def _mask(ctx, s, row, n_block):
    """Keys that the row does not see become -inf."""
    token, _, _ = ctx.schedule.query(row.work, row.stage, row.thread)
    lo, hi = ctx.schedule.visible(token, row.work)
    from_key, to_key = lo - n_block * TILE, hi - n_block * TILE
    for i in cutlass.range_constexpr(TILE):
        visible = i < to_key
        if const_expr(ctx.traits.bounded_left):
            visible = visible & (i >= from_key)
        s[i] = select(visible, s[i], NEG_INF)


@cute.jit
def _maximum(s):
    """NaN if any score is: then the whole row becomes NaN, as it must."""
    chains = [s[i] for i in range(4)]
    for i in cutlass.range_constexpr(4, TILE):
        chains[i % 4] = cute.arch.fmax(chains[i % 4], s[i], nan=True)
    first = cute.arch.fmax(chains[0], chains[1], nan=True)
    return cute.arch.fmax(first, cute.arch.fmax(chains[2], chains[3], nan=True), nan=True)


@cute.jit
def _top(ctx, s, factor):
    """The maximum of x; what codes are made with is not to be below it."""
    top = _maximum(s)
    if const_expr(ctx.geometry.makes_codes):
        return mul_up(top, factor)
    return top * factor


@cute.jit
def _exponentiate(g: cutlass.Constexpr, s, first: cutlass.Constexpr, factor, shift):
    """Some of s becomes 2 ** (s * factor + shift)."""
    for i in cutlass.range_constexpr(first, first + g.keys_at_once, 2):
        s[i], s[i + 1] = _exponentials(g, s, i, factor, shift)


def _exponentials(g, s, i: int, factor, shift):
    """Of a pair of scores; of some pairs on the FMA pipe, which would idle."""
    a, b = cute.arch.fma_packed_f32x2((s[i], s[i + 1]), (factor, factor), (shift, shift))
    if _by_fma(g, i // 2):
        return exp2_by_fma(a, b)
    return cute.math.exp2(a, fastmath=True), cute.math.exp2(b, fastmath=True)


def _by_fma(g, pair: int) -> bool:
    """Whether this pair of exponentials is one of `pairs_by_fma`, spread evenly."""
    pairs, of_them = TILE // 2, g.pairs_by_fma
    return (pair + 1) * of_them // pairs > pair * of_them // pairs


@cute.jit
def _coded(g: cutlass.Constexpr, s, first: cutlass.Constexpr, line, exponent, total):
    """Some of P in an fp8 format, straight from its logarithm: (words that hold it, total).

    To the total the exponentials are added that P has none of, where anyone wants their sum.
    """
    words = cute.make_rmem_tensor(cute.make_layout(g.keys_at_once // 4), Uint32)
    slopes, offsets = ((x, x) for x in line)
    for i in cutlass.range_constexpr(g.keys_at_once // 4):
        codes = []
        for at in cutlass.range_constexpr(first + 4 * i, first + 4 * i + 4, 2):
            codes += cute.arch.fma_packed_f32x2((s[at], s[at + 1]), slopes, offsets)
            if const_expr(g.sums_exponentials):
                total = cute.arch.add_packed_f32x2(total, _exponentials(g, s, at, *exponent))
        words[i] = packed_codes(codes)
    return words, total


@cute.jit
def _rounded(ctx, s, first: cutlass.Constexpr):
    """Some of P in its format: the 32-bit words that hold it."""
    g, per_word = ctx.geometry, 4 // ctx.geometry.element
    words = cute.make_rmem_tensor(cute.make_layout(g.keys_at_once // per_word), Uint32)
    for i in cutlass.range_constexpr(g.keys_at_once // per_word):
        values = [s[first + i * per_word + j] for j in range(per_word)]
        words[i] = packed(ctx.traits.policy.p_format, values)
    return words


# Sums of a tile are kept as two numbers, of the even keys and of the odd ones, until its end.


@cute.jit
def _sum(g: cutlass.Constexpr, s, first: cutlass.Constexpr, total):
    for i in cutlass.range_constexpr(first, first + g.keys_at_once, 2):
        total = cute.arch.add_packed_f32x2(total, (s[i], s[i + 1]))
    return total


@cute.jit
def _weighted_sum(g: cutlass.Constexpr, s, first: cutlass.Constexpr, scales, total):
    """Of P, each divided by its key's V scale."""
    for column in cutlass.range_constexpr(first, first + g.keys_at_once, _SCALES_AT_ONCE):
        inverse = _scales_of(scales, V_INVERSE, column)
        for i in cutlass.range_constexpr(0, _SCALES_AT_ONCE, 2):
            pair = s[column + i], s[column + i + 1]
            total = cute.arch.fma_packed_f32x2(pair, (inverse[i], inverse[i + 1]), total)
    return total


@cute.jit
def _sum_of_rounded(ctx, words, total):
    """Of P as it was rounded, times SUM_SCALE."""
    fmt = ctx.traits.policy.p_format
    for i in cutlass.range_constexpr(0, cute.size(words), SUMMED_WORDS):
        some = [words[i + j] for j in range(SUMMED_WORDS)]
        summed = sum_of_fp8(fmt, some) if fmt in SUM_SCALE else sum_of_16bit(fmt, some)
        total = cute.arch.add_packed_f32x2(total, summed)
    return total


@cute.jit
def _send(ctx, stage, thread, message, value):
    """Give the correction warps a number for this row; messages of a stage are counted."""
    ctx.barriers.scale_empty.wait_previous(stage, message)
    ctx.buffers.row_scale[thread, stage] = value
    arrive(ctx.barriers.scale_full.at(stage))
