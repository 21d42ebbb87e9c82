"""The loop: divergence, guards, counts, traps, held lanes and limits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from flash_attn_fp8.sim import decode, engine
from flash_attn_fp8.sim.isa import compiled, table
from tests.sim.lane.running import program

FULL = 0xFFFFFFFF
_REGISTERS = {f"%r{i}": "b32" for i in range(8)} | {f"%p{i}": "pred" for i in range(4)}
LANE = np.arange(32, dtype=np.uint64)


class Warp:
    """A warp of a program, its lane number in %r0."""

    def __init__(self, text: str, lanes: int = 32) -> None:
        self.code = decode.decode(program(text, _REGISTERS))
        self.registers = self.code.registers(lambda source: LANE)
        if "%r0" in self.code.rows:
            self["%r0"][:] = LANE
        self.pcs = engine.new_pcs(lanes)
        self.counts = np.zeros(len(self.code.micro), dtype=np.int64)

    def __getitem__(self, register: str) -> npt.NDArray[np.uint64]:
        return self.registers[self.code.rows[register]]

    def run(self, held: int = 0, advance: int = 0, limit: int = 1 << 40) -> engine.Stop:
        return engine.run(
            self.code.micro, self.registers, self.pcs, held, advance, self.counts, limit
        )

    def executions(self) -> list[int]:
        return list(decode.counts_by_instruction(self.code, self.counts))


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> None:
    """An instruction `stop` that only Python can execute."""
    monkeypatch.setitem(table.BINDERS, "stop", lambda ctx, instruction: lambda warp, mask: None)


def test_loops_of_different_lengths_merge_again() -> None:
    warp = Warp("""
        mov.b32 %r1, 0
        loop:
        add.s32 %r1, %r1, 1
        setp.lt.s32 %p0, %r1, %r0
        @%p0 bra loop
        add.s32 %r2, %r1, 100
        ret
        """)
    assert warp.run().status == engine.DONE
    trips = np.maximum(LANE, 1)
    np.testing.assert_array_equal(warp["%r2"], trips + np.uint64(100))
    # The loop runs as often as its slowest lane, what follows it once.
    assert warp.executions() == [1, 31, 31, 31, 1, 1]


def test_nested_branches() -> None:
    warp = Warp("""
        and.b32 %r1, %r0, 1
        setp.eq.b32 %p0, %r1, 0
        @%p0 bra even
        setp.gt.u32 %p1, %r0, 16
        @%p1 bra high
        mov.b32 %r2, 1
        bra.uni end
        high:
        mov.b32 %r2, 2
        bra.uni end
        even:
        mov.b32 %r2, 3
        end:
        add.s32 %r3, %r2, 10
        ret
        """)
    assert warp.run().status == engine.DONE
    wanted = np.where(LANE % 2 == 0, 13, np.where(LANE > 16, 12, 11))
    np.testing.assert_array_equal(warp["%r3"], wanted)
    assert warp.executions()[-2] == 1


def test_early_exit_and_guards() -> None:
    warp = Warp("""
        setp.lt.u32 %p0, %r0, 8
        mov.b32 %r1, 1
        @%p0 exit
        @!%p0 mov.b32 %r1, 2
        @%p0 mov.b32 %r1, 3
        """)
    assert warp.run().status == engine.DONE
    np.testing.assert_array_equal(warp["%r1"], np.where(LANE < 8, 1, 2))
    assert (warp.pcs == engine.EXITED).all()
    assert warp.executions() == [1, 1, 1, 1, 1]


def test_a_guard_that_its_own_instruction_overwrites() -> None:
    warp = Warp("""
        setp.lt.u32 %p0, %r0, 8
        @%p0 setp.eq.or.b32 %p0|%p1, %r0, 3, !%p0
        ret
        """)
    assert warp.run().status == engine.DONE
    # Of lanes below 8, p = (r == 3) or false, q = (r != 3) or false; the others keep theirs.
    np.testing.assert_array_equal(warp["%p0"], LANE == 3)
    np.testing.assert_array_equal(warp["%p1"], (LANE != 3) & (LANE < 8))


def test_a_partial_warp() -> None:
    warp = Warp("add.s32 %r1, %r0, 1\nret", lanes=5)
    assert warp.run().status == engine.DONE
    np.testing.assert_array_equal(warp["%r1"], np.where(LANE < 5, LANE + 1, 0))


def test_limit_stops_and_goes_on() -> None:
    text = """
        mov.b32 %r1, 0
        loop:
        add.s32 %r1, %r1, 1
        setp.lt.s32 %p0, %r1, 1000
        @%p0 bra loop
        ret
        """
    warp = Warp(text)
    stop = warp.run(limit=100)
    assert (stop.status, stop.executed, stop.mask) == (engine.LIMIT, 100, FULL)
    total = stop.executed
    while stop.status == engine.LIMIT:
        stop = warp.run(limit=700)
        total += stop.executed
    assert stop.status == engine.DONE
    assert total == sum(warp.executions()) == 1 + 3 * 1000 + 1
    assert (warp["%r1"] == 1000).all()


@pytest.mark.usefixtures("trap")
def test_a_trap_returns_the_lanes_whose_guard_holds() -> None:
    warp = Warp("""
        setp.lt.u32 %p0, %r0, 4
        @%p0 stop
        add.s32 %r1, %r0, 1
        ret
        """)
    stop = warp.run()
    assert (stop.status, stop.pc, stop.mask, stop.executed) == (engine.TRAPPED, 1, 0xF, 1)
    assert warp.code.handlers[stop.pc] is not None
    assert warp.executions()[1] == 0
    # Not advanced: the same trap again.
    again = warp.run()
    assert (again.status, again.pc, again.mask) == (engine.TRAPPED, 1, 0xF)
    # Held: the others go on, and the held ones keep the warp from ending.
    assert warp.run(held=0xF).status == engine.HELD
    np.testing.assert_array_equal(warp["%r1"], np.where(LANE >= 4, LANE + 1, 0))
    assert warp.run(advance=0xF).status == engine.DONE
    np.testing.assert_array_equal(warp["%r1"], LANE + 1)
    assert warp.executions() == [1, 1, 2, 2]


@pytest.mark.usefixtures("trap")
def test_a_trap_that_no_lane_takes_is_passed() -> None:
    warp = Warp("""
        setp.gt.u32 %p0, %r0, 99
        @%p0 stop
        ret
        """)
    assert warp.run().status == engine.DONE
    assert warp.executions() == [1, 1, 1]


@pytest.mark.usefixtures("trap")
def test_held_lanes_let_the_next_lowest_run_first() -> None:
    warp = Warp("""
        setp.lt.u32 %p0, %r0, 16
        @%p0 bra low
        add.s32 %r1, %r1, 1
        low:
        stop
        ret
        """)
    stop = warp.run(held=0xFFFF0000)  # the upper half has not even started
    assert (stop.status, stop.mask) == (engine.TRAPPED, 0xFFFF)
    stop = warp.run(held=0xFFFF)
    assert (stop.status, stop.mask) == (engine.TRAPPED, 0xFFFF0000)
    assert warp.run(advance=FULL).status == engine.DONE
    np.testing.assert_array_equal(warp["%r1"], np.where(LANE < 16, 0, 1))
    assert warp.executions()[3] == 1


def _lane_by_lane(body: list[tuple[str, int, int]], lane: int) -> int:
    """What one lane computes: (operation, constant, where a branch goes)."""
    accumulator, pc, steps = lane, 0, 0
    while pc < len(body):
        name, value, target = body[pc]
        steps += 1
        if steps > 300:
            return accumulator
        pc += 1
        if name == "add":
            accumulator = (accumulator + value) % (1 << 32)
        elif name == "xor":
            accumulator ^= value
        elif (accumulator >> value) & 1:
            pc = target
    return accumulator


@pytest.mark.parametrize("seed", range(12))
def test_random_forward_branches_do_what_each_lane_alone_would(seed: int) -> None:
    rng = random.Random(seed)
    body = []
    for index in range(25):
        name = rng.choice(["add", "xor", "branch"])
        value = rng.randrange(6) if name == "branch" else rng.randrange(100)
        body.append((name, value, rng.randrange(index + 1, 26)))
    lines = []
    for index, (name, value, target) in enumerate(body):
        lines.append(f"L{index}:")
        if name == "branch":
            lines += [f"shr.u32 %r1, %r0, {value}", "and.b32 %r1, %r1, 1"]
            lines += ["setp.ne.b32 %p0, %r1, 0", f"@%p0 bra L{target}"]
        else:
            lines.append(f"{'add.u32' if name == 'add' else 'xor.b32'} %r0, %r0, {value}")
    warp = Warp("\n".join([*lines, "L25:", "ret"]))
    assert warp.run().status == engine.DONE
    wanted = [_lane_by_lane(body, lane) for lane in range(32)]
    np.testing.assert_array_equal(warp["%r0"], wanted)
    assert max(warp.executions()) == 1  # forward branches alone: everything merges


def test_the_generated_module_is_written_once_and_named_by_its_content(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x" / "lanes.py"
    compiled._write_once(path, "first")
    stamp = path.stat().st_mtime_ns
    compiled._write_once(path, "second")
    assert (path.read_text(), path.stat().st_mtime_ns) == ("first", stamp)
    assert [entry.name for entry in path.parent.iterdir()] == ["lanes.py"]
    assert compiled._fingerprint("a") != compiled._fingerprint("b")
    assert compiled.generate() == compiled.generate()
    monkeypatch.setenv("FLASH_ATTN_FP8_CACHE", str(tmp_path))
    assert compiled.cache_directory() == tmp_path
