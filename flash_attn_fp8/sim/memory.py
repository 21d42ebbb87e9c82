"""Memories: bytes with bounds, with what was written, and with a shadow for order.

Addresses as programs see them. A shared address is 32 bits: the CTA's rank in its cluster from bit
24 up, the offset below. Generic addresses of shared, local and parameter memory lie in windows of
their own, far from anything that a host allocates.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from flash_attn_fp8.sim.errors import (
    Misaligned,
    OutOfBounds,
    Race,
    TensorMemoryMisuse,
    Uninitialised,
)
from flash_attn_fp8.sim.launch import Buffer
from flash_attn_fp8.sim.order import Access, Actors, Conflict, Shadow

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
SHARED_RESERVED = 1024  # bytes that the system keeps at the start of shared memory since sm_90

SHARED_WINDOW = 1 << 56
PARAM_WINDOW = 2 << 56
LOCAL_WINDOW = 3 << 56
WINDOW_MASK = 0x7F << 56  # fits int64
WINDOW_OFFSET = (1 << 56) - 1

GRANULE = 4  # bytes that share one entry of a shadow

TMEM_LANES = 128
TMEM_COLUMNS = 512
TMEM_GRANULE = 16  # lanes that share one entry, for each column


class GlobalMemory:
    """The host memory of registered buffers; nothing else exists."""

    def __init__(self, buffers: tuple[Buffer, ...]) -> None:
        ordered = sorted(buffers, key=lambda b: (b.address, -b.nbytes, not b.writable))
        self.buffers: list[Buffer] = []
        for b in ordered:  # views of one storage: the widest covers the others
            last = self.buffers[-1] if self.buffers else None
            if last and b.address + b.nbytes <= last.address + last.nbytes:
                continue
            self.buffers.append(b)
        self._starts = [b.address for b in self.buffers]
        self._bytes = [_view(b) for b in self.buffers]
        self.processes = False  # whether other processes write it, too

    @contextmanager
    def shared_between_processes(self) -> Iterator[None]:
        """Keep the bytes where forked processes see each other's writes, and bring them back."""
        own = self._bytes
        self._bytes = self._shared_copies()
        self.processes = True
        try:
            yield
        finally:
            for b, data, shared in zip(self.buffers, own, self._bytes, strict=True):
                if b.writable:  # else the host's page may not be
                    data[:] = shared
            self._bytes, self.processes = own, False

    def _shared_copies(self) -> list[np.ndarray]:
        """The buffers in memory that forked processes share; what overlaps, overlaps there too."""
        copies: list[np.ndarray] = []
        start, region = 0, np.empty(0, np.uint8)
        for b in self.buffers:
            if b.address >= start + region.size:
                end = b.address + b.nbytes
                for other in self.buffers:  # by address
                    if b.address <= other.address < end:
                        end = max(end, other.address + other.nbytes)
                start, region = b.address, _anonymous(end - b.address)
            copies.append(region[b.address - start : b.address - start + b.nbytes])
        for copy, data in zip(copies, self._bytes, strict=True):
            copy[:] = data
        return copies

    def find(self, address: int, size: int, write: bool) -> tuple[np.ndarray, int]:
        """The buffer's bytes that hold [address, address + size), and the offset there."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at >= 0:
            b = self.buffers[at]
            if address + size <= b.address + b.nbytes:
                if write and not b.writable:
                    raise OutOfBounds(f"write to {b.name}, which is read-only")
                return self._bytes[at], address - b.address
        raise OutOfBounds(self._nearest(address, size))

    def read(self, addresses: np.ndarray, unit: int) -> np.ndarray:
        """(n, unit) bytes at n addresses."""
        return self._gather(addresses, unit, False)[0]

    def write(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Store (n, unit) bytes at n addresses, in order."""
        unit = values.shape[1]
        for data, index, rows in self._parts(addresses, unit, True):
            data[index] = values[rows]

    def _gather(self, addresses: np.ndarray, unit: int, write: bool) -> tuple[np.ndarray, None]:
        out = np.empty((addresses.size, unit), np.uint8)
        for data, index, rows in self._parts(addresses, unit, write):
            out[rows] = data[index]
        return out, None

    def _parts(self, addresses: np.ndarray, unit: int, write: bool):  # type: ignore[no-untyped-def]
        """The accesses by buffer: (bytes, byte index, which rows); mostly there is one buffer."""
        rest = np.arange(addresses.size)
        span = np.arange(unit)
        while rest.size:
            first = int(addresses[rest[0]])
            data, offset = self.find(first, unit, write)
            start = first - offset
            here = (addresses[rest] >= start) & (addresses[rest] + unit <= start + data.size)
            rows = rest[here]
            yield data, (addresses[rows] - start)[:, None] + span, rows
            rest = rest[~here]

    def _nearest(self, address: int, size: int) -> str:
        text = f"global access of {size} bytes at {address:#x} is outside every buffer"
        if not self.buffers:
            return text + ": the launch registered none"

        def distance(b: Buffer) -> int:
            return max(b.address - address, address + size - (b.address + b.nbytes))

        near = min(self.buffers, key=distance)
        if address < near.address:
            return f"{text}; the nearest is {near.name}, {near.address - address} bytes further on"
        past = address + size - (near.address + near.nbytes)
        return f"{text}; the nearest is {near.name} ({near.nbytes} bytes), passed by {past} bytes"


def _anonymous(size: int) -> np.ndarray:
    """Bytes that forked processes share."""
    return np.frombuffer(mmap.mmap(-1, max(1, size)), np.uint8)[:size]


def _view(b: Buffer) -> np.ndarray:
    raw = (ctypes.c_uint8 * b.nbytes).from_address(b.address)
    return np.ctypeslib.as_array(raw)


@dataclass(frozen=True)
class Checks:
    """What is looked for beyond bounds, alignment and deadlock, which always are."""

    races: bool = True
    proxies: bool = True  # generic writes need fence.proxy.async before asynchronous reads
    uninitialised: bool = True
    phases: bool = True  # no phase of an mbarrier ends before somebody's wait for the last one
    exits: bool = True  # what uses a CTA's shared memory is over when the CTA exits (needs `races`)


class SharedMemory:
    """One CTA's shared memory. Offsets are of the shared window, `SHARED_RESERVED` and up."""

    def __init__(self, name: str, size: int, checks: Checks, actors: Actors) -> None:
        self.name = name
        padded = -(-size // 8) * 8
        data = np.zeros(padded, np.uint8)
        self.data = data[:size]
        self._written = np.zeros(padded if checks.uninitialised else 0, np.uint8)
        # The same bytes in words of 8: wide accesses go by these, several times faster.
        self._data_words = data.view(np.uint64)
        self._written_words = self._written.view(np.uint64)
        self.shadow = Shadow(-(-size // GRANULE)) if checks.races else None
        self._actors = actors

    def read(self, offsets: np.ndarray, unit: int, access: Access) -> np.ndarray:
        """(n, unit) bytes at n offsets, for an operation of that order."""
        self._check_bounds(offsets, unit, "read")
        out = np.empty((offsets.size, unit), np.uint8)
        if unit % 8 == 0:
            words = out.view(np.uint64)
            bad = _gather_words(self._data_words, self._written_words, offsets, words)
            if bad >= 0:  # a word that is not all written: where, by bytes
                bad = _gather(self.data, self._written, offsets, unit, out)
        else:
            bad = _gather(self.data, self._written, offsets, unit, out)
        if bad >= 0:
            raise Uninitialised(
                f"{self.name}+{bad:#x} is read by {self._actors.names[access.actor]}, and nothing "
                f"has written it"
            )
        if self.shadow is not None:
            self._actors.note(access, self.name, False)
            self.order(
                self.shadow.read(offsets // GRANULE, _granules(unit), access), access, "read"
            )
        return out

    def write(self, offsets: np.ndarray, values: np.ndarray, access: Access) -> None:
        """Store (n, unit) bytes at n offsets; of equal offsets the last wins."""
        unit = values.shape[1]
        self._check_bounds(offsets, unit, "written")
        if unit % 8 == 0:
            words = np.ascontiguousarray(values).view(np.uint64)
            _scatter_words(self._data_words, self._written_words, offsets, words)
        else:
            _scatter(self.data, self._written, offsets, unit, values)
        if self.shadow is not None:
            self._actors.note(access, self.name, True)
            places = offsets // GRANULE
            self.order(self.shadow.write(places, _granules(unit), access), access, "written")

    def check_exit(self, cta: str, clock: np.ndarray) -> None:
        """When the CTA exits, what has used this memory must be over; `clock` is what it knows."""
        left = None if self.shadow is None else self.shadow.unobserved(clock)
        if left is not None:
            raise Race(
                f"{cta} exits while {self.name}+{left.place * GRANULE:#x} may still be "
                f"{_past(left, self.name, self._actors)} (its operation {left.epoch}; observed up "
                f"to {int(clock[left.actor])})"
            )

    def order(self, conflict: Conflict | None, access: Access, verb: str) -> None:
        if conflict is not None:
            where = f"{self.name}+{conflict.place * GRANULE:#x}"
            raise Race(_race_text(self.name, where, conflict, access, verb, self._actors))

    def _check_bounds(self, offsets: np.ndarray, unit: int, verb: str) -> None:
        if offsets.size == 0:
            return
        lo, hi = int(offsets.min()), int(offsets.max()) + unit
        if lo < SHARED_RESERVED or hi > self.data.size:
            at = lo if lo < SHARED_RESERVED else hi - unit
            raise OutOfBounds(
                f"{unit} bytes at {self.name}+{at:#x} are {verb}; the CTA has "
                f"[{SHARED_RESERVED:#x}, {self.data.size:#x})"
            )
        if unit > 1 and bool((offsets & (unit - 1)).any()):
            at = int(offsets[(offsets & (unit - 1)) != 0][0])
            raise Misaligned(f"{unit} bytes at {self.name}+{at:#x} are {verb}: not aligned")


def _granules(unit: int) -> int:
    return max(1, unit // GRANULE)


def _race_text(
    memory: str, where: str, c: Conflict, access: Access, verb: str, actors: Actors
) -> str:
    clock = access.clock if c.earlier_was_write else access.clock_reads
    return (
        f"{where} is {verb} by {actors.names[access.actor]}, which nothing orders after it was "
        f"{_past(c, memory, actors)} (its operation {c.epoch}; observed up to "
        f"{int(clock[c.actor])})"
    )


def _past(c: Conflict, memory: str, actors: Actors) -> str:
    """What the earlier access was: "read by warp 3 at PTX line 7: ..."."""
    verb = "written" if c.earlier_was_write else "read"
    site = actors.whence(c.actor, c.epoch, memory, c.earlier_was_write)
    return f"{verb} by {actors.names[c.actor]}" + (f" at {site}" if site else "")


@njit(cache=True, nogil=True)
def _gather(data, written, offsets, unit, out):  # type: ignore[no-untyped-def]
    bad = -1
    check = written.size > 0
    for i in range(offsets.size):
        at = offsets[i]
        for j in range(unit):
            out[i, j] = data[at + j]
            if check and written[at + j] == 0 and bad < 0:
                bad = at + j
    return bad


@njit(cache=True, nogil=True)
def _scatter(data, written, offsets, unit, values):  # type: ignore[no-untyped-def]
    check = written.size > 0
    for i in range(offsets.size):
        at = offsets[i]
        for j in range(unit):
            data[at + j] = values[i, j]
            if check:
                written[at + j] = 1


_ALL_WRITTEN = np.uint64(0x0101010101010101)


@njit(cache=True, nogil=True)
def _gather_words(data, written, offsets, out):  # type: ignore[no-untyped-def]
    """`_gather` of (n, unit / 8) words; offsets are multiples of 8."""
    bad = -1
    check = written.size > 0
    for i in range(offsets.size):
        at = offsets[i] >> 3
        for j in range(out.shape[1]):
            out[i, j] = data[at + j]
            if check and written[at + j] != _ALL_WRITTEN:
                bad = at + j
    return bad


@njit(cache=True, nogil=True)
def _scatter_words(data, written, offsets, values):  # type: ignore[no-untyped-def]
    check = written.size > 0
    for i in range(offsets.size):
        at = offsets[i] >> 3
        for j in range(values.shape[1]):
            data[at + j] = values[i, j]
            if check:
                written[at + j] = _ALL_WRITTEN


class TensorMemory:
    """One CTA's tensor memory: 128 lanes of 512 columns of 32 bits.

    An address is lane << 16 | column. Allocation is by columns, in powers of two from 32.
    """

    def __init__(self, name: str, checks: Checks, actors: Actors) -> None:
        self.name = name
        self.data = np.zeros((TMEM_LANES, TMEM_COLUMNS), np.uint32)
        self._written = np.zeros((TMEM_LANES, TMEM_COLUMNS), np.bool_)
        self._check_written = checks.uninitialised
        groups = TMEM_LANES // TMEM_GRANULE
        self.shadow = Shadow(groups * TMEM_COLUMNS) if checks.races else None
        self.allocated = np.zeros(TMEM_COLUMNS, np.bool_)
        self.allocations: dict[int, int] = {}  # first column: columns
        self.cta_group = 0  # the one that the kernel has used, 1 or 2
        self.meetings: dict[str, Any] = {}  # collective operations that one CTA of a pair has begun
        self._actors = actors

    def read(self, lane: int, lanes: int, column: int, columns: int, access: Access) -> np.ndarray:
        """A view of the rectangle, (lanes, columns) of uint32."""
        rows, cols = slice(lane, lane + lanes), slice(column, column + columns)
        self._check_bounds(lane, lanes, column, columns, "read")
        if self._check_written and not self._written[rows, cols].all():
            at = np.argwhere(~self._written[rows, cols])[0]
            raise Uninitialised(
                f"{self.name} lane {lane + int(at[0])} column {column + int(at[1])} is read by "
                f"{self._actors.names[access.actor]}, and nothing has written it"
            )
        if self.shadow is not None:
            places = _tmem_places(lane, lanes, column)
            self._actors.note(access, self.name, False)
            self._order(self.shadow.read(places, columns, access), access, "read")
        return self.data[rows, cols]

    def write(self, lane: int, column: int, values: np.ndarray, access: Access) -> None:
        """Store (lanes, columns) of uint32 with its first element at (lane, column)."""
        lanes, columns = values.shape
        self._check_bounds(lane, lanes, column, columns, "written")
        rows, cols = slice(lane, lane + lanes), slice(column, column + columns)
        self.data[rows, cols] = values
        self._written[rows, cols] = True
        if self.shadow is not None:
            places = _tmem_places(lane, lanes, column)
            self._actors.note(access, self.name, True)
            self._order(self.shadow.write(places, columns, access), access, "written")

    def allocate(self, first: int, columns: int) -> None:
        self.allocated[first : first + columns] = True
        self.allocations[first] = columns

    def check_free(self, first: int, columns: int, access: Access) -> None:
        """Freeing must name an allocation, and come after everything that used it."""
        if self.allocations.get(first) != columns:
            having = ", ".join(f"{n} from {c}" for c, n in sorted(self.allocations.items()))
            raise TensorMemoryMisuse(
                f"{self.name}: {columns} columns from {first} are freed; allocated are "
                f"{having or 'none'}"
            )
        if self.shadow is not None:
            places = _tmem_places(0, TMEM_LANES, first)
            self._order(self.shadow.write(places, columns, access), access, "freed")

    def free(self, first: int) -> None:
        """Freed columns hold nothing, and whoever gets them next need not know who had them."""
        columns = self.allocations.pop(first)
        self.allocated[first : first + columns] = False
        self._written[:, first : first + columns] = False
        if self.shadow is not None:
            self.shadow.forget(_tmem_places(0, TMEM_LANES, first), columns)

    def _check_bounds(self, lane: int, lanes: int, column: int, columns: int, verb: str) -> None:
        if lane + lanes > TMEM_LANES or column + columns > TMEM_COLUMNS:
            raise OutOfBounds(
                f"{self.name} lanes [{lane}, {lane + lanes}) x columns [{column}, "
                f"{column + columns}) are {verb}; there are {TMEM_LANES} x {TMEM_COLUMNS}"
            )
        if not self.allocated[column : column + columns].all():
            missing = column + int(np.argmin(self.allocated[column : column + columns]))
            raise OutOfBounds(
                f"{self.name} column {missing} is {verb}, and is not allocated (allocated: "
                f"{int(self.allocated.sum())} columns)"
            )

    def _order(self, conflict: Conflict | None, access: Access, verb: str) -> None:
        if conflict is not None:
            group, column = divmod(conflict.place, TMEM_COLUMNS)
            lane = group * TMEM_GRANULE
            where = f"{self.name} lanes {lane}-{lane + TMEM_GRANULE - 1} column {column}"
            raise Race(_race_text(self.name, where, conflict, access, verb, self._actors))


def _tmem_places(lane: int, lanes: int, column: int) -> np.ndarray:
    first, last = lane // TMEM_GRANULE, (lane + lanes - 1) // TMEM_GRANULE
    return np.arange(first, last + 1) * TMEM_COLUMNS + column
