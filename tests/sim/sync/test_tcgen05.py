"""Truth tables of the tensor core's synchronisation, as `test_order.py` has them for the rest.

Two warps share one accumulator D, and A and B in shared memory (written, and visible to the tensor
core) or A in tensor memory. Each case is clean as written and a finding without any line marked
`!`.
"""

from __future__ import annotations

from functools import partial

import pytest

from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.errors import Deadlock, Finding, Race, Uninitialised
from flash_attn_fp8.sim.machine import Machine
from tests.sim.programs import aligned, run
from tests.sim.sync.truth import Case, arrive, check_clean, columns, needed, wait

# Tensor memory: D in columns 0-15, A in 16-23, the target of tcgen05.cp in 32-35. Shared memory:
# A (128 rows of 32 bytes, no swizzle) at the base, B (16 rows) at 4096. %r10-%r12: mbarriers.
_PROLOGUE = """
    .reg .b64 %da, %db, %dc;
    .reg .b32 %d, %ta, %tc, %idesc, %low;
    mov.u32 %r0, dynamic;
    add.u32 %r10, %r0, 8192;
    add.u32 %r11, %r0, 8200;
    add.u32 %r12, %r0, 8208;
    mov.u32 %r2, %tid.x;
    and.b32 %r3, %r2, 31;
    setp.eq.u32 %p1, %r3, 0;
    setp.ne.u32 %p4, %r2, 0;
    mov.u32 %r5, 0;
    mov.u32 %idesc, 0x08040490;
    shl.b32 %r6, %r2, 6;
    add.u32 %r6, %r6, %r0;
    st.shared.v4.b32 [%r6], {%r5, %r5, %r5, %r5};
    st.shared.v4.b32 [%r6+16], {%r5, %r5, %r5, %r5};
    st.shared.v4.b32 [%r6+32], {%r5, %r5, %r5, %r5};
    st.shared.v4.b32 [%r6+48], {%r5, %r5, %r5, %r5};
    shl.b32 %r7, %r2, 4;
    add.u32 %r7, %r7, %r0;
    st.shared.v4.b32 [%r7+4096], {%r5, %r5, %r5, %r5};
    fence.proxy.async;
    @%p4 bra READY;
    mbarrier.init.shared.b64 [%r10], 1;
    mbarrier.init.shared.b64 [%r11], 1;
    mbarrier.init.shared.b64 [%r12], 1;
    fence.mbarrier_init.release.cluster;
READY:
    setp.ge.u32 %p3, %r2, 32;
    @%p3 bra BEGIN;
    add.u32 %r7, %r0, 8224;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r7], 64;
BEGIN:
    bar.sync 0;
    ld.shared.b32 %d, [%r0+8224];
    shr.u32 %low, %r0, 4;
    or.b32 %low, %low, 0x80000;
    mov.b64 %da, {%low, 0x00004010};
    add.u32 %r8, %low, 256;
    mov.b64 %db, {%r8, 0x00004010};
    add.u32 %ta, %d, 16;
    add.u32 %tc, %d, 32;
    and.b32 %r9, %r2, 96;
    shl.b32 %r9, %r9, 16;
    add.u32 %r13, %d, %r9;
    setp.ge.u32 %p3, %r2, 32;
    @%p3 bra SECOND;
"""

KIND = "tcgen05.mma.cta_group::1.kind::f16"
MMA = f"@%p1 {KIND} [%d], %da, %db, %idesc, 0;"
MMA_A = f"@%p1 {KIND} [%d], [%ta], %db, %idesc, 0;"  # A in tensor memory
CP = "@%p1 tcgen05.cp.cta_group::1.128x128b [%tc], %da;"
CP_TO_A = "@%p1 tcgen05.cp.cta_group::1.128x256b [%ta], %da;"
WAIT_LD = "tcgen05.wait::ld.sync.aligned;"
START_LD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%r13];"
LD = f"{START_LD} {WAIT_LD}"
LD_CP = f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r21}}, [%r13+32]; {WAIT_LD}"
USE = "add.u32 %r22, %r20, 1;"
ST = "tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13+16], {%r5, %r5, %r5, %r5, %r5, %r5, %r5, %r5};"
ST_D = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r13], {%r5};"
WAIT_ST = "tcgen05.wait::st.sync.aligned;"
STORE_A = "@%p1 st.shared.v4.b32 [%r0], {%r5, %r5, %r5, %r5};"
FENCE = "fence.proxy.async.shared::cta;"
COMMIT_KIND = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64"


def commit(barrier: int) -> str:
    return f"@%p1 {COMMIT_KIND} [%r{barrier}];"


CASES: dict[str, Case] = {
    "MMA, commit, wait, load": ([MMA, "!" + commit(10)], ["!" + wait(10), LD]),
    "MMA, commit, wait, load by the feeder": ([MMA, commit(10), "!" + wait(10), LD], []),
    "MMA, commit, wait, arrive, load by a third": (
        [MMA, commit(10), "!" + wait(10), arrive(11), wait(12)],
        ["!" + wait(11), LD, arrive(12)],
    ),
    "a commit covers all before it": ([MMA, MMA, "!" + commit(10)], ["!" + wait(10), LD]),
    "MMAs and copies are in order": ([CP_TO_A, MMA_A, MMA, commit(10)], ["!" + wait(10), LD]),
    "copy, commit, wait, load": ([CP, "!" + commit(10)], ["!" + wait(10), LD_CP]),
    "load, wait::ld, arrive, MMA over it": (
        [MMA, commit(10), "!" + wait(11), MMA, commit(12), wait(12)],
        [wait(10), START_LD, "!" + WAIT_LD, "!" + arrive(11)],
    ),
    "load, use, arrive, MMA over it": (
        [MMA, commit(10), "!" + wait(11), MMA, commit(12), wait(12)],
        [wait(10), START_LD, "!" + USE, "!" + arrive(11)],
    ),
    "store, wait::st, load by the same warp": ([ST_D, "!" + WAIT_ST, LD], []),
    "load, wait::ld, store over it by the same warp": (
        [ST_D, "!" + WAIT_ST, START_LD, "!" + WAIT_LD, ST_D, WAIT_ST],
        [],
    ),
    "load, use, store over it by the same warp": (
        [ST_D, WAIT_ST, START_LD, "!" + USE, ST_D, WAIT_ST],
        [],
    ),
    "store, wait::st, arrive, MMA reads it": (
        [CP_TO_A, commit(10), "!" + wait(11), MMA_A, commit(12), wait(12)],
        ["!" + wait(10), ST, "!" + WAIT_ST, "!" + arrive(11)],
    ),
    "MMA reads A, commit, wait, store over it": (
        [CP_TO_A, MMA_A, "!" + commit(10), wait(11)],
        ["!" + wait(10), ST, WAIT_ST, arrive(11)],
    ),
    "store to D, wait::st, arrive, MMA over it": (
        [MMA, commit(10), "!" + wait(11), MMA, commit(12), wait(12)],
        ["!" + wait(10), ST_D, "!" + WAIT_ST, "!" + arrive(11)],
    ),
    "threads store an operand": (
        ["!" + wait(10), MMA, commit(11), wait(11)],
        [STORE_A, "!" + FENCE, "!" + arrive(10)],
    ),
    "threads store an operand, fence at the feeder": (
        ["!" + wait(10), "!" + FENCE, MMA, commit(11), wait(11)],
        [STORE_A, "!" + arrive(10)],
    ),
    "MMA, commit, wait, threads store over an operand": (
        [MMA, "!" + commit(10)],
        ["!" + wait(10), STORE_A],
    ),
    "copy, commit, wait, threads store over its source": (
        [CP, "!" + commit(10)],
        ["!" + wait(10), STORE_A],
    ),
}

_EPILOGUE = """
END:
    bar.sync 0;
    @%p3 bra LAST;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %d, 64;
LAST:
"""


def _text(case: Case, without: int | None = None) -> str:
    return _PROLOGUE + columns(case, without) + _EPILOGUE


def _run(text: str, machine: Machine | None = None) -> Run:
    return run(text, aligned((16,), "u4"), warps=2, machine=machine)


@pytest.mark.parametrize("name", CASES)
def test_the_right_waits_are_clean(name):
    check_clean(partial(_run, _text(CASES[name])))


@pytest.mark.parametrize(("name", "line", "left_out"), needed(CASES))
def test_without_it_there_is_a_finding(name, line, left_out):
    """Under round robin, whatever the numbers come out as."""
    with pytest.raises((Race, Uninitialised, Deadlock)):
        _run(_text(CASES[name], line))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([commit(10), MMA], [wait(10), LD]),  # committed before
        ([MMA, arrive(10)], [wait(10), LD]),  # an arrival is no commit
        ([MMA, commit(10), MMA], [wait(10), LD]),  # the second is not committed
        ([MMA, commit(10)], [wait(10, 1), LD]),  # the wrong phase
    ],
)
def test_the_wrong_commit_or_wait_is_a_finding(first, second):
    with pytest.raises(Finding) as e:
        _run(_text((first, second)))
    assert "tensor" in str(e.value) or "phase" in str(e.value)
