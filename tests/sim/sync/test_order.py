"""Truth tables of synchronisation: exactly the right waits are clean.

Two warps share one 16-byte place of shared memory (at SLOT). Warp 0 runs the first column, warp 1
the second; both may be in several pieces. Every case is run as written, where it must be clean, and
once for each line marked `!`, with that line left out, where it must be a race (or, where the
marked line is an arrival, a deadlock). Round robin alone must find it: the finding does not depend
on the schedule.
"""

from __future__ import annotations

from functools import partial

import pytest

from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.errors import BarrierMisuse, Deadlock, Race, Uninitialised
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.schedule import Adversarial
from tests.sim.programs import aligned, run
from tests.sim.sync.truth import Case, arrive, check_clean, columns, needed, wait

# %r0: SLOT, %r1: a second place, %r10-%r12: mbarriers (count 1), %p1: the warp's first lane.
_PROLOGUE = """
    mov.u32 %r0, dynamic;
    add.u32 %r1, %r0, 4096;
    add.u32 %r10, %r0, 8192;
    add.u32 %r11, %r0, 8200;
    add.u32 %r12, %r0, 8208;
    mov.u32 %r2, %tid.x;
    and.b32 %r3, %r2, 31;
    setp.eq.u32 %p1, %r3, 0;
    ld.param.u64 %rd0, [a0];
    setp.eq.u32 %p2, %r2, 0;
    mov.u32 %r5, 7;
    @!%p2 bra BEGIN;
    mbarrier.init.shared.b64 [%r10], 1;
    mbarrier.init.shared.b64 [%r11], 1;
    mbarrier.init.shared.b64 [%r12], 1;
    st.shared.v4.b32 [%r1], {%r5, %r5, %r5, %r5};
    fence.proxy.async;
BEGIN:
    bar.sync 0;
    setp.ge.u32 %p3, %r2, 32;
    @%p3 bra SECOND;
"""

STORE = "@%p1 st.shared.v4.b32 [%r0], {%r5, %r5, %r5, %r5};"
LOAD = "@%p1 ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r0];"
FENCE = "fence.proxy.async.shared::cta;"
COPY_IN = (
    "@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%r0], [%rd0], 16, [%r10];"
)
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 16;"
COPY_OUT = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd0], [%r0], 16;"
COMMIT = "cp.async.bulk.commit_group;"
AMPERE_COPY = "@%p1 cp.async.cg.shared.global [%r0], [%rd0], 16;"


# name: (warp 0, warp 1); "!" marks what the case cannot do without.
CASES: dict[str, Case] = {
    "store, barrier, load": ([STORE, "!bar.sync 1, 64;"], ["!bar.sync 1, 64;", LOAD]),
    "store, arrive at a barrier, load": ([STORE, "bar.arrive 1, 64;"], ["!bar.sync 1, 64;", LOAD]),
    "store, mbarrier, load": ([STORE, arrive(10)], ["!" + wait(10), LOAD]),
    "load, mbarrier, store": (
        [STORE, LOAD, arrive(10)],
        ["!" + wait(10), STORE],
    ),
    "bulk copy in, load by another warp": ([EXPECT, COPY_IN], ["!" + wait(10), LOAD]),
    "bulk copy in, load by the same warp": ([EXPECT, COPY_IN, "!" + wait(10), LOAD], []),
    "load, mbarrier, bulk copy over it": (
        ["!" + wait(11), EXPECT, COPY_IN, "!" + wait(10)],  # the latter before it exits
        [STORE, FENCE, LOAD, arrive(11)],
    ),
    "store, fence, bulk copy over it": ([STORE, "!" + FENCE, EXPECT, COPY_IN, wait(10)], []),
    "store, fence, mbarrier, bulk copy out": (
        [STORE, "!" + FENCE, arrive(10)],
        ["!" + wait(10), COPY_OUT, COMMIT, "cp.async.bulk.wait_group 0;"],
    ),
    "store, mbarrier, fence at the reader, bulk copy out": (
        [STORE, arrive(10)],
        [wait(10), "!" + FENCE, COPY_OUT, COMMIT, "cp.async.bulk.wait_group 0;"],
    ),
    "bulk copy out, wait for its reads, store": (
        [STORE, FENCE, COPY_OUT, COMMIT, "!cp.async.bulk.wait_group.read 0;", STORE],
        [],
    ),
    "bulk copy in, mbarrier, bulk copy out needs no fence": (
        [EXPECT, COPY_IN],
        ["!" + wait(10), COPY_OUT, COMMIT, "cp.async.bulk.wait_group 0;"],
    ),
    "cp.async, wait, barrier, load": (
        [AMPERE_COPY, "cp.async.commit_group;", "!cp.async.wait_group 0;", "bar.sync 1, 64;"],
        ["bar.sync 1, 64;", LOAD],
    ),
    "order goes on through a third party": (
        [STORE, arrive(10), "!" + wait(11), STORE],
        [wait(10), LOAD, arrive(11)],
    ),
}


def _text(warp0: list[str], warp1: list[str], without: int | None = None) -> str:
    return _PROLOGUE + columns((warp0, warp1), without) + "\nEND:\n"


def _run(text: str, machine: Machine | None = None) -> Run:
    return run(text, aligned((64,), "u4"), warps=2, machine=machine)


@pytest.mark.parametrize("name", CASES)
def test_the_right_waits_are_clean(name: str) -> None:
    check_clean(partial(_run, _text(*CASES[name])))


@pytest.mark.parametrize(("name", "line", "left_out"), needed(CASES))
def test_without_a_wait_it_is_a_finding(name: str, line: int, left_out: str) -> None:
    """Whatever the numbers come out as: the missing order is reported."""
    with pytest.raises((Race, Uninitialised, Deadlock)):
        _run(_text(*CASES[name], line))


def test_relaxed_arrivals_hand_nothing_on() -> None:
    relaxed = "@%p1 mbarrier.arrive.relaxed.cta.shared.b64 _, [%r10];"
    with pytest.raises(Race):
        _run(_text([STORE, relaxed], [wait(10), LOAD]))


def test_a_copy_comes_after_the_waits_before_it() -> None:
    """In a pair of CTAs, bytes alone tell that the second one has waited for its buffer."""
    consumer = [EXPECT, wait(10), LOAD, arrive(11)]
    _run(_text([wait(11, 1), COPY_IN], consumer))
    with pytest.raises((BarrierMisuse, Deadlock)):
        _run(_text([COPY_IN, wait(11, 1)], consumer))


def test_a_flipped_phase_is_a_finding() -> None:
    """Before the copy it passes at once and orders nothing; after it, it never passes."""
    kinds = set()
    for seed in range(8):
        machine = Machine(schedule=lambda s=seed: Adversarial(s))
        text = _text([EXPECT, COPY_IN], [wait(10, 1), LOAD])
        with pytest.raises((Race, Uninitialised, Deadlock)) as e:
            _run(text, machine)
        kinds.add(e.type)
    assert Deadlock in kinds
    assert kinds & {Race, Uninitialised}


@pytest.mark.parametrize("nbytes", [15, 17, 32])
def test_expecting_other_bytes_than_arrive_is_a_deadlock_that_says_so(nbytes: int) -> None:
    expect = EXPECT.replace("16;", f"{nbytes};")
    with pytest.raises(Deadlock, match=rf"{nbytes - 16} bytes"):
        _run(_text([expect, COPY_IN], [wait(10), LOAD]))


def test_expecting_no_bytes_is_a_race() -> None:
    """The phase ends without the copy, which may still be under way."""
    machine = Machine(schedule=lambda: Adversarial(0))
    text = _text([EXPECT.replace("16;", "0;"), COPY_IN], [wait(10), LOAD])
    with pytest.raises((Race, Uninitialised)):
        _run(text, machine)


def test_a_deadlock_names_waiter_barrier_and_what_is_missing() -> None:
    with pytest.raises(Deadlock) as e:
        _run(_text([], [wait(12)]))
    text = str(e.value)
    for part in ("warp 1", "mbarrier 0x2410", "1 of 1 arrivals", "mbarrier.try_wait"):
        assert part in text
