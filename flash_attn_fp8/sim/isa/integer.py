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


# ------------------------------------------------------------------------------ bit fields


@lane("popc", "b32 b64", "T", result="u32")
def popc(a: int) -> int:
    word, count = signed(a), 0
    for bit in range(64):
        count += (word >> bit) & 1
    return count


@device
def highest_bit(word: int) -> int:
    """The place of the highest set bit of 64; -1 where there is none."""
    place = -1
    for bit in range(64):
        if (word >> bit) & 1:
            place = bit
    return place


@lane("clz", "b32", "T", result="u32")
def clz_32(a: int) -> int:
    return 31 - highest_bit(a)


@lane("clz", "b64", "T", result="u32")
def clz_64(a: int) -> int:
    return 63 - highest_bit(signed(a))


@device
def _find(word: int, width: int, mode: int) -> int:
    place = highest_bit(word)
    return width - 1 - place if mode and place >= 0 else place


_SHIFTAMT = selector("- shiftamt")


@lane("bfind", "u32", "T", result="u32", modifiers=_SHIFTAMT, takes_mode=True)
def bfind_u32(a: int, mode: int) -> int:
    return _find(a, 32, mode)


@lane("bfind", "s32", "T", result="u32", modifiers=_SHIFTAMT, takes_mode=True)
def bfind_s32(a: int, mode: int) -> int:
    return _find((~a if a < 0 else a) & 0xFFFFFFFF, 32, mode)


@lane("bfind", "u64", "T", result="u32", modifiers=_SHIFTAMT, takes_mode=True)
def bfind_u64(a: int, mode: int) -> int:
    return _find(signed(a), 64, mode)


@lane("bfind", "s64", "T", result="u32", modifiers=_SHIFTAMT, takes_mode=True)
def bfind_s64(a: int, mode: int) -> int:
    return _find(~a if a < 0 else a, 64, mode)


@device
def _reversed(word: int, width: int) -> int:
    result = 0
    for bit in range(width):
        result |= ((word >> bit) & 1) << (width - 1 - bit)
    return result


@lane("brev", "b32", "T")
def brev_32(a: int) -> int:
    return _reversed(a, 32)


@lane("brev", "b64", "T")
def brev_64(a: int) -> int:
    return _reversed(signed(a), 64)


@device
def _low_bits(count: int) -> int:
    return -1 if count >= 64 else (1 << count) - 1


@device
def _extract(word: int, start: int, length: int, width: int, is_signed: bool) -> int:
    """bfe: where the field leaves the word, it is filled with the sign."""
    start, length = start & 0xFF, length & 0xFF
    if length == 0:
        return 0
    top = min(start + length - 1, width - 1)
    sign = (word >> top) & 1 if is_signed else 0
    field = (word >> start if start < width else 0) & _low_bits(min(length, width - min(start, width)))
    kept = min(length, max(width - start, 0))
    return field | (~_low_bits(kept) if sign else 0)


@lane("bfe", "u32", "T u32 u32")
def bfe_u32(a: int, start: int, length: int) -> int:
    return _extract(a, start, length, 32, False)


@lane("bfe", "s32", "T u32 u32")
def bfe_s32(a: int, start: int, length: int) -> int:
    return _extract(a & 0xFFFFFFFF, start, length, 32, True)


@lane("bfe", "u64", "T u32 u32")
def bfe_u64(a: int, start: int, length: int) -> int:
    return _extract(signed(a), start, length, 64, False)


@lane("bfe", "s64", "T u32 u32")
def bfe_s64(a: int, start: int, length: int) -> int:
    return _extract(a, start, length, 64, True)


@device
def _insert(field: int, word: int, start: int, length: int, width: int) -> int:
    start, length = start & 0xFF, length & 0xFF
    if start >= width:
        return word
    mask = _low_bits(min(length, width - start)) << start
    return (word & ~mask) | ((field << start) & mask)


@lane("bfi", "b32", "T T u32 u32")
def bfi_32(a: int, b: int, start: int, length: int) -> int:
    return _insert(a, b, start, length, 32)


@lane("bfi", "b64", "T T u32 u32")
def bfi_64(a: int, b: int, start: int, length: int) -> int:
    return _insert(signed(a), signed(b), start, length, 64)


_CLAMP_WRAP = selector("clamp wrap")


@device
def _bounded(count: int, mode: int) -> int:
    return count & 31 if mode >> SELECTOR_SHIFT else min(count, 32)


@lane("bmsk", "b32", "u32 u32", modifiers=_CLAMP_WRAP, requires=("clamp wrap",), takes_mode=True)
def bmsk(start: int, length: int, mode: int) -> int:
    return _low_bits(_bounded(length, mode)) << _bounded(start, mode)


@lane("szext", "u32", "T u32", modifiers=_CLAMP_WRAP, requires=("clamp wrap",), takes_mode=True)
def szext_u32(a: int, length: int, mode: int) -> int:
    return a & _low_bits(_bounded(length, mode))


@lane("szext", "s32", "T u32", modifiers=_CLAMP_WRAP, requires=("clamp wrap",), takes_mode=True)
def szext_s32(a: int, length: int, mode: int) -> int:
    count = _bounded(length, mode)
    return 0 if count == 0 else ((a & _low_bits(count)) ^ (1 << (count - 1))) - (1 << (count - 1))


@lane("fns", "b32", "T u32 s32", result="u32")
def fns(mask: int, base: int, offset: int) -> int:
    """The place of the offset-th set bit from `base` up (down where negative), 0: at or none."""
    if base >= 32:
        return 0xFFFFFFFF
    if offset == 0:
        return base if (mask >> base) & 1 else 0xFFFFFFFF
    step, left = (1 if offset > 0 else -1), (offset if offset > 0 else -offset)
    place = base
    while 0 <= place < 32:
        left -= (mask >> place) & 1
        if left == 0:
            return place
        place += step
    return 0xFFFFFFFF


@lane(
    "prmt",
    "b32",
    "T T b32",
    modifiers=selector("- f4e b4e rc8 ecl ecr rc16"),
    takes_mode=True,
)
def prmt(a: int, b: int, control: int, mode: int) -> int:
    """Four bytes picked of {b, a}; the default's selector has bit 3 for "the byte's sign"."""
    kind, low = mode >> SELECTOR_SHIFT, control & 3
    result = 0
    for place in range(4):
        replicate = 0
        if kind == 0:
            source, replicate = (control >> (4 * place)) & 7, (control >> (4 * place + 3)) & 1
        elif kind == 1:
            source = low + place
        elif kind == 2:
            source = (low - place) & 7
        elif kind == 3:
            source = low
        elif kind == 4:
            source = max(low, place)
        elif kind == 5:
            source = min(low, place)
        else:
            source = 2 * (low & 1) + (place & 1)
        byte = ((a >> (8 * source)) if source < 4 else (b >> (8 * (source - 4)))) & 0xFF
        if replicate:
            byte = 0xFF if byte & 0x80 else 0
        result |= byte << (8 * place)
    return result


@device
def _byte(word: int, place: int, is_signed: int) -> int:
    byte = (word >> (8 * place)) & 0xFF
    return (byte ^ 0x80) - 0x80 if is_signed else byte


@device
def _dot4(a: int, b: int, c: int, signed_a: int, signed_b: int) -> int:
    for place in range(4):
        c += _byte(a, place, signed_a) * _byte(b, place, signed_b)
    return c


@device
def _dot2(a: int, b: int, c: int, signed_a: int, signed_b: int, first: int) -> int:
    for place in range(2):
        half = (a >> (16 * place)) & 0xFFFF
        half = (half ^ 0x8000) - 0x8000 if signed_a else half
        c += half * _byte(b, first + place, signed_b)
    return c


@lane("dp4a", "u32,u32", "b32 b32 u32")
def dp4a_uu(a: int, b: int, c: int) -> int:
    return _dot4(a, b, c, 0, 0)


@lane("dp4a", "u32,s32", "b32 b32 s32", result="U")
def dp4a_us(a: int, b: int, c: int) -> int:
    return _dot4(a, b, c, 0, 1)


@lane("dp4a", "s32,u32", "b32 b32 s32")
def dp4a_su(a: int, b: int, c: int) -> int:
    return _dot4(a, b, c, 1, 0)


@lane("dp4a", "s32,s32", "b32 b32 s32")
def dp4a_ss(a: int, b: int, c: int) -> int:
    return _dot4(a, b, c, 1, 1)


@device
def _first_byte(mode: int) -> int:
    return 2 * (mode >> SELECTOR_SHIFT)


@lane(
    "dp2a",
    "u32,u32",
    "b32 b32 u32",
    modifiers=selector("lo hi"),
    requires=("lo hi",),
    takes_mode=True,
)
def dp2a_uu(a: int, b: int, c: int, mode: int) -> int:
    return _dot2(a, b, c, 0, 0, _first_byte(mode))


@lane(
    "dp2a",
    "s32,s32",
    "b32 b32 s32",
    modifiers=selector("lo hi"),
    requires=("lo hi",),
    takes_mode=True,
)
def dp2a_ss(a: int, b: int, c: int, mode: int) -> int:
    return _dot2(a, b, c, 1, 1, _first_byte(mode))


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


@lane("_slct", "s32", "b64 b64 s32", result="b64")
def slct_s32(a: int, b: int, c: int) -> int:
    return a if c >= 0 else b


_SELECTABLE = " ".join(f"{kind}=b64" for kind in "b16 s16 u16 b32 s32 u32 s64 u64".split())


@lane("selp", f"b64 {_SELECTABLE} f32=b64 f64=b64", "T T pred", hot="b64")
def selp(a: int, b: int, p: int) -> int:
    return a if p else b
