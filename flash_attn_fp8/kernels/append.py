"""Quantises new keys and values into a cache: some lanes of a warp a row of a head, in one pass.

A row is loaded once, into registers; its largest magnitude goes through shuffles; codes and scale
are stored. The bits are those of `quantize` (per token and head), or of a division by static scales
with `saturating_cast`, for every input: zeros, denormals, infinities and NaN.

**The division** x / s of a row by its scale is IEEE's, rounded to nearest, in three operations an
element. With y = 1 / s rounded to nearest,

    q = x y,    e = fma(-q, s, x),    result = fma(e, y, q).

Let 1 <= x, s < 2 (powers of two change nothing), Q = x / s, h half an ulp of it: 2^-24, or 2^-25
where x < s. |y - 1 / s| <= 2^-25, so q is less than 2 h from Q, or where x < s less than (1 + x) h.
What the last operation rounds would be Q itself, but is off by |e| |y - 1 / s|, and by what e was
rounded. That matters where it reaches the midpoint of two neighbours, an odd multiple of h, from D
away. Q is no midpoint (the product of s and of 25 bits ending in 1 needs more than 24), and
x - midpoint s is a multiple of 2^-23 h, so D >= 2^-23 h / s. q is a multiple of 2 h. Either it is
h + D from Q at most: e is exact, and off is |e| |y - 1 / s| <= (h + D) s 2^-25, less than D for any
s <= 2 - 2^-23. Or it is 3 h - D from Q: then e, rounded by 2^-47 at most, makes for a D below 2.5
2^-48, while D >= (2 - x) h; this leaves x = 2 - 2^-22 and s = 2 - 2^-23, whose Q is near no
midpoint.
An e that is denormal is not exact. It matters only to Q that do not round to zero in every format,
from 2^-18 on, and so only below s = 2^-85: there x and s are taken times 2^64, which is exact. And
|x| is bounded by (largest code) s first where it may be more.

**The sign** of fp8 is the input's, zeros and NaN included: a bit of it, put in after rounding.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint8, Uint32, const_expr
from cutlass import select_ as select

from flash_attn_fp8.formats import FORMATS, INT8, ZERO_DESCALE
from flash_attn_fp8.kernels import rounding
from flash_attn_fp8.kernels.append_operands import AppendTensors
from flash_attn_fp8.kernels.dtypes import DTYPES
from flash_attn_fp8.specs import AppendSpec

THREADS = 128
_WIDE, _NARROW = 16, 8  # elements that are moved at once: a vector of codes, or half of one
_MOVES = 2  # of a lane
_SMALL, _LIFT = 2.0**-85, 2.0**64
# Magnitudes as integers are in the order of their values, with NaN past infinity.
_INFINITY = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}


class Append:
    """The kernel of one spec."""

    def __init__(self, spec: AppendSpec) -> None:
        self.spec = spec
        self.format = FORMATS[spec.codes]
        self.source = DTYPES[spec.source]
        self.finds_scale = spec.per == "token_head"

    @cute.jit
    def __call__(self, tensors: AppendTensors, stream):
        """Host code: the launch. Keys and values are the grid's second dimension."""
        batch, seqlen, heads = tensors.k.shape[0], tensors.k.shape[1], tensors.k.shape[2]
        least = min(_rows_of_cta(self.spec.head_dim), _rows_of_cta(self.spec.head_dim_v))
        by_heads = cute.FastDivmodDivisorV2(Uint32(heads))
        by_page = cute.FastDivmodDivisorV2(Uint32(tensors.k_cache.shape[1]))
        self.kernel.set_name_prefix("flash_attn_fp8_append")
        self.kernel(tensors, by_heads, by_page).launch(
            grid=(cute.ceil_div(seqlen * heads, least), 2, batch),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=self._ctas(),
            preferred_smem_carveout=0,  # or the compiler asks a device for what it has
            stream=stream,
        )

    def _ctas(self) -> int:
        """That a multiprocessor is to hold, which hides the memory's latency; 0: any number.

        As many as registers allow; with given scales for four words spilt, which pays.
        """
        if self.source.width != 16 or not self.spec.converts:
            return 0
        if self.format is INT8:
            return 10
        return 8 if self.finds_scale else 9

    @cute.kernel
    def kernel(self, t: AppendTensors, by_heads, by_page):
        """Device code."""
        divisors = by_heads, by_page
        if cute.arch.block_idx()[1] == 0:
            self._rows(t.k, t.k_cache, t.k_scale, t.slots, divisors, self.spec.head_dim)
        else:
            self._rows(t.v, t.v_cache, t.v_scale, t.slots, divisors, self.spec.head_dim_v)

    @cute.jit
    def _rows(self, source, cache, scales, slots, divisors, width: cutlass.Constexpr):
        """A row of each group of lanes. All lanes stay: they take part in shuffles."""
        by_heads, by_page = divisors
        lanes, count = _lanes(width), _elements(width)
        thread = cute.arch.thread_idx()[0]
        lane = thread % lanes
        row = Uint32(cute.arch.block_idx()[0] * (THREADS // lanes) + thread // lanes)
        batch = cute.arch.block_idx()[2]
        seqlen = source.shape[1]
        token, head = (Int32(part) for part in divmod(row, by_heads))
        slot = Int64(-1)
        if token < seqlen:
            slot = Int64(slots[batch * seqlen + token])
        exists = (slot >= 0) & (slot < Int64(cache.shape[0]) * Int64(cache.shape[1]))
        slot = Uint32(Int64(select(exists, slot, Int64(0))))
        page, offset = (Int32(part) for part in divmod(slot, by_page))

        x = cute.make_rmem_tensor(cute.make_layout((count, _MOVES)), self.source)
        x.fill(0.0)
        row_of_source = source[batch, token, head, None]
        for i in cutlass.range_constexpr(_MOVES):
            part = i * lanes + lane  # neighbours have neighbouring parts
            if exists & (part < width // count):
                cute.autovec_copy(_part(row_of_source, width, part), x[None, i])
        codes = cute.make_rmem_tensor(cute.make_layout((count, _MOVES)), Uint8)
        if const_expr(self.finds_scale):
            scale = self._quantize(x, codes, lanes)
            if exists & (lane == 0):
                scales[page, offset, head] = scale
        else:
            index = head if const_expr(self.spec.per == "head") else 0
            self._divide(x, codes, scales[index])
        row_of_cache = cache[page, offset, head, None]
        for i in cutlass.range_constexpr(_MOVES):
            part = i * lanes + lane
            if exists & (part < width // count):
                cute.autovec_copy(codes[None, i], _part(row_of_cache, width, part))

    @cute.jit
    def _quantize(self, x, codes, lanes: cutlass.Constexpr):
        """Codes of a row by its own scale; what is stored of that."""
        bits = self._magnitude_bits(x)
        infinity = _INFINITY[self.spec.source]
        strange, has_nan = bits >= infinity, Boolean(bits > infinity)
        if strange:  # an infinity or a NaN in this lane: they do not count
            bits = self._finite_bits(x, infinity)
        largest = self._as_float(bits)
        amax = cute.arch.warp_reduction(largest, cute.arch.fmax, threads_in_group=lanes)
        low, high = (Float32(limit) for limit in self.format.descale_limits)
        scale = rounding.divide(amax, Float32(self.format.max))
        scale = cute.arch.fmin(cute.arch.fmax(scale, low), high)
        scale = Float32(select(amax == 0.0, Float32(ZERO_DESCALE), scale))
        values = _as_floats(x)
        if strange:
            self._bound(values, scale)
        self._encode(x, values, codes, scale)
        stored = scale
        if const_expr(self.format is INT8):  # int8 has no NaN: its group's scale has
            lane = cute.arch.lane_idx()
            ballot = Uint32(cute.arch.vote_ballot_sync(has_nan))
            group = (ballot >> Uint32(lane // lanes * lanes)) & Uint32((1 << lanes) - 1)
            stored = Float32(select(group != 0, Float32(float("nan")), scale))
        return stored

    @cute.jit
    def _divide(self, x, codes, scale):
        """Codes of a row by a scale that is given."""
        values = _as_floats(x)
        self._bound(values, scale)
        self._encode(x, values, codes, scale)

    @cute.jit
    def _magnitude_bits(self, x):
        """The largest magnitude of a lane's elements as an integer, past infinity if one is NaN."""
        words = _words(x)
        if const_expr(self.source.width == 16):
            top = words[0] & 0x7FFF7FFF
            for i in cutlass.range_constexpr(1, cute.size(words)):
                top = rounding.max_of_halves(self.spec.source, top, words[i] & 0x7FFF7FFF)
            bits = cutlass.max(Int32(top >> 16), Int32(top & 0xFFFF))
        else:
            bits = Int32(words[0] & 0x7FFFFFFF)
            for i in cutlass.range_constexpr(1, cute.size(words)):
                bits = cutlass.max(bits, Int32(words[i] & 0x7FFFFFFF))
        return bits

    @cute.jit
    def _finite_bits(self, x, infinity: cutlass.Constexpr):
        """The same without infinities and NaN."""
        words, bits = _words(x), Int32(0)
        for i in cutlass.range_constexpr(cute.size(words)):
            if const_expr(self.source.width == 16):
                parts = Int32(words[i] & 0x7FFF), Int32((words[i] >> 16) & 0x7FFF)
            else:
                parts = (Int32(words[i] & 0x7FFFFFFF),)
            for j in cutlass.range_constexpr(len(parts)):
                part = parts[j]
                bits = cutlass.max(bits, Int32(select(part < infinity, part, Int32(0))))
        return bits

    def _as_float(self, bits):
        if self.spec.source == "fp32":
            return bits.bitcast(Float32)
        if self.spec.source == "bf16":
            return (bits << 16).bitcast(Float32)
        return rounding.from_half(bits)

    @cute.jit
    def _bound(self, values, scale):
        """Keep values to what the largest code stands for; NaN stays in fp8, and is 0 in int8."""
        bound = scale * Float32(self.format.max)
        for i in cutlass.range_constexpr(cute.size(values)):
            if const_expr(self.format is INT8):
                value = values[i]
                value = Float32(select(value == value, value, Float32(0.0)))
                values[i] = cute.arch.fmax(cute.arch.fmin(value, bound), -bound)
            else:
                values[i] = rounding.within(values[i], bound)

    @cute.jit
    def _encode(self, x, values, codes, scale):
        """values / scale in the cache's format, as bytes."""
        if scale < Float32(_SMALL):
            scale = scale * Float32(_LIFT)
            for i in cutlass.range_constexpr(cute.size(values)):
                values[i] = values[i] * Float32(_LIFT)
        minus_scale, inverse = -scale, rounding.reciprocal(scale)
        signs, words = _words(x), _words(codes)
        for i in cutlass.range_constexpr(cute.size(words)):
            quotients = tuple(
                rounding.quotient(values[4 * i + j], minus_scale, inverse) for j in range(4)
            )
            if const_expr(self.format is INT8):
                words[i] = rounding.int8_word(quotients)
            else:
                per_word = 32 // self.source.width
                of_four = tuple(signs[4 * i // per_word + j] for j in range(4 // per_word))
                code = rounding.fp8_word(self.format, quotients, self.spec.converts)
                words[i] = code | (rounding.upper_bytes(of_four) & Uint32(0x80808080))


def _elements(width: int) -> int:
    """Elements of a row that are moved at once."""
    return _WIDE if width % _WIDE == 0 else _NARROW


def _lanes(width: int) -> int:
    """Lanes of a row: a power of two, of which the last may have nothing to do."""
    parts = width // _elements(width)
    return 1 << (-(-parts // _MOVES) - 1).bit_length()


def _rows_of_cta(width: int) -> int:
    return THREADS // _lanes(width)


def _part(row, width: int, part):
    """Elements of a row that are moved at once."""
    count = _elements(width)
    layout = cute.make_layout((count, width // count), stride=(1, count))
    return cute.make_tensor(row.iterator, layout)[None, part]


def _as_floats(x):
    values = cute.make_rmem_tensor(cute.make_layout(cute.size(x)), Float32)
    if x.element_type is DTYPES["bf16"]:  # one operation each, where a conversion takes two
        words = _words(x)
        for i in range(cute.size(words)):
            values[2 * i] = Uint32(words[i] << 16).bitcast(Float32)
            values[2 * i + 1] = Uint32(words[i] & Uint32(0xFFFF0000)).bitcast(Float32)
    else:
        flat = cute.make_tensor(x.iterator, cute.make_layout(cute.size(x)))
        values.store(flat.load().to(Float32))
    return values


def _words(x):
    """A register tensor as 32-bit words."""
    count = cute.size(x) * x.element_type.width // 32
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Uint32), cute.make_layout(count))
