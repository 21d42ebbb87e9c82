"""A launch as a whole: what it must look like, what launches share, and worker processes."""

import mmap
import tempfile

import numpy as np
import pytest

from flash_attn_fp8.sim.errors import Unmodelled
from flash_attn_fp8.sim.launch import Buffer, Launch
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.ptx.parse import parse
from tests.sim.programs import aligned, buffer, module, run

_TWO_ENTRIES = """
.version 8.8
.target sm_100a
.address_size 64
.global .align 4 .u32 shared_by_both = 5;
.visible .entry put()
{
    .reg .b32 %r<4>;
    mov.u32 %r0, 9;
    st.global.u32 [shared_by_both], %r0;
    ret;
}
.visible .entry get(.param .u64 a)
{
    .reg .b32 %r<4>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd0, [a];
    ld.global.u32 %r0, [shared_by_both];
    st.global.u32 [%rd0], %r0;
    ret;
}
"""


def _address(a):
    return (a.ctypes.data.to_bytes(8, "little"),)


def _launch(**changes):
    shape = {"grid": (1, 1, 1), "block": (32, 1, 1), "params": (), "buffers": ()}
    return Launch(**{**shape, **changes})


def test_entries_of_a_module_share_its_variables():
    program, machine, a = parse(_TWO_ENTRIES), Machine(), aligned((1,), np.uint32)
    machine.launch(program, "put", _launch())
    machine.launch(program, "get", _launch(params=_address(a), buffers=(buffer("a", a),)))
    assert a.tolist() == [9]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": (64, 1, 1)}, r"reqntid \(32, 1, 1\), the launch \(64, 1, 1\)"),
        ({"grid": (0, 1, 1)}, r"grid \(0, 1, 1\)"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "at most 16 CTAs"),
        ({"dynamic_smem": -8}, "-8 bytes"),
        ({"params": (b"1234",)}, r"parameters of \[\] bytes, the launch of \[4\]"),
    ],
)
def test_a_launch_that_hardware_refuses_is_refused(changes, message):
    program = parse(module("", params=0, threads=32))
    with pytest.raises(ValueError, match=message):
        Machine().launch(program, "kernel", _launch(**changes))


def test_a_program_of_another_architecture_is_refused():
    program = parse(module("", params=0, threads=32, target="sm_90a"))
    with pytest.raises(ValueError, match="sm_90a"):
        Machine("sm_100a").launch(program, "kernel", _launch())


_CTA_WRITES = """ld.param.u64 %rd0, [a0];
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r1, %r1, 32, %r0;
    mul.wide.u32 %rd1, %r1, 4;
    add.u64 %rd0, %rd0, %rd1;
    st.global.u32 [%rd0], %r1;"""


@pytest.mark.parametrize("workers", [1, 2])
def test_buffers_may_overlap(workers):
    """CTA 0 writes through one view, CTA 1 through the other; workers lost some of it."""
    a = aligned((64,), np.uint32)
    views = (Buffer("x", a.ctypes.data, 160), Buffer("y", a.ctypes.data + 96, 160))
    launch = _launch(grid=(2, 1, 1), params=_address(a), buffers=views)
    program = parse(module(_CTA_WRITES, params=1, threads=32))
    Machine(workers=workers).launch(program, "kernel", launch)
    assert a.tolist() == list(range(64))


def test_memory_is_writable_if_one_of_its_names_is():
    a = aligned((32,), np.uint32)
    views = (buffer("x", a, writable=False), buffer("y", a))
    launch = _launch(params=_address(a), buffers=views)
    Machine().launch(parse(module(_CTA_WRITES, params=1, threads=32)), "kernel", launch)
    assert a.tolist() == list(range(32))


def test_workers_do_not_touch_memory_that_is_read_only():
    """A file mapped for reading: writing its own bytes back was a segmentation fault."""
    a = aligned((64,), np.uint32)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(4096))
        file.flush()
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 4096, access=mmap.ACCESS_READ), np.uint8)
        views = (buffer("a", a), buffer("file", mapped, writable=False))
        launch = _launch(grid=(2, 1, 1), params=_address(a), buffers=views)
        program = parse(module(_CTA_WRITES, params=1, threads=32))
        Machine(workers=2).launch(program, "kernel", launch)
    assert a.tolist() == list(range(64))


def test_reductions_cost_no_clock_an_element():
    """Snapshots that order strong accesses are shared by the addresses of one instruction."""
    from flash_attn_fp8.sim import machine as module_of_machine

    a, clusters = aligned((3200,), np.uint32), []
    original = module_of_machine.cluster_at

    def remember(*arguments):
        clusters.append(original(*arguments))
        return clusters[-1]

    body = (
        "ld.param.u64 %rd0, [a0];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %rd1, %r0, 4;\n"
        "add.u64 %rd0, %rd0, %rd1;\nmov.u32 %r1, 100;\nAGAIN: red.global.add.u32 [%rd0], 1;\n"
        "add.u64 %rd0, %rd0, 128;\nsub.u32 %r1, %r1, 1;\nsetp.ne.u32 %p0, %r1, 0;\n@%p0 bra AGAIN;"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_of_machine, "cluster_at", remember)
        run(body, a)
    assert a.tolist() == [1] * 3200
    assert len({id(clock) for clock in clusters[0].sync_points.values()}) == 100


def test_too_many_actors_are_a_limit_of_the_simulator():
    """16 CTAs of 32 warps that all wait on mbarriers."""
    body = """mov.u32 %r0, %tid.x;
        mov.u32 %r1, dynamic;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 mbarrier.init.shared.b64 [%r1], 1024;
        bar.sync 0;
        mbarrier.arrive.shared.b64 _, [%r1];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
        @!%p1 bra WAIT;"""
    with pytest.raises(Unmodelled, match="actors"):
        run(body, warps=32, grid=16, cluster=16)
