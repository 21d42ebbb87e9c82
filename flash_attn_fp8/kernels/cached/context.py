"""Which rows and keys a CTA of the cache kernel has, and what its parts are handed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.kernels.cached.geometry import CacheGeometry
from flash_attn_fp8.kernels.cached.operands import Scalars, Tensors
from flash_attn_fp8.kernels.ptx import mad_wide
from flash_attn_fp8.kernels.sequences import band, keys_of, queries_of
from flash_attn_fp8.problem import Traits
from flash_attn_fp8.specs import ROWS_PER_MMA, TILE


class Work(NamedTuple):
    """Rows from `row` on of a sequence's KV head, against keys [first, last) of it.

    A row is a query token and head: row r is token r // group. Where only chosen keys are read,
    `first` and `last` count them.
    """

    row: Int32
    kv_head: Int32
    batch: Int32
    split: Int32
    offset_q: Int32
    seqlen_q: Int32
    extent_q: Int32
    offset_k: Int32
    seqlen_k: Int32
    first: Int32
    last: Int32


class Divisors(NamedTuple):
    """What numbers of CTAs and tokens are divided by: a division by any other takes its time.

    `heads`: of K and V. `page_size`: nothing that is used where nothing is paged.
    """

    heads: cute.FastDivmodDivisorV2
    splits: cute.FastDivmodDivisorV2
    m_blocks: cute.FastDivmodDivisorV2
    page_size: cute.FastDivmodDivisorV2

    def of_page(self, token):
        """(page, slot in it) of a token."""
        return tuple(Int32(part) for part in divmod(Uint32(token), self.page_size))


@dataclass(frozen=True)
class Rows:
    """Rows, or scales, of one KV head: addresses by page and slot. Strides in bytes.

    A slot's has 32 bits, so that its product is one instruction; what is the same for all keys of
    the work is in `start`.
    """

    start: Int64
    page_stride: Int64
    stride: Int32

    @classmethod
    def of(cls, x: cute.Tensor, work: Work, axes: int, paged: bool) -> Rows:
        """Of (b or page, s, h[, d]) or (total, h[, d]); `axes` from the slots' to the last."""
        size, strides = x.element_type.width // 8, x.stride
        first = len(strides) - axes
        offset = Int64(work.kv_head) * strides[first + 1]
        page_stride = Int64(0)
        if first == 0:
            offset += Int64(work.offset_k) * strides[0]
        elif paged:
            page_stride = Int64(strides[0]) * size
        else:
            offset += Int64(work.batch) * strides[0]
        start = x.iterator.toint() + offset * size
        return cls(start, page_stride, Int32(strides[first] * size))

    def address(self, page, within):
        """Of a row; `page` None: there are none."""
        start = self.start if page is None else self.start + Int64(page) * self.page_stride
        return mad_wide(within, self.stride, start)


@dataclass(frozen=True)
class Context:
    """Tensors, shared memory, and where in the CTA a thread is.

    `key_warp`: which group of warps, `m_warp`: which warp of it.
    """

    geometry: CacheGeometry
    out_dtype: object
    tensors: Tensors
    scalars: Scalars
    divisors: Divisors
    work: Work
    k: Rows
    v: Rows
    k_scales: Rows | None
    v_scales: Rows | None
    rings: cute.Pointer
    queries: cute.Pointer | None
    key_warp: Int32
    m_warp: Int32
    lane: Int32

    @property
    def spec(self):
        return self.geometry.spec

    @property
    def traits(self) -> Traits:
        return self.geometry.spec.traits

    def query(self, m_tile: int, half: int, lane=None):
        """(token, query head) of a row: `half` 0 or 1 of the rows that a lane has of an MMA."""
        lane = self.lane if lane is None else lane
        tile = self.m_warp * self.spec.tile.m_tiles + m_tile
        return self.token_and_head(tile * ROWS_PER_MMA + half * 8 + lane // 4)

    def token_and_head(self, row):
        """Of a row of the CTA."""
        group = self.traits.q_heads_per_kv_head
        row = self.work.row + row
        return row // group, self.work.kv_head * group + row % group

    def band(self, token):
        """Keys [lo, hi) of the sequence that a token sees."""
        return band(self.traits, self.scalars, token, self.work.seqlen_q, self.work.seqlen_k)

    def visible(self, token):
        """Keys [lo, hi) that a token sees: none past the sequence's last query."""
        lo, hi = self.band(token)
        return lo, select(token < self.work.seqlen_q, hi, Int32(0))


def m_blocks_of(spec, scalars: Scalars):
    """CTAs along the rows of a KV head."""
    rows = scalars.max_seqlen_q * spec.traits.q_heads_per_kv_head
    return cute.ceil_div(rows, spec.tile.block_m)


@cute.jit
def work_of(
    geometry: cutlass.Constexpr, t: Tensors, scalars: Scalars, divisors: Divisors, index: Int32
) -> Work:
    """The work of CTA number `index`: KV heads are neighbours, whose scales share sectors."""
    block_m = geometry.spec.tile.block_m
    m_blocks = m_blocks_of(geometry.spec, scalars)
    rest, kv_head = divmod(Uint32(index), divisors.heads)
    rest, split = divmod(rest, divisors.splits)
    batch, m_block = (Int32(part) for part in divmod(rest, divisors.m_blocks))
    kv_head, split = Int32(kv_head), Int32(split)
    m_block = m_blocks - 1 - m_block  # causal: the last rows see most keys, so they come first
    offset_q, seqlen_q, extent_q = queries_of(t, batch)
    offset_k, seqlen_k = keys_of(t, t.k.shape[1], batch)
    row = m_block * block_m
    work = Work(
        row, kv_head, batch, split, offset_q, seqlen_q, extent_q, offset_k, seqlen_k,
        Int32(0), Int32(0),
    )  # fmt: skip
    first, last = _range(geometry, t, scalars, work)
    return work._replace(first=first, last=last)


@cute.jit
def _range(geometry: cutlass.Constexpr, t: Tensors, scalars: Scalars, work):
    """Keys [first, last) that any row of the CTA sees, in this split."""
    spec = geometry.spec
    traits, group = spec.traits, spec.traits.q_heads_per_kv_head
    token = work.row // group
    last_token = cutlass.min((work.row + spec.tile.block_m - 1) // group, work.seqlen_q - 1)
    length = work.seqlen_k
    if const_expr(spec.traits.selection is not None):
        first, last = Int32(0), _chosen(spec, t, work)
        length = last
    else:
        first, _ = band(traits, scalars, token, work.seqlen_q, work.seqlen_k)
        _, last = band(traits, scalars, last_token, work.seqlen_q, work.seqlen_k)
    if const_expr(spec.split):
        equal = cute.ceil_div(cute.ceil_div(length, TILE), scalars.num_splits) * TILE
        keys = select(scalars.keys_per_split > 0, scalars.keys_per_split, equal)
        first = cutlass.max(first, work.split * keys)
        last = cutlass.min(last, (work.split + 1) * keys)
    return first, select(token < work.seqlen_q, last, first)


def _chosen(spec, t: Tensors, work):
    """How many keys are chosen for a sequence and KV head."""
    count = Int32(t.selection.shape[2])
    if const_expr(t.selection_lens is not None):
        count = cutlass.min(t.selection_lens[work.batch, work.kv_head], count)
    if spec.traits.selection == "pages":
        count = count * Int32(t.k.shape[1])
    return count
