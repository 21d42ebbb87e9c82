"""`tcgen05.mma` against loops over (m, n, k) with every address and number spelled out."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_fp8.sim.errors import Misaligned, Race, TensorMemoryMisuse, Unmodelled
from flash_attn_fp8.sim.isa.tcgen05 import MmaForm, MmaOperands, mma
from flash_attn_fp8.sim.matrix import decode_instruction, decode_shared_sm100
from flash_attn_fp8.sim.memory import SHARED_RESERVED, Checks
from flash_attn_fp8.sim.state import Cluster
from tests.sim.tensor.build import (
    SIZES,
    SPANS,
    allocate_all,
    cluster,
    descriptor_sm100,
    element_address,
    f32,
    fill_shared,
    number,
    random_bytes,
)

SMEM = 200 * 1024
TYPE_CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "u8": 0, "s8": 1}
KINDS = {
    "f16": "f16", "bf16": "f16", "tf32": "tf32", "e4m3": "f8f6f4", "e5m2": "f8f6f4", "s8": "i8",
    "u8": "i8",
}  # fmt: skip


def idesc(
    m: int, n: int, a: str, b: str, d: str = "f32", ta: bool = False, tb: bool = False, **more: int
) -> int:
    """Fields at the bits of the manual's table."""
    result = {"f16": 0, "f32": 1, "s32": 2}[d]
    bits = result << 4 | TYPE_CODES[a] << 7 | TYPE_CODES[b] << 10 | ta << 15 | tb << 16
    bits |= n // 8 << 17 | m // 16 << 24
    places = {"saturate": 3, "negate_a": 13, "negate_b": 14, "sparse": 2, "shift": 30}
    for name, value in more.items():
        bits |= value << places[name]
    return bits


def lane_and_column(m: int, ctas: int, n: int, row: int, column: int) -> tuple[int, int, int]:
    """CTA of the pair, lane, and column of an element of D."""
    if ctas == 1:
        return 0, (row if m == 128 else row // 16 * 32 + row % 16), column
    cta, row = divmod(row, m // 2)
    if m == 256:
        return cta, row, column
    upper = column >= n // 2
    return cta, row + 64 * upper, column - n // 2 * upper


def filled(ctas: int, kind: str, rng: np.random.Generator, checks: Checks) -> Cluster:
    made = cluster(ctas, checks=checks)
    for cta in made.ctas:
        fill_shared(cta, random_bytes(rng, kind, SMEM - SHARED_RESERVED))
        allocate_all(cta)
    return made


@st.composite
def places(draw: st.DrawFn) -> tuple[int, int, int, str]:
    swizzle = draw(st.sampled_from(list(SPANS)))
    start = draw(st.integers(SHARED_RESERVED // 128, 60)) * 128
    start += draw(st.integers(0, SPANS[swizzle] // 32 - 1)) * 32 if SPANS[swizzle] > 16 else 0
    return start, draw(st.integers(1, 90)) * 16, draw(st.integers(8, 90)) * 16, swizzle


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    ctas = draw(st.sampled_from([1, 2]))
    n = draw(st.sampled_from([1, 2, 3, 4, 8, 15, 16])) * 16 if ctas == 2 else (
        draw(st.sampled_from([8, 16, 24, 40, 64, 128, 256])))  # fmt: skip
    return ctas, draw(st.sampled_from([64, 128])) * ctas, n


PAIRS = [(a, a) for a in KINDS] + [("e4m3", "e5m2"), ("e5m2", "e4m3"), ("s8", "u8")]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(PAIRS), shapes(), st.tuples(places(), places()),
    st.tuples(st.booleans(), st.booleans()), st.booleans(), st.booleans(), st.integers(0, 1 << 30),
)  # fmt: skip
def test_product_is_the_sum_over_k(types, shape, where, majors, accumulate, a_in_lanes, seed):
    """Both majors, all swizzles, any strides; A from both memories; D where the manual puts it."""
    (place_a, place_b), (mn_a, mn_b) = where, majors
    (a, b), (ctas, m, n) = types, shape
    kind = KINDS[a]
    if kind == "i8" and ((n > 32 and n % 16) or (ctas == 2 and n % 32)):
        n = 32
    d = "s32" if kind == "i8" else "f32"
    mn_a = mn_a and not a_in_lanes
    rng = np.random.default_rng(seed)
    data = "fp8" if set(types) == {"e4m3", "e5m2"} else a
    made = filled(ctas, data, rng, Checks(races=False))
    k = 32 // SIZES[a]
    columns = n // 2 if (ctas, m) == (2, 128) else n
    for cta in made.ctas:
        old = rng.integers(-99, 99, (128, columns))
        cta.tensor.data[:, 8 : 8 + columns] = (
            old if d == "s32" else old.astype(np.float32).view(np.uint32)
        )  # fmt: skip
        cta.tensor.data[:, 300:308] = random_bytes(rng, data, 128 * 32).view("<u4").reshape(128, 8)
        cta.tensor._written[:] = True
    before = [cta.tensor.data.copy() for cta in made.ctas]
    mma(
        made.ctas[0].warps[0],
        MmaForm(kind, ctas, a_in_lanes),
        MmaOperands(
            d=8,
            a=300 if a_in_lanes else descriptor_sm100(*place_a),
            b=descriptor_sm100(*place_b),
            descriptor=idesc(m, n, a, b, d, mn_a, mn_b),
            accumulate=accumulate,
        ),
    )

    def element(which: str, row: int, at: int, lane: int) -> float:
        rows, place, mn, name = {
            "a": (m // ctas, place_a, mn_a, a), "b": (n // ctas, place_b, mn_b, b)
        }[which]  # fmt: skip
        cta, row = divmod(row, rows)
        if which == "a" and a_in_lanes:
            code = before[cta][lane, 300:308].tobytes()[at * SIZES[a] :][: SIZES[a]]
        else:
            where = element_address(*place, mn, row, at, SIZES[name])
            code = made.ctas[cta].shared.data[where : where + SIZES[name]].tobytes()
        return number(code, name)

    wanted = [(0, 0), (m - 1, n - 1), (0, n - 1), (m - 1, 0)]
    wanted += [(int(rng.integers(m)), int(rng.integers(n))) for _ in range(24)]
    for row, column in wanted:
        cta, lane, at = lane_and_column(m, ctas, n, row, column)
        addends = [element("a", row, i, lane) * element("b", column, i, lane) for i in range(k)]
        old = int(before[cta][lane, 8 + at])
        if accumulate:
            view = np.uint32(old).view(np.int32 if d == "s32" else np.float32)
            addends.append(float(view))
        found = int(made.ctas[cta].tensor.data[lane, 8 + at])
        total = math.fsum(addends)
        assert found == (int(total) % (1 << 32) if d == "s32" else f32(total)), (row, column)
    touched = {lane_and_column(m, ctas, n, r, 0)[:2] for r in range(m)}
    for index, cta in enumerate(made.ctas):
        for lane in range(128):
            if (index, lane) not in touched and not (ctas == 2 and m == 128):
                assert (cta.tensor.data[lane] == before[index][lane]).all()
        assert (cta.tensor.data[:, 8 + columns :] == before[index][:, 8 + columns :]).all()


def small(descriptor: int, kind: str, d_old: float | None = None, **more: object) -> np.ndarray:
    """D of an MMA whose A and B hold 1.0 (f16), or 127 (s8), everywhere."""
    made = cluster(checks=Checks(races=False))
    cta = made.ctas[0]
    one = np.full(2000, 0x3C00, "<u2").view(np.uint8) if kind == "f16" else np.full(4000, 127, "u1")
    fill_shared(cta, np.resize(one, SMEM - SHARED_RESERVED))
    allocate_all(cta)
    if d_old is not None:
        cta.tensor.data[:] = np.float32(d_old).view(np.uint32)
        cta.tensor._written[:] = True
    where = descriptor_sm100(4096, 16, 128, "none")
    operands = MmaOperands(0, where, where, descriptor, d_old is not None, **more)
    mma(cta.warps[0], MmaForm(kind, 1, False), operands)
    return cta.tensor.data


def test_negation_and_f16_results():
    assert (small(idesc(128, 16, "f16", "f16", "f16"), "f16")[:, :16] == 0x4C00).all()  # 16.0
    negated = small(idesc(128, 16, "f16", "f16", "f32", negate_a=1), "f16")
    assert (negated[:, :16].view(np.float32) == -16.0).all()
    twice = small(idesc(128, 16, "f16", "f16", "f32", negate_a=1, negate_b=1), "f16")
    assert (twice[:, :16].view(np.float32) == 16.0).all()


def test_scale_input_d_halves_the_accumulator_first():
    data = small(idesc(128, 16, "f16", "f16"), "f16", 24.0, scale=3)
    assert (data[:, :16].view(np.float32) == 16.0 + 24.0 / 8).all()


def test_integers_saturate_only_where_asked():
    big = np.uint32(0x7FFFFFFF).view(np.float32)
    wrapped = small(idesc(128, 16, "s8", "s8", "s32"), "i8", big)
    assert (wrapped[:, :16] == (0x7FFFFFFF + 32 * 127 * 127) % (1 << 32)).all()
    saturated = small(idesc(128, 16, "s8", "s8", "s32", saturate=1), "i8", big)
    assert (saturated[:, :16] == 0x7FFFFFFF).all()


def test_disabled_lanes_keep_what_they_had():
    masks = (0x0000FFF0, 0, 0xFFFFFFFF, 0x80000001)
    data = small(idesc(128, 16, "f16", "f16"), "f16", 24.0, disabled=masks)
    for lane in range(128):
        off = masks[lane // 32] >> (lane % 32) & 1
        assert (data[lane, :16].view(np.float32) == (24.0 if off else 40.0)).all()


def test_m64_may_start_at_lane_16():
    made = cluster(checks=Checks(races=False))
    cta = made.ctas[0]
    fill_shared(cta, np.zeros(SMEM - SHARED_RESERVED, np.uint8))
    allocate_all(cta)
    where = descriptor_sm100(4096, 16, 128, "none")
    form = MmaForm("f16", 1, False)
    descriptor = idesc(64, 8, "f16", "f16")
    mma(cta.warps[0], form, MmaOperands(16 << 16, where, where, descriptor, False))
    assert cta.tensor._written[:, 0].tolist() == [lane % 32 >= 16 for lane in range(128)]
    with pytest.raises(TensorMemoryMisuse, match="lane 32"):
        mma(cta.warps[0], form, MmaOperands(32 << 16, where, where, descriptor, False))


@pytest.mark.parametrize(
    ("bits", "kind", "ctas", "says"),
    [
        (idesc(128, 16, "f16", "f16", sparse=1), "f16", 1, "sparse"),
        (idesc(128, 16, "f16", "f16", shift=1), "f16", 1, "shift of .ws"),
        (idesc(128, 16, "f16", "f16") | 1 << 6, "f16", 1, "reserved"),
        (idesc(128, 16, "f16", "f16") | 1 << 23, "f16", 1, "reserved"),
        (idesc(128, 16, "f16", "f16") | 1 << 29, "f16", 1, "reserved"),
        (idesc(128, 16, "f16", "f16", saturate=1), "f16", 1, "saturation"),
        (idesc(128, 16, "f16", "bf16"), "f16", 1, "f16 x bf16"),
        (idesc(128, 16, "bf16", "bf16", "f16"), "f16", 1, "to f16"),
        (idesc(128, 16, "f16", "f16") | 3 << 7, "f8f6f4", 1, "A of e2m3"),
        (idesc(128, 16, "f16", "f16") | 5 << 10, "f8f6f4", 1, "B of e2m1"),
        (idesc(128, 16, "f16", "f16") | 2 << 7, "f8f6f4", 1, "type 2 of A"),
        (idesc(128, 16, "s8", "s8", "f32"), "i8", 1, "type 1 of D"),
        (idesc(128, 16, "s8", "s8", "s32", negate_b=1), "i8", 1, "negated"),
        (idesc(128, 16, "f16", "f16"), "f16", 2, None),
        (idesc(64, 16, "f16", "f16"), "f16", 2, "M = 64"),
        (idesc(256, 16, "f16", "f16"), "f16", 1, "M = 256"),
        (idesc(128, 8, "f16", "f16"), "f16", 2, "N = 8"),
        (idesc(128, 0, "f16", "f16"), "f16", 1, "N = 0"),
        (idesc(128, 40, "s8", "s8", "s32"), "i8", 1, "N = 40"),
    ],
)
def test_instruction_descriptors_are_known_or_refused(bits, kind, ctas, says):
    if says is None:
        assert decode_instruction(bits, kind, ctas).n == 16
        return
    with pytest.raises(Unmodelled, match=says):
        decode_instruction(bits, kind, ctas)


def test_every_unknown_bit_of_a_shared_descriptor_is_refused():
    good = descriptor_sm100(0x4000, 16, 1024, "128")
    known = decode_shared_sm100(good)
    assert (known.start, known.leading, known.stride, known.swizzle.name) == (
        0x4000, 16, 1024, "128B",
    )  # fmt: skip
    for place in [14, 15, 30, 31, *range(47, 61)]:
        with pytest.raises(Unmodelled, match=r"has bits 0x"):
            decode_shared_sm100(good | 1 << place)
    with pytest.raises(Unmodelled, match="version 0"):
        decode_shared_sm100(good & ~(1 << 46))
    for code in (3, 5, 7):
        with pytest.raises(Unmodelled, match=f"swizzle {code}"):
            decode_shared_sm100(good & ~(7 << 61) | code << 61)


def test_k_that_leaves_its_span_is_misaligned():
    made = filled(1, "e4m3", np.random.default_rng(0), Checks())
    bad = descriptor_sm100(0x4070, 16, 1024, "128")
    with pytest.raises(Misaligned, match="leave a span of 128 bytes"):
        mma(
            made.ctas[0].warps[0],
            MmaForm("f8f6f4", 1, False),
            MmaOperands(0, bad, bad, idesc(128, 16, "e4m3", "e4m3"), False),
        )


def test_two_warps_that_feed_one_accumulator_race():
    """Each warp's operations are in order; those of two warps need a commit and a wait."""
    made = filled(1, "e4m3", np.random.default_rng(0), Checks())
    where = descriptor_sm100(0x4000, 16, 1024, "128")
    form = MmaForm("f8f6f4", 1, False)
    operands = MmaOperands(0, where, where, idesc(128, 16, "e4m3", "e4m3"), False)
    for _ in range(3):
        mma(made.ctas[0].warps[0], form, operands)
    with pytest.raises(Race, match="tensor core operations of warp 1"):
        mma(made.ctas[0].warps[1], form, operands)


def test_a_large_mma_is_quick():
    """128 x 128 with 32 bytes of K, races and uninitialised reads looked for."""
    made = filled(1, "e4m3", np.random.default_rng(0), Checks())
    warp = made.ctas[0].warps[0]
    a, b = (descriptor_sm100(at, 16, 1024, "128") for at in (0x4000, 0x8000))
    operands = MmaOperands(0, a, b, idesc(128, 128, "e4m3", "e4m3"), False)
    form = MmaForm("f8f6f4", 1, False)
    mma(warp, form, operands)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        mma(warp, form, MmaOperands(0, a, b, operands.descriptor, True))
        times.append(time.perf_counter() - start)
    assert min(times) < 2e-3  # 0.3 ms on the machine that this was written on
