"""What is left of a row when all its keys are seen: the normaliser of its output, and its LSE."""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.kernels.forward.geometry import V_LOG2_BIAS
from flash_attn_fp8.kernels.forward.scales import output_factor
from flash_attn_fp8.kernels.forward.schedule import part_of
from flash_attn_fp8.kernels.online import finished, sink_logit


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
    logit = sink_logit(ctx.tensors, head, work.split if ctx.geometry.spec.split else None)
    factor, lse = finished(row_max, row_sum, total, logit, offset, excess)
    return factor * output_factor(ctx, work), lse


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
