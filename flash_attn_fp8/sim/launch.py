"""A kernel launch as data: what the bridge captures and the machine executes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Buffer:
    """Global memory that exists: `nbytes` of this process at `address`."""

    name: str
    address: int
    nbytes: int
    writable: bool = True


@dataclass(frozen=True)
class Launch:
    """Grid, block and cluster in CTAs and threads; one `bytes` per kernel parameter.

    `launch_registers` are a thread's at launch, for `setmaxnreg`'s pool; 0 where it is not known.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    params: tuple[bytes, ...]
    buffers: tuple[Buffer, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0
    launch_registers: int = 0
    names: dict[int, str] = field(default_factory=dict)  # of barriers, by shared offset
