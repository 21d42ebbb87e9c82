"""What every role of the SM100 kernel is handed.

Frozen: CuTe DSL carries what a branch or a loop may change as run-time values, and takes an object
whose method is called there to be changed, unless its class is a frozen dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from flash_attn_fp8.kernels.sm100.barriers import Barriers
from flash_attn_fp8.kernels.sm100.geometry import Geometry
from flash_attn_fp8.kernels.sm100.operands import Scalars, Tensors
from flash_attn_fp8.kernels.sm100.schedule import Schedule
from flash_attn_fp8.problem import Traits


@dataclass(frozen=True)
class Buffers:
    """Shared memory: pointers to rings of tiles, and small tensors."""

    q: cute.Pointer
    kv: cute.Pointer
    row_scale: cute.Tensor  # (TILE, stage): from softmax to correction
    token_scale: cute.Tensor  # (TILE, kind, slot): see token_scales.py
    staging: cute.Pointer  # bytes of output rows, for each correction warp
    tmem_address: cute.Pointer


@dataclass(frozen=True)
class Context:
    """Tensors, buffers, barriers; the units of work of this CTA: first, first + stride, ..."""

    geometry: Geometry
    out_dtype: Any
    tensors: Tensors
    scalars: Scalars
    schedule: Schedule
    buffers: Buffers
    barriers: Barriers
    first: Int32
    stride: Int32

    @property
    def traits(self) -> Traits:
        return self.geometry.spec.traits
