"""The scale warp: what belongs to each key of a tile, from global to shared memory.

With scales per (token, KV head), K's multiplies the score and V's is folded into the exponent,

    x = S * (k_scale * row factor) + log2 v_scale + V_LOG2_BIAS,    l += P / v_scale,

so that P stays in its format's range whatever the scales are (docs/numerics.md). Three numbers a
key; those that a spec has no use for are never read.
"""

from __future__ import annotations

from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.kernels.forward.geometry import K_FACTOR, V_INVERSE, V_LOG2, V_LOG2_BIAS
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
        # Asked for before there is room for them: a tile must not take longer than its scales.
        scales = _read(ctx, work, work.n_max - 1 - i)
        ring.wait_empty(use)
        _write(ctx, scales, use, factor)
        arrive(ring.full(use))


@cute.jit
def _read(ctx: Context, work, n_block: Int32):
    """(key of a lane, K or V): its scales, all on their way at once.

    Keys past the sequence get 1: nothing is theirs.
    """
    traits, t = ctx.traits, ctx.tensors
    keys = ctx.geometry.tile_n // WARP
    scales = cute.make_rmem_tensor(cute.make_layout((keys, 2)), Float32)
    for n in cutlass.range_constexpr(keys):
        key = n_block * ctx.geometry.tile_n + n * WARP + cute.arch.lane_idx()
        exists, key = key < work.seqlen_k, cutlass.min(key, work.seqlen_k - 1)
        for kind, (descale, scale) in enumerate(
            ((traits.k_descale, t.k_descale), (traits.v_descale, t.v_descale))
        ):
            if const_expr(per_token(descale)):
                scales[n, kind] = select(exists, _at(ctx, scale, work, key), Float32(1.0))
    return scales


@cute.jit
def _write(ctx: Context, scales, use: Int32, factor: Float32):
    traits = ctx.traits
    shared = ctx.buffers.token_scale[None, None, ctx.barriers.token_scales.slot(use)]
    for n in cutlass.range_constexpr(ctx.geometry.tile_n // WARP):
        column = n * WARP + cute.arch.lane_idx()
        if const_expr(per_token(traits.k_descale)):
            shared[column, K_FACTOR] = scales[n, 0] * factor
        if const_expr(per_token(traits.v_descale)):
            shared[column, V_LOG2] = cute.math.log2(scales[n, 1], fastmath=True) + V_LOG2_BIAS
            shared[column, V_INVERSE] = 1.0 / scales[n, 1]


def _at(ctx: Context, scale, work, key):
    head, layout = ctx.schedule.kv_head(work.head), ctx.traits.kv_layout
    if layout == "varlen":
        return scale[work.offset_k + key, head]
    if layout == "dense":
        return scale[work.batch, key, head]
    page_size = ctx.geometry.spec.page_size
    page = ctx.tensors.page_table[work.batch, key // page_size]
    return scale[page, key % page_size, head]
