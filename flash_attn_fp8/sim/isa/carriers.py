"""What a handler receives for a source of each type, and how its result becomes bits again.

`load_T(word)` and `store_T(value)` for each type T; floats' take the mode bits as well. Integers
are what they say; f16, bf16 and f32 come as float64, exactly. Handlers of these types return a
float64 that is either the exact result or has been rounded to odd, so that the one rounding to T in
`store_T` is right in every direction (float64 has at least two bits more than needed: Boldo and
Melquiond, "Emulation of FMA and correctly rounded sums"). Modifiers that are the same for all are
applied here: .ftz, .sat, .relu, the rounding.
"""

from __future__ import annotations

# ruff: noqa: D103 -- what each function does, the module says
from flash_attn_fp8.sim import numerics
from flash_attn_fp8.sim.isa.bits import (
    bits_of_f64,
    device,
    f64_of,
    narrowed_f32,
    signed,
    unsigned,
    widened_f32,
)
from flash_attn_fp8.sim.isa.table import FTZ, FTZ_HALF, RELU, RN, ROUNDING_MASK, SAT, SATFINITE

_MIN_NORMAL_F32 = 2.0**-126
_MIN_NORMAL_F16 = 2.0**-14


@device
def load_pred(word: int) -> int:
    return signed(word) & 1


@device
def load_u8(word: int) -> int:
    return signed(word) & 0xFF


@device
def load_s8(word: int) -> int:
    return ((signed(word) & 0xFF) ^ 0x80) - 0x80


@device
def load_u16(word: int) -> int:
    return signed(word) & 0xFFFF


@device
def load_s16(word: int) -> int:
    return ((signed(word) & 0xFFFF) ^ 0x8000) - 0x8000


@device
def load_u32(word: int) -> int:
    return signed(word) & 0xFFFFFFFF


@device
def load_s32(word: int) -> int:
    return ((signed(word) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


@device
def load_s64(word: int) -> int:
    return signed(word)


@device
def load_u64(word: int) -> int:
    return unsigned(word)


@device
def store_pred(value: int) -> int:
    return unsigned(1 if value else 0)


@device
def store_u8(value: int) -> int:
    return unsigned(signed(value) & 0xFF)


@device
def store_u16(value: int) -> int:
    return unsigned(signed(value) & 0xFFFF)


@device
def store_u32(value: int) -> int:
    return unsigned(signed(value) & 0xFFFFFFFF)


@device
def store_u64(value: int) -> int:
    return unsigned(value)


@device
def load_f32(word: int, mode: int) -> float:
    value = widened_f32(word)
    if mode & FTZ and -_MIN_NORMAL_F32 < value < _MIN_NORMAL_F32:
        value = value * 0.0  # keeps the sign
    return value


@device
def load_f16(word: int, mode: int) -> float:
    value = numerics.decode_f16(signed(word) & 0xFFFF)
    if mode & FTZ_HALF and -_MIN_NORMAL_F16 < value < _MIN_NORMAL_F16:
        value = value * 0.0
    return value


@device
def load_bf16(word: int) -> float:
    return numerics.decode_bf16(signed(word))


@device
def load_f64(word: int) -> float:
    return f64_of(word)


@device
def clamped(value: float, mode: int) -> float:
    """.sat: into [0, 1], NaN to +0. .relu: negative to +0, NaN stays."""
    if mode & SAT:
        if not value > 0.0:
            return 0.0
        if value > 1.0:
            return 1.0
    if mode & RELU and value <= 0.0:
        return 0.0
    return value


@device
def store_f32(value: float, mode: int) -> int:
    if mode == 0:
        return unsigned(narrowed_f32(value))
    value = clamped(value, mode)
    if mode & ROUNDING_MASK == RN:
        code = narrowed_f32(value)
    else:
        code = numerics.narrow_f32(value, mode & ROUNDING_MASK)
    if mode & FTZ and code & 0x7F800000 == 0:
        code &= 0x80000000
    return unsigned(code)


@device
def store_f16(value: float, mode: int) -> int:
    value = clamped(value, mode)
    code = numerics.encode_f16(value, mode & ROUNDING_MASK, mode & SATFINITE != 0)
    if mode & FTZ_HALF and code & 0x7C00 == 0:
        code &= 0x8000
    return unsigned(code)


@device
def store_bf16(value: float, mode: int) -> int:
    value = clamped(value, mode)
    return unsigned(numerics.encode_bf16(value, mode & ROUNDING_MASK, mode & SATFINITE != 0))


@device
def store_tf32(value: float, mode: int) -> int:
    value = clamped(value, mode)
    return unsigned(numerics.encode_tf32(value, mode & ROUNDING_MASK, mode & SATFINITE != 0))


@device
def store_f64(value: float, mode: int) -> int:
    value = clamped(value, mode)
    # Hardware keeps a NaN's payload in f64; one NaN for all is the same on every host.
    return unsigned(0x7FFF_FFFF_FFFF_FFFF if value != value else bits_of_f64(value))


@device
def low_half(word: int) -> int:
    return unsigned(signed(word) & 0xFFFF)


@device
def high_half(word: int) -> int:
    return unsigned((signed(word) >> 16) & 0xFFFF)


@device
def join_halves(low: int, high: int) -> int:
    return unsigned(signed(low) | (signed(high) << 16))


@device
def low_word(word: int) -> int:
    return unsigned(signed(word) & 0xFFFFFFFF)


@device
def high_word(word: int) -> int:
    return unsigned((signed(word) >> 32) & 0xFFFFFFFF)


@device
def join_words(low: int, high: int) -> int:
    return unsigned(signed(low) | (signed(high) << 32))


# The functions that take the mode bits.
WITH_MODE = frozenset(
    ["load_f32", "load_f16", "store_f32", "store_f16", "store_bf16", "store_tf32", "store_f64"]
)
# Bits that have no sign: the unsigned type of the width. Storing a signed value drops the sign.
LOADS = {"b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64"}
STORES = {**LOADS, "s8": "u8", "s16": "u16", "s32": "u32", "s64": "u64"}
