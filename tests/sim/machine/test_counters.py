"""Counts as data: by warp, role, loop and opcode; roles that are named, and those that show."""

import json

import numpy as np
import pytest

from flash_attn_fp8.sim.counters import Row
from flash_attn_fp8.sim.errors import Deadlock
from flash_attn_fp8.sim.machine import Machine
from flash_attn_fp8.sim.roles import alike
from flash_attn_fp8.sim.trace import Trace
from tests.sim.programs import aligned, run

# Warps 0 and 1 go round a loop 5 and 6 times, warp 2 multiplies, warp 3 waits for nobody.
_ROLES = """mov.u32 %r0, %tid.x;
    shr.u32 %r0, %r0, 5;
    setp.ge.u32 %p0, %r0, 2;
    @%p0 bra OTHERS;
    add.u32 %r1, %r0, 5;
    AGAIN: sub.u32 %r1, %r1, 1;
    xor.b32 %r2, %r2, %r1;
    xor.b32 %r3, %r3, %r1;
    setp.ne.u32 %p1, %r1, 0;
    @%p1 bra AGAIN;
    bra END;
    OTHERS: setp.eq.u32 %p2, %r0, 3;
    @%p2 bra END;
    mul.lo.u32 %r4, %r0, %r0;
    mul.lo.u32 %r4, %r4, %r0;
    END:"""
_NAMES = {"load": range(2), "mma": [2]}


def _run(**options):
    return run(_ROLES, aligned((1,), np.uint32), warps=4, machine=Machine(**options))


def _executed(rows, opcode):
    return {row.who: row.executed for row in rows if row.opcode == opcode}


def test_roles_add_up_their_warps_and_others_keep_their_numbers():
    counts = _run(roles=_NAMES)
    assert _executed(counts.rows(), "xor.b32") == {0: 10, 1: 12}
    assert _executed(counts.role_rows(), "xor.b32") == {"load": 22}
    assert _executed(counts.role_rows(), "mul.lo.u32") == {"mma": 2}
    assert _executed(counts.role_rows(), "shr.u32") == {"load": 2, "mma": 1, 3: 1}
    assert sum(row.executed for row in counts.role_rows()) == counts.warp_instructions


def test_groups_show_without_names():
    counts = _run()
    assert counts.groups() == [(0, 1), (2,), (3,)]
    assert _executed(counts.group_rows(), "xor.b32") == {"0-1": 22}
    assert _executed(counts.group_rows(), "shr.u32") == {"0-1": 2, "2": 1, "3": 1}


def test_a_group_may_differ_in_a_tenth():
    executed = np.ones((4, 100), np.int64)
    executed[1, :10] = 0
    executed[2, :11] = 0
    executed[3] *= 7
    assert alike(executed) == [(0, 1, 3), (2,)]


def test_data_are_json_and_say_who():
    found = json.loads(json.dumps(_run(roles=_NAMES).as_data()))
    assert found["roles"] == [{"role": "load", "warps": [0, 1]}, {"role": "mma", "warps": [2]}]
    assert found["groups"] == [[0, 1], [2], [3]]
    xor = [row for row in found["instructions"] if row["opcode"] == "xor.b32"]
    assert [(row["warp"], row["role"], row["executed"]) for row in xor] == [
        (0, "load", 10),
        (1, "load", 12),
    ]
    assert xor[0]["loop"]["first_line"] < xor[0]["loop"]["last_line"]
    assert {row["role"] for row in found["instructions"] if row["warp"] == 3} == {None}


def test_instructions_by_line_and_warp():
    counts = _run()
    line = next(i.line for i in counts.entry.instructions if i.opcode == "sub.u32")
    assert {w: n for (at, w), n in counts.instructions.items() if at == line} == {0: 5, 1: 6}
    assert sum(counts.instructions.values()) == counts.warp_instructions
    assert Row(0, None, "ret", 1) in counts.rows()


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"a": [0, 1], "b": [1]}, "warp 1 has two roles, 'a' and 'b'"),
        ({"a": [32]}, "'a' names warp 32; a CTA has at most 32"),
        ({"a": [-1]}, "'a' names warp -1"),
        ({"a": [3, 5]}, "'a' names warp 5; the launch has 4 warps a CTA"),
    ],
)
def test_roles_that_cannot_be_are_refused(roles, message):
    with pytest.raises(ValueError, match=message):
        _run(roles=roles)


_WAITS = """mov.u32 %r1, dynamic;
    mov.u32 %r0, %tid.x;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.init.shared.b64 [%r1], {count};
    bar.sync 0;
    setp.ge.u32 %p0, %r0, 32;
    @%p0 bra WAIT;
    setp.eq.u32 %p0, %r0, 0;
    @%p0 mbarrier.arrive.shared.b64 _, [%r1];
    bra END;
    WAIT: mbarrier.try_wait.parity.shared.b64 %p1, [%r1], 0;
    @!%p1 bra WAIT;
    END:"""
_BARRIER = {1024: "full"}


def test_names_reach_the_trace():
    trace = Trace()
    machine = Machine(barrier_names=_BARRIER, roles={"producer": [0], "consumer": [1]}, trace=trace)
    run(_WAITS.format(count=1), aligned((1,), np.uint32), warps=2, machine=machine)
    threads = [e["args"]["name"] for e in trace.events if e["name"] == "thread_name"]
    assert sorted(threads) == ["warp  0 (producer)", "warp  1 (consumer)"]
    assert "wait mbarrier full" in {e["name"] for e in trace.events}


def test_names_reach_reports():
    machine = Machine(barrier_names=_BARRIER, roles={"consumer": [1]}, instruction_limit=10_000)
    with pytest.raises(Deadlock, match=r"warp 1 \(consumer\) waits: .*mbarrier full"):
        run(_WAITS.format(count=2), aligned((1,), np.uint32), warps=2, machine=machine)
