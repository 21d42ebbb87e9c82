"""The two products of a warpgroup and their operands.

    S (keys, rows) = K Q^T      A: codes of K, widened in registers; B: queries in shared memory
    O (columns, rows) += V^T P  A: codes of V, widened in registers; B: P in shared memory

Keys are the rows of the first product, and columns of V those of the second, so that codes never
pass through shared memory again once they are 16 bits wide, and rows may be any eights. In shared
memory rows are in eights as well: 8 x 16 bytes one after another, without a swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as hopper
from cutlass import Float32, Uint8, Uint16, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from flash_attn_fp8.kernels.cached.attend import operand_b
from flash_attn_fp8.kernels.cached.context import Context
from flash_attn_fp8.kernels.cached.geometry import CHUNK
from flash_attn_fp8.kernels.cached.load import chunk_at, ring_view, slot_of
from flash_attn_fp8.kernels.cached.products import interleaved
from flash_attn_fp8.kernels.cached.warpgroup.geometry import KEYS
from flash_attn_fp8.kernels.codes import pairs
from flash_attn_fp8.kernels.dtypes import DTYPES
from flash_attn_fp8.kernels.sm90.context import multiply, shared, words_of


@dataclass(frozen=True)
class Shared:
    """Shared memory besides the rings: queries, P of each warpgroup, and numbers of rows."""

    q: cute.Pointer
    p: cute.Pointer
    numbers: cute.Pointer

    @classmethod
    def allocated(cls, smem, g) -> Shared:
        """For a CTA."""
        sizes = g.q_bytes, g.p_bytes * g.spec.tile.key_warps, 4 * g.numbers_count
        return cls(*(smem.allocate_array(Uint8, size, byte_alignment=128) for size in sizes))

    def p_of(self, ctx: Context) -> cute.Pointer:
        """This warpgroup's P."""
        return self.p + ctx.key_warp * ctx.geometry.p_bytes


@dataclass(frozen=True)
class Tiles:
    """Operands and accumulators of a warpgroup's lane.

    `k` and `v` in registers, `q` and `p` as descriptors of shared memory. Of `s`, numbers
    (i, half, eight): key 16 warp + 8 half + lane // 4, row 8 eight + 2 (lane % 4) + i. Of `o`, a
    tensor for each 64 columns, alike: column (lane's first) + 2 product + half.
    """

    geometry: Any
    q: Any
    p: Any
    k: Any
    v: tuple
    s: Any
    o: tuple

    @property
    def qk(self):
        return _product(self.geometry, OperandMajorMode.K)

    @property
    def pv(self):
        return _product(self.geometry, OperandMajorMode.MN)


def _product(g, major):
    d = DTYPES[g.mma_format]
    return hopper.make_trivial_tiled_mma(
        *(d, d, OperandMajorMode.K, major, Float32, (1, 1, 1), (KEYS, g.rows)),
        a_source=warpgroup.OperandSource.RMEM,
    )


def new_tiles(ctx: Context, memory: Shared) -> Tiles:
    """Before the first key."""
    g = ctx.geometry
    d = DTYPES[g.mma_format]
    head_dim = g.spec.traits.head_dim
    qk, pv = _product(g, OperandMajorMode.K), _product(g, OperandMajorMode.MN)
    q = shared(cute.recast_ptr(memory.q, dtype=d), _eights(d, "K", (g.rows, head_dim, 1)))
    of_p = _eights(d, "MN", (g.rows, KEYS, 1))
    p = shared(cute.recast_ptr(memory.p_of(ctx), dtype=d), of_p)
    accumulator = pv.partition_shape_C((KEYS, g.rows))
    t = Tiles(
        g,
        q=qk.make_fragment_B(qk.get_slice(0).partition_B(q)),
        p=pv.make_fragment_B(pv.get_slice(0).partition_B(p)),
        k=cute.make_rmem_tensor(qk.partition_shape_A((KEYS, head_dim)), d),
        v=tuple(
            cute.make_rmem_tensor(pv.partition_shape_A((KEYS, KEYS)), d)
            for _ in range(g.v_products)
        ),
        s=cute.make_rmem_tensor(accumulator, Float32),
        o=tuple(cute.make_rmem_tensor(accumulator, Float32) for _ in range(g.v_products)),
    )
    for o in t.o:
        o.fill(0.0)
    return t


def _eights(dtype, major: str, shape):
    kind = getattr(warpgroup.SmemLayoutAtomKind, f"{major}_INTER")
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=(0, 1, 2))


def word_of(g, row, column, along_rows: bool):
    """Which 32-bit word of queries or P has two elements from (row, column) on.

    `along_rows`: they are of neighbouring rows (P), else of neighbouring columns (queries).
    """
    within = column % 8 * 8 + row % 8 if along_rows else row % 8 * 8 + column % 8
    return (column // 8 * (8 * g.rows) + row // 8 * 64 + within) // 2


@cute.jit
def ask_for_scores(ctx: Context, t: cutlass.Constexpr, stage):
    """Start S of the tile in a stage."""
    g = ctx.geometry
    fmt = ctx.traits.kv_format
    k, target = ring_view(ctx, stage, g.k, 0), words_of(t.k)
    words = cute.make_rmem_tensor(cute.make_layout((g.k.words, 1)), Uint32)
    for half in cutlass.range_constexpr(2):
        row = ctx.m_warp * 16 + half * 8 + ctx.lane // 4
        for block in cutlass.range_constexpr(g.k.vectors):
            vector = chunk_at(ctx, g.k, row, block * 4 + ctx.lane % 4)
            cute.autovec_copy(k[None, vector, row], words[None, 0])
            for i in cutlass.range_constexpr(g.k.words):
                step = block * g.k.words + i
                low, high = operand_b(ctx, fmt, words, i, 0)
                target[4 * step + half], target[4 * step + 2 + half] = low, high
    multiply(t.qk, t.s, t.k, t.q, 0)


@cute.jit
def take_values(ctx: Context, t: cutlass.Constexpr, stage):
    """V of the tile in a stage, transposed, in registers."""
    targets = [words_of(v) for v in t.v]
    for pair in cutlass.range_constexpr(KEYS // 8):
        first = pair * 8 + ctx.lane % 4 * 2
        columns = _columns(ctx, *(_codes(ctx, stage, first + i) for i in range(2)))
        step, half = pair // 2, pair % 2
        for column in cutlass.range_constexpr(ctx.geometry.columns):
            targets[column // 2][4 * step + 2 * half + column % 2] = columns[column]


def _columns(ctx, first: Uint32, second: Uint32) -> list[Uint32]:
    """Of a lane's codes of two keys: for each column the numbers of both, as a word."""
    fmt = ctx.traits.kv_format
    mixed = interleaved(fmt, first, second)[: ctx.geometry.columns // 2]
    return [word for x in mixed for word in pairs(fmt, ctx.spec.has_fp8, x)]


def _codes(ctx, stage, row) -> Uint32:
    """A lane's codes of a row of V, in the lower bytes: two, or four."""
    g = ctx.geometry
    dtype = {2: Uint16, 4: Uint32}[g.v.share]
    first = (ctx.m_warp * 8 + ctx.lane // 4) * g.v.share
    at = chunk_at(ctx, g.v, row, first // CHUNK) * CHUNK + first % CHUNK
    offset = slot_of(ctx, stage) * g.tile_bytes + g.v_start + row * g.v.row_bytes + at
    rings = cute.recast_ptr(ctx.rings, dtype=dtype)
    return Uint32(cute.make_tensor(rings + offset // g.v.share, cute.make_layout(1))[0])


@cute.jit
def add_values(ctx: Context, t: cutlass.Constexpr):
    """Start O += V^T P."""
    for n in cutlass.range_constexpr(ctx.geometry.v_products):
        multiply(t.pv, t.o[n], t.v[n], t.p, 0, adds=True)
