"""Truth tables of synchronisation between the CTAs of a cluster, as `test_order.py` has them.

Two CTAs of one warp each. Rank 0 runs the first column, rank 1 the second. Each case is clean as
written and a finding without any line marked `!`.
"""

from __future__ import annotations

from functools import partial

import pytest

from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.errors import BarrierMisuse, Deadlock, Race, Uninitialised
from flash_attn_fp8.sim.machine import Machine
from tests.sim.programs import aligned, run
from tests.sim.sync.truth import Case, arrive, check_clean, columns, needed, wait

# %r0: SLOT of one's own, %r40: that of the other CTA; %r10-%r12 mbarriers of one's own (count 1),
# %r50-%r52 the other's. %r5 is 7.
_SETUP = """
    mov.u32 %r0, dynamic;
    add.u32 %r10, %r0, 8192;
    add.u32 %r11, %r0, 8200;
    add.u32 %r12, %r0, 8208;
    mov.u32 %r3, %tid.x;
    setp.eq.u32 %p1, %r3, 0;
    setp.ne.u32 %p4, %r3, 0;
    mov.u32 %r4, %cluster_ctarank;
    setp.eq.u32 %p3, %r4, 1;
    xor.b32 %r6, %r4, 1;
    mapa.shared::cluster.u32 %r40, %r0, %r6;
    mapa.shared::cluster.u32 %r50, %r10, %r6;
    mapa.shared::cluster.u32 %r51, %r11, %r6;
    mapa.shared::cluster.u32 %r52, %r12, %r6;
    mov.b16 %h0, 3;
    ld.param.u64 %rd0, [a0];
    mov.u32 %r5, 7;
"""
_INIT = """
    @%p4 bra READY;
    mbarrier.init.shared.b64 [%r10], 1;
    mbarrier.init.shared.b64 [%r11], 1;
    mbarrier.init.shared.b64 [%r12], 1;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
_BRANCH = """
    @%p3 bra SECOND;
"""
_END = """
END:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""

STORE = "@%p1 st.shared.v4.b32 [%r0], {%r5, %r5, %r5, %r5};"
LOAD = "@%p1 ld.shared.v4.b32 {%r20, %r21, %r22, %r23}, [%r0];"
STORE_THERE = "@%p1 st.shared::cluster.v4.b32 [%r40], {%r5, %r5, %r5, %r5};"
LOAD_THERE = "@%p1 ld.shared::cluster.v4.b32 {%r20, %r21, %r22, %r23}, [%r40];"
CLUSTER_ARRIVE = "barrier.cluster.arrive.release.aligned;"
CLUSTER_RELAXED = "barrier.cluster.arrive.relaxed.aligned;"
CLUSTER_WAIT = "barrier.cluster.wait.acquire.aligned;"
CLUSTER = [CLUSTER_ARRIVE, CLUSTER_WAIT]
FENCE = "fence.acq_rel.cluster;"
PROXY_FENCE = "fence.proxy.async.shared::cluster;"
EXPECT = "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r10], 16;"
COMPLETES = "mbarrier::complete_tx::bytes"
STORE_ASYNC = (
    f"@%p1 st.async.weak.shared::cluster.{COMPLETES}.v4.b32 [%r40], {{%r5, %r5, %r5, %r5}}, [%r50];"
)
MULTICAST = (
    f"@%p1 cp.async.bulk.shared::cluster.global.{COMPLETES}.multicast::cluster "
    "[%r0], [%rd0], 16, [%r10], %h0;"
)
COPY_ACROSS = (
    f"@%p1 cp.async.bulk.shared::cluster.shared::cta.{COMPLETES} [%r40], [%r0], 16, [%r50];"
)


def arrive_there(barrier: int, how: str = "release") -> str:
    return f"@%p1 mbarrier.arrive.{how}.cluster.shared::cluster.b64 _, [%r{barrier + 40}];"


CASES: dict[str, Case] = {
    "store there, remote arrive, load": (
        [STORE_THERE, "!" + arrive_there(10)],
        ["!" + wait(10), LOAD],
    ),
    "store there, cluster barrier, load": ([STORE_THERE, *CLUSTER], [*CLUSTER, LOAD]),
    "store, cluster barrier, load there": ([STORE, *CLUSTER], [*CLUSTER, LOAD_THERE]),
    "store, fence, relaxed cluster barrier, load there": (
        [STORE, "!" + FENCE, CLUSTER_RELAXED, CLUSTER_WAIT],
        [CLUSTER_RELAXED, CLUSTER_WAIT, LOAD_THERE],
    ),
    "store there, fence, relaxed remote arrive, load": (
        [STORE_THERE, "!" + FENCE, "!" + arrive_there(10, "relaxed")],
        ["!" + wait(10), LOAD],
    ),
    "load there, remote arrive, store over it": (
        ["!" + wait(11), LOAD_THERE, "!" + arrive_there(10)],
        [STORE, "!" + arrive_there(11), "!" + wait(10), STORE],
    ),
    "st.async, wait, load": ([STORE_ASYNC], ["!" + EXPECT, "!" + wait(10), LOAD]),
    "load, remote arrive, st.async over it": (
        ["!" + wait(11), STORE_ASYNC],
        [STORE, LOAD, "!" + arrive_there(11), "!" + EXPECT, "!" + wait(10)],
    ),
    "multicast, wait at each, load": (
        ["!" + EXPECT, MULTICAST, "!" + wait(10), LOAD],
        ["!" + EXPECT, "!" + wait(10), LOAD],
    ),
    "each reads, the other hears of it, multicast over it": (
        [EXPECT, MULTICAST, wait(10), LOAD, "!" + wait(11), EXPECT, MULTICAST, wait(10, 1)],
        [EXPECT, wait(10), LOAD, EXPECT, "!" + arrive_there(11), wait(10, 1)],
    ),
    "store, proxy fence, copy across, wait, load": (
        [STORE, "!" + PROXY_FENCE, COPY_ACROSS],
        ["!" + EXPECT, "!" + wait(10), LOAD],
    ),
    "copy across, the other hears and answers, store over the source": (
        [STORE, PROXY_FENCE, COPY_ACROSS, "!" + wait(11), STORE],
        [EXPECT, "!" + wait(10), "!" + arrive_there(11)],
    ),
    "three hands": (
        [STORE_THERE, arrive_there(10), "!" + wait(11), LOAD],
        ["!" + wait(10), STORE_THERE, "!" + arrive_there(11), LOAD],
    ),
}


def _run(text: str, machine: Machine | None = None) -> Run:
    return run(text, aligned((64,), "u4"), grid=2, cluster=2, machine=machine)


def _whole(case: Case, without: int | None = None) -> str:
    return _SETUP + _INIT + _BRANCH + columns(case, without) + _END


@pytest.mark.parametrize("name", CASES)
def test_the_right_waits_are_clean(name):
    check_clean(partial(_run, _whole(CASES[name])))


@pytest.mark.parametrize(("name", "line", "left_out"), needed(CASES))
def test_without_it_there_is_a_finding(name, line, left_out):
    """Under round robin, whatever the numbers come out as."""
    with pytest.raises((Race, Uninitialised, Deadlock)):
        _run(_whole(CASES[name], line))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([STORE, CLUSTER_RELAXED, CLUSTER_WAIT], [CLUSTER_ARRIVE, CLUSTER_WAIT, LOAD_THERE]),
        ([STORE_THERE, arrive_there(10, "relaxed")], [wait(10), LOAD]),
        ([STORE, arrive(11)], [wait(11), LOAD_THERE]),  # an arrival at one's own barrier
        ([STORE_ASYNC], [EXPECT, LOAD, wait(10)]),
    ],
)
def test_the_wrong_semantics_or_barrier_is_a_finding(first, second):
    with pytest.raises((Race, Uninitialised, Deadlock)) as e:
        _run(_whole((first, second)))
    assert "rank" in str(e.value)


# ------------------------------------------------------------------------------ begin and end


@pytest.mark.parametrize(
    ("fence", "barrier", "clean"),
    [
        ("fence.mbarrier_init.release.cluster;", CLUSTER_RELAXED, True),
        ("fence.mbarrier_init.release.cluster;", CLUSTER_ARRIVE, True),
        ("", CLUSTER_ARRIVE, True),  # a releasing barrier needs no fence for generic accesses
        ("", CLUSTER_RELAXED, False),
    ],
)
def test_initialised_barriers_reach_the_other_cta(fence, barrier, clean):
    init = _INIT.replace("fence.mbarrier_init.release.cluster;", fence)
    init = init.replace(CLUSTER_RELAXED, barrier)
    text = _SETUP + init + _BRANCH + columns(([arrive_there(10)], [wait(10)])) + _END
    if clean:
        _run(text)
    else:
        with pytest.raises(
            Race, match=r"nothing makes its initialisation by mbarrier\.init of warp 0 of"
        ):
            _run(text)


def test_without_a_cluster_barrier_a_barrier_may_not_exist_yet():
    init = _INIT.replace(CLUSTER_RELAXED, "").replace(CLUSTER_WAIT, "")
    text = _SETUP + init + _BRANCH + columns(([arrive_there(10)], [wait(10)])) + _END
    with pytest.raises((Race, BarrierMisuse), match=r"mbarrier"):
        _run(text)


@pytest.mark.parametrize("access", [STORE_THERE, arrive_there(10), COPY_ACROSS])
def test_a_cta_that_exits_while_the_other_uses_its_memory(access):
    """The last cluster barrier, or a wait for the arrival, keeps it alive."""
    case = ([STORE, PROXY_FENCE, access], [EXPECT] if access is COPY_ACROSS else [])
    with pytest.raises(Race, match=r"cta\([01], 0, 0\) exits (while|without)"):
        _run(_SETUP + _INIT + _BRANCH + columns(case) + "\nEND:\n")


# ------------------------------------------------------------------------------- pairs of CTAs

# tcgen05 with cta_group::2: M = 256, N = 32, K = 16 of zeros; A and B (K-major, no swizzle) at SLOT
# and 4096 of each CTA, D in columns 0-31.
_PAIR = """
    .reg .b64 %da, %db;
    .reg .b32 %d, %idesc, %low;
    mov.u32 %idesc, 0x10080490;
    mov.u32 %r5, 0;
    mov.u32 %r30, 0;
CLEAR:
    shl.b32 %r6, %r3, 4;
    add.u32 %r6, %r6, %r0;
    shl.b32 %r7, %r30, 9;
    add.u32 %r6, %r6, %r7;
    st.shared.v4.b32 [%r6], {%r5, %r5, %r5, %r5};
    add.u32 %r30, %r30, 1;
    setp.lt.u32 %p5, %r30, 10;
    @%p5 bra CLEAR;
    fence.proxy.async;
    add.u32 %r7, %r0, 8224;
    tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r7], 32;
    ld.shared.b32 %d, [%r7];
    and.b32 %low, %r0, 0xFFFFFF;
    shr.u32 %low, %low, 4;
    or.b32 %low, %low, 0x80000;
    mov.b64 %da, {%low, 0x00004010};
    add.u32 %r8, %low, 256;
    mov.b64 %db, {%r8, 0x00004010};
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
_PAIR_END = """
END:
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    tcgen05.dealloc.cta_group::2.sync.aligned.b32 %d, 32;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
MMA = "@%p1 tcgen05.mma.cta_group::2.kind::f16 [%d], %da, %db, %idesc, 0;"
COMMIT_KIND = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
COMMIT_BOTH = f"@%p1 {COMMIT_KIND}.multicast::cluster.b64 [%r10], %h0;"
COMMIT_OWN = f"@%p1 {COMMIT_KIND}.b64 [%r10];"
TMEM_LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r20}, [%d]; tcgen05.wait::ld.sync.aligned;"

PAIRS: dict[str, Case] = {
    "commit to both, each waits, each loads": (
        [MMA, "!" + COMMIT_BOTH, "!" + wait(10), TMEM_LOAD],
        ["!" + wait(10), TMEM_LOAD],
    ),
    "the other CTA reads its half, remote arrive, MMA over it": (
        [MMA, COMMIT_BOTH, wait(10), "!" + wait(11), MMA, COMMIT_BOTH, wait(10, 1)],
        [wait(10), TMEM_LOAD, "!" + arrive_there(11), wait(10, 1)],
    ),
    "the other CTA stores its operands over, after the commit": (
        [MMA, "!" + COMMIT_BOTH, wait(10)],
        ["!" + wait(10), STORE],
    ),
    "the other CTA stores its operands first": (
        ["!" + wait(11), MMA, COMMIT_BOTH, wait(10)],
        [STORE, "!" + PROXY_FENCE, "!" + arrive_there(11), wait(10)],
    ),
}


def _pair(case: Case, without: int | None = None) -> str:
    return _SETUP + _INIT + _PAIR + _BRANCH + columns(case, without) + _PAIR_END


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_with_the_right_waits_are_clean(name):
    check_clean(partial(_run, _pair(PAIRS[name])))


@pytest.mark.parametrize(("name", "line", "left_out"), needed(PAIRS))
def test_pairs_without_it_are_a_finding(name, line, left_out):
    with pytest.raises((Race, Uninitialised, Deadlock)):
        _run(_pair(PAIRS[name], line))


def test_a_commit_to_one_cta_tells_only_that_one():
    with pytest.raises((Race, Deadlock), match="rank 1"):
        _run(_pair(([MMA, COMMIT_OWN, wait(10)], [wait(10), TMEM_LOAD])))
