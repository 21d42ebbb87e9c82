"""`cp.async.bulk.tensor` and `cp.reduce.async.bulk.tensor`: values, bytes, bounds, order."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flash_attn_fp8.sim.errors import (
    BarrierMisuse,
    Finding,
    Misaligned,
    OutOfBounds,
    Race,
    Uninitialised,
    Unmodelled,
)
from flash_attn_fp8.sim.memory import PARAM_WINDOW
from flash_attn_fp8.sim.tensormap import TensorMap, encode
from tests.sim.tma import model
from tests.sim.tma.rig import BARRIER, DATA, Late, Rig, aligned
from tests.sim.tma.strategies import at, coordinates, extent, maps

LOAD = (
    "cp.async.bulk.tensor.{n}d.shared::cta.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
    "[%r0], [%rd0, {{{c}}}], [%r1], %rd1;"
)
STORE = (
    "cp.async.bulk.tensor.{n}d.global.shared::cta.tile.bulk_group.L2::cache_hint "
    "[%rd0, {{{c}}}], [%r0], %rd1;"
)
REDUCE = (
    "cp.reduce.async.bulk.tensor.{n}d.global.shared::cta.{op}.tile.bulk_group "
    "[%rd0, {{{c}}}], [%r0];"
)
COMMIT = "cp.async.bulk.commit_group;"


def _text(template: str, rank: int, **more: str) -> str:
    return template.format(n=rank, c=", ".join(f"%r{10 + i}" for i in range(rank)), **more)


def _values(coordinates: tuple[int, ...], **more: int) -> dict[str, int]:
    return {**{f"r{10 + i}": c for i, c in enumerate(coordinates)}, "rd0": PARAM_WINDOW, **more}


def _issue(rig: Rig, template: str, c: tuple[int, ...], offset: int, **more: str) -> None:
    values = _values(c, r0=offset)
    values |= {"rd1": 0} if "%rd1" in template else {}
    values |= {"r1": BARRIER} if "%r1]" in template else {}
    rig.run(_text(template, len(c), **more), **values)


def _box_bytes(m: TensorMap) -> int:
    steps = (1, *m.element_strides[1:])
    return math.prod(-(-b // s) for b, s in zip(m.box, steps, strict=True)) * m.size


def _rig(m: TensorMap, **more: object) -> tuple[Rig, TensorMap, np.ndarray]:
    """A rig whose only buffer is the tensor, to the end of its last 16 bytes."""
    data = aligned(-(-extent(m) // 16) * 16, seed=1)
    m = at(m, data.ctypes.data)
    return Rig(data, params=encode(m), **more), m, data


MAP = TensorMap(0, "bf16", (64, 40), (128,), (64, 16), (1, 1), swizzle="128B")
U8 = TensorMap(0, "u8", (64, 8), (64,), (32, 4), (1, 1))


# ------------------------------------------------------------------------------------- values


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_loads_are_those_of_the_model(data):
    m = data.draw(maps())
    offset = DATA + 128 * data.draw(st.integers(0, 9))
    c = data.draw(coordinates(m))
    rig, m, tensor = _rig(m)
    rig.shared[DATA:] = 0xCD
    expected = rig.shared.copy()
    model.load(m, tensor, c, expected, offset)
    _issue(rig, LOAD, c, offset)
    np.testing.assert_array_equal(rig.shared, expected)
    assert rig.barrier().tx == -_box_bytes(m)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_stores_are_those_of_the_model(data):
    m = data.draw(maps())
    assume(m.atom != "32B+8B")
    m = replace(m, fill="zero")
    offset = DATA + 128 * data.draw(st.integers(0, 9))
    c = data.draw(coordinates(m, lowest=0))
    rig, m, tensor = _rig(m)
    rig.write(DATA, aligned(32 * 1024, seed=2))
    rig.warp().fence_proxy_async()
    expected = tensor.copy()
    model.store(m, expected, c, rig.shared, offset)
    _issue(rig, STORE, c, offset)
    np.testing.assert_array_equal(tensor, expected)


def test_a_swizzle_is_of_absolute_addresses():
    """A destination in the middle of the pattern continues the pattern."""
    whole, *_ = _rig(replace(MAP, box=(64, 16)))
    _issue(whole, LOAD, (0, 0), DATA)
    part, *_ = _rig(replace(MAP, box=(64, 13)))
    _issue(part, LOAD, (0, 3), DATA + 3 * 128)
    np.testing.assert_array_equal(
        part.shared[DATA + 3 * 128 : DATA + 2048], whole.shared[DATA + 3 * 128 : DATA + 2048]
    )


def test_four_rows_are_gathered_and_scattered():
    m = replace(MAP, box=(64, 1))
    rig, m, tensor = _rig(m)
    rows = (7, 39, -1, 7)
    text = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile::gather4.mbarrier::complete_tx::bytes "
        "[%r0], [%rd0, {%r10, %r11, %r12, %r13, %r14}], [%r1];"
    )
    rig.run(text, **_values((0, *rows), r0=DATA, r1=BARRIER))
    assert rig.barrier().tx == -4 * 128
    for i, row in enumerate(rows):
        expected = np.zeros(128, np.uint8) if row < 0 else tensor[128 * row : 128 * row + 128]
        got = rig.shared[[model.swizzled(DATA + 128 * i + j, m) for j in range(128)]]
        np.testing.assert_array_equal(got, expected)
    rig.wait_barrier(512)
    scatter = (
        "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group "
        "[%rd0, {%r10, %r11, %r12, %r13, %r14}], [%r0];"
    )
    before = tensor.copy()
    rig.run(scatter, **_values((0, 1, 2, 3, 4), r0=DATA))
    np.testing.assert_array_equal(tensor[128:256], before[7 * 128 : 8 * 128])
    np.testing.assert_array_equal(tensor[384:512], np.zeros(128, np.uint8))


@pytest.mark.parametrize(
    ("bits", "rounded"),
    [
        (0x3F800FFF, 0x3F800000),
        (0x3F801000, 0x3F800000),
        (0x3F803000, 0x3F804000),
        (0xBF801001, 0xBF802000),
        (0xFF800000, 0xFF800000),
        (0x7F800001, 0x7FFFE000),
    ],
)
def test_tf32_is_rounded_to_nearest_even_on_the_way_in(bits, rounded):
    m = TensorMap(0, "tf32", (4,), (), (4,), (1,))
    rig, m, tensor = _rig(m)
    tensor.view(np.uint32)[:] = bits
    _issue(rig, LOAD, (0,), DATA)
    got = int(rig.shared[DATA : DATA + 4].view(np.uint32)[0])
    assert got == rounded


# ------------------------------------------------------------------------------- cluster, barriers


def _multicast(rig: Rig, form: str, mask: int, barrier: int) -> None:
    text = (
        f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes."
        f"multicast::cluster{form} [%r0], [%rd0, {{%r10, %r11}}], [%r1], %h0;"
    )
    rig.run(text, **_values((0, 0), r0=DATA, r1=barrier, h0=mask))


def _cluster(ctas: int) -> Rig:
    data = aligned(extent(U8))
    return Rig(data, ctas=ctas, params=encode(at(U8, data.ctypes.data)))


def test_multicast_writes_and_completes_in_every_cta_of_the_mask():
    rig = _cluster(4)
    _multicast(rig, "", 0b1011, BARRIER)
    for rank, cta in enumerate(rig.cluster.ctas):
        in_mask = rank != 2
        assert rig.barrier(rank).tx == (-128 if in_mask else 0)
        assert bool(cta.shared.data[DATA : DATA + 128].any()) == in_mask


@pytest.mark.parametrize(("barrier_rank", "signalled"), [(0, (0, 2)), (1, (1, 3))])
def test_multicast_of_a_cta_pair_signals_the_cta_of_the_barriers_parity(barrier_rank, signalled):
    rig = _cluster(4)
    _multicast(rig, ".cta_group::2", 0b1111, barrier_rank << 24 | BARRIER)
    got = [rig.barrier(rank).tx for rank in range(4)]
    assert got == [-256 if rank in signalled else 0 for rank in range(4)]


def test_multicast_beyond_the_cluster_is_a_finding():
    with pytest.raises(Finding, match="0x0010"):
        _multicast(_cluster(4), "", 0b10000, BARRIER)


@pytest.mark.parametrize(
    ("form", "destination", "barrier", "fault"),
    [
        ("", 0, 0, None),
        ("", 1, 1, None),
        ("", 0, 1, BarrierMisuse),
        (".cta_group::2", 0, 1, None),
        (".cta_group::2", 1, 0, None),
        (".cta_group::2", 2, 3, None),
        (".cta_group::2", 1, 2, BarrierMisuse),
        (".cta_group::1", 1, 0, BarrierMisuse),
    ],
)
def test_where_the_mbarrier_may_be(form, destination, barrier, fault):
    rig = _cluster(4)
    text = (
        f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{form} "
        f"[%r0], [%rd0, {{%r10, %r11}}], [%r1];"
    )
    values = _values((0, 0), r0=destination << 24 | DATA, r1=barrier << 24 | BARRIER)
    if fault:
        with pytest.raises(fault, match=f"rank {barrier}"):
            rig.run(text, **values)
        return
    rig.run(text, **values)
    assert rig.barrier(barrier).tx == -128
    assert rig.cluster.ctas[destination].shared.data[DATA : DATA + 128].any()


def test_shared_cta_is_the_executing_ctas():
    with pytest.raises(Finding, match="rank 1"):
        _issue(_cluster(2), LOAD, (0, 0), 1 << 24 | DATA)


def test_no_barrier_at_the_address():
    rig, *_ = _rig(U8)
    text = _text(LOAD, 2)
    with pytest.raises(BarrierMisuse, match="0x408"):
        rig.run(text, **_values((0, 0), r0=DATA, r1=BARRIER + 8, rd1=0))


# ------------------------------------------------------------------------------ bounds, alignment


@pytest.mark.parametrize("offset", [8, 16, 32, 64])
@pytest.mark.parametrize("template", [LOAD, STORE])
def test_shared_addresses_are_multiples_of_128(template, offset):
    """An H200 answers with `misaligned address`."""
    rig, *_ = _rig(U8)
    with pytest.raises(Misaligned, match=f"{DATA + offset:#x}"):
        _issue(rig, template, (0, 0), DATA + offset)


@pytest.mark.parametrize("first", [1, 8, -8, 17])
def test_boxes_begin_at_multiples_of_16_bytes(first):
    """An H200 answers with `illegal instruction`."""
    rig, *_ = _rig(U8)
    with pytest.raises(Misaligned, match=f"begin {first} bytes"):
        _issue(rig, LOAD, (first, 0), DATA)


@pytest.mark.parametrize("c", [(-16, 0), (0, -1)])
def test_stores_have_no_negative_coordinates(c):
    """An H200 answers with `illegal instruction`."""
    rig, *_ = _rig(U8)
    with pytest.raises(OutOfBounds, match="negative"):
        _issue(rig, STORE, c, DATA)


def test_a_map_past_its_buffer_is_found_where_it_touches():
    data = aligned(64 * 8)
    m = at(replace(U8, dims=(64, 12)), data.ctypes.data)
    rig = Rig(data, params=encode(m))
    _issue(rig, LOAD, (0, 4), DATA)  # rows 4 to 7 exist
    with pytest.raises(OutOfBounds, match=r"a0 \(512 bytes\).*row 3 of the box at \[0, 5\]"):
        _issue(rig, LOAD, (0, 5), DATA)


def test_rows_in_different_buffers_are_one_tensor():
    raw = aligned(4096, seed=3)
    one, other = raw[:64], raw[2048 : 2048 + 64]
    m = TensorMap(raw.ctypes.data, "u8", (64, 2), (2048,), (64, 2), (1, 1))
    rig = Rig(one, other, params=encode(m))
    _issue(rig, LOAD, (0, 0), DATA)
    np.testing.assert_array_equal(rig.shared[DATA : DATA + 128], np.concatenate([one, other]))


def test_shared_memory_ends():
    rig, *_ = _rig(replace(U8, box=(32, 8)))
    with pytest.raises(OutOfBounds, match="shared 0"):
        _issue(rig, LOAD, (0, 0), rig.shared.size - 128)


def test_a_store_of_what_nobody_wrote():
    rig, *_ = _rig(U8)
    with pytest.raises(Uninitialised, match=r"shared 0\+0x1000 .*bulk copies of warp 0"):
        _issue(rig, STORE, (0, 0), DATA)


def test_out_of_bounds_parts_of_a_store_need_not_be_written():
    """But for those within the last 16 bytes of a row."""
    rig, _, tensor = _rig(replace(U8, dims=(40, 8), strides=(64,), box=(64, 4)))
    image = aligned(256, seed=5)
    inside = [*range(6), *range(8, 14)]  # of units of 8 bytes: 48 of each 64
    offsets = DATA + 8 * np.array(inside)
    rig.warp().cta.shared.write(offsets, image.reshape(-1, 8)[inside], rig.warp().access())
    rig.warp().fence_proxy_async()
    _issue(rig, STORE, (0, 6), DATA)
    np.testing.assert_array_equal(tensor[6 * 64 : 6 * 64 + 48], image[:48])
    np.testing.assert_array_equal(tensor[7 * 64 : 7 * 64 + 48], image[64:112])


@pytest.mark.parametrize(("template", "more"), [(STORE, {}), (REDUCE, {"op": "add"})])
def test_a_store_past_the_end_of_a_buffer_is_found(template, more):
    """It writes 16 bytes where the last row has 8, as an H200 does."""
    m = TensorMap(0, "u32", (6, 3), (32,), (8, 2), (1, 1))
    data = aligned(extent(m), seed=1)
    rig = Rig(data, params=encode(at(m, data.ctypes.data)))
    rig.write(DATA, np.full(16, 1, np.uint32))
    rig.warp().fence_proxy_async()
    _issue(rig, template, (0, 0), DATA, **more)
    with pytest.raises(OutOfBounds, match="passed by 8 bytes"):
        _issue(rig, template, (0, 2), DATA, **more)


@pytest.mark.parametrize(
    ("change", "named"),
    [({"interleave": "16B"}, "interleave"), ({"element_strides": (2, 1)}, "dimension 0")],
)
def test_what_is_not_modelled(change, named):
    rig, *_ = _rig(replace(U8, **change))
    with pytest.raises(Unmodelled, match=named):
        _issue(rig, LOAD, (0, 0), DATA)


def test_rank_of_instruction_and_map():
    rig, *_ = _rig(U8)
    with pytest.raises(Finding, match=r"a \.3d copy through a u8 tensor map"):
        _issue(rig, LOAD, (0, 0, 0), DATA)


@pytest.mark.parametrize(
    "text",
    [
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
        "[%r0], [%rd0, {%r1, %r1, %r1}], [%r0], {%h0};",
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.bulk_group "
        "[%r0], [%rd0, {%r1, %r1}], [%r0];",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes.new "
        "[%r0], [%rd0, {%r1, %r1}], [%r0];",
        "cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
        "[%r0], [%rd0, {%r1}], [%r0];",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.mul.bulk_group "
        "[%rd0, {%r1, %r1}], [%r0];",
    ],
)
def test_forms_that_are_not_modelled_name_their_line(text):
    rig, *_ = _rig(U8)
    with pytest.raises(Unmodelled, match="line 11"):
        rig.run(text)


def test_the_map_may_be_in_global_memory_and_must_be_aligned():
    data = aligned(extent(U8))
    where = aligned(128, seed=None)
    where[:] = np.frombuffer(encode(at(U8, data.ctypes.data)), np.uint8)
    rig = Rig(data, where)
    values = _values((0, 0), r0=DATA, r1=BARRIER, rd1=0)
    rig.run(_text(LOAD, 2), **{**values, "rd0": where.ctypes.data})
    np.testing.assert_array_equal(rig.shared[DATA : DATA + 32], data[:32])
    with pytest.raises(Misaligned, match="multiple of 64"):
        rig.run(_text(LOAD, 2), **{**values, "rd0": where.ctypes.data + 16})
    with pytest.raises(OutOfBounds, match="parameter offset"):
        rig.run(_text(LOAD, 2), **values)


# -------------------------------------------------------------------------------------- reductions


def _reduced(type_: str, operation: str, here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """`there op here` through a tensor map; arrays of one dtype, whole rows of 16 bytes."""
    data = aligned(there.nbytes, seed=None)
    data[:] = there.view(np.uint8)
    n = there.size
    m = TensorMap(data.ctypes.data, type_, (n,), (), (n,), (1,))
    rig = Rig(data, params=encode(m))
    rig.write(DATA, here)
    rig.warp().fence_proxy_async()
    _issue(rig, REDUCE, (0,), DATA, op=operation)
    return data.view(there.dtype)


_PYTHON = {
    "add": lambda a, b, bits: (a + b) % (1 << bits),
    "min": lambda a, b, bits: min(a, b),
    "max": lambda a, b, bits: max(a, b),
    "inc": lambda a, b, bits: 0 if a >= b else a + 1,
    "dec": lambda a, b, bits: b if a == 0 or a > b else a - 1,
    "and": lambda a, b, bits: a & b,
    "or": lambda a, b, bits: a | b,
    "xor": lambda a, b, bits: a ^ b,
}


@pytest.mark.parametrize(
    ("type_", "operation"),
    [
        *(("u32", op) for op in _PYTHON),
        ("s32", "add"), ("s32", "min"), ("s32", "max"), ("u64", "add"), ("u64", "min"),
        ("u64", "max"), ("s64", "min"), ("s64", "max"), ("u64", "xor"), ("s32", "and"),
    ],
)  # fmt: skip
def test_reductions_of_integers(type_, operation):
    bits = int(type_[1:])
    kind = np.dtype(f"{'i' if type_[0] == 's' else 'u'}{bits // 8}")
    rng = np.random.default_rng(bits)
    edges = [0, 1, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1, 5]
    a, b = np.array([[x, y] for x in edges for y in edges], np.uint64).astype(f"u{bits // 8}").T
    a = np.concatenate([a, rng.integers(0, 1 << 32, 28).astype(a.dtype)])
    b = np.concatenate([b, rng.integers(0, 1 << 32, 28).astype(b.dtype)])
    got = _reduced(type_, operation, b.view(kind), a.view(kind))
    want = [
        _PYTHON[operation](int(x), int(y), bits) % (1 << bits)
        for x, y in zip(a.view(kind), b.view(kind), strict=True)
    ]
    assert got.view(a.dtype).tolist() == want


@pytest.mark.parametrize("type_", ["f32", "f32.ftz"])
def test_additions_of_f32_flush_subnormals_where_the_map_says_so(type_):
    tiny, least = np.float32(2.0**-126), np.float32(2.0**-149)
    a = np.array([least, -least, tiny, 1.5 * tiny, 1, np.inf, np.nan, 3], np.float32)
    b = np.array([0, -0.0, least, -tiny, 2.0**-24, -np.inf, 1, 4], np.float32)
    got = _reduced(type_, "add", b, a).view(np.uint32).tolist()
    flushed = [0, -0.0, tiny] if type_ == "f32.ftz" else [least, -least, tiny + least]
    half = 0 if type_ == "f32.ftz" else tiny / 2
    want = np.array([*flushed, half, 1, np.nan, np.nan, 7], np.float32).view(np.uint32)
    want[5:7] = 0x7FFFFFFF
    assert got == want.tolist()


@pytest.mark.parametrize("type_", ["f16", "bf16"])
def test_additions_of_16_bits_round_once_to_nearest_even(type_):
    """Against exact sums: float64 holds the sum of two f16, and of two bf16 of like exponents."""
    rng = np.random.default_rng(7)
    if type_ == "f16":
        a, b = rng.integers(0, 0x7C00, (2, 256)).astype(np.uint16)
        exact = a.view(np.float16).astype(np.float64) + b.view(np.float16).astype(np.float64)
        with np.errstate(over="ignore"):
            want = exact.astype(np.float16).view(np.uint16)
    else:
        a, b = rng.integers(0x3E00, 0x4300, (2, 256)).astype(np.uint16)
        wide = [(x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in (a, b)]
        total = (wide[0] + wide[1]).astype(np.float32).view(np.uint32).astype(np.uint64)
        want = ((total + 0x7FFF + (total >> 16 & 1)) >> 16).astype(np.uint16)
    assert _reduced(type_, "add", b, a).tolist() == want.tolist()


@pytest.mark.parametrize(
    ("type_", "operation"),
    [("u8", "add"), ("f32", "min"), ("s64", "add"), ("s32", "inc"), ("f64", "add")],
)
def test_reductions_that_the_manuals_table_does_not_have(type_, operation):
    values = aligned(64).view(
        {"u8": "u1", "f32": "f4", "s64": "i8", "s32": "i4", "f64": "f8"}[type_]
    )
    with pytest.raises(Unmodelled, match=rf"\.{operation} of {type_}"):
        _reduced(type_, operation, values, values)


def test_reductions_drop_what_is_out_of_bounds():
    rig, _, tensor = _rig(TensorMap(0, "u32", (6, 3), (32,), (8, 2), (1, 1)))
    before = tensor.copy()
    rig.write(DATA, np.full(16, 1, np.uint32))
    rig.warp().fence_proxy_async()
    _issue(rig, REDUCE, (4, 2), DATA, op="add")
    changed = np.flatnonzero(tensor != before) // 4
    # Where a row ends within 16 bytes, an H200 adds to all of them.
    assert set(changed.tolist()) == {2 * 8 + i for i in range(4, 8)}


# ------------------------------------------------------------------------------------------- order


def test_a_load_is_seen_after_its_barrier_and_not_before():
    rig, _, tensor = _rig(U8)
    _issue(rig, LOAD, (0, 0), DATA)
    with pytest.raises(Race, match="a copy that completes on mbarrier 0x400"):
        rig.read(DATA, 128)
    rig.wait_barrier(128)
    np.testing.assert_array_equal(rig.read(DATA, 32), tensor[:32])


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_over_what_was_read_needs_that_reader_to_be_over(waits):
    rig, *_ = _rig(U8, warps=2)
    reader, loader = rig.warp(1), rig.warp(0)
    rig.write(DATA, aligned(128), reader)
    reader.fence_proxy_async()
    rig.read(DATA, 128, reader)
    if waits:
        loader.acquire(reader.release())
        _issue(rig, LOAD, (0, 0), DATA)
        assert rig.barrier().tx == -128
    else:
        with pytest.raises(Race, match="warp 1"):
            _issue(rig, LOAD, (0, 0), DATA)


@pytest.mark.parametrize("fence", [True, False])
def test_a_store_needs_the_fence_between_the_proxies(fence):
    rig, _, tensor = _rig(U8)
    image = aligned(128, seed=9)
    rig.write(DATA, image)
    if fence:
        rig.warp().fence_proxy_async()
        _issue(rig, STORE, (0, 0), DATA)
        np.testing.assert_array_equal(tensor[:32], image[:32])
    else:
        with pytest.raises(Race, match="bulk copies of warp 0"):
            _issue(rig, STORE, (0, 0), DATA)


def test_two_loads_on_one_barrier_may_not_overlap():
    rig, *_ = _rig(U8)
    _issue(rig, LOAD, (0, 0), DATA)
    with pytest.raises(Race):
        _issue(rig, LOAD, (0, 4), DATA)


@pytest.mark.parametrize("late", [True, False])
def test_bytes_complete_when_the_schedule_says(late):
    rig, *_ = _rig(U8, schedule=Late() if late else None)
    _issue(rig, LOAD, (0, 0), DATA)
    assert rig.barrier().tx == (0 if late else -128)
    rig.wait_barrier(128)
    assert rig.barrier().phase == 1


def test_traffic_is_counted():
    rig, *_ = _rig(U8)
    _issue(rig, LOAD, (0, 0), DATA)
    assert rig.warp().cta.counters["bulk tensor bytes global to shared"] == 128
