"""Instructions on fields of bits and on bytes, lane by lane; see `integer.py`."""
# ruff: noqa: D103 -- the opcode each function is registered for says what it does

from __future__ import annotations

from flash_attn_fp8.sim.isa.bits import device, signed
from flash_attn_fp8.sim.isa.table import SELECTOR_SHIFT, lane, selector


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
    field = (word >> start if start < width else 0) & _low_bits(
        min(length, width - min(start, width))
    )
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
