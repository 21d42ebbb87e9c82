"""A functional simulator of the PTX that CuTe DSL emits for sm_100a and sm_90a, on the CPU.

`device` (which needs torch and CuTe DSL) is loaded when it is first asked for; nothing else here
imports more than numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flash_attn_fp8.sim.cute.device import device

__all__ = ["device"]


def __getattr__(name: str) -> Any:
    if name == "device":
        from flash_attn_fp8.sim.cute.device import device

        return device
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
