"""Instructions of several lanes: each lane has its own address, value and members."""

import numpy as np
import pytest

from flash_attn_fp8.sim.errors import BarrierMisuse, Race, Unmodelled
from flash_attn_fp8.sim.machine import Machine
from tests.sim.programs import aligned, run

_START = "ld.param.u64 %rd0, [a0];\nmov.u32 %r0, %tid.x;\nmov.u32 %r1, dynamic;\n"
_ONE_LANE = "setp.ne.u32 %p0, %r0, 0;\n@%p0 bra END;\n"


@pytest.mark.parametrize(
    ("suffix", "dtype", "move"),
    [
        ("add.f64", np.float64, "mov.b64 %rd1, 0d3FF8000000000000;\n"),
        ("add.f32", np.float32, "mov.b32 %r2, 0f3FC00000;\n"),
        ("add.noftz.f16x2", np.float16, "mov.b32 %r2, 0x3E003E00;\n"),
    ],
)
def test_floats_are_added_as_floats(suffix, dtype, move):
    """32 lanes add 1.5 to one address; f64 and f16x2 were added as integers."""
    a = aligned((max(1, 4 // np.dtype(dtype).itemsize),), dtype)
    a[:] = 1.5
    registers = "%rd2, [%rd0], %rd1" if dtype is np.float64 else "%r3, [%rd0], %r2"
    run(f"{_START}{move}atom.global.{suffix} {registers};", a)
    assert a.tolist() == [49.5] * a.size


def test_f32_in_global_memory_flushes_subnormals_and_in_shared_keeps_them():
    """As PTX says of `atom.add.f32`, and as an H200 did (0 and 1); a NaN is 0x7fffffff there."""
    a = aligned((3,), np.uint32)
    run(
        _START
        + _ONE_LANE
        + """mov.b32 %r2, 1;
        st.shared.u32 [%r1], 0;
        red.global.add.f32 [%rd0], %r2;
        red.shared.add.f32 [%r1], %r2;
        ld.shared.u32 %r3, [%r1];
        st.global.u32 [%rd0+4], %r3;
        mov.b32 %r2, 0xFFC12345;
        red.global.add.f32 [%rd0+8], %r2;
        END:""",
        a,
    )
    assert a.tolist() == [0, 1, 0x7FFFFFFF]


def test_generic_atomics_on_shared_memory_need_no_single_process():
    a = aligned((1,), np.uint32)
    run(
        _START
        + """cvt.u64.u32 %rd1, %r1;
        cvta.shared.u64 %rd1, %rd1;
        setp.eq.u32 %p0, %r0, 0;
        @%p0 st.u32 [%rd1], 0;
        bar.warp.sync -1;
        atom.add.u32 %r2, [%rd1], 2;
        red.shared::cta.add.u32 [%r1], 1;
        ld.shared.u32 %r3, [%r1];
        st.global.u32 [%rd0], %r3;""",
        a,
        grid=2,
        machine=Machine(workers=2),
    )
    assert a.tolist() == [96]


def test_wrong_operands_are_reported_with_their_line():
    with pytest.raises(Unmodelled, match=r"line 13: .*shfl\.sync\.idx"):
        run("shfl.sync.idx.b32 %r1, %r0;")


def test_an_atomic_of_an_unknown_type_is_refused():
    a = aligned((1,), np.uint32)
    with pytest.raises(Unmodelled, match=r"atomic \.max\.b32"):
        run(_START + "red.global.max.b32 [%rd0], %r0;", a)


def test_halves_of_a_warp_meet_with_their_own_masks():
    """Tiles of 16 lanes run one `.sync` instruction, each with its own members."""
    a = aligned((32,), np.uint32)
    run(
        _START
        + """shr.u32 %r2, %r0, 4;
        shl.b32 %r2, %r2, 4;
        mov.u32 %r3, 0xFFFF;
        shl.b32 %r3, %r3, %r2;
        shfl.sync.idx.b32 %r4, %r0, 0, 0x101f, %r3;
        setp.eq.u32 %p1, %r0, 20;
        vote.sync.any.pred %p2, %p1, %r3;
        selp.u32 %r5, 100, 0, %p2;
        redux.sync.add.u32 %r6, %r0, %r3;
        mad.lo.u32 %r6, %r6, 1000, %r5;
        add.u32 %r4, %r4, %r6;
        mul.wide.u32 %rd1, %r0, 4;
        add.u64 %rd0, %rd0, %rd1;
        st.global.u32 [%rd0], %r4;""",
        a,
    )
    assert a.tolist() == [120_000] * 16 + [376_116] * 16


def test_each_lane_initialises_and_expects_its_own():
    """`init` with a count by lane; `expect_tx` of 1 and 2 bytes by two lanes, completed by 3."""
    a = aligned((2,), np.uint32)
    run(
        _START
        + """setp.gt.u32 %p0, %r0, 1;
        @%p0 bra END;
        shl.b32 %r2, %r0, 3;
        add.u32 %r2, %r1, %r2;
        add.u32 %r3, %r0, 1;
        mbarrier.init.shared.b64 [%r2], %r3;
        mbarrier.arrive.shared.b64 _, [%r2], %r3;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], %r3;
        setp.ne.u32 %p0, %r0, 0;
        @%p0 bra END;
        mbarrier.arrive.shared.b64 %rd1, [%r1];
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 3;
        mbarrier.test_wait.shared.b64 %p1, [%r1], %rd1;
        mbarrier.test_wait.parity.shared.b64 %p2, [%r1+8], 0;
        selp.u32 %r4, 1, 0, %p1;
        selp.u32 %r5, 1, 0, %p2;
        st.global.v2.u32 [%rd0], {%r4, %r5};
        END:""",
        a,
    )
    assert a.tolist() == [1, 1]


def test_an_arrival_without_completion_must_not_complete():
    a = aligned((1,), np.uint32)
    body = """setp.ne.u32 %p0, %r0, 0;
        @%p0 bra END;
        mbarrier.init.shared.b64 [%r1], 2;
        mbarrier.arrive.noComplete.shared.b64 %rd1, [%r1], {count};
        END:"""
    run(_START + body.format(count=1), a)
    with pytest.raises(BarrierMisuse, match=r"\.noComplete"):
        run(_START + body.format(count=2), a)


def test_arrive_drop_drops_its_count():
    """Three of four are dropped; from then on one arrival ends a phase."""
    a = aligned((2,), np.uint32)
    run(
        _START
        + _ONE_LANE
        + """mbarrier.init.shared.b64 [%r1], 4;
        mbarrier.arrive_drop.shared.b64 _, [%r1], 3;
        mbarrier.arrive.shared.b64 %rd1, [%r1];
        mbarrier.test_wait.shared.b64 %p1, [%r1], %rd1;
        mbarrier.arrive.shared.b64 %rd1, [%r1];
        mbarrier.test_wait.shared.b64 %p2, [%r1], %rd1;
        selp.u32 %r2, 1, 0, %p1;
        selp.u32 %r3, 1, 0, %p2;
        st.global.v2.u32 [%rd0], {%r2, %r3};
        END:""",
        a,
    )
    assert a.tolist() == [1, 1]


_HANDOFF = """setp.lt.u32 %p0, %r0, 32;
    @!%p0 bra CONSUME;
    st.shared.u32 [%r1], 7;
    st.release.gpu.global.u32 [%rd0], 1;
    bra END;
    CONSUME: {wait}
    setp.eq.u32 %p1, %r2, 0;
    @%p1 bra CONSUME;
    ld.shared.u32 %r3, [%r1];
    st.global.u32 [%rd0+4], %r3;
    END:"""


def test_a_flag_orders_whatever_its_address_is_called():
    """Released through a global address, acquired through the generic one."""
    a = aligned((2,), np.uint32)
    run(_START + _HANDOFF.format(wait="ld.acquire.gpu.u32 %r2, [%rd0];"), a, warps=2)
    assert a.tolist() == [1, 7]


def test_a_weak_load_of_the_flag_does_not_order():
    """The same, and a race, without `.acquire`."""
    a = aligned((2,), np.uint32)
    with pytest.raises(Race, match=r"shared memory\+0x400 is read by warp 1"):
        run(_START + _HANDOFF.format(wait="ld.global.u32 %r2, [%rd0];"), a, warps=2)


def test_a_flag_in_shared_memory_is_no_race_itself():
    """One warp polls it, two others write it: strong accesses do not race with each other."""
    a = aligned((1,), np.uint32)
    run(
        _START
        + """setp.ne.u32 %p0, %r0, 0;
        @%p0 bra READY;
        st.shared.u32 [%r1], 0;
        READY: bar.sync 0;
        setp.lt.u32 %p0, %r0, 32;
        @%p0 bra POLL;
        st.volatile.shared.u32 [%r1], 1;
        bra END;
        POLL: ld.volatile.shared.u32 %r2, [%r1];
        setp.eq.u32 %p1, %r2, 0;
        @%p1 bra POLL;
        st.global.u32 [%rd0], %r2;
        END:""",
        a,
        warps=3,
    )
    assert a.tolist() == [1]
