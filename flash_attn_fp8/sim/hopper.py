"""How Hopper's tensor cores sum products of floats: bit for bit what an H200 computes.

The K products of an instruction and the accumulator become integers of one unit, and are summed
exactly. The unit lies a fixed number of bits below the largest exponent among them, and what is
smaller is cut off (toward zero). A product's exponent is the sum of its factors', a subnormal's
that of the smallest normal number; zeros have none. The sum is cut off again to an f32 accumulator,
and rounded to nearest even to an f16.

Of e4m3 and e5m2, `wgmma` keeps 13 bits both times, so that long sums of equal addends stall once
the accumulator is 2^13 addends; of everything else, and in `mma.sync`, it is 25 bits and then f32's
23. `mma.sync` of e4m3 and e5m2 converts to f16, multiplies every other pair of elements first and
the rest on top, from zero, and adds the accumulator to that in its own type.

Inferred from inputs and outputs; `tests/sim/chip` compares.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from flash_attn_fp8.sim.matrix import FORMATS, Format

_F32_BITS = 23
_ALIGNED_BITS = 25
_FP8_BITS = 13
_NO_EXPONENT = -(1 << 20)  # of zero: below every other
_F32_SMALLEST = -126


def multiply(
    a: np.ndarray, b: np.ndarray, c: np.ndarray | None, formats: tuple[Format, Format], d: str
) -> np.ndarray:
    """`wgmma`: (M, K) times (N, K) transposed, plus c; an f16 `d` is still to be rounded."""
    bits = _FP8_BITS if formats[0].size == 1 else _ALIGNED_BITS
    return _sum(a, b, c, formats, d, bits, min(bits, _F32_BITS))


def multiply_sync(
    a: np.ndarray, b: np.ndarray, c: np.ndarray, formats: tuple[Format, Format], d: str
) -> np.ndarray:
    """`mma.sync`, the same."""
    if formats[0].size != 1:
        return _sum(a, b, c, formats, d, _ALIGNED_BITS, _F32_BITS)
    halves = (FORMATS["f16"], FORMATS["f16"])
    odd_pairs = np.arange(a.shape[1]) // 2 % 2 == 1
    total = None
    for part in (~odd_pairs, odd_pairs):
        total = _sum(a[:, part], b[:, part], total, halves, d, _ALIGNED_BITS, _F32_BITS)
        if d == "f16":
            with np.errstate(over="ignore", invalid="ignore"):
                total = total.astype(np.float16).astype(np.float64)
    with np.errstate(invalid="ignore"):
        summed: np.ndarray = total + c
    return summed


def _sum(
    a: np.ndarray,
    b: np.ndarray,
    c: np.ndarray | None,
    formats: tuple[Format, Format],
    d: str,
    bits: int,
    result_bits: int,
) -> np.ndarray:
    start = np.zeros((a.shape[0], b.shape[0])) if c is None else np.ascontiguousarray(c)
    exponents = (
        _exponents(a, formats[0].smallest),
        _exponents(b, formats[1].smallest),
        _exponents(start, _F32_SMALLEST),
    )
    out: np.ndarray = _aligned(
        np.ascontiguousarray(a),
        np.ascontiguousarray(b),
        start,
        *exponents,
        bits,
        result_bits if d == "f32" else 0,
    )
    return out


def _exponents(x: np.ndarray, smallest: int) -> np.ndarray:
    """As the hardware sees them; of infinities and NaNs, anything."""
    exponents = np.maximum(np.frexp(x)[1] - 1, smallest)
    return np.ascontiguousarray(np.where(x == 0, _NO_EXPONENT, exponents))


@njit(cache=True, nogil=True)
def _aligned(a, b, c, a_exponents, b_exponents, c_exponents, bits, result_bits):  # type: ignore[no-untyped-def]
    """`result_bits` of an f32's fraction are kept; 0: all."""
    out = np.empty_like(c)
    for i in range(a.shape[0]):
        for j in range(b.shape[0]):
            exponent = c_exponents[i, j]
            total = c[i, j]
            for k in range(a.shape[1]):
                exponent = max(exponent, a_exponents[i, k] + b_exponents[j, k])
                total += a[i, k] * b[j, k]
            if exponent < _NO_EXPONENT // 2 or not np.isfinite(total):
                out[i, j] = total  # zero, infinity or NaN
                continue
            scale = math.ldexp(1.0, bits - exponent)
            total = np.trunc(c[i, j] * scale)
            for k in range(a.shape[1]):
                total += np.trunc(a[i, k] * b[j, k] * scale)
            total = total / scale
            if result_bits > 0 and total != 0.0:
                last = max(math.frexp(total)[1] - 1, _F32_SMALLEST) - result_bits
                total = math.ldexp(np.trunc(math.ldexp(total, -last)), last)
            out[i, j] = total + 0.0  # of what is cut off entirely, +0
    return out
