"""Codes to 16-bit numbers, exact for every one of a format's 256 codes.

A 32-bit word holds four 8-bit codes, or two 16-bit numbers. 8-bit codes become fp16, which holds
all of them, as does bf16:

* e5m2 is fp16's upper byte;
* e4m3 has an instruction from sm_89 on. Before that, a shift puts its bits where fp16 has them,
  which is the code times 2**-8 (`BIAS_LOG2`: the score's factor and the output's undo it), and a
  NaN gets its bits separately;
* int8, offset by 128, is the low byte of an fp16 between 1024 and 1279; 1152 is subtracted.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from flash_attn_fp8.kernels.encode import packed, values_of_16bit
from flash_attn_fp8.kernels.ptx import asm

# Selectors of prmt: four bytes of (second word, first word), the highest first.
_LOW_CODES, _HIGH_CODES = 0x1404, 0x3424  # each code as the upper byte of a half, over zeros
_LOW_BYTES, _HIGH_BYTES = 0x4140, 0x4342  # each code as the lower byte of a half
_LOW_SIGNS, _HIGH_SIGNS = 0x9988, 0xBBAA  # a half full of the upper bit of each code

_E4M3_HARDWARE = """{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $2;
cvt.rn.f16x2.e4m3x2 $0, lo; cvt.rn.f16x2.e4m3x2 $1, hi; }"""


def bias_log2(fmt: str, has_fp8: bool) -> int:
    """log2 of what `pairs` multiplies a code by."""
    return -8 if fmt == "e4m3" and not has_fp8 else 0


def pairs(fmt: str, has_fp8: bool, word: Uint32) -> list[Uint32]:
    """The 16-bit numbers of a word, two a word, the first in the lower half."""
    if fmt in ("bf16", "fp16"):
        return [word]
    zero = Uint32(0)
    if fmt == "e5m2":
        return [cute.arch.prmt(word, zero, s) for s in (_LOW_CODES, _HIGH_CODES)]
    if fmt == "int8":
        offset, magic = word ^ Uint32(0x80808080), Uint32(0x64646464)
        biased = [cute.arch.prmt(offset, magic, s) for s in (_LOW_BYTES, _HIGH_BYTES)]
        return [_subtract(x, Uint32(0x64806480)) for x in biased]
    if has_fp8:
        return _e4m3(word)
    nan = ((word & Uint32(0x7F7F7F7F)) + Uint32(0x01010101)) & Uint32(0x80808080)
    shifted = []
    for codes, signs in ((_LOW_CODES, _LOW_SIGNS), (_HIGH_CODES, _HIGH_SIGNS)):
        half = cute.arch.prmt(word, zero, codes)
        number = (half & Uint32(0x80008000)) | ((half & Uint32(0x7F007F00)) >> 1)
        shifted.append(number | (cute.arch.prmt(nan, zero, signs) & Uint32(0x7FFF7FFF)))
    return shifted


def halves(fmt: str, to: str, word: Uint32) -> list[Uint32]:
    """The four codes of a word in bf16 or fp16, two a word; on an architecture that has fp8."""
    words = pairs(fmt, True, word)
    return words if to == "fp16" else [packed(to, values_of_16bit("fp16", w)) for w in words]


@dsl_user_op
def _e4m3(word: Uint32, *, loc=None, ip=None) -> list[Uint32]:
    pair = llvm.StructType.get_literal([T.i32(), T.i32()])
    operand = Uint32(word).ir_value(loc=loc, ip=ip)
    result = asm(pair, [operand], _E4M3_HARDWARE, "=r,=r,r", loc, ip)
    return [Uint32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(2)]


@dsl_user_op
def _subtract(a: Uint32, b: Uint32, *, loc=None, ip=None) -> Uint32:
    operands = [Uint32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    return Uint32(asm(T.i32(), operands, "sub.rn.f16x2 $0, $1, $2;", "=r,r,r", loc, ip))
