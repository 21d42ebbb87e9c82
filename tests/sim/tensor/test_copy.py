"""`tcgen05.ld`, `.st` and `.cp`: who holds what, whose lanes, and what must come before what."""

from __future__ import annotations

import numpy as np
import pytest

from flash_attn_fp8.sim.errors import OutOfBounds, Race, Uninitialised
from flash_attn_fp8.sim.isa.tcgen05 import MmaForm, MmaOperands, mma
from flash_attn_fp8.sim.isa.tcgen05_copy import (
    COPY_SHAPES,
    SHAPES,
    copy,
    fragment,
    load,
    store,
    wait_stores,
)
from flash_attn_fp8.sim.memory import SHARED_RESERVED, Checks
from flash_attn_fp8.sim.state import Cta
from tests.sim.tensor.build import (
    allocate_all,
    cluster,
    descriptor_sm100,
    element_address,
    fill_shared,
)
from tests.sim.tensor.test_mma import idesc

# Steps in (lane, column) of each bit of a thread's number, then of a register's, from the lowest:
# as the layouts of a public library (CUTLASS copy atoms) list them.
STEPS = {
    "32x32b": (
        [(1, 0), (2, 0), (4, 0), (8, 0), (16, 0)],
        [(0, 1 << i) for i in range(7)],
    ),
    "16x64b": (
        [(8, 0), (0, 1), (1, 0), (2, 0), (4, 0)],
        [(0, 2 << i) for i in range(7)],
    ),
    "16x128b": (
        [(0, 1), (0, 2), (1, 0), (2, 0), (4, 0)],
        [(8, 0), *((0, 4 << i) for i in range(6))],
    ),
    "16x256b": (
        [(0, 2), (0, 4), (1, 0), (2, 0), (4, 0)],
        [(0, 1), (8, 0), *((0, 8 << i) for i in range(5))],
    ),
}  # fmt: skip
ALL = [
    (shape, num)
    for shape in STEPS
    for num in (1, 2, 4, 8, 16, 32, 64, 128)
    if num <= SHAPES[shape].most
]


def place(shape: str, register: int, thread: int) -> tuple[int, int]:
    lane = column = 0
    for number, steps in zip((thread, register), STEPS[shape], strict=True):
        for i, (down, right) in enumerate(steps):
            lane, column = lane + (number >> i & 1) * down, column + (number >> i & 1) * right
    return lane, column


def patterned() -> Cta:
    """Tensor memory whose word says its lane and column."""
    cta = cluster(rows=300).ctas[0]
    allocate_all(cta)
    cta.tensor.data[:] = np.arange(128)[:, None] << 16 | np.arange(512)
    cta.tensor._written[:] = True
    return cta


@pytest.mark.parametrize(("shape", "num"), ALL)
@pytest.mark.parametrize("packed", [False, True])
def test_load_gives_each_register_its_word(shape, num, packed):
    cta = patterned()
    f = fragment(shape, num, packed)
    if f.columns > 512:
        pytest.skip("more columns than there are")
    lane0, column0 = 64 + 32 - f.lanes, min(12, 512 - f.columns)
    rows = list(range(3, 3 + f.registers))
    load(cta.warps[2], rows, lane0 << 16 | column0, f)
    for register in range(f.registers):
        for thread in range(32):
            lane, column = place(shape, register, thread)
            lane += lane0
            wanted = lane << 16 | column0 + column
            if packed:
                wanted = (column0 + 2 * column) | (column0 + 2 * column + 1) << 16
            assert cta.warps[2].registers[rows[register], thread] == wanted


@pytest.mark.parametrize(("shape", "num"), ALL)
@pytest.mark.parametrize("packed", [False, True])
def test_store_is_the_reverse_of_load(shape, num, packed):
    cta = cluster(rows=300).ctas[0]
    allocate_all(cta)
    w, f = cta.warps[0], fragment(shape, num, packed)
    if f.columns > 512:
        pytest.skip("more columns than there are")
    values = np.random.default_rng(num).integers(0, 1 << 32, (f.registers, 32), dtype=np.uint64)
    rows = list(range(f.registers))
    w.registers[rows] = values
    store(w, rows, 0, f)
    wait_stores(w)
    w.registers[rows] = 0
    load(w, rows, 0, f)
    assert (w.registers[rows] == values).all()
    assert cta.tensor._written.sum() == f.lanes * f.columns


def test_two_halves_of_16x32bx2():
    cta = patterned()
    w, f = cta.warps[1], fragment("16x32bx2", 4, False)
    load(w, [0, 1, 2, 3], 48 << 16 | 5, f, split=100)
    for register in range(4):
        for thread in range(32):
            column = 5 + register + 100 * (thread // 16)
            assert w.registers[register, thread] == (48 + thread % 16) << 16 | column
    w.registers[0:4] += 7 << 40  # not part of a 32-bit register
    store(w, [0, 1, 2, 3], 48 << 16 | 205, f, split=50)
    moved = cta.tensor.data[48:64]
    assert (moved[:, 205:209] == moved[:, 5:9]).all()
    assert (moved[:, 255:259] == moved[:, 105:109]).all()


@pytest.mark.parametrize(
    ("warp", "lane", "shape"),
    [(0, 32, "32x32b"), (1, 0, "32x32b"), (5, 0, "32x32b"), (0, 16, "32x32b"), (0, 8, "16x64b"),
     (0, 32, "16x256b"), (3, 120, "16x64b")],
)  # fmt: skip
def test_a_warp_has_its_quarter_of_the_lanes(warp, lane, shape):
    cta = cluster(warps=8).ctas[0]
    allocate_all(cta)
    quarter = warp % 4 * 32
    with pytest.raises(OutOfBounds, match=rf"its own are \[{quarter}, {quarter + 32}\)"):
        load(cta.warps[warp], [0, 1, 2, 3], lane << 16, fragment(shape, 1, False))


def test_columns_are_checked():
    cta = patterned()
    with pytest.raises(OutOfBounds, match=r"columns \[508, 516\)"):
        load(cta.warps[0], list(range(8)), 508, fragment("32x32b", 8, False))
    cta.tensor.allocated[100] = False
    with pytest.raises(OutOfBounds, match="column 100 is read, and is not allocated"):
        load(cta.warps[0], list(range(8)), 96, fragment("32x32b", 8, False))


def test_nothing_written_is_uninitialised():
    cta = cluster().ctas[0]
    allocate_all(cta)
    with pytest.raises(Uninitialised, match="lane 32 column 7"):
        load(cta.warps[1], [0], 32 << 16 | 7, fragment("32x32b", 1, False))


def test_load_of_own_store_needs_the_wait():
    cta = cluster().ctas[0]
    allocate_all(cta)
    w, f = cta.warps[0], fragment("32x32b", 4, False)
    store(w, [0, 1, 2, 3], 0, f)
    store(w, [0, 1, 2, 3], 0, f)  # stores of one warp are in order
    with pytest.raises(Race, match=r"written by a tcgen05\.st of warp 0"):
        load(w, [0, 1, 2, 3], 0, f)
    wait_stores(w)
    load(w, [0, 1, 2, 3], 0, f)


@pytest.mark.parametrize("waits", [True, False])
def test_stored_a_needs_the_wait_before_the_arrival(waits):
    """Four warps store A; one hears of them and starts the MMA."""
    cta = cluster().ctas[0]
    allocate_all(cta)
    fill_shared(cta, np.zeros(cta.shared.data.size - SHARED_RESERVED, np.uint8))
    f = fragment("32x32b", 8, False)
    for w in cta.warps:
        store(w, list(range(8)), w.index << 21 | 64, f)
        if waits:
            wait_stores(w)
        cta.warps[1].acquire(w.release())
        if not waits:
            wait_stores(w)  # too late
    operands = MmaOperands(
        0, 64, descriptor_sm100(4096, 16, 1024, "128"), idesc(128, 16, "e4m3", "e4m3"), False
    )
    if waits:
        mma(cta.warps[1], MmaForm("f8f6f4", 1, True), operands)
        assert not cta.tensor.data[:, :16].any()
    else:
        with pytest.raises(Race, match=r"a tcgen05\.st of warp 0"):
            mma(cta.warps[1], MmaForm("f8f6f4", 1, True), operands)


@pytest.mark.parametrize("shape", COPY_SHAPES)
@pytest.mark.parametrize("swizzle", ["none", "128"])
def test_copy_from_shared_memory(shape, swizzle):
    cta = cluster(checks=Checks()).ctas[0]
    allocate_all(cta)
    rng = np.random.default_rng(1)
    fill_shared(cta, rng.integers(0, 256, 100_000, dtype=np.uint8))
    where = (8192, 2048, 256 if swizzle == "none" else 1024, swizzle)
    copy(cta.warps[0], 1, COPY_SHAPES[shape], 24, descriptor_sm100(*where))
    rows, size = map(int, shape[0].removesuffix("b").split("x"))
    for lane in range(128):
        for byte in range(size // 8):
            at = element_address(*where, False, lane % rows, byte, 1)
            found = cta.tensor.data[lane, 24:32].view(np.uint8)[byte]
            assert found == cta.shared.data[at]
    assert cta.tensor._written.sum() == 128 * size // 32
