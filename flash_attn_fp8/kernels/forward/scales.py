"""Scales of a unit of work that are constant over its keys, and the scales of each key.

Scores are S = q · k of codes. Their factor to log2 units is softmax_scale * log2 e * q's scale *
k's scale; V's scale goes into the final normalisation. Scales per (token, KV head) are the scale
warp's business (`token_scales.py`): K's multiplies the score, V's is folded into the exponent.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, const_expr

from flash_attn_fp8.kernels.forward.context import Context
from flash_attn_fp8.policy import LOG2E

# A factor of 0 would make NaN of a masked score; this one leaves every score 0 as well.
SMALLEST_FACTOR = 2.0**-126


def per_token(kind) -> bool:
    """Whether a descale has a value for each token."""
    return kind is not None and kind.per_token


def per_tile(kind) -> bool:
    """Whether a descale has a value for each tile of keys."""
    return kind is not None and kind.per_tile


def _is_constant(kind) -> bool:
    """Whether a descale of K or V has one value for all keys."""
    return kind is not None and not (kind.per_token or kind.per_tile)


def is_uniform(ctx: Context) -> bool:
    """Whether all rows of a unit of work have the same factor."""
    kind = ctx.traits.q_descale
    several_heads = ctx.geometry.spec.group > 1
    return kind is None or not (kind.per_token or (kind.per_query_head and several_heads))


@cute.jit
def row_factor(ctx: Context, work, token, head):
    """What multiplies S of a row: softmax_scale and the scales of q and k, those per key apart."""
    traits, t = ctx.traits, ctx.tensors
    factor = ctx.scalars.softmax_scale
    if const_expr(traits.q_descale is not None):
        kind = traits.q_descale
        scale_head = head if const_expr(kind.per_query_head) else head // traits.q_heads_per_kv_head
        factor = factor * _value(t.q_descale, kind.granularity, work, token, scale_head)
    if const_expr(_is_constant(traits.k_descale)):
        kv_head = ctx.schedule.kv_head(work.head)
        factor = factor * _value(t.k_descale, traits.k_descale.granularity, work, token, kv_head)
    if const_expr(not traits.softcap):
        factor = factor * LOG2E
    return cute.arch.fmax(factor, Float32(SMALLEST_FACTOR), nan=True)


@cute.jit
def output_factor(ctx: Context, work):
    """What multiplies the normalised output: V's scale, and one over the output's."""
    traits, t = ctx.traits, ctx.tensors
    factor = Float32(1.0)
    if const_expr(_is_constant(traits.v_descale)):
        kv_head = ctx.schedule.kv_head(work.head)
        factor = _value(t.v_descale, traits.v_descale.granularity, work, 0, kv_head)
    if const_expr(traits.output_scale and not ctx.geometry.spec.split):
        factor = factor / t.output_scale[0]
    return factor


def _value(scale, granularity: str, work, token, head):
    if granularity == "tensor":
        return scale[0]
    if granularity == "head":
        return scale[head]
    if granularity == "batch_head":
        return scale[work.batch, head]
    # Rows past the sequence's end have no scale of their own: any will do.
    token = cute.math.min(token, work.seqlen_q - 1)
    if len(scale.shape) == 2:  # packed
        return scale[work.offset_q + token, head]
    return scale[work.batch, token, head]
