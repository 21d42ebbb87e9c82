"""Whole PTX programs around one copy each, run by the machine under several schedules."""

from __future__ import annotations

import re

import numpy as np
import pytest

from flash_attn_fp8.sim.errors import Deadlock, Race
from flash_attn_fp8.sim.launch import Launch
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.schedule import Adversarial, Random, RoundRobin
from flash_attn_fp8.sim.tensormap import TensorMap, encode
from tests.sim.programs import buffer
from tests.sim.tma import model
from tests.sim.tma.rig import aligned

_MODULE = """
.version 8.8
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
.visible .entry kernel(.param .align 64 .b8 source[128], .param .align 64 .b8 target[128])
.reqntid {threads}, 1, 1
{{
    .reg .pred %p<8>;
    .reg .b16 %h<4>;
    .reg .b32 %r<64>;
    .reg .b64 %rd<16>;
    mov.b64 %rd0, source;
    cvta.param.u64 %rd0, %rd0;
    mov.b64 %rd1, target;
    cvta.param.u64 %rd1, %rd1;
    mov.u32 %r0, dynamic;
    add.u32 %r1, %r0, 32768;
    mov.u32 %r2, %tid.x;
    mov.u32 %r3, %cluster_ctarank;
    setp.eq.u32 %p0, %r2, 0;
    @%p0 mbarrier.init.shared.b64 [%r1], {count};
    @%p0 mbarrier.init.shared.b64 [%r1+8], 1;
    @%p0 fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive;
    barrier.cluster.wait;
{body}
    barrier.cluster.arrive;
    barrier.cluster.wait;
    ret;
}}
"""

_SCHEDULES = [
    RoundRobin,
    *(lambda s=s: Random(s) for s in range(4)),
    *(lambda s=s: Adversarial(s) for s in range(4)),
]


def _wait(barrier: str, parity: int = 0) -> str:
    return (
        f"{{ .reg .pred q; AGAIN: mbarrier.try_wait.parity.shared.b64 q, [{barrier}], {parity}; "
        f"@!q bra AGAIN; }}"
    )


def _run(
    body: str,
    source: tuple[TensorMap, np.ndarray],
    target: tuple[TensorMap, np.ndarray],
    schedule=RoundRobin,
    ctas: int = 1,
    warps: int = 1,
    count: int = 1,
) -> None:
    text = _MODULE.format(body=body, threads=32 * warps, count=count)
    launch = Launch(
        grid=(ctas, 1, 1),
        block=(32 * warps, 1, 1),
        cluster=(ctas, 1, 1),
        dynamic_smem=40960,
        params=(encode(source[0]), encode(target[0])),
        buffers=(buffer("source", source[1], writable=False), buffer("target", target[1])),
    )
    Machine(schedule=schedule).launch(parse(text), "kernel", launch)


def _tensor(box: tuple[int, int], seed: int | None, swizzle: str = "128B", dims=(64, 48)):
    data = aligned(128 * dims[1], seed)
    m = TensorMap(data.ctypes.data, "bf16", dims, (128,), box, (1, 1), swizzle=swizzle)
    return m, data


LOAD = (
    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
    "[%r0], [%rd0, {%r10, %r11}], [%r1];"
)
STORE = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r10, %r11}], [%r0];"

# A box in and out again, twice, so that the buffer is reused. `!` marks the waits and fences.
ROUND_TRIPS = f"""
    mov.u32 %r10, 0;
    @%p0 prefetch.tensormap [%rd0];
    @!%p0 bra DONE;
    mov.u32 %r11, 0;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 2048;
    {LOAD}
    !{_wait("%r1")}
    {STORE}
    cp.async.bulk.commit_group;
    !cp.async.bulk.wait_group.read 0;
    mov.u32 %r11, 16;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 2048;
    {LOAD}
    !{_wait("%r1", 1).replace("AGAIN", "SECOND")}
    {STORE}
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
"""


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_boxes_go_in_and_out(schedule):
    source, target = _tensor((64, 16), 1), _tensor((64, 16), None)
    _run(ROUND_TRIPS.replace("!{", "{").replace("!cp", "cp"), source, target, schedule)
    np.testing.assert_array_equal(target[1][: 32 * 128], source[1][: 32 * 128])
    assert not target[1][32 * 128 :].any()


@pytest.mark.parametrize("left_out", range(3))
def test_a_missing_wait_is_a_race(left_out):
    lines = ROUND_TRIPS.splitlines()
    marked = [i for i, line in enumerate(lines) if line.strip().startswith("!")]
    del lines[marked[left_out]]
    body = re.sub(r"^(\s*)!", r"\1", "\n".join(lines), flags=re.M)
    with pytest.raises(Race):
        _run(body, _tensor((64, 16), 1), _tensor((64, 16), None))


def test_a_swizzle_is_what_the_tensor_core_will_see():
    """In with a swizzle, out without: the target shows shared memory as it lies."""
    source, target = _tensor((64, 16), 1), _tensor((64, 16), None, swizzle="none")
    _run(ROUND_TRIPS.replace("!{", "{").replace("!cp", "cp"), source, target)
    image = np.zeros(1 << 16, np.uint8)
    model.load(source[0], source[1], (0, 0), image, 2048)
    np.testing.assert_array_equal(target[1][:2048], image[2048:4096])


@pytest.mark.parametrize("expected", [2032, 2064])
def test_other_bytes_than_the_box_has_are_a_deadlock(expected):
    body = ROUND_TRIPS.replace("!{", "{").replace("!cp", "cp").replace("2048", str(expected), 1)
    with pytest.raises(Deadlock, match="bytes"):
        _run(body, _tensor((64, 16), 1), _tensor((64, 16), None))


# Each CTA loads half of a box into both; each waits for all of it and stores it at its own place.
MULTICAST = """
    mov.u32 %r10, 0;
    @!%p0 bra DONE;
    shl.b32 %r11, %r3, 3;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 2048;
    shl.b32 %r4, %r3, 10;
    add.u32 %r5, %r0, %r4;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes\
.multicast::cluster [%r5], [%rd0, {%r10, %r11}], [%r1], 3;
    WAIT
    shl.b32 %r11, %r3, 4;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r10, %r11}], [%r0];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
""".replace("WAIT", _wait("%r1"))


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_multicast_to_two_ctas(schedule):
    source, target = _tensor((64, 8), 1), _tensor((64, 16), None)
    _run(MULTICAST, source, target, schedule, ctas=2)
    for half in (0, 2048):
        np.testing.assert_array_equal(target[1][half : half + 2048], source[1][:2048])


# Rank 1's copy completes on rank 0's mbarrier, as 2-CTA GEMMs do; rank 0 tells rank 1.
PEER = """
    mov.u32 %r10, 0;
    mov.u32 %r11, 0;
    and.b32 %r6, %r1, 0xFEFFFFFF;
    @!%p0 bra DONE;
    setp.eq.u32 %p1, %r3, 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 4096;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes\
.cta_group::2 [%r0], [%rd0, {%r10, %r11}], [%r6];
    @!%p1 bra DONE;
    WAIT
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r10, %r11}], [%r0];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
""".replace("WAIT", _wait("%r1"))


@pytest.mark.parametrize("schedule", _SCHEDULES[:3])
def test_a_pair_of_ctas_shares_an_mbarrier(schedule):
    source, target = _tensor((64, 16), 1), _tensor((64, 16), None)
    _run(PEER, source, target, schedule, ctas=2)
    np.testing.assert_array_equal(target[1][:2048], source[1][:2048])


# cp.async by a producer warp, on an mbarrier of 32 arrivals; a consumer warp stores what it got.
AMPERE = """
    mov.b64 %rd3, source;
    ld.param.u64 %rd3, [source];
    mov.u32 %r10, 0;
    mov.u32 %r11, 0;
    setp.lt.u32 %p1, %r2, 32;
    @!%p1 bra CONSUMER;
    shl.b32 %r4, %r2, 4;
    cvt.u64.u32 %rd4, %r4;
    add.u64 %rd3, %rd3, %rd4;
    add.u32 %r5, %r0, %r4;
    mov.u32 %r6, 0;
COPY:
    cp.async.cg.shared.global [%r5], [%rd3], 16, 16;
    add.u64 %rd3, %rd3, 512;
    add.u32 %r5, %r5, 512;
    add.u32 %r6, %r6, 1;
    setp.lt.u32 %p2, %r6, 4;
    @%p2 bra COPY;
    cp.async.mbarrier.arrive.noinc.shared.b64 [%r1];
    bra DONE;
CONSUMER:
    setp.eq.u32 %p3, %r2, 32;
    @!%p3 bra DONE;
    WAIT
    fence.proxy.async.shared::cta;
    cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%rd1, {%r10, %r11}], [%r0];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group 0;
DONE:
""".replace("WAIT", _wait("%r1"))


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_cp_async_by_one_warp_for_another(schedule):
    source, target = _tensor((64, 16), 1), _tensor((64, 16), None, swizzle="none")
    _run(AMPERE, source, target, schedule, warps=2, count=32)
    np.testing.assert_array_equal(target[1][:2048], source[1][:2048])


@pytest.mark.parametrize("line", ["fence.proxy.async.shared::cta;", _wait("%r1")])
def test_what_cp_async_needs_before_a_bulk_copy(line):
    with pytest.raises(Race, match=r"cp\.async copies of warp 0"):
        _run(
            AMPERE.replace(line, ""),
            _tensor((64, 16), 1),
            _tensor((64, 16), None),
            warps=2,
            count=32,
        )


def test_a_reduction_by_every_cta():
    """Each CTA adds the same box to the target."""
    body = MULTICAST.replace(
        "cp.async.bulk.tensor.2d.global.shared::cta.tile",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile",
    ).replace("shl.b32 %r11, %r3, 4;", "mov.u32 %r11, 0;")
    source, target = _tensor((64, 8), None), _tensor((64, 16), None)
    ones = source[1].view(np.uint16)
    ones[:] = 0x3F80
    target[1].view(np.uint16)[:] = 0x4000
    _run(body, source, target, ctas=2)
    got = target[1].view(np.uint16)
    assert set(got[: 16 * 64].tolist()) == {0x4080}
    assert set(got[16 * 64 :].tolist()) == {0x4000}
