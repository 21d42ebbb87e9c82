"""One cluster's execution: which warp runs, what it waits for, and when nobody can go on."""

from __future__ import annotations

import numpy as np

from flash_attn_fp8.sim import engine
from flash_attn_fp8.sim.barriers import Wait
from flash_attn_fp8.sim.errors import (
    Deadlock,
    InstructionLimit,
    Race,
    SimulationError,
    TensorMemoryMisuse,
)
from flash_attn_fp8.sim.isa import wgmma
from flash_attn_fp8.sim.order import Clocks
from flash_attn_fp8.sim.state import Cluster, Converge, Cta, Warp
from flash_attn_fp8.sim.trace import Trace


def _where(warp: Warp, pc: int) -> str:
    instruction = warp.code.instruction(pc)
    return "its end" if instruction is None else instruction.place


_POLLS_PER_WARP = 1000  # without any change; then it is a deadlock of warps that poll

_LOOKS_IN_A_ROW = 4096


class Execution:
    """Runs one cluster to its end, or to the first finding."""

    def __init__(self, cluster: Cluster, trace: Trace | None) -> None:
        self.cluster = cluster
        self.warps = [warp for cta in cluster.ctas for warp in cta.warps]
        self.schedule = cluster.pending.schedule
        self.trace = trace
        self.progress = 0  # visible operations that changed something

    def run(self) -> None:
        live = list(self.warps)
        stalled_at = -1
        while live:
            runnable = [w for w in live if w.runnable]
            if runnable and all(self._polls_in_vain(w) for w in runnable):
                if not self.cluster.pending.deliver_next():
                    raise Deadlock(self._deadlock_report(live))
                self.progress += 1
                continue
            if runnable:
                self._run_warp(self.schedule.pick(runnable))
                live = [w for w in live if not w.exited]
                continue
            if self.cluster.pending.deliver_next():
                continue
            # `try_wait` may give up; if that changes nothing, nothing will.
            if stalled_at == self.progress or not self._time_out(live):
                raise Deadlock(self._deadlock_report(live))
            stalled_at = self.progress
        while self.cluster.pending.deliver_next():
            pass
        self._check_end()

    def _run_warp(self, warp: Warp) -> None:
        micro = warp.code.micro
        self._recheck_waits(warp)
        advance = 0
        while True:
            stop = engine.run(
                micro,
                warp.registers,
                warp.pcs,
                warp.held,
                advance,
                warp.counts,
                warp.instructions_left,
            )
            advance = 0
            warp.instructions_left -= stop.executed
            if stop.status == engine.TRAPPED:
                pc, mask = stop.pc, warp.join_converging(stop.pc, stop.mask)
                warp.pc = pc
                self.cluster.actors.site = warp.code.instruction(pc)
                try:
                    result = self._handle(warp, pc, mask)
                except SimulationError as e:
                    raise self._located(e, warp, pc) from e
                if result is None:
                    pending = self.cluster.pending
                    pending.deliver(pending.now + 1)
                    if self._gives_way(warp, pc):
                        warp.step_past(mask)
                        return
                    advance = mask
                elif isinstance(result, Converge):
                    warp.hold_converging(pc, mask, result.required)
                else:
                    warp.hold_waiting(mask, result)
                    warp.cta.waits[warp.index, result.name] += 1
            elif stop.status == engine.DONE:
                warp.exit()
                if self.trace is not None:
                    self.trace.ended(warp, warp.clocks.time + warp.uncounted())
                self.progress += 1
                return
            elif stop.status == engine.HELD:
                if not warp.release_converged():
                    warp.runnable = False
                    return
            else:
                raise InstructionLimit(f"{warp.name} of {warp.cta.name} reached the limit")

    def _gives_way(self, warp: Warp, pc: int) -> bool:
        """Whether another warp runs next; counts what has changed something."""
        if warp.polled:
            warp.polled = False
            if warp.polls_since != self.progress:
                warp.polls_since, warp.polls = self.progress, 0
            warp.polls += 1
            return True
        if not warp.code.only_looks[pc]:
            self.progress += 1
            warp.looked = 0
            return self.schedule.switches()
        warp.looked += 1  # a loop of weak loads must not keep others from what it waits for
        return self.schedule.switches() or warp.looked % _LOOKS_IN_A_ROW == 0

    def _polls_in_vain(self, warp: Warp) -> bool:
        return warp.polls > _POLLS_PER_WARP and warp.polls_since == self.progress

    def _handle(self, warp: Warp, pc: int, mask: int) -> Wait | Converge | None:
        handler = warp.code.handlers[pc]
        if handler is None:
            raise RuntimeError(f"the engine stopped at {_where(warp, pc)}, which has no handler")
        now = 0
        if self.trace is not None:
            now = warp.clocks.time = warp.clocks.time + warp.uncounted()
            warp.barrier_used = ""
        result: Wait | Converge | None = handler(warp, mask)
        if self.trace is not None:
            self._record(self.trace, warp, now, pc, result)
        return result

    def _record(
        self, trace: Trace, warp: Warp, start: int, pc: int, result: Wait | Converge | None
    ) -> None:
        instruction = warp.code.instruction(pc)
        if instruction is None:
            return
        if warp.clocks.time > start:
            trace.waited(warp, start, warp.clocks.time, instruction)
        elif result is None:
            trace.started(warp, start, instruction)

    def _recheck_waits(self, warp: Warp) -> None:
        waits, warp.waits = warp.waits, []
        for mask, wait in waits:
            if warp.timed_out or wait.ready():
                warp.held &= ~mask
            else:
                warp.hold_waiting(mask, wait)

    def _time_out(self, live: list[Warp]) -> bool:
        gave_up = [w for w in live if any(wait.can_time_out for _, wait in w.waits)]
        for warp in gave_up:
            warp.timed_out = True
            warp.wake()
        return bool(gave_up)

    def _located(self, e: SimulationError, warp: Warp, pc: int) -> SimulationError:
        where = f"{warp.cta.name} {warp.name}, {_where(warp, pc)}"
        located = type(e)(f"{e}\n  at {where}\n  schedule: {self.schedule.name}")
        return located

    def _deadlock_report(self, live: list[Warp]) -> str:
        lines = [f"{len(live)} of {len(self.warps)} warps wait for ever:"]
        for warp in live:
            if warp.runnable:
                lines.append(f"  {warp.cta.name} {warp.name} polls at {_where(warp, warp.pc)}")
            for _, wait in warp.waits:
                lines.append(f"  {warp.cta.name} {warp.name} waits: {wait.describe()}")
                lines.append(f"    at {_where(warp, warp.pc)}")
            for pc, (mask, required) in warp.converging.items():
                lines.append(
                    f"  {warp.cta.name} {warp.name} lanes {mask:#010x} wait for lanes "
                    f"{required & ~mask:#010x} at {_where(warp, pc)}"
                )
        lines.append(f"  schedule: {self.schedule.name}")
        return "\n".join(lines)

    def _check_end(self) -> None:
        for cta in self.cluster.ctas:
            wgmma.check_end(cta)
            if self.cluster.checks.exits:
                self._check_exit(cta)
            if cta.tensor.allocated.any():
                columns = int(cta.tensor.allocated.sum())
                raise TensorMemoryMisuse(
                    f"{cta.name} exits with {columns} columns of {cta.tensor.name} allocated"
                )

    def _check_exit(self, cta: Cta) -> None:
        """Shared memory is another CTA's after the exit, and its mbarriers with it."""
        known = Clocks.zero()
        for warp in cta.warps:
            warp.settle_loads()
            known.join(warp.clocks)
            copies = warp.groups.get(("cp.async", 0))
            if copies is not None:  # end with their thread: a shipped kernel relies on that
                known.generic[copies.actor] = 0xFFFFFFFF
        cta.shared.check_exit(cta.name, known.generic)
        for barrier in cta.mbarriers.values():
            for handed in (barrier.completed, barrier.arriving):
                late = np.flatnonzero(handed.generic > known.generic)
                if late.size:
                    who = self.cluster.actors.names[int(late[0])]
                    raise Race(
                        f"{cta.name} exits without having waited for the arrival at {barrier.name} "
                        f"that {who} is behind; that memory may be another CTA's by then"
                    )
