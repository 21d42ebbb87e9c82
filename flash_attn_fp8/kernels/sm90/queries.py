"""bf16 queries become fp16 in shared memory, each row in units of a power of two.

Over converted codes the tensor core multiplies in fp16. A row's largest element comes near fp16's
largest value, so that elements above 2**-29 of it keep all their bits; the scores' factor has the
inverse. Swizzles move 16 bytes within a row of a chunk, which neither conversion nor maximum sees.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from flash_attn_fp8.kernels.encode import packed, values_of_16bit
from flash_attn_fp8.kernels.powers import QUERY_TOP, exponent_of, power_of_two, within_range
from flash_attn_fp8.kernels.sm90.geometry import ROWS, WARPGROUP

_THREADS = WARPGROUP // ROWS  # of a row
_BARRIER = 5  # named ones of warpgroups: this one and those after it; those before are turns'


@cute.jit
def convert_queries(ctx, rows):
    """Convert the query tile of a warpgroup, which is there; the rows' factors undo the units."""
    if const_expr(ctx.geometry.converts_q):
        stage = rows.stage
        thread = cute.arch.thread_idx()[0] % WARPGROUP
        row = thread // _THREADS
        words = _words(ctx, stage, row, thread % _THREADS)
        values = cute.make_rmem_tensor(words.shape, Uint32)
        cute.autovec_copy(words, values)
        shift = _shift(values)
        for i in cutlass.range_constexpr(cute.size(values)):
            low, high = values_of_16bit("bf16", values[i])
            values[i] = packed("fp16", [low * power_of_two(shift), high * power_of_two(shift)])
        cute.autovec_copy(values, words)
        units = ctx.buffers.q_unit[None, stage]
        units[row] = power_of_two(-shift)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=_BARRIER + stage, number_of_threads=WARPGROUP)
        for r in cutlass.range_constexpr(2):
            rows.factor[r] = rows.factor[r] * units[rows.row(r)]


def _words(ctx, stage, row, part):
    """A thread's share of a row: (word, chunk), a part of each chunk of the row."""
    g = ctx.geometry
    chunk_bytes = g.chunk(g.head_dim) * g.element
    size = chunk_bytes // _THREADS // 4
    start = cute.recast_ptr(ctx.buffers.q, dtype=Uint32)
    start = start + stage * (g.q_bytes // 4) + row * (chunk_bytes // 4) + part * size
    chunks = g.head_dim // g.chunk(g.head_dim)
    layout = cute.make_layout((size, chunks), stride=(1, ROWS * chunk_bytes // 4))
    return cute.make_tensor(start.align(16), layout)


@cute.jit
def _shift(values):
    """log2 of what multiplies a row: its largest element, or a NaN, has the largest exponent."""
    largest = Int32(0)
    for i in cutlass.range_constexpr(cute.size(values)):
        low, high = values[i] & Uint32(0x7FFF), (values[i] >> 16) & Uint32(0x7FFF)
        largest = cutlass.max(largest, cutlass.max(Int32(low), Int32(high)))
    for apart in cutlass.range_constexpr(_THREADS.bit_length() - 1):
        other = cute.arch.shuffle_sync_bfly(largest, 1 << apart)
        largest = cutlass.max(largest, other)
    return within_range(QUERY_TOP - exponent_of((largest << 16).bitcast(Float32)))
