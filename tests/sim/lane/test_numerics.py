"""Formats: every code of each, both forms against each other and against independent truth."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_fp8.sim import numerics
from flash_attn_fp8.sim.isa.floating import exp2, log2
from flash_attn_fp8.sim.isa.table import RN, RP, RZ
from tests.sim.lane.running import run_lines

_SCALAR_DECODERS = {
    "f16": numerics.decode_f16,
    "bf16": numerics.decode_bf16,
    "e4m3": numerics.decode_e4m3,
    "e5m2": numerics.decode_e5m2,
    "e2m1": numerics.decode_e2m1,
    "e2m3": numerics.decode_e2m3,
    "e3m2": numerics.decode_e3m2,
    "ue8m0": numerics.decode_ue8m0,
}
_SCALAR_ENCODERS = {
    "f16": lambda value: numerics.encode_f16(value, RN, True),
    "bf16": lambda value: numerics.encode_bf16(value, RN, True),
    "tf32": lambda value: numerics.encode_tf32(value, RN, True),
    "e4m3": lambda value: numerics.encode_e4m3(value, RN),
    "e5m2": lambda value: numerics.encode_e5m2(value, RN),
    "e2m1": numerics.encode_e2m1,
    "e2m3": numerics.encode_e2m3,
    "e3m2": numerics.encode_e3m2,
}
# Inputs and outputs of scalar instructions as an H200 gave them, every eighth of 65,536.
_TABLES = Path(__file__).with_name("sm90_math_tables.npz")


def _values(name: str) -> np.ndarray:
    """The number of every code, as float64."""
    values = numerics.to_float32(np.arange(1 << _width(name)), name)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64)


def _width(name: str) -> int:
    return 8 if name == "ue8m0" else numerics.FORMATS[name].width


@pytest.mark.parametrize("name", sorted(_SCALAR_DECODERS))
def test_both_decoders_agree_on_every_code(name: str) -> None:
    scalar = np.array([_SCALAR_DECODERS[name](code) for code in range(1 << _width(name))])
    vector = _values(name)
    np.testing.assert_array_equal(vector, scalar)
    np.testing.assert_array_equal(np.signbit(vector), np.signbit(scalar))


def test_f16_and_f32_are_numpys() -> None:
    codes = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        truth = codes.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(numerics.to_float32(codes, "f16"), truth)
    assert numerics.to_float32(np.array([0x3FC00000], np.uint32), "f32") == 1.5


# Highest and lowest positive numbers, from the formats' specifications.
@pytest.mark.parametrize(
    ("name", "largest", "smallest"),
    [
        ("e4m3", 448.0, 2.0**-9),
        ("e5m2", 57344.0, 2.0**-16),
        ("e2m1", 6.0, 0.5),
        ("e2m3", 7.5, 0.125),
        ("e3m2", 28.0, 0.0625),
        ("f16", 65504.0, 2.0**-24),
        ("bf16", 3.3895313892515355e38, 2.0**-133),
    ],
)
def test_limits(name: str, largest: float, smallest: float) -> None:
    values = _values(name)
    finite = values[np.isfinite(values)]
    assert finite.max() == largest == numerics.FORMATS[name].max
    assert finite[finite > 0].min() == smallest


@pytest.mark.parametrize("name", sorted(set(_SCALAR_ENCODERS) - {"tf32"}))
def test_encoding_undoes_decoding(name: str) -> None:
    codes = np.arange(1 << _width(name))
    values = numerics.to_float32(codes, name)
    back = numerics.from_float32(values, name, satfinite=False)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(back[finite], codes[finite])


@pytest.mark.parametrize("name", sorted(_SCALAR_ENCODERS))
@settings(max_examples=300, deadline=None)
@given(word=st.integers(0, (1 << 32) - 1), near=st.integers(0, (1 << 16) - 1))
def test_both_encoders_agree_and_round_to_nearest(name: str, word: int, near: int) -> None:
    # Anything, and numbers about the middle between two codes of 8 bits.
    middle = (numerics.decode_e4m3(near & 0xFF) or 1.0) * (1 + (near >> 8) / 256)
    for value in (struct.unpack("<f", struct.pack("<I", word))[0], middle):
        array = np.array([value], dtype=np.float32)
        with np.errstate(invalid="ignore"):
            value = float(array[0])
        code = int(numerics.from_float32(array, name)[0])
        assert code == _SCALAR_ENCODERS[name](value)
        layout = numerics.FORMATS[name]
        if np.isfinite(value) and abs(value) <= layout.max and name != "tf32":
            values = _values(name)
            finite = np.nan_to_num(values, nan=np.inf)
            assert abs(values[code] - value) == np.abs(finite - value).min()


# Of sm_100 alone, so that no H200 could say: name, bits of a code in the packed register.
@pytest.mark.parametrize(("name", "step"), [("e2m1", 4), ("e2m3", 8), ("e3m2", 8)])
def test_conversions_of_four_and_six_bit_formats_and_back(name: str, step: int) -> None:
    codes = np.arange(1 << _width(name), dtype=np.uint64)
    pairs = np.stack([codes, codes[::-1]], axis=1)
    values = numerics.to_float32(pairs, name)
    f32 = values.view(np.uint32).astype(np.uint64)
    pack = f"cvt.rn.satfinite.{name}x2.f32 $0, %0, %1"
    packed = run_lines([pack], ["f32", "f32"], ["b16" if step == 8 else "b8"], f32)[:, 0]
    np.testing.assert_array_equal(packed, pairs[:, 0] << np.uint64(step) | pairs[:, 1])
    halves = run_lines([f"cvt.rn.f16x2.{name}x2 $0, %0"], ["b16"], ["f16x2"], packed[:, None])
    f16 = values.astype(np.float16).view(np.uint16).astype(np.uint64)
    np.testing.assert_array_equal(halves[:, 0], f16[:, 0] << np.uint64(16) | f16[:, 1])
    # Beyond the largest: the largest, with the sign; .relu: 0 for what is negative.
    far = np.array([[0x7F800000, 0xFF800000]], dtype=np.uint64)
    largest = numerics.FORMATS[name].largest
    sign = 1 << (_width(name) - 1)
    assert run_lines([pack], ["f32", "f32"], ["b16"], far)[0, 0] == largest << step | sign | largest
    relu = pack.replace("satfinite", "satfinite.relu")
    assert run_lines([relu], ["f32", "f32"], ["b16"], far)[0, 0] == largest << step


def test_conversions_of_scale_factors() -> None:
    one_and_half = np.array([[0x3FC00000, 0x3F800000]], dtype=np.uint64)
    for rounding, upper in (("rz", 127), ("rp", 128)):
        line = f"cvt.{rounding}.satfinite.ue8m0x2.f32 $0, %0, %1"
        packed = run_lines([line], ["f32", "f32"], ["ue8m0x2"], one_and_half)
        assert packed[0, 0] == upper << 8 | 127
        # The same from bf16, whose codes these numbers also have.
        line = f"cvt.{rounding}.ue8m0x2.bf16x2 $0, %0"
        both = np.array([[0x3FC03F80]], dtype=np.uint64)
        assert run_lines([line], ["bf16x2"], ["ue8m0x2"], both)[0, 0] == upper << 8 | 127
    back = run_lines(
        ["cvt.rn.bf16x2.ue8m0x2 $0, %0"],
        ["ue8m0x2"],
        ["bf16x2"],
        np.array([[128 << 8 | 127]], dtype=np.uint64),
    )
    assert back[0, 0] == 0x40003F80


def test_ue8m0_rounds_down_and_up_to_powers_of_two() -> None:
    assert numerics.encode_ue8m0(1.0, RZ) == numerics.encode_ue8m0(1.0, RP) == 127
    assert numerics.encode_ue8m0(-1.5, RZ) == 127
    assert numerics.encode_ue8m0(1.5, RP) == 128
    assert numerics.encode_ue8m0(float("nan"), RP) == 255
    assert numerics.encode_ue8m0(float("inf"), RP) == 254


def _measured() -> dict[str, np.ndarray]:
    with np.load(_TABLES) as file:
        return dict(file)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_measured_conversions(name: str) -> None:
    table = _measured()
    values = table["cvt_x"].view(np.float32)
    np.testing.assert_array_equal(numerics.from_float32(values, name), table[f"cvt_{name}"])
    inputs = np.stack([table["cvt_x"], table["cvt_x"][::-1]], axis=1).astype(np.uint64)[:4096]
    opcode = f"cvt.rn.satfinite.{name}x2.f32 $0, %0, %1"
    got = run_lines([opcode], ["f32", "f32"], [f"{name}x2"], inputs)[:, 0]
    codes = table[f"cvt_{name}"].astype(np.uint64)
    np.testing.assert_array_equal(got, (codes << np.uint64(8) | codes[::-1])[:4096])


@pytest.mark.parametrize("name", ["ex2", "lg2", "rcp"])
def test_approximations_against_65536_measured_results(name: str) -> None:
    """By the bounds that the measured results keep of the exact ones, stated in FACTS.md."""
    table = _measured()
    x, y = table[f"{name}_x"], table[f"{name}_y"]
    words = x[:, None].astype(np.uint64)
    bits = run_lines([f"{name}.approx.ftz.f32 $0, %0"], ["f32"], ["f32"], words)[:, 0]
    bits = bits.astype(np.uint32)
    with np.errstate(all="ignore"):
        source, mine, theirs = (w.view(np.float32).astype(np.float64) for w in (x, bits, y))
        source = np.where(np.abs(source) < 2.0**-126, source * 0.0, source)  # .ftz
        exact = {"ex2": np.exp2, "lg2": np.log2, "rcp": np.reciprocal}[name](source)
    np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(mine[np.isinf(theirs)], theirs[np.isinf(theirs)])
    assert np.isfinite(mine[finite]).all()
    ulps = np.abs(bits.astype(np.int64) - y.astype(np.int64))[finite]
    if name == "ex2":
        assert ulps.max() <= 2
        assert (ulps == 0).mean() >= 0.52
    elif name == "lg2":
        assert (np.abs(mine[finite] - theirs[finite]) < 8e-6).all()
    else:
        assert ulps.max() <= 1
        normal = finite & (np.abs(exact) >= 2.0**-126)
        assert (np.abs(mine[normal] / exact[normal] - 1) < 1e-7).all()


@settings(max_examples=300, deadline=None)
@given(st.floats(-150, 128, width=32))
def test_exp2_and_log2_have_nearly_the_precision_of_float64(x: float) -> None:
    mpmath = pytest.importorskip("mpmath")
    with mpmath.workprec(120):
        exact = mpmath.power(2, mpmath.mpf(x))
        assert abs(exp2(x) - exact) <= exact * 2.0**-50
        number = abs(x) or 1.0
        exact = mpmath.log(mpmath.mpf(number), 2)
        assert abs(log2(number) - exact) <= max(abs(exact) * 2.0**-49, 2.0**-52 * (exact != 0))
