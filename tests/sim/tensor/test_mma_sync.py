"""`mma.sync`, `ldmatrix`, `stmatrix`, `movmatrix` against the manual's fragments."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_fp8.sim.isa.mma import MmaForm, load_matrix, mma, move_matrix, store_matrix
from flash_attn_fp8.sim.matrix import FORMATS
from tests.sim.tensor.build import SIZES, cluster, f32, fill_shared, number, random_bytes

SHAPES = [
    ("f16", 8), ("f16", 16), ("bf16", 8), ("bf16", 16), ("tf32", 4), ("tf32", 8),
    ("e4m3", 16), ("e4m3", 32), ("e5m2", 32), ("s8", 16), ("s8", 32), ("u8", 32),
]  # fmt: skip


def a_place(row: int, k: int, size: int) -> tuple[int, int, int]:
    """(register, lane, byte) of A[row][k]: groupID = lane >> 2, threadID_in_group = lane % 4."""
    each = 4 // size
    quad, within = divmod(k, 4 * each)
    return 2 * quad + (row >= 8), row % 8 * 4 + within // each, within % each * size


def b_place(k: int, column: int, size: int) -> tuple[int, int, int]:
    each = 4 // size
    quad, within = divmod(k, 4 * each)
    return quad, column * 4 + within // each, within % each * size


def c_place(row: int, column: int) -> tuple[int, int]:
    return 2 * (row >= 8) + column % 2, row % 8 * 4 + column // 2


def element(registers: np.ndarray, place: tuple[int, int, int], kind: str) -> float:
    register, lane, byte = place
    word = int(registers[register, lane]).to_bytes(8, "little")
    return number(word[byte : byte + SIZES[kind]], kind)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.booleans(), st.integers(0, 1 << 30))
def test_product_of_fragments(shape, f16_result, seed):
    kind, k = shape
    d = "s32" if FORMATS[kind].integer else "f16" if f16_result and kind == "f16" else "f32"
    rng = np.random.default_rng(seed)
    w = cluster().ctas[0].warps[0]
    n_a, n_b = k * SIZES[kind] // 8, k * SIZES[kind] // 16
    data = random_bytes(rng, kind, 128 * (n_a + n_b)).view(np.uint32).reshape(-1, 32)
    w.registers[0 : n_a + n_b] = data
    old = rng.integers(-50, 50, (4, 32))
    if d == "f16":
        w.registers[10:12] = old.astype("<f2").view(np.uint32).reshape(2, 32)
    else:
        w.registers[10:14] = old.astype(np.int32 if d == "s32" else np.float32).view(np.uint32)
    before = w.registers.copy()
    c = [10, 11] if d == "f16" else [10, 11, 12, 13]
    into = [20, 21] if d == "f16" else [20, 21, 22, 23]
    mma(
        w, MmaForm(k * SIZES[kind], FORMATS[kind], FORMATS[kind], d, False),
        into, list(range(n_a)), list(range(n_a, n_a + n_b)), c,
    )  # fmt: skip
    for row in range(16):
        for column in range(8):
            total = [
                element(before, a_place(row, i, SIZES[kind]), kind)
                * element(before[n_a:], b_place(i, column, SIZES[kind]), kind)
                for i in range(k)
            ]
            if d == "f16":
                at, lane = 2 * (row >= 8) // 2, row % 8 * 4 + column // 2
                half = 16 * (column % 2)
                code = int(before[10 + at, lane]) >> half & 0xFFFF
                total.append(struct.unpack("<e", code.to_bytes(2, "little"))[0])
                found = int(w.registers[20 + at, lane]) >> half & 0xFFFF
                assert found == int(np.float16(math.fsum(total)).view(np.uint16))
                continue
            register, lane = c_place(row, column)
            code = np.uint32(before[10 + register, lane])
            total.append(float(code.view(np.int32 if d == "s32" else np.float32)))
            found = int(w.registers[20 + register, lane])
            exact = math.fsum(total)
            assert found == (int(exact) % (1 << 32) if d == "s32" else f32(exact))


def test_integers_saturate_only_where_asked():
    for saturate, wanted in (
        (False, (0x7FFFFFFF + 32 * 127 * 127) % (1 << 32)),
        (True, 0x7FFFFFFF),
    ):
        w = cluster().ctas[0].warps[0]
        w.registers[0:6] = 0x7F7F7F7F
        w.registers[10:14] = 0x7FFFFFFF
        form = MmaForm(32, FORMATS["s8"], FORMATS["s8"], "s32", saturate)
        mma(w, form, [20, 21, 22, 23], [0, 1, 2, 3], [4, 5], [10, 11, 12, 13])
        assert (w.registers[20:24] == wanted).all()


def test_nan_is_the_tensor_cores():
    w = cluster().ctas[0].warps[0]
    w.registers[0:6] = 0x7E007E00
    form = MmaForm(32, FORMATS["f16"], FORMATS["f16"], "f32", False)
    mma(w, form, [20, 21, 22, 23], [0, 1, 2, 3], [4, 5], [10, 11, 12, 13])
    assert (w.registers[20:24] == 0x7FFFFFFF).all()


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix_and_stmatrix(count, transposed):
    """Lane t has elements 2(t mod 4), 2(t mod 4) + 1 of row t / 4; or of column t / 4."""
    cta = cluster().ctas[0]
    fill_shared(cta, np.random.default_rng(count).integers(0, 256, 8192, dtype=np.uint8))
    w = cta.warps[0]
    addresses = 1024 + 16 * np.random.default_rng(3).permutation(64)[:32].astype(np.int64)
    rows = list(range(5, 5 + count))
    load_matrix(w, "shared", addresses, rows, transposed)
    for matrix in range(count):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if transposed:
                    row, column = column, row
                at = int(addresses[8 * matrix + row]) + 2 * column
                wanted = int(cta.shared.data[at]) | int(cta.shared.data[at + 1]) << 8
                assert int(w.registers[rows[matrix], lane]) >> 16 * half & 0xFFFF == wanted
    before = cta.shared.data.copy()
    used = (addresses[: 8 * count, None] + np.arange(16)).reshape(-1)
    cta.shared.data[used] = 0
    store_matrix(w, "shared", addresses, rows, transposed)
    assert (cta.shared.data == before).all()


def test_movmatrix_transposes():
    w = cluster().ctas[0].warps[0]
    halves = np.arange(64, dtype=np.uint16).reshape(8, 8)
    w.registers[0] = halves.copy().view(np.uint32).reshape(-1)
    move_matrix(w, 1, 0)
    assert (w.registers[1].astype(np.uint32).view(np.uint16).reshape(8, 8) == halves.T).all()
