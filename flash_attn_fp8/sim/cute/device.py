"""`sim.device`: CuTe-DSL programs of this process on CPU tensors, their launches as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from flash_attn_fp8.sim.launch import Buffer, CapturedLaunch

from .arguments import Memory
from .dsl import patch_dsl
from .patching import Patches
from .runtime import RUNTIME
from .torch_cuda import CudaTensors, patch_torch_cuda, properties

# Compute capability, and the shared memory a block may have (CUDA programming guide, table of
# technical specifications: 227 KB for both).
_ARCHS = {"sm_90a": ((9, 0), 227 * 1024), "sm_100a": ((10, 0), 227 * 1024)}


class Device:
    """The active simulated device: what it is, and where its launches go."""

    def __init__(self, arch: str, sm_count: int, on_launch: Callable[[CapturedLaunch], object]):
        self.arch = arch
        self.capability, self.shared_optin = _ARCHS[arch]
        self.sm_count = sm_count
        self.launches = 0
        self._memory = Memory()
        self._on_launch = on_launch

    def buffers(self) -> tuple[Buffer, ...]:
        """Global memory that is known to exist now."""
        return self._memory.buffers()

    def launched(self, launch: CapturedLaunch) -> None:
        """Hands a launch to the callback."""
        self.launches += 1
        # The callback computes on the host: its own tensors, if any, are CPU tensors.
        with torch._C.DisableTorchFunction():
            self._on_launch(launch)


@contextmanager
def device(
    arch: str, on_launch: Callable[[CapturedLaunch], object], sm_count: int = 4
) -> Iterator[Device]:
    """Runs CuTe-DSL programs of this process on CPU tensors, as if on one GPU of `arch`.

    Each kernel launch calls `on_launch`, in order, before the launching call returns; an exception
    it raises comes out of that call. The device has `sm_count` multiprocessors, few on purpose: a
    persistent kernel then runs several tiles a CTA. Not re-entrant, not for several threads.
    """
    if arch not in _ARCHS:
        raise ValueError(f"arch is {arch!r}; the simulator knows {', '.join(sorted(_ARCHS))}")
    if sm_count < 1:
        raise ValueError(f"sm_count is {sm_count}; a device has at least 1 multiprocessor")
    if RUNTIME.session is not None:
        raise RuntimeError("`sim.device` is active already; leave it before entering another")
    simulated = Device(arch, sm_count, on_launch)
    with Patches() as patches:
        RUNTIME.session = simulated
        patches.undo(_leave)
        patch_dsl(patches, simulated._memory, arch, sm_count)
        props = properties(sm_count, simulated.capability, simulated.shared_optin)
        patch_torch_cuda(patches, props)
        with CudaTensors(simulated._memory):
            yield simulated


def _leave() -> None:
    RUNTIME.session = None
    RUNTIME.take_pending()
