"""A tensor map's boxes: global memory to rows of bytes and back, and rows in shared memory.

A *tile* is what a copy moves: `uint8[rows, bytes of a row]`, dimension 1 varying fastest among the
rows, before any swizzle. Elements outside the tensor are filled on the way in and dropped on the
way out. Only bytes of the tensor that the box covers are touched, and those are checked against
the launch's buffers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numba import njit

from flash_attn_fp8.sim.errors import Finding, Misaligned, OutOfBounds
from flash_attn_fp8.sim.memory import GlobalMemory
from flash_attn_fp8.sim.tensormap import TensorMap, swizzle

SHARED_ALIGNMENT = 128  # of a tensor copy's shared address, whatever the swizzle
_REPEAT = 1024  # bytes after which every swizzle repeats
_STORE_UNIT = 16
_OOB_NAN = 0x7FF7  # in every 16 bits of an element outside the tensor


@dataclass(frozen=True)
class Box:
    """A box placed in a tensor.

    Row r begins at global address `start + offsets[r]` (before the buffer, perhaps, where
    coordinates are negative) and has bytes [low, high) in the tensor; where `inside` is not None,
    only if `inside[r]`.
    """

    map: TensorMap
    coordinates: tuple[int, ...]
    start: int
    offsets: np.ndarray
    inside: np.ndarray | None
    low: int
    high: int

    @property
    def rows(self) -> int:
        return self.offsets.size

    @property
    def row_bytes(self) -> int:
        return self.map.box[0] * self.map.size

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def whole(self) -> bool:
        """Nothing is out of bounds."""
        return self.inside is None and self.row_bytes == self.high - self.low

    def __str__(self) -> str:
        return f"box at {list(self.coordinates)} of {self.map}"


def place(m: TensorMap, coordinates: tuple[int, ...]) -> Box:
    """The box of a tile-mode copy; coordinates in elements, innermost first."""
    if len(coordinates) != m.rank:
        raise Finding(f"{len(coordinates)} coordinates for a {m}")
    counts, steps = m.counts, m.element_strides
    start, within = 0, True
    for i in range(1, m.rank):
        c = coordinates[i]
        start += c * m.strides[i - 1]
        within &= c >= 0 and c + (counts[i] - 1) * steps[i] < m.dims[i]
    inside = None
    if not within:
        inside = np.ones(1, np.bool_)
        for i in range(1, m.rank):
            at = np.arange(counts[i]) * steps[i] + coordinates[i]
            inside = (((at >= 0) & (at < m.dims[i]))[:, None] & inside).ravel()
    return _place(m, coordinates, start, _row_offsets(counts, steps, m.strides), inside)


def place_rows(m: TensorMap, coordinates: tuple[int, ...]) -> Box:
    """The four rows of `tile::gather4` and `tile::scatter4`: {column, row, row, row, row}."""
    if m.rank != 2 or m.box[1] != 1 or len(coordinates) != 5:
        raise Finding(f"four rows need a map of rank 2 with one row in its box, not {m}")
    rows = np.array(coordinates[1:])
    inside = (rows >= 0) & (rows < m.dims[1])
    return _place(m, coordinates, 0, rows * m.strides[0], None if inside.all() else inside)


@functools.lru_cache(maxsize=1024)
def _row_offsets(
    counts: tuple[int, ...], steps: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """Of a box's rows from its first."""
    offsets = np.zeros(1, np.int64)
    for n, step, stride in zip(counts[1:], steps[1:], strides, strict=True):
        offsets = (np.arange(n)[:, None] * (step * stride) + offsets).ravel()
    return offsets


def _place(
    m: TensorMap,
    coordinates: tuple[int, ...],
    start: int,
    offsets: np.ndarray,
    inside: np.ndarray | None,
) -> Box:
    first = coordinates[0] * m.size
    if first % 16:
        # The manual: "the address of the bounding box must be aligned to 16 bytes"; an H200 answers
        # such a load with an illegal instruction.
        raise Misaligned(
            f"coordinates {list(coordinates)} begin {first} bytes into a row, which is not a "
            f"multiple of 16: {m}"
        )
    low, high = max(0, -first), min(m.box[0] * m.size, m.dims[0] * m.size - first)
    if high <= low:
        inside, low, high = np.zeros(offsets.size, np.bool_), 0, 0
    elif inside is not None and inside.all():
        inside = None
    return Box(m, coordinates, m.address + first + start, offsets, inside, low, high)


def in_units(box: Box) -> Box:
    """What stores and reductions touch: where a row of the tensor ends within 16 bytes, all 16.

    So an H200 does; it overwrites a row's padding, and what follows a one-dimensional tensor.
    """
    return replace(box, high=-(-box.high // _STORE_UNIT) * _STORE_UNIT)


# --------------------------------------------------------------------------------- global memory


def load(memory: GlobalMemory, box: Box) -> np.ndarray:
    """The tile, filled where it is out of bounds and rounded as its type says."""
    if box.whole:
        tile = np.empty((box.rows, box.row_bytes), np.uint8)
    else:
        tile = np.zeros((box.rows, box.row_bytes), np.uint8)
        if box.map.fill == "nan":
            tile.view(np.uint16)[:] = _OOB_NAN
    for part in _parts(memory, box, write=False):
        _read(part, box, tile)
    if box.map.type.startswith("tf32"):
        _round(tile, box)
    return tile


def store(memory: GlobalMemory, box: Box, tile: np.ndarray) -> None:
    """Write what is in bounds of the tile."""
    for part in _parts(memory, box, write=True):
        _write(part, box, tile)


class _Part(NamedTuple):
    """Rows in one buffer: where each starts in it (what is out of bounds left out), and which."""

    data: np.ndarray
    starts: np.ndarray
    rows: np.ndarray | None  # None: all of them, in order


def _parts(memory: GlobalMemory, box: Box, *, write: bool) -> list[_Part]:
    if box.high == box.low:
        return []
    rows, offsets = None, box.offsets
    if box.inside is not None:
        rows = np.flatnonzero(box.inside)
        if rows.size == 0:
            return []
        offsets = offsets[rows]
    lowest = int(offsets.min())
    first, end = box.start + lowest + box.low, box.start + int(offsets.max()) + box.high
    try:
        data, at = memory.find(first, end - first, write)
    except OutOfBounds:  # perhaps not what lies between: row by row
        return _parts_by_row(memory, box, offsets, rows, write=write)
    return [_Part(data, offsets + (at - lowest), rows)]


def _parts_by_row(
    memory: GlobalMemory, box: Box, offsets: np.ndarray, rows: np.ndarray | None, *, write: bool
) -> list[_Part]:
    parts = []
    for i, offset in enumerate(offsets.tolist()):
        row = i if rows is None else int(rows[i])
        try:
            data, at = memory.find(box.start + offset + box.low, box.high - box.low, write)
        except OutOfBounds as e:
            raise OutOfBounds(f"{e}; row {row} of the {box}") from e
        parts.append(_Part(data, np.array([at]), np.array([row])))
    return parts


def _read(part: _Part, box: Box, tile: np.ndarray) -> None:
    rows = _all_rows(box.rows) if part.rows is None else part.rows
    _read_rows(part.data, part.starts, rows, tile[:, box.low : box.high])


def _write(part: _Part, box: Box, tile: np.ndarray) -> None:
    rows = _all_rows(box.rows) if part.rows is None else part.rows
    _write_rows(part.data, part.starts, rows, tile[:, box.low : box.high])


@functools.lru_cache(maxsize=64)
def _all_rows(rows: int) -> np.ndarray:
    return np.arange(rows)


@njit(cache=True, nogil=True)
def _read_rows(data, starts, rows, tile):  # type: ignore[no-untyped-def]
    n = tile.shape[1]
    for i in range(starts.size):
        tile[rows[i]] = data[starts[i] : starts[i] + n]


@njit(cache=True, nogil=True)
def _write_rows(data, starts, rows, tile):  # type: ignore[no-untyped-def]
    n = tile.shape[1]
    for i in range(starts.size):
        data[starts[i] : starts[i] + n] = tile[rows[i]]


def _round(tile: np.ndarray, box: Box) -> None:
    """Round to tf32 the elements that were read; the fill stays as it is."""
    words = tile.view(np.uint32)
    rows = slice(None) if box.inside is None else box.inside
    columns = slice(box.low // 4, box.high // 4)
    words[rows, columns] = round_to_tf32(words[rows, columns])


def round_to_tf32(bits: np.ndarray) -> np.ndarray:
    """Float32 bits with 10 bits of mantissa, to nearest even.

    NaNs become one NaN. Subnormals stay, for tf32.ftz too; an H200 does all of this.
    """
    rounded = (bits + np.uint32(0xFFF) + (bits >> 13 & 1)) & np.uint32(0xFFFFE000)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FFFE000), rounded)


# --------------------------------------------------------------------------------- shared memory


class Placement(NamedTuple):
    """A tile's units in shared memory: offset of each, in the tile's order."""

    offsets: np.ndarray
    unit: int


def placement(m: TensorMap, rows: int, offset: int) -> Placement:
    """Where a tile of `rows` goes whose first byte has the shared offset `offset`.

    A swizzle permutes by the absolute address, so the offset need not be a multiple of its pattern.
    """
    if offset % SHARED_ALIGNMENT:
        raise Misaligned(
            f"a tensor copy at shared offset {offset:#x}, not a multiple of {SHARED_ALIGNMENT}"
        )
    unit = 8 if m.atom == "32B+8B" else 16
    phase = offset % _REPEAT
    relative = _relative(rows, m.box[0] * m.size, m.pitch, m.span, m.atom, unit, phase)
    return Placement(relative + (offset - phase), unit)


@functools.lru_cache(maxsize=1024)
def _relative(
    rows: int, row_bytes: int, pitch: int, span: int, atom: str, unit: int, phase: int
) -> np.ndarray:
    linear = np.arange(rows)[:, None] * pitch + np.arange(0, row_bytes, unit) + phase
    return swizzle(linear, span, atom).ravel()
