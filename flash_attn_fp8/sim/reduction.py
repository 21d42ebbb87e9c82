"""Reductions of bulk copies: `destination op source`, element by element, by PTX type.

Bit for bit those of an H200 over edge values (`tests/sim/tma/h200_copies.json`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]

_BITS = {
    "b32": "<u4", "u32": "<u4", "s32": "<i4", "b64": "<u8", "u64": "<u8", "s64": "<i8",
    "f16": "<f2", "bf16": "<u2", "f32": "<f4", "f32.ftz": "<f4", "f64": "<f8",
}  # fmt: skip

# The manual's tables of .redOp and element type, by what is reduced into.
_FLOATS = ("f32", "f64", "f16", "bf16")
_ORDERED = ("u32", "s32", "u64", "s64", "f16", "bf16")
GLOBAL = {
    "add": ("u32", "s32", "u64", *_FLOATS),
    "min": _ORDERED,
    "max": _ORDERED,
    "inc": ("u32",),
    "dec": ("u32",),
    **dict.fromkeys(("and", "or", "xor"), ("b32", "b64")),
}
SHARED = {
    "add": ("u32", "s32", "u64"),
    "min": ("u32", "s32"),
    "max": ("u32", "s32"),
    "inc": ("u32",),
    "dec": ("u32",),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}
OPERATIONS = frozenset(GLOBAL)


def reduction(operation: str, type_: str) -> Combine:
    """`combine(destination, source)` of bytes, (n, unit) each, into the bytes to store."""
    combine = _OPERATIONS[operation](type_)
    kind = np.dtype(_BITS[type_])

    def of_bytes(destination: np.ndarray, source: np.ndarray) -> np.ndarray:
        a = np.ascontiguousarray(destination).view(kind)
        b = np.ascontiguousarray(source).view(kind)
        with np.errstate(all="ignore"):
            return combine(a, b).astype(kind, copy=False).view(np.uint8)

    return of_bytes


def _add(type_: str) -> Combine:
    if type_ == "f32":
        return lambda a, b: _quiet(a + b, 0x7FFFFFFF, np.uint32)
    if type_ == "f32.ftz":
        return _add_f32_ftz
    if type_ == "f64":
        return _add_f64
    if type_ == "f16":
        # A sum of two f16 is rounded right in f32 and then again: 24 >= 2 x 11 + 2 bits.
        return lambda a, b: _quiet(a + b, 0x7FFF, np.uint16)
    if type_ == "bf16":
        return lambda a, b: _to_bf16(_from_bf16(a) + _from_bf16(b))
    return lambda a, b: a + b


def _add_f32_ftz(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Subnormal inputs and results are flushed to zero of their sign."""
    return _quiet(_flush(_flush(a) + _flush(b)), 0x7FFFFFFF, np.uint32)


def _add_f64(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A NaN passes as it is, that of the source first."""
    return np.where(np.isnan(b), b, np.where(np.isnan(a), a, a + b))


def _flush(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def _quiet(x: np.ndarray, nan: int, bits: type) -> np.ndarray:
    """NaN results are the canonical one."""
    return np.where(np.isnan(x), np.array(nan, bits).view(x.dtype), x)


def _from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def _extreme(take_minimum: bool) -> Callable[[str], Combine]:
    def of_type(type_: str) -> Combine:
        if type_ not in ("f16", "bf16"):
            return np.minimum if take_minimum else np.maximum
        kind = np.dtype(_BITS[type_])

        def combine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            """Of a number and a NaN the number; -0 is less than +0; of two NaNs the canonical."""
            x, y = (_from_bf16(v) if type_ == "bf16" else v for v in (a, b))
            less = (x < y) | ((x == y) & np.signbit(x))
            first = ((less if take_minimum else ~less) & ~np.isnan(x)) | np.isnan(y)
            chosen = np.where(first, a, b).astype(kind).view(np.uint16)
            both = np.isnan(x) & np.isnan(y)
            return np.where(both, np.uint16(0x7FFF), chosen).view(kind)

        return combine

    return of_type


_OPERATIONS: dict[str, Callable[[str], Combine]] = {
    "add": _add,
    "min": _extreme(True),
    "max": _extreme(False),
    "inc": lambda _: lambda a, b: np.where(a >= b, 0, a + 1),
    "dec": lambda _: lambda a, b: np.where((a == 0) | (a > b), b, a - 1),
    "and": lambda _: np.bitwise_and,
    "or": lambda _: np.bitwise_or,
    "xor": lambda _: np.bitwise_xor,
}
