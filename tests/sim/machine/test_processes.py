"""A grid over processes, and what a cluster leaves behind when it is over."""

import gc
import weakref

import numpy as np
import pytest

from flash_attn_fp8.sim import machine as module_of_machine
from flash_attn_fp8.sim.errors import OutOfBounds
from flash_attn_fp8.sim.machine import Machine
from tests.sim.programs import aligned, run

# CTA n executes the loop n + 1 times and writes a[n].
_UNEVEN = """ld.param.u64 %rd0, [a0];
    mov.u32 %r0, %ctaid.x;
    mul.wide.u32 %rd1, %r0, 4;
    add.u64 %rd0, %rd0, %rd1;
    mov.u32 %r1, 0;
    AGAIN: add.u32 %r1, %r1, 1;
    setp.le.u32 %p0, %r1, %r0;
    @%p0 bra AGAIN;
    st.global.u32 [%rd0], %r1;"""


@pytest.mark.parametrize("workers", [2, 3, 40])
def test_processes_count_and_write_what_one_does(workers):
    alone, shared = aligned((20,), np.uint32), aligned((20,), np.uint32)
    one = run(_UNEVEN, alone, grid=20, warps=2, machine=Machine())
    several = run(_UNEVEN, shared, grid=20, warps=2, machine=Machine(workers=workers))
    assert shared.tolist() == alone.tolist() == list(range(1, 21))
    assert several.as_data() == one.as_data()
    assert several.warp_instructions > 20


def test_of_several_faults_the_first_ctas_is_told():
    """CTAs 3 to 19 write past the end; which process gets there first must not matter."""
    for _ in range(3):
        with pytest.raises(OutOfBounds, match=r"cta\(3, 0, 0\)"):
            run(_UNEVEN, aligned((3,), np.uint32), grid=20, machine=Machine(workers=3))


def test_a_cluster_that_has_run_is_freed(monkeypatch):
    """Tens of MB each: a grid of 32 CTAs of flash-attn-4 took 2 GB before Python collected."""
    left = []
    original = module_of_machine.cluster_at

    def remember(*arguments):
        cluster = original(*arguments)
        parts = [cluster, *cluster.ctas, *(w for cta in cluster.ctas for w in cta.warps)]
        left.extend(weakref.ref(part) for part in (*parts, *(c.shared for c in cluster.ctas)))
        return cluster

    monkeypatch.setattr(module_of_machine, "cluster_at", remember)
    body = """mov.u32 %r0, dynamic;
        mov.u32 %r1, %tid.x;
        setp.eq.u32 %p0, %r1, 0;
        @%p0 mbarrier.init.shared.b64 [%r0], 1;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        @%p0 mbarrier.arrive.shared.b64 _, [%r0];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r0], 0;
        @!%p1 bra WAIT;"""
    gc.disable()
    try:
        run(body, aligned((1,), np.uint32), grid=4, cluster=2, warps=2)
        assert len(left) == 2 * (1 + 2 + 4 + 2)
        assert not [part() for part in left if part() is not None]
    finally:
        gc.enable()
