"""What scores become on their way to P, and sums in the end: the same in both forms."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.online import capped


@cute.jit
def in_log2(
    ctx: Context, score, factor, k_scale: cutlass.Constexpr, v_log2: cutlass.Constexpr
) -> Float32:
    """A score in log2 units, V's scale included. `k_scale`, `v_log2`: the key's, or None."""
    x = score * factor
    if const_expr(k_scale is not None):
        x = x * k_scale
    if const_expr(ctx.traits.softcap):
        x = capped(x, ctx.scalars.softcap)
    if const_expr(v_log2 is not None):
        x = x + v_log2
    return x


def log2_and_inverse(v_scale: Float32) -> tuple[Float32, Float32]:
    """Of a key's V scale.

    A key that does not count has scale 0, and P 0. Where a scale is NaN, P of the rows that see its
    key is NaN already, and that of the others 0.
    """
    inverse = select(v_scale > 0.0, cute.arch.rcp_approx(v_scale), Float32(0.0))
    return cute.math.log2(v_scale, fastmath=True), inverse


@cute.jit
def is_masked(ctx: Context, n_block):
    """Whether some row of the CTA does not see every key of the tile."""
    n, work = ctx.spec.tile.n_block, ctx.work
    if const_expr(ctx.traits.selection is not None):
        result = cutlass.Boolean(True)
    else:
        group = ctx.traits.q_heads_per_kv_head
        lo, _ = ctx.band((work.row + ctx.spec.tile.block_m - 1) // group)
        _, hi = ctx.band(work.row // group)
        lo, hi = cutlass.max(lo, work.first), cutlass.min(hi, work.last)
        result = (n_block * n < lo) | ((n_block + 1) * n > hi)
    return result


def seen_keys(ctx: Context, token) -> tuple[Int32, Int32]:
    """Keys [lo, hi) that a token sees of the work's; of a selection, of the sequence's."""
    lo, hi = ctx.visible(token)
    if ctx.traits.selection is not None:
        return cutlass.max(lo, 0), hi  # -1: a key that does not count
    return cutlass.max(lo, ctx.work.first), cutlass.min(hi, ctx.work.last)


def merged_sum(maxima, sums) -> tuple[Float32, Float32]:
    """(maximum, sum in its units) of those of groups, in their order."""
    highest = Float32(NEG_INF)
    for row_max in maxima:
        highest = cute.arch.fmax(highest, row_max, nan=True)
    total = Float32(0.0)
    for row_max, row_sum in zip(maxima, sums, strict=True):
        total = total + weight_of(row_max, highest) * row_sum
    return highest, total


def weight_of(row_max, highest) -> Float32:
    """What turns units of a maximum into those of a higher one; -inf: of a row that saw no key."""
    finite = select(highest == NEG_INF, Float32(0.0), highest)
    return cute.math.exp2(row_max - finite, fastmath=True)
