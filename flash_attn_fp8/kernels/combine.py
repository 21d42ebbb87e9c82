"""Merges the partial results of splits: a warp a row of a head, on any architecture.

With w_i = exp(lse_i - max lse): out = sum w_i out_i / sum w_i, lse = max lse + log sum w_i. A part
without keys has lse -inf: it weighs nothing, and what its output holds is not read. Where one part
has all the weight, out and lse are that part's, to the bit.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.combine_operands import CombineTensors
from flash_attn_fp8.kernels.dtypes import DTYPES, NEG_INF
from flash_attn_fp8.policy import LN2, LOG2E
from flash_attn_fp8.specs import WARP, CombineSpec

WARPS = 4
_AT_ONCE = 8  # parts whose loads are in flight


class Combine:
    """The kernel of one spec."""

    def __init__(self, spec: CombineSpec) -> None:
        self.spec = spec
        self.out_dtype = DTYPES[spec.out_format]

    @cute.jit
    def __call__(self, tensors: CombineTensors, stream):
        """Host code: the launch."""
        rows = cute.size(tensors.out) // self.spec.head_dim_v
        self.kernel.set_name_prefix("flash_attn_fp8_combine")
        self.kernel(tensors, rows).launch(
            grid=(cute.ceil_div(rows, WARPS), 1, 1),
            block=(WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=self.spec.overlaps,
        )

    @cute.kernel
    def kernel(self, tensors: CombineTensors, rows: Int32):
        """Device code."""
        if const_expr(self.spec.overlaps):
            cute.arch.griddepcontrol_wait()
        thread = cute.arch.thread_idx()[0]
        index = cute.arch.block_idx()[0] * WARPS + thread // WARP
        if index < rows:
            self._row(tensors, index, thread % WARP)

    @cute.jit
    def _row(self, t: CombineTensors, index: Int32, lane: Int32):
        heads = t.out.shape[len(t.out.shape) - 2]
        row, head = index // heads, index % heads
        if const_expr(self.spec.varlen):
            partial, out = t.partial[None, row, head, None], t.out[row, head, None]
            lse_partial = t.lse_partial[None, head, row]
        else:
            batch, token = row // t.out.shape[1], row % t.out.shape[1]
            partial, out = (
                t.partial[None, batch, token, head, None],
                t.out[batch, token, head, None],
            )
            lse_partial = t.lse_partial[None, batch, head, token]
        top, total = _weights(lse_partial, lane)
        self._merge(t, partial, lse_partial, out, lane, top, total)
        if const_expr(self.spec.lse):
            if lane == 0:
                lse = top + cute.math.log2(total, fastmath=True) * LN2
                if const_expr(self.spec.varlen):
                    t.lse[head, row] = lse
                else:
                    t.lse[batch, head, token] = lse

    @cute.jit
    def _merge(self, t, partial, lse_partial, out, lane, top, total):
        count = self.spec.head_dim_v // WARP
        merged = cute.make_rmem_tensor(cute.make_layout(count), Float32)
        merged.fill(0.0)
        parts = lse_partial.shape[0]
        for first in cutlass.range(0, parts, WARP, unroll=1):
            weight = Float32(0.0)  # of a part for each lane
            if first + lane < parts:
                weight = _weight(lse_partial[first + lane], top)
            for some in cutlass.range(0, cutlass.min(parts - first, WARP), _AT_ONCE, unroll=1):
                self._add(merged, partial, weight, first, some, lane)
        factor = select(total == 0.0, Float32(0.0), 1.0 / total)
        if const_expr(self.spec.output_scale):
            factor = factor / t.output_scale[0]
        converted = cute.make_rmem_tensor(cute.make_layout(count), self.out_dtype)
        for i in cutlass.range_constexpr(count):
            merged[i] = merged[i] * factor
        converted.store(merged.load().to(self.out_dtype))
        for i in cutlass.range_constexpr(count):
            out[lane * count + i] = converted[i]

    @cute.jit
    def _add(self, merged, partial, weight, first, some, lane):
        """Add parts from first + some on: all are asked for before the first is waited for."""
        count = self.spec.head_dim_v // WARP
        loaded = cute.make_rmem_tensor(cute.make_layout((count, _AT_ONCE)), Float32)
        loaded.fill(0.0)
        weights = [cute.arch.shuffle_sync(weight, some + i) for i in range(_AT_ONCE)]
        for i in cutlass.range_constexpr(_AT_ONCE):
            if weights[i] != 0.0:
                row = partial[first + some + i, None]
                row = cute.logical_divide(row, cute.make_layout(count))
                cute.autovec_copy(row[None, lane], loaded[None, i])
        for i in cutlass.range_constexpr(_AT_ONCE):
            for j in cutlass.range_constexpr(count):
                merged[j] = merged[j] + weights[i] * loaded[j, i]


def _weight(lse, top):
    # An infinite sink makes both infinite, and their difference NaN.
    below = select(lse == top, Float32(0.0), lse - top)
    return cute.math.exp2(below * LOG2E, fastmath=True)


@cute.jit
def _weights(lse_partial, lane):
    """(largest lse, 0 where there are no keys; sum of exp(lse - it))."""
    top, part = Float32(NEG_INF), lane
    while part < lse_partial.shape[0]:
        top = cute.arch.fmax(top, lse_partial[part])
        part += WARP
    top = cute.arch.warp_reduction(top, cute.arch.fmax)
    top = select(top == NEG_INF, Float32(0.0), top)
    total, part = Float32(0.0), lane
    while part < lse_partial.shape[0]:
        total += _weight(lse_partial[part], top)
        part += WARP
    return top, cute.arch.warp_reduction(total, lambda a, b: a + b)
