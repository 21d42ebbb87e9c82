"""Where a kernel's variables lie, and what its special registers hold."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from flash_attn_fp8.sim.errors import Unmodelled
from flash_attn_fp8.sim.launch import Buffer, Launch
from flash_attn_fp8.sim.memory import SHARED_RESERVED
from flash_attn_fp8.sim.ptx.program import Entry, Program, Special, Symbol, Variable
from flash_attn_fp8.sim.state import WARP_SIZE, Cta

_LANE = np.arange(WARP_SIZE)
_SHARED_UNIT = 128  # of allocation; %aggr_smem_size is not rounded


@dataclass
class Layout:
    """Offsets of shared, local and parameter symbols; addresses of module variables.

    `shared_end` is where dynamic shared memory ends if there is none of it; `local_bytes` a
    thread's. `storage` keeps module variables alive; `buffers` registers them.
    """

    addresses: dict[str, int] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)
    shared_end: int = SHARED_RESERVED
    local_bytes: int = 0
    storage: list[np.ndarray] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    @classmethod
    def of(cls, program: Program, entry: Entry, other: Layout | None = None) -> Layout:
        """Static shared variables first, then dynamic shared memory, which all externs share.

        `other` is the layout of another entry of the program: they share the module's variables.
        """
        layout = cls()
        for p in entry.parameters:
            layout.addresses[p.name] = p.offset
        variables = (*program.variables, *entry.variables)
        for v in variables:
            if v.space == "shared" and v.size:
                layout.shared_end = _align(layout.shared_end, v.align)
                layout._place_shared(v, layout.shared_end)
                layout.shared_end += v.size
            elif v.space == "local":
                layout.local_bytes = _align(layout.local_bytes, v.align)
                layout.addresses[v.name] = layout.local_bytes
                layout.local_bytes += v.size
            elif v.space in ("global", "const") and other and v in program.variables:
                layout.addresses[v.name] = other.addresses[v.name]
            elif v.space in ("global", "const"):
                layout._place_global(v)
        if other:
            shared = {other.addresses[v.name] for v in program.variables}
            layout.storage.extend(other.storage)
            layout.buffers.extend(b for b in other.buffers if b.address in shared)
        externs = [v for v in variables if v.space == "shared" and not v.size]
        if externs:
            layout.shared_end = _align(layout.shared_end, max(v.align for v in externs))
        for v in externs:
            layout._place_shared(v, layout.shared_end)
        return layout

    def _place_shared(self, v: Variable, offset: int) -> None:
        self.addresses[v.name] = offset
        self.shared.add(v.name)

    def _place_global(self, v: Variable) -> None:
        data = np.zeros(v.size + v.align, np.uint8)
        start = -data.ctypes.data % v.align
        data[start : start + v.size] = np.frombuffer(v.initial or bytes(v.size), np.uint8)
        self.storage.append(data)
        address = data.ctypes.data + start
        self.addresses[v.name] = address
        self.buffers.append(Buffer(v.name, address, v.size, v.space == "global"))

    def address(self, symbol: Symbol, cta: Cta) -> int:
        """The address of a symbol in its space, as this CTA sees it; its `offset` not added."""
        if symbol.name not in self.addresses:
            raise Unmodelled(f"the address of {symbol.name}")
        return self.addresses[symbol.name] + (cta.base if symbol.name in self.shared else 0)


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


_AXIS = {"x": 0, "y": 1, "z": 2}
_LANE_MASKS = {
    "eq": 1 << _LANE,
    "lt": (1 << _LANE) - 1,
    "le": (2 << _LANE) - 1,
    "gt": 0xFFFFFFFF & ~((2 << _LANE) - 1),
    "ge": 0xFFFFFFFF & ~((1 << _LANE) - 1),
}


def special(register: Special, layout: Layout, launch: Launch, cta: Cta, warp: int) -> np.ndarray:
    """A special register's value in each lane of a warp; only those that do not change."""
    name, _, axis = register.name.removeprefix("%").partition(".")
    if axis:
        value = _vector(name, launch, cta, warp)[_AXIS[axis]]
    elif name.startswith("lanemask_"):
        value = _LANE_MASKS[name.removeprefix("lanemask_")]
    else:
        value = _scalar(name, layout, launch, cta, warp)
    return np.broadcast_to(np.asarray(value, np.uint64), WARP_SIZE)


def _vector(name: str, launch: Launch, cta: Cta, warp: int) -> tuple[object, ...]:
    grid, block, cluster = launch.grid, launch.block, launch.cluster
    if name == "tid":
        thread = warp * WARP_SIZE + _LANE
        return (
            thread % block[0],
            thread // block[0] % block[1],
            thread // (block[0] * block[1]),
        )
    return {
        "ntid": block,
        "ctaid": cta.index,
        "nctaid": grid,
        "clusterid": tuple(i // c for i, c in zip(cta.index, cluster, strict=True)),
        "nclusterid": tuple(g // c for g, c in zip(grid, cluster, strict=True)),
        "cluster_ctaid": tuple(i % c for i, c in zip(cta.index, cluster, strict=True)),
        "cluster_nctaid": cluster,
    }[name]


def _scalar(name: str, layout: Layout, launch: Launch, cta: Cta, warp: int) -> object:
    gx, gy, _ = launch.grid
    x, y, z = cta.index
    linear = (z * gy + y) * gx + x
    static = layout.shared_end - SHARED_RESERVED
    return {
        "laneid": _LANE,
        "warpid": warp,
        "nwarpid": len(cta.warps),
        "smid": linear,  # one CTA an SM
        "nsmid": math.prod(launch.grid),
        "gridid": 0,
        "cluster_ctarank": cta.rank,
        "cluster_nctarank": math.prod(launch.cluster),
        "is_explicit_cluster": math.prod(launch.cluster) > 1,
        "dynamic_smem_size": launch.dynamic_smem,
        "total_smem_size": _align(static + launch.dynamic_smem, _SHARED_UNIT),
        "aggr_smem_size": static + launch.dynamic_smem + SHARED_RESERVED,
    }[name]
