"""What is left of a row when all its keys are seen: the normaliser of its output, and its LSE."""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.formats import FP32
from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.forward.geometry import V_LOG2_BIAS
from flash_attn_fp8.kernels.forward.scales import output_factor
from flash_attn_fp8.kernels.forward.schedule import part_of
from flash_attn_fp8.kernels.online import log_add_exp
from flash_attn_fp8.policy import LN2, LOG2E


def nothing_seen():
    """(row_max, row_sum, row_sum_quantized) before the first tile."""
    return Float32(NEG_INF), Float32(0.0), Float32(0.0)


@cute.jit
def finish(ctx, work, head, state):
    """(what normalises the output, LSE). A row without keys: 0 and -inf, or the sink's share."""
    row_max, row_sum, row_sum_quantized = state
    # P of a row that has met an infinite score is 0 or NaN, by the pipe that made it: all is NaN.
    row_max = select(row_max == Float32.inf, Float32(math.nan), row_max)
    row_sum_quantized = select(row_max == row_max, row_sum_quantized, row_max)
    row_sum = select(row_max == row_max, row_sum, row_max)
    if const_expr(ctx.traits.v_scale_in_exponent):
        row_max = row_max - V_LOG2_BIAS
    policy = ctx.traits.policy
    offset, excess = policy.max_offset, policy.code_excess_log2
    total = row_sum_quantized
    if const_expr(ctx.traits.exact_row_sum):
        # Codes are larger than P in the mean, and so is P V: what divides it must be, too.
        total = row_sum * 2.0**excess
    top = select(row_max == NEG_INF, Float32(0.0), row_max)
    lse = (top - offset + cute.math.log2(row_sum, fastmath=True)) * LN2
    rescale = Float32(1.0)
    if const_expr(ctx.traits.sink):
        # Of the splits, the first one counts the sink.
        logit = Float32(ctx.tensors.sink[head])
        if const_expr(ctx.geometry.spec.split):
            logit = select(work.split == 0, logit, NEG_INF)
        lse = log_add_exp(lse, logit)
        # A sink of infinity takes all weight; of NaN, all is NaN.
        sink = cute.arch.fmin(logit * LOG2E, Float32(FP32.max), nan=True)
        highest = cute.arch.fmax(row_max, sink)
        top = select(highest == NEG_INF, Float32(0.0), highest)
        rescale = cute.math.exp2(row_max - top, fastmath=True)
        total = total * rescale + cute.math.exp2(sink - top + (offset + excess), fastmath=True)
    inverse = select(total > 0.0, cute.arch.rcp_approx(total), Float32(0.0))
    inverse = select(total == total, inverse, total)  # NaN comes out as NaN
    # A row without keys is 0 whatever its sink is, as in a unit of work without keys.
    inverse = select(row_max == NEG_INF, Float32(0.0), inverse)
    return rescale * inverse * output_factor(ctx, work), lse


@cute.jit
def write_lse(ctx, work, stage, row, lse):
    """Store the LSE of a row; -inf of one that is not in use."""
    if const_expr(ctx.geometry.spec.writes_lse):
        token, head, exists = ctx.schedule.query(work, stage, row)
        if exists:
            lse = select(token < work.seqlen_q, lse, NEG_INF)
            target = part_of(ctx, ctx.tensors.lse, work.split)
            if const_expr(ctx.traits.q_layout == "varlen"):
                target[head, work.offset_q + token] = lse
            else:
                target[work.batch, head, token] = lse
