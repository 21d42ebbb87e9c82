"""What becomes of operands before a kernel gets them: copies that it can address, or read faster.

On SM90 a kernel of its own may run first: fp8 V is transposed, and 8-bit caches of 16-bit queries
are converted. `preparation_of` a plan launches it, and gives the forward kernel its operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8.call import Operands
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.kernels.sm90.transposed import columns_of, first_column
from flash_attn_fp8.plan import Plan, copied_rows
from flash_attn_fp8.problem import Descale, Problem
from flash_attn_fp8.specs import ALIGNMENT, TILE, Kernel, Sm90Spec, TransposeSpec, WidenSpec

Launch = Callable[..., Any]
# Of operands, and a counter that becomes 0: what the forward kernel gets, and units of tiles.
Preparation = Callable[[Operands, Tensor], tuple[Operands, Tensor | None]]


def preparation_of(
    plan: Plan, problem: Problem, kernel: Callable[[Kernel], Launch]
) -> Preparation | None:
    """What runs before a plan's kernel; None where nothing does. `kernel`: of a spec."""
    if plan.widen is not None:
        return partial(_widened, kernel(plan.widen), plan.widen, problem)
    transpose = plan.spec.transpose if isinstance(plan.spec, Sm90Spec) else None
    if transpose is None:
        return None
    return partial(_transposed, kernel(transpose), transpose, problem)


def _transposed(
    launch: Launch, spec: TransposeSpec, problem: Problem, o: Operands, counter: Tensor
) -> tuple[Operands, None]:
    """V^T in place of V: a copy in whole key tiles, keys along rows."""
    v = aligned(o.v)
    heads, width = v.shape[-2:]
    keys, tile_n = problem.keys, spec.tile_n
    shape: tuple[int, ...]
    if o.cu_seqlens_k is None:
        batch = v.shape[0] if o.page_table is None else o.page_table.shape[0]
        shape = (batch, heads, width, max(tile_n, columns_of(tile_n, keys)))
    else:
        sequences = o.cu_seqlens_k.shape[0] - 1
        shape = (heads, width, first_column(tile_n, v.shape[0], sequences))
    out = torch.empty(shape, dtype=torch.uint8, device=v.device)
    launch((v.view(torch.uint8), out, o.cu_seqlens_k, o.seqused_k, o.page_table, counter), keys)
    return o._replace(v=out.view(v.dtype)), None


def _widened(
    launch: Launch, spec: WidenSpec, problem: Problem, o: Operands, counter: Tensor
) -> tuple[Operands, Tensor | None]:
    """K and V in 16 bits, rows of each sequence, and units of their tiles for scales."""
    sizes, heads = problem.sizes, o.k.shape[-2]
    # Packed sequences are one, in which each begins at a tile of its own.
    batch = 1 if spec.kv_layout == "varlen" else sizes.batch
    keys = copied_rows(sizes) // batch
    new = partial(torch.empty, device=o.k.device)
    k, v = (
        new(batch, keys, heads, x.shape[-1], dtype=FORMATS[fmt].dtype)
        for x, fmt in ((o.k, spec.k_format), (o.v, spec.v_format))
    )
    units = new(batch, heads, -(-keys // TILE), 2) if spec.scales else None
    traits, layout = problem.traits, spec.kv_layout
    launch((
        aligned(o.k).view(torch.uint8), aligned(o.v).view(torch.uint8), k, v,
        o.cu_seqlens_k, o.seqused_k, o.page_table,
        scale_of(o.k_descale, traits.k_descale, layout) if spec.k_scale else None,
        scale_of(o.v_descale, traits.v_descale, layout) if spec.v_scale else None,
        units, counter,
    ))  # fmt: skip
    if spec.kv_layout == "varlen":
        k, v = k[0], v[0]
    return o._replace(k=k, v=v, page_table=None), units


def aligned(x: Tensor) -> Tensor:
    """A tensor whose rows TMA can address: itself, or a copy."""
    return x if is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def is_aligned(x: Tensor) -> bool:
    """Whether all rows begin at multiples of ALIGNMENT bytes, and their elements are neighbours."""
    return x.data_ptr() % ALIGNMENT == 0 and _has_aligned_rows(x.stride(), x.dtype)


@lru_cache(maxsize=8192)
def _has_aligned_rows(strides: tuple[int, ...], dtype: torch.dtype) -> bool:
    step = ALIGNMENT // dtype.itemsize
    return strides[-1] == 1 and all(stride % step == 0 for stride in strides[:-1])


def scale_of(scale: Tensor | None, kind: Descale | None, layout: str) -> Tensor | None:
    """A descale as kernels have it; the leading 1 of a packed one is dropped."""
    if scale is None or kind is None or kind.per_tile:
        return None
    if kind.granularity == "tensor":
        return scale.reshape(1)
    return scale[0] if layout == "varlen" and kind.per_token else scale
