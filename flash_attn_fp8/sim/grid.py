"""From a decoded kernel and a launch to clusters that can run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from flash_attn_fp8.sim import engine
from flash_attn_fp8.sim.decode import Code
from flash_attn_fp8.sim.launch import Launch
from flash_attn_fp8.sim.layout import Layout, special
from flash_attn_fp8.sim.memory import Checks, GlobalMemory, SharedMemory, TensorMemory
from flash_attn_fp8.sim.order import Actors
from flash_attn_fp8.sim.ptx.program import Program, Special, Symbol
from flash_attn_fp8.sim.schedule import Schedule
from flash_attn_fp8.sim.state import WARP_SIZE, Cluster, Cta, Pending, RegisterPool, Warp

Index = tuple[int, int, int]


@dataclass(frozen=True)
class Kernel:
    """An entry, decoded, with its variables placed."""

    program: Program
    code: Code
    layout: Layout


@dataclass(frozen=True)
class Settings:
    """What a machine gives every cluster."""

    checks: Checks
    schedule: Callable[[], Schedule]
    instruction_limit: int
    barrier_names: Mapping[int, str]
    target: str
    roles: Mapping[int, str]  # of warps


def cluster_at(
    origin: Index, kernel: Kernel, launch: Launch, memory: GlobalMemory, settings: Settings
) -> Cluster:
    """The cluster whose first CTA is `origin`, ready to run."""
    pending = Pending(settings.schedule())
    cluster = Cluster(
        [],
        memory,
        settings.checks,
        Actors(),
        pending,
        settings.barrier_names,
        settings.roles,
        settings.target,
    )
    nx, ny, _ = launch.cluster
    for rank in range(math.prod(launch.cluster)):
        x, y, z = rank % nx, rank // nx % ny, rank // (nx * ny)
        index = (origin[0] + x, origin[1] + y, origin[2] + z)
        cta = _cta(kernel, launch, cluster, rank, index)
        for warp in cta.warps:
            warp.instructions_left = settings.instruction_limit
        cluster.ctas.append(cta)
    return cluster


def origins(launch: Launch) -> Iterator[Index]:
    """First CTA of each cluster, in the order of the grid."""
    gx, gy, gz = launch.grid
    cx, cy, cz = launch.cluster
    for z in range(0, gz, cz):
        for y in range(0, gy, cy):
            for x in range(0, gx, cx):
                yield x, y, z


def _cta(kernel: Kernel, launch: Launch, cluster: Cluster, rank: int, index: Index) -> Cta:
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


def _resolver(
    layout: Layout, cta: Cta, warp: int
) -> Callable[[Special | Symbol], int | np.ndarray]:
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


def _warp(kernel: Kernel, cta: Cta, index: int, existing: int) -> Warp:
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
