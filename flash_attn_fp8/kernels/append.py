"""Quantises new keys and values into a cache: some lanes of a warp a row of a head, in one pass.

A row is loaded once, into registers; its largest magnitude goes through shuffles; codes and scale
are stored. The bits are those of `quantize` (per token and head), or of a division by static scales
with `saturating_cast`, for every input: zeros, denormals, infinities and NaN.

**The division** x / s of a row by its scale is IEEE's, rounded to nearest, in four operations an
element. With s = m 2^E, 1 <= m < 2, X = |x| 2^-E, and y + z the sum of two fp32 numbers that is
1 / m but for 2^-46 of it, y itself 1 / m rounded to nearest,

    q = fma(X, y, X z),    e = fma(-q, m, X),    result = fma(e, y, q).

q is one of the two neighbours of Q = X / m, as rounding something 2^-46 from Q is. So e is exact,
and Q = q + e / m. What the last operation rounds is off from Q by |e| |y - 1 / m| <= |e| 2^-25. Let
h be half an ulp of Q. To matter, Q must lie that near to a midpoint of neighbours, an odd multiple
of h; there |e| / m = |Q - q| <= h + D, D the distance. But Q is no midpoint, since a product of m
and 25 bits ending in 1 has no 24 bits, and |X - midpoint m| is a multiple of h 2^-23: D >= h 2^-23
/ m. That exceeds (h + D) m 2^-25 whenever m <= 2 - 2^-23, as every m is.
Where X or the result is denormal, exactness is lost, and does not matter: such a Q rounds to zero
in every format. X does not overflow since |x| is bounded by (largest code) s first.

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

WARP = 32
THREADS = 256
_WIDE, _NARROW = 16, 8  # elements of a lane: a vector of codes, or half of one
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
        self.kernel.set_name_prefix("flash_attn_fp8_append")
        self.kernel(tensors).launch(
            grid=(cute.ceil_div(seqlen * heads, least), 2, batch),
            block=(THREADS, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, t: AppendTensors):
        """Device code."""
        if cute.arch.block_idx()[1] == 0:
            self._rows(t.k, t.k_cache, t.k_scale, t.slots, self.spec.head_dim)
        else:
            self._rows(t.v, t.v_cache, t.v_scale, t.slots, self.spec.head_dim_v)

    @cute.jit
    def _rows(self, source, cache, scales, slots, width: cutlass.Constexpr):
        """A row of each group of lanes. All lanes stay: they take part in shuffles."""
        lanes = _lanes(width)
        thread = cute.arch.thread_idx()[0]
        lane = thread % lanes
        row = Uint32(cute.arch.block_idx()[0] * (THREADS // lanes) + thread // lanes)
        batch = cute.arch.block_idx()[2]
        seqlen, heads = source.shape[1], source.shape[2]
        token, head = Int32(row // Uint32(heads)), Int32(row % Uint32(heads))
        slot, page_size = Int64(-1), cache.shape[1]
        if token < seqlen:
            slot = Int64(slots[batch * seqlen + token])
        exists = (slot >= 0) & (slot < Int64(cache.shape[0]) * Int64(page_size))
        slot = Uint32(Int64(select(exists, slot, Int64(0))))
        page, offset = Int32(slot // Uint32(page_size)), Int32(slot % Uint32(page_size))
        active = exists & (lane < width // _elements(width))

        x = cute.make_rmem_tensor(cute.make_layout(_elements(width)), self.source)
        x.fill(0.0)
        if active:
            cute.autovec_copy(_part(source[batch, token, head, None], width, lane), x)
        codes = cute.make_rmem_tensor(cute.make_layout(_elements(width)), Uint8)
        if const_expr(self.finds_scale):
            scale = self._quantize(x, codes, lanes)
            if exists & (lane == 0):
                scales[page, offset, head] = scale
        else:
            index = head if const_expr(self.spec.per == "head") else 0
            self._divide(x, codes, scales[index])
        if active:
            cute.autovec_copy(codes, _part(cache[page, offset, head, None], width, lane))

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
        values = cute.make_rmem_tensor(x.layout, Float32)
        values.store(x.load().to(Float32))
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
        values = cute.make_rmem_tensor(x.layout, Float32)
        values.store(x.load().to(Float32))
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
                values[i] = rounding.min_of_magnitude(values[i], bound)

    @cute.jit
    def _encode(self, x, values, codes, scale):
        """values / scale in the cache's format, as bytes."""
        divisor = rounding.divisor(scale)
        signs, words = _words(x), _words(codes)
        signed = self.format is INT8
        for i in cutlass.range_constexpr(cute.size(words)):
            quotients = tuple(
                rounding.quotient(values[4 * i + j], divisor, signed=signed) for j in range(4)
            )
            if const_expr(signed):
                words[i] = rounding.int8_word(quotients)
            else:
                per_word = 32 // self.source.width
                of_four = tuple(signs[4 * i // per_word + j] for j in range(4 // per_word))
                magnitudes = rounding.fp8_word(self.format, quotients, self.spec.converts)
                words[i] = magnitudes | (rounding.upper_bytes(of_four) & Uint32(0x80808080))


def _elements(width: int) -> int:
    """Elements of a row that a lane has."""
    return _WIDE if width % _WIDE == 0 else _NARROW


def _lanes(width: int) -> int:
    """Lanes of a row: a power of two, of which the last may have nothing to do."""
    return 1 << (width // _elements(width) - 1).bit_length()


def _rows_of_cta(width: int) -> int:
    return THREADS // _lanes(width)


def _part(row, width: int, lane):
    """A lane's elements of a row."""
    count = _elements(width)
    layout = cute.make_layout((count, width // count), stride=(1, count))
    return cute.make_tensor(row.iterator, layout)[None, lane]


def _words(x):
    """A register tensor as 32-bit words."""
    count = cute.size(x) * x.element_type.width // 32
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Uint32), cute.make_layout(count))
