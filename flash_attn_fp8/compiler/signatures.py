"""Tensors without data that stand for a kernel's arguments while it is compiled.

Sizes and strides are symbols, so that one kernel serves them all; what a spec fixes (head dims,
alignment) is a number.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint8

from flash_attn_fp8.kernels.append_operands import AppendTensors
from flash_attn_fp8.kernels.cached import operands as cached
from flash_attn_fp8.kernels.combine_operands import CombineTensors
from flash_attn_fp8.kernels.dtypes import DTYPES
from flash_attn_fp8.kernels.forward.operands import Scalars, Tensors
from flash_attn_fp8.kernels.sm90.transpose import TransposeTensors
from flash_attn_fp8.kernels.sm90.widen import WidenTensors
from flash_attn_fp8.problem import Descale
from flash_attn_fp8.specs import (
    ALIGNMENT,
    TILE,
    AppendSpec,
    CacheSpec,
    CombineSpec,
    Sm90Spec,
    Sm100Spec,
    TransposeSpec,
    WidenSpec,
)


def forward_signature(spec: Sm100Spec | Sm90Spec) -> tuple[Tensors, Scalars]:
    """The arguments of `Sm100Forward(spec)` or `Sm90Forward(spec)`, without the stream."""
    shared = _of_attention(spec)
    descales = spec.traits.k_descale, spec.traits.v_descale
    claims = False
    if isinstance(spec, Sm90Spec):
        claims = spec.claims_units
        rank = _rank(spec.traits.kv_layout)
        shared["v"] = _rows(spec.v_format, rank, spec.traits.head_dim_v)
        if spec.transpose is not None:
            shared["v"] = _transposed(spec.traits.kv_format, rank, spec.traits.head_dim_v)
    tensors = Tensors(
        **shared,
        q_descale=_scale(spec.traits.q_descale, _rank(spec.traits.q_layout)),
        counter=_small(Int32, 1) if claims else None,
        units=_units(any(d is not None and d.per_tile for d in descales)),
    )
    return tensors, Scalars(*(t(0) for t in Scalars.__annotations__.values()))


def transpose_signature(spec: TransposeSpec) -> tuple[TransposeTensors, Int32]:
    """The arguments of `Transpose(spec)`, without the stream."""
    packed = spec.kv_layout == "varlen"
    rank = 3 if packed else 4
    tensors = TransposeTensors(
        v=_aligned_rows(Uint8, ALIGNMENT, rank, spec.head_dim_v),
        transposed=_transposed("uint8", rank, spec.head_dim_v),
        cu_seqlens_k=_small(Int32, 1) if packed else None,
        seqused_k=_small(Int32, 1) if spec.seqused_k else None,
        page_table=_small(Int32, 2) if spec.kv_layout == "paged" else None,
        counter=_small(Int32, 1),
    )
    return tensors, Int32(0)


def widen_signature(spec: WidenSpec) -> WidenTensors:
    """The arguments of `Widen(spec)`, without the stream."""
    rank = _rank(spec.kv_layout)
    packed = spec.kv_layout == "varlen"

    def small(exists: bool, rank: int) -> Any:
        return _small(Float32, rank) if exists else None

    return WidenTensors(
        k=_aligned_rows(Uint8, ALIGNMENT, rank, spec.head_dim),
        v=_aligned_rows(Uint8, ALIGNMENT, rank, spec.head_dim_v),
        wide_k=_rows(spec.k_format, 4, spec.head_dim),
        wide_v=_rows(spec.v_format, 4, spec.head_dim_v),
        cu_seqlens_k=_small(Int32, 1) if packed else None,
        seqused_k=_small(Int32, 1) if spec.seqused_k else None,
        page_table=_small(Int32, 2) if spec.kv_layout == "paged" else None,
        k_scale=small(spec.k_scale, rank - 1),
        v_scale=small(spec.v_scale, rank - 1),
        units=_units(spec.scales),
        counter=_small(Int32, 1),
    )


def cache_signature(spec: CacheSpec) -> tuple[cached.Tensors, cached.Scalars]:
    """The arguments of `CacheForward(spec)`, without the stream."""
    traits = spec.traits
    tensors = cached.Tensors(
        **_of_attention(spec),
        selection=_small(Int32, 3) if traits.selection is not None else None,
        selection_lens=_small(Int32, 2) if traits.selection_lens else None,
    )
    return tensors, cached.Scalars(*(t(0) for t in cached.Scalars.__annotations__.values()))


def _of_attention(spec: Sm100Spec | Sm90Spec | CacheSpec) -> dict[str, Any]:
    """The tensors that every attention kernel has, by name."""
    traits = spec.traits
    rank_q, rank_kv = _rank(traits.q_layout), _rank(traits.kv_layout)
    parts = int(spec.split)
    return dict(
        q=_rows(traits.q_format, rank_q, traits.head_dim),
        k=_rows(traits.kv_format, rank_kv, traits.head_dim),
        v=_rows(traits.kv_format, rank_kv, traits.head_dim_v),
        out=_rows(spec.out_format, rank_q + parts, traits.head_dim_v),
        lse=_small(Float32, rank_q - 1 + parts) if spec.writes_lse else None,
        cu_seqlens_q=_small(Int32, 1) if traits.q_layout == "varlen" else None,
        cu_seqlens_k=_small(Int32, 1) if traits.kv_layout == "varlen" else None,
        seqused_q=_small(Int32, 1) if traits.seqused_q else None,
        seqused_k=_small(Int32, 1) if traits.seqused_k else None,
        page_table=_small(Int32, 2) if traits.kv_layout == "paged" else None,
        sink=_small(Float32, 1) if traits.sink else None,
        k_descale=_scale(traits.k_descale, rank_kv),
        v_descale=_scale(traits.v_descale, rank_kv),
        output_scale=_small(Float32, 1) if traits.output_scale else None,
    )


def _rank(layout: str) -> int:
    return 3 if layout == "varlen" else 4


def combine_signature(spec: CombineSpec) -> CombineTensors:
    """The arguments of `Combine(spec)`, without the stream."""
    rank = 3 if spec.varlen else 4
    return CombineTensors(
        partial=_rows("fp32", rank + 1, spec.head_dim_v),
        lse_partial=_small(Float32, rank),
        out=_small(DTYPES[spec.out_format], rank),
        lse=_small(Float32, rank - 1) if spec.lse else None,
        output_scale=_small(Float32, 1) if spec.output_scale else None,
    )


def append_signature(spec: AppendSpec) -> AppendTensors:
    """The arguments of `Append(spec)`, without the stream."""
    source, codes = (DTYPES[spec.source], spec.source_bytes), (Uint8, spec.code_bytes)
    scale_rank = 3 if spec.per == "token_head" else 1
    return AppendTensors(
        k=_aligned_rows(*source, 4, spec.head_dim),
        v=_aligned_rows(*source, 4, spec.head_dim_v),
        k_cache=_aligned_rows(*codes, 4, spec.head_dim),
        v_cache=_aligned_rows(*codes, 4, spec.head_dim_v),
        slots=_small(Int64 if spec.wide_slots else Int32, 1),
        k_scale=_small(Float32, scale_rank),
        v_scale=_small(Float32, scale_rank),
    )


def _rows(fmt: str, rank: int, width: int) -> Any:
    """A tensor of rows of `width` elements, each row aligned."""
    return _aligned_rows(DTYPES[fmt], ALIGNMENT, rank, width)


def _aligned_rows(dtype: Any, alignment: int, rank: int, width: int) -> Any:
    divisibility = alignment * 8 // dtype.width
    shape = (*(cute.sym_int32() for _ in range(rank - 1)), width)
    stride = (*(cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1)), 1)
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=alignment)


def _transposed(fmt: str, rank: int, width: int) -> Any:
    """V^T, (..., width, keys): whole tiles of keys."""
    shape = (*(cute.sym_int32() for _ in range(rank - 2)), width, cute.sym_int32(divisibility=TILE))
    stride = (*(cute.sym_int64(divisibility=TILE) for _ in range(rank - 1)), 1)
    return cute.runtime.make_fake_tensor(DTYPES[fmt], shape, stride, assumed_align=TILE)


def _small(dtype: Any, rank: int) -> Any:
    shape = tuple(cute.sym_int32() for _ in range(rank))
    stride = tuple(cute.sym_int64() for _ in range(rank))
    return cute.runtime.make_fake_tensor(dtype, shape, stride, assumed_align=dtype.width // 8)


def _units(exist: bool) -> Any:
    """Two numbers for each (sequence, KV head, tile of keys), next to those of the next tile.

    Packed sequences are one.
    """
    if not exist:
        return None
    shape = (*(cute.sym_int32() for _ in range(3)), 2)
    stride = (cute.sym_int64(divisibility=2), cute.sym_int64(divisibility=2), 2, 1)
    return cute.runtime.make_fake_tensor(Float32, shape, stride, assumed_align=8)


def _scale(kind: Descale | None, rank: int) -> Any:
    """A descale as the kernel indexes it; the leading 1 of a packed one is dropped."""
    if kind is None or kind.per_tile:
        return None
    ranks = {"tensor": 1, "head": 1, "batch_head": 2, "token_head": rank - 1}
    return _small(Float32, ranks[kind.granularity])
