"""The kernel that writes V^T (`transposed.py`), once for all query heads and query tiles.

A thread has 16 keys, which lie together in V^T, and 8 columns of V, which lie together in V: it
turns 4 x 4 bytes at a time in registers. Eight threads of a warp write 128 bytes of a row, four
read 32 of a key. Keys past a sequence's end become zeros, so that nothing stale is multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, const_expr

from flash_attn_fp8.kernels.sequences import keys_of
from flash_attn_fp8.kernels.sm90.transposed import (
    COLUMNS_AT_ONCE,
    KEYS_AT_ONCE,
    columns_of,
    first_column,
)
from flash_attn_fp8.specs import TILE, WARP, TransposeSpec

_GROUPS = TILE // KEYS_AT_ONCE  # of keys, of a tile
_EIGHTS = WARP // _GROUPS  # of columns, of a warp
_WORDS = COLUMNS_AT_ONCE // 4


class TransposeTensors(NamedTuple):
    """Global tensors. None: the spec has no use for it."""

    v: cute.Tensor  # (b, s, h, dv), (total, h, dv) or (pages, page_size, h, dv), of bytes
    transposed: cute.Tensor  # (b, h, dv, columns) or (h, dv, columns), of bytes
    cu_seqlens_k: cute.Tensor | None
    seqused_k: cute.Tensor | None
    page_table: cute.Tensor | None
    counter: cute.Tensor  # (1,): becomes 0, for the forward kernel


class Transpose:
    """The kernel of one spec."""

    def __init__(self, spec: TransposeSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, tensors: TransposeTensors, max_seqlen_k: Int32, stream):
        """Host code: a CTA for each key tile of a KV head of a sequence."""
        t = tensors
        heads = t.v.shape[len(t.v.shape) - 2]
        if const_expr(self.spec.kv_layout == "varlen"):
            batch = t.cu_seqlens_k.shape[0] - 1
        else:
            batch = t.transposed.shape[0]
        tile_n = self.spec.tile_n
        tiles = cutlass.max(columns_of(tile_n, max_seqlen_k), tile_n) // TILE
        self.kernel.set_name_prefix("flash_attn_fp8_transpose")
        self.kernel(tensors, tiles, heads).launch(
            grid=(tiles * heads * batch, 1, 1),  # not y and z, which end at 65,535
            block=(self.spec.head_dim_v // COLUMNS_AT_ONCE * _GROUPS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors: TransposeTensors, tiles: Int32, heads: Int32):
        """Device code."""
        cute.arch.griddepcontrol_launch_dependents()  # the forward's K and Q need none of this
        t = tensors
        index = cute.arch.block_idx()[0]
        tile, head, batch = index % tiles, index // tiles % heads, index // (tiles * heads)
        thread = cute.arch.thread_idx()[0]
        if index + thread == 0:
            t.counter[0] = 0
        offset, length = keys_of(t, self._key_rows(t), batch)
        tile_n = self.spec.tile_n
        if tile * TILE < cute.ceil_div(length, tile_n) * tile_n:
            warp, lane = thread // WARP, thread % WARP
            # A group of keys for each of 8 neighbours: they write 128 bytes of one row.
            key = tile * TILE + lane % _GROUPS * KEYS_AT_ONCE
            column = (warp * _EIGHTS + lane // _GROUPS) * COLUMNS_AT_ONCE
            words = self._read(t, head, batch, offset, length, key, column)
            self._write(t, head, batch, offset, key, column, words)

    def _key_rows(self, t):
        """Rows of a page, or of a sequence."""
        return self.spec.page_size or t.v.shape[1]

    @cute.jit
    def _read(self, t, head, batch, offset, length, key: Int32, column: Int32):
        """(word of 4 columns, key) of a thread."""
        words = cute.make_rmem_tensor(cute.make_layout((_WORDS, KEYS_AT_ONCE)), Uint32)
        words.fill(0)
        for i in cutlass.range_constexpr(KEYS_AT_ONCE):
            if key + i < length:
                row = self._row(t, head, batch, offset, key + i)
                row = cute.logical_divide(row, cute.make_layout(COLUMNS_AT_ONCE))
                row = row[None, column // COLUMNS_AT_ONCE]
                source = cute.make_tensor(
                    cute.recast_ptr(row.iterator, dtype=Uint32), cute.make_layout(_WORDS)
                )
                cute.autovec_copy(source, words[None, i])
        return words

    def _row(self, t, head, batch, offset, key):
        if self.spec.kv_layout == "varlen":
            return t.v[offset + key, head, None]
        if self.spec.kv_layout == "dense":
            return t.v[batch, key, head, None]
        page = t.page_table[batch, key // self.spec.page_size]
        return t.v[page, key % self.spec.page_size, head, None]

    @cute.jit
    def _write(self, t, head, batch, offset, key: Int32, column: Int32, words):
        rows = (
            t.transposed[(head, None, None)]
            if const_expr(self.spec.kv_layout == "varlen")
            else t.transposed[(batch, head, None, None)]
        )
        if const_expr(self.spec.kv_layout == "varlen"):
            key = key + first_column(self.spec.tile_n, offset, batch)
        # Column 8q + 2i + e of V goes to row 8i + 2q + e.
        first = column // 32 * 32 + column % 32 // 8 * 2
        for word in cutlass.range_constexpr(_WORDS):
            four = [self._four_positions(words, word, q) for q in range(4)]
            for byte in cutlass.range_constexpr(4):
                out = cute.make_rmem_tensor(cute.make_layout(4), Uint32)
                for q in cutlass.range_constexpr(4):
                    out[q] = four[q][byte]
                i, e = (4 * word + byte) // 2, byte % 2
                row = cute.logical_divide(rows[first + 8 * i + e, None], cute.make_layout(16))
                row = row[None, key // 16]
                target = cute.make_tensor(
                    cute.recast_ptr(row.iterator, dtype=Uint32), cute.make_layout(4)
                )
                cute.autovec_copy(out, target)

    def _four_positions(self, words, word, q):
        """Of each of 4 columns, positions 4q to 4q + 3: keys 2q, 2q + 1, 8 + 2q, 9 + 2q."""
        a, b, c, d = (words[word, k] for k in (2 * q, 2 * q + 1, 8 + 2 * q, 9 + 2 * q))
        low = cute.arch.prmt(a, b, 0x5140), cute.arch.prmt(c, d, 0x5140)
        high = cute.arch.prmt(a, b, 0x7362), cute.arch.prmt(c, d, 0x7362)
        return (
            cute.arch.prmt(*low, 0x5410),
            cute.arch.prmt(*low, 0x7632),
            cute.arch.prmt(*high, 0x5410),
            cute.arch.prmt(*high, 0x7632),
        )
