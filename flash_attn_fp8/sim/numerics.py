"""Floating-point formats: codes and the numbers they stand for, both ways.

Two forms of the same definition. `encode_*` and `decode_*` take one value and are for handlers of
instructions (compiled by numba, or run as Python); `from_float32` and `to_float32` take numpy
arrays. Layouts: IEEE 754, OCP 8-bit Floating Point 1.0, OCP Microscaling Formats 1.0. NaN results
are PTX's canonical NaN of the format; e4m3 and e5m2 have a sign in theirs only when decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from flash_attn_fp8.sim.isa import bits
from flash_attn_fp8.sim.isa.table import RM, RN, RNA, RP, RZ

_INF64 = 0x7FF0_0000_0000_0000
ODD = 5  # a rounding of ours: an inexact result has its last bit set
_FRACTION64 = (1 << 52) - 1


@dataclass(frozen=True)
class Format:
    """A format's layout; codes are magnitudes, without the sign.

    `largest` is the code of the largest finite number; `infinity` 0 where the format has none;
    `nan` is the canonical NaN, 0 where there is none. `shift` zero bits stand below the code (tf32
    lives in the upper bits of 32).
    """

    name: str
    width: int
    mantissa: int
    bias: int
    largest: int
    infinity: int
    nan: int
    shift: int = 0

    @property
    def max(self) -> float:
        """The largest finite number."""
        return float(decode(self.largest, self.mantissa, self.bias, self.infinity, self.nan))


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        layout.name: layout
        for layout in (
            Format("f64", 64, 52, 1023, _INF64 - 1, _INF64, 0x7FFF_FFFF_FFFF_FFFF),
            Format("f32", 32, 23, 127, 0x7F7F_FFFF, 0x7F80_0000, 0x7FFF_FFFF),
            Format("tf32", 32, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF, shift=13),
            Format("f16", 16, 10, 15, 0x7BFF, 0x7C00, 0x7FFF),
            Format("bf16", 16, 7, 127, 0x7F7F, 0x7F80, 0x7FFF),
            Format("e4m3", 8, 3, 7, 0x7E, 0, 0x7F),
            Format("e5m2", 8, 2, 15, 0x7B, 0x7C, 0x7F),
            Format("e3m2", 6, 2, 3, 0x1F, 0, 0),
            Format("e2m3", 6, 3, 1, 0x1F, 0, 0),
            Format("e2m1", 4, 1, 1, 0x7, 0, 0),
        )
    }
)


# ------------------------------------------------------------------------------- one value


@bits.device
def decode(code: int, mantissa: int, bias: int, infinity: int, nan: int) -> float:
    """The number of a magnitude code of up to 32 bits."""
    if infinity != 0 and code >= infinity:
        return np.inf if code == infinity else np.nan
    if nan != 0 and infinity == 0 and code == nan:
        return np.nan
    exponent = code >> mantissa
    fraction = code & ((1 << mantissa) - 1)
    if exponent == 0:
        return fraction * bits.f64_of((1 - bias - mantissa + 1023) << 52)
    return bits.f64_of(((exponent - bias + 1023) << 52) | (fraction << (52 - mantissa)))


@bits.device
def round_significand(
    significand: int, exponent: int, negative: bool, mantissa: int, bias: int, rounding: int
) -> int:
    """The magnitude code of significand × 2^(exponent − 62), as if there were no largest.

    The significand's leading bit is bit 62, and its lowest bit stands for all that was cut off.
    """
    shift = 62 - mantissa
    if exponent < 1 - bias:
        shift += 1 - bias - exponent
    if shift > 63:
        shift, significand = 63, 1  # less than half of the smallest subnormal
    kept = significand >> shift
    rest = significand & ((1 << shift) - 1) if shift < 63 else significand
    half = 1 << (shift - 1)
    if rounding == RN:
        up = rest > half or (rest == half and (kept & 1) == 1)
    elif rounding == RNA:
        up = rest >= half
    elif rounding == RM:
        up = negative and rest != 0
    elif rounding == RP:
        up = not negative and rest != 0
    elif rounding == ODD:
        up = rest != 0 and kept & 1 == 0
    else:
        up = False
    code = kept + (1 if up else 0)
    if exponent >= 1 - bias:
        # `kept` holds the leading bit, which adds 1 to the exponent's field; so does a carry.
        code += (exponent + bias - 1) << mantissa
    return code


@bits.device
def limit(
    code: int, negative: bool, largest: int, infinity: int, rounding: int, satfinite: bool
) -> int:
    """The code of a finite number that may exceed the largest."""
    if code <= largest:
        return code
    toward_zero = (
        rounding == RZ or (rounding == RM and not negative) or (rounding == RP and negative)
    )
    return largest if satfinite or infinity == 0 or toward_zero else infinity


@bits.device
def encode(
    value: float,
    mantissa: int,
    bias: int,
    largest: int,
    infinity: int,
    nan: int,
    sign: int,
    rounding: int,
    satfinite: bool,
) -> int:
    """The code of a float64, its sign at bit `sign`; NaN has no sign.

    Without a NaN in the format NaN becomes the largest number, without infinities infinity does.
    """
    word = bits.bits_of_f64(value)
    magnitude = word & 0x7FFF_FFFF_FFFF_FFFF
    negative = word < 0
    if magnitude > _INF64:
        return nan if nan != 0 else largest
    if magnitude == 0:
        code = 0
    elif magnitude == _INF64:
        code = largest if satfinite or infinity == 0 else infinity
    else:
        exponent = magnitude >> 52
        significand = magnitude & _FRACTION64
        if exponent == 0:
            exponent = 1
            while significand >> 52 == 0:
                significand <<= 1
                exponent -= 1
        else:
            significand |= 1 << 52
        code = round_significand(
            significand << 10, exponent - 1023, negative, mantissa, bias, rounding
        )
        code = limit(code, negative, largest, infinity, rounding, satfinite)
    return code | (1 << sign) if negative else code


@bits.device
def narrow_f32(value: float, rounding: int) -> int:
    """float32 bits of a float64."""
    return encode(value, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 31, rounding, False)


@bits.device
def decode_f16(code: int) -> float:
    """f16 bits to a number."""
    value = decode(code & 0x7FFF, 10, 15, 0x7C00, 0x7FFF)
    return -value if code & 0x8000 else value


@bits.device
def decode_bf16(code: int) -> float:
    """bf16 bits to a number."""
    return bits.widened_f32(bits.unsigned((code & 0xFFFF) << 16))


@bits.device
def decode_e4m3(code: int) -> float:
    """e4m3 bits to a number."""
    value = decode(code & 0x7F, 3, 7, 0, 0x7F)
    return -value if code & 0x80 else value


@bits.device
def decode_e5m2(code: int) -> float:
    """e5m2 bits to a number."""
    value = decode(code & 0x7F, 2, 15, 0x7C, 0x7F)
    return -value if code & 0x80 else value


@bits.device
def decode_e2m1(code: int) -> float:
    """e2m1 bits to a number."""
    value = decode(code & 0x7, 1, 1, 0, 0)
    return -value if code & 0x8 else value


@bits.device
def decode_e2m3(code: int) -> float:
    """e2m3 bits to a number."""
    value = decode(code & 0x1F, 3, 1, 0, 0)
    return -value if code & 0x20 else value


@bits.device
def decode_e3m2(code: int) -> float:
    """e3m2 bits to a number."""
    value = decode(code & 0x1F, 2, 3, 0, 0)
    return -value if code & 0x20 else value


@bits.device
def decode_ue8m0(code: int) -> float:
    """ue8m0 bits to a power of 2; 255 is NaN."""
    code &= 0xFF
    return np.nan if code == 0xFF else bits.f64_of((code - 127 + 1023) << 52)


@bits.device
def encode_f16(value: float, rounding: int, satfinite: bool) -> int:
    """f16 bits of a float64."""
    return encode(value, 10, 15, 0x7BFF, 0x7C00, 0x7FFF, 15, rounding, satfinite)


@bits.device
def encode_bf16(value: float, rounding: int, satfinite: bool) -> int:
    """bf16 bits of a float64."""
    return encode(value, 7, 127, 0x7F7F, 0x7F80, 0x7FFF, 15, rounding, satfinite)


@bits.device
def encode_tf32(value: float, rounding: int, satfinite: bool) -> int:
    """tf32 of a float64, in the bits of a float32."""
    return encode(value, 10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF, 18, rounding, satfinite) << 13


@bits.device
def encode_e4m3(value: float, rounding: int) -> int:
    """e4m3 bits of a float64; more than 448, infinity too, is 448."""
    return encode(value, 3, 7, 0x7E, 0, 0x7F, 7, rounding, True)


@bits.device
def encode_e5m2(value: float, rounding: int) -> int:
    """e5m2 bits of a float64; more than 57344, infinity too, is 57344."""
    return encode(value, 2, 15, 0x7B, 0x7C, 0x7F, 7, rounding, True)


@bits.device
def encode_e2m1(value: float) -> int:
    """e2m1 bits of a float64, rounded to nearest; NaN is 6."""
    return encode(value, 1, 1, 0x7, 0, 0, 3, RN, True)


@bits.device
def encode_e2m3(value: float) -> int:
    """e2m3 bits of a float64, rounded to nearest; NaN is 7.5."""
    return encode(value, 3, 1, 0x1F, 0, 0, 5, RN, True)


@bits.device
def encode_e3m2(value: float) -> int:
    """e3m2 bits of a float64, rounded to nearest; NaN is 28."""
    return encode(value, 2, 3, 0x1F, 0, 0, 5, RN, True)


@bits.device
def encode_ue8m0(value: float, rounding: int) -> int:
    """The power of 2 (rounding RZ: at or below, RP: at or above) of a magnitude, at most 2^127."""
    word = bits.bits_of_f64(value) & 0x7FFF_FFFF_FFFF_FFFF
    if word > _INF64:
        return 0xFF
    exponent = (word >> 52) - 1023 + 127
    if rounding == RP and word & _FRACTION64:
        exponent += 1
    return max(0, min(exponent, 0xFE))


# ---------------------------------------------------------------------------------- arrays


@functools.cache
def _values(name: str) -> npt.NDArray[np.float32]:
    """The number of every code of a format of at most 16 bits."""
    if name == "ue8m0":
        powers = np.ldexp(np.float64(1), np.arange(256) - 127)
        powers[255] = np.nan
        return powers.astype(np.float32)
    layout = FORMATS[name]
    codes = np.arange(1 << layout.width)
    magnitude = codes & ((1 << (layout.width - 1)) - 1)
    exponent, fraction = magnitude >> layout.mantissa, magnitude & ((1 << layout.mantissa) - 1)
    normal = (fraction | 1 << layout.mantissa).astype(np.float64)
    values = np.ldexp(
        np.where(exponent == 0, fraction.astype(np.float64), normal),
        np.maximum(exponent, 1) - layout.bias - layout.mantissa,
    )
    values[magnitude > layout.largest] = np.nan
    if layout.infinity:
        values[magnitude == layout.infinity] = np.inf
    return np.asarray(np.where(codes != magnitude, -values, values), dtype=np.float32)


def to_float32(codes: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    """Codes of a format, in any unsigned integer type, to the numbers they stand for."""
    if name == "f32":
        return codes.astype(np.uint32).view(np.float32)
    if name == "bf16":
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if name == "tf32":
        # Tensor cores read the upper 19 bits of the word.
        return (codes.astype(np.uint32) & np.uint32(0xFFFF_E000)).view(np.float32)
    return np.asarray(_values(name)[codes])


def from_float32(
    values: npt.NDArray[np.float32], name: str, *, satfinite: bool = True
) -> npt.NDArray[Any]:
    """Codes of numbers rounded to nearest, ties to even (`encode` with RN, on arrays).

    `satfinite`: a number beyond the largest becomes the largest, not infinity. uint8, uint16 or
    uint32, by the format's width.
    """
    layout = FORMATS[name]
    with np.errstate(invalid="ignore"):  # signalling NaNs
        word = values.astype(np.float64).view(np.int64)
    magnitude = word & 0x7FFF_FFFF_FFFF_FFFF
    exponent = (magnitude >> 52) - 1023  # a float32 is never subnormal as float64
    significand = (magnitude & _FRACTION64) | 1 << 52
    below = np.maximum(1 - layout.bias - exponent, 0)
    shift = np.minimum(52 - layout.mantissa + below, 60)
    kept = significand >> shift
    rest = significand & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    code = kept + ((rest > half) | ((rest == half) & (kept & 1 == 1)))
    code += np.where(below == 0, (exponent + layout.bias - 1) << layout.mantissa, 0)
    code[magnitude == 0] = 0
    over = layout.largest if satfinite or not layout.infinity else layout.infinity
    code[(code > layout.largest) | (magnitude == _INF64)] = over
    code |= (word < 0).astype(np.int64) << (layout.width - 1 - layout.shift)
    code[magnitude > _INF64] = layout.nan or layout.largest
    dtype = np.uint8 if layout.width <= 8 else np.uint16 if layout.width == 16 else np.uint32
    return np.asarray(code << layout.shift, dtype=dtype)
