"""Rounded arithmetic against exact fractions, in every format, direction and modifier.

The reference rounds a fraction by its definition: among the format's numbers, the nearest below and
above, and the rule of the direction. It shares no code with the handlers.
"""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.sim.lane.running import run_lines

# name: width, fraction bits, exponent bits
_LAYOUTS = {"f16": (16, 10, 5), "bf16": (16, 7, 8), "f32": (32, 23, 8)}


def _number(code: int, kind: str) -> Fraction | float:
    """The number of a code; NaN and infinities as floats, zero as a float with its sign."""
    width, fraction_bits, exponent_bits = _LAYOUTS[kind]
    sign = -1 if code >> (width - 1) else 1
    exponent = (code >> fraction_bits) & ((1 << exponent_bits) - 1)
    fraction = code & ((1 << fraction_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent == (1 << exponent_bits) - 1:
        return math.nan if fraction else sign * math.inf
    if exponent == 0 and fraction == 0:
        return sign * 0.0
    whole = fraction if exponent == 0 else fraction | 1 << fraction_bits
    return sign * whole * Fraction(2) ** (max(exponent, 1) - bias - fraction_bits)


def _rounded(value: Fraction, kind: str, direction: str) -> int:
    """The code of a nonzero fraction."""
    width, fraction_bits, exponent_bits = _LAYOUTS[kind]
    bias = (1 << (exponent_bits - 1)) - 1
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    magnitude = abs(value)
    exponent = max(math.floor(math.log2(magnitude)) - 1, 1 - bias)
    while Fraction(2) ** (exponent + 1) <= magnitude:
        exponent += 1
    unit = Fraction(2) ** (exponent - fraction_bits)
    below = magnitude // unit
    rest = magnitude - below * unit
    up = {
        "rn": rest * 2 > unit or (rest * 2 == unit and below % 2 == 1),
        "rz": False,
        "rm": value < 0 and rest != 0,
        "rp": value > 0 and rest != 0,
    }[direction]
    code = int(below) + up + ((exponent + bias - 1) << fraction_bits)
    if code >= infinity:
        stays = direction == "rz" or (direction == "rm" and value > 0)
        stays = stays or (direction == "rp" and value < 0)
        code = infinity - 1 if stays else infinity
    return code | (1 << (width - 1) if value < 0 else 0)


def _sum_code(a: Fraction | float, b: Fraction | float, kind: str, direction: str) -> int | None:
    """The code of a + b; None stands for NaN."""
    width = _LAYOUTS[kind][0]
    special = [x for x in (a, b) if isinstance(x, float) and not math.isfinite(x)]
    if special:
        total = sum(float(x) if isinstance(x, float) else 0.0 for x in special)
        if math.isnan(total):
            return None
        exponent_bits, fraction_bits = _LAYOUTS[kind][2], _LAYOUTS[kind][1]
        code = ((1 << exponent_bits) - 1) << fraction_bits
        return code | (1 << (width - 1) if total < 0 else 0)
    exact = Fraction(a) + Fraction(b)
    if exact:
        return _rounded(exact, kind, direction)
    zeros = [x for x in (a, b) if isinstance(x, float)]
    if len(zeros) == 2 and math.copysign(1, zeros[0]) == math.copysign(1, zeros[1]):
        negative = math.copysign(1, zeros[0]) < 0
    else:
        negative = direction == "rm"
    return 1 << (width - 1) if negative else 0


def _product(a: Fraction | float, b: Fraction | float) -> Fraction | float:
    if isinstance(a, Fraction) and isinstance(b, Fraction):
        return a * b
    signs = [math.copysign(1, x) for x in (a, b)]
    plain = [float(x) if isinstance(x, float) else signs[i] for i, x in enumerate((a, b))]
    return plain[0] * plain[1]


def _codes(kind: str) -> st.SearchStrategy[int]:
    width, fraction_bits, exponent_bits = _LAYOUTS[kind]
    one = ((1 << (exponent_bits - 1)) - 1) << fraction_bits
    edges = [0, 1, one, one + 1, (1 << fraction_bits) - 1, 1 << fraction_bits]
    edges += [((1 << exponent_bits) - 1 << fraction_bits) + x for x in (-1, 0, 1)]
    near_one = st.integers(one - (3 << fraction_bits), one + (3 << fraction_bits))
    unsigned = st.one_of(st.sampled_from(edges), near_one, st.integers(0, (1 << width - 1) - 1))
    return st.builds(lambda code, sign: code | sign << width - 1, unsigned, st.integers(0, 1))


def _simulated(opcode: str, kind: str, *words: int) -> int:
    names = ", ".join(f"%{index}" for index in range(len(words)))
    inputs = np.array([words], dtype=np.uint64)
    return int(run_lines([f"{opcode} $0, {names}"], [kind] * len(words), [kind], inputs)[0, 0])


def _same(got: int, wanted: int | None, kind: str) -> bool:
    if wanted is None:
        number = _number(got, kind)
        return isinstance(number, float) and math.isnan(number)
    return got == wanted


_FORMS = [("f32", d) for d in ("rn", "rz", "rm", "rp")] + [("f16", "rn"), ("bf16", "rn")]


@pytest.mark.parametrize(("kind", "direction"), _FORMS)
def test_add_and_fma_round_once(kind: str, direction: str) -> None:
    codes = _codes(kind)

    @settings(max_examples=150, deadline=None)
    @given(codes, codes, codes)
    def check(a: int, b: int, c: int) -> None:
        x, y, z = (_number(code, kind) for code in (a, b, c))
        wanted = _sum_code(x, y, kind, direction)
        assert _same(_simulated(f"add.{direction}.{kind}", kind, a, b), wanted, kind)
        wanted = _sum_code(_product(x, y), z, kind, direction)
        assert _same(_simulated(f"fma.{direction}.{kind}", kind, a, b, c), wanted, kind)

    check()


@pytest.mark.parametrize(("kind", "direction"), _FORMS)
def test_mul_rounds_once(kind: str, direction: str) -> None:
    codes = _codes(kind)

    @settings(max_examples=100, deadline=None)
    @given(codes, codes)
    def check(a: int, b: int) -> None:
        exact = _product(_number(a, kind), _number(b, kind))
        if isinstance(exact, Fraction):
            wanted: int | None = _rounded(exact, kind, direction)
        else:
            wanted = _sum_code(exact, exact, kind, direction)  # 0, infinity, NaN: unchanged
        assert _same(_simulated(f"mul.{direction}.{kind}", kind, a, b), wanted, kind)

    check()


@settings(max_examples=200, deadline=None)
@given(_codes("f32"), _codes("f32"), st.sampled_from(["rn", "rz", "rm", "rp"]))
@example(0x3F800000, 0x40400000, "rp")
def test_div_rounds_once(a: int, b: int, direction: str) -> None:
    x, y = _number(a, "f32"), _number(b, "f32")
    if not (isinstance(x, Fraction) and isinstance(y, Fraction)):
        return
    wanted = _rounded(x / y, "f32", direction)
    assert _simulated(f"div.{direction}.f32", "f32", a, b) == wanted


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(["add", "sub", "mul", "fma"]),
    st.sampled_from(["rn", "rz", "rm", "rp"]),
    st.sampled_from(["", ".ftz"]),
    st.lists(_codes("f32"), min_size=6, max_size=6),
)
def test_f32x2_is_f32_on_each_half(stem: str, direction: str, ftz: str, w: list[int]) -> None:
    count = 3 if stem == "fma" else 2
    packed = [w[2 * i] | w[2 * i + 1] << 32 for i in range(count)]
    got = _simulated(f"{stem}.{direction}{ftz}.f32x2", "f32x2", *packed)
    for half in range(2):
        alone = [w[2 * i + half] for i in range(count)]
        wanted = _simulated(f"{stem}.{direction}{ftz}.f32", "f32", *alone)
        assert (got >> (32 * half)) & 0xFFFFFFFF == wanted


@settings(max_examples=100, deadline=None)
@given(*[_codes("f32")] * 3, st.sampled_from(["", ".NaN", ".ftz", ".ftz.NaN"]))
def test_three_input_maximum_is_the_maximum_of_the_maximum(
    a: int, b: int, c: int, suffix: str
) -> None:
    for stem in ("max", "min"):
        opcode = f"{stem}{suffix}.f32"
        chained = _simulated(opcode, "f32", _simulated(opcode, "f32", a, b), c)
        assert _simulated(opcode, "f32", a, b, c) == chained


@pytest.mark.parametrize("narrow", ["f16", "bf16"])
@pytest.mark.parametrize("direction", ["rn", "rz", "rm", "rp"])
def test_mixed_precision_takes_the_narrow_source_exactly(narrow: str, direction: str) -> None:
    @settings(max_examples=60, deadline=None)
    @given(_codes(narrow), _codes(narrow), _codes("f32"))
    def check(a: int, b: int, c: int) -> None:
        x, y, z = _number(a, narrow), _number(b, narrow), _number(c, "f32")
        lines = [
            f"fma.{direction}.f32.{narrow} $0, %0, %1, %2",
            f"add.{direction}.f32.{narrow} $1, %0, %2",
            f"sub.{direction}.f32.{narrow} $2, %0, %2",
        ]
        inputs = np.array([[a, b, c]], dtype=np.uint64)
        got = run_lines(lines, [narrow, narrow, "f32"], ["f32"] * 3, inputs)[0]
        wanted = (
            _sum_code(_product(x, y), z, "f32", direction),
            _sum_code(x, z, "f32", direction),
            _sum_code(x, -z, "f32", direction),
        )
        for result, code in zip(got, wanted, strict=True):
            assert _same(int(result), code, "f32")

    check()


def test_ex2_and_lg2_of_powers_of_two_are_exact() -> None:
    """Powers of two, both ways."""
    for exponent in range(-126, 128):
        word = struct.unpack("<I", struct.pack("<f", 2.0**exponent))[0]
        power = struct.unpack("<I", struct.pack("<f", float(exponent)))[0]
        assert _simulated("ex2.approx.ftz.f32", "f32", power) == word
        assert _simulated("lg2.approx.ftz.f32", "f32", word) == power
