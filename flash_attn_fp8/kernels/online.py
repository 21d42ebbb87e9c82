"""Arithmetic of the online softmax that kernels share: a row's maximum, softcap, logarithms."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32
from cutlass import select_ as select

from flash_attn_fp8.policy import LN2, LOG2E

NEG_INF = -Float32.inf


@cute.jit
def raised(policy: cutlass.Constexpr, row_max, tile_max):
    """(maximum, factor of what was summed before): raised where it lags by more than allowed."""
    highest = cute.arch.fmax(row_max, tile_max, nan=True)
    lag = highest - row_max
    keeps = (lag <= policy.rescale_threshold) | (highest == NEG_INF)
    rescale = select(keeps, Float32(1.0), cute.math.exp2(-lag, fastmath=True))
    return select(keeps, row_max, highest), rescale


@cute.jit
def capped(score, softcap):
    """softcap * tanh(score / softcap) in log2 units, of a score in natural ones.

    tanh y = 1 - 2 / (e**2y + 1): tanh.approx would err by 2**-11 of the cap.
    """
    e = cute.math.exp2(score * (2 * LOG2E / softcap), fastmath=True)
    return (1.0 - 2.0 * cute.arch.rcp_approx(e + 1.0)) * (softcap * LOG2E)


@cute.jit
def log_add_exp(a, b):
    """log(exp a + exp b), in natural units so that one beside -inf is returned to the bit."""
    high, low = cute.arch.fmax(a, b, nan=True), cute.arch.fmin(a, b)
    finite = select(high == NEG_INF, Float32(0.0), high)
    ratio = cute.math.exp2((low - finite) * LOG2E, fastmath=True)
    return high + cute.math.log2(1.0 + ratio, fastmath=True) * LN2
