"""Online softmax of two rows a lane, as wgmma leaves them in registers; P as codes.

With x the score in log2 units, m the running maximum (it may lag by the policy's threshold) and
offset the policy's max_offset,

    P = 2 ** (x - m + offset),    l += sum P.

The sum of P as it was rounded comes from columns of ones beside V's (`geometry.sums_by_mma`), or,
in 16 bits, from registers: a lane adds up its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.encode import (
    code_line,
    fma_down,
    fma_up,
    mul_up,
    packed,
    packed_codes,
    values_of_16bit,
)
from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.kernels.forward.geometry import K_FACTOR, V_INVERSE, V_LOG2
from flash_attn_fp8.kernels.forward.rings import arrive
from flash_attn_fp8.kernels.forward.scales import (
    SMALLEST_FACTOR,
    is_uniform,
    per_tile,
    per_token,
    row_factor,
)
from flash_attn_fp8.kernels.forward.schedule import Work
from flash_attn_fp8.kernels.online import capped, raised
from flash_attn_fp8.kernels.ptx import kept, once_if
from flash_attn_fp8.kernels.sm90.geometry import WARPGROUP
from flash_attn_fp8.kernels.sm90.transposed import first_column
from flash_attn_fp8.specs import TILE, WARP

_FAR = 2.0**20  # octaves from 0, up to which roundings of a row's maximum move P by less than one


@dataclass(frozen=True)
class Rows:
    """A lane's two rows in a unit of work: 8 apart, shared with the other lanes of its quad."""

    ctx: Context
    work: Work
    stage: Int32
    lane: Int32
    first: Int32
    factor: Any
    row_max: Any
    row_sum: Any
    rounded_sum: Any
    units: Any

    @classmethod
    def of(cls, ctx: Context, work: Work, stage) -> Rows:
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        lane = thread % WARP
        first = thread // WARP * 16 + lane // 4
        factor, row_max, row_sum, rounded_sum = (
            cute.make_rmem_tensor(cute.make_layout(2), Float32) for _ in range(4)
        )
        row_max.fill(NEG_INF)
        row_sum.fill(0.0)
        rounded_sum.fill(0.0)
        units = None if ctx.tensors.units is None else _units(ctx, work)
        rows = cls(ctx, work, stage, lane, first, factor, row_max, row_sum, rounded_sum, units)
        for r in range(2):
            token, head, _ = ctx.schedule.query(work, stage, rows.row(r))
            factor[r] = row_factor(ctx, work, token, head)
        return rows

    def row(self, r: int):
        """Number of row `r` in the query tile."""
        return self.first + 8 * r

    def head(self, r: int):
        """The query head of row `r`."""
        return self.ctx.schedule.query(self.work, self.stage, self.row(r))[1]

    def of_quad(self, part):
        """The sum of a row: each lane of the quad has a quarter."""
        return _over_quad(part, lambda a, b: a + b)


def _units(ctx, work):
    """(tile, K or V) of a sequence and KV head: what `widen.py` makes."""
    batch, first = work.batch, Int32(0)
    if ctx.traits.kv_layout == "varlen":
        batch, first = 0, first_column(TILE, work.offset_k, work.batch) // TILE
    units = ctx.tensors.units[batch, ctx.schedule.kv_head(work.head), None, None]
    units = cute.domain_offset((first, 0), units)
    return cute.make_tensor(kept(units.iterator), units.layout)


def _over_quad(x, op):
    for step in (1, 2):
        x = op(x, cute.arch.shuffle_sync_bfly(x, offset=step))
    return x


class KeyScales(NamedTuple):
    """Scales of a tile's keys. None: the spec has no use for it.

    `of_keys` (key, kind) in shared memory, of each; or of all: what multiplies scores, and what is
    added to their logarithm for V, which P V is in units of.
    """

    of_keys: Any
    k_unit: Any
    v_unit_log2: Any


def key_scales(ctx, rows, tile: Int32, i: Int32) -> KeyScales:
    """Those of key tile `i` of the rows, `tile` of the launch."""
    g, of_keys = ctx.geometry, None
    if g.scales_per_token:
        ctx.barriers.token_scales.wait_full(tile)
        of_keys = ctx.buffers.token_scale[None, None, ctx.barriers.token_scales.slot(tile)]
    k_unit = v_unit_log2 = None
    if rows.units is not None:
        both = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        cute.autovec_copy(rows.units[(rows.work.n_max - 1 - i) * g.tile_n // TILE, None], both)
        k_unit = both[0] if per_tile(ctx.traits.k_descale) else None
        v_unit_log2 = both[1] if per_tile(ctx.traits.v_descale) else None
    return KeyScales(of_keys, k_unit, v_unit_log2)


@cute.jit
def softmax(
    ctx,
    rows,
    s,
    scales: cutlass.Constexpr,
    rescale,
    tile: Int32,
    i: Int32,
    masked: cutlass.Constexpr,
):
    """Scores of key tile `i` of the rows, `tile` of the launch, become P, not yet rounded."""
    g, policy = ctx.geometry, ctx.traits.policy
    sums = ctx.traits.exact_row_sum or g.spec.writes_lse
    factors = [_factor(rows.factor[r], scales.k_unit) for r in range(2)]
    _to_log2(ctx, rows, s, factors, scales.of_keys)
    if const_expr(masked):
        _mask(ctx, rows, s, rows.work.n_max - 1 - i)
    tops = _maxima(s, masked)
    lines = [(factors[r] if _is_plain(ctx) else Float32(1.0), Float32(0.0)) for r in range(2)]
    if const_expr(g.spec.widened):
        lines, tops = _bounded(s, [factor for factor, _ in lines], scales.v_unit_log2, tops)
    for r in cutlass.range_constexpr(2):
        factor, v_log2 = lines[r]
        top = tops[r] if const_expr(g.spec.widened) else _top(ctx, tops[r], factor)
        row_max, rescale[r] = raised(policy, rows.row_max[r], top)
        rows.row_max[r] = row_max
        finite = select(row_max == NEG_INF, Float32(0.0), row_max)
        shift = Float32(policy.max_offset) - finite
        if const_expr(g.spec.widened):
            shift = fma_down(1.0, v_log2, fma_down(-1.0, finite, policy.max_offset))
        total = Float32(0.0)
        if const_expr(policy.exp2 == "code"):
            if const_expr(sums):
                total = _sum_of_exponentials(s, r, factor, shift)
            _codes(s, r, policy, factor, finite)
        else:
            for j in cutlass.range_constexpr(cute.size(s) // 4):
                for e in cutlass.range_constexpr(2):
                    at = e + 2 * r + 4 * j
                    s[at] = cute.math.exp2(s[at] * factor + shift, fastmath=True)
            if const_expr(sums):
                total = _sum(ctx, rows, s, r, scales.of_keys)
            if const_expr(scales.v_unit_log2 is not None):
                total = total * cute.math.exp2(-scales.v_unit_log2, fastmath=True)
        if const_expr(sums):
            rows.row_sum[r] = rows.row_sum[r] * rescale[r] + total
    if const_expr(g.scales_per_token):
        arrive(ctx.barriers.token_scales.empty(tile))


def _top(ctx, top, factor):
    """A row's maximum in log2 units; for codes rounded up (`code_line`)."""
    rounds_up = ctx.traits.policy.exp2 == "code" and _is_plain(ctx)
    return mul_up(top, factor) if rounds_up else top * factor


@cute.jit
def _bounded(s, factors: cutlass.Constexpr, v_unit_log2: cutlass.Constexpr, tops):
    """Of two rows the lines from scores to x, (factor, log2 of V's unit), and maxima of x.

    Maxima are rounded up, so that no P is above 2 ** offset: fp16 has little room beyond. Far from
    0 rounding is by octaves, and P of every key could be 0: there scores become x in place, whose
    maximum is exact.
    """
    v_log2 = Float32(0.0) if const_expr(v_unit_log2 is None) else v_unit_log2
    tops = [fma_up(tops[r], factors[r], v_log2) for r in range(2)]
    far = [(cute.arch.fmax(x, -x) > _FAR) & (x != NEG_INF) for x in tops]
    for _ in cutlass.range(once_if(cute.arch.vote_any_sync(far[0] | far[1])), unroll=1):
        for i in cutlass.range_constexpr(cute.size(s)):
            r = i // 2 % 2
            s[i] = select(far[r], fma_up(s[i], factors[r], v_log2), s[i])
    lines = [
        (select(far[r], Float32(1.0), factors[r]), select(far[r], Float32(0.0), v_log2))
        for r in range(2)
    ]
    return lines, tops


def _factor(factor, k_unit):
    """What multiplies a row's scores; not 0, which would make NaN of a masked one."""
    return factor if k_unit is None else cute.arch.fmax(factor * k_unit, SMALLEST_FACTOR, nan=True)


def _is_plain(ctx) -> bool:
    """Whether x is the score times the row's factor."""
    return not (ctx.geometry.scales_per_token or ctx.traits.softcap)


@cute.jit
def _to_log2(ctx, rows, s, factors: cutlass.Constexpr, scales: cutlass.Constexpr):
    """Scores that are no plain multiple of x become x, in place."""
    traits = ctx.traits
    if const_expr(not _is_plain(ctx)):
        for i in cutlass.range_constexpr(cute.size(s)):
            factor = factors[i // 2 % 2]
            x, column = s[i], _column(rows, i)
            if const_expr(per_token(traits.k_descale)):
                x = x * (factor if const_expr(not is_uniform(ctx)) else Float32(1.0))
                factor = scales[column, K_FACTOR]
            if const_expr(traits.softcap):
                x = capped(x * factor, ctx.scalars.softcap)
                factor = Float32(1.0)
            if const_expr(per_token(traits.v_descale)):
                x = x * factor + scales[column, V_LOG2]
            else:
                x = x * factor
            s[i] = x


def _column(rows, i: int):
    """The key of a lane's score number `i`, in its tile."""
    return i // 4 * 8 + i % 2 + rows.lane % 4 * 2


@cute.jit
def _mask(ctx, rows, s, n_block):
    """Keys that a row does not see become -inf."""
    for r in cutlass.range_constexpr(2):
        token, _, _ = ctx.schedule.query(rows.work, rows.stage, rows.row(r))
        lo, hi = ctx.schedule.visible(token, rows.work)
        first = n_block * ctx.geometry.tile_n + rows.lane % 4 * 2
        from_key, to_key = lo - first, hi - first
        for j in cutlass.range_constexpr(cute.size(s) // 4):
            for e in cutlass.range_constexpr(2):
                at = e + 2 * r + 4 * j
                visible = 8 * j + e < to_key
                if const_expr(ctx.traits.bounded_left):
                    visible = visible & (8 * j + e >= from_key)
                s[at] = select(visible, s[at], NEG_INF)


@cute.jit
def _maxima(s, masked: cutlass.Constexpr):
    """The maximum of each row; NaN if any score is: then the whole row becomes NaN, as it must.

    Numbers of which one is positive are in the order of their bits as integers, of which the ALU
    compares three at once, and three floats it does not.
    """
    if const_expr(masked):
        return _float_maxima(s)
    bits = [_over_quad(_integer_maximum(s, r), cutlass.max) for r in range(2)]
    tops = tuple(x.bitcast(Float32) for x in bits)
    if cute.arch.vote_any_sync(cutlass.min(*bits) < 0):
        tops = _float_maxima(s)
    return tops


@cute.jit
def _float_maxima(s):
    tops = []
    for r in cutlass.range_constexpr(2):
        chains = [s[e + 2 * r] for e in range(2)]
        for j in cutlass.range_constexpr(1, cute.size(s) // 4):
            for e in cutlass.range_constexpr(2):
                chains[e] = _fmax(chains[e], s[e + 2 * r + 4 * j])
        tops.append(_fmax(*chains))
    return tuple(_over_quad(top, _fmax) for top in tops)


def _fmax(a, b):
    return cute.arch.fmax(a, b, nan=True)


@cute.jit
def _integer_maximum(s, r: cutlass.Constexpr):
    bits = [s[i].bitcast(Int32) for i in range(2 * r, cute.size(s), 4)]
    bits += [s[i].bitcast(Int32) for i in range(2 * r + 1, cute.size(s), 4)]
    chains = bits[:2]
    for i in cutlass.range_constexpr(2, len(bits), 2):
        chain = i // 2 % 2
        chains[chain] = cutlass.max(cutlass.max(chains[chain], bits[i]), bits[i + 1])
    return cutlass.max(*chains)


@cute.jit
def _sum(ctx, rows, p, r: cutlass.Constexpr, scales):
    """Of a lane's part of a row of P, each over its key's V scale if that is in the exponent."""
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(cute.size(p) // 4):
        for e in cutlass.range_constexpr(2):
            at = e + 2 * r + 4 * j
            if const_expr(ctx.traits.v_scale_in_exponent):
                sums[e] = sums[e] + p[at] * scales[_column(rows, at), V_INVERSE]
            else:
                sums[e] = sums[e] + p[at]
    return sums[0] + sums[1]


@cute.jit
def _sum_of_exponentials(s, r: cutlass.Constexpr, factor, shift):
    """Of a lane's part of a row, whose P will have none: the LSE and exact sums want them."""
    sums = [Float32(0.0), Float32(0.0)]
    for j in cutlass.range_constexpr(cute.size(s) // 4):
        for e in cutlass.range_constexpr(2):
            x = s[e + 2 * r + 4 * j] * factor + shift
            sums[e] = sums[e] + cute.math.exp2(x, fastmath=True)
    return sums[0] + sums[1]


@cute.jit
def _codes(s, r: cutlass.Constexpr, policy: cutlass.Constexpr, factor, row_max):
    """A row of P straight from its logarithm."""
    slope, offset = code_line(policy, factor, row_max)
    for j in cutlass.range_constexpr(cute.size(s) // 4):
        for e in cutlass.range_constexpr(2):
            at = e + 2 * r + 4 * j
            s[at] = s[at] * slope + offset


@cute.jit
def encode(ctx, rows, p, rescale, words):
    """P in its format, as wgmma reads its first operand: words (row, half, step).

    In fp8 a word has a lane's scores of two neighbouring eights of keys, which is the order that
    V^T has its keys in; in 16 bits, of one.
    """
    policy = ctx.traits.policy
    sums = [Float32(0.0), Float32(0.0)]
    per_word = 4 // ctx.geometry.element
    for w in cutlass.range_constexpr(cute.size(words) // 2):
        for r in cutlass.range_constexpr(2):
            first = 2 * r + 4 * (per_word // 2) * w
            values = [p[first + 4 * (n // 2) + n % 2] for n in range(per_word)]
            if const_expr(policy.exp2 == "code"):
                words[r + 2 * w] = packed_codes(values)
            else:
                words[r + 2 * w] = packed(policy.p_format, values)
            if const_expr(ctx.geometry.sums_in_registers):
                low, high = values_of_16bit(policy.p_format, words[r + 2 * w])
                sums[r] = sums[r] + (low + high)
    if const_expr(ctx.geometry.sums_in_registers):
        for r in cutlass.range_constexpr(2):
            rows.rounded_sum[r] = rows.rounded_sum[r] * rescale[r] + sums[r]
