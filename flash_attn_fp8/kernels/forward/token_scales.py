"""The scale warp: what belongs to each key of a tile, from global to shared memory.

With scales per (token, KV head), K's multiplies the score and V's is folded into the exponent,

    x = S * (k_scale * row factor) + log2 v_scale,    l += P / v_scale,

so that P stays in its format's range whatever the scales are (docs/numerics.md). Three numbers a
key; those that a spec has no use for are never read.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.kernels.forward.geometry import K_FACTOR, V_INVERSE, V_LOG2
from flash_attn_fp8.kernels.forward.rings import arrive
from flash_attn_fp8.kernels.forward.scales import is_uniform, per_token, row_factor
from flash_attn_fp8.kernels.forward.schedule import each_unit
from flash_attn_fp8.specs import WARP


@cute.jit
def token_scale_role(ctx: Context):
    """Fill the ring, a slot for each key tile of one unit of work after another."""
    each_unit(ctx, partial(_unit, ctx))


@cute.jit
def _unit(ctx: Context, work, units: Int32, tiles: Int32):
    ring = ctx.barriers.token_scales
    factor = Float32(1.0)
    if const_expr(is_uniform(ctx)):
        factor = row_factor(ctx, work, work.token, work.head * ctx.geometry.spec.group)
    for i in cutlass.range(work.tiles, unroll=1):
        use = tiles + i
        ring.wait_empty(use)
        for key in cutlass.range_constexpr(0, ctx.geometry.tile_n, WARP):
            _key(ctx, work, work.n_max - 1 - i, key + cute.arch.lane_idx(), use, factor)
        arrive(ring.full(use))


@cute.jit
def _key(ctx: Context, work, n_block: Int32, column: Int32, use: Int32, factor: Float32):
    """The numbers of key `column` of a tile. Keys past the sequence get 1: nothing is theirs."""
    traits, t = ctx.traits, ctx.tensors
    shared = ctx.buffers.token_scale[None, None, ctx.barriers.token_scales.slot(use)]
    key = n_block * ctx.geometry.tile_n + column
    if const_expr(per_token(traits.k_descale)):
        k_scale = Float32(1.0)
        if key < work.seqlen_k:
            k_scale = _at(ctx, t.k_descale, work, key)
        shared[column, K_FACTOR] = k_scale * factor
    if const_expr(per_token(traits.v_descale)):
        v_scale = Float32(1.0)
        if key < work.seqlen_k:
            v_scale = _at(ctx, t.v_descale, work, key)
        shared[column, V_LOG2] = cute.math.log2(v_scale, fastmath=True)
        shared[column, V_INVERSE] = 1.0 / v_scale


def _at(ctx: Context, scale, work, key):
    head, layout = ctx.schedule.kv_head(work.head), ctx.traits.kv_layout
    if layout == "varlen":
        return scale[work.offset_k + key, head]
    if layout == "dense":
        return scale[work.batch, key, head]
    page_size = ctx.geometry.spec.page_size
    page = ctx.tensors.page_table[work.batch, key // page_size]
    return scale[page, key % page_size, head]
