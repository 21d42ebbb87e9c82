"""Rows of the output, from the registers of wgmma to global memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.forward.schedule import part_of
from flash_attn_fp8.kernels.sm90.geometry import V_SHARE

_NEIGHBOURS = 8  # columns that a lane has of each V_SHARE


@cute.jit
def store(ctx, rows, o: cutlass.Constexpr, normalizers: cutlass.Constexpr):
    """Normalise, convert and store the two rows of a lane; 0 where a row is not in use, or o None."""
    for r in cutlass.range_constexpr(2):
        token, head, exists = ctx.schedule.query(rows.work, rows.stage, rows.row(r))
        if exists:
            row = _output_row(ctx, rows.work, token, head)
            row = cute.logical_divide(row, cute.make_layout(_NEIGHBOURS))
            for share in cutlass.range_constexpr(ctx.geometry.head_dim_v // V_SHARE):
                values = cute.make_rmem_tensor(cute.make_layout(_NEIGHBOURS), Float32)
                values.fill(0.0)
                if const_expr(o is not None):
                    for n in cutlass.range_constexpr(_NEIGHBOURS):
                        at = share * 16 + n // 2 * 4 + 2 * r + n % 2
                        x = o[at] * normalizers[r]
                        values[n] = select(token < rows.work.seqlen_q, x, Float32(0.0))
                converted = cute.make_rmem_tensor(cute.make_layout(_NEIGHBOURS), ctx.out_dtype)
                converted.store(values.load().to(ctx.out_dtype))
                cute.autovec_copy(converted, row[None, share * 4 + rows.lane % 4])


def _output_row(ctx, work, token, head):
    out = part_of(ctx, ctx.tensors.out, work.split)
    if ctx.traits.q_layout == "varlen":
        return out[work.offset_q + token, head, None]
    return out[work.batch, token, head, None]
