"""Matrices as tensor cores see them: formats, descriptors of shared memory, and products.

Every operand of a tensor-core instruction has 32 bytes along K (16 in the short forms of
`mma.sync`). It arrives here as bytes, becomes float64 or int64 of shape (rows, K), and the product
becomes what the accumulator holds.

Accumulation. Products of two 8- or 16-bit floats, and of two tf32, are exact in float64. One
instruction sums its products in float64, adds the accumulator, and rounds once, to nearest even,
to the accumulator's type. Hardware keeps fewer bits while it sums and cuts them off; how many is
not documented for sm_100, so results may differ from hardware in the last bits of an fp32. For
e4m3 and e5m2 the sum is free of rounding where the exponents of its addends span less than 2^52.
Integers are exact, and wrap in 32 bits, or saturate where the instruction says so. How Hopper sums
is known bit for bit: `hopper.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from numba import njit

from flash_attn_fp8.sim.errors import Misaligned, Unmodelled
from flash_attn_fp8.sim.memory import SharedMemory
from flash_attn_fp8.sim.numerics import to_float32
from flash_attn_fp8.sim.order import Access

K_BYTES = 32  # of every wgmma and tcgen05.mma
NAN_F32 = 0x7FFFFFFF  # what tensor cores return for any NaN
NAN_F16 = 0x7FFF

# --------------------------------------------------------------------------------- formats


_E4M3, _E5M2 = (
    to_float32(np.arange(256, dtype=np.uint8), name).astype(np.float64) for name in ("e4m3", "e5m2")
)


def _widened(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return values.astype(np.float64)


def _f16(raw: np.ndarray) -> np.ndarray:
    return _widened(raw.view("<f2"))


def _bf16(raw: np.ndarray) -> np.ndarray:
    return _widened(to_float32(raw.view("<u2"), "bf16"))


def _tf32(raw: np.ndarray) -> np.ndarray:
    """Tensor cores read the upper 19 bits of a word and ignore the rest."""
    return _widened(to_float32(raw.view("<u4"), "tf32"))


@dataclass(frozen=True)
class Format:
    """An element type of A or B. `decode` takes contiguous bytes (..., n) to (..., n / size).

    2^`smallest` is the smallest normal number.
    """

    name: str
    size: int
    decode: Callable[[np.ndarray], np.ndarray]
    integer: bool = False
    smallest: int = 0


FORMATS = {
    f.name: f
    for f in (
        Format("e4m3", 1, lambda raw: _E4M3.take(raw), smallest=-6),
        Format("e5m2", 1, lambda raw: _E5M2.take(raw), smallest=-14),
        Format("f16", 2, _f16, smallest=-14),
        Format("bf16", 2, _bf16, smallest=-126),
        Format("tf32", 4, _tf32, smallest=-126),
        Format("s8", 1, lambda raw: raw.view(np.int8).astype(np.float64), integer=True),
        Format("u8", 1, lambda raw: raw.astype(np.float64), integer=True),
        Format("b32", 4, lambda raw: raw.view("<u4")),  # words as they are, for tcgen05.cp
    )
}

# ------------------------------------------------------------------------- shared descriptors


@dataclass(frozen=True)
class Swizzle:
    """A permutation of 16-byte chunks by XOR of bits of the absolute shared address.

    `span` is the bytes of a row between which it permutes; an MN-major matrix puts `k_rows` rows of
    K next to each other.
    """

    name: str
    span: int
    mask: int
    shift: int
    k_rows: int = 8

    def apply(self, address: np.ndarray) -> np.ndarray:
        permuted: np.ndarray = address ^ ((address >> self.shift) & self.mask)
        return permuted


NO_SWIZZLE = Swizzle("no swizzle", 16, 0, 0)
SWIZZLE_32B = Swizzle("32B", 32, 0x10, 3)
SWIZZLE_64B = Swizzle("64B", 64, 0x30, 3)
SWIZZLE_128B = Swizzle("128B", 128, 0x70, 3)
SWIZZLE_128B_ATOM_32B = Swizzle("128B with 32B atoms", 128, 0x60, 2, k_rows=4)

_SWIZZLES_SM100 = {
    0: NO_SWIZZLE,
    1: SWIZZLE_128B_ATOM_32B,
    2: SWIZZLE_128B,
    4: SWIZZLE_64B,
    6: SWIZZLE_32B,
}
_SWIZZLES_SM90 = {0: NO_SWIZZLE, 1: SWIZZLE_128B, 2: SWIZZLE_64B, 3: SWIZZLE_32B}
_ADDRESS_MASK = 0x3FFF  # 14 bits, in units of 16 bytes; the CTA's rank does not fit
_KNOWN_SM100 = 0x3FFF << 0 | 0x3FFF << 16 | 0x3FFF << 32 | 1 << 46 | 7 << 61
_KNOWN_SM90 = 0x3FFF << 0 | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62


@dataclass(frozen=True)
class SharedDescriptor:
    """Where a matrix lies in shared memory: all in bytes."""

    start: int
    leading: int
    stride: int
    swizzle: Swizzle


@lru_cache(maxsize=8192)
def decode_shared_sm100(bits: int) -> SharedDescriptor:
    """The 64-bit matrix descriptor of `tcgen05.mma` and `tcgen05.cp`."""
    unknown = bits & ~_KNOWN_SM100
    if unknown:
        raise Unmodelled(
            f"matrix descriptor {bits:#018x} has bits {unknown:#x} (base offset, absolute leading "
            f"dimension, or reserved)"
        )
    if not bits >> 46 & 1:
        raise Unmodelled(f"matrix descriptor {bits:#018x} has version 0 in bits 46-47, not 1")
    return _shared(bits, _SWIZZLES_SM100.get(bits >> 61))


@lru_cache(maxsize=8192)
def decode_shared_sm90(bits: int) -> SharedDescriptor:
    """The 64-bit matrix descriptor of `wgmma.mma_async`."""
    unknown = bits & ~_KNOWN_SM90
    if unknown:
        raise Unmodelled(
            f"matrix descriptor {bits:#018x} has bits {unknown:#x} (base offset or reserved)"
        )
    return _shared(bits, _SWIZZLES_SM90[bits >> 62])


def _shared(bits: int, swizzle: Swizzle | None) -> SharedDescriptor:
    if swizzle is None:
        raise Unmodelled(f"matrix descriptor {bits:#018x} has swizzle {bits >> 61}")
    start, leading, stride = (((bits >> shift) & _ADDRESS_MASK) << 4 for shift in (0, 16, 32))
    return SharedDescriptor(start, leading, stride, swizzle)


_PERIOD = 1024  # bytes after which every swizzle repeats


@lru_cache(maxsize=4096)
def _k_major(d: SharedDescriptor, rows: int, first: int, k_bytes: int) -> np.ndarray:
    """Offsets of 16-byte chunks, (row, chunk): groups of 8 rows at the stride.

    The leading offset counts only without swizzle, between chunks along K.
    """
    row = np.arange(first, first + rows)[:, None]
    chunk = np.arange(k_bytes // 16)
    along_k = chunk * (d.leading if d.swizzle is NO_SWIZZLE else 16)
    if d.swizzle is not NO_SWIZZLE and d.start % d.swizzle.span + k_bytes > d.swizzle.span:
        raise Misaligned(
            f"matrix descriptor: {k_bytes} bytes of K from {d.start:#x} leave a span of "
            f"{d.swizzle.span} bytes"
        )
    at = d.start + row % 8 * d.swizzle.span + row // 8 * d.stride + along_k
    return np.ascontiguousarray(d.swizzle.apply(at)).reshape(-1)


@lru_cache(maxsize=4096)
def _mn_major(d: SharedDescriptor, nbytes: int, first: int, k: int, unit: int) -> np.ndarray:
    """Offsets of chunks of `unit` bytes, (k, chunk along MN); `first` and `nbytes` along MN."""
    at = np.arange(first, first + nbytes, unit)
    row = np.arange(k)[:, None]
    span = d.swizzle.span
    if d.swizzle is NO_SWIZZLE:
        offset = at // span * d.stride + row // 8 * d.leading
    else:
        offset = at // span * d.leading + row // d.swizzle.k_rows * d.stride
    offset = d.start + offset + row % d.swizzle.k_rows * span + at % span
    return np.ascontiguousarray(d.swizzle.apply(offset)).reshape(-1)


def read_shared(
    memory: SharedMemory,
    descriptor: SharedDescriptor,
    rows: int,
    format: Format,
    mn_major: bool,
    access: Access,
    first: int = 0,
    k_bytes: int = K_BYTES,
) -> np.ndarray:
    """Rows [first, first + rows) of A, or of B transposed: float64 (rows, K)."""
    # Swizzles look at the address modulo a period; the rest of the address need not be cached.
    base = descriptor.start & -_PERIOD
    d = SharedDescriptor(
        descriptor.start - base, descriptor.leading, descriptor.stride, descriptor.swizzle
    )
    if not mn_major:
        raw = memory.read(_k_major(d, rows, first, k_bytes) + base, 16, access)
        return format.decode(raw.reshape(rows, k_bytes))
    nbytes, skipped = rows * format.size, first * format.size
    unit = 8 if (nbytes | skipped) % 16 else 16
    k = k_bytes // format.size
    raw = memory.read(_mn_major(d, nbytes, skipped, k, unit) + base, unit, access)
    return format.decode(raw.reshape(k, nbytes)).T


# ----------------------------------------------------------------------- instruction descriptors

_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": {0: "e4m3", 1: "e5m2"},
    "i8": {0: "u8", 1: "s8"},
}
_SUB_BYTE = {3: "e2m3", 4: "e3m2", 5: "e2m1"}
_RESULTS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}


@dataclass(frozen=True)
class InstructionDescriptor:
    """What one `tcgen05.mma` computes; `m` and `n` of the whole, both CTAs of a pair together."""

    m: int
    n: int
    a: Format
    b: Format
    d: str
    negate_a: bool
    negate_b: bool
    transpose_a: bool  # A is M-major
    transpose_b: bool  # B is N-major
    saturate: bool

    @property
    def k(self) -> int:
        return K_BYTES // self.a.size


@cache
def decode_instruction(bits: int, kind: str, ctas: int) -> InstructionDescriptor:
    """The 32-bit instruction descriptor, of `.kind::f16`, `tf32`, `f8f6f4` or `i8`."""
    where = f"instruction descriptor {bits:#010x} of kind::{kind}"

    def field(shift: int, width: int) -> int:
        return bits >> shift & ((1 << width) - 1)

    if field(0, 3):
        raise Unmodelled(f"{where}: sparse A")
    if bits & (1 << 6 | 1 << 23 | 1 << 29) or field(30, 2):
        raise Unmodelled(f"{where}: bits {bits & 0xE0800040:#x} (reserved, or shift of .ws)")
    types = []
    for name, shift in (("A", 7), ("B", 10)):
        code = field(shift, 3)
        if kind == "f8f6f4" and code in _SUB_BYTE:
            raise Unmodelled(f"{where}: {name} of {_SUB_BYTE[code]}")
        if code not in _TYPES[kind]:
            raise Unmodelled(f"{where}: type {code} of {name}")
        types.append(FORMATS[_TYPES[kind][code]])
    d = _RESULTS[kind].get(field(4, 2))
    if d is None:
        raise Unmodelled(f"{where}: type {field(4, 2)} of D")
    a, b = types
    if kind == "f16" and (a is not b or (d == "f16" and a.name != "f16")):
        raise Unmodelled(f"{where}: {a.name} x {b.name} to {d}")
    if kind == "i8" and field(13, 2):
        raise Unmodelled(f"{where}: negated integers")
    if kind != "i8" and field(3, 1):
        raise Unmodelled(f"{where}: saturation of floats")
    m, n = field(24, 5) << 4, field(17, 6) << 3
    _check_shape(where, m, n, kind, ctas)
    flags = (bool(field(shift, 1)) for shift in (13, 14, 15, 16, 3))
    return InstructionDescriptor(m, n, a, b, d, *flags)


def _check_shape(where: str, m: int, n: int, kind: str, ctas: int) -> None:
    step = (16 if n > 32 else 8) * ctas if kind == "i8" else 8 * ctas
    if kind == "i8" and ctas == 2:
        step = 32
    if m not in (64 * ctas, 128 * ctas) or not 0 < n <= 256 or n % step:
        raise Unmodelled(
            f"{where}: M = {m}, N = {n}; cta_group::{ctas} has M = {64 * ctas} or {128 * ctas}, "
            f"N a multiple of {step} up to 256"
        )


# --------------------------------------------------------------------------------- products


def finish_f32(value: np.ndarray) -> np.ndarray:
    """float64 to the bits of float32, rounded to nearest even; every NaN is NAN_F32."""
    with np.errstate(over="ignore"):
        rounded = value.astype(np.float32)
    bits = rounded.view(np.uint32)
    nan = np.isnan(rounded)
    if nan.any():
        bits[nan] = NAN_F32
    return bits


def finish_f16(value: np.ndarray) -> np.ndarray:
    """The same to float16, as uint32."""
    with np.errstate(over="ignore"):
        bits = value.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits[np.isnan(value)] = NAN_F16
    return bits


def finish_s32(value: np.ndarray, saturate: bool) -> np.ndarray:
    """Exact integers in float64 to the bits of int32, wrapped or saturated."""
    exact = value.astype(np.int64)
    if saturate:
        exact = np.clip(exact, -(1 << 31), (1 << 31) - 1)
    return exact.astype(np.uint32)  # modulo 2^32


def finish(value: np.ndarray, d: str, saturate: bool = False) -> np.ndarray:
    """The accumulator's bits, uint32, one element each."""
    if d == "f32":
        return finish_f32(value)
    if d == "f16":
        return finish_f16(value)
    return finish_s32(value, saturate)


def accumulator(bits: np.ndarray, d: str) -> np.ndarray:
    """The values, float64, of accumulators given as uint32 (an f16 in the lower half)."""
    if d == "f32":
        return _widened(np.ascontiguousarray(bits).view(np.float32))
    if d == "f16":
        return _widened(bits.astype(np.uint16).view(np.float16))
    return np.ascontiguousarray(bits).view(np.int32).astype(np.float64)


def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """(M, K) times (N, K) transposed, float64, summed in the order of K.

    Not numpy's `@`: BLAS spreads even these small products over threads, which spin; where other
    processes use the cores, that takes several times as long as everything else together.
    """
    product: np.ndarray = _multiply(np.ascontiguousarray(a), np.ascontiguousarray(b.T))
    return product


@njit(cache=True, nogil=True)
def _multiply(a, b):  # type: ignore[no-untyped-def]
    out = np.zeros((a.shape[0], b.shape[1]))
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            for j in range(b.shape[1]):
                out[i, j] += a[i, k] * b[k, j]
    return out
