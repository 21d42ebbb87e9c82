"""Rows of packed outputs that no unit of work has: 0, with LSE -inf.

They lie before the first sequence and after the last, and, where fewer rows than a sequence has are
in use, behind those that units of work cover; mostly there are none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from flash_attn_fp8.kernels.dtypes import NEG_INF
from flash_attn_fp8.specs import ALIGNMENT, WARP


@dataclass(frozen=True)
class Unwritten:
    """An output (total, h, dv) and its LSE (h, total), with `parts` in front if there are any.

    `starts`: cu_seqlens_q. `covered`: rows of each sequence that units of work cover, None: all.
    """

    out: cute.Tensor
    lse: cute.Tensor | None
    starts: cute.Tensor
    covered: Int32 | None
    parts: Int32 | None
    dtype: Any

    @property
    def row_bytes(self) -> int:
        return self.out.shape[-1] * self.dtype.width // 8


@cute.jit
def fill(rows: Unwritten):
    """By one warp of every CTA; its lanes share a row of a head, or a few where rows are short."""
    starts = rows.starts
    sequences = starts.shape[0] - 1
    total = rows.out.shape[len(rows.out.shape) - 3]
    _range(rows, Int32(0), starts[0], cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
    _range(rows, starts[sequences], Int32(total), cute.arch.block_idx()[0], cute.arch.grid_dim()[0])
    if const_expr(rows.covered is not None):
        sequence = Int32(cute.arch.block_idx()[0])
        while sequence < sequences:
            first = starts[sequence] + rows.covered
            _range(rows, first, starts[sequence + 1], Int32(0), Int32(1))
            sequence += cute.arch.grid_dim()[0]


@cute.jit
def _range(rows: Unwritten, begin: Int32, end: Int32, number, step):
    """Rows [begin, end) of all heads: this warp's share, every `step`th from `number` on."""
    heads = rows.out.shape[len(rows.out.shape) - 2]
    count = (end - begin) * heads
    if const_expr(rows.parts is not None):
        count = count * rows.parts
    sharing = min(rows.row_bytes // ALIGNMENT, WARP)
    at_once = WARP // sharing
    lane = cute.arch.lane_idx()
    index = number * at_once + lane // sharing
    if lane >= at_once * sharing:
        index = count  # a lane too many
    while index < count:
        rest, head = index // heads, index % heads
        part, row = Int32(0), begin + rest
        if const_expr(rows.parts is not None):
            part, row = rest // (end - begin), begin + rest % (end - begin)
        _row(rows, part, row, head, lane % sharing, sharing)
        index += step * at_once


@cute.jit
def _row(rows: Unwritten, part, row, head, first: Int32, sharing: cutlass.Constexpr):
    """Some pieces of a row: every `sharing`th from the first on."""
    elements = cute.make_layout(ALIGNMENT * 8 // rows.dtype.width)
    pieces = rows.row_bytes // ALIGNMENT
    zeros = cute.make_rmem_tensor(elements, rows.dtype)
    zeros.fill(0.0)
    target = cute.logical_divide(_of_part(rows, rows.out, part)[row, head, None], elements)
    for offset in cutlass.range_constexpr(0, pieces, sharing):
        if offset + first < pieces:
            cute.autovec_copy(zeros, target[None, offset + first])
    if const_expr(rows.lse is not None):
        lse = _of_part(rows, rows.lse, part)
        if first == 0:
            lse[head, row] = NEG_INF


def _of_part(rows: Unwritten, tensor, part):
    if rows.parts is None:
        return tensor
    return tensor[(part, *(None,) * (len(tensor.shape) - 1))]
