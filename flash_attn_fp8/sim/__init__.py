"""A functional simulator of the PTX that CuTe DSL emits for sm_80, sm_90a and sm_100a, on the CPU.

    from flash_attn_fp8 import sim

    with sim.device("sm_100a") as gpu:      # CuTe-DSL programs run on CPU tensors in here
        my_cute_program(torch_tensor, ...)
    gpu.runs[0].as_data()                    # what was executed

    run = sim.Machine("sm_100a").launch(sim.parse(ptx), "kernel", launch)

It imports nothing else of flash_attn_fp8, and can be lifted out of it. `device` needs torch and
CuTe DSL and is loaded when it is first asked for; the rest needs numpy and numba. docs/simulator.md
says what is modelled, what is found, and what is not judged.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_attn_fp8.sim.counters import Run
    from flash_attn_fp8.sim.cute.device import device
    from flash_attn_fp8.sim.launch import Buffer, CapturedLaunch, Launch
    from flash_attn_fp8.sim.machine import Machine
    from flash_attn_fp8.sim.memory import Checks
    from flash_attn_fp8.sim.ptx.parse import parse
    from flash_attn_fp8.sim.schedule import Adversarial, Random, RoundRobin
    from flash_attn_fp8.sim.trace import Trace

_HOME = {
    "Adversarial": "schedule",
    "Buffer": "launch",
    "CapturedLaunch": "launch",
    "Checks": "memory",
    "Launch": "launch",
    "Machine": "machine",
    "Random": "schedule",
    "RoundRobin": "schedule",
    "Run": "counters",
    "Trace": "trace",
    "device": "cute.device",
    "parse": "ptx.parse",
}

__all__ = [
    "Adversarial",
    "Buffer",
    "CapturedLaunch",
    "Checks",
    "Launch",
    "Machine",
    "Random",
    "RoundRobin",
    "Run",
    "Trace",
    "device",
    "is_active",
    "parse",
]


def is_active() -> bool:
    """Whether this process is inside `sim.device`; loads nothing."""
    bridge = sys.modules.get(f"{__name__}.cute.runtime")
    return bridge is not None and bridge.RUNTIME.session is not None


def __getattr__(name: str) -> Any:
    """Load what is asked for: `import flash_attn_fp8` must not load a compiler."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
