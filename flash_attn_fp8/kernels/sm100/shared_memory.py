"""Tiles of q, k and v in shared memory, as threads write them; else TMA does."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Uint32

from flash_attn_fp8.specs import TILE


@cute.jit
def zero_rows(g: cutlass.Constexpr, tile, width: cutlass.Constexpr, first, thread, threads):
    """Rows from `first` on of a shared tile of `width` elements a row, by so many threads.

    In each column of chunks: swizzling stays within a row.
    """
    words = g.chunk(width) * g.element // 4
    start = cute.recast_ptr(tile, dtype=Uint32)
    for column in cutlass.range_constexpr(width // g.chunk(width)):
        shared = cute.make_tensor(start + column * TILE * words, cute.make_layout(TILE * words))
        word = first * words + thread
        while word < TILE * words:
            shared[word] = Uint32(0)
            word += threads
