"""Clusters of a launch over processes of this machine: the same code, the same findings, sooner.

The processes are forked, so that a launch that is ready need not be sent anywhere. Each takes the
next cluster when it is done with one, adds up what it counted, and sends that back at its end.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from flash_attn_fp8.sim import engine
from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.errors import SimulationError
from flash_attn_fp8.sim.grid import Index
from flash_attn_fp8.sim.memory import GlobalMemory


class Job(Protocol):
    """A launch that is ready: any of its clusters can run."""

    @property
    def memory(self) -> GlobalMemory: ...
    def count(self) -> Run: ...
    def run(self, origin: Index) -> Run: ...


@dataclass(frozen=True)
class _Inherited:
    job: Job
    clusters: Sequence[Index]
    taken: Any  # how many clusters, as a number that the processes share


_inherited: _Inherited | None = None


def run_clusters(job: Job, clusters: Sequence[Index], workers: int) -> Run:
    """Run them in forked processes, which share global memory; its order is not judged.

    Raises:
        SimulationError: of several, the first cluster's in the order of the grid.
    """
    global _inherited
    engine.warm_up()  # or else each process would load it
    context = multiprocessing.get_context("fork")
    workers = min(workers, len(clusters))
    with job.memory.shared_between_processes():
        _inherited = _Inherited(job, clusters, context.Value("q", 0))
        try:
            with ProcessPoolExecutor(workers, mp_context=context) as pool:
                parts = list(pool.map(_work, range(workers)))
        finally:
            _inherited = None
    faults = [(at, fault) for _, at, fault in parts if fault is not None]
    if faults:
        raise min(faults, key=lambda found: found[0])[1]
    run = job.count()
    for counts, _, _ in parts:
        run.add_counts(counts)
    return run


def _work(_: int) -> tuple[Any, int, SimulationError | None]:
    """Run clusters until none is left: their counts, and the fault that one of them ended with."""
    if _inherited is None:
        raise RuntimeError("a worker without a job: workers need fork")
    job, clusters = _inherited.job, _inherited.clusters
    run = job.count()
    while (at := _take(_inherited.taken)) < len(clusters):
        try:
            run.update(job.run(clusters[at]))
        except SimulationError as fault:
            _take(_inherited.taken, len(clusters))  # those before are being run, and come to an end
            return run.counts(), at, fault
    return run.counts(), -1, None


def _take(taken: Any, how_many: int = 1) -> int:
    with taken.get_lock():
        at: int = taken.value
        taken.value = at + how_many
    return at
