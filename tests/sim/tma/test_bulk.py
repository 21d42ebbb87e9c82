"""Bulk copies without a map, bulk groups, `cp.async`, and instructions on tensor maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_fp8.sim.errors import (
    BarrierMisuse,
    Deadlock,
    Finding,
    Misaligned,
    OutOfBounds,
    Race,
    Uninitialised,
    Unmodelled,
)
from flash_attn_fp8.sim.schedule import RoundRobin
from flash_attn_fp8.sim.tensormap import TensorMap, decode, encode
from tests.sim.tma.rig import BARRIER, DATA, Late, Rig, aligned

IN = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0], %r2, [%r1];"
OUT = "cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r0], %r2;"
ACROSS = (
    "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
    "[%r0], [%r3], %r2, [%r1];"
)
COMMIT = "cp.async.bulk.commit_group;"
WAIT = "cp.async.bulk.wait_group {n};"
WAIT_READ = "cp.async.bulk.wait_group.read {n};"


def _written(rig: Rig, nbytes: int = 4096, seed: int = 3) -> np.ndarray:
    """Shared memory with data in it that the asynchronous proxy may read."""
    image = aligned(nbytes, seed)
    rig.write(DATA, image)
    rig.warp().fence_proxy_async()
    return image


# ----------------------------------------------------------------------------------------- copies


@given(st.integers(0, 20), st.integers(0, 60), st.integers(0, 100))
@settings(deadline=None, max_examples=50)
def test_copies_in(source, units, target):
    data = aligned(2048)
    rig = Rig(data)
    nbytes, at = 16 * units, DATA + 16 * target
    values = {"r0": at, "rd0": data.ctypes.data + 16 * source, "r2": nbytes, "r1": BARRIER}
    if source * 16 + nbytes > data.size:
        with pytest.raises(OutOfBounds, match="a0"):
            rig.run(IN, **values)
        return
    expected = rig.shared.copy()
    expected[at : at + nbytes] = data[16 * source : 16 * source + nbytes]
    rig.run(IN, **values)
    np.testing.assert_array_equal(rig.shared, expected)
    assert rig.barrier().tx == -nbytes


@given(st.integers(0, 20), st.integers(0, 60), st.integers(0, 100))
@settings(deadline=None, max_examples=50)
def test_copies_out(target, units, source):
    data = aligned(2048)
    rig = Rig(data)
    image = _written(rig)
    nbytes = 16 * units
    values = {"r0": DATA + 16 * source, "rd0": data.ctypes.data + 16 * target, "r2": nbytes}
    if target * 16 + nbytes > data.size:
        with pytest.raises(OutOfBounds, match="a0"):
            rig.run(OUT, **values)
        return
    expected = data.copy()
    expected[16 * target : 16 * target + nbytes] = image[16 * source : 16 * source + nbytes]
    rig.run(OUT, **values)
    np.testing.assert_array_equal(data, expected)


def test_copies_out_by_byte_mask():
    data = aligned(32)
    rig = Rig(data)
    image, before = _written(rig), data.copy()
    text = "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd0], [%r0], 32, %h0;"
    rig.run(text, r0=DATA, rd0=data.ctypes.data, h0=0x8005)
    copied = np.tile(0x8005 >> np.arange(16) & 1, 2).astype(bool)
    np.testing.assert_array_equal(data, np.where(copied, image[:32], before))


def test_copies_to_another_ctas_shared_memory():
    rig = Rig(ctas=2)
    image = _written(rig)
    rig.run(ACROSS, r0=1 << 24 | DATA + 64, r3=DATA, r2=256, r1=1 << 24 | BARRIER)
    there = rig.warp(rank=1)
    with pytest.raises(Race, match="mbarrier 0x400 of rank 1"):
        rig.read(DATA + 64, 256, there)
    with pytest.raises(Race, match="mbarrier 0x400 of rank 1"):
        rig.write(DATA, image)  # the source may be overwritten only after the barrier, too
    rig.wait_barrier(256, there, rank=1)
    np.testing.assert_array_equal(rig.read(DATA + 64, 256, there), image[:256])


def test_copies_to_the_same_ctas_shared_memory_are_excluded():
    rig = Rig()
    _written(rig)
    with pytest.raises(Finding, match="same CTA"):
        rig.run(ACROSS, r0=DATA + 512, r3=DATA, r2=256, r1=BARRIER)


def test_multicast_writes_every_cta_of_the_mask():
    data = aligned(64)
    rig = Rig(data, ctas=3)
    text = IN.replace("bytes ", "bytes.multicast::cluster ").replace("[%r1]", "[%r1], %h0")
    rig.run(text, r0=DATA, rd0=data.ctypes.data, r2=64, r1=BARRIER, h0=0b101)
    assert [rig.barrier(rank).tx for rank in range(3)] == [-64, 0, -64]
    for rank in (0, 2):
        np.testing.assert_array_equal(rig.cluster.ctas[rank].shared.data[DATA : DATA + 64], data)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rd0": 8}, "source of a bulk copy"),
        ({"r0": DATA + 8}, "destination of a bulk copy"),
        ({"r2": 24}, "24 bytes"),
    ],
)
def test_addresses_and_sizes_are_multiples_of_16(change, named):
    data = aligned(256)
    rig = Rig(data)
    values = {"r0": DATA, "rd0": 0, "r2": 64, "r1": BARRIER, **change}
    values["rd0"] += data.ctypes.data
    with pytest.raises(Misaligned, match=named):
        rig.run(IN, **values)


def test_read_only_buffers_are_not_written():
    data = aligned(64)
    rig = Rig(data)
    _written(rig)
    buffers = rig.cluster.memory.buffers
    object.__setattr__(buffers[0], "writable", False)
    with pytest.raises(OutOfBounds, match="read-only"):
        rig.run(OUT, r0=DATA, rd0=data.ctypes.data, r2=64)


# ------------------------------------------------------------------------------------- reductions


def test_reductions_into_global_memory():
    data = aligned(64).view(np.uint32)
    rig = Rig(data)
    image, before = _written(rig).view(np.uint32), data.copy()
    text = "cp.reduce.async.bulk.global.shared::cta.bulk_group.max.u32 [%rd0], [%r0], 64;"
    rig.run(text, r0=DATA, rd0=data.ctypes.data)
    np.testing.assert_array_equal(data, np.maximum(before, image[:16]))


def test_reductions_between_processes_are_unmodelled():
    data = aligned(64)
    rig = Rig(data)
    _written(rig)
    rig.cluster.memory.processes = True
    with pytest.raises(Unmodelled, match="workers=1"):
        rig.run(
            "cp.reduce.async.bulk.global.shared::cta.bulk_group.max.u32 [%rd0], [%r0], 64;",
            r0=DATA, rd0=data.ctypes.data,
        )  # fmt: skip


def test_reductions_by_several_threads_into_one_ctas_shared_memory():
    """They are atomic, so they may meet; what comes after needs their barrier."""
    rig = Rig(ctas=3)
    target = np.arange(16, dtype=np.uint32)
    there = rig.warp(rank=2)
    rig.write(DATA, target, there)
    there.fence_proxy_async()
    handed = there.release()
    text = ACROSS.replace("cp.", "cp.reduce.").replace("bytes ", "bytes.add.u32 ")
    for rank in (0, 1):
        w = rig.warp(rank=rank)
        w.acquire(handed)
        rig.write(DATA, np.full(16, 10**rank, np.uint32), w)
        w.fence_proxy_async()
        rig.run(text, w, r0=2 << 24 | DATA, r3=rank << 24 | DATA, r2=64, r1=2 << 24 | BARRIER)
    with pytest.raises(Race):
        rig.read(DATA, 64, there)
    rig.wait_barrier(128, there, rank=2)
    np.testing.assert_array_equal(rig.read(DATA, 64, there).view(np.uint32), target + 11)


@pytest.mark.parametrize(
    "text",
    [
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f16 [%rd0], [%r0], 64;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.f32 [%rd0], [%r0], 64;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.inc.s32 [%rd0], [%r0], 64;",
        "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.f32 "
        "[%r0], [%r3], 64, [%r1];",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.ignore_oob "
        "[%r0], [%rd0], 64, 4, 4, [%r1];",
        "cp.async.bulk.shared::cta.global.bulk_group [%r0], [%rd0], 64;",
        "cp.async.bulk.prefetch.L1.global [%rd0], 64;",
        "cp.async.bulk.wait_group %r0;",
        "cp.async.cg.shared.global [%r0], [%rd0], 8;",
        "cp.async.ca.shared.global.L3::64B [%r0], [%rd0], 8;",
        "cp.async.mbarrier.arrive.noinc.b64 [%rd0];",
    ],
)
def test_forms_that_are_not_modelled(text):
    with pytest.raises(Unmodelled, match="line 11"):
        Rig().run(text)


# ------------------------------------------------------------------------------------ bulk groups

# After two copies out of DATA and DATA + 64 in groups of their own: the wait, and which of the two
# places may then be written.
WAITS = [
    ([], (False, False)),
    ([WAIT_READ.format(n=2)], (False, False)),
    ([WAIT_READ.format(n=1)], (True, False)),
    ([WAIT_READ.format(n=0)], (True, True)),
    ([WAIT.format(n=1)], (True, False)),
    ([WAIT.format(n=0)], (True, True)),
]


@pytest.mark.parametrize("schedule", [RoundRobin, Late])
@pytest.mark.parametrize(("waits", "free"), WAITS)
def test_wait_group_frees_all_but_the_last_groups(waits, free, schedule):
    data = aligned(128)
    for place in (0, 1):
        rig = Rig(data, schedule=schedule())
        _written(rig)
        for i in (0, 1):
            rig.run(OUT, r0=DATA + 64 * i, rd0=data.ctypes.data + 64 * i, r2=64)
            rig.run(COMMIT)
        if waits:
            rig.run("\n".join(waits))
        if free[place]:
            rig.write(DATA + 64 * place, aligned(64, 8))
        else:
            with pytest.raises(Race, match="read by bulk copies of warp 0"):
                rig.write(DATA + 64 * place, aligned(64, 8))


def test_copies_that_are_not_committed_are_not_waited_for():
    data = aligned(64)
    rig = Rig(data)
    _written(rig)
    rig.run(OUT, r0=DATA, rd0=data.ctypes.data, r2=64)
    rig.run(WAIT.format(n=0))
    with pytest.raises(Race):
        rig.write(DATA, aligned(64))


def test_groups_are_the_threads_own():
    """A commit and a wait by another lane do nothing for lane 3's copy."""
    data = aligned(64)
    rig = Rig(data)
    _written(rig)
    rig.run(OUT, mask=1 << 3, r0=DATA, rd0=data.ctypes.data, r2=64)
    rig.run(COMMIT + WAIT.format(n=0), mask=1 << 4)
    with pytest.raises(Race, match="by lane 3"):
        rig.write(DATA, aligned(64))
    rig.run(COMMIT + WAIT.format(n=0), mask=1 << 3)
    rig.write(DATA, aligned(64))
    assert rig.warp().groups["bulk", 3].committed == 1


def test_another_warp_needs_the_waiting_warps_release():
    data = aligned(64)
    rig = Rig(data, warps=2)
    _written(rig)
    other = rig.warp(1)
    other.acquire(rig.warp().release())
    rig.run(OUT + COMMIT, r0=DATA, rd0=data.ctypes.data, r2=64)
    rig.run(WAIT_READ.format(n=0))
    with pytest.raises(Race, match="bulk copies of warp 0"):
        rig.write(DATA, aligned(64), other)
    other.acquire(rig.warp().release())
    rig.write(DATA, aligned(64), other)
    assert rig.shared[DATA] == aligned(64)[0]


def test_reads_are_over_before_writes():
    data = aligned(64)
    rig = Rig(data, schedule=Late())
    _written(rig)
    rig.run(OUT + COMMIT, r0=DATA, rd0=data.ctypes.data, r2=64)
    groups = rig.warp().groups["bulk", 0]
    assert (dict(groups.reading), dict(groups.writing)) == ({1: 1}, {1: 1})
    rig.run(WAIT_READ.format(n=0))
    assert (dict(groups.reading), dict(groups.writing)) == ({}, {1: 1})
    rig.run(WAIT.format(n=0))
    assert (dict(groups.reading), dict(groups.writing)) == ({}, {})


# --------------------------------------------------------------------------------------- cp.async

COPY = "cp.async.cg.shared.global [%r0], [%rd0], 16;"
LANES = np.arange(32)


def _lanes(data: np.ndarray, size: int = 16) -> dict[str, np.ndarray]:
    return {"r0": DATA + size * LANES, "rd0": data.ctypes.data + size * LANES}


@pytest.mark.parametrize("size", [4, 8, 16])
def test_src_size_fills_with_zeros(size):
    data = aligned(512)
    rig = Rig(data)
    used = LANES % (size + 1)
    values = _lanes(data, size) | {"r2": used}
    text = f"cp.async.ca.shared.global.L2::128B [%r0], [%rd0], {size}, %r2;"
    rig.run(text, mask=0xFFFFFFFF, **values)
    rig.run("cp.async.wait_all;", mask=0xFFFFFFFF)
    keep = np.arange(size) < used[:, None]
    want = np.where(keep, data[: 32 * size].reshape(32, size), 0)
    np.testing.assert_array_equal(rig.read(DATA, 32 * size).reshape(32, size), want)


def test_ignore_src_copies_zeros_and_touches_nothing():
    data = aligned(16)
    rig = Rig(data)
    rig.shared[DATA : DATA + 32] = 7
    text = "cp.async.cg.shared.global.L2::cache_hint [%r0], [%rd0], 16, %p1, %rd1;"
    values = _lanes(data) | {"p1": (LANES == 1).astype(int), "rd1": 0}
    rig.run(text, mask=3, **values)
    np.testing.assert_array_equal(rig.shared[DATA : DATA + 32], [*data, *[0] * 16])


def test_a_source_out_of_bounds_is_found_only_where_it_is_read():
    data = aligned(496)
    rig = Rig(data)
    text = "cp.async.cg.shared.global [%r0], [%rd0], 16, %r2;"
    rig.run(text, mask=0xFFFFFFFF, r2=np.where(LANES < 31, 16, 0), **_lanes(data))
    with pytest.raises(OutOfBounds, match="passed by 4 bytes"):
        rig.run(text, mask=0xFFFFFFFF, r2=np.where(LANES < 31, 16, 4), **_lanes(data))


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"r0": DATA + 8}, Misaligned, "16 bytes"),
        ({"rd0": 8}, Misaligned, "cp.async of 16 bytes"),
        ({"r2": 17}, Finding, "src-size 17"),
        ({"r0": 1 << 24 | DATA}, Finding, "rank 1"),
    ],
)
def test_faults_of_cp_async(change, error, named):
    data = aligned(64)
    rig = Rig(data, ctas=2)
    values = {"r0": DATA, "rd0": 0, "r2": 16, **change}
    values["rd0"] += data.ctypes.data
    with pytest.raises(error, match=named):
        rig.run("cp.async.cg.shared.global [%r0], [%rd0], 16, %r2;", **values)


@pytest.mark.parametrize("schedule", [RoundRobin, Late])
@pytest.mark.parametrize(
    ("waits", "seen"),
    [
        ("", (False, False)),
        ("cp.async.wait_group 2;", (False, False)),
        ("cp.async.wait_group 1;", (True, False)),
        ("cp.async.wait_group 0;", (True, True)),
        ("cp.async.wait_all;", (True, True)),
    ],
)
def test_cp_async_is_seen_after_its_group(waits, seen, schedule):
    data = aligned(1024)
    for place in (0, 1):
        rig = Rig(data, schedule=schedule())
        for i in (0, 1):
            values = {"r0": DATA + 512 * i + 16 * LANES, "rd0": data.ctypes.data + 16 * LANES}
            rig.run(COPY + "cp.async.commit_group;", mask=0xFFFFFFFF, **values)
        if waits:
            rig.run(waits, mask=0xFFFFFFFF)
        if seen[place]:
            np.testing.assert_array_equal(rig.read(DATA + 512 * place, 512), data[:512])
        else:
            with pytest.raises(Race, match=r"cp\.async copies of warp 0"):
                rig.read(DATA + 512 * place, 512)


def test_cp_async_that_is_not_committed_is_not_waited_for():
    data = aligned(512)
    rig = Rig(data)
    rig.run(COPY + "cp.async.wait_group 0;", mask=0xFFFFFFFF, **_lanes(data))
    with pytest.raises(Race):
        rig.read(DATA, 512)


def test_cp_async_needs_a_proxy_fence_before_asynchronous_reads():
    """It works in the generic proxy: waiting for it is not enough for a bulk copy out."""
    data = aligned(512)
    for fence in (True, False):
        rig = Rig(data)
        rig.run(COPY + "cp.async.wait_all;", mask=0xFFFFFFFF, **_lanes(data))
        if fence:
            rig.warp().fence_proxy_async()
            rig.run(OUT, r0=DATA, rd0=data.ctypes.data, r2=64)
            assert rig.warp().groups["bulk", 0].open == 1
        else:
            with pytest.raises(Race, match=r"cp\.async"):
                rig.run(OUT, r0=DATA, rd0=data.ctypes.data, r2=64)


@pytest.mark.parametrize("schedule", [RoundRobin, Late])
def test_an_mbarrier_waits_for_the_copies_before_it(schedule):
    data = aligned(1024)
    rig = Rig(data, schedule=schedule(), warps=2)
    cta, other = rig.warp().cta, rig.warp(1)
    cta.init_mbarrier(BARRIER + 8, 32)
    barrier = cta.mbarriers[BARRIER + 8]
    values = _lanes(data) | {"r1": BARRIER + 8}
    arrive = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];"
    later = COPY.replace("%r0", "%r0+512")
    rig.run(COPY + arrive + later, mask=0xFFFFFFFF, **values)
    while barrier.phase == 0:
        assert rig.cluster.pending.deliver_next()
    other.acquire(barrier.completed)
    np.testing.assert_array_equal(rig.read(DATA, 512, other), data[:512])
    with pytest.raises(Race, match=r"cp\.async"):
        rig.read(DATA + 512, 512, other)


def test_an_arrival_without_noinc_is_one_more_than_expected():
    rig = Rig(schedule=Late())
    barrier = rig.barrier()
    rig.run("cp.async.mbarrier.arrive.shared.b64 [%r1];", mask=0b111, r1=BARRIER)
    assert (barrier.pending, barrier.phase) == (4, 0)
    assert rig.cluster.pending.deliver_next()
    assert (barrier.pending, barrier.phase) == (1, 0)


def test_too_many_arrivals_are_misuse():
    rig = Rig()
    with pytest.raises(BarrierMisuse, match=r"cp\.async of warp 0"):
        rig.run("cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];", mask=0b11, r1=BARRIER)


def test_lanes_with_groups_of_their_own():
    data = aligned(512)
    rig = Rig(data)
    values = _lanes(data)
    rig.run(COPY + "cp.async.commit_group;", mask=1, **values)
    rig.run(COPY + "cp.async.commit_group;", mask=2, **values)
    rig.run("cp.async.wait_group 1;", mask=2)  # lane 1 has one group: nothing to wait for
    with pytest.raises(Race):
        rig.read(DATA, 16)
    rig.run("cp.async.wait_group 0;", mask=1)
    np.testing.assert_array_equal(rig.read(DATA, 16), data[:16])
    with pytest.raises(Race):
        rig.read(DATA + 16, 16)


def test_a_commit_that_leaves_out_lanes_with_copies_is_unmodelled():
    data = aligned(512)
    rig = Rig(data)
    rig.run(COPY, mask=3, **_lanes(data))
    with pytest.raises(Unmodelled, match="0x00000002"):
        rig.run("cp.async.commit_group;", mask=1)


# ------------------------------------------------------------------------------------ tensor maps

MAP = TensorMap(0x7000, "u8", (64, 8), (64,), (32, 4), (1, 1))


def test_replace_in_shared_and_global_memory():
    rig = Rig()
    rig.write(DATA, np.frombuffer(encode(MAP), np.uint8))
    rig.run(
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r0], %rd0;"
        "tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%r0], 1, %r1;"
        "tensormap.replace.tile.swizzle_mode.shared::cta.b1024.b32 [%r0], 3;",
        r0=DATA, rd0=0x9000, r1=5,
    )  # fmt: skip
    changed = decode(rig.shared[DATA : DATA + 128].tobytes())
    assert (changed.address, changed.dims, changed.swizzle) == (0x9000, (64, 5), "128B")


def test_a_map_made_in_shared_memory_is_used_from_global():
    data, where = aligned(512), aligned(128, None)
    rig = Rig(data, where)
    rig.write(DATA, np.frombuffer(encode(MAP), np.uint8))
    copy = (
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%rd1], [%r0], 128;"
    )
    rig.run(
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%r0], %rd0;",
        r0=DATA, rd0=data.ctypes.data,
    )  # fmt: skip
    rig.run(copy, mask=0xFFFFFFFF, r0=DATA, rd1=where.ctypes.data)
    rig.run(
        "fence.proxy.tensormap::generic.acquire.gpu [%rd1], 128;"
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[%r0], [%rd1, {%r1, %r1}], [%r2];",
        r0=DATA + 128, rd1=where.ctypes.data, r1=0, r2=BARRIER,
    )  # fmt: skip
    rig.wait_barrier(128)
    np.testing.assert_array_equal(rig.read(DATA + 128, 32), data[:32])


def test_prefetches_change_nothing_but_find_wrong_operands():
    data, where = aligned(512), aligned(128, None)
    where[:] = np.frombuffer(encode(MAP), np.uint8)
    rig = Rig(data, where)
    rig.run("prefetch.tensormap [%rd0];", rd0=where.ctypes.data)
    rig.run(
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd0, {%r0, %r0}];",
        rd0=where.ctypes.data, r0=0,
    )  # fmt: skip
    rig.run("cp.async.bulk.prefetch.L2.global [%rd0], 64;", rd0=data.ctypes.data)
    with pytest.raises(OutOfBounds):
        rig.run("prefetch.tensormap [%rd0];", rd0=64)
    with pytest.raises(Misaligned):
        rig.run("cp.async.bulk.prefetch.L2.global [%rd0], 24;", rd0=data.ctypes.data)


# ----------------------------------------------------------------------------------------- faults


def test_a_copy_out_of_what_nobody_wrote():
    data = aligned(64)
    with pytest.raises(Uninitialised, match="bulk copies of warp 0"):
        Rig(data).run(OUT, r0=DATA, rd0=data.ctypes.data, r2=64)


def test_waiting_for_more_bytes_than_come_is_a_deadlock():
    data = aligned(64)
    rig = Rig(data)
    rig.run(IN, r0=DATA, rd0=data.ctypes.data, r2=64, r1=BARRIER)
    with pytest.raises(Deadlock, match="lacks 16 bytes"):
        rig.wait_barrier(80)
