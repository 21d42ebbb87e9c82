"""The MMA warp: S = Q Kᵀ and O += P V, issued in the order that keeps the tensor core busy.

Score tiles are numbered u = 0, 1, ... through a unit of work: with two query tiles, u alternates
between them; with one, it counts key tiles. Tile u lives in slot u % 2, and its P over it. After
the first two, each P V of tile u is followed by the scores of tile u + 2 in the same slot: the
tensor core executes in order of issue, so P has been read before it is overwritten.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import tcgen05

from flash_attn_fp8.kernels.forward.rings import arrive
from flash_attn_fp8.kernels.forward.schedule import each_unit
from flash_attn_fp8.kernels.sm100 import tensor_memory
from flash_attn_fp8.kernels.sm100.barriers import commit, k_use, v_use
from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.kernels.sm100.geometry import SUM_COLUMNS
from flash_attn_fp8.specs import TILE


class Products(NamedTuple):
    """The two products: tiled MMAs and the layouts of their operands."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    sums: cute.TiledMma | None  # of P and ones
    q_layout: cute.ComposedLayout
    k_layout: cute.ComposedLayout
    p_layout: cute.ComposedLayout
    v_layout: cute.ComposedLayout
    ones_layout: cute.ComposedLayout | None


class Fragments(NamedTuple):
    """What the tensor core reads and writes; the last mode is the slot."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor
    p: cute.Tensor
    s: cute.Tensor
    o: cute.Tensor
    ones: cute.Tensor | None
    sums: cute.Tensor | None


def fragments(ctx: Context, products: Products, tmem) -> Fragments:
    """Descriptors of the buffers, for the products."""
    g = ctx.geometry
    qk, pv = (mma.get_slice(ctx.schedule.rank) for mma in (products.qk, products.pv))

    def shared(pointer, layout):
        return cute.make_tensor(cute.recast_ptr(pointer, layout.inner), layout.outer)

    s = qk.make_fragment_C(qk.partition_shape_C((TILE * g.ctas, TILE)))
    o = pv.make_fragment_C(pv.partition_shape_C((TILE * g.ctas, g.head_dim_v)))
    p = pv.make_fragment_A(cute.make_tensor(tmem, products.p_layout.outer))
    ones, sums = None, None
    if products.sums is not None:
        ones = products.sums.make_fragment_B(shared(ctx.buffers.ones, products.ones_layout))
        layout = products.sums.make_fragment_C(
            products.sums.partition_shape_C((TILE, SUM_COLUMNS))
        ).layout
        sums = cute.make_tensor(tmem, layout)
    return Fragments(
        q=products.qk.make_fragment_A(shared(ctx.buffers.q, products.q_layout)),
        k=products.qk.make_fragment_B(shared(ctx.buffers.kv, products.k_layout)),
        v=products.pv.make_fragment_B(shared(ctx.buffers.kv, products.v_layout)),
        p=cute.make_tensor(p.iterator, p[None, None, None, 0].layout),
        s=cute.make_tensor(tmem, s.layout),
        o=cute.make_tensor(tmem, o.layout),
        ones=ones,
        sums=sums,
    )


@cute.jit
def mma_role(ctx: Context, products: Products, f: Fragments):
    """Issue the products of one unit of work after another."""
    each_unit(ctx, partial(_unit, ctx, products, f))


@cute.jit
def _unit(ctx: Context, products: Products, f: Fragments, work, units: Int32, tiles: Int32):
    g, kv, n = ctx.geometry, ctx.barriers.kv, work.tiles
    for stage in cutlass.range_constexpr(g.q_stage):
        ctx.barriers.q.wait_full(units * g.q_stage + stage)
    for i in cutlass.range_constexpr(g.lookahead):
        if i < n:
            k = k_use(g, tiles, i)
            kv.wait_full(k)
            for stage in cutlass.range_constexpr(g.q_stage):
                _scores(ctx, products, f, units, tiles + i, stage, k)
                _release_queries(ctx, units, stage, i == n - 1)
            commit(g, kv.empty(k))
    for i in cutlass.range(n, unroll=1):
        ahead = i + g.lookahead
        v, k = v_use(g, tiles, n, i), k_use(g, tiles, ahead)
        kv.wait_full(v)
        if const_expr(g.cleans_tail):
            if i == 0:
                arrive(ctx.barriers.tail_asked.at(0))
                ctx.barriers.tail_clean.wait(0, units)
        if ahead < n:
            kv.wait_full(k)
        for stage in cutlass.range_constexpr(g.q_stage):
            _output(ctx, products, f, tiles + i, stage, v, i > 0)
            commit(g, ctx.barriers.o_full.at(stage))
            if ahead < n:
                _scores(ctx, products, f, units, tiles + ahead, stage, k)
                _release_queries(ctx, units, stage, ahead == n - 1)
        commit(g, kv.empty(v))
        if ahead < n:
            commit(g, kv.empty(k))


@cute.jit
def _release_queries(ctx, units, stage: cutlass.Constexpr, are_read):
    """Let the load warp overwrite a query tile after its last scores; P V does without it."""
    if are_read:
        commit(ctx.geometry, ctx.barriers.q.empty(units * ctx.geometry.q_stage + stage))


@cute.jit
def _scores(ctx, products, f, units, tile, stage: cutlass.Constexpr, k_number):
    g = ctx.geometry
    slot, _ = g.slot_and_use(tile, stage)
    q = f.q[None, None, None, ctx.barriers.q.slot(units * g.q_stage + stage)]
    k = f.k[None, None, None, ctx.barriers.kv.slot(k_number)]
    s = cute.make_tensor(f.s.iterator + g.s_column(slot), f.s.layout)
    _gemm(products.qk, s, q, k, False)
    commit(g, ctx.barriers.s_full.at(slot))


@cute.jit
def _output(ctx, products, f, tile, stage: cutlass.Constexpr, v_number, accumulate):
    g = ctx.geometry
    slot, use = g.slot_and_use(tile, stage)
    ctx.barriers.p_full.wait(slot, use)
    tensor_memory.fence_after_wait()
    column = g.s_column(slot) * (4 // g.element)  # P's iterator counts elements
    p = cute.make_tensor(f.p.iterator + column, f.p.layout)
    v = f.v[None, None, None, ctx.barriers.kv.slot(v_number)]
    o = cute.make_tensor(f.o.iterator + g.o_column(stage), f.o.layout)
    _gemm(products.pv, o, p, v, accumulate)
    if const_expr(g.sums_by_mma):
        sums = cute.make_tensor(f.sums.iterator + g.sum_column(stage), f.sums.layout)
        _gemm(products.sums, sums, p, f.ones[None, None, None, 0], accumulate)


@cute.jit
def _gemm(mma, c, a, b, accumulate):
    """C (+)= A B over all of K; C is only added to if `accumulate`."""
    atom = cute.make_mma_atom(mma.op)
    for k in cutlass.range_constexpr(cute.size(a, mode=[2])):
        atom.set(tcgen05.Field.ACCUMULATE, accumulate if const_expr(k == 0) else True)
        cute.gemm(atom, c, a[None, None, k], b[None, None, k], c)
