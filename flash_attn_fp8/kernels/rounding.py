"""How fp32 is divided and rounded to codes: operations that CuTe DSL has no name for."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass import select_ as select
from cutlass.cutlass_dsl import T, dsl_user_op

from flash_attn_fp8.formats import Format
from flash_attn_fp8.kernels.encode import packed
from flash_attn_fp8.kernels.ptx import asm

_MAGIC = 1.5 * 2.0**23  # added to a small number, leaves the nearest integer in its low bits
_FRACTION = 0x7FFFFF
_EXPONENT = 23  # where the exponent's bits begin


def _floats(text, values, loc, ip) -> Float32:
    """What a text with one fp32 result makes of some fp32 numbers."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in values]
    return Float32(asm(T.f32(), operands, text, "=f" + ",f" * len(operands), loc, ip))


@dsl_user_op
def divide(a, b, *, loc=None, ip=None) -> Float32:
    """a / b, IEEE."""
    return _floats("div.rn.f32 $0, $1, $2;", (a, b), loc, ip)


@dsl_user_op
def reciprocal(a, *, loc=None, ip=None) -> Float32:
    """1 / a, IEEE."""
    return _floats("rcp.rn.f32 $0, $1;", (a,), loc, ip)


@dsl_user_op
def within(x, bound, *, loc=None, ip=None) -> Float32:
    """x, no further than bound from 0; NaN if x is."""
    text = "{ .reg .f32 a, b; min.NaN.f32 a, $1, $2; neg.f32 b, $2; max.NaN.f32 $0, a, b; }"
    return _floats(text, (x, bound), loc, ip)


@dsl_user_op
def max_of_halves(source: str, a, b, *, loc=None, ip=None) -> Uint32:
    """The larger of two pairs of bf16 or fp16, element by element; NaN where either is."""
    name = {"bf16": "bf16x2", "fp16": "f16x2"}[source]
    operands = [Uint32(v).ir_value(loc=loc, ip=ip) for v in (a, b)]
    return Uint32(asm(T.i32(), operands, f"max.NaN.{name} $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def from_half(bits, *, loc=None, ip=None) -> Float32:
    """The fp16 number whose bits an integer has."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    operand = Int32(bits).ir_value(loc=loc, ip=ip)
    return Float32(asm(T.f32(), [operand], text, "=f,r", loc, ip))


@dsl_user_op
def quotient(x, minus_s, y, *, loc=None, ip=None) -> Float32:
    """x / s, rounded once, of y = 1 / s rounded: `append.py` has the proof."""
    text = "{ .reg .f32 q, e; mul.rn.f32 q, $1, $3; fma.rn.f32 e, q, $2, $1; "
    text += "fma.rn.f32 $0, e, $3, q; }"
    return _floats(text, (x, minus_s, y), loc, ip)


def int8_word(values) -> Uint32:
    """Four numbers within +-127 as int8, ties to even; the first in the lowest bits."""
    ints = [(v + Float32(_MAGIC)).bitcast(Uint32) for v in values]
    return _bytes(ints, 0)


def upper_bytes(words) -> Uint32:
    """The bytes with the signs of four elements, from one word each or two in a word."""
    if len(words) == 4:
        return _bytes(words, 3)
    return Uint32(cute.arch.prmt(words[0], words[1], Int32(0x7531)))


def _bytes(words, at: int) -> Uint32:
    """Byte `at` of each of four words."""
    both = Int32(at | (4 + at) << 4)
    low, high = (cute.arch.prmt(words[i], words[i + 1], both) for i in (0, 2))
    return Uint32(cute.arch.prmt(Uint32(low), Uint32(high), Int32(0x5410)))


def fp8_word(fmt: Format, values, converts: bool) -> Uint32:
    """Four numbers, at most an ulp past the largest code, in fp8, ties to even; NaN is 0x7F.

    The sign of what rounds to zero may be lost.
    """
    if converts:
        return packed(fmt.name, values)
    return _bytes([_fp8(fmt, v) for v in values], 0)


def _fp8(fmt: Format, value: Float32) -> Uint32:
    """The magnitude of one of them, by integers.

    From the smallest normal number on, rounding is of the bits below the fraction's last that is
    kept; a carry goes into the exponent. Below, a sum whose ulp is the smallest subnormal rounds.
    """
    bits = value.bitcast(Uint32) & 0x7FFFFFFF
    value = bits.bitcast(Float32)
    cut = _EXPONENT - fmt.mantissa_bits
    odd = (bits >> cut) & 1
    bias = (127 - fmt.exponent_bias) << _EXPONENT
    normal = (bits - bias + ((1 << (cut - 1)) - 1) + odd) >> cut
    start = Float32(2.0 ** (fmt.min_subnormal_log2 + _EXPONENT))
    subnormal = (value + start).bitcast(Uint32) - start.bitcast(Uint32)
    code = Uint32(select(value < Float32(2.0 ** (1 - fmt.exponent_bias)), subnormal, normal))
    return Uint32(select(value == value, code, Uint32(0x7F)))
