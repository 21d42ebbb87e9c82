"""Powers of two, by which numbers come into fp16's range and back without a rounding."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32

QUERY_TOP = 14  # log2 of a query's largest element, rounded down, as the tensor core gets it
_LARGEST = 100  # keeps a power and its inverse normal numbers


def power_of_two(exponent: Int32) -> Float32:
    """2 ** exponent."""
    return ((exponent + 127) << 23).bitcast(Float32)


def exponent_of(x: Float32) -> Int32:
    """log2 of a positive number, rounded down."""
    return (x.bitcast(Int32) >> 23) - 127


def within_range(exponent: Int32) -> Int32:
    """The nearest exponent that has a power and an inverse."""
    return cutlass.max(cutlass.min(exponent, _LARGEST), -_LARGEST)
