"""Tiles of q, k and v in shared memory, as threads write them; else TMA does."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Uint8, Uint32

_ONE = {"e4m3": 0x38, "e5m2": 0x3C}


@cute.jit
def zero_rows(
    g: cutlass.Constexpr,
    tile,
    rows: cutlass.Constexpr,
    width: cutlass.Constexpr,
    first,
    thread,
    threads,
):
    """Rows from `first` on of a shared tile, `rows` of `width` elements, by so many threads.

    In each column of chunks: swizzling stays within a row.
    """
    words = g.chunk(width) * g.element // 4
    start = cute.recast_ptr(tile, dtype=Uint32)
    for column in cutlass.range_constexpr(width // g.chunk(width)):
        shared = cute.make_tensor(start + column * rows * words, cute.make_layout(rows * words))
        word = first * words + thread
        while word < rows * words:
            shared[word] = Uint32(0)
            word += threads


@cute.jit
def write_ones(
    fmt: cutlass.Constexpr, start, size: cutlass.Constexpr, thread, threads: cutlass.Constexpr
):
    """Ones in an fp8 format, `size` of them, by so many threads."""
    ones = cute.make_tensor(cute.recast_ptr(start, dtype=Uint8), cute.make_layout(size))
    i = thread
    while i < size:
        ones[i] = Uint8(_ONE[fmt])
        i += threads
