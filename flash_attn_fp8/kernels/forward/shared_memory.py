"""Tiles of q, k and v in shared memory, as threads write them; else TMA does."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Uint32


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
