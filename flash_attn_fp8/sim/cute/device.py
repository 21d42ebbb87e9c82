"""`sim.device`: CuTe-DSL programs of this process on CPU tensors, executed or captured."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from flash_attn_fp8.sim.counters import Run
from flash_attn_fp8.sim.errors import SimulationError
from flash_attn_fp8.sim.launch import Buffer, CapturedLaunch
from flash_attn_fp8.sim.machine import Machine, MachineOptions
from flash_attn_fp8.sim.ptx.parse import parse

from .arguments import Memory
from .dsl import patch_dsl
from .patching import Patches
from .runtime import RUNTIME
from .torch_cuda import CudaTensors, patch_torch_cuda, properties

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Compute capability, and the shared memory a block may have (CUDA programming guide, table of
# technical specifications: 227 KB for both).
_ARCHS = {
    "sm_80": ((8, 0), 163 * 1024),
    "sm_86": ((8, 6), 99 * 1024),
    "sm_89": ((8, 9), 99 * 1024),
    "sm_90a": ((9, 0), 227 * 1024),
    "sm_100a": ((10, 0), 227 * 1024),
}


# Two launches of one kernel share the program, and so what the machine has decoded of it.
_program = functools.lru_cache(maxsize=64)(parse)


class Device:
    """The active simulated device: what it is, and where its launches go.

    `runs` has, for each launch that was executed, in order, what it did.
    """

    def __init__(
        self,
        arch: str,
        sm_count: int,
        machine: Machine,
        on_launch: Callable[[CapturedLaunch], object] | None,
    ) -> None:
        self.arch = arch
        self.capability, self.shared_optin = _ARCHS[arch]
        self.sm_count = sm_count
        self.machine = machine
        self.launches = 0
        self.runs: list[Run] = []
        self.memory = Memory()
        self._on_launch = on_launch or self.execute

    def buffers(self) -> tuple[Buffer, ...]:
        """Global memory that is known to exist now."""
        return self.memory.buffers()

    def launched(self, launch: CapturedLaunch) -> None:
        """Executes a launch, or hands it to the callback."""
        self.launches += 1
        # The callback computes on the host: its own tensors, if any, are CPU tensors.
        with torch._C.DisableTorchFunction():
            self._on_launch(launch)

    def execute(self, launch: CapturedLaunch) -> Run:
        """Executes a launch to its end; adds to `runs`. A callback may call it."""
        try:
            run = self.machine.launch(_program(launch.ptx), launch.entry, launch)
        except SimulationError as error:
            where = f"in launch {self.launches} of the device, {_shape(launch)}"
            raise type(error)(f"{launch.entry}: {error}\n  {where}") from error
        self.runs.append(run)
        return run


def _shape(launch: CapturedLaunch) -> str:
    return f"grid {launch.grid}, block {launch.block}, cluster {launch.cluster}"


@contextmanager
def device(
    arch: str,
    on_launch: Callable[[CapturedLaunch], object] | None = None,
    sm_count: int = 4,
    **options: Unpack[MachineOptions],
) -> Iterator[Device]:
    """Runs CuTe-DSL programs of this process on CPU tensors, as if on one GPU of `arch`.

    Each kernel launch is executed before the launching call returns, on a `Machine` with these
    options (`checks`, `schedule`, `roles`, ...: `Machine` describes them); or `on_launch` is called
    with it instead. What goes wrong there (a `Finding`, `Unmodelled`, the callback's exception)
    comes out of the launching call. The device has `sm_count` multiprocessors, few on purpose: a
    persistent kernel then runs several tiles a CTA. Not re-entrant, not for several threads.
    """
    if arch not in _ARCHS:
        raise ValueError(f"arch is {arch!r}; the simulator knows {', '.join(sorted(_ARCHS))}")
    if sm_count < 1:
        raise ValueError(f"sm_count is {sm_count}; a device has at least 1 multiprocessor")
    if RUNTIME.session is not None:
        raise RuntimeError("`sim.device` is active already; leave it before entering another")
    machine = Machine(arch, **options)
    simulated = Device(arch, sm_count, machine, on_launch)
    with Patches() as patches:
        RUNTIME.session = simulated
        patches.undo(_leave)
        patch_dsl(patches, simulated.memory, arch, sm_count)
        props = properties(sm_count, simulated.capability, simulated.shared_optin)
        patch_torch_cuda(patches, props)
        with CudaTensors(simulated.memory):
            yield simulated


def _leave() -> None:
    RUNTIME.session = None
    RUNTIME.take_pending()
