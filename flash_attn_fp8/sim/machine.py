"""The machine: a launch's grid, cluster by cluster, until every warp has exited.

Warps run lane-wise instructions in the compiled engine; at anything else it hands over to the
instruction's handler (`isa/`), which acts on the cluster's state or returns what it waits for.
Clusters of a grid run one after the other; nothing that this machine judges crosses them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from flash_attn_fp8.sim import engine
from flash_attn_fp8.sim.barriers import Wait
from flash_attn_fp8.sim.decode import Code, counts_by_instruction, decode
from flash_attn_fp8.sim.errors import (
    Deadlock,
    InstructionLimit,
    SimulationError,
    TensorMemoryMisuse,
)
from flash_attn_fp8.sim.isa import (  # noqa: F401  (they register their instructions)
    barrier,
    bulk,
    control,
    cp_async,
    memory,
    mma,
    tcgen05,
    tma,
    wgmma,
)
from flash_attn_fp8.sim.launch import Launch
from flash_attn_fp8.sim.layout import Layout, special
from flash_attn_fp8.sim.memory import (
    SHARED_RESERVED,
    Checks,
    GlobalMemory,
    SharedMemory,
    TensorMemory,
)
from flash_attn_fp8.sim.order import Actors
from flash_attn_fp8.sim.ptx.program import Entry, Program, Special, Symbol
from flash_attn_fp8.sim.schedule import RoundRobin, Schedule
from flash_attn_fp8.sim.state import WARP_SIZE, Cluster, Converge, Cta, Pending, RegisterPool, Warp
from flash_attn_fp8.sim.trace import Trace


@dataclass(frozen=True)
class Target:
    """What a program may ask of the chip."""

    name: str
    shared_bytes: int  # a CTA's largest, without what the system reserves


TARGETS = {
    "sm_80": Target("sm_80", 163 * 1024),
    "sm_90a": Target("sm_90a", 227 * 1024),
    "sm_100a": Target("sm_100a", 227 * 1024),
}


@dataclass(frozen=True)
class _Kernel:
    """An entry, decoded; `program` is kept because the cache goes by its identity.

    The layout is one machine's: it holds the module's variables.
    """

    program: Program
    code: Code
    layout: Layout


@dataclass
class Run:
    """What a launch did: executed instructions by PTX line and warp, and traffic by kind."""

    kernel: str = ""
    instructions: Counter[tuple[int, int]] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)
    warp_instructions: int = 0


class Machine:
    """Executes programs for one target.

    Args:
        target: "sm_80", "sm_90a" or "sm_100a".
        checks: what is looked for beside bounds, alignment, barrier misuse and deadlock.
        schedule: makes the schedule of each cluster; round robin by default.
        instruction_limit: executed instructions of one warp before the run is cut off.
        barrier_names: of mbarriers, by their offset in shared memory, for reports.
        trace: collects a timeline.
    """

    def __init__(
        self,
        target: str = "sm_100a",
        *,
        checks: Checks = Checks(),  # noqa: B008
        schedule: Callable[[], Schedule] = RoundRobin,
        instruction_limit: int = 1 << 40,
        barrier_names: Mapping[int, str] = MappingProxyType({}),
        trace: Trace | None = None,
    ) -> None:
        if target not in TARGETS:
            raise ValueError(f"target {target!r} is none of {', '.join(TARGETS)}")
        self.target = TARGETS[target]
        self.checks = checks
        self.schedule = schedule
        self.instruction_limit = instruction_limit
        self.barrier_names = barrier_names
        self.trace = trace
        self._kernels: dict[tuple[int, str], _Kernel] = {}

    def launch(self, program: Program, entry: str, launch: Launch) -> Run:
        """Run a kernel to its end. Writes go to the launch's buffers.

        Raises:
            Finding: the program is at fault (a race, a deadlock, an access out of bounds, ...).
            Unmodelled: it needs something that this simulator does not know.
        """
        if entry not in program.entries:
            raise ValueError(f"no entry {entry!r}; the program has {', '.join(program.entries)}")
        kernel = self._kernel(program, entry)
        _check_launch(kernel, launch, self.target)
        memory = GlobalMemory((*launch.buffers, *kernel.layout.buffers))
        run = Run(entry)
        for origin in _cluster_origins(launch):
            cluster = self._cluster(kernel, launch, origin, memory)
            _Runner(cluster, self.trace).run()
            _account(cluster, run)
        return run

    def _kernel(self, program: Program, name: str) -> _Kernel:
        key = (id(program), name)
        found = self._kernels.get(key)
        if found is None:
            entry = program.entries[name]
            found = _Kernel(program, _decoded(entry), Layout.of(program, entry))
            self._kernels[key] = found
        return found

    def _cluster(
        self, kernel: _Kernel, launch: Launch, origin: tuple[int, int, int], memory: GlobalMemory
    ) -> Cluster:
        schedule = self.schedule()
        cluster = Cluster(
            [], memory, self.checks, Actors(), Pending(schedule), self.barrier_names
        )
        shape = launch.cluster
        for rank in range(math.prod(shape)):
            at = (rank % shape[0], rank // shape[0] % shape[1], rank // (shape[0] * shape[1]))
            index = tuple(o + a for o, a in zip(origin, at, strict=True))
            cta = _cta(kernel, launch, cluster, rank, index)  # type: ignore[arg-type]
            for warp in cta.warps:
                warp.instructions_left = self.instruction_limit
            cluster.ctas.append(cta)
        return cluster


_codes: dict[int, Code] = {}  # by the identity of the entry, which the code keeps alive


def _decoded(entry: Entry) -> Code:
    found = _codes.get(id(entry))
    if found is None:
        if len(_codes) >= 64:
            _codes.clear()
        found = _codes[id(entry)] = decode(entry)
    return found


def _check_launch(kernel: _Kernel, launch: Launch, target: Target) -> None:
    sizes = [p.size for p in kernel.code.entry.parameters]
    found = [len(p) for p in launch.params]
    if sizes != found:
        raise ValueError(f"the entry has parameters of {sizes} bytes, the launch of {found}")
    threads = math.prod(launch.block)
    if not 0 < threads <= 1024:
        raise ValueError(f"block {launch.block} has {threads} threads, not 1 to 1024")
    for g, c in zip(launch.grid, launch.cluster, strict=True):
        if c < 1 or g % c:
            raise ValueError(f"grid {launch.grid} is no multiple of cluster {launch.cluster}")
    used = kernel.layout.shared_end + launch.dynamic_smem - SHARED_RESERVED
    if used > target.shared_bytes:
        raise ValueError(f"{used} bytes of shared memory; {target.name} has {target.shared_bytes}")


def _cluster_origins(launch: Launch):  # type: ignore[no-untyped-def]
    gx, gy, gz = launch.grid
    cx, cy, cz = launch.cluster
    for z in range(0, gz, cz):
        for y in range(0, gy, cy):
            for x in range(0, gx, cx):
                yield x, y, z


def _cta(
    kernel: _Kernel, launch: Launch, cluster: Cluster, rank: int, index: tuple[int, int, int]
) -> Cta:
    where = f"rank {rank}'s " if math.prod(launch.cluster) > 1 else ""
    size = kernel.layout.shared_end + launch.dynamic_smem
    threads = math.prod(launch.block)
    cta = Cta(
        index=index,
        rank=rank,
        cluster=cluster,
        shared=SharedMemory(f"{where}shared memory", size, cluster.checks, cluster.actors),
        tensor=TensorMemory(f"{where}tensor memory", cluster.checks, cluster.actors),
        params=_parameter_space(kernel.code, launch),
        launch=launch,
        pool=RegisterPool(),
    )
    for w in range(-(-threads // WARP_SIZE)):
        lanes = min(WARP_SIZE, threads - w * WARP_SIZE)
        cta.warps.append(_warp(kernel, cta, w, (1 << lanes) - 1))
    for warp in cta.warps:  # after all exist: %nwarpid counts them
        warp.registers = kernel.code.registers(_resolver(kernel.layout, cta, warp.index))
    return cta


def _resolver(layout: Layout, cta: Cta, warp: int):  # type: ignore[no-untyped-def]
    def resolve(source: Special | Symbol) -> int | np.ndarray:
        if isinstance(source, Symbol):
            return layout.address(source, cta)
        return special(source, layout, cta.launch, cta, warp)

    return resolve


def _parameter_space(code: Code, launch: Launch) -> np.ndarray:
    parameters = code.entry.parameters
    end = max((p.offset + p.size for p in parameters), default=0)
    space = np.zeros(end, np.uint8)
    for p, value in zip(parameters, launch.params, strict=True):
        space[p.offset : p.offset + p.size] = np.frombuffer(value, np.uint8)
    return space


def _warp(kernel: _Kernel, cta: Cta, index: int, existing: int) -> Warp:
    return Warp(
        index=index,
        cta=cta,
        code=kernel.code,
        registers=np.empty((0, WARP_SIZE), np.uint64),
        counts=np.zeros(len(kernel.code.micro), np.int64),
        pcs=engine.new_pcs(existing.bit_length()),
        existing=existing,
        local=np.zeros((WARP_SIZE, kernel.layout.local_bytes), np.uint8),
        launch_registers=cta.launch.launch_registers,
    )


def _account(cluster: Cluster, run: Run) -> None:
    for cta in cluster.ctas:
        run.traffic.update(cta.counters)
        for warp in cta.warps:
            executed = counts_by_instruction(warp.code, warp.counts)
            for i in np.flatnonzero(executed).tolist():
                run.instructions[warp.code.entry.instructions[i].line, warp.index] += int(executed[i])
            run.warp_instructions += int(executed.sum())


def _where(warp: Warp, pc: int) -> str:
    instruction = warp.code.instruction(pc)
    if instruction is None:
        return "its end"
    return f"PTX line {instruction.line}: {instruction.text.strip()}"


_POLLS_PER_WARP = 1000  # without any change; then it is a deadlock of warps that poll


class _Runner:
    """Runs one cluster to its end."""

    def __init__(self, cluster: Cluster, trace: Trace | None) -> None:
        self.cluster = cluster
        self.warps = [warp for cta in cluster.ctas for warp in cta.warps]
        self.schedule = cluster.pending.schedule
        self.trace = trace
        self.progress = 0  # visible operations that changed something
        self.polls = 0  # operations since then that only looked

    def run(self) -> None:
        live = list(self.warps)
        stalled_at = -1
        while live:
            runnable = [w for w in live if w.runnable]
            if self.polls > _POLLS_PER_WARP * len(live) and not self.cluster.pending.deliver_next():
                raise Deadlock(self._deadlock_report(live))
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
                micro, warp.registers, warp.pcs, warp.held, advance, warp.counts, warp.instructions_left
            )
            advance = 0
            warp.instructions_left -= stop.executed
            if stop.status == engine.TRAPPED:
                pc, mask = stop.pc, warp.join_converging(stop.pc, stop.mask)
                warp.pc = pc
                try:
                    result = self._handle(warp, pc, mask)
                except SimulationError as e:
                    raise self._located(e, warp, pc) from e
                if result is None:
                    pending = self.cluster.pending
                    pending.deliver(pending.now + 1)
                    if self._gives_way(warp):
                        warp.step_past(mask)
                        return
                    advance = mask
                elif isinstance(result, Converge):
                    warp.hold_converging(pc, mask, result.required)
                else:
                    warp.hold_waiting(mask, result)
            elif stop.status == engine.DONE:
                warp.exited = True
                self.progress += 1
                return
            elif stop.status == engine.HELD:
                if not warp.release_converged():
                    warp.runnable = False
                    return
            else:
                raise InstructionLimit(f"{warp.name} of {warp.cta.name} reached the limit")

    def _gives_way(self, warp: Warp) -> bool:
        """Whether another warp runs next; counts what has changed something."""
        if warp.polled:
            warp.polled = False
            self.polls += 1
            return True
        self.progress += 1
        self.polls = 0
        return self.schedule.switches()

    def _handle(self, warp: Warp, pc: int, mask: int) -> Wait | Converge | None:
        handler = warp.code.handlers[pc]
        if self.trace is None:
            return handler(warp, mask)
        now = warp.clocks.time + warp.uncounted()
        warp.clocks.time = now
        result = handler(warp, mask)
        if warp.clocks.time > now:
            self.trace.waited(warp, now, warp.clocks.time, warp.code.instruction(pc).text)
        else:
            self.trace.ran(warp, now)
        return result

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
            if cta.tensor.allocated.any():
                columns = int(cta.tensor.allocated.sum())
                raise TensorMemoryMisuse(
                    f"{cta.name} exits with {columns} columns of {cta.tensor.name} allocated"
                )
