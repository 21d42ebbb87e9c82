"""Arithmetic of the online softmax that kernels share: a row's maximum, softcap, its end."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.formats import FP32
from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.policy import LN2, LOG2E


@cute.jit
def raised(policy: cutlass.Constexpr, row_max, tile_max):
    """(maximum, factor of what was summed before): raised where it lags by more than allowed."""
    highest = cute.arch.fmax(row_max, tile_max, nan=True)
    lag = highest - row_max
    keeps = (lag <= policy.rescale_threshold) | (highest == NEG_INF)
    rescale = select(keeps, Float32(1.0), cute.math.exp2(-lag, fastmath=True))
    return select(keeps, row_max, highest), rescale


# tanh y / y by powers of y**2: up to 1/4 the next term is 3e-7.
_TANH = (1.0, -1 / 3, 2 / 15, -17 / 315)
_NEAR = 0.25


@cute.jit
def capped(score, softcap):
    """softcap * tanh(score / softcap) in log2 units, of a score in natural ones.

    tanh y = 1 - 2 / (e**2y + 1): tanh.approx would err by 2**-11 of the cap. Near 0 the difference
    of numbers near 1 would err by 2**-24 of the cap, which may be far above the score.
    """
    y = score / softcap
    e = cute.math.exp2(y * (2 * LOG2E), fastmath=True)
    far = (1.0 - 2.0 * cute.arch.rcp_approx(e + 1.0)) * (softcap * LOG2E)
    square = y * y
    series = Float32(_TANH[-1])
    for coefficient in reversed(_TANH[:-1]):
        series = series * square + coefficient
    return select(square < _NEAR * _NEAR, score * series * LOG2E, far)


@cute.jit
def log_add_exp(a, b):
    """log(exp a + exp b), in natural units so that one beside -inf is returned to the bit."""
    high, low = cute.arch.fmax(a, b, nan=True), cute.arch.fmin(a, b)
    finite = select(high == NEG_INF, Float32(0.0), high)
    ratio = cute.math.exp2((low - finite) * LOG2E, fastmath=True)
    return high + cute.math.log2(1.0 + ratio, fastmath=True) * LN2


@cute.jit
def finished(
    row_max,
    row_sum,
    total,
    logit: cutlass.Constexpr,
    offset: cutlass.Constexpr,
    excess: cutlass.Constexpr = 0.0,
):
    """(what normalises the output of a row, LSE), of its maximum and sum, in units 2 ** offset.

    `total` is what the output is a sum with: `row_sum`, or of P as it was rounded, whose codes
    stand for 2 ** excess times P. `logit` of a sink, or None. A row without keys: 0 and -inf, or
    the sink's share.
    """
    top = select(row_max == NEG_INF, Float32(0.0), row_max)
    lse = (top - offset + cute.math.log2(row_sum, fastmath=True)) * LN2
    rescale = Float32(1.0)
    if const_expr(logit is not None):
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
    return rescale * inverse, lse


def sink_logit(tensors, head, split):
    """The logit of a head's sink, None where there are none; of the splits, the first has it."""
    if tensors.sink is None:
        return None
    logit = Float32(tensors.sink[head])
    return logit if split is None else select(split == 0, logit, NEG_INF)
