"""The machine: a launch's grid, cluster by cluster, until every warp has exited.

Warps run lane-wise instructions in the compiled engine; at anything else it hands over to the
instruction's handler (`isa/`), which acts on the cluster's state or returns what it waits for.
Clusters of a grid are independent: they run one after the other, or over `processes`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypedDict

from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.decode import Code, decode
from flash_attn_fp8.sim.execution import Execution
from flash_attn_fp8.sim.grid import Index, Kernel, Settings, cluster_at, origins
from flash_attn_fp8.sim.isa import (  # noqa: F401  (they register their instructions)
    atomic,
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
from flash_attn_fp8.sim.layout import Layout
from flash_attn_fp8.sim.memory import SHARED_RESERVED, Checks, GlobalMemory
from flash_attn_fp8.sim.processes import run_clusters
from flash_attn_fp8.sim.ptx.program import Entry, Program
from flash_attn_fp8.sim.roles import Roles, check_roles, role_of
from flash_attn_fp8.sim.schedule import RoundRobin, Schedule
from flash_attn_fp8.sim.state import WARP_SIZE
from flash_attn_fp8.sim.trace import Trace


@dataclass(frozen=True)
class Target:
    """What a program may ask of the chip."""

    name: str
    shared_bytes: int  # a CTA's largest, without what the system reserves
    cluster_ctas: int  # a cluster's largest, the non-portable size


TARGETS = {
    "sm_80": Target("sm_80", 163 * 1024, 1),
    "sm_86": Target("sm_86", 99 * 1024, 1),
    "sm_89": Target("sm_89", 99 * 1024, 1),
    "sm_90a": Target("sm_90a", 227 * 1024, 16),
    "sm_100a": Target("sm_100a", 227 * 1024, 16),
}


class MachineOptions(TypedDict, total=False):
    """The keywords of `Machine`, for those who pass them on."""

    checks: Checks
    schedule: Callable[[], Schedule]
    instruction_limit: int
    barrier_names: Mapping[int, str]
    roles: Roles
    workers: int
    trace: Trace | None


class Machine:
    """Executes programs for one target.

    Args:
        target: a name in `TARGETS`: "sm_80", "sm_90a", "sm_100a", ...
        checks: what is looked for beside bounds, alignment, barrier misuse and deadlock.
        schedule: makes the schedule of each cluster; round robin by default.
        instruction_limit: executed instructions of one warp before the run is cut off.
        barrier_names: of mbarriers, by their offset in shared memory, for reports and counters.
        roles: names for warps, {"softmax": range(8), "mma": [12]}, for reports, counters and the
            trace; a launch must have the warps that they name.
        workers: processes that share a grid's clusters.
        trace: collects a timeline; needs workers=1.
    """

    def __init__(
        self,
        target: str = "sm_100a",
        *,
        checks: Checks = Checks(),  # noqa: B008
        schedule: Callable[[], Schedule] = RoundRobin,
        instruction_limit: int = 1 << 40,
        barrier_names: Mapping[int, str] = MappingProxyType({}),
        roles: Roles = MappingProxyType({}),
        workers: int = 1,
        trace: Trace | None = None,
    ) -> None:
        if target not in TARGETS:
            raise ValueError(f"target {target!r} is none of {', '.join(TARGETS)}")
        if workers < 1 or (trace is not None and workers > 1):
            raise ValueError(f"workers={workers}: at least 1, and no more with a trace")
        self.target = TARGETS[target]
        self.workers = workers
        self.trace = trace
        names = role_of(roles)
        if trace is not None:
            trace.names = {**names, **trace.names}
        self._settings = Settings(checks, schedule, instruction_limit, barrier_names, target, names)
        self._kernels: dict[tuple[int, str], Kernel] = {}

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
        check_roles(self._settings.roles, math.prod(launch.block))
        buffers = (*launch.buffers, *kernel.layout.buffers)
        job = _Job(kernel, launch, GlobalMemory(buffers), self._settings, self.trace)
        clusters = list(origins(launch))
        if self.workers > 1 and len(clusters) > 1:
            return run_clusters(job, clusters, self.workers)
        run = job.count()
        for origin in clusters:
            run.update(job.run(origin))
        return run

    def _kernel(self, program: Program, name: str) -> Kernel:
        # The kernel keeps its program, so that the identity stays taken.
        key = (id(program), name)
        if key not in self._kernels:
            entry = program.entries[name]
            others = (k.layout for (p, _), k in self._kernels.items() if p == id(program))
            layout = Layout.of(program, entry, next(others, None))
            self._kernels[key] = Kernel(program, _decoded(entry), layout)
        return self._kernels[key]


_codes: dict[int, Code] = {}  # by the identity of the entry, which the code keeps alive


def _decoded(entry: Entry) -> Code:
    """Decoded once a process: what machines share of a kernel."""
    if id(entry) not in _codes:
        if len(_codes) >= 64:
            _codes.clear()
        _codes[id(entry)] = decode(entry)
    return _codes[id(entry)]


@dataclass(frozen=True)
class _Job:
    """A launch that is ready: any of its clusters can run."""

    kernel: Kernel
    launch: Launch
    memory: GlobalMemory
    settings: Settings
    trace: Trace | None

    def count(self) -> Run:
        """Counts that start at nothing."""
        warps = -(-math.prod(self.launch.block) // WARP_SIZE)
        return Run.zero(self.kernel.code.entry, warps, self.settings.roles)

    def run(self, origin: Index) -> Run:
        cluster = cluster_at(origin, self.kernel, self.launch, self.memory, self.settings)
        Execution(cluster, self.trace).run()
        run = self.count()
        run.add(cluster)
        cluster.release()
        return run


def _check_launch(kernel: Kernel, launch: Launch, target: Target) -> None:
    made_for = re.fullmatch(r"sm_(\d+)[af]", kernel.program.target)  # these do not run elsewhere
    if made_for and made_for[1] != target.name.strip("sm_a"):
        raise ValueError(f"the program is for {kernel.program.target}, the machine {target.name}")
    sizes = [p.size for p in kernel.code.entry.parameters]
    found = [len(p) for p in launch.params]
    if sizes != found:
        raise ValueError(f"the entry has parameters of {sizes} bytes, the launch of {found}")
    threads = math.prod(launch.block)
    if not 0 < threads <= 1024:
        raise ValueError(f"block {launch.block} has {threads} threads, not 1 to 1024")
    directives = kernel.code.entry.directives
    for name, found_shape in (("reqntid", launch.block), ("reqnctapercluster", launch.cluster)):
        wanted = directives.get(name)
        if wanted and (*wanted, 1, 1)[:3] != tuple(found_shape):
            raise ValueError(f"the entry has .{name} {wanted}, the launch {found_shape}")
    if threads > math.prod(directives.get("maxntid") or (1024,)):
        raise ValueError(f"block {launch.block}; the entry has .maxntid {directives['maxntid']}")
    for g, c in zip(launch.grid, launch.cluster, strict=True):
        if c < 1 or g < 1 or g % c:
            raise ValueError(f"grid {launch.grid} is no multiple of cluster {launch.cluster}")
    if math.prod(launch.cluster) > target.cluster_ctas:
        raise ValueError(
            f"cluster {launch.cluster}; {target.name} has at most {target.cluster_ctas} CTAs in one"
        )
    if launch.dynamic_smem < 0:
        raise ValueError(f"{launch.dynamic_smem} bytes of dynamic shared memory")
    used = kernel.layout.shared_end + launch.dynamic_smem - SHARED_RESERVED
    if used > target.shared_bytes:
        raise ValueError(f"{used} bytes of shared memory; {target.name} has {target.shared_bytes}")
