"""How fp32 is divided and rounded to codes: operations that CuTe DSL has no name for."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass import select_ as select
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from flash_attn_fp8.formats import Format
from flash_attn_fp8.kernels.sm100.encode import packed

_MAGIC = 1.5 * 2.0**23  # added to a small number, leaves the nearest integer in its low bits
_FRACTION = 0x7FFFFF
_EXPONENT = 23  # where the exponent's bits begin


def _asm(result, operands, text, constraints, loc, ip):
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _floats(text, values, loc, ip) -> Float32:
    """What a text with one fp32 result makes of some fp32 numbers."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in values]
    return Float32(_asm(T.f32(), operands, text, "=f" + ",f" * len(operands), loc, ip))


@dsl_user_op
def divide(a, b, *, loc=None, ip=None) -> Float32:
    """a / b, IEEE."""
    return _floats("div.rn.f32 $0, $1, $2;", (a, b), loc, ip)


@dsl_user_op
def _reciprocal(a, *, loc=None, ip=None) -> Float32:
    return _floats("rcp.rn.f32 $0, $1;", (a,), loc, ip)


@dsl_user_op
def _fma(a, b, c, *, loc=None, ip=None) -> Float32:
    return _floats("fma.rn.f32 $0, $1, $2, $3;", (a, b, c), loc, ip)


@dsl_user_op
def min_of_magnitude(x, bound, *, loc=None, ip=None) -> Float32:
    """The lesser of |x| and bound; NaN if x is."""
    text = "{ .reg .f32 a; abs.f32 a, $1; min.NaN.f32 $0, a, $2; }"
    return _floats(text, (x, bound), loc, ip)


@dsl_user_op
def max_of_halves(source: str, a, b, *, loc=None, ip=None) -> Uint32:
    """The larger of two pairs of bf16 or fp16, element by element; NaN if either is."""
    name = {"bf16": "bf16x2", "fp16": "f16x2"}[source]
    operands = [Uint32(v).ir_value(loc=loc, ip=ip) for v in (a, b)]
    return Uint32(_asm(T.i32(), operands, f"max.NaN.{name} $0, $1, $2;", "=r,r,r", loc, ip))


@dsl_user_op
def from_half(bits, *, loc=None, ip=None) -> Float32:
    """The fp16 number whose bits an integer has."""
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    operand = Int32(bits).ir_value(loc=loc, ip=ip)
    return Float32(_asm(T.f32(), [operand], text, "=f,r", loc, ip))


class Divisor(NamedTuple):
    """A scale s = m 2^E as `quotient` uses it, y + z ~ 1 / m."""

    minus_m: Float32
    y: Float32
    z: Float32
    unit: Float32  # 2^-E


def divisor(scale: Float32) -> Divisor:
    """Of a normal number below 2^127."""
    bits = scale.bitcast(Int32)
    m = ((bits & _FRACTION) | (127 << _EXPONENT)).bitcast(Float32)
    unit = ((254 << _EXPONENT) - (bits & ~_FRACTION)).bitcast(Float32)
    y = _reciprocal(m)
    return Divisor(-m, y, _fma(-m, y, Float32(1.0)) * y, unit)


@dsl_user_op
def quotient(x, by: Divisor, *, signed: bool, loc=None, ip=None) -> Float32:
    """x (or |x|) / s, rounded once: `append.py` has the proof."""
    start = "mov.f32 a, $1;" if signed else "abs.f32 a, $1;"
    text = f"{{ .reg .f32 a, q, e; {start} mul.rn.f32 a, a, $5; mul.rn.f32 q, a, $4; "
    text += "fma.rn.f32 q, a, $3, q; fma.rn.f32 e, q, $2, a; fma.rn.f32 $0, e, $3, q; }"
    return _floats(text, (x, by.minus_m, by.y, by.z, by.unit), loc, ip)


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
    """Four magnitudes, at most one ulp above the largest, in fp8, ties to even; NaN is 0x7F."""
    if converts:
        return packed(fmt.name, values)
    return _bytes([_fp8(fmt, v) for v in values], 0)


def _fp8(fmt: Format, value: Float32) -> Uint32:
    """One of them by integers.

    From the smallest normal number on, rounding is of the bits below the fraction's last that is
    kept; a carry goes into the exponent. Below, a sum whose ulp is the smallest subnormal rounds.
    """
    bits = value.bitcast(Uint32)
    cut = _EXPONENT - fmt.mantissa_bits
    odd = (bits >> cut) & 1
    bias = (127 - fmt.exponent_bias) << _EXPONENT
    normal = (bits - bias + ((1 << (cut - 1)) - 1) + odd) >> cut
    start = Float32(2.0 ** (fmt.min_subnormal_log2 + _EXPONENT))
    subnormal = (value + start).bitcast(Uint32) - start.bitcast(Uint32)
    code = Uint32(select(value < Float32(2.0 ** (1 - fmt.exponent_bias)), subnormal, normal))
    return Uint32(select(value == value, code, Uint32(0x7F)))
