"""The load warp: Q, K and V from global to shared memory, by TMA, in the order of their use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from flash_attn_fp8.kernels.sm100.barriers import k_use, v_use
from flash_attn_fp8.kernels.sm100.context import Context
from flash_attn_fp8.kernels.sm100.schedule import each_unit
from flash_attn_fp8.specs import TILE


@dataclass(frozen=True)
class Box:
    """TMA boxes of one operand: `chunk` elements of consecutive rows, whose extents are `rows`.

    In shared memory a tile is a row of columns of chunks, each of `tile_rows` swizzled rows, so
    that boxes of any number of rows stack up to the tile that the tensor core reads.
    """

    chunk: int
    chunks: int
    rows: tuple[int, ...]
    tile_rows: int
    swizzle: cute.Swizzle
    group: tcgen05.CtaGroup

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.chunk, *self.rows)

    @property
    def layout(self):
        strides = [1]
        for extent in self.shape[:-1]:
            strides.append(strides[-1] * extent)
        return cute.make_layout(self.shape, stride=tuple(strides))

    def atom(self, tensor):
        """On the host: the TMA atom and tensor of a global tensor whose first mode is the row's."""
        shared = cute.make_composed_layout(self.swizzle, 0, self.layout)
        op = cpasync.CopyBulkTensorTileG2SOp(self.group)
        return cpasync.make_tiled_tma_atom(op, tensor, shared, self.shape)

    def load(self, atom, tensor, where, tile, row, barrier, first_chunk=0) -> None:
        """A box to row `row` of the shared tile at `tile`.

        `where`: for each mode of `tensor` after the first, the box's number or the coordinate.
        Of the rows, the chunks from `first_chunk` on.
        """
        rank = len(self.shape)
        for chunk in range(self.chunks):
            start = tile + (chunk * self.tile_rows + row) * self.chunk
            shared = cute.make_tensor(cute.recast_ptr(start, self.swizzle), self.layout)
            boxes = tensor[(*(None,) * rank, *where[rank - 1 :])]
            box = cute.local_tile(boxes, self.shape, (first_chunk + chunk, *where[: rank - 1]))
            shared, box = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(shared, 0, rank),
                cute.group_modes(box, 0, rank),
            )
            cute.copy(atom, box, shared, tma_bar_ptr=barrier)


class Loads(NamedTuple):
    """The three operands as the kernel gets them: atoms, TMA tensors and their boxes."""

    q: tuple
    k: tuple
    v: tuple


@cute.jit
def load_role(ctx: Context, loads: Loads):
    """Fill the rings, one unit of work after another."""
    units, tiles = each_unit(ctx, partial(_unit, ctx, loads))
    # The tensor core's last commits arrive here after the MMA warp is done, also from the other CTA
    # of a pair: shared memory must outlive them, and nobody else waits for them.
    ctx.barriers.q.wait_all_empty(units * ctx.geometry.q_stage)
    ctx.barriers.kv.wait_all_empty(tiles * 2)


@cute.jit
def _unit(ctx: Context, loads: cutlass.Constexpr, work, units: Int32, tiles: Int32):
    _queries(ctx, loads, work, units)
    _keys_and_values(ctx, loads, work, tiles)


@cute.jit
def _queries(ctx: Context, loads: Loads, work, units: Int32):
    g, ring = ctx.geometry, ctx.barriers.q
    atom, tensor, box = loads.q
    if const_expr(ctx.traits.q_layout == "varlen"):
        tensor = cute.domain_offset((0, 0, work.offset_q, 0), tensor)
        rest = (work.head,)
    else:
        rest = (work.head, work.batch)
    for stage in cutlass.range_constexpr(g.q_stage):
        use = units * g.q_stage + stage
        ring.wait_empty(use)
        _expect(ctx, ring.full(use), g.rows * g.head_dim)
        block = work.token // g.tokens + ctx.schedule.row_tile(stage)
        tile = ctx.buffers.q + ring.slot(use) * (TILE * g.head_dim)
        box.load(atom, tensor, (0, block, *rest), tile, 0, ring.full(use))


@cute.jit
def _keys_and_values(ctx: Context, loads: Loads, work, tiles: Int32):
    g, n = ctx.geometry, work.tiles
    for i in cutlass.range_constexpr(g.lookahead):
        if i < n:
            _tile(ctx, loads.k, work, i, k_use(g, tiles, i), True)
    for i in cutlass.range(n, unroll=1):
        _tile(ctx, loads.v, work, i, v_use(g, tiles, n, i), False)
        ahead = i + g.lookahead
        if ahead < n:
            _tile(ctx, loads.k, work, ahead, k_use(g, tiles, ahead), True)


@cute.jit
def _tile(
    ctx: Context, load: cutlass.Constexpr, work, i: Int32, use: Int32, is_k: cutlass.Constexpr
):
    """Key tile `i` of a unit's K or V, or this CTA's half of it, into the slot of use `use`.

    Of a pair of CTAs, each has half the rows of K and half the columns of V.
    """
    g, ring = ctx.geometry, ctx.barriers.kv
    atom, tensor, box = load
    n_block, head = work.n_max - 1 - i, ctx.schedule.kv_head(work.head)
    tile = ctx.buffers.kv + ring.slot(use) * (g.kv_bytes // g.element)
    ring.wait_empty(use)
    _expect(ctx, ring.full(use), g.k_rows * g.head_dim if is_k else TILE * g.v_columns)
    part = n_block * g.ctas + ctx.schedule.rank if const_expr(is_k) else n_block
    first_chunk = 0 if const_expr(is_k) else ctx.schedule.rank * box.chunks
    if const_expr(ctx.traits.kv_layout == "dense"):
        where = part, head, work.batch
        box.load(atom, tensor, where, tile, 0, ring.full(use), first_chunk)
    elif const_expr(ctx.traits.kv_layout == "varlen"):
        tensor = cute.domain_offset((0, work.offset_k, 0), tensor)
        box.load(atom, tensor, (part, head), tile, 0, ring.full(use), first_chunk)
    else:
        _pages(ctx, load, work, n_block, head, tile, ring.full(use))


@cute.jit
def _pages(ctx: Context, load: cutlass.Constexpr, work, n_block: Int32, head: Int32, tile, barrier):
    """The pages of a key tile, or the part of a page. What lies past the sequence reads as 0."""
    g, table = ctx.geometry, ctx.tensors.page_table
    atom, tensor, box = load
    page_size = g.spec.page_size
    for row in cutlass.range_constexpr(0, TILE, box.rows[0]):
        key = n_block * TILE + row
        page = Int32(ctx.tensors.k.shape[0])  # out of bounds: TMA fills with zeros
        if key < work.seqlen_k:
            page = table[work.batch, key // page_size]
        part = (key % page_size) // box.rows[0]
        box.load(atom, tensor, (part, head, page), tile, row, barrier)


@cute.jit
def _expect(ctx: Context, barrier, elements: cutlass.Constexpr):
    """Announce a transfer of so many elements to each CTA; all count on the leader's barrier."""
    if ctx.schedule.rank == 0:
        with cute.arch.elect_one():
            size = elements * ctx.geometry.element * ctx.geometry.ctas
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, size)
