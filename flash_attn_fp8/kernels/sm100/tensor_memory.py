"""Tensor memory, a row a thread: loads and stores of columns, and its allocation."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.nvgpu import tcgen05

from flash_attn_fp8.specs import TILE

_LANE = 1 << 16  # tensor memory addresses: lane in the upper half, column in the lower


def load(address, columns: int, thread, at_once: int = 32):
    """Columns of the row of `thread` (0 to 127), fp32, (columns,) in registers.

    The values are there after `cute.arch.fence_view_async_tmem_load`.
    """
    row = cute.make_rmem_tensor(cute.make_layout(columns), Float32)
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(at_once))
    for column in range(0, columns, at_once):
        copy, tile = _copy(op, address + column, at_once, thread)
        source = copy.partition_S(tile)
        shape = copy.partition_D(cute.make_identity_tensor((TILE, at_once))).shape
        cute.copy(copy, source, cute.make_tensor(row.iterator + column, cute.make_layout(shape)))
    return row


def store(row, address, columns: int, thread, at_once: int = 32) -> None:
    """The other way: `row` holds `columns` 32-bit values.

    They are there after `cute.arch.fence_view_async_tmem_store`.
    """
    op = tcgen05.St32x32bOp(tcgen05.Repetition(at_once))
    for column in range(0, columns, at_once):
        copy, tile = _copy(op, address + column, at_once, thread)
        target = copy.partition_D(tile)
        shape = copy.partition_S(cute.make_identity_tensor((TILE, at_once))).shape
        words = cute.recast_ptr(row.iterator + column, dtype=Float32)
        cute.copy(copy, cute.make_tensor(words, cute.make_layout(shape)), target)


def _copy(op, address, columns: int, thread):
    tile = cute.make_tensor(address, cute.make_layout((TILE, columns), stride=(_LANE, 1)))
    atom = cute.make_copy_atom(op, Float32)
    return tcgen05.make_tmem_copy(atom, tile).get_slice(thread), tile
