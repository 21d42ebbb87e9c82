"""`tcgen05.commit`: whom it tells, when, and what may rely on it."""

from __future__ import annotations

import numpy as np
import pytest

from flash_attn_fp8.sim.errors import BarrierMisuse, OutOfBounds, Race
from flash_attn_fp8.sim.isa.tcgen05 import MmaForm, MmaOperands, commit, mma
from flash_attn_fp8.sim.isa.tcgen05_copy import fragment, load
from flash_attn_fp8.sim.memory import SHARED_RESERVED
from flash_attn_fp8.sim.schedule import NEVER, RoundRobin
from flash_attn_fp8.sim.state import Cluster, Cta, Warp
from tests.sim.tensor.build import allocate_all, cluster, descriptor_sm100, fill_shared
from tests.sim.tensor.test_mma import idesc

BARRIER, SECOND = 2048, 2056
A, B = 0x2000, 0x6000
WORD = fragment("32x32b", 1, False)


class Late(RoundRobin):
    """Nothing completes before it must."""

    def delay(self) -> int:
        return NEVER


def made(ctas: int = 1, schedule: RoundRobin | None = None) -> Cluster:
    found = cluster(ctas, warps=8, schedule=schedule)
    for cta in found.ctas:
        fill_shared(cta, np.zeros(100_000 - SHARED_RESERVED, np.uint8))
        allocate_all(cta)
        cta.init_mbarrier(BARRIER, 1)
        cta.init_mbarrier(SECOND, 1)
    return found


def multiply(w: Warp, ctas: int = 1, accumulate: bool = False) -> None:
    a, b = (descriptor_sm100(at, 16, 1024, "128") for at in (A, B))
    descriptor = idesc(128 * ctas, 32, "e4m3", "e4m3")
    mma(w, MmaForm("f8f6f4", ctas, False), MmaOperands(0, a, b, descriptor, accumulate))


def wait(w: Warp, cta: Cta, barrier: int = BARRIER) -> None:
    """What `mbarrier.try_wait` does once the phase is over."""
    assert cta.mbarriers[barrier].phase > 0
    w.acquire(cta.mbarriers[barrier].completed)


@pytest.mark.parametrize("waits", [True, False])
def test_accumulators_are_read_after_the_wait(waits):
    cta = made().ctas[0]
    feeder, reader = cta.warps[4], cta.warps[0]
    multiply(feeder)
    commit(feeder, BARRIER, None)
    if waits:
        wait(reader, cta)
        load(reader, [0], 3, WORD)
        assert not reader.registers[0].any()
    else:
        with pytest.raises(Race, match="written by the tensor core operations of warp 4"):
            load(reader, [0], 3, WORD)


def test_the_feeder_itself_must_wait():
    cta = made().ctas[0]
    feeder = cta.warps[4]
    multiply(feeder)
    with pytest.raises(Race, match="tensor core operations of warp 4"):
        load(feeder, [0], 3, WORD)


def test_a_commit_covers_only_what_came_before_it():
    cta = made().ctas[0]
    feeder, reader = cta.warps[4], cta.warps[0]
    multiply(feeder)
    commit(feeder, BARRIER, None)
    multiply(feeder, accumulate=True)
    wait(reader, cta)
    with pytest.raises(Race, match="its operation 2; observed up to 1"):
        load(reader, [0], 3, WORD)


@pytest.mark.parametrize("arrives", [True, False])
def test_the_next_mma_overwrites_what_has_been_read(arrives):
    cta = made().ctas[0]
    feeder, reader = cta.warps[4], cta.warps[0]
    multiply(feeder)
    commit(feeder, BARRIER, None)
    wait(reader, cta)
    load(reader, [0], 3, WORD)
    if arrives:
        feeder.acquire(reader.release())
        multiply(feeder)
        assert feeder.sequence["mma"] == 2
    else:
        with pytest.raises(Race, match="it was read by warp 0"):
            multiply(feeder)


def stored(w: Warp, fenced: bool) -> None:
    rows = np.arange(A, A + 128 * 128, 16)
    w.cta.shared.write(rows, np.zeros((rows.size, 16), np.uint8), w.access())
    if fenced:
        w.fence_proxy_async()


@pytest.mark.parametrize("fenced", ["writer", "feeder", None])
def test_operands_stored_by_threads_need_a_proxy_fence(fenced):
    cta = made().ctas[0]
    writer, feeder = cta.warps[:2]
    stored(writer, fenced == "writer")
    feeder.acquire(writer.release())
    if fenced == "feeder":
        feeder.fence_proxy_async()
    if fenced:
        multiply(feeder)
        assert feeder.sequence["mma"] == 1
    else:
        with pytest.raises(Race, match="was written by warp 0"):
            multiply(feeder)


@pytest.mark.parametrize("waits", [True, False])
def test_a_committed_buffer_may_be_filled_again(waits):
    """Whoever hears of the commit knows of the reads, and of the copy that filled the buffer."""
    cta = made().ctas[0]
    feeder, writer = cta.warps[:2]
    copied = cta.mbarriers[SECOND]
    rows = np.arange(A, A + 128 * 128, 16)
    data = np.zeros((rows.size, 16), np.uint8)
    cta.shared.write(rows, data, writer.async_access(copied.actor, copied.stamp()))
    copied.complete_tx(0, copied.stamp(), "copy")
    copied.arrive(1, None, "copy")
    wait(feeder, cta, SECOND)
    multiply(feeder)
    commit(feeder, BARRIER, None)
    if waits:
        wait(writer, cta)
        cta.shared.write(rows, data, writer.async_access(copied.actor, copied.stamp()))
        assert copied.stamp() == 2
    else:
        with pytest.raises(Race):
            cta.shared.write(rows, data, writer.async_access(copied.actor, copied.stamp()))


def test_completion_may_be_late_but_keeps_its_order():
    found = made(schedule=Late())
    cta = found.ctas[0]
    multiply(cta.warps[4])
    commit(cta.warps[4], BARRIER, None)
    multiply(cta.warps[4])
    commit(cta.warps[4], SECOND, None)
    assert cta.mbarriers[BARRIER].phase == 0
    order = []
    while found.pending.deliver_next():
        order.append((cta.mbarriers[BARRIER].phase, cta.mbarriers[SECOND].phase))
    assert order[-1] == (1, 1)
    assert (0, 1) not in order


@pytest.mark.parametrize("mask", [1, 2, 3])
def test_multicast_tells_the_ctas_of_the_mask(mask):
    found = made(2)
    feeder = found.ctas[0].warps[4]
    multiply(feeder, ctas=2)
    commit(feeder, found.ctas[1].base + BARRIER, mask)
    assert [cta.mbarriers[BARRIER].phase for cta in found.ctas] == [mask & 1, mask >> 1]
    for cta in found.ctas:
        if cta.mbarriers[BARRIER].phase:
            wait(cta.warps[0], cta)
            load(cta.warps[0], [0], 0, WORD)  # both CTAs' accumulators are written
        else:
            with pytest.raises(Race):
                load(cta.warps[0], [0], 0, WORD)


def test_commits_that_go_nowhere():
    found = made()
    with pytest.raises(BarrierMisuse, match="no mbarrier is initialised"):
        commit(found.ctas[0].warps[0], 4096, None)
    with pytest.raises(OutOfBounds, match="CTAs 0x2 of a cluster of 1"):
        commit(found.ctas[0].warps[0], BARRIER, 2)
