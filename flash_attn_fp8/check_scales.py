"""Checks of q_descale, k_descale, v_descale and output_scale.

The number of dimensions of a descale is its granularity:

    0, or one element           one per tensor
    1  (heads,)                 per head
    2  (batch, heads)           per sequence and head (FA3's and FA4's form)
    3  (batch, seqlen, heads)   per token and head; (1, total, heads) where the operand is varlen,
                                (num_pages, page_size, heads_kv) where it is paged

`heads` is nheads_kv; q's may also be nheads. All are fp32: real value = stored value x descale.
The leading 1 of the varlen form keeps it apart from (batch, heads) when every sequence has one
token, which is what decode looks like.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_fp8.call import Operands, describe
from flash_attn_fp8.errors import Refusal
from flash_attn_fp8.formats import INT8, Format, dtype_name
from flash_attn_fp8.problem import Descale, Granularity

_GRANULARITIES: tuple[Granularity, ...] = ("tensor", "head", "batch_head", "token_head")


def scale_granularities(
    o: Operands, q: Format, kv: Format, batch: int, refusal: Refusal
) -> dict[str, Descale | None]:
    """The granularity of each operand's descale, None where it is absent (1.0)."""
    if kv is INT8:
        missing = [n for n in ("k_descale", "v_descale") if getattr(o, n) is None]
        if missing:
            refusal.invalid.append(
                f"{' and '.join(missing)} missing: int8 has no range of its own; give the fp32 "
                f"scales that the codes were made with (see quantize)"
            )
    nheads, nheads_kv = o.q.shape[-2], o.k.shape[-2]
    per_token_q = (*o.q.shape[:-2],) if o.q.ndim == 4 else (1, o.q.shape[0])
    per_token_kv = (*o.k.shape[:-2],) if o.k.ndim == 4 else (1, o.k.shape[0])
    q_heads = (nheads_kv, nheads) if nheads != nheads_kv else (nheads_kv,)
    return {
        "q": _granularity("q_descale", o.q_descale, q, batch, per_token_q, q_heads, refusal),
        "k": _granularity("k_descale", o.k_descale, kv, batch, per_token_kv, (nheads_kv,), refusal),
        "v": _granularity("v_descale", o.v_descale, kv, batch, per_token_kv, (nheads_kv,), refusal),
    }


def _granularity(
    name: str,
    scale: Tensor | None,
    fmt: Format,
    batch: int,
    per_token: tuple[int, ...],
    heads: tuple[int, ...],
    refusal: Refusal,
) -> Descale | None:
    if scale is None:
        return None
    if not fmt.is_8bit:
        operand = "q" if name[0] == "q" else f"{refusal.name('k')} and {refusal.name('v')}"
        refusal.invalid.append(
            f"{name} is given, but {operand} have 16 bits ({fmt.name}): a scale belongs to 8-bit "
            f"codes. Fold it into softmax_scale, or quantize first"
        )
        return None
    if scale.dtype != torch.float32:
        refusal.invalid.append(f"{name} must be fp32, got {dtype_name(scale.dtype)}")
    shape = tuple(scale.shape)
    if scale.ndim == 0 or shape == (1,):
        return Descale("tensor")
    leading: tuple[tuple[int, ...], ...] = ((), (batch,), per_token)
    wanted = [(*lead, h) for lead in leading for h in heads]
    if shape not in wanted:
        if scale.ndim <= 3 and all(n == 1 for n in shape):
            return Descale("tensor")
        refusal.invalid.append(
            f"{name} has shape {list(shape)}; wanted [] or [1] (per tensor), or "
            + ", ".join(str(list(w)) for w in wanted)
            + " (per head; per batch and head; per token and head)"
        )
        return None
    return Descale(_GRANULARITIES[scale.ndim], per_query_head=shape[-1] != heads[0])


def output_descale(o: Operands, out: Format, refusal: Refusal) -> None:
    """Check output_scale: fp8 outputs only, one fp32 element (stored = real / output_scale)."""
    scale = o.output_scale
    if scale is None:
        return
    if not out.is_fp8:
        refusal.invalid.append(
            f"output_scale belongs to an fp8 output; out is {out.name}. Ask for "
            f"out_dtype=torch.float8_e4m3fn, or drop output_scale"
        )
    if isinstance(scale, Tensor) and (
        scale.dtype != torch.float32 or scale.numel() != 1 or scale.ndim > 1
    ):
        refusal.invalid.append(
            f"output_scale must be one fp32 element of shape [] or [1], got {describe(scale)}"
        )
