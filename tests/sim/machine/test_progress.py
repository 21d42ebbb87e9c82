"""Who waits for whom: warps that have exited, warps that poll, and polling in vain."""

import numpy as np
import pytest

from flash_attn_fp8.sim.errors import Deadlock
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.schedule import Adversarial, Random, RoundRobin
from tests.sim.programs import aligned, run

_START = "ld.param.u64 %rd0, [a0];\nmov.u32 %r0, %tid.x;\nmov.u32 %r1, dynamic;\n"
_SCHEDULES = [RoundRobin, lambda: Random(3), lambda: Adversarial(3)]
_LATER_EXIT = "setp.ge.u32 %p0, %r0, 32;\n@%p0 bra SLOW;\n{barrier}\nbra END;\nSLOW: {before}\nEND:"


@pytest.mark.parametrize("schedule", _SCHEDULES)
@pytest.mark.parametrize("before", ["ret;", "barrier.cluster.arrive; ret;", "bar.sync 1, 64; ret;"])
def test_barriers_of_everyone_do_not_wait_for_the_exited(schedule, before):
    """CTA and cluster barriers; the other warps exit before, having arrived, or late."""
    a = aligned((2,), np.uint32)
    body = _START + _LATER_EXIT.format(
        before=before,
        barrier=("bar.sync 1, 64;" if "64" in before else "")
        + "bar.sync 0; barrier.cluster.arrive; barrier.cluster.wait; bar.sync 0;"
        "mov.u32 %r2, %cluster_ctarank; mul.wide.u32 %rd1, %r2, 4; add.u64 %rd0, %rd0, %rd1;"
        "st.global.u32 [%rd0], 1;",
    )
    run(body, a, warps=2, grid=2, cluster=2, machine=Machine(schedule=schedule))
    assert a.tolist() == [1, 1]


def test_a_named_barrier_does_wait_for_its_number():
    a = aligned((1,), np.uint32)
    with pytest.raises(Deadlock, match="32 of 64"):
        run(_START + _LATER_EXIT.format(before="ret;", barrier="bar.sync 1, 64;"), a, warps=2)


@pytest.mark.parametrize("seed", range(12))
def test_a_reduction_is_of_its_own_round_of_the_barrier(seed):
    """Warps 1 and 2 complete the next round, maybe before warp 0 goes on from the first."""
    a = aligned((96,), np.uint32)
    body = """
        mul.wide.u32 %rd1, %r0, 4;
        add.u64 %rd0, %rd0, %rd1;
        setp.ge.u32 %p0, %r0, 64;
        setp.lt.u32 %p1, %r0, 32;
        @%p0 bra SECOND_ROUND;
        bar.red.popc.u32 %r2, 1, 64, !%p0;
        @%p1 bra END;
    SECOND_ROUND:
        bar.sync 2, 64;
        bar.red.popc.u32 %r3, 1, 64, %p1;
        @%p0 mov.u32 %r2, %r3;
    END:
        st.global.u32 [%rd0], %r2;
    """
    run(_START + body, a, warps=3, machine=Machine(schedule=lambda: Random(seed)))
    assert a[::32].tolist() == [64, 64, 0]


def test_a_reduction_at_a_barrier_leaves_out_exited_lanes():
    a = aligned((32,), np.uint32)
    body = """
        setp.eq.u32 %p0, %r0, 0;
        @%p0 ret;
        bar.red.and.pred %p1, 0, !%p0;
        selp.u32 %r2, 1, 0, %p1;
        st.global.u32 [%rd0], %r2;
    """
    run(_START + body, a)
    assert a[0] == 1


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_spinning_on_an_atomic_lets_others_run(schedule):
    """Warp 1 spins on a lock that warp 0 frees only after it has met warp 2."""
    a = aligned((2,), np.uint32)
    a[0] = 1
    run(
        _START
        + """and.b32 %r2, %r0, 31;
        setp.eq.u32 %p1, %r2, 0;
        shr.u32 %r2, %r0, 5;
        setp.eq.u32 %p2, %r2, 1;
        @%p2 bra SPIN;
        bar.sync 1, 64;
        setp.eq.and.u32 %p3, %r2, 0, %p1;
        @%p3 atom.global.exch.b32 %r3, [%rd0], 0;
        bra END;
        SPIN: @!%p1 bra END;
        AGAIN: atom.global.cas.b32 %r3, [%rd0], 0, 1;
        setp.ne.u32 %p3, %r3, 0;
        @%p3 bra AGAIN;
        st.global.u32 [%rd0+4], 5;
        END:""",
        a,
        warps=3,
        machine=Machine(schedule=schedule, instruction_limit=100_000),
    )
    assert a.tolist() == [1, 5]


_IN_VAIN = {
    "flag, broadcast": """AGAIN: ld.volatile.global.u32 %r2, [%rd0];
        shfl.sync.idx.b32 %r2, %r2, 0, 31, -1;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra AGAIN;""",
    "lock": """AGAIN: atom.global.cas.b32 %r2, [%rd0], 1, 2;
        bar.warp.sync -1;
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra AGAIN;""",
    "try_wait, vote": """elect.sync %r3|%p2, -1;
        @%p2 mbarrier.init.shared.b64 [%r1], 1;
        AGAIN: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
        vote.sync.all.pred %p1, %p1, -1;
        @!%p1 bra AGAIN;""",
    "test_wait, load": """elect.sync %r3|%p2, -1;
        @%p2 mbarrier.init.shared.b64 [%r1], 1;
        AGAIN: mbarrier.test_wait.parity.shared.b64 %p1, [%r1], 0;
        ld.global.u32 %r2, [%rd0];
        @!%p1 bra AGAIN;""",
}


@pytest.mark.parametrize("body", _IN_VAIN.values(), ids=_IN_VAIN.keys())
def test_polling_in_vain_is_a_deadlock(body):
    """Also where the loop does something else that changes nothing."""
    machine = Machine(instruction_limit=1_000_000)
    with pytest.raises(Deadlock, match="warp 0"):
        run(_START + body, aligned((1,), np.uint32), machine=machine)


@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_a_long_read_is_no_deadlock_of_who_polls(schedule):
    """Warp 0 reads for longer than any number of polls of warp 1, then sets its flag."""
    a = aligned((2,), np.uint32)
    run(
        _START
        + """setp.ge.u32 %p0, %r0, 32;
        @%p0 bra POLL;
        mov.u32 %r2, 20000;
        READ: ld.global.u32 %r3, [%rd0+4];
        sub.u32 %r2, %r2, 1;
        setp.ne.u32 %p1, %r2, 0;
        @%p1 bra READ;
        st.volatile.global.u32 [%rd0], 1;
        bra END;
        POLL: ld.volatile.global.u32 %r3, [%rd0];
        setp.eq.u32 %p1, %r3, 0;
        @%p1 bra POLL;
        END:""",
        a,
        warps=2,
        machine=Machine(schedule=schedule),
    )
    assert a.tolist() == [1, 0]
