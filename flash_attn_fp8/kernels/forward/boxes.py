"""TMA boxes: from global tensors of any layout to tiles in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from flash_attn_fp8.kernels.forward.context import Context

_PAGES_AT_ONCE = 4  # a loop of all 16 would not fit a load warp's registers


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
    group: Any = None  # tcgen05.CtaGroup, on SM100

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
        group = {} if self.group is None else {"cta_group": self.group}
        op = cpasync.CopyBulkTensorTileG2SOp(**group)
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

    @classmethod
    def of(cls, tma, boxes: Loads) -> Loads:
        """From `TmaOperands` and boxes of the same operands."""
        return cls(
            *((getattr(tma, f"{n}_atom"), getattr(tma, n), getattr(boxes, n)) for n in "qkv")
        )


@cute.jit
def load_queries(ctx: Context, load: cutlass.Constexpr, work, block: Int32, tile, barrier):
    """Query tile number `block` of the sequence and head of a unit of work."""
    atom, tensor, box = load
    if const_expr(ctx.traits.q_layout == "varlen"):
        tensor = cute.domain_offset((0, 0, work.offset_q, 0), tensor)
        box.load(atom, tensor, (0, block, work.head), tile, 0, barrier)
    else:
        box.load(atom, tensor, (0, block, work.head, work.batch), tile, 0, barrier)


@cute.jit
def load_keys(
    ctx: Context,
    load: cutlass.Constexpr,
    work,
    n_block: Int32,
    part: Int32,
    tile,
    barrier,
    first_chunk,
):
    """Key tile `n_block` of K or V: box number `part` of the sequence, from `first_chunk` on."""
    atom, tensor, box = load
    head = ctx.schedule.kv_head(work.head)
    if const_expr(ctx.traits.kv_layout == "dense"):
        where = part, head, work.batch
        box.load(atom, tensor, where, tile, 0, barrier, first_chunk)
    elif const_expr(ctx.traits.kv_layout == "varlen"):
        tensor = cute.domain_offset((0, work.offset_k, 0), tensor)
        box.load(atom, tensor, (part, head), tile, 0, barrier, first_chunk)
    else:
        _pages(ctx, load, work, n_block, head, tile, barrier)


@cute.jit
def _pages(ctx: Context, load: cutlass.Constexpr, work, n_block: Int32, head: Int32, tile, barrier):
    """The pages of a key tile, or the part of a page. What lies past the sequence reads as 0.

    Each lane looks up one of them, so that one read is waited for.
    """
    g, table = ctx.geometry, ctx.tensors.page_table
    atom, tensor, box = load
    page_size, count = g.spec.page_size, g.tile_n // box.rows[0]
    key = n_block * g.tile_n + cute.arch.lane_idx() % count * box.rows[0]
    mine = Int32(ctx.tensors.k.shape[0])  # out of bounds: TMA fills with zeros
    if key < work.seqlen_k:
        mine = table[work.batch, key // page_size]
    part = n_block * g.tile_n % page_size // box.rows[0]  # 0 of pages smaller than a tile
    for i in cutlass.range(count, unroll=_PAGES_AT_ONCE):
        page = mine if const_expr(count == 1) else cute.arch.shuffle_sync(mine, i)
        box.load(atom, tensor, (part, head, page), tile, i * box.rows[0], barrier)


def by_query(q, group: int):
    """(b, s, h, d) or (total, h, d) as (d, group, rows, h / group[, b])."""
    rank = len(q.shape)
    shape, stride = q.shape[rank - 3 :], q.stride[rank - 3 :]
    shape = (shape[2], group, shape[0], shape[1] // group, *q.shape[: rank - 3])
    stride = (1, stride[1], stride[0], stride[1] * group, *q.stride[: rank - 3])
    return cute.make_tensor(q.iterator, cute.make_layout(shape, stride=stride))


def by_key(x):
    """(b, s, h, d), (pages, page_size, h, d) or (total, h, d) as (d, rows, h[, b or page])."""
    rank = len(x.shape)
    order = (rank - 1, rank - 3, rank - 2, *range(rank - 3))
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=list(order)))
