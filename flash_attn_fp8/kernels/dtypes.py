"""Formats of the package as types of CuTe DSL, and the number that stands for no key."""

from __future__ import annotations

import cutlass

DTYPES = {
    "e4m3": cutlass.Float8E4M3FN,
    "e5m2": cutlass.Float8E5M2,
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "fp32": cutlass.Float32,
    "int8": cutlass.Int8,
    "uint8": cutlass.Uint8,
}

NEG_INF = -cutlass.Float32.inf
