"""A warp's rows over its key tiles: scores, online softmax, output, all in registers.

Nothing is multiplied into a tile of K or V: K's scales multiply the scores, V's are added to their
logarithm (docs/numerics.md), so that P times V's scale is what is rounded, in range whatever the
scales are. The row sum is of P without V's scale.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.load import (
    INDEX,
    chunk_at,
    numbers_view,
    ring_view,
)
from flash_attn_fp8.kernels.cached.products import interleaved, mma
from flash_attn_fp8.kernels.cached.scores import in_log2, is_masked, log2_and_inverse, seen_keys
from flash_attn_fp8.kernels.codes import pairs
from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.encode import packed
from flash_attn_fp8.kernels.online import raised
from flash_attn_fp8.kernels.ptx import once_if
from flash_attn_fp8.specs import ROWS_PER_MMA

K_SCALE, V_SCALE = range(2)


class State(NamedTuple):
    """Of a warp's rows, a lane's share: (half, m_tile), and O (number of C, v_tile, m_tile)."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    o: cute.Tensor


def new_state(ctx: Context) -> State:
    """Before the first key."""
    m_tiles = ctx.spec.tile.m_tiles
    rows = cute.make_layout((2, m_tiles))
    state = State(
        cute.make_rmem_tensor(rows, Float32),
        cute.make_rmem_tensor(rows, Float32),
        cute.make_rmem_tensor(cute.make_layout((4, ctx.geometry.v_tiles, m_tiles)), Float32),
    )
    state.row_max.fill(NEG_INF)
    state.row_sum.fill(0.0)
    state.o.fill(0.0)
    return state


@cute.jit
def attend_tile(ctx, queries, factors, state, n_block, stage):
    """A tile's keys: scores, probabilities, and what they add to the output."""
    s = _scores(ctx, queries, stage)
    _to_probabilities(ctx, s, factors, state, n_block, stage)
    _accumulate(ctx, s, state.o, stage)


@cute.jit
def _scores(ctx, queries, stage):
    """S of a tile, (number of C, n_tile, m_tile)."""
    g = ctx.geometry
    fmt, m_tiles = ctx.traits.kv_format, g.spec.tile.m_tiles
    k = ring_view(ctx, stage, g.k, 0)
    s = cute.make_rmem_tensor(cute.make_layout((4, g.n_tiles, m_tiles)), Float32)
    s.fill(0.0)
    words = cute.make_rmem_tensor(cute.make_layout((g.k.words, g.n_tiles)), Uint32)
    words_per_step = g.k.element  # a lane has four elements of each MMA
    for block in cutlass.range_constexpr(g.k.vectors):
        for n in cutlass.range_constexpr(g.n_tiles):
            row = n * 8 + ctx.lane // 4
            vector = chunk_at(ctx, g.k, row, block * 4 + ctx.lane % 4)
            cute.autovec_copy(k[None, vector, row], words[None, n])
        for i in cutlass.range_constexpr(g.k.words // words_per_step):
            step = block * (g.k.words // words_per_step) + i
            b = [operand_b(ctx, fmt, words, i, n) for n in range(g.n_tiles)]
            for m in cutlass.range_constexpr(m_tiles):
                a = [queries[j, step, m] for j in range(4)]
                for n in cutlass.range_constexpr(g.n_tiles):
                    c = [s[j, n, m] for j in range(4)]
                    s[0, n, m], s[1, n, m], s[2, n, m], s[3, n, m] = mma(g.mma_format, a, b[n], c)
    return s


def operand_b(ctx, fmt: str, words, step: int, n: int):
    """The two words of B of one MMA."""
    if ctx.geometry.element == 2:
        return [words[2 * step, n], words[2 * step + 1, n]]
    return pairs(fmt, ctx.spec.has_fp8, words[step, n])


@cute.jit
def _to_probabilities(ctx, s, factors, state, n_block, stage):
    """S becomes P, in place; maxima, sums and the output follow."""
    g, policy = ctx.geometry, ctx.traits.policy
    scales = _scales_of_keys(ctx, stage)
    inverse = _inverses(ctx, scales)
    masked = once_if(is_masked(ctx, n_block))
    for m in cutlass.range_constexpr(g.spec.tile.m_tiles):
        raises = cutlass.Boolean(False)
        rescales = [Float32(1.0), Float32(1.0)]
        for half in cutlass.range_constexpr(2):
            _to_log2(ctx, s, m, half, factors[half, m], scales)
            for _ in cutlass.range(masked, unroll=1):
                _mask(ctx, s, m, half, n_block, stage)
            row_max, rescale = raised(policy, state.row_max[half, m], _maximum(ctx, s, m, half))
            state.row_max[half, m] = row_max
            shift = Float32(policy.max_offset) - select(row_max == NEG_INF, Float32(0.0), row_max)
            total = _exponentiate(ctx, s, m, half, shift, inverse)
            state.row_sum[half, m] = state.row_sum[half, m] * rescale + total
            rescales[half] = rescale
            raises = raises | (rescale != 1.0)
        for _ in cutlass.range(once_if(cute.arch.vote_any_sync(raises)), unroll=1):
            for j in cutlass.range_constexpr(g.v_tiles):
                for i in cutlass.range_constexpr(4):
                    state.o[i, j, m] = state.o[i, j, m] * rescales[i // 2]


def _scales_of_keys(ctx, stage):
    """K's scales and log2 of V's, of the keys whose scores a lane has: (which, key); None: none."""
    g = ctx.geometry
    found = []
    for kind, per_token in enumerate(g.scales_per_token):
        values = None
        if per_token:
            values = cute.make_rmem_tensor(cute.make_layout((2, g.n_tiles)), Float32)
            view = numbers_view(ctx, stage, kind, Float32)
            for n in range(g.n_tiles):
                cute.autovec_copy(view[None, n * 4 + ctx.lane % 4], values[None, n])
        found.append(values)
    return found


def _inverses(ctx, scales):
    """One over V's scales; the scales themselves become their logarithms."""
    v = scales[V_SCALE]
    if v is None:
        return None
    inverse = cute.make_rmem_tensor(v.layout, Float32)
    for n in range(ctx.geometry.n_tiles):
        for i in range(2):
            v[i, n], inverse[i, n] = log2_and_inverse(v[i, n])
    return inverse


@cute.jit
def _to_log2(
    ctx, s, m: cutlass.Constexpr, half: cutlass.Constexpr, factor, scales: cutlass.Constexpr
):
    """Scores of a row in log2 units, V's scales included."""
    k_scale, v_log2 = scales
    for n in cutlass.range_constexpr(ctx.geometry.n_tiles):
        for i in cutlass.range_constexpr(2):
            of_key = [None if x is None else x[i, n] for x in (k_scale, v_log2)]
            s[2 * half + i, n, m] = in_log2(ctx, s[2 * half + i, n, m], factor, *of_key)


@cute.jit
def _mask(ctx, s, m: cutlass.Constexpr, half: cutlass.Constexpr, n_block, stage):
    """Keys that the row does not see become -inf."""
    token, _ = ctx.query(m, half)
    lo, hi = seen_keys(ctx, token)
    if const_expr(ctx.traits.selection is not None):
        indices = numbers_view(ctx, stage, INDEX, Int32)
    for n in cutlass.range_constexpr(ctx.geometry.n_tiles):
        for i in cutlass.range_constexpr(2):
            key = n_block * ctx.spec.tile.n_block + n * 8 + ctx.lane % 4 * 2 + i
            if const_expr(ctx.traits.selection is not None):
                key = indices[i, n * 4 + ctx.lane % 4]
            sees = (key >= lo) & (key < hi)
            s[2 * half + i, n, m] = select(sees, s[2 * half + i, n, m], NEG_INF)


@cute.jit
def _maximum(ctx, s, m: cutlass.Constexpr, half: cutlass.Constexpr):
    """Of a row of the tile, over the four lanes that have it; NaN if any score is."""
    highest = s[2 * half, 0, m]
    for n in cutlass.range_constexpr(ctx.geometry.n_tiles):
        for i in cutlass.range_constexpr(2):
            highest = cute.arch.fmax(highest, s[2 * half + i, n, m], nan=True)
    for apart in cutlass.range_constexpr(2):
        other = cute.arch.shuffle_sync_bfly(highest, 1 << apart)
        highest = cute.arch.fmax(highest, other, nan=True)
    return highest


@cute.jit
def _exponentiate(
    ctx, s, m: cutlass.Constexpr, half: cutlass.Constexpr, shift, inverse: cutlass.Constexpr
):
    """x becomes P = 2 ** (x + shift); the sum of P without V's scales, a lane's part of it."""
    total = Float32(0.0)
    for n in cutlass.range_constexpr(ctx.geometry.n_tiles):
        for i in cutlass.range_constexpr(2):
            p = cute.math.exp2(s[2 * half + i, n, m] + shift, fastmath=True)
            s[2 * half + i, n, m] = p
            if const_expr(inverse is not None):
                p = p * inverse[i, n]
            total = total + p
    return total


@cute.jit
def _accumulate(ctx, s, o, stage):
    """O += P V."""
    g = ctx.geometry
    fmt, m_tiles = ctx.traits.kv_format, g.spec.tile.m_tiles
    v = ring_view(ctx, stage, g.v, g.v_start)
    words = cute.make_rmem_tensor(cute.make_layout((g.v.words, 4)), Uint32)
    for keys in cutlass.range_constexpr(0, g.spec.tile.n_block, ROWS_PER_MMA):
        a = [_operand_a(ctx, s, keys // 8, m) for m in range(m_tiles)]
        for vector in cutlass.range_constexpr(g.v.vectors):
            for i in cutlass.range_constexpr(4):
                row = keys + ctx.lane % 4 * 2 + i % 2 + i // 2 * 8
                at = chunk_at(ctx, g.v, row, ctx.lane // 4 * g.v.vectors + vector)
                cute.autovec_copy(v[None, at, row], words[None, i])
            for word in cutlass.range_constexpr(g.v.words):
                b = _columns(ctx, fmt, words, word)
                for i in cutlass.range_constexpr(len(b)):
                    j = (vector * g.v.words + word) * len(b) + i
                    for m in cutlass.range_constexpr(m_tiles):
                        c = [o[number, j, m] for number in range(4)]
                        c = mma(g.mma_format, a[m], b[i], c)
                        o[0, j, m], o[1, j, m], o[2, j, m], o[3, j, m] = c


def _operand_a(ctx, s, n: int, m: int):
    """P of 16 rows and 16 keys: C of two score tiles has it where A wants it."""
    fmt = ctx.traits.policy.p_format
    words = []
    for tile in (n, n + 1):
        for half in range(2):
            words.append(packed(fmt, [s[2 * half, tile, m], s[2 * half + 1, tile, m]]))
    return words


def _columns(ctx, fmt: str, words, word: int):
    """Operands B of the columns in a word of four rows: four of 8 bits, or two of 16."""
    has_fp8 = ctx.spec.has_fp8
    both = []
    for first in (0, 2):  # rows 0 and 1, rows 8 and 9
        mixed = interleaved(fmt, words[word, first], words[word, first + 1])
        both.append([pair for x in mixed for pair in pairs(fmt, has_fp8, x)])
    return list(zip(*both, strict=True))
