"""`cvt`: between integers, between floats, and packed narrow formats.

Integer to integer is one operation whose mode holds both widths; everything else goes through the
exact number. Operations whose names begin with `_` are put together by the macro at the end.
"""
# ruff: noqa: D103 -- an operation's name says from what to what it converts

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flash_attn_fp8.sim import numerics
from flash_attn_fp8.sim.isa.bits import device, signed
from flash_attn_fp8.sim.isa.table import (
    FTZ,
    RELU,
    RM,
    RN,
    RNA,
    ROUNDING_MASK,
    ROUNDINGS,
    RP,
    RZ,
    SAT,
    SATFINITE,
    SELECTOR_SHIFT,
    WIDTH,
    lane,
    macro,
)

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context
    from flash_attn_fp8.sim.ptx.program import Instruction

# ------------------------------------------------------------------------------- integers

# A type in a selector (`_kind`): log2 of its width, less 3; 4 is added where it is signed.


@device
def _range_of(kind: int, upper: int) -> int:
    """The least (upper 0) or greatest number of an integer type of up to 32 bits, or of s64."""
    width = 8 << (kind & 3)
    if kind & 4:
        return (1 << (width - 2)) - 1 + (1 << (width - 2)) if upper else -(1 << (width - 1))
    return (1 << width) - 1 if upper else 0


@device
def _type_value(word: int, kind: int) -> int:
    """The value of the low bits of a word in an integer type; of u64, its bits as s64."""
    width = 8 << (kind & 3)
    if width == 64:
        return word
    value = word & ((1 << width) - 1)
    sign = 1 << (width - 1)
    return (value ^ sign) - sign if kind & 4 else value


@lane("_cvt", "b64", "b64", takes_mode=True)
def convert_integer(word: int, mode: int) -> int:
    """Extend the source; clamp where .sat; cut to the result's type and extend that."""
    source, result = (mode >> SELECTOR_SHIFT) & 7, (mode >> (SELECTOR_SHIFT + 3)) & 7
    value = _type_value(signed(word), source)
    if mode & SAT:
        if source == 3 and value < 0:  # a u64 above every s64
            value = -1 if result == 3 else _range_of(result, 1)
        elif result == 3:
            value = max(value, 0)
        else:
            value = max(_range_of(result, 0), min(value, _range_of(result, 1)))
    return _type_value(value, result)


@device
def _integer_to_float(value: int, negative: bool, large: bool, mode: int) -> int:
    """f64 bits of an integer's magnitude; `large`: 2^64 + value is meant."""
    exponent = 62
    if large:  # bit 63 is the leading one: halve, and keep what falls off in the last bit
        value = ((value >> 1) & 0x7FFF_FFFF_FFFF_FFFF) | (value & 1)
        exponent = 63
    if value == 0:
        return 0
    while value >> 62 == 0:
        value <<= 1
        exponent -= 1
    code = numerics.round_significand(value, exponent, negative, 52, 1023, mode & ROUNDING_MASK)
    return code | (-0x8000_0000_0000_0000 if negative else 0)


@lane("_to_f64", "s64", "T", result="b64", takes_mode=True)
def s64_to_f64(value: int, mode: int) -> int:
    least = value == -0x8000_0000_0000_0000
    magnitude = -value if value < 0 else value
    return _integer_to_float(magnitude, value < 0, least, mode)


@lane("_to_f64", "u64", "T", result="b64", takes_mode=True)
def u64_to_f64(value: int, mode: int) -> int:
    return _integer_to_float(signed(value), False, signed(value) < 0, mode)


@device
def integral(value: float, rounding: int) -> float:
    """A float64 rounded to an integer, −0 and infinities kept."""
    if not abs(value) < 2.0**52:
        return value
    whole = float(math.floor(value))
    rest = value - whole
    if rounding == RN:
        up = rest > 0.5 or (rest == 0.5 and math.floor(value) % 2 == 1)
    elif rounding == RM:
        up = False
    elif rounding == RP:
        up = rest > 0.0
    else:
        up = rest > 0.0 and value < 0.0
    return math.copysign(whole + 1.0 if up else whole, value)


@lane("_to_integer", "f16 bf16 f32 f64", "T", result="b64", takes_mode=True)
def float_to_integer(value: float, mode: int) -> int:
    """Rounded, then clamped to the type; NaN is 0, or of 64 bits or from f64 the top bit alone."""
    kind = (mode >> SELECTOR_SHIFT) & 7
    if value != value:
        if (mode >> (SELECTOR_SHIFT + 3)) & 1 == 0 and kind & 3 != 3:
            return 0
        top = 1 << ((8 << (kind & 3)) - 1)
        return -top if kind & 4 else top
    rounded = integral(value, mode & ROUNDING_MASK)
    if kind == 3:
        if rounded >= 2.0**64:
            return -1
        if rounded >= 2.0**63:
            return int(rounded - 2.0**63) + -0x8000_0000_0000_0000
        return int(max(rounded, 0.0))
    if kind == 7:
        if rounded >= 2.0**63:
            return 0x7FFF_FFFF_FFFF_FFFF
        return int(max(rounded, -(2.0**63)))
    return int(max(float(_range_of(kind, 0)), min(rounded, float(_range_of(kind, 1)))))


@lane("_integral", "f16 bf16 f32 f64", "T", takes_mode=True)
def to_integral(value: float, mode: int) -> float:
    return integral(value, (mode >> SELECTOR_SHIFT) & 7)


# --------------------------------------------------------------------------------- floats


@lane("_float", "f16,f16 f16,bf16 f16,f32 f16,f64 bf16,f16 bf16,bf16 bf16,f32 bf16,f64", "U")
@lane("_float", "f32,f16 f32,bf16 f32,f32 f32,f64 tf32,f32", "U")
def between_floats(value: float) -> float:
    return value


@lane("_float", "f64,f16 f64,bf16 f64,f32 f64,f64", "U")
def to_f64(value: float) -> float:
    return value


@device
def _relu(value: float, mode: int) -> float:
    return 0.0 if mode & RELU and value <= 0.0 else value


# Two floats into one register, the first source in the upper half.


@lane("_pair", "f16x2", "f32 f32", result="b32", takes_mode=True)
def pair_f16(upper: float, lower: float, mode: int) -> int:
    rounding, satfinite = mode & ROUNDING_MASK, mode & SATFINITE != 0
    high = numerics.encode_f16(_relu(upper, mode), rounding, satfinite)
    return (high << 16) | numerics.encode_f16(_relu(lower, mode), rounding, satfinite)


@lane("_pair", "bf16x2", "f32 f32", result="b32", takes_mode=True, hot="bf16x2")
def pair_bf16(upper: float, lower: float, mode: int) -> int:
    rounding, satfinite = mode & ROUNDING_MASK, mode & SATFINITE != 0
    high = numerics.encode_bf16(_relu(upper, mode), rounding, satfinite)
    return (high << 16) | numerics.encode_bf16(_relu(lower, mode), rounding, satfinite)


@lane("_pair", "e4m3x2", "f32 f32", result="b16", takes_mode=True, hot="e4m3x2")
def pair_e4m3(upper: float, lower: float, mode: int) -> int:
    high = numerics.encode_e4m3(_relu(upper, mode), RN)
    return (high << 8) | numerics.encode_e4m3(_relu(lower, mode), RN)


@lane("_pair", "e5m2x2", "f32 f32", result="b16", takes_mode=True)
def pair_e5m2(upper: float, lower: float, mode: int) -> int:
    high = numerics.encode_e5m2(_relu(upper, mode), RN)
    return (high << 8) | numerics.encode_e5m2(_relu(lower, mode), RN)


@lane("_pair", "e2m1x2", "f32 f32", result="b8", takes_mode=True)
def pair_e2m1(upper: float, lower: float, mode: int) -> int:
    high = numerics.encode_e2m1(_relu(upper, mode))
    return (high << 4) | numerics.encode_e2m1(_relu(lower, mode))


@lane("_pair", "e2m3x2", "f32 f32", result="b16", takes_mode=True)
def pair_e2m3(upper: float, lower: float, mode: int) -> int:
    high = numerics.encode_e2m3(_relu(upper, mode))
    return (high << 8) | numerics.encode_e2m3(_relu(lower, mode))


@lane("_pair", "e3m2x2", "f32 f32", result="b16", takes_mode=True)
def pair_e3m2(upper: float, lower: float, mode: int) -> int:
    high = numerics.encode_e3m2(_relu(upper, mode))
    return (high << 8) | numerics.encode_e3m2(_relu(lower, mode))


@lane("_pair", "ue8m0x2", "f32 f32", result="b16", takes_mode=True)
def pair_ue8m0(upper: float, lower: float, mode: int) -> int:
    rounding = mode & ROUNDING_MASK
    high = numerics.encode_ue8m0(upper, rounding)
    return (high << 8) | numerics.encode_ue8m0(lower, rounding)


# One half of a packed register as f32 bits; the macro takes both.


@lane("_half", "f16", "f16", result="f32")
@lane("_half", "bf16", "bf16", result="f32")
def half(value: float) -> float:
    return value


@lane("_half", "e4m3", "b16", result="f32")
def half_e4m3(code: int) -> float:
    return numerics.decode_e4m3(code & 0xFF)


@lane("_half", "e5m2", "b16", result="f32")
def half_e5m2(code: int) -> float:
    return numerics.decode_e5m2(code & 0xFF)


@lane("_half", "e2m1", "b16", result="f32")
def half_e2m1(code: int) -> float:
    return numerics.decode_e2m1(code & 0xF)


@lane("_half", "e2m3", "b16", result="f32")
def half_e2m3(code: int) -> float:
    return numerics.decode_e2m3(code & 0x3F)


@lane("_half", "e3m2", "b16", result="f32")
def half_e3m2(code: int) -> float:
    return numerics.decode_e3m2(code & 0x3F)


@lane("_half", "ue8m0", "b16", result="f32")
def half_ue8m0(code: int) -> float:
    return numerics.decode_ue8m0(code & 0xFF)


# ------------------------------------------------------------------------------- the macro

_FLOATS = ("f16", "bf16", "f32", "f64")
_NARROW = {"e4m3x2": 8, "e5m2x2": 8, "e2m1x2": 4, "e2m3x2": 8, "e3m2x2": 8, "ue8m0x2": 8}
_PRECISION = {"f16": 11, "bf16": 8, "tf32": 11, "f32": 24, "f64": 53}
_INTEGER_ROUNDINGS = {"rni": RN, "rzi": RZ, "rmi": RM, "rpi": RP}


def _kind(type: str) -> int:
    return (WIDTH[type].bit_length() - 4) | (4 if type[0] == "s" else 0)


def _is_integer(type: str) -> bool:
    return type[0] in "su" and type[1:].isdigit()


@macro("cvt")
def cvt(ctx: Context, instruction: Instruction) -> None:
    """Dispatch on the two types; every modifier is either taken or an error."""
    types = [part for part in ctx.suffixes if part in WIDTH]
    names = [part for part in ctx.suffixes if part not in WIDTH]
    if len(types) != 2 or len(set(names)) != len(names):
        ctx.fail("cvt takes two types and each modifier once")
    result, source = types
    if result in _NARROW or result in ("f16x2", "bf16x2"):
        _to_pair(ctx, instruction, result, source, names)
        return
    if len(instruction.operands) != 2:
        ctx.fail("cvt takes one source")
    if _is_integer(result) and _is_integer(source):
        _between_integers(ctx, instruction, result, source, names)
    elif _is_integer(result) and source in _FLOATS:
        _to_integer(ctx, instruction, result, source, names)
    elif _is_integer(source) and result in _FLOATS:
        _from_integer(ctx, instruction, result, source, names)
    elif source in _FLOATS and result in (*_FLOATS, "tf32"):
        _between_floats(ctx, instruction, result, source, names)
    else:
        ctx.fail(f"cvt from {source} to {result}")


def _only(ctx: Context, names: list[str], allowed: str) -> None:
    unknown = set(names).difference(allowed.split())
    if unknown:
        ctx.fail(f"modifier .{min(unknown)} of this cvt")


def _rounding(ctx: Context, names: list[str], known: dict[str, int], needed: bool) -> int:
    given = [name for name in names if name in known]
    if len(given) > 1 or (needed and not given):
        ctx.fail(f"needs one of {', '.join(known)}")
    return known[given[0]] if given else RN


def _extend_result(ctx: Context, instruction: Instruction, result: str, row: int) -> None:
    """A signed result in a wider register has its sign in all of the register, no further."""
    bits = ctx.width(instruction.operands[0])
    if result[0] == "s" and bits is not None and bits < 64:
        ctx.emit("and.b64", row, [row, ctx.constant((1 << bits) - 1)])


def _between_integers(
    ctx: Context, instruction: Instruction, result: str, source: str, names: list[str]
) -> None:
    _only(ctx, names, "sat")
    destination = ctx.destination(instruction.operands[0], result, wider=True)
    given = ctx.row(instruction.operands[1], source, wider=True)
    plain = source[0] == "u" or WIDTH[result] <= WIDTH[source]
    if result[0] == "u" and plain and "sat" not in names:
        # Registers are zero-extended, so that a mask converts.
        kept = min(WIDTH[result], WIDTH[source])
        ctx.emit("and.b64", destination, [given, ctx.constant((1 << kept) - 1)])
        return
    mode = (_kind(source) | _kind(result) << 3) << SELECTOR_SHIFT
    if "sat" in names:
        mode |= SAT
    ctx.emit("_cvt.b64", destination, [given], mode)
    _extend_result(ctx, instruction, result, destination)


def _to_integer(
    ctx: Context, instruction: Instruction, result: str, source: str, names: list[str]
) -> None:
    _only(ctx, names, "rni rzi rmi rpi ftz sat")
    mode = _rounding(ctx, names, _INTEGER_ROUNDINGS, True)
    mode |= (_kind(result) | (8 if source == "f64" else 0)) << SELECTOR_SHIFT
    if "ftz" in names:
        if source != "f32":
            ctx.fail(".ftz is for f32")
        mode |= FTZ
    destination = ctx.destination(instruction.operands[0], result, wider=True)
    ctx.emit(f"_to_integer.{source}", destination, [ctx.row(instruction.operands[1], source)], mode)
    bits = ctx.width(instruction.operands[0]) or 64
    ctx.emit("and.b64", destination, [destination, ctx.constant((1 << bits) - 1)])


def _from_integer(
    ctx: Context, instruction: Instruction, result: str, source: str, names: list[str]
) -> None:
    _only(ctx, names, "rn rz rm rp ftz sat")
    rounding = _rounding(ctx, names, dict(ROUNDINGS), True)
    given = ctx.row(instruction.operands[1], source, wider=True)
    value, number = ctx.scratch("integer"), ctx.scratch("number")
    wide = "s64" if source[0] == "s" else "u64"
    mode = (_kind(source) | _kind(wide) << 3) << SELECTOR_SHIFT
    ctx.emit("_cvt.b64", value, [given], mode)
    # To f64 this is the rounding asked for; for others the number must arrive whole, which 64 bits
    # do not do in f64: round to odd there, as the last rounding follows.
    target = rounding if result == "f64" else numerics.ODD
    ctx.emit(f"_to_f64.{wide}", number, [value], target)
    mode = rounding | (SAT if "sat" in names else 0)
    destination = ctx.destination(instruction.operands[0], result)
    ctx.emit(f"_float.{result}.f64", destination, [number], mode)


def _between_floats(
    ctx: Context, instruction: Instruction, result: str, source: str, names: list[str]
) -> None:
    _only(ctx, names, "rn rz rm rp rna rni rzi rmi rpi ftz sat relu satfinite")
    destination = ctx.destination(instruction.operands[0], result)
    given = ctx.row(instruction.operands[1], source)
    if "ftz" in names and "f32" not in (result, source):
        ctx.fail(".ftz is for f32")
    mode = sum(
        bit
        for name, bit in (("ftz", FTZ), ("sat", SAT), ("relu", RELU), ("satfinite", SATFINITE))
        if name in names
    )
    if result == source:
        if set(names).intersection(("relu", "satfinite", "rna", *ROUNDINGS)):
            ctx.fail("a modifier of narrowing conversions")
        if set(names).intersection(_INTEGER_ROUNDINGS):
            rounding = _rounding(ctx, names, _INTEGER_ROUNDINGS, True)
            mode |= rounding << SELECTOR_SHIFT
            ctx.emit(f"_integral.{source}", destination, [given], mode)
            return
    elif set(names).intersection(_INTEGER_ROUNDINGS):
        ctx.fail("rounding to an integer in another type")
    else:
        known = {**ROUNDINGS, "rna": RNA} if result == "tf32" else dict(ROUNDINGS)
        narrowing = _PRECISION[result] < _PRECISION[source]
        # Between f16 and bf16 either may lose; there, and from bf16 where nothing is lost, a
        # rounding may be given or not.
        halves = {result, source} == {"f16", "bf16"}
        taken = () if source == "bf16" else tuple(ROUNDINGS)
        if not narrowing and not halves and set(names).intersection(("relu", "satfinite", *taken)):
            ctx.fail("a modifier of narrowing conversions")
        mode |= _rounding(ctx, names, known, narrowing and not halves)
        if result == "f16":
            mode &= ~FTZ  # an H200 does not flush a subnormal f32 here, which .rp shows
        if "rna" in names and result != "tf32":
            ctx.fail(".rna is for tf32")
    ctx.emit(f"_float.{result}.{source}", destination, [given], mode)


def _to_pair(
    ctx: Context, instruction: Instruction, result: str, source: str, names: list[str]
) -> None:
    """Two numbers into `result`: from two f32, or from the halves of a packed register."""
    _only(ctx, names, "rn rz rp relu satfinite")
    given = instruction.operands[1:]
    mode = 0
    if "relu" in names:
        mode |= RELU
    if "satfinite" in names:
        mode |= SATFINITE
    if result == "ue8m0x2":
        mode |= _rounding(ctx, names, {"rz": RZ, "rp": RP}, True)
        allowed: tuple[str, ...] = ("f32", "bf16x2")
    elif result in _NARROW:
        if "satfinite" not in names or "rn" not in names or {"rz", "rp"} & set(names):
            ctx.fail(f"cvt to {result} is .rn.satfinite")
        allowed = ("f32", "f16x2", "bf16x2")
    else:
        mode |= _rounding(ctx, names, {"rn": RN, "rz": RZ}, True)
        if result == "f16x2":
            allowed = ("f32", "e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2")
        else:
            allowed = ("f32", "ue8m0x2")
    if source not in allowed:
        ctx.fail(f"cvt from {source} to {result}")
    if source == "f32":
        if len(given) != 2:
            ctx.fail("cvt of a pair takes two sources")
        rows = [ctx.row(operand, "f32") for operand in given]
    else:
        if len(given) != 1:
            ctx.fail("cvt takes one source")
        rows = _halves(ctx, ctx.row(given[0], source, wider=source == "e2m1x2"), source)
    wider = result == "e2m1x2"
    destination = ctx.destination(instruction.operands[0], result, wider=wider)
    ctx.emit(f"_pair.{result}", destination, rows, mode)


def _halves(ctx: Context, row: int, source: str) -> list[int]:
    """The two numbers of a packed register as f32, the upper first."""
    bits = 16 if source in ("f16x2", "bf16x2") else _NARROW[source]
    upper, lower = ctx.scratch("upper"), ctx.scratch("lower")
    ctx.emit("shr.u64", upper, [row, ctx.constant(bits)])
    ctx.emit(f"_half.{source[:-2]}", upper, [upper])
    ctx.emit(f"_half.{source[:-2]}", lower, [row])
    return [upper, lower]


@macro("cvt.pack")
def cvt_pack(ctx: Context, instruction: Instruction) -> None:
    """`cvt.pack.sat.u8.s32.b32 d, a, b, c`: d = {c's lower half, a, b}, each clamped."""
    suffixes = ctx.suffixes
    small, wide = ("u8", "s8"), ("u16", "s16")
    if suffixes[:1] != ("sat",) or len(suffixes) < 3 or suffixes[2] != "s32":
        ctx.fail("cvt.pack other than .sat of .s32")
    result = suffixes[1]
    with_c = suffixes[3:] == ("b32",) and result in small
    if not with_c and not (len(suffixes) == 3 and result in wide):
        ctx.fail(f"cvt.pack of {result}")
    if len(instruction.operands) != (4 if with_c else 3):
        ctx.fail("wrong number of operands")
    rows = [ctx.row(operand, "s32") for operand in instruction.operands[1:3]]
    c = ctx.row(instruction.operands[3], "b32") if with_c else ctx.constant(0)
    mode = _kind(result) << SELECTOR_SHIFT
    ctx.emit("_pack.b32", ctx.destination(instruction.operands[0], "b32"), [*rows, c], mode)


@lane("_pack", "b32", "s32 s32 b32", takes_mode=True)
def pack(a: int, b: int, c: int, mode: int) -> int:
    kind = (mode >> SELECTOR_SHIFT) & 7
    width = 8 << (kind & 3)
    least, most = _range_of(kind, 0), _range_of(kind, 1)
    mask = (1 << width) - 1
    a, b = max(least, min(a, most)) & mask, max(least, min(b, most)) & mask
    return (c << (2 * width)) | (a << width) | b
