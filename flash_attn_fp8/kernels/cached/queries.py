"""Query fragments, as the tensor core wants them, their elements permuted as those of K are.

Over 16-bit keys they are the caller's bits. Over 8-bit codes the tensor core multiplies in fp16:
bf16 is scaled by a power of two for each row, so that its largest element is near fp16's largest
value: elements above 2**-29 of the largest keep all their bits, smaller ones an absolute error of
2**-40 of it, below what the sum in fp32 rounds away. fp16 is taken as it is.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.encode import packed
from flash_attn_fp8.kernels.powers import QUERY_TOP, exponent_of, power_of_two, within_range
from flash_attn_fp8.specs import WARP

_HALF = 4  # elements of a row that a lane has of an MMA


@cute.jit
def load_queries(ctx: Context, m_tile: cutlass.Constexpr):
    """(fragments (4, k_steps), factor of the scores of each half): of 16 rows."""
    g = ctx.geometry
    fragment = cute.make_rmem_tensor(cute.make_layout((4, g.k_steps)), Uint32)
    factors = cute.make_rmem_tensor(cute.make_layout(2), Float32)
    for half in cutlass.range_constexpr(2):
        row = _row(ctx, m_tile, half)
        shift, factors[half] = _shift(ctx, row)
        for step in cutlass.range_constexpr(g.k_steps):
            for pair in cutlass.range_constexpr(2):
                word = _word(ctx, row, 2 * step + pair, shift)
                fragment[2 * pair + half, step] = word
    return fragment, factors


@cute.jit
def _row(ctx, m_tile: cutlass.Constexpr, half: cutlass.Constexpr):
    """A lane's share of a row, zeros where there is none: (element, half of an MMA's share)."""
    g = ctx.geometry
    token, head = ctx.query(m_tile, half)
    row = cute.make_rmem_tensor(cute.make_layout((_HALF, g.k_steps)), ctx.tensors.q.element_type)
    row.fill(0.0)
    if token < ctx.work.seqlen_q:
        source = _source(ctx, token, head)
        for step in cutlass.range_constexpr(g.k_steps):
            cute.autovec_copy(source[None, _position(ctx, step)], row[None, step])
    return row


def _source(ctx, token, head):
    q, work = ctx.tensors.q, ctx.work
    if const_expr(ctx.traits.q_layout == "varlen"):
        row = q[work.offset_q + token, head, None]
    else:
        row = q[work.batch, token, head, None]
    return cute.logical_divide(row, cute.make_layout(_HALF))


def _position(ctx, step: int):
    """Which four elements of a row a lane has in MMA number `step`: those it reads of K."""
    k = ctx.geometry.k
    per_vector = k.vector // k.element // _HALF
    block, within = step // per_vector, step % per_vector
    return (block * 4 + ctx.lane % 4) * per_vector + within


@cute.jit
def _shift(ctx, row):
    """(power of two that multiplies the row, one over it)."""
    shift, inverse = Float32(1.0), Float32(1.0)
    if const_expr(ctx.geometry.element == 1 and ctx.traits.q_format == "bf16"):
        largest = Float32(0.0)
        for step in cutlass.range_constexpr(ctx.geometry.k_steps):
            for i in cutlass.range_constexpr(_HALF):
                x = Float32(row[i, step])
                largest = cute.arch.fmax(largest, cute.arch.fmax(x, -x))
        for apart in cutlass.range_constexpr(2):
            other = cute.arch.shuffle_sync_bfly(largest, 1 << apart)
            largest = cute.arch.fmax(largest, other)
        by = within_range(QUERY_TOP - exponent_of(largest))
        shift, inverse = power_of_two(by), power_of_two(-by)
    return shift, inverse


@cute.jit
def _word(ctx, row, pair: cutlass.Constexpr, shift):
    """Two elements of a lane's share of a row: a word of A."""
    step, first = pair // 2, 2 * (pair % 2)
    if const_expr(ctx.traits.q_format == ctx.geometry.mma_format):
        words = cute.recast_tensor(row[None, step], Uint32)
        word = words[first // 2]
    else:
        values = [Float32(row[first + i, step]) * shift for i in range(2)]
        word = packed("fp16", values)
    return word


def shared_queries(ctx: Context):
    """Fragments of a warp in shared memory: (word, lane, step, m_tile)."""
    g = ctx.geometry
    m_tiles, m_warps = g.spec.tile.m_tiles, g.spec.tile.m_warps
    shape = 4, WARP, g.k_steps, m_tiles, m_warps
    layout = cute.make_layout(
        shape, stride=(1, 4, 4 * WARP, 4 * WARP * g.k_steps, 4 * WARP * g.k_steps * m_tiles)
    )
    start = cute.recast_ptr(ctx.queries, dtype=Uint32)
    return cute.make_tensor(start, layout)[None, ctx.lane, None, None, ctx.m_warp]
