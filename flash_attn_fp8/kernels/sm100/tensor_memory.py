"""Tensor memory, a row a thread: loads and stores of columns, and its allocation."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32
from cutlass._mlir.dialects import nvvm
from cutlass.cute.nvgpu import tcgen05
from cutlass.cutlass_dsl import dsl_user_op

from flash_attn_fp8.specs import TILE, WARP

_LANE = 1 << 16  # tensor memory addresses: lane in the upper half, column in the lower


def of_warp(tmem, thread):
    """The address of the rows of a thread's warp, the same in all its lanes.

    It stays in a uniform register; the thread's own would be moved to one for each load and store.
    """
    return tmem + cute.arch.make_warp_uniform(thread // WARP) * (WARP * _LANE)


def load(address, columns: int, at_once: int = 32):
    """Columns of this thread's row, fp32, (columns,) in registers; `address` is the warp's.

    The values are there after `cute.arch.fence_view_async_tmem_load`.
    """
    row = cute.make_rmem_tensor(cute.make_layout(columns), Float32)
    op = tcgen05.Ld32x32bOp(tcgen05.Repetition(at_once))
    for column in range(0, columns, at_once):
        copy, tile = _copy(op, address + column, at_once)
        source = copy.partition_S(tile)
        shape = copy.partition_D(cute.make_identity_tensor((TILE, at_once))).shape
        cute.copy(copy, source, cute.make_tensor(row.iterator + column, cute.make_layout(shape)))
    return row


def store(row, address, columns: int, at_once: int = 32) -> None:
    """The other way: `row` holds `columns` 32-bit values.

    They are there after `cute.arch.fence_view_async_tmem_store`.
    """
    op = tcgen05.St32x32bOp(tcgen05.Repetition(at_once))
    for column in range(0, columns, at_once):
        copy, tile = _copy(op, address + column, at_once)
        target = copy.partition_D(tile)
        shape = copy.partition_S(cute.make_identity_tensor((TILE, at_once))).shape
        words = cute.recast_ptr(row.iterator + column, dtype=Float32)
        cute.copy(copy, cute.make_tensor(words, cute.make_layout(shape)), target)


@dsl_user_op
def fence_before_arrive(*, loc=None, ip=None) -> None:
    """What this thread did with tensor memory comes before what a barrier lets others do.

    Loads and stores must have been waited for; it compiles to nothing, but ptxas must not move
    them. Between a thread and the tensor core as between two threads.
    """
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.BEFORE_THREAD_SYNC, loc=loc, ip=ip)


@dsl_user_op
def fence_after_wait(*, loc=None, ip=None) -> None:
    """What this thread will do with tensor memory comes after what it has waited for."""
    nvvm.tcgen05_fence(nvvm.Tcgen05FenceKind.AFTER_THREAD_SYNC, loc=loc, ip=ip)


def _copy(op, address, columns: int):
    tile = cute.make_tensor(address, cute.make_layout((TILE, columns), stride=(_LANE, 1)))
    atom = cute.make_copy_atom(op, Float32)
    return tcgen05.make_tmem_copy(atom, tile).get_slice(0), tile
