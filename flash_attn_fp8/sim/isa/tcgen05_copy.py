"""Tensor memory and registers (`tcgen05.ld`, `.st`, `.wait`), and from shared memory (`.cp`).

A warp reaches the quarter of the lanes that its number modulo 4 names. A load is over after
`tcgen05.wait::ld`, or once an instruction has used a register that it loaded: shipped kernels have
no waits, since what uses the registers waits for them. A store is an operation of its own kind,
which its warp has observed only after `tcgen05.wait::st`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim.errors import OutOfBounds, TensorMemoryMisuse
from flash_attn_fp8.sim.isa.tcgen05_alloc import group
from flash_attn_fp8.sim.matrix import FORMATS, decode_shared_sm100, read_shared
from flash_attn_fp8.sim.order import Access
from flash_attn_fp8.sim.state import LoadUnderWay, Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Code

WARP_LANES = 32


@dataclass(frozen=True)
class Shape:
    """A data movement shape: lanes, registers and 32-bit columns of its `.x1`, largest `.num`."""

    lanes: int
    registers: int
    columns: int
    most: int


SHAPES = {
    "32x32b": Shape(32, 1, 1, 128),
    "16x64b": Shape(16, 1, 2, 128),
    "16x128b": Shape(16, 2, 4, 64),
    "16x256b": Shape(16, 4, 8, 32),
    "16x32bx2": Shape(16, 1, 1, 128),  # of each half
}


@dataclass(frozen=True)
class Fragment:
    """Who holds what: `lane` and `column` of each (register, thread), from the address on.

    `packed`: a register holds the lower halves of columns 2c and 2c + 1. `columns` counts those of
    tensor memory.
    """

    registers: int
    lanes: int
    columns: int
    lane: np.ndarray
    column: np.ndarray
    packed: bool


@cache
def fragment(shape: str, num: int, packed: bool) -> Fragment:
    """The fragment of `.shape.xnum`; 16x32bx2 is made of two halves elsewhere."""
    kind = SHAPES[shape]
    registers = kind.registers * num
    t = np.arange(WARP_LANES)[None, :]
    j = np.arange(registers)[:, None]
    if shape == "32x32b":
        lane, column = t + 0 * j, j + 0 * t
    elif shape == "16x64b":
        lane, column = t // 4 + 8 * (t & 1) + 0 * j, (t >> 1 & 1) + 2 * j
    elif shape == "16x128b":
        lane, column = t // 4 + 8 * (j & 1), (t & 3) + 4 * (j >> 1)
    elif shape == "16x256b":
        lane, column = t // 4 + 8 * (j >> 1 & 1), 2 * (t & 3) + (j & 1) + 8 * (j >> 2)
    else:
        lane, column = t % 16 + 0 * j, j + 0 * t
    columns = kind.columns * num * (2 if packed else 1)
    return Fragment(registers, kind.lanes, columns, lane, column, packed)


def _place(warp: Warp, address: int, f: Fragment) -> tuple[int, int]:
    """Lane and column of an address, in the warp's quarter."""
    lane, column = address >> 16, address & 0xFFFF
    quarter = warp.index % 4 * WARP_LANES
    if not quarter <= lane <= quarter + WARP_LANES - f.lanes or (lane - quarter) % f.lanes:
        raise OutOfBounds(
            f"{warp.name} addresses lanes [{lane}, {lane + f.lanes}) of {warp.cta.tensor.name}; "
            f"its own are [{quarter}, {quarter + WARP_LANES})"
        )
    return lane, column


Users = Callable[["Code"], np.ndarray]


def load(
    warp: Warp, rows: list[int], address: int, f: Fragment, split: int | None = None,
    users: Users | None = None,
) -> None:  # fmt: skip
    """`tcgen05.ld`: into registers `rows`. `split`: columns to the second half of 16x32bx2.

    `users` finds the micro-operations that use what it loads; without, it is complete at once.
    """
    lane, column = _place(warp, address, f)
    tensor, access = warp.cta.tensor, _load_access(warp, rows, users)
    values = _pick(tensor.read(lane, f.lanes, column, f.columns, access), f)
    if split is not None:
        second = _pick(tensor.read(lane, f.lanes, column + split, f.columns, access), f)
        values = np.concatenate([values[:, :16], second[:, 16:]], axis=1)
    warp.registers[rows] = values
    warp.cta.counters["tensor memory bytes loaded"] += 4 * values.size


def _pick(rectangle: np.ndarray, f: Fragment) -> np.ndarray:
    if not f.packed:
        picked: np.ndarray = rectangle[f.lane, f.column]
        return picked
    low: np.ndarray = rectangle[f.lane, 2 * f.column] & 0xFFFF
    low |= rectangle[f.lane, 2 * f.column + 1] << np.uint32(16)
    return low


def store(warp: Warp, rows: list[int], address: int, f: Fragment, split: int | None = None) -> None:
    """`tcgen05.st`: from registers `rows`."""
    lane, column = _place(warp, address, f)
    if warp.loads:
        warp.settle_loads(frozenset(rows))
    access = _store_access(warp)
    values = warp.registers[rows].astype(np.uint32)
    parts = [(column, slice(None))]
    if split is not None:
        parts = [(column, slice(0, 16)), (column + split, slice(16, 32))]
    for first, threads in parts:
        rectangle = np.empty((f.lanes, f.columns), np.uint32)
        at, value = f.lane[:, threads], values[:, threads]
        if f.packed:
            rectangle[at, 2 * f.column[:, threads]] = value & 0xFFFF
            rectangle[at, 2 * f.column[:, threads] + 1] = value >> 16
        else:
            rectangle[at, f.column[:, threads]] = value
        warp.cta.tensor.write(lane, first, rectangle, access)
    warp.cta.counters["tensor memory bytes stored"] += 4 * values.size


def _store_actor(warp: Warp) -> int:
    return warp.own_actor("tmem store", "a tcgen05.st")


def _store_access(warp: Warp) -> Access:
    warp.sequence["tmem store"] += 1
    clock = warp.clocks.generic
    return Access(_store_actor(warp), warp.sequence["tmem store"], clock, clock, True)


def _load_access(warp: Warp, rows: list[int], users: Users | None) -> Access:
    if users is None:
        return warp.access()
    into = frozenset(rows)
    warp.settle_loads(into)  # registers are written in order
    warp.sequence["tmem load"] += 1
    actor, epoch = warp.own_actor("tmem load", "a tcgen05.ld"), warp.sequence["tmem load"]
    where = users(warp.code)
    warp.loads.append(LoadUnderWay(actor, epoch, into, where, int(warp.counts[where].sum())))
    clock = warp.clocks.generic
    return Access(actor, epoch, clock, clock, False)


def wait_loads(warp: Warp) -> None:
    """`tcgen05.wait::ld`."""
    if warp.loads:
        warp.end_loads(warp.loads[-1].actor, warp.loads[-1].epoch)


def wait_stores(warp: Warp) -> None:
    """`tcgen05.wait::st`."""
    if warp.sequence["tmem store"]:
        warp.clocks.observe(_store_actor(warp), warp.sequence["tmem store"])


# ------------------------------------------------------------------------------- tcgen05.cp


@dataclass(frozen=True)
class CopyShape:
    """A shape of `tcgen05.cp`: rows of the source, bytes of each, and the lanes that each goes to.

    `lanes` are the first lanes of the copies of a source of `rows` rows.
    """

    rows: int
    nbytes: int
    lanes: tuple[int, ...]


COPY_SHAPES = {
    ("128x256b", ""): CopyShape(128, 32, (0,)),
    ("128x128b", ""): CopyShape(128, 16, (0,)),
    ("32x128b", "warpx4"): CopyShape(32, 16, (0, 32, 64, 96)),
}


def copy(warp: Warp, ctas: int, shape: CopyShape, address: int, descriptor: int) -> None:
    """`tcgen05.cp`: in each CTA of the group, from its own shared memory; ordered as an MMA."""
    lane, column = address >> 16, address & 0xFFFF
    if lane:
        raise TensorMemoryMisuse(f"tcgen05.cp to {address:#x}: not at lane 0")
    where = decode_shared_sm100(descriptor)
    access = mma_access(warp)
    for cta in group(warp.cta, ctas):
        words = read_shared(
            cta.shared, where, shape.rows, FORMATS["b32"], False, access, k_bytes=shape.nbytes
        )
        for first in shape.lanes:
            cta.tensor.write(first, column, words, access)
        cta.counters["tensor memory bytes copied"] += words.nbytes


def mma_access(warp: Warp) -> Access:
    """The next operation of the tensor core that this warp feeds; it does them in order."""
    warp.sequence["mma"] += 1
    return warp.async_access(mma_actor(warp), warp.sequence["mma"], in_order=True)


def mma_actor(warp: Warp) -> int:
    """The tensor core as fed by this warp."""
    return warp.own_actor("mma", "the tensor core operations")
