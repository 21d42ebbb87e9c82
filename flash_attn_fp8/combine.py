"""`flash_attn_combine`: merging partial results of splits, as FA4's function of that name."""

# No `from __future__ import annotations`: torch.library reads the op's annotations as objects.

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flash_attn_fp8.call import describe, literal
from flash_attn_fp8.check_buffers import check_mapped, overlaps
from flash_attn_fp8.check_options import MAX_SPLITS
from flash_attn_fp8.checks import check_autograd
from flash_attn_fp8.errors import Refusal
from flash_attn_fp8.formats import dtype_name

_PARTIAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | None = None,
    seqused: Tensor | None = None,
    virtual_batch_idx: Tensor | None = None,
    return_lse: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Merge the partial outputs of splits of the keys into the output over all keys.

    Formula: lse = log(sum_i exp lse_i), out = sum_i exp(lse_i - lse) out_i (Flash-Decoding, Dao et
    al. 2023). A split without keys has lse_i = -inf and adds nothing, whatever its out_i holds.

    Args:
        out_partial: (num_splits, batch, seqlen, nheads, head_dim), or (num_splits, total, nheads,
            head_dim): fp32, bf16 or fp16.
        lse_partial: (num_splits, batch, seqlen, nheads) or (num_splits, total, nheads) fp32,
            natural log, any strides. Heads come last, as FA4 has it, unlike in the forward's lse.
        out: written in place and returned; out_partial without its first axis.
        out_dtype: fp32, bf16 or fp16; default: out's dtype, or out_partial's.
        cu_seqlens: (batch + 1,) int32 of packed rows; rows outside come out as 0 with lse -inf.
        seqused: (batch,) int32: rows in use of each sequence; those past them come out as 0, -inf.
        virtual_batch_idx: refused unless None.
        return_lse: also return the merged lse.

    Returns:
        (out, lse): lse (batch, seqlen, nheads) or (total, nheads) fp32, None unless asked for.

    Raises:
        InvalidArguments, Unsupported: with every fault.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> parts, lses = torch.ones(2, 1, 3, 4, 8), torch.zeros(2, 1, 3, 4)
        >>> out, lse = fa.flash_attn_combine(parts, lses)
        >>> out.shape, round(float(lse[0, 0, 0]), 4)
        (torch.Size([1, 3, 4, 8]), 0.6931)
    """
    lengths = cu_seqlens, seqused
    _check(out_partial, lse_partial, out, out_dtype, lengths, virtual_batch_idx, return_lse)
    dtype = out_dtype or (out.dtype if out is not None else out_partial.dtype)
    eager = type(out_partial) is Tensor and not is_in_torch_dispatch_mode()
    if torch.compiler.is_compiling() or out_partial.is_meta or not eager:
        merged, lse = _combine_op(out_partial, lse_partial, cu_seqlens, seqused, dtype)
    else:
        merged, lse = _combine(out_partial, lse_partial, cu_seqlens, seqused, dtype)
    if out is not None:
        check_mapped("out", out, merged)
        merged = out.copy_(merged)
    return merged, (lse if return_lse else None)


def _combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    from flash_attn_fp8.reference.combine import combine

    used = _used_rows(out_partial, cu_seqlens, seqused)
    if used is not None:
        lse_partial = torch.where(used[..., None], lse_partial, float("-inf"))
    out, lse = combine(out_partial, lse_partial)
    return out.to(dtype), lse


def _used_rows(
    out_partial: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None
) -> Tensor | None:
    """(batch, seqlen) or (total,): which rows exist; None where all do."""
    if cu_seqlens is None and seqused is None:
        return None
    row = torch.arange(out_partial.shape[-3], device=out_partial.device)
    if cu_seqlens is None:
        return row < seqused[:, None]  # type: ignore[index]
    length = cu_seqlens.diff() if seqused is None else seqused
    start = cu_seqlens[:-1, None]
    return ((row >= start) & (row < start + length[:, None])).any(0)


@torch.library.custom_op("flash_attn_fp8::combine", mutates_args=())
def _combine_op(
    out_partial: Tensor,
    lse_partial: Tensor,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of `flash_attn_combine`."""
    out, lse = _combine(out_partial, lse_partial, cu_seqlens, seqused, dtype)
    return out.contiguous(), lse.contiguous()


@_combine_op.register_fake
def _combine_fake(
    out_partial: Tensor,
    lse_partial: Tensor,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    out = out_partial.new_empty(out_partial.shape[1:], dtype=dtype)
    return out, out_partial.new_empty(out_partial.shape[1:-1], dtype=torch.float32)


def _check(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    lengths: tuple[Tensor | None, Tensor | None],
    virtual_batch_idx: Tensor | None,
    return_lse: bool,
) -> None:
    refusal, (cu_seqlens, seqused) = Refusal(), lengths
    bad = refusal.invalid.append
    shown = f"out_partial={describe(out_partial)}, lse_partial={describe(lse_partial)}"
    call = f"flash_attn_combine({shown})"
    given = {"out_partial": out_partial, "lse_partial": lse_partial}
    optional = {"out": out, "cu_seqlens": cu_seqlens, "seqused": seqused}
    given |= {n: t for n, t in optional.items() if t is not None}
    for name, t in given.items():
        if not isinstance(t, Tensor):
            bad(f"{name} must be a torch.Tensor, got {describe(t)}")
    if not (out_dtype is None or isinstance(out_dtype, torch.dtype)):
        bad(f"out_dtype={literal(out_dtype)} must be a torch.dtype: that of fp32, bf16, fp16")
    if not isinstance(return_lse, bool):
        bad(f"return_lse={literal(return_lse)} must be True or False")
    if refusal.invalid:
        raise refusal.error(call)
    if virtual_batch_idx is not None:
        refusal.unsupported.append("virtual_batch_idx: batches are not reordered here; drop it")
    if out_partial.ndim not in (4, 5):
        bad("out_partial must be (num_splits, [batch,] seqlen, nheads, head_dim)")
    elif not 1 <= out_partial.shape[0] <= MAX_SPLITS:
        bad(f"num_splits={out_partial.shape[0]} must be from 1 to {MAX_SPLITS}")
    if lse_partial.shape != out_partial.shape[:-1]:
        bad(f"lse_partial must have shape {list(out_partial.shape[:-1])} (heads last)")
    if out_partial.dtype not in _PARTIAL_DTYPES or lse_partial.dtype != torch.float32:
        bad("out_partial must be fp32, bf16 or fp16, and lse_partial fp32")
    dtype = out_dtype or (out.dtype if out is not None else torch.float32)
    if dtype not in _PARTIAL_DTYPES:
        bad(f"output cannot be {dtype_name(dtype)}; it can be fp32, bf16, fp16")
    if out is not None and (out.shape != out_partial.shape[1:] or out.dtype != dtype):
        bad(f"out must be {dtype_name(dtype)}{list(out_partial.shape[1:])}, got {describe(out)}")
    elif out is not None and overlaps(out):
        bad(f"out has strides {list(out.stride())}, in which elements share memory; clone it")
    _check_lengths(out_partial, cu_seqlens, seqused, refusal)
    for name, other in given.items():
        if other.device != out_partial.device:
            bad(f"{name} is on {other.device}, out_partial on {out_partial.device}")
    check_autograd(given, refusal)
    if refusal.reasons:
        raise refusal.error(call)


def _check_lengths(
    out_partial: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, refusal: Refusal
) -> None:
    packed, before = out_partial.ndim == 4, len(refusal.invalid)
    for name, t in (("cu_seqlens", cu_seqlens), ("seqused", seqused)):
        if t is not None and (t.dtype != torch.int32 or t.ndim != 1):
            refusal.invalid.append(f"{name} must be a vector of int32, got {describe(t)}")
    if len(refusal.invalid) > before or out_partial.ndim not in (4, 5):
        return
    if cu_seqlens is not None and not packed:
        refusal.invalid.append("cu_seqlens is for packed rows: out_partial of rank 4")
    if seqused is not None:
        batch = cu_seqlens.shape[0] - 1 if cu_seqlens is not None else out_partial.shape[1]
        if packed and cu_seqlens is None:
            refusal.invalid.append("seqused of packed rows needs cu_seqlens")
        elif seqused.shape[0] != batch:
            refusal.invalid.append(f"seqused must have {batch} elements, got {seqused.shape[0]}")
