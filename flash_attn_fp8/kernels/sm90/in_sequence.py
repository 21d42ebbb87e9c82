"""Consumer warpgroups where O fills the registers, or the softmax is as short as the products.

Scores, softmax and P V of a tile follow one another; beside one warpgroup's softmax runs the
other's tensor core. The next tile's scores are asked for as soon as P V has left its registers.
Above head dim 128 P V is made in parts, some columns of V at a time, for there are registers for
one part beside O.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from flash_attn_fp8.kernels.forward.rings import arrive
from flash_attn_fp8.kernels.sm90.context import multiply, words_of
from flash_attn_fp8.kernels.sm90.geometry import ROWS, WARPGROUP
from flash_attn_fp8.kernels.sm90.softmax import encode, key_scales, softmax
from flash_attn_fp8.kernels.sm90.tiles import Tiles


@cute.jit
def key_tiles(ctx, products: cutlass.Constexpr, rows, tiles):
    """O of all key tiles of the rows, right to left, masked where some row sees a tile in part."""
    t = Tiles.of(ctx, products)
    t.o.fill(0.0)
    work = rows.work
    n_left, n_right = ctx.schedule.whole_tiles(work, rows.stage)
    # The last tile is done with a mask, whether it needs it or not.
    n_right = cutlass.max(n_right, work.n_min + 1)
    n_left = cutlass.max(n_left, work.n_min + 1)
    _scores(ctx, t, rows, tiles)
    for i in cutlass.range(work.n_max - n_right, unroll=1):
        _step(ctx, t, rows, tiles, i, True)
    for i in cutlass.range(work.n_max - n_right, work.n_max - n_left, unroll=1):
        _step(ctx, t, rows, tiles, i, False)
    if const_expr(ctx.traits.bounded_left):
        for i in cutlass.range(work.n_max - n_left, work.tiles - 1, unroll=1):
            _step(ctx, t, rows, tiles, i, True)
    _probabilities(ctx, t, rows, tiles, work.tiles - 1, True)
    _values(ctx, t, tiles + work.tiles - 1)
    return t.o


@cute.jit
def _step(ctx, t, rows, tiles, i: Int32, masked: cutlass.Constexpr):
    """Softmax and P V of tile `i`, whose scores were asked for, and the next tile's scores."""
    _probabilities(ctx, t, rows, tiles, i, masked)
    _values(ctx, t, tiles + i)
    _scores(ctx, t, rows, tiles + i + 1)


@cute.jit
def _scores(ctx, t, rows, tile: Int32):
    """Ask for S of a tile."""
    k = ctx.barriers.k
    k.wait_full(tile)
    multiply(t.products.qk, t.s, t.q[None, None, None, rows.stage], t.k, k.slot(tile))


@cute.jit
def _probabilities(ctx, t, rows, tiles, i: Int32, masked: cutlass.Constexpr):
    """P of tile `i`."""
    warpgroup.wait_group(0)
    arrive(ctx.barriers.k.empty(tiles + i))
    scales = key_scales(ctx, rows, tiles + i, i)
    softmax(ctx, rows, t.s, scales, t.rescale, tiles + i, i, masked)
    encode(ctx, rows, t.s, t.rescale, words_of(t.p))


@cute.jit
def _values(ctx, t, tile: Int32):
    """P V of a tile, added to O."""
    v = ctx.barriers.v
    v.wait_full(tile)
    for part in cutlass.range_constexpr(ctx.geometry.v_parts):
        multiply(t.products.pv(part), t.pv[part], t.p, t.v[part], v.slot(tile))
        warpgroup.wait_group(0)
        _add(ctx, t, part)
    arrive(v.empty(tile))


@cute.jit
def _add(ctx, t, part: cutlass.Constexpr):
    """O = O * rescale + P V of some columns, in fp32."""
    first = part * ROWS * ctx.geometry.v_columns // WARPGROUP
    for i in cutlass.range_constexpr(cute.size(t.pv[part])):
        t.o[first + i] = t.o[first + i] * t.rescale[i // 2 % 2] + t.pv[part][i]
