"""Rows of the output, from the registers of wgmma to global memory.

A lane stores 8 neighbouring columns of each 32. In fp8 those are what it has, by the order of V^T's
rows; in 16 bits it has pairs 8i + 2q + e, lane q of its quad, which the quad exchanges.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.forward.schedule import output_row
from flash_attn_fp8.kernels.sm90.geometry import V_SHARE

_NEIGHBOURS = 8  # columns that a lane has of each V_SHARE


@cute.jit
def store(ctx, rows, o: cutlass.Constexpr, normalizers: cutlass.Constexpr):
    """Normalise, convert and store a lane's two rows; 0 where a row is not in use, or o None."""
    for r in cutlass.range_constexpr(2):
        token, head, exists = ctx.schedule.query(rows.work, rows.stage, rows.row(r))
        factor = None if const_expr(o is None) else normalizers[r]
        for share in cutlass.range_constexpr(ctx.geometry.head_dim_v // V_SHARE):
            # Before the branch: all lanes of a quad take part.
            values = _values(ctx, rows, o, factor, r, share, token < rows.work.seqlen_q)
            if exists:
                row = output_row(ctx, rows.work, token, head)
                row = cute.logical_divide(row, cute.make_layout(_NEIGHBOURS))
                cute.autovec_copy(values, row[None, share * 4 + rows.lane % 4])


@cute.jit
def _values(
    ctx,
    rows,
    o: cutlass.Constexpr,
    factor,
    r: cutlass.Constexpr,
    share: cutlass.Constexpr,
    is_used,
):
    """A lane's neighbours of one share of row `r`, as they are stored."""
    values = cute.make_rmem_tensor(cute.make_layout(_NEIGHBOURS), Float32)
    values.fill(0.0)
    exchanges = o is not None and not ctx.geometry.transposes_v
    if const_expr(o is not None):
        for n in cutlass.range_constexpr(_NEIGHBOURS):
            x = o[share * 16 + n // 2 * 4 + 2 * r + n % 2] * factor
            values[n] = select(is_used, x, Float32(0.0))
    # Half the words where pairs are 32 bits.
    early = ctx.out_dtype.width == 16
    if const_expr(exchanges and not early):
        _exchange(values, rows.lane)
    converted = cute.make_rmem_tensor(cute.make_layout(_NEIGHBOURS), ctx.out_dtype)
    converted.store(values.load().to(ctx.out_dtype))
    if const_expr(exchanges and early):
        _exchange(converted, rows.lane)
    return converted


@cute.jit
def _exchange(values, lane):
    """Of four pairs in each lane of a quad, lane q gets the four lanes' number q."""
    size = cute.size(values) * values.element_type.width // 32
    words = cute.make_tensor(
        cute.recast_ptr(values.iterator, dtype=Uint32), cute.make_layout((size // 4, 4))
    )
    for step in cutlass.range_constexpr(1, 3):
        is_high = (lane & step) != 0
        for i in cutlass.range_constexpr(4):
            if const_expr(i & step == 0):
                for part in cutlass.range_constexpr(size // 4):
                    low, high = words[part, i], words[part, i + step]
                    got = cute.arch.shuffle_sync_bfly(select(is_high, low, high), offset=step)
                    words[part, i] = select(is_high, got, low)
                    words[part, i + step] = select(is_high, high, got)
