"""The kernel that makes 16-bit rows of a cache's 8-bit codes, once for all query tiles and heads.

Codes with a scale each token are multiplied by it, in units of a power of two for each tile of keys
and KV head, and rounded to fp16: by 2**-12 at the most, a fortieth of what e4m3 rounds, and as much
as P is rounded by. Applying scales to scores instead costs the forward kernel a third of its time
(docs/kernel_sm90.md). Other codes stay what they are: fp16 and bf16 hold all of them.

Sequences become rows of their own, or, if packed, begin at tiles of their own (`first_column`),
whatever the cache's layout: pages of any size, packed, or rows.
A thread has 8 codes at a time: it reads 8 bytes and writes 16, so that both are whole sectors. From
a sequence's end to the end of its last tile rows become zeros, so that nothing stale is multiplied.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass import select_ as select
from cutlass.memory import SmemAllocator

from flash_attn_fp8.formats import FORMATS, ZERO_DESCALE
from flash_attn_fp8.kernels.codes import halves, pairs
from flash_attn_fp8.kernels.encode import packed, values_of_16bit
from flash_attn_fp8.kernels.powers import exponent_of, power_of_two, within_range
from flash_attn_fp8.kernels.sequences import keys_of
from flash_attn_fp8.kernels.sm90.transposed import first_column
from flash_attn_fp8.specs import TILE, WARP, WidenSpec

_THREADS = 2 * TILE
_CODES = 8  # of a thread at a time
# The bits of four codes of which none is set in 0, nor in minus 0.
_NUMBER = {"e4m3": 0x7F7F7F7F, "e5m2": 0x7F7F7F7F, "int8": 0xFFFFFFFF}
_TOP = 15  # log2 of what no number of a tile reaches


class WidenTensors(NamedTuple):
    """Global tensors. None: the spec has no use for it."""

    k: cute.Tensor  # (b, s, h, d), (total, h, d) or (pages, page_size, h, d), of bytes
    v: cute.Tensor
    wide_k: cute.Tensor  # (b, s, h, d), in 16 bits; packed: (1, rows, h, d)
    wide_v: cute.Tensor
    cu_seqlens_k: cute.Tensor | None
    seqused_k: cute.Tensor | None
    page_table: cute.Tensor | None
    k_scale: cute.Tensor | None  # as k, without its last dimension
    v_scale: cute.Tensor | None
    units: cute.Tensor | None  # (b, h, tiles, 2), b as of wide_k: becomes K's unit, log2 of V's
    counter: cute.Tensor  # (1,): becomes 0, for the forward kernel


class _Place(NamedTuple):
    """A tile of keys of a KV head: those from `first` on of a sequence of `length` keys.

    It is number `tile` of `target` in the copy; the sequence begins at `offset` where it is packed.
    """

    tile: Int32
    target: Int32
    head: Int32
    batch: Int32
    offset: Int32
    first: Int32
    length: Int32


class Widen:
    """The kernel of one spec."""

    def __init__(self, spec: WidenSpec) -> None:
        self.spec = spec

    @cute.jit
    def __call__(self, tensors: WidenTensors, stream):
        """Host code: a CTA for each key tile of a KV head of a sequence."""
        batch, keys, heads, _ = tensors.wide_k.shape
        tiles = cutlass.max(cute.ceil_div(keys, TILE), 1)
        self.kernel.set_name_prefix("flash_attn_fp8_widen")
        self.kernel(tensors, Int32(tiles), Int32(heads)).launch(
            grid=(tiles * heads * batch, 1, 1),  # not y and z, which end at 65,535
            block=(_THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, tensors: WidenTensors, tiles: Int32, heads: Int32):
        """Device code."""
        cute.arch.griddepcontrol_launch_dependents()  # the forward's Q needs none of this
        t = tensors
        thread = cute.arch.thread_idx()[0]
        index = cute.arch.block_idx()[0]
        tile, head, batch = index % tiles, index // tiles % heads, index // (tiles * heads)
        if index + thread == 0:
            t.counter[0] = 0
        place = self._place(t, tile, head, batch)
        shared, of_keys = SmemAllocator(), cute.make_layout((TILE, 2))
        factors = shared.allocate_tensor(Float32, of_keys, 16)
        any_code = shared.allocate_tensor(Int32, cute.make_layout((TILE, 2, 2)), 16)
        if (place.first >= 0) & (place.first < place.length):
            # Asked for before anything is done with scales.
            k = self._read(t, t.k, self.spec.head_dim, place)
            v = self._read(t, t.v, self.spec.head_dim_v, place)
            if const_expr(self.spec.scales):
                scale = self._scale(t, place)
                self._find_codes(any_code, (k, v))
                self._scales(t, factors, any_code, scale, place)
            k_factor = factors[None, 0] if const_expr(self.spec.k_scale) else None
            v_factor = factors[None, 1] if const_expr(self.spec.v_scale) else None
            self._write(t.wide_k, k, self.spec.k_format, k_factor, place)
            self._write(t.wide_v, v, self.spec.v_format, v_factor, place)

    @cute.jit
    def _place(self, t, tile: Int32, head: Int32, target: Int32):
        batch, first = target, tile * TILE
        if const_expr(self.spec.kv_layout == "varlen"):
            batch = _sequence_of(t, tile * TILE)
            first = first - first_column(TILE, t.cu_seqlens_k[batch], batch)
        offset, length = keys_of(t, t.k.shape[len(t.k.shape) - 3], batch)
        length = cutlass.min(length, Int32(t.wide_k.shape[1]))
        return _Place(tile, target, head, batch, offset, first, length)

    @cute.jit
    def _read(self, t, source, width: cutlass.Constexpr, place):
        """(word, number of vector): what a thread has of a tile's codes; zeros past the end."""
        count = _vectors(width)
        words = cute.make_rmem_tensor(cute.make_layout((_CODES // 4, count)), Uint32)
        words.fill(0)
        for n in cutlass.range_constexpr(count):
            row, column = _place_of(n, width)
            if place.first + row < place.length:
                codes = self._at(t, source, place, place.first + row)
                cute.autovec_copy(_vector(codes, column, _CODES), words[None, n])
        return words

    def _at(self, t, x, place, key):
        """What belongs to a key of the head: a row of codes, or a scale."""
        rest = (place.head,) + (None,) * (len(x.shape) - len(t.k.shape) + 1)
        if self.spec.kv_layout == "varlen":
            return x[(place.offset + key, *rest)]
        if self.spec.kv_layout == "dense":
            return x[(place.batch, key, *rest)]
        page_size = t.k.shape[1]
        page = t.page_table[place.batch, key // page_size]
        return x[(page, key % page_size, *rest)]

    @cute.jit
    def _scale(self, t, place):
        """That of a thread's key: the first threads have the keys of K, the others those of V."""
        thread = cute.arch.thread_idx()[0]
        key = place.first + thread % TILE
        scale = Float32(0.0)
        if key < place.length:
            if thread < TILE:
                if const_expr(self.spec.k_scale):
                    scale = Float32(self._at(t, t.k_scale, place, key))
            else:
                if const_expr(self.spec.v_scale):
                    scale = Float32(self._at(t, t.v_scale, place, key))
        return scale

    @cute.jit
    def _find_codes(self, any_code, operands: cutlass.Constexpr):
        """(key, K or V, which of two warps that share a row): 1 where a code is not 0, else 0."""
        thread = cute.arch.thread_idx()[0]
        for part in cutlass.range_constexpr(2):
            any_code[thread % TILE, thread // TILE, part] = 0
        cute.arch.sync_threads()
        widths = self.spec.head_dim, self.spec.head_dim_v
        for kind, (words, width) in enumerate(zip(operands, widths, strict=True)):
            for n in cutlass.range_constexpr(_vectors(width)):
                row, _ = _place_of(n, width)
                bits = Uint32(0)
                for i in cutlass.range_constexpr(_CODES // 4):
                    bits = bits | words[i, n]
                if (bits & _NUMBER[self.spec.kv_format]) != 0:
                    any_code[row, kind, thread // WARP % 2] = 1
        cute.arch.sync_threads()

    @cute.jit
    def _scales(self, t, factors, any_code, scale, place):
        """(key, K or V): each key's scale in units of its tile's, which are stored.

        The unit is of the keys that have a number: the scale of zeros is no size, and an infinite
        one would leave nothing of the others. NaN and infinity stay what they are.
        """
        thread = cute.arch.thread_idx()[0]
        size = cute.arch.fmax(scale, -scale)
        parts = [any_code[thread % TILE, thread // TILE, part] for part in range(2)]
        is_finite, is_zero = size < math.inf, (parts[0] | parts[1]) == 0
        largest = select(is_finite, select(is_zero, Float32(0.0), size), Float32(0.0))
        for apart in cutlass.range_constexpr(5):
            other = cute.arch.shuffle_sync_bfly(largest, 1 << apart)
            largest = cute.arch.fmax(largest, other)
        factors[thread % TILE, thread // TILE] = largest
        cute.arch.sync_threads()
        for warp in cutlass.range_constexpr(TILE // WARP):
            largest = cute.arch.fmax(largest, factors[warp * WARP, thread // TILE])
        cute.arch.sync_threads()
        unit_log2 = _unit_log2(self.spec.kv_format, largest)
        exists = select(thread < TILE, Int32(self.spec.k_scale), Int32(self.spec.v_scale))
        unit_log2 = unit_log2 * exists  # 1 where nothing is multiplied
        factor = scale * power_of_two(-unit_log2)
        factor = select(is_zero & is_finite, Float32(0.0), factor)  # it may be infinite
        factors[thread % TILE, thread // TILE] = factor
        unit = select(thread < TILE, power_of_two(unit_log2), Float32(unit_log2))
        if thread % TILE == 0:
            t.units[place.target, place.head, place.tile, thread // TILE] = unit
        cute.arch.sync_threads()

    @cute.jit
    def _write(self, target, words, fmt: cutlass.Constexpr, factors, place):
        width = target.shape[3]
        for n in cutlass.range_constexpr(_vectors(width)):
            row, column = _place_of(n, width)
            to = place.tile * TILE + row
            if to < target.shape[1]:
                wide = cute.make_rmem_tensor(cute.make_layout(_CODES // 2), Uint32)
                for i in cutlass.range_constexpr(_CODES // 4):
                    factor = factors[row] if const_expr(factors is not None) else None
                    both = _converted(self.spec.kv_format, fmt, words[i, n], factor)
                    wide[2 * i], wide[2 * i + 1] = both
                out = target[place.target, to, place.head, None]
                cute.autovec_copy(wide, _vector(out, column, 2 * _CODES))


@cute.jit
def _sequence_of(t, row: Int32):
    """The packed sequence that a row of the copy may belong to: the last that begins before it.

    A lane looks at every 32nd, so that few reads are waited for.
    """
    sequences = t.cu_seqlens_k.shape[0] - 1
    found = Int32(0)
    for i in cutlass.range(cute.ceil_div(sequences, WARP), unroll=1):
        batch = i * WARP + cute.arch.lane_idx()
        if batch < sequences:
            if first_column(TILE, t.cu_seqlens_k[batch], batch) <= row:
                found = batch
    for apart in cutlass.range_constexpr(5):
        found = cutlass.max(found, cute.arch.shuffle_sync_bfly(found, 1 << apart))
    return found


def _unit_log2(fmt: str, largest: Float32) -> Int32:
    """log2 of a unit in which the largest scale times the largest code is below 2**_TOP.

    Of a tile of zeros, whose `largest` is 0, as of zeros that were quantised.
    """
    largest = Float32(select(largest > 0.0, largest, Float32(ZERO_DESCALE)))
    return within_range(exponent_of(largest) + (1 + math.ceil(FORMATS[fmt].log2_max) - _TOP))


def _converted(fmt: str, to: str, word: Uint32, factor) -> list[Uint32]:
    """The four codes of a word, times a factor if there is one: two words."""
    if factor is None:
        return halves(fmt, to, word)
    values = (values_of_16bit("fp16", pair) for pair in pairs(fmt, True, word))
    return [packed(to, [x * factor for x in two]) for two in values]


def _vectors(width: int) -> int:
    """How many vectors of a tile of rows of `width` codes a thread has."""
    return TILE * width // (_CODES * _THREADS)


def _place_of(n: int, width: int):
    """(row, vector of the row) of a thread's vector number `n` of a tile."""
    number = cute.arch.thread_idx()[0] + n * _THREADS
    return number // (width // _CODES), number % (width // _CODES)


def _vector(row, number, size: int):
    """`size` bytes of a row, as words."""
    words = cute.make_tensor(
        cute.recast_ptr(row.iterator, dtype=Uint32),
        cute.make_layout((size // 4, cute.size(row) * row.element_type.width // (8 * size))),
    )
    return words[None, number]
