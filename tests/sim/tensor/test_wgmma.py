"""`wgmma`: products against loops, Hopper's fp8 sums, and what registers and groups may not do."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_fp8.sim import hopper
from flash_attn_fp8.sim.errors import Race, Unmodelled
from flash_attn_fp8.sim.isa.wgmma import (
    POISON,
    WgmmaForm,
    check_end,
    commit_group,
    fence,
    mma_async,
    wait_group,
)
from flash_attn_fp8.sim.matrix import FORMATS, decode_shared_sm90
from flash_attn_fp8.sim.memory import SHARED_RESERVED, Checks
from flash_attn_fp8.sim.numerics import from_float32, to_float32
from flash_attn_fp8.sim.state import Cta, Warp
from tests.sim.tensor.build import (
    SIZES,
    cluster,
    descriptor_sm90,
    element_address,
    f32,
    fill_shared,
    number,
    random_bytes,
)
from tests.sim.tensor.test_mma_sync import a_place

_E4M3, _E5M2 = ((FORMATS[name], FORMATS[name]) for name in ("e4m3", "e5m2"))
SPANS = {"none": 16, "32": 32, "64": 64, "128": 128}


def aligned_sum(kind: str, factors: list[tuple[float, float]], c: float) -> float:
    """Products and c cut off below the largest exponent, and their sum again."""
    bits = 13 if kind in ("e4m3", "e5m2") else 25
    smallest = {"e4m3": -6, "e5m2": -14, "f16": -14}.get(kind, -126)

    def exponent(x: float) -> int:
        return max(math.frexp(x)[1] - 1, smallest)

    exponents = [exponent(x) + exponent(y) for x, y in factors if x * y]
    if c:
        exponents.append(math.frexp(c)[1] - 1)
    if not exponents:
        return 0.0
    unit = 2.0 ** (max(exponents) - bits)
    total = sum(math.trunc(x / unit) for x in [c, *(x * y for x, y in factors)]) * unit
    if not total:
        return 0.0
    last = 2.0 ** (math.frexp(total)[1] - 1 - min(bits, 23))
    return math.trunc(total / last) * last


@st.composite
def places(draw: st.DrawFn) -> tuple[int, int, int, str]:
    swizzle = draw(st.sampled_from(list(SPANS)))
    start = draw(st.integers(SHARED_RESERVED // 128, 60)) * 128
    start += draw(st.integers(0, SPANS[swizzle] // 32 - 1)) * 32 if SPANS[swizzle] > 16 else 0
    return start, draw(st.integers(1, 90)) * 16, draw(st.integers(8, 90)) * 16, swizzle


def complete(cta: Cta) -> None:
    for w in cta.warps:
        commit_group(w)
    for w in cta.warps:
        assert wait_group(w, 0) is None


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(["f16", "bf16", "tf32", "e4m3", "e5m2", "s8", "u8"]),
    st.sampled_from([8, 16, 24, 32, 64, 128, 256]), st.tuples(places(), places()),
    st.tuples(st.booleans(), st.booleans()), st.tuples(*[st.booleans()] * 3),
    st.integers(0, 1 << 30),
)  # fmt: skip
def test_product_is_the_sum_over_k(kind, n, where, majors, options, seed):
    (place_a, place_b), (mn_a, mn_b) = where, majors
    in_registers, accumulate, negate = options
    size, k = SIZES[kind], 32 // SIZES[kind]
    if size != 2:
        mn_a = mn_b = False
    if kind in ("s8", "u8"):
        negate, n = False, n if n != 24 else 48
    d = "s32" if kind in ("s8", "u8") else "f32"
    rng = np.random.default_rng(seed)
    cta = cluster(checks=Checks(races=False)).ctas[0]
    fill_shared(cta, random_bytes(rng, kind, 190 * 1024))
    form = WgmmaForm(
        n, FORMATS[kind], FORMATS[kind], d, negate_a=negate,
        transpose_a=mn_a and not in_registers, transpose_b=mn_b,
    )  # fmt: skip
    rows = list(range(8, 8 + n // 2))
    before = []
    for w in cta.warps:
        old = rng.integers(-50, 50, (n // 2, 32))
        w.registers[rows] = old.astype(np.int32 if d == "s32" else np.float32).view(np.uint32)
        w.registers[0:4] = random_bytes(rng, kind, 512).view(np.uint32).reshape(4, 32)
        before.append(w.registers.copy())
        fence(w)
        a = [0, 1, 2, 3] if in_registers else descriptor_sm90(*place_a)
        mma_async(w, form, rows, a, descriptor_sm90(*place_b), accumulate)
    complete(cta)
    wanted = [(0, 0), (63, n - 1), (0, n - 1), (63, 0)]
    wanted += [(int(rng.integers(64)), int(rng.integers(n))) for _ in range(16)]
    for row, column in wanted:
        warp, within = divmod(row, 16)
        register, lane = (
            column // 8 * 4 + 2 * (within >= 8) + column % 2,
            (within % 8 * 4 + column % 8 // 2),
        )
        factors, start = [], 0.0
        for i in range(k):
            if in_registers:
                at, thread, byte = a_place(within, i, size)
                word = int(before[warp][at, thread]).to_bytes(8, "little")
                a_code = word[byte : byte + size]
            else:
                at = element_address(*place_a, mn_a, row, i, size)
                a_code = cta.shared.data[at : at + size].tobytes()
            at = element_address(*place_b, mn_b, column, i, size)
            b_code = cta.shared.data[at : at + size].tobytes()
            factors.append((number(a_code, kind) * (-1 if negate else 1), number(b_code, kind)))
        if accumulate:
            code = np.uint32(before[warp][8 + register, lane])
            start = float(code.view(np.int32 if d == "s32" else np.float32))
        found = int(cta.warps[warp].registers[8 + register, lane])
        if d == "s32":
            total = start + sum(x * y for x, y in factors)
            assert found == int(total) % (1 << 32)
        else:
            wanted_bits = f32(aligned_sum(kind, factors, start))
            assert found & 0x7FFFFFFF == wanted_bits & 0x7FFFFFFF
            assert (found ^ wanted_bits) >> 31 == 0 or found & 0x7FFFFFFF == 0


def test_f16_results_are_packed_in_pairs():
    cta = cluster(checks=Checks(races=False)).ctas[0]
    fill_shared(cta, np.full(10000, 0x3C00, np.uint16).view(np.uint8))
    form = WgmmaForm(16, FORMATS["f16"], FORMATS["f16"], "f16")
    where = descriptor_sm90(4096, 16, 128, "none")
    for w in cta.warps:
        w.registers[0:4] = 0x4000_3C00  # 1, 2
        fence(w)
        mma_async(w, form, [0, 1, 2, 3], where, where, True)
    complete(cta)
    assert (cta.warps[3].registers[0:4] == 0x4C80_4C40).all()  # 16 + 2, 16 + 1


@pytest.mark.parametrize(
    ("keys", "wanted"), [(1024, 0.75), (8192, 0.668), (32768, 0.25), (131072, 0.0625)]
)
def test_long_fp8_sums_stall_as_measured(keys, wanted):
    """FACTS.md: FA3's bf16 output on an H200 where q = 0 and V = 0.75, to the digits given."""
    one, v = np.ones((1, 32)), np.full((1, 32), 0.75)
    total = np.zeros((1, 1))
    for _ in range(keys // 32):
        total = hopper.multiply(one, v, total, _E4M3, "f32")
    output = from_float32((total / keys).astype(np.float32), "bf16")
    assert round(float(to_float32(output, "bf16")[0, 0]), 4 if keys > 8192 else 3) == wanted


def test_aligned_sums_keep_infinity_and_nan():
    infinite = np.array([[np.inf, 1.0]])
    inf = hopper.multiply(infinite, np.array([[1.0, 1.0]]), None, _E5M2, "f32")
    nan = hopper.multiply(infinite, np.array([[0.0, 1.0]]), None, _E5M2, "f32")
    assert np.isposinf(inf[0, 0])
    assert np.isnan(nan[0, 0])


def test_every_unknown_bit_of_a_descriptor_is_refused():
    good = descriptor_sm90(0x4000, 16, 1024, "64")
    known = decode_shared_sm90(good)
    assert (known.start, known.leading, known.stride, known.swizzle.name) == (
        0x4000,
        16,
        1024,
        "64B",
    )
    for place in [14, 15, 30, 31, *range(46, 62)]:
        with pytest.raises(Unmodelled, match="has bits 0x"):
            decode_shared_sm90(good | 1 << place)


# ------------------------------------------------------------------- registers and groups

FORM = WgmmaForm(8, FORMATS["f16"], FORMATS["f16"], "f32")
WHERE = descriptor_sm90(4096, 16, 128, "none")
ROWS = [0, 1, 2, 3]


def ready() -> Cta:
    cta = cluster().ctas[0]
    fill_shared(cta, np.zeros(100_000, np.uint8))
    for w in cta.warps:
        fence(w)
    return cta


def issue(w: Warp, accumulate: bool = True, a: list[int] | int = WHERE) -> None:
    mma_async(w, FORM, ROWS, a, WHERE, accumulate)


def test_the_first_wgmma_needs_a_fence():
    cta = cluster().ctas[0]
    fill_shared(cta, np.zeros(100_000, np.uint8))
    with pytest.raises(Race, match=r"without any wgmma\.fence"):
        issue(cta.warps[0])


def test_accumulators_are_poison_until_the_wait():
    cta = ready()
    w = cta.warps[0]
    issue(w)
    issue(w)  # the same accumulators again: in order
    assert (w.registers[ROWS] == POISON).all()
    assert np.isnan(np.uint32(POISON).view(np.float32))
    for other in cta.warps[1:]:
        issue(other)
    complete(cta)
    assert not w.registers[ROWS].any()


def test_waiting_leaves_the_last_groups_in_flight():
    cta = ready()
    for w in cta.warps:
        issue(w)
        commit_group(w)
        mma_async(w, FORM, [4, 5, 6, 7], WHERE, WHERE, False)
        commit_group(w)
    w = cta.warps[0]
    assert wait_group(w, 1) is None
    assert not w.registers[ROWS].any()
    assert (w.registers[4:8] == POISON).all()


def test_accumulators_written_in_flight_are_reported():
    w = ready().warps[0]
    issue(w)
    w.registers[2, 7] = 0
    with pytest.raises(Race, match="were written while their wgmma was in flight"):
        issue(w)


def test_registers_written_since_the_fence_are_reported():
    """Accumulators that are added to, and A; not what `scale-d` discards."""
    cta = ready()
    for w in cta.warps:
        issue(w)
    complete(cta)
    untouched, added_to, operand = cta.warps[:3]
    issue(untouched)
    added_to.registers[1, 1] = 5
    with pytest.raises(Race, match=r"written since the last wgmma\.fence"):
        issue(added_to)
    fence(added_to)
    issue(added_to)
    operand.registers[10] = 1
    with pytest.raises(Race, match=r"written since the last wgmma\.fence"):
        issue(operand, a=[8, 9, 10, 11])
    fence(operand)
    issue(operand, a=[8, 9, 10, 11])
    assert (operand.registers[ROWS] == POISON).all()


def test_accumulators_that_begin_anew_need_a_fence_since_the_wait():
    cta = ready()
    for w in cta.warps:
        issue(w, accumulate=False)
        commit_group(w)
    w = cta.warps[0]
    wait_group(w, 0)
    with pytest.raises(Race, match="begin anew without"):
        issue(w, accumulate=False)
    fence(w)
    issue(w, accumulate=False)
    assert (w.registers[ROWS] == POISON).all()


def test_a_kernel_waits_for_what_it_started():
    cta = ready()
    check_end(cta)
    issue(cta.warps[2])
    with pytest.raises(Race, match="in flight in warp 2: 0 groups are committed"):
        check_end(cta)


def test_accumulators_in_flight_are_no_operands_of_another():
    w = ready().warps[0]
    issue(w)
    with pytest.raises(Race, match="registers of an earlier wgmma"):
        mma_async(w, FORM, [8, 9, 10, 11], [3, 4, 5, 6], WHERE, False)
    with pytest.raises(Race, match="registers of an earlier wgmma"):
        mma_async(w, FORM, [3, 4, 5, 6], WHERE, WHERE, False)


def test_a_group_is_complete_when_all_four_warps_have_committed_it():
    cta = ready()
    for w in cta.warps[:3]:
        issue(w)
        commit_group(w)
    wait = wait_group(cta.warps[0], 0)
    assert wait is not None
    assert not wait.ready()
    assert "warp 3 to commit group 1" in wait.describe()
    wait.on.waiters.append(cta.warps[0])
    cta.warps[0].runnable = False
    issue(cta.warps[3])
    commit_group(cta.warps[3])
    assert wait.ready()
    assert cta.warps[0].runnable
    assert wait_group(cta.warps[0], 0) is None


@pytest.mark.parametrize("waits", [True, False])
def test_a_buffer_is_free_after_the_wait_of_one_warp(waits):
    """Warp 0 tells for all four; without its wait the reads are not over."""
    made = cluster(warps=8)
    cta = made.ctas[0]
    fill_shared(cta, np.zeros(100_000, np.uint8))
    for w in cta.warps[:4]:
        fence(w)
        issue(w)
        commit_group(w)
    if waits:
        wait_group(cta.warps[0], 0)
    writer = cta.warps[4]
    writer.acquire(cta.warps[0].release())
    data = np.zeros((8, 16), np.uint8)
    if waits:
        cta.shared.write(np.arange(4096, 4224, 16), data, writer.access())
        assert not cta.shared.data[4096:4224].any()
    else:
        with pytest.raises(Race, match="it was read by the wgmma operations of warp 0"):
            cta.shared.write(np.arange(4096, 4224, 16), data, writer.access())


@pytest.mark.parametrize("fenced", [True, False])
def test_operands_stored_by_threads_need_a_proxy_fence(fenced):
    cta = ready()
    w = cta.warps[0]
    cta.shared.write(np.arange(4096, 8192, 16), np.zeros((256, 16), np.uint8), w.access())
    if fenced:
        w.fence_proxy_async()
        issue(w)
        assert (w.registers[ROWS] == POISON).all()
    else:
        with pytest.raises(Race, match="was written by warp 0"):
            issue(w)
