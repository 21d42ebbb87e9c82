"""Buffers of the SM100 kernel. `Context` is that of all forward kernels."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute

from flash_attn_fp8.kernels.forward.context import Context

__all__ = ["Buffers", "Context"]


@dataclass(frozen=True)
class Buffers:
    """Shared memory: pointers to rings of tiles, and small tensors."""

    q: cute.Pointer
    kv: cute.Pointer
    row_scale: cute.Tensor  # (TILE, stage): from softmax to correction
    token_scale: cute.Tensor  # (TILE, kind, slot): see token_scales.py
    staging: cute.Pointer  # bytes of output rows, for each correction warp
    tmem_address: cute.Pointer
    ones: cute.Pointer | None  # a tile of them, where the tensor core sums up P
