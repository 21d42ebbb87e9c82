"""The number formats of operands, of P and of outputs, with their limits.

Every limit that another module needs is derived here from the format's bit layout, so that a
number such as 448 or 8.807 is written once. Layouts: OCP 8-bit Floating Point Specification 1.0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_FP32 = torch.finfo(torch.float32)
ZERO_DESCALE = 2.0**-60  # of zeros: below any other that matters, its inverse far from fp32's ends


@dataclass(frozen=True)
class Format:
    """One number format.

    `max` is the largest finite value; `min_subnormal_log2` the base-2 logarithm of the smallest
    positive value (for int8, of the step 1).
    """

    name: str
    dtype: torch.dtype
    bits: int
    max: float
    mantissa_bits: int
    exponent_bias: int

    @property
    def log2_max(self) -> float:
        """log2 of the largest finite value: 8.807 for e4m3, 15.807 for e5m2."""
        return math.log2(self.max)

    @property
    def min_subnormal_log2(self) -> int:
        return 1 - self.exponent_bias - self.mantissa_bits

    @property
    def flush_log2(self) -> int:
        """A value at or below 2**flush_log2 rounds to zero (half the smallest subnormal)."""
        return self.min_subnormal_log2 - 1

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding a normal value to nearest."""
        return 2.0 ** -(self.mantissa_bits + 1)

    @property
    def descale_limits(self) -> tuple[float, float]:
        """The least and the greatest descale: a normal number; the largest code times it is one."""
        return _FP32.tiny, _FP32.max / self.max * (1 - _FP32.eps)

    @property
    def is_8bit(self) -> bool:
        return self.bits == 8

    @property
    def is_fp8(self) -> bool:
        return self in (E4M3, E5M2)


E4M3 = Format("e4m3", torch.float8_e4m3fn, 8, 448.0, 3, 7)
E5M2 = Format("e5m2", torch.float8_e5m2, 8, 57344.0, 2, 15)
INT8 = Format("int8", torch.int8, 8, 127.0, 0, 1)
FP16 = Format("fp16", torch.float16, 16, 65504.0, 10, 15)
BF16 = Format("bf16", torch.bfloat16, 16, torch.finfo(torch.bfloat16).max, 7, 127)
FP32 = Format("fp32", torch.float32, 32, torch.finfo(torch.float32).max, 23, 127)

FORMATS = {f.name: f for f in (E4M3, E5M2, INT8, FP16, BF16, FP32)}
_BY_DTYPE = {f.dtype: f for f in FORMATS.values()}

OUT_FORMATS = (BF16, FP16, FP32, E4M3, E5M2)
QUANTIZED = (E4M3, E5M2, INT8)


def format_of(dtype: torch.dtype) -> Format | None:
    """The format of a torch dtype, or None where attention has no use for it."""
    return _BY_DTYPE.get(dtype)


def format_of_p(q: Format, kv: Format) -> Format:
    """The format of P in the product P·V.

    q's, but fp16 over an 8-bit cache, whatever q is: every 8-bit code is exact in fp16, which
    rounds P eight times finer than bf16; V's scales in the exponent keep P in its range.
    """
    return FP16 if kv.is_8bit and not q.is_8bit else q


def dtype_name(dtype: torch.dtype) -> str:
    """Short name used in messages: `e4m3`, `bf16`, or torch's own for anything else."""
    known = format_of(dtype)
    return known.name if known else str(dtype).removeprefix("torch.")


def saturating_cast(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round `x` to `fmt` as the hardware's `cvt.rn.satfinite` does.

    Round to nearest, ties to even; beyond the largest finite value (infinities included) the
    result is that value; NaN stays NaN where the format has one.
    """
    if fmt is INT8:
        return x.round().clamp(-fmt.max, fmt.max).to(fmt.dtype)
    return x.clamp(-fmt.max, fmt.max).to(fmt.dtype)
