"""Integer, logic, comparison and bit-field instructions, lane by lane.

Handlers receive integers with the sign of their type; results are cut to the result's width. In
compiled code they are 64 bits wide and wrap, which never shows in the bits that are kept. u64 comes
as uint64 and must not meet a plain constant there, so what reads u64 converts with `signed`.
"""
# ruff: noqa: D103 -- the opcode each function is registered for says what it does

from __future__ import annotations

from flash_attn_fp8.sim.isa.bits import device, signed, unsigned
from flash_attn_fp8.sim.isa.table import RELU, SAT, SELECTOR_SHIFT, lane, modifiers, selector

# u… gives the same bits as s…
_ANY_SIGN = "s16 s32 s64 u16=s16 u32=s32 u64=s64"
_SIGNED = "s16 s32 s64"
_ALL = "s16 s32 s64 u16 u32 u64"
_BITS = "b64 b16=b64 b32=b64 pred=b64"

_S32_MAX, _S32_MIN = 0x7FFF_FFFF, -0x8000_0000


@lane("add", "s16 s64 u16=s16 u32=s32 u64=s64 s16x2 u16x2=s16x2", "T T")
def add(a: int, b: int) -> int:
    return a + b


@lane("add", "s32", "T T", modifiers=modifiers("sat"), takes_mode=True, hot="s32")
def add_s32(a: int, b: int, mode: int) -> int:
    return max(_S32_MIN, min(a + b, _S32_MAX)) if mode & SAT else a + b


@lane("sub", "s16 s64 u16=s16 u32=s32 u64=s64", "T T")
def sub(a: int, b: int) -> int:
    return a - b


@lane("sub", "s32", "T T", modifiers=modifiers("sat"), takes_mode=True, hot="s32")
def sub_s32(a: int, b: int, mode: int) -> int:
    return max(_S32_MIN, min(a - b, _S32_MAX)) if mode & SAT else a - b


@lane("mul.lo", _ANY_SIGN, "T T", hot="s32")
def mul_lo(a: int, b: int) -> int:
    return a * b


@lane("mul.wide", "s16 s32 u16 u32", "T T", result="2T")
def mul_wide(a: int, b: int) -> int:
    return a * b


@lane("mul.hi", "s16 u16", "T T")
def mul_hi_16(a: int, b: int) -> int:
    return (a * b) >> 16


@lane("mul.hi", "s32 u32", "T T")
def mul_hi_32(a: int, b: int) -> int:
    return (a * b) >> 32


@device
def high_of_product(a: int, b: int) -> int:
    """The upper 64 bits of the product of two u64, given and returned as s64."""
    low_a, high_a = a & 0xFFFFFFFF, (a >> 32) & 0xFFFFFFFF
    low_b, high_b = b & 0xFFFFFFFF, (b >> 32) & 0xFFFFFFFF
    # Each partial product is below 2^64 but may look negative: cut to 32-bit pieces at once.
    low, first, second = low_a * low_b, high_a * low_b, low_a * high_b
    middle = ((low >> 32) & 0xFFFFFFFF) + (first & 0xFFFFFFFF) + (second & 0xFFFFFFFF)
    upper = ((first >> 32) & 0xFFFFFFFF) + ((second >> 32) & 0xFFFFFFFF)
    return signed(high_a * high_b + upper + (middle >> 32))


@lane("mul.hi", "u64", "T T")
def mul_hi_u64(a: int, b: int) -> int:
    return high_of_product(signed(a), signed(b))


@lane("mul.hi", "s64", "T T")
def mul_hi_s64(a: int, b: int) -> int:
    high = high_of_product(a, b)
    # As unsigned, a negative factor is too large by 2^64.
    return high - (b if a < 0 else 0) - (a if b < 0 else 0)


@lane("mad.lo", _ANY_SIGN, "T T T", hot="s32")
def mad_lo(a: int, b: int, c: int) -> int:
    return a * b + c


@lane("mad.wide", "s16 s32 u16 u32", "T T 2T", result="2T")
def mad_wide(a: int, b: int, c: int) -> int:
    return a * b + signed(c)


@lane("mad.hi", "s16 u16", "T T T")
def mad_hi_16(a: int, b: int, c: int) -> int:
    return ((a * b) >> 16) + c


@lane("mad.hi", "s32 u32", "T T T")
def mad_hi_32(a: int, b: int, c: int) -> int:
    return ((a * b) >> 32) + c


@lane("mad.hi.sat", "s32", "T T T")
def mad_hi_sat(a: int, b: int, c: int) -> int:
    return max(_S32_MIN, min(((a * b) >> 32) + c, _S32_MAX))


@lane("mad.hi", "u64", "T T T")
def mad_hi_u64(a: int, b: int, c: int) -> int:
    return high_of_product(signed(a), signed(b)) + signed(c)


@lane("mad.hi", "s64", "T T T")
def mad_hi_s64(a: int, b: int, c: int) -> int:
    return mul_hi_s64(a, b) + c


@device
def _low_24(a: int) -> int:
    return a & 0xFFFFFF


@device
def _low_24_signed(a: int) -> int:
    return ((a & 0xFFFFFF) ^ 0x800000) - 0x800000


@lane("mul24.lo", "u32", "T T")
def mul24_lo_u32(a: int, b: int) -> int:
    return _low_24(a) * _low_24(b)


@lane("mul24.lo", "s32", "T T")
def mul24_lo_s32(a: int, b: int) -> int:
    return _low_24_signed(a) * _low_24_signed(b)


@lane("mul24.hi", "u32", "T T")
def mul24_hi_u32(a: int, b: int) -> int:
    return (_low_24(a) * _low_24(b)) >> 16


@lane("mul24.hi", "s32", "T T")
def mul24_hi_s32(a: int, b: int) -> int:
    return (_low_24_signed(a) * _low_24_signed(b)) >> 16


@lane("mad24.lo", "u32", "T T T")
def mad24_lo_u32(a: int, b: int, c: int) -> int:
    return _low_24(a) * _low_24(b) + c


@lane("mad24.lo", "s32", "T T T")
def mad24_lo_s32(a: int, b: int, c: int) -> int:
    return _low_24_signed(a) * _low_24_signed(b) + c


@lane("sad", _ALL, "T T T")
def sad(a: int, b: int, c: int) -> int:
    return c + (a - b if a > b else b - a)


@lane("div", _SIGNED, "T T")
def div_signed(a: int, b: int) -> int:
    if b == 0:
        return -1  # the manual leaves it open; all ones is what an H200 gives, here and in rem
    if b == -1:
        return -a  # of the least number, which wraps
    quotient = a // b
    return quotient + 1 if quotient < 0 and quotient * b != a else quotient


@lane("rem", _SIGNED, "T T")
def rem_signed(a: int, b: int) -> int:
    if b == 0:
        return -1
    return 0 if b == -1 else a - div_signed(a, b) * b


@lane("div", "u16 u32", "T T")
def div_unsigned(a: int, b: int) -> int:
    return -1 if b == 0 else a // b


@lane("rem", "u16 u32", "T T")
def rem_unsigned(a: int, b: int) -> int:
    return -1 if b == 0 else a % b


@lane("div", "u64", "T T")
def div_u64(a: int, b: int) -> int:
    return unsigned(-1) if b == 0 else a // b


@lane("rem", "u64", "T T")
def rem_u64(a: int, b: int) -> int:
    return unsigned(-1) if b == 0 else a % b


@lane("abs", _SIGNED, "T")
def abs_(a: int) -> int:
    return -a if a < 0 else a


@lane("neg", _SIGNED, "T")
def neg(a: int) -> int:
    return -a


@lane("min", "s16 s64", "T T", takes_mode=True)
@lane("min", "s16x2", "T T", modifiers=modifiers("relu"), takes_mode=True)
@lane("min", "s32", "T T", modifiers=modifiers("relu"), takes_mode=True, hot="s32")
def min_signed(a: int, b: int, mode: int) -> int:
    least = a if a < b else b
    return 0 if mode & RELU and least < 0 else least


@lane("max", "s16 s64", "T T", takes_mode=True)
@lane("max", "s16x2", "T T", modifiers=modifiers("relu"), takes_mode=True)
@lane("max", "s32", "T T", modifiers=modifiers("relu"), takes_mode=True, hot="s32")
def max_signed(a: int, b: int, mode: int) -> int:
    most = a if a > b else b
    return 0 if mode & RELU and most < 0 else most


@lane("min", "u16 u32 u64 u16x2", "T T")
def min_unsigned(a: int, b: int) -> int:
    return a if a < b else b


@lane("max", "u16 u32 u64 u16x2", "T T")
def max_unsigned(a: int, b: int) -> int:
    return a if a > b else b


# ----------------------------------------------------------------------------------- logic


@lane("and", _BITS, "T T", hot="b64")
def and_(a: int, b: int) -> int:
    return a & b


@lane("or", _BITS, "T T", hot="b64")
def or_(a: int, b: int) -> int:
    return a | b


@lane("xor", _BITS, "T T", hot="b64")
def xor(a: int, b: int) -> int:
    return a ^ b


@lane("not", "b16 b32 b64", "T")
def not_(a: int) -> int:
    return ~signed(a)


@lane("not", "pred", "T", hot="pred")
def not_pred(a: int) -> int:
    return a ^ 1


@lane("cnot", "b16 b32 b64", "T")
def cnot(a: int) -> int:
    return 1 if signed(a) == 0 else 0


@device
def lop3_bits(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for minterm in range(8):
        if (table >> minterm) & 1:
            term_a = a if minterm & 4 else ~a
            term_b = b if minterm & 2 else ~b
            term_c = c if minterm & 1 else ~c
            result |= term_a & term_b & term_c
    return result & 0xFFFFFFFF


@lane("lop3", "b32", "T T T b32")
def lop3(a: int, b: int, c: int, table: int) -> int:
    return lop3_bits(a, b, c, table)


@device
def _shifted_left(a: int, by: int, width: int) -> int:
    return a << by if by < width else 0


@lane("shl", "b16", "T u32")
def shl_16(a: int, by: int) -> int:
    return _shifted_left(a, by, 16)


@lane("shl", "b32", "T u32", hot="b32")
def shl_32(a: int, by: int) -> int:
    return _shifted_left(a, by, 32)


@lane("shl", "b64", "T u32")
def shl_64(a: int, by: int) -> int:
    return _shifted_left(signed(a), by, 64)


@lane("shr", "s16 s32 s64", "T u32")
def shr_signed(a: int, by: int) -> int:
    return a >> min(by, 63)


@lane("shr", "u16 u32 b16=u16 b32=u32", "T u32", hot="u32")
def shr_unsigned(a: int, by: int) -> int:
    return a >> by if by < 32 else 0


@lane("shr", "u64 b64=u64", "T u32")
def shr_u64(a: int, by: int) -> int:
    return a >> unsigned(by) if by < 64 else unsigned(0)


_SHIFTS = selector("wrap clamp")


@device
def _funnel_shift(by: int, mode: int) -> int:
    return by & 31 if mode >> SELECTOR_SHIFT == 0 else min(by, 32)


@lane("shf.l", "b32", "T T u32", modifiers=_SHIFTS, requires=("wrap clamp",), takes_mode=True)
def shf_l(a: int, b: int, by: int, mode: int) -> int:
    return ((b << 32) | a) >> (32 - _funnel_shift(by, mode))


@lane("shf.r", "b32", "T T u32", modifiers=_SHIFTS, requires=("wrap clamp",), takes_mode=True)
def shf_r(a: int, b: int, by: int, mode: int) -> int:
    return ((b << 32) | a) >> _funnel_shift(by, mode)


# -------------------------------------------------------------- for macros; see `moves.py`


@lane("_add3", "u32 u64", "T T T")
def add3(a: int, b: int, carry: int) -> int:
    return signed(a) + signed(b) + signed(carry)


@lane("_carry3", "u32", "T T T", result="pred")
def carry3_u32(a: int, b: int, carry: int) -> int:
    return (a + b + carry) >> 32


@lane("_carry3", "u64", "T T T", result="pred")
def carry3_u64(a: int, b: int, carry: int) -> bool:
    total = unsigned(signed(a) + signed(b))
    return total < a or (signed(total) == -1 and signed(carry) == 1)


@lane("_sub3", "u32 u64", "T T T")
def sub3(a: int, b: int, borrow: int) -> int:
    return signed(a) - signed(b) - signed(borrow)


@lane("_borrow3", "u32 u64", "T T T", result="pred")
def borrow3(a: int, b: int, borrow: int) -> bool:
    return a < b or (a == b and signed(borrow) == 1)


_SELECTABLE = "b64 b16=b64 s16=b64 u16=b64 b32=b64 s32=b64 u32=b64 s64=b64 u64=b64 f32=b64 f64=b64"


@lane("selp", _SELECTABLE, "T T pred", hot="b64")
def selp(a: int, b: int, p: int) -> int:
    return a if p else b
