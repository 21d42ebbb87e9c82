"""Which tile a CTA works on, which rows and keys it has, and which of them see one another.

A band of keys is visible to each query: token t of a sequence sees keys [t + shift - left,
t + shift + right], where shift = seqlen_k - seqlen_q aligns the ends (bottom right), cut to
[0, seqlen_k). Every role computes the same ranges from the same few scalars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.forward.geometry import ForwardGeometry
from flash_attn_fp8.kernels.forward.operands import Scalars, Tensors
from flash_attn_fp8.kernels.sequences import band, keys_of, queries_of
from flash_attn_fp8.specs import TILE


class Work(NamedTuple):
    """A CTA's unit of work, or a pair's.

    `head` is a KV head where heads are packed, else a query head. Rows [token, token +
    geometry.unit_tokens) of the sequence against key tiles [n_min, n_max); none where the two are
    equal. `offset_q`, `offset_k` locate packed sequences; `extent_q` rows of the output belong to
    the sequence, of which those from seqlen_q on are not in use.
    """

    token: Int32
    head: Int32
    batch: Int32
    split: Int32
    offset_q: Int32
    seqlen_q: Int32
    extent_q: Int32
    offset_k: Int32
    seqlen_k: Int32
    n_min: Int32
    n_max: Int32

    @property
    def tiles(self):
        """Key tiles of the unit."""
        return self.n_max - self.n_min


@dataclass(frozen=True)
class Schedule:
    """The units of work of a launch in their order: neighbours share K and V.

    Each triple (head, sequence, split) has `m_blocks` units; there are `total` of them in all.
    `rank`: which CTA of a pair this is; both work on the same units.
    """

    geometry: ForwardGeometry
    tensors: Tensors
    scalars: Scalars
    heads: Int32
    m_blocks: Int32
    triples: Int32
    total: Int32
    rank: Int32

    @classmethod
    def of(cls, geometry: ForwardGeometry, tensors: Tensors, scalars: Scalars, rank=0) -> Schedule:
        dense = geometry.spec.traits.q_layout == "dense"
        heads = tensors.q.shape[2 if dense else 1] // geometry.spec.group
        batch = tensors.q.shape[0] if dense else tensors.cu_seqlens_q.shape[0] - 1
        m_blocks = cute.ceil_div(scalars.max_seqlen_q, geometry.unit_tokens)
        triples = heads * batch * scalars.num_splits
        return cls(geometry, tensors, scalars, heads, m_blocks, triples, m_blocks * triples, rank)

    @property
    def spec(self):
        return self.geometry.spec

    @property
    def traits(self):
        return self.geometry.spec.traits

    def row_tile(self, stage):
        """Which of a unit's query tiles this CTA's tile `stage` is."""
        return stage * self.geometry.ctas + self.rank

    def kv_head(self, head):
        """The KV head of a unit's `head`."""
        per_kv_head = self.traits.q_heads_per_kv_head // self.spec.group
        return head // per_kv_head if const_expr(per_kv_head > 1) else head

    @cute.jit
    def work(self, index: Int32) -> Work:
        """Unit number `index` of the launch."""
        triple, m_block = self._coordinates(index)
        split = triple % self.scalars.num_splits
        head = (triple // self.scalars.num_splits) % self.heads
        batch = triple // (self.scalars.num_splits * self.heads)
        offset_q, seqlen_q, extent_q = queries_of(self.tensors, batch)
        offset_k, seqlen_k = keys_of(self.tensors, self._key_rows, batch)
        token = m_block * self.geometry.unit_tokens
        n_min, n_max = self._key_tiles(token, seqlen_q, seqlen_k, split)
        return Work(
            token,
            head,
            batch,
            split,
            offset_q,
            seqlen_q,
            extent_q,
            offset_k,
            seqlen_k,
            n_min,
            n_max,
        )

    @property
    def _key_rows(self):
        """Rows of a page, or of a sequence."""
        return self.spec.page_size or self.tensors.k.shape[1]

    def _coordinates(self, index):
        """(triple, m_block): groups of triples, each with all its units, one group after another.

        A group's K and V fit the L2 together; within it, units with the most keys come first.
        """
        at_once = self.scalars.heads_at_once
        group = index // (at_once * self.m_blocks)
        rest = index - group * at_once * self.m_blocks
        triples = cutlass.min(at_once, self.triples - group * at_once)
        m_block = rest // triples
        triple = group * at_once + rest % triples
        if const_expr(self.traits.bounded_right):
            m_block = self.m_blocks - 1 - m_block  # causal: the last rows see most keys
        return triple, m_block

    def _key_tiles(self, token, seqlen_q, seqlen_k, split):
        """Key tiles [n_min, n_max) that any row of the unit sees, in this split."""
        last = cutlass.min(token + self.geometry.unit_tokens, seqlen_q) - 1
        lo, _ = band(self.traits, self.scalars, token, seqlen_q, seqlen_k)
        _, hi = band(self.traits, self.scalars, last, seqlen_q, seqlen_k)
        n_min = lo // self.geometry.tile_n
        n_max = cute.ceil_div(cutlass.max(hi, 0), self.geometry.tile_n)
        if const_expr(self.spec.split):
            tiles = self._tiles_per_split(seqlen_k)
            n_min = cutlass.max(n_min, split * tiles)
            n_max = cutlass.min(n_max, (split + 1) * tiles)
        # Past the sequence's last row there is nothing to do.
        n_max = select(token < seqlen_q, n_max, n_min)
        return n_min, cutlass.max(n_max, n_min)

    def _tiles_per_split(self, seqlen_k):
        """Splits end on multiples of 128 keys, whatever the tiles are."""
        equal = cute.ceil_div(cute.ceil_div(seqlen_k, TILE), self.scalars.num_splits)
        given = self.scalars.keys_per_split // TILE
        return select(given > 0, given, equal) * (TILE // self.geometry.tile_n)

    def visible(self, token, work):
        """Keys [lo, hi) that token `token` of the unit's sequence sees."""
        return band(self.traits, self.scalars, token, work.seqlen_q, work.seqlen_k)

    def whole_tiles(self, work, stage):
        """Key tiles [n_left, n_right) that every row of query tile `stage` sees whole."""
        first = work.token + self.row_tile(stage) * self.geometry.tokens
        _, right = self.visible(first, work)
        left, _ = self.visible(first + self.geometry.tokens - 1, work)
        tile_n = self.geometry.tile_n
        n_right = cutlass.min(cutlass.max(right // tile_n, work.n_min), work.n_max)
        n_left = cutlass.min(cutlass.max(cute.ceil_div(left, tile_n), work.n_min), n_right)
        return n_left, n_right

    def query(self, work, stage, row):
        """(token, query head, whether there is an output) of a row of query tile `stage`."""
        g = self.geometry
        token = work.token + self.row_tile(stage) * g.tokens + row // g.spec.group
        head = work.head * g.spec.group + row % g.spec.group
        exists = token < work.extent_q
        if const_expr(g.rows < g.tile_m):
            exists = exists & (row < g.rows)
        return token, head, exists


@cute.jit
def each_unit(ctx, with_keys: cutlass.Constexpr, without_keys: cutlass.Constexpr = None):
    """Call `with_keys(work, units, tiles)` for one unit of work of this CTA after another.

    `units` and `tiles` count the units and the key tiles before it, by which barriers are waited
    for. A unit that no key is visible in counts for nothing: `without_keys(work)`, if given.
    Returns both counts at the end.
    """
    units, tiles, count = Int32(0), Int32(0), Int32(0)
    index = ctx.first
    while index < ctx.schedule.total:
        work = ctx.schedule.work(index)
        if work.tiles > 0:
            with_keys(work, units, tiles)
            units += 1
            tiles += work.tiles
        elif const_expr(without_keys is not None):
            without_keys(work)
        index = ctx.following(index, count)
        count += 1
    return units, tiles


def part_of(ctx, tensor, split):
    """What a split writes of a partial result; the whole tensor without splits."""
    if not ctx.geometry.spec.split:
        return tensor
    return tensor[(split, *(None,) * (len(tensor.shape) - 1))]


def output_row(ctx, work, token, head):
    """The row of the output that belongs to a token and query head of a unit of work."""
    out = part_of(ctx, ctx.tensors.out, work.split)
    if ctx.traits.q_layout == "varlen":
        return out[work.offset_q + token, head, None]
    return out[work.batch, token, head, None]
