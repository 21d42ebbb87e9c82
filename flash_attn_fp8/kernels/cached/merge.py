"""The end of a CTA: groups of warps merge what they have of a row; normalise; store.

Each group adds up its share of the columns of all groups, in their order.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.scores import merged_sum, weight_of
from flash_attn_fp8.kernels.codes import bias_log2
from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.online import finished, sink_logit
from flash_attn_fp8.specs import WARP


@cute.jit
def finish(ctx: Context, state):
    """Write output and LSE of the CTA's rows."""
    for m in cutlass.range_constexpr(ctx.spec.tile.m_tiles):
        for half in cutlass.range_constexpr(2):
            total = state.row_sum[half, m]
            for apart in cutlass.range_constexpr(2):
                total = total + cute.arch.shuffle_sync_bfly(total, 1 << apart)
            state.row_sum[half, m] = total
    if const_expr(ctx.spec.tile.key_warps > 1):
        _share_sums(ctx, state)
    factors = cute.make_rmem_tensor(state.row_max.layout, Float32)
    for m in cutlass.range_constexpr(ctx.spec.tile.m_tiles):
        for half in cutlass.range_constexpr(2):
            factors[half, m] = _normalize(ctx, state, m, half)
    if const_expr(ctx.spec.tile.key_warps > 1):
        _exchange(ctx, state.o, factors)
    else:
        for m in cutlass.range_constexpr(ctx.spec.tile.m_tiles):
            _store(ctx, state.o, factors, m, 0, ctx.geometry.v_tiles)


def _sums_view(ctx):
    """(maximum or sum, half, m_tile, thread of a group, group) in shared memory."""
    g = ctx.geometry
    m_tiles, threads, groups = g.spec.tile.m_tiles, g.group_threads, g.spec.tile.key_warps
    layout = cute.make_layout(
        (2, 2, m_tiles, threads, groups),
        stride=(2 * m_tiles * threads, m_tiles * threads, threads, 1, 4 * m_tiles * threads),
    )
    return cute.make_tensor(cute.recast_ptr(ctx.rings, dtype=Float32), layout)


@cute.jit
def _share_sums(ctx, state):
    """Row maxima and sums become those of all groups; each group's O is scaled to them."""
    g = ctx.geometry
    sums, thread = _sums_view(ctx), ctx.m_warp * WARP + ctx.lane
    cute.arch.sync_threads()  # the rings are no longer in use
    for m in cutlass.range_constexpr(g.spec.tile.m_tiles):
        for half in cutlass.range_constexpr(2):
            sums[0, half, m, thread, ctx.key_warp] = state.row_max[half, m]
            sums[1, half, m, thread, ctx.key_warp] = state.row_sum[half, m]
    cute.arch.sync_threads()
    for m in cutlass.range_constexpr(g.spec.tile.m_tiles):
        for half in cutlass.range_constexpr(2):
            of_groups = range(g.spec.tile.key_warps)
            highest, total = merged_sum(
                *([sums[what, half, m, thread, group] for group in of_groups] for what in range(2))
            )
            mine = weight_of(state.row_max[half, m], highest)
            for j in cutlass.range_constexpr(g.v_tiles):
                for i in cutlass.range_constexpr(2):
                    state.o[2 * half + i, j, m] = state.o[2 * half + i, j, m] * mine
            state.row_max[half, m], state.row_sum[half, m] = highest, total


@cute.jit
def _normalize(ctx, state, m: cutlass.Constexpr, half: cutlass.Constexpr):
    """What multiplies a row of O; its LSE is written by the first lane that has it."""
    token, head = ctx.query(m, half)
    writes = (ctx.lane % 4 == 0) & (ctx.key_warp == 0)
    return normalizer(ctx, token, head, state.row_max[half, m], state.row_sum[half, m], writes)


@cute.jit
def normalizer(ctx, token, head, row_max, row_sum, writes):
    """What multiplies a row of O, whose LSE is written where `writes`."""
    logit = sink_logit(ctx.tensors, head, ctx.work.split if ctx.spec.split else None)
    factor, lse = finished(row_max, row_sum, row_sum, logit, ctx.traits.policy.max_offset)
    if const_expr(ctx.spec.writes_lse):
        if writes & (token < ctx.work.extent_q):
            _write_lse(ctx, token, head, select(token < ctx.work.seqlen_q, lse, NEG_INF))
    return factor * _output_factor(ctx)


@cute.jit
def _write_lse(ctx, token, head, lse):
    target = part_of(ctx, ctx.tensors.lse)
    if const_expr(ctx.traits.q_layout == "varlen"):
        target[head, ctx.work.offset_q + token] = lse
    else:
        target[ctx.work.batch, head, token] = lse


@cute.jit
def _output_factor(ctx):
    """V's scale if it has none for each token, one over the output's, one over codes' bias."""
    kind, scale = ctx.traits.v_descale, ctx.tensors.v_descale
    factor = Float32(2.0 ** -bias_log2(ctx.traits.kv_format, ctx.spec.has_fp8))
    if const_expr(kind is not None and not kind.per_token):
        factor = factor * scale_of(ctx, kind.granularity, scale)
    if const_expr(ctx.traits.output_scale and not ctx.spec.split):
        factor = factor / ctx.tensors.output_scale[0]
    return factor


def scale_of(ctx, granularity: str, scale):
    """The scale of the work's sequence and KV head."""
    if granularity == "tensor":
        return scale[0]
    if granularity == "head":
        return scale[ctx.work.kv_head]
    return scale[ctx.work.batch, ctx.work.kv_head]


@cute.jit
def _exchange(ctx, o, factors):
    """Sum O over the groups, some output tiles at a time, and store them."""
    g = ctx.geometry
    tile, thread = g.spec.tile, ctx.m_warp * WARP + ctx.lane
    at_once = g.v_tiles_at_once
    share = at_once // tile.key_warps
    parts = _parts_view(ctx)
    sums = cute.make_rmem_tensor(cute.make_layout((4, share, tile.m_tiles)), Float32)
    for first in cutlass.range_constexpr(0, g.v_tiles, at_once):
        cute.arch.sync_threads()
        for m in cutlass.range_constexpr(tile.m_tiles):
            for j in cutlass.range_constexpr(at_once):
                for i in cutlass.range_constexpr(4):
                    parts[i, j, m, thread, ctx.key_warp] = o[i, first + j, m]
        cute.arch.sync_threads()
        for m in cutlass.range_constexpr(tile.m_tiles):
            for j in cutlass.range_constexpr(share):
                for i in cutlass.range_constexpr(4):
                    total = Float32(0.0)
                    for group in cutlass.range_constexpr(tile.key_warps):
                        mine = ctx.key_warp * share + j
                        total = total + parts[i, mine, m, thread, group]
                    sums[i, j, m] = total
            _store(ctx, sums, factors, m, first // share + ctx.key_warp, share)


def _parts_view(ctx):
    """(number of C, v_tile, m_tile, thread of a group, group), behind the sums."""
    g = ctx.geometry
    m_tiles, threads, groups = g.spec.tile.m_tiles, g.group_threads, g.spec.tile.key_warps
    at_once = g.v_tiles_at_once
    one = 4 * m_tiles * threads
    layout = cute.make_layout(
        (4, at_once, m_tiles, threads, groups),
        stride=(m_tiles * threads, one, threads, 1, one * at_once),
    )
    start = cute.recast_ptr(ctx.rings, dtype=Float32) + 4 * m_tiles * threads * groups
    return cute.make_tensor(start, layout)


@cute.jit
def _store(ctx, o, factors, m: cutlass.Constexpr, number, share: cutlass.Constexpr):
    """Store part `number` of `share` of each of a lane's two eighths of two rows."""
    per_eighth = ctx.geometry.v_tiles // share
    for half in cutlass.range_constexpr(2):
        token, head = ctx.query(m, half)
        if token < ctx.work.extent_q:
            row = output_row(ctx, token, head)
            row = cute.logical_divide(row, cute.make_layout(share))
            for i in cutlass.range_constexpr(2):
                values = cute.make_rmem_tensor(cute.make_layout(share), Float32)
                for j in cutlass.range_constexpr(share):
                    x = o[2 * half + i, j, m] * factors[half, m]
                    values[j] = select(token < ctx.work.seqlen_q, x, Float32(0.0))
                converted = cute.make_rmem_tensor(cute.make_layout(share), ctx.out_dtype)
                converted.store(values.load().to(ctx.out_dtype))
                eighth = ctx.lane % 4 * 2 + i
                cute.autovec_copy(converted, row[None, eighth * per_eighth + number])


def output_row(ctx, token, head):
    """Where a row of the output goes."""
    out = part_of(ctx, ctx.tensors.out)
    if ctx.traits.q_layout == "varlen":
        return out[ctx.work.offset_q + token, head, None]
    return out[ctx.work.batch, token, head, None]


def part_of(ctx, tensor):
    """What this split writes; the whole tensor without splits."""
    if not ctx.spec.split:
        return tensor
    return tensor[(ctx.work.split, *(None,) * (len(tensor.shape) - 1))]
