"""Bits as numbers: the few primitives that handlers are built from.

Each is a Python function, exact when it runs as such (with `NUMBA_DISABLE_JIT=1`, or when a test
calls a handler), and has a compiled form that an intrinsic gives. In compiled code integers of up
to 32 bits and s64 are int64, u64 and b64 are uint64; in Python both are `int`.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic, overload, register_jitable

_Function = TypeVar("_Function", bound=Callable[..., Any])


def device(function: _Function) -> _Function:
    """Let compiled code call a Python function; what is returned is the function itself."""
    register_jitable(function)
    return function


_MASK64 = (1 << 64) - 1


def signed(bits: int) -> int:
    """The s64 that 64 bits spell."""
    bits = int(bits) & _MASK64
    return bits - (1 << 64) if bits >> 63 else bits


def unsigned(value: int) -> int:
    """The low 64 bits of an integer, as u64."""
    return int(value) & _MASK64


def f32_of(bits: int) -> Any:
    """The float32 with these bits."""
    return np.uint32(bits).view(np.float32)


def bits_of_f32(value: Any) -> int:
    """The bits of a float32."""
    return int(np.float32(value).view(np.uint32))


def widened_f32(bits: int) -> float:
    """The float64 equal to the float32 with these bits."""
    return struct.unpack("<f", struct.pack("<I", int(bits)))[0]  # type: ignore[no-any-return]


def narrowed_f32(value: float) -> int:
    """The bits of a float64 rounded to nearest float32; NaN is 0x7FFFFFFF."""
    with np.errstate(all="ignore"):
        return 0x7FFFFFFF if value != value else int(np.float32(value).view(np.uint32))


def f64_of(bits: int) -> float:
    """The float64 with these bits."""
    return struct.unpack("<d", struct.pack("<Q", int(bits) & _MASK64))[0]  # type: ignore[no-any-return]


def bits_of_f64(value: float) -> int:
    """The bits of a float64, as s64."""
    return struct.unpack("<q", struct.pack("<d", value))[0]  # type: ignore[no-any-return]


def fma_f64(a: float, b: float, c: float) -> float:
    """a × b + c, rounded once."""
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c  # the sign of zero; a product that underflows keeps its own
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma_f32(a: Any, b: Any, c: Any) -> Any:
    """a × b + c of float32, rounded once."""
    with np.errstate(all="ignore"):
        return np.float32(_odd_fma(float(a), float(b), float(c)))


def _odd_fma(a: float, b: float, c: float) -> float:
    # A float32 product is exact in float64. Rounding the sum to odd there, and then to float32,
    # rounds once: float64 has more than two bits to spare.
    product = a * b
    total = product + c
    if not math.isfinite(total) or Fraction(product) + Fraction(c) == Fraction(total):
        return total
    bits = bits_of_f64(total)
    if bits & 1:
        return total
    away = (Fraction(product) + Fraction(c) > Fraction(total)) == (total > 0)
    return f64_of(bits + (1 if away else -1))


_INT64, _FLOAT, _DOUBLE = ir.IntType(64), ir.FloatType(), ir.DoubleType()
_Emit = Callable[[Any, Any], Any]


def _compiled(
    function: Callable[..., Any], result: Any, arguments: tuple[Any, ...], emit: _Emit
) -> None:
    """Give `function` a compiled form: `emit(builder, values)` after casts to `arguments`."""

    def typing(typingctx: Any, *given: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            cast = [
                context.cast(builder, value, source, target)
                for value, source, target in zip(values, signature.args, arguments, strict=True)
            ]
            return emit(builder, cast)

        return result(*given), code

    if len(arguments) == 1:

        @intrinsic
        def one(typingctx, a):  # type: ignore[no-untyped-def]
            return typing(typingctx, a)

        overload(function)(lambda a: lambda a: one(a))  # type: ignore[call-arg]
    else:

        @intrinsic
        def three(typingctx, a, b, c):  # type: ignore[no-untyped-def]
            return typing(typingctx, a, b, c)

        overload(function)(lambda a, b, c: lambda a, b, c: three(a, b, c))  # type: ignore[call-arg]


def _fma(builder: Any, values: Any) -> Any:
    return builder.fma(*values)


def _narrow(builder: Any, values: Any) -> Any:
    (value,) = values
    word = builder.bitcast(builder.fptrunc(value, _FLOAT), ir.IntType(32))
    nan = builder.fcmp_unordered("uno", value, value)
    return builder.zext(builder.select(nan, ir.Constant(ir.IntType(32), 0x7FFFFFFF), word), _INT64)


def _low_word(builder: Any, values: Any) -> Any:
    return builder.bitcast(builder.trunc(values[0], ir.IntType(32)), _FLOAT)


_compiled(signed, types.int64, (types.int64,), lambda b, v: v[0])
_compiled(unsigned, types.uint64, (types.uint64,), lambda b, v: v[0])
_compiled(f32_of, types.float32, (types.uint64,), _low_word)
_compiled(
    bits_of_f32,
    types.uint64,
    (types.float32,),
    lambda b, v: b.zext(b.bitcast(v[0], ir.IntType(32)), _INT64),
)
_compiled(
    widened_f32, types.float64, (types.uint64,), lambda b, v: b.fpext(_low_word(b, v), _DOUBLE)
)
_compiled(narrowed_f32, types.int64, (types.float64,), _narrow)
_compiled(f64_of, types.float64, (types.uint64,), lambda b, v: b.bitcast(v[0], _DOUBLE))
_compiled(bits_of_f64, types.int64, (types.float64,), lambda b, v: b.bitcast(v[0], _INT64))
_compiled(fma_f64, types.float64, (types.float64,) * 3, _fma)
_compiled(fma_f32, types.float32, (types.float32,) * 3, _fma)
