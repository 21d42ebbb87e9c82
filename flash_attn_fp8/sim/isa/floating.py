"""Floating-point instructions, lane by lane.

f16, bf16 and f32 arrive as float64 and leave as a float64 that is exact or rounded to odd;
`carriers.py` does the one rounding, .ftz, .sat and .relu. f64 has handlers of its own, rounding to
nearest only. Approximate instructions give the correctly rounded result or one next to it, which
is inside every bound of the manual; no hardware gives the same bits.
"""
# ruff: noqa: D103 -- the opcode each function is registered for says what it does

from __future__ import annotations

import math
from typing import Any

from flash_attn_fp8.sim.isa.bits import (
    bits_of_f64,
    device,
    f64_of,
    fma_f32,
    fma_f64,
    signed,
    unsigned,
)
from flash_attn_fp8.sim.isa.table import (
    NAN,
    RM,
    ROUNDING_MASK,
    SELECTOR_SHIFT,
    XORSIGN,
    lane,
    modifiers,
    selector,
)

_F32 = modifiers("rn rz rm rp ftz sat")
_F32X2 = modifiers("rn rz rm rp ftz")
_F16 = modifiers("rn ftz16 sat")
_BF16 = modifiers("rn")
_F64 = modifiers("rn")  # other roundings of f64 are not modelled


# --------------------------------------------------------------------------- round to odd


@device
def to_odd(nearest: float, error: float) -> float:
    """Round-to-odd of a sum, from its nearest float64 and what that left out (or its sign)."""
    if not (error < 0.0 or error > 0.0) or nearest - nearest != 0.0:
        return nearest
    word = bits_of_f64(nearest)
    if word & 1:
        return nearest
    # The exact value lies between `nearest` and the next number towards the error, which is odd.
    return f64_of(unsigned(word + (1 if (error > 0.0) == (nearest > 0.0) else -1)))


@device
def odd_sum(a: float, b: float, mode: int) -> float:
    """a + b, rounded to odd; an exact zero has the sign that the mode's rounding gives it."""
    total = a + b
    if total == 0.0:
        both_positive = bits_of_f64(a) == 0 and bits_of_f64(b) == 0
        if mode & ROUNDING_MASK == RM and not both_positive:
            return -0.0
        return total
    from_b = total - a
    return to_odd(total, (a - (total - from_b)) + (b - from_b))


@device
def odd_quotient(a: float, b: float) -> float:
    """a / b of numbers of at most 24 bits, rounded to odd."""
    if b == 0.0:
        if a == 0.0 or a != a:
            return math.nan
        return math.copysign(math.inf, a) * math.copysign(1.0, b)
    quotient = a / b
    rest = fma_f64(-quotient, b, a)  # exact
    return to_odd(quotient, rest if b > 0.0 else -rest)


@device
def odd_root(a: float) -> float:
    """The square root of a number of at most 24 bits, rounded to odd."""
    if not a > 0.0:
        return a if a == 0.0 else math.nan
    if a == math.inf:
        return a
    root = math.sqrt(a)
    return to_odd(root, fma_f64(-root, root, a))


# ------------------------------------------------------------------------------ arithmetic


@device
def _fast_add(a: Any, b: Any) -> Any:
    return a + b


@device
def _fast_sub(a: Any, b: Any) -> Any:
    return a - b


@device
def _fast_mul(a: Any, b: Any) -> Any:
    return a * b


@lane("add", "f32", "T T", modifiers=_F32, takes_mode=True, fast=_fast_add)
@lane("add", "f32x2", "T T", modifiers=_F32X2, takes_mode=True, fast=_fast_add)
@lane("add", "f16 f16x2", "T T", modifiers=_F16, takes_mode=True)
@lane("add", "bf16 bf16x2", "T T", modifiers=_BF16, takes_mode=True)
@lane("add", "f32,f16 f32,bf16", "U T", modifiers=modifiers("rn rz rm rp sat"), takes_mode=True)
def add(a: float, b: float, mode: int) -> float:
    return odd_sum(a, b, mode)


@lane("sub", "f32", "T T", modifiers=_F32, takes_mode=True, fast=_fast_sub)
@lane("sub", "f32x2", "T T", modifiers=_F32X2, takes_mode=True, fast=_fast_sub)
@lane("sub", "f16 f16x2", "T T", modifiers=_F16, takes_mode=True)
@lane("sub", "bf16 bf16x2", "T T", modifiers=_BF16, takes_mode=True)
@lane("sub", "f32,f16 f32,bf16", "U T", modifiers=modifiers("rn rz rm rp sat"), takes_mode=True)
def sub(a: float, b: float, mode: int) -> float:
    return odd_sum(a, -b, mode)


@lane("mul", "f32", "T T", modifiers=_F32, fast=_fast_mul)
@lane("mul", "f32x2", "T T", modifiers=_F32X2, fast=_fast_mul)
@lane("mul", "f16 f16x2", "T T", modifiers=_F16)
@lane("mul", "bf16 bf16x2", "T T", modifiers=_BF16)
def mul(a: float, b: float) -> float:
    return a * b  # exact


_ROUNDED = ("rn rz rm rp",)


@lane("fma", "f32", "T T T", modifiers=_F32, requires=_ROUNDED, takes_mode=True, fast=fma_f32)
@lane("fma", "f32x2", "T T T", modifiers=_F32X2, requires=_ROUNDED, takes_mode=True, fast=fma_f32)
@lane(
    "fma",
    "f16 f16x2",
    "T T T",
    modifiers=modifiers("rn ftz16 sat relu"),
    requires=("rn",),
    takes_mode=True,
)
@lane(
    "fma", "bf16 bf16x2", "T T T", modifiers=modifiers("rn relu"), requires=("rn",), takes_mode=True
)
@lane(
    "fma",
    "f32,f16 f32,bf16",
    "U U T",
    modifiers=modifiers("rn rz rm rp sat"),
    requires=_ROUNDED,
    takes_mode=True,
)
def fma(a: float, b: float, c: float, mode: int) -> float:
    return odd_sum(a * b, c, mode)


# Since sm_20 the two are one.
lane("mad", "f32=fma.f32", "T T T", modifiers=_F32, requires=_ROUNDED)(fma)


@lane("add", "f64", "T T", modifiers=_F64)
def add_f64(a: float, b: float) -> float:
    return a + b


@lane("sub", "f64", "T T", modifiers=_F64)
def sub_f64(a: float, b: float) -> float:
    return a - b


@lane("mul", "f64", "T T", modifiers=_F64)
def mul_f64(a: float, b: float) -> float:
    return a * b


@lane("fma", "f64", "T T T", modifiers=_F64, requires=("rn",))
def fma_rn_f64(a: float, b: float, c: float) -> float:
    return fma_f64(a, b, c)


@lane("div", "f32", "T T", modifiers=modifiers("rn rz rm rp ftz"), requires=_ROUNDED)
@lane("div.full", "f32", "T T", modifiers=modifiers("ftz"))
def div(a: float, b: float) -> float:
    return odd_quotient(a, b)


@lane("div.approx", "f32", "T T", modifiers=modifiers("ftz"))
def div_approx(a: float, b: float) -> float:
    """a × (1/b): with |b| above 2^126, 1/b is 0."""
    if 2.0**126 < abs(b) < math.inf:
        return a * math.copysign(0.0, b) if abs(a) < math.inf else math.nan
    return odd_quotient(a, b)


@lane("div", "f64", "T T", modifiers=_F64, requires=("rn",))
def div_f64(a: float, b: float) -> float:
    if b == 0.0:
        if a == 0.0 or a != a:
            return math.nan
        return math.copysign(math.inf, a) * math.copysign(1.0, b)
    return a / b


@lane("rcp", "f32", "T", modifiers=modifiers("rn rz rm rp ftz"), requires=_ROUNDED)
@lane("rcp.approx", "f32", "T", modifiers=modifiers("ftz"))
def rcp(a: float) -> float:
    return odd_quotient(1.0, a)


@lane("rcp", "f64", "T", modifiers=_F64, requires=("rn",))
def rcp_f64(a: float) -> float:
    return div_f64(1.0, a)


@lane("sqrt", "f32", "T", modifiers=modifiers("rn rz rm rp ftz"), requires=_ROUNDED)
@lane("sqrt.approx", "f32", "T", modifiers=modifiers("ftz"))
def sqrt(a: float) -> float:
    return odd_root(a)


@lane("sqrt", "f64", "T", modifiers=_F64, requires=("rn",))
def sqrt_f64(a: float) -> float:
    return math.sqrt(a) if a >= 0.0 else math.nan


@lane("rsqrt.approx", "f32", "T", modifiers=modifiers("ftz"))
def rsqrt(a: float) -> float:
    if a == 0.0:
        return math.copysign(math.inf, a)
    if not a > 0.0:
        return math.nan
    return 0.0 if a == math.inf else 1.0 / math.sqrt(a)


# -------------------------------------------------------------------------- transcendental


@device
def exp2(x: float) -> float:
    """2^x within some ulps of float64, for results that float32 can hold.

    Arithmetic alone, so that it is the same everywhere and can be vectorised.
    """
    if not x < 1025.0:
        return x + x if x != x else math.inf
    if x < -1075.0:
        return 0.0
    whole = math.floor(x + 0.5)
    y = (x - whole) * 0.6931471805599453  # |y| <= 0.35
    # e^y; the rest of the series is below 2^-60.
    total = 1.0 / 6227020800.0
    total = total * y + 1.0 / 479001600.0
    total = total * y + 1.0 / 39916800.0
    total = total * y + 1.0 / 3628800.0
    total = total * y + 1.0 / 362880.0
    total = total * y + 1.0 / 40320.0
    total = total * y + 1.0 / 5040.0
    total = total * y + 1.0 / 720.0
    total = total * y + 1.0 / 120.0
    total = total * y + 1.0 / 24.0
    total = total * y + 1.0 / 6.0
    total = total * y + 0.5
    total = total * y + 1.0
    total = total * y + 1.0
    half = int(whole) >> 1  # in two factors, each a normal number
    rest = int(whole) - half
    return total * f64_of(unsigned((half + 1023) << 52)) * f64_of(unsigned((rest + 1023) << 52))


@device
def log2(x: float) -> float:
    """log2 of a float32's value, within some 2^-50 of it, relatively."""
    if x == 0.0:
        return -math.inf
    if not x > 0.0:
        return math.nan
    if x == math.inf:
        return x
    word = bits_of_f64(x)
    exponent = (word >> 52) - 1023
    m = f64_of(unsigned((word & 0xF_FFFF_FFFF_FFFF) | (1023 << 52)))
    if m > 1.4142135623730951:
        m, exponent = m * 0.5, exponent + 1
    s = (m - 1.0) / (m + 1.0)  # |s| < 0.172; log m = 2 artanh s
    z = s * s
    total = 1.0 / 23.0
    total = total * z + 1.0 / 21.0
    total = total * z + 1.0 / 19.0
    total = total * z + 1.0 / 17.0
    total = total * z + 1.0 / 15.0
    total = total * z + 1.0 / 13.0
    total = total * z + 1.0 / 11.0
    total = total * z + 1.0 / 9.0
    total = total * z + 1.0 / 7.0
    total = total * z + 1.0 / 5.0
    total = total * z + 1.0 / 3.0
    total = total * z + 1.0
    return exponent + 2.8853900817779268 * s * total


_APPROX = ("approx",)


@lane("ex2", "f32", "T", modifiers=modifiers("approx ftz"), requires=_APPROX, hot="f32")
@lane("ex2", "f16 f16x2", "T", modifiers=modifiers("approx"), requires=_APPROX)
@lane("ex2", "bf16 bf16x2", "T", modifiers={"approx": 0, "ftz": 0}, requires=("approx", "ftz"))
def ex2(a: float) -> float:
    return exp2(a)


@lane("lg2", "f32", "T", modifiers=modifiers("approx ftz"), requires=_APPROX)
def lg2(a: float) -> float:
    return log2(a)


@lane("sin", "f32", "T", modifiers=modifiers("approx ftz"), requires=_APPROX)
def sin(a: float) -> float:
    return math.sin(a) if abs(a) < math.inf else math.nan


@lane("cos", "f32", "T", modifiers=modifiers("approx ftz"), requires=_APPROX)
def cos(a: float) -> float:
    return math.cos(a) if abs(a) < math.inf else math.nan


@lane("tanh", "f32 f16 f16x2 bf16 bf16x2", "T", modifiers=modifiers("approx"), requires=_APPROX)
def tanh(a: float) -> float:
    return math.tanh(a)


# ------------------------------------------------------------------------ minimum, maximum


@device
def _lesser(a: float, b: float, mode: int) -> float:
    """The minimum; −0 is less than +0, NaN counts only where .NaN says so or both are."""
    if a != a or b != b:
        return math.nan if mode & NAN else (b if a != a else a)
    if a == b:
        return a if bits_of_f64(a) < 0 else b
    return a if a < b else b


@device
def _signed_by_both(magnitude: float, a: float, b: float) -> float:
    """.xorsign.abs: the sign is the exclusive or of the sources' signs."""
    return math.copysign(magnitude, math.copysign(1.0, a) * math.copysign(1.0, b))


_MINMAX_F32 = modifiers("ftz NaN xorsign abs")
_MINMAX_F16 = modifiers("ftz16 NaN xorsign abs")
_MINMAX_BF16 = modifiers("NaN xorsign abs")


@lane("min", "f32", "T T", modifiers=_MINMAX_F32, takes_mode=True)
@lane("min", "f16 f16x2", "T T", modifiers=_MINMAX_F16, takes_mode=True)
@lane("min", "bf16 bf16x2", "T T", modifiers=_MINMAX_BF16, takes_mode=True)
@lane("min", "f64", "T T", takes_mode=True)
def min_(a: float, b: float, mode: int) -> float:
    if mode & XORSIGN:
        return _signed_by_both(_lesser(abs(a), abs(b), mode), a, b)
    return _lesser(a, b, mode)


@lane("max", "f32", "T T", modifiers=_MINMAX_F32, takes_mode=True, hot="f32")
@lane("max", "f16 f16x2", "T T", modifiers=_MINMAX_F16, takes_mode=True)
@lane("max", "bf16 bf16x2", "T T", modifiers=_MINMAX_BF16, takes_mode=True)
@lane("max", "f64", "T T", takes_mode=True)
def max_(a: float, b: float, mode: int) -> float:
    if mode & XORSIGN:
        return _signed_by_both(-_lesser(-abs(a), -abs(b), mode), a, b)
    return -_lesser(-a, -b, mode)


@lane("_min3", "f32", "T T T", modifiers=modifiers("ftz NaN abs"), takes_mode=True)
def min3(a: float, b: float, c: float, mode: int) -> float:
    return _lesser(_lesser(a, b, mode), c, mode)


@lane("_max3", "f32", "T T T", modifiers=modifiers("ftz NaN abs"), takes_mode=True, hot="f32")
def max3(a: float, b: float, c: float, mode: int) -> float:
    return -_lesser(_lesser(-a, -b, mode), -c, mode)


# ------------------------------------------------------------------------------- sign, kind


@lane("abs", "f32", "T", modifiers=modifiers("ftz"))
@lane("abs", "f64", "T")
@lane("abs", "f16 f16x2", "T", modifiers=modifiers("ftz16"))
@lane("abs", "bf16 bf16x2", "T")
def abs_(a: float) -> float:
    return abs(a)


@lane("neg", "f32", "T", modifiers=modifiers("ftz"))
@lane("neg", "f64", "T")
@lane("neg", "f16 f16x2", "T", modifiers=modifiers("ftz16"))
@lane("neg", "bf16 bf16x2", "T")
def neg(a: float) -> float:
    return -a


@lane("copysign", "f32", "b32 b32", result="b32")
def copysign_f32(a: int, b: int) -> int:
    return (a & 0x80000000) | (b & 0x7FFFFFFF)


@lane("copysign", "f64", "b64 b64", result="b64")
def copysign_f64(a: int, b: int) -> int:
    sign = signed(a) & -0x8000_0000_0000_0000
    return sign | (signed(b) & 0x7FFF_FFFF_FFFF_FFFF)


_KINDS = "finite infinite number notanumber normal subnormal"


@device
def _is_kind(magnitude: float, least_normal: float, kind: int) -> bool:
    if kind == 0:
        return magnitude < math.inf
    if kind == 1:
        return magnitude == math.inf
    if kind == 2:
        return magnitude == magnitude
    if kind == 3:
        return magnitude != magnitude
    if kind == 4:
        return magnitude == 0.0 or least_normal <= magnitude < math.inf
    return 0.0 < magnitude < least_normal


@lane(
    "testp",
    "f32",
    "T",
    result="pred",
    modifiers=selector(_KINDS),
    requires=(_KINDS,),
    takes_mode=True,
)
def testp_f32(a: float, mode: int) -> bool:
    return _is_kind(abs(a), 2.0**-126, mode >> SELECTOR_SHIFT)


@lane(
    "testp",
    "f64",
    "T",
    result="pred",
    modifiers=selector(_KINDS),
    requires=(_KINDS,),
    takes_mode=True,
)
def testp_f64(a: float, mode: int) -> bool:
    return _is_kind(abs(a), 2.0**-1022, mode >> SELECTOR_SHIFT)
