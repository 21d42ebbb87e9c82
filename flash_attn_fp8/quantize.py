"""Quantisation by the largest magnitude: codes in an 8-bit format and their fp32 descales.

    descale = amax(|x|) / format max over each group;   code = round(x / descale), saturating

so that x ~ code * descale. The division is fp32's (IEEE), the rounding to nearest even; the same
bits on any device. Groups are what `per` says, and the shape of the descale tells the attention
functions the granularity.

Corner cases. A group of zeros has descale 2**-60: any would do for its values, but where V's scales
are folded into the exponent (docs/numerics.md, 4) a large one would lead the row's maximum and
flush its neighbours. The descale is never below 2**-126, the smallest
normal fp32 number, so denormal rows stay finite, nor so large that the largest code times it
overflows. Infinities do not count in amax and saturate to the format's largest value. A NaN stays
NaN, alone, in e4m3 and e5m2; int8 has no NaN, so the descale of its group becomes NaN and the whole
group does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from flash_attn_fp8.errors import InvalidArguments
from flash_attn_fp8.formats import INT8, QUANTIZED, Format, dtype_name, format_of, saturating_cast

Per = Literal["token_head", "batch_head", "head", "tensor"]
_MIN_DESCALE = torch.finfo(torch.float32).tiny
ZERO_DESCALE = 2.0**-60  # below any other that matters, and its inverse far from fp32's ends


class Quantized(NamedTuple):
    """Codes and what turns them back: x = values * descale (broadcast) + mean.

    values: x's shape, 8 bits. descale: fp32, shaped as `per` says. mean: what smoothing took off,
    (batch, 1, heads, d) fp32 (packed: (1, heads, d)), or None.
    """

    values: Tensor
    descale: Tensor
    mean: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The fp32 tensor that the codes stand for."""
        x = self.values.float() * _align(self.descale, self.values.ndim)
        return x if self.mean is None else x + self.mean


def quantize(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per: Per = "token_head",
    smooth: bool = False,
    cu_seqlens: Tensor | None = None,
) -> Quantized:
    """Quantise q, k or v for the attention functions.

    Args:
        x: (batch, seqlen, heads, d), (total, heads, d), or pages (num_pages, page_size, heads, d);
            bf16, fp16 or fp32, any strides, any device.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8. Errors of N(0, 1) rows, per
            token: e4m3 2.6 %, e5m2 5.1 %, int8 0.65 %. Beside an outlier channel 100 times as large
            e4m3 and e5m2 keep theirs, and int8 has 23 %: int8 suits smooth (or smoothed) rows.
        per: what shares a scale. "tensor": descale (); "head": (heads,); "batch_head": (batch,
            heads), needs cu_seqlens where x is packed; "token_head": (batch, seqlen, heads), or
            (1, total, heads) where x is packed.
        smooth: for k: subtract each channel's mean over the tokens of a sequence first. Softmax
            does not change (it does under a softcap: do not combine them), outlier channels no
            longer set the scale, and the LSE falls by softmax_scale * (q . mean), which the caller
            may add back.
        cu_seqlens: (batch + 1,) int32 sequence bounds of a packed x, for "batch_head" and smooth.

    Returns:
        Quantized(values, descale, mean).

    Raises:
        InvalidArguments: a dtype, rank, `per` or cu_seqlens that is none of the above.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> k = fa.quantize(torch.randn(2, 16, 4, 64), per="batch_head")
        >>> k.values.dtype, k.descale.shape
        (torch.float8_e4m3fn, torch.Size([2, 4]))
    """
    fmt = _checked(x, dtype, per, smooth, cu_seqlens)
    x = x.float()
    mean = None
    if smooth:
        mean = _token_mean(x, cu_seqlens)
        x = x - mean
    amax = _amax(x, per, cu_seqlens)
    # By a tensor: torch divides by a Python number with its reciprocal on CUDA, other bits.
    largest = torch.finfo(torch.float32).max / fmt.max * (1 - torch.finfo(torch.float32).eps)
    descale = (amax / torch.full_like(amax, fmt.max)).clamp(min=_MIN_DESCALE, max=largest)
    descale = torch.where(amax == 0, ZERO_DESCALE, descale)
    if per == "batch_head" and x.ndim == 3 and cu_seqlens is not None:
        spread = descale[_owner(x.shape[0], cu_seqlens)][..., None]
    else:
        spread = _align(descale, x.ndim)
    if fmt is INT8:
        # NaN / anything is NaN, whose int8 code is unspecified: make it 0 and mark the group.
        marked = _amax(torch.where(x.isnan(), 1.0, 0.0), per, cu_seqlens) > 0
        x = x.nan_to_num(nan=0.0, posinf=float("inf"), neginf=float("-inf"))
        descale = torch.where(marked, float("nan"), descale)
    return Quantized(saturating_cast(x / spread, fmt), descale, mean)


def _checked(
    x: Tensor, dtype: torch.dtype, per: str, smooth: bool, cu_seqlens: Tensor | None
) -> Format:
    faults = []
    fmt = format_of(dtype) if isinstance(dtype, torch.dtype) else None
    if fmt not in QUANTIZED:
        names = ", ".join(f"torch.{str(f.dtype).removeprefix('torch.')}" for f in QUANTIZED)
        faults.append(f"dtype={dtype} is none of {names}")
    if not isinstance(x, Tensor):
        raise InvalidArguments(f"x must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        faults.append(f"x is {dtype_name(x.dtype)}; it must be bf16, fp16 or fp32")
    if x.ndim not in (3, 4):
        faults.append(f"x has shape {list(x.shape)}; it must be ([batch,] seqlen, heads, d)")
    if per not in get_args(Per):
        faults.append(f"per={per!r} is not one of {', '.join(get_args(Per))}")
    needs_bounds = per == "batch_head" or smooth
    if x.ndim == 3 and needs_bounds and cu_seqlens is None:
        faults.append("a packed x needs cu_seqlens for per='batch_head' and for smooth")
    if cu_seqlens is not None and (x.ndim == 4 or not needs_bounds):
        faults.append("cu_seqlens is only read for a packed x with per='batch_head' or smooth")
    if cu_seqlens is not None and (cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1):
        faults.append(f"cu_seqlens must be a vector of int32, got {dtype_name(cu_seqlens.dtype)}")
    if faults or fmt is None:
        raise InvalidArguments("quantize: " + "; ".join(faults), tuple(faults))
    return fmt


def _amax(x: Tensor, per: str, cu_seqlens: Tensor | None) -> Tensor:
    """Largest finite magnitude of each group, in the descale's shape; 0 for empty groups."""
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    if per == "tensor":
        return size.amax() if size.numel() else size.new_zeros(())
    by_token = size.amax(-1) if size.shape[-1] else size.new_zeros(size.shape[:-1])
    if per == "token_head":
        return by_token if x.ndim == 4 else by_token[None]
    if per == "batch_head" and x.ndim == 3 and cu_seqlens is not None:
        groups = size.new_zeros(cu_seqlens.shape[0] - 1, size.shape[1])
        owner = _owner(x.shape[0], cu_seqlens)[:, None].expand_as(by_token)
        return groups.scatter_reduce(0, owner, by_token, "amax")
    dims = (0, 1) if per == "head" and x.ndim == 4 else ((1,) if x.ndim == 4 else (0,))
    if all(by_token.shape[d] for d in dims):
        return by_token.amax(dims)
    return by_token.sum(dims)  # no tokens: zeros of the right shape


def _token_mean(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Mean over the tokens of each sequence, broadcastable to x."""
    if x.ndim == 4:
        return x.mean(1, keepdim=True) if x.shape[1] else x.new_zeros(x.shape[0], 1, *x.shape[2:])
    owner = _owner(x.shape[0], cu_seqlens)  # type: ignore[arg-type]
    sums = x.new_zeros(cu_seqlens.shape[0] - 1, *x.shape[1:])  # type: ignore[union-attr]
    sums = sums.index_add(0, owner, x)
    lengths = cu_seqlens.diff().clamp(min=1)  # type: ignore[union-attr]
    return (sums / lengths[:, None, None])[owner]


def _owner(total: int, cu_seqlens: Tensor) -> Tensor:
    """Which sequence each packed row belongs to; rows past the last go with the last."""
    row = torch.arange(total, device=cu_seqlens.device)
    owner = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return owner.clamp(max=cu_seqlens.shape[0] - 2)


def _align(descale: Tensor, ndim: int) -> Tensor:
    """The descale with x's rank: (..., heads, 1) under its leading dimensions."""
    if descale.ndim == 0:
        return descale
    if descale.ndim == 3:
        return (descale if ndim == 4 else descale[0])[..., None]
    if descale.ndim == 2 and ndim == 4:
        return descale[:, None, :, None]
    return descale[..., None]
