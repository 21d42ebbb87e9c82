"""What CuTe DSL has no name for: P to and from its formats, and exponentials by FMA."""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from flash_attn_fp8.kernels.ptx import asm

# Ties to even, saturating to the largest finite value in fp8: what the tensor core will read.
_PACK8 = "{{ .reg .b16 lo, hi; cvt.rn.satfinite.{fmt}x2.f32 lo, $2, $1; "
_PACK8 += "cvt.rn.satfinite.{fmt}x2.f32 hi, $4, $3; mov.b32 $0, {{lo, hi}}; }}"
_PACK16 = "cvt.rn.{fmt}x2.f32 $0, $2, $1;"
_PTX_NAMES = {"e4m3": "e4m3", "e5m2": "e5m2", "bf16": "bf16", "fp16": "f16"}


@dsl_user_op
def packed(fmt: str, values, *, loc=None, ip=None) -> Uint32:
    """A 32-bit word of P: four values in fp8, or two in 16 bits; the first in the lowest bits."""
    text = (_PACK8 if len(values) == 4 else _PACK16).format(fmt=_PTX_NAMES[fmt])
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in values]
    return Uint32(asm(T.i32(), operands, text, "=r" + ",f" * len(operands), loc, ip))


# Sums of fp8 are taken in f16x2, e5m2's at this scale: f16 could not add up its largest values.
SUM_SCALE = {"e4m3": 1.0, "e5m2": 2.0**-3}
SUMMED_WORDS = 2  # at once: each addition rounds to f16's 11 bits, so only a few are made


@dsl_user_op
def sum_of_fp8(fmt: str, words, *, loc=None, ip=None):
    """(sum of the even elements, of the odd ones) of some words of fp8, fp32, times SUM_SCALE."""
    name, scale = _PTX_NAMES[fmt], SUM_SCALE[fmt]
    bits = _f16_bits(scale)
    lines = [".reg .b16 lo, hi, a, b; .reg .b32 x, sum, scale;"]
    lines.append(f"mov.b32 scale, 0x{bits:04x}{bits:04x};")
    add = "add.rn.f16x2 sum, sum, x;" if scale == 1 else "fma.rn.f16x2 sum, x, scale, sum;"
    first = "mov.b32 sum, x;" if scale == 1 else "mul.rn.f16x2 sum, x, scale;"
    for i in range(len(words)):
        lines.append(f"mov.b32 {{lo, hi}}, ${2 + i};")
        for half in ("lo", "hi"):
            lines.append(f"cvt.rn.f16x2.{name}x2 x, {half};")
            lines.append(first if i == 0 and half == "lo" else add)
    lines.append("mov.b32 {a, b}, sum; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;")
    operands = [Uint32(w).ir_value(loc=loc, ip=ip) for w in words]
    return _two_sums(operands, "{ " + " ".join(lines) + " }", loc, ip)


@dsl_user_op
def sum_of_16bit(fmt: str, words, *, loc=None, ip=None):
    """(sum of the even elements, of the odd ones) of some words of bf16 or fp16, in fp32."""
    total = Float32(0.0), Float32(0.0)
    for word in words:
        halves = values_of_16bit(fmt, word, loc=loc, ip=ip)
        total = cute.arch.add_packed_f32x2(total, halves)
    return total


@dsl_user_op
def values_of_16bit(fmt: str, word, *, loc=None, ip=None):
    """The two numbers of a word of bf16 or fp16, in fp32."""
    name = _PTX_NAMES[fmt]
    text = (
        f"{{ .reg .b16 a, b; mov.b32 {{a, b}}, $2; cvt.f32.{name} $0, a; cvt.f32.{name} $1, b; }}"
    )
    return _two_sums([Uint32(word).ir_value(loc=loc, ip=ip)], text, loc, ip)


def _two_sums(words, text, loc, ip):
    """What an instruction makes of some words: two fp32 numbers."""
    pair = llvm.StructType.get_literal([T.f32(), T.f32()])
    result = asm(pair, words, text, "=f,=f" + ",r" * len(words), loc, ip)
    return tuple(Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(2))


def _f16_bits(power_of_two: float) -> int:
    return (15 + round(math.log2(power_of_two))) << 10


CODE = 2.0**-24  # fp16's smallest number: so many of it have the bits of the integer, up to 2047

_PACK_CODES = "{ .reg .b32 lo, hi; cvt.rn.relu.f16x2.f32 lo, $2, $1; "
_PACK_CODES += "cvt.rn.relu.f16x2.f32 hi, $4, $3; prmt.b32 $0, lo, hi, 0x6420; }"


@dsl_user_op
def packed_codes(values, *, loc=None, ip=None) -> Uint32:
    """A word of four fp8 codes, the nearest integers to values / CODE, 0 for those below 0.

    What rounds to fp16's subnormal numbers rounds to integers, two at a time.
    """
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in values]
    return Uint32(asm(T.i32(), operands, _PACK_CODES, "=r,f,f,f,f", loc, ip))


def code_line(policy, factor, row_max):
    """(slope, offset) of the line from a row's scores to the codes of its P, in units of CODE.

    fp8 codes are nearly linear in log2 (numerics.md, section 7). The largest is not exceeded, which
    would be NaN or negative: where x is the score times `factor`, `row_max` is to be rounded up
    (`mul_up`), and the offset is rounded down here, whatever millions of octaves the scores are.
    """
    fmt = policy.format
    scale = 2**fmt.mantissa_bits * CODE
    offset = fma_down(row_max, -scale, (policy.max_offset + fmt.exponent_bias) * scale)
    return factor * scale, offset


@dsl_user_op
def mul_up(a, b, *, loc=None, ip=None) -> Float32:
    """a * b, rounded towards infinity."""
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Float32(asm(T.f32(), operands, "mul.rp.f32 $0, $1, $2;", "=f,f,f", loc, ip))


@dsl_user_op
def fma_up(a, b, c, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded towards infinity."""
    return _fma("rp", (a, b, c), loc, ip)


@dsl_user_op
def fma_down(a, b, c, *, loc=None, ip=None) -> Float32:
    """a * b + c, rounded towards minus infinity."""
    return _fma("rm", (a, b, c), loc, ip)


def _fma(rounding: str, numbers, loc, ip) -> Float32:
    operands = [Float32(x).ir_value(loc=loc, ip=ip) for x in numbers]
    text = f"fma.{rounding}.f32 $0, $1, $2, $3;"
    return Float32(asm(T.f32(), operands, text, "=f,f,f,f", loc, ip))


# 2**f on [-1/2, 1/2] by a quartic that is 1 at 0, minimax in relative error: 2.9e-6.
_COEFFICIENTS = (1.0, 0.69312419, 0.24024099, 0.05590643, 0.00958285)
_ROUND = 1.5 * 2.0**23  # added to a small number, leaves the nearest integer in its low bits
_LOWEST = -127.0  # 2**x becomes 0 there, exactly: its exponent field is 0


def exp2_by_fma(a: Float32, b: Float32):
    """2**a and 2**b on the FMA pipe, for arguments up to 126; 0 from -127 down, and for NaN.

    Between -127 and -126 it is some subnormal number.
    """
    low = Float32(_LOWEST)
    a, b = cute.arch.fmax(a, low), cute.arch.fmax(b, low)
    magic, negative = Float32(_ROUND), Float32(-_ROUND)
    shifted = cute.arch.add_packed_f32x2((a, b), (magic, magic))
    whole = cute.arch.add_packed_f32x2(shifted, (negative, negative))
    fraction = cute.arch.sub_packed_f32x2((a, b), whole)
    power = Float32(_COEFFICIENTS[-1]), Float32(_COEFFICIENTS[-1])
    for c in reversed(_COEFFICIENTS[:-1]):
        power = cute.arch.fma_packed_f32x2(power, fraction, (Float32(c), Float32(c)))
    return tuple(_scaled(p, s) for p, s in zip(power, shifted, strict=True))


def _scaled(power: Float32, shifted: Float32) -> Float32:
    """power * 2**n, where n is the integer in the low bits of `shifted`."""
    bits = (shifted.bitcast(Int32) << 23) + power.bitcast(Int32)
    return bits.bitcast(Float32)
