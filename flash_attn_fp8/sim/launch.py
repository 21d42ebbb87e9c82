"""A kernel launch as data: what the bridge captures and the machine executes.

Plain Python, so that a launch can be pickled in one process and executed in another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = r"\.entry\s+{name}\s*\(([^)]*)\)"
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.([a-z]+)(\d+)\b[^\[]*?(?:\[(\d+)\])?\s*$")


@dataclass(frozen=True)
class Buffer:
    """Global memory that exists: `nbytes` of this process at `address`."""

    name: str
    address: int
    nbytes: int
    writable: bool = True


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launch's shape in CTAs and threads, its arguments, and what it may touch.

    `params` has one `bytes` per entry of the PTX's parameter list, of that parameter's size.
    `launch_registers` are a thread's at launch, for `setmaxnreg`'s pool; 0 where it is not known.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int] = (1, 1, 1)
    dynamic_smem: int = 0
    params: tuple[bytes, ...]
    launch_registers: int = 0
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, kw_only=True)
class CapturedLaunch(Launch):
    """A launch with its code: the PTX that is executed, and the cubin made of it, for reading.

    `attributes` are those that have no field of their own, as (CUDA's number, its 64 bytes).
    """

    ptx: str
    cubin: bytes = b""
    entry: str
    arch: str
    cooperative: bool = False
    programmatic_serialization: bool = False
    attributes: tuple[tuple[int, bytes], ...] = ()


def param_sizes(ptx: str, entry: str) -> tuple[int, ...]:
    """Bytes of each parameter of the kernel `entry`, in order."""
    found = re.search(_ENTRY.format(name=re.escape(entry)), ptx)
    if found is None:
        there = re.findall(r"\.entry\s+([\w$]+)", ptx)
        raise ValueError(f"the PTX has no .entry {entry}; it has {there or 'none'}")
    declarations = [text.strip() for text in found.group(1).split(",") if text.strip()]
    return tuple(_declared_size(text, entry) for text in declarations)


def _declared_size(declaration: str, entry: str) -> int:
    found = _PARAM.match(declaration)
    if found is None:
        raise ValueError(
            f"parameter of {entry} not understood: {declaration!r}; expected "
            "'.param [.align N] .type name[count]'"
        )
    _, bits, count = found.groups()
    return int(bits) // 8 * int(count or 1)
