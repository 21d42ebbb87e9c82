"""Quantisation by the largest magnitude: codes in an 8-bit format and their fp32 descales.

    descale = amax(|x|) / format max over each group;   code = round(x / descale), saturating

so that x ~ code * descale. The division is fp32's (IEEE), the rounding to nearest even; the same
bits on any device. Groups are what `per` says, and the shape of the descale tells the attention
functions the granularity.

Corner cases. A group of zeros has descale 2**-60: any would do for its values, but where V's scales
are folded into the exponent (docs/numerics.md, 4) a large one would lead the row's maximum and
flush its neighbours. The descale is never below 2**-126, the smallest normal fp32 number, so
denormal rows stay finite, nor so large that the largest code times it overflows. Infinities do not
count in amax or in a channel's mean, and saturate to the format's largest value. A NaN does not
either, and stays NaN, alone, in e4m3 and e5m2; int8 has no NaN, so the descale of its group becomes
NaN and the whole group does.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from einops import rearrange
from torch import Tensor

from flash_attn_fp8.call import describe
from flash_attn_fp8.errors import InvalidArguments
from flash_attn_fp8.formats import (
    INT8,
    QUANTIZED,
    ZERO_DESCALE,
    Format,
    dtype_name,
    format_of,
    saturating_cast,
)
from flash_attn_fp8.packed import rows_in_use, sequence_of_rows, spread

Per = Literal["token_head", "batch_head", "head", "tensor"]
_FP32 = torch.finfo(torch.float32)


class Quantized(NamedTuple):
    """Codes and what turns them back: x = values * descale + mean, each spread over its tokens.

    values: x's shape, 8 bits. descale: fp32, shaped as `per` and `nheads_kv` say. mean: what
    smoothing took off each channel, fp32, (batch, 1, heads, d), or (batch, heads, d) of a packed x;
    else None. cu_seqlens: the bounds of a packed x whose descale or mean is one a sequence; else
    None.
    """

    values: Tensor
    descale: Tensor
    mean: Tensor | None = None
    cu_seqlens: Tensor | None = None

    def dequantize(self) -> Tensor:
        """The fp32 tensor that the codes stand for, in the shape of `values`."""
        x = self.values.float() * spread(self.descale, self.values, self.cu_seqlens)
        if self.mean is None:
            return x
        x = x + _over_rows(self.mean, x, self.cu_seqlens)
        return x if self.cu_seqlens is None else _without_strays(x, self.cu_seqlens)


def quantize(
    x: Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    per: Per = "token_head",
    nheads_kv: int | None = None,
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
            (1, total, heads) where x is packed. Of pages, "batch_head" is one a page: (num_pages,
            heads), which the attention functions have no use for.
        nheads_kv: for q: one scale for the query heads of each KV head, as the descales of FA3 and
            FA4 are. A divisor of heads, which it replaces in the shape of the descale; head h has
            scale h // (heads / nheads_kv). None: every head has its own.
        smooth: for k: subtract each channel's mean over the tokens of a sequence first (of its
            finite values; the same bits on any device). Softmax does not change (it does under a
            softcap: do not combine them), outlier channels no longer set the scale, and the LSE
            falls by softmax_scale * (q . mean), which the caller may add back. What the
            subtraction takes past fp32's largest value saturates there.
        cu_seqlens: (batch + 1,) int32 sequence bounds of a packed x, on its device, for
            "batch_head" and smooth. Rows outside every sequence are not read, and become 0.

    Returns:
        Quantized(values, descale, mean, cu_seqlens).

    Raises:
        InvalidArguments: a dtype, rank, `per`, nheads_kv or cu_seqlens that is none of the above.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> k = fa.quantize(torch.randn(2, 16, 4, 64), per="batch_head")
        >>> k.values.dtype, k.descale.shape
        (torch.float8_e4m3fn, torch.Size([2, 4]))
        >>> q = fa.quantize(torch.randn(2, 16, 32, 64), per="batch_head", nheads_kv=4)
        >>> q.descale.shape
        torch.Size([2, 4])
    """
    fmt = _checked(x, dtype, per, nheads_kv, smooth, cu_seqlens)
    x = x.float()
    mean = None
    if smooth:
        mean = _token_mean(x, cu_seqlens)
        centred = (x - _over_rows(mean, x, cu_seqlens)).clamp(-_FP32.max, _FP32.max)
        x = torch.where(x.isfinite(), centred, x)
    if cu_seqlens is not None:
        x = _without_strays(x, cu_seqlens)
    amax = _amax(x, per, nheads_kv, cu_seqlens)
    # By a tensor: torch divides by a Python number with its reciprocal on CUDA, other bits.
    least, largest = fmt.descale_limits
    descale = (amax / torch.full_like(amax, fmt.max)).clamp(min=least, max=largest)
    descale = torch.where(amax == 0, ZERO_DESCALE, descale)
    scaled = x / spread(descale, x, cu_seqlens)
    if fmt is INT8:
        # NaN / anything is NaN, whose int8 code is unspecified: make it 0 and mark the group.
        marks = torch.where(x.isnan(), 1.0, 0.0)
        marked = _amax(marks, per, nheads_kv, cu_seqlens) > 0
        scaled = torch.where(x.isnan(), 0.0, scaled)
        descale = torch.where(marked, float("nan"), descale)
    per_sequence = cu_seqlens if smooth or per == "batch_head" else None
    return Quantized(saturating_cast(scaled, fmt), descale, mean, per_sequence)


def _checked(
    x: Tensor,
    dtype: torch.dtype,
    per: str,
    nheads_kv: int | None,
    smooth: bool,
    cu_seqlens: Tensor | None,
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
    if nheads_kv is not None:
        faults += _nheads_kv_faults(nheads_kv, per, x)
    needs_bounds = per == "batch_head" or smooth
    if x.ndim == 3 and needs_bounds and cu_seqlens is None:
        faults.append("a packed x needs cu_seqlens for per='batch_head' and for smooth")
    if cu_seqlens is not None and (x.ndim == 4 or not needs_bounds):
        faults.append("cu_seqlens is only read for a packed x with per='batch_head' or smooth")
    if cu_seqlens is not None:
        faults += _cu_seqlens_faults(cu_seqlens, x)
    if faults or fmt is None:
        raise InvalidArguments("quantize: " + "; ".join(faults), tuple(faults))
    return fmt


def _nheads_kv_faults(nheads_kv: object, per: str, x: Tensor) -> list[str]:
    if isinstance(nheads_kv, bool) or not isinstance(nheads_kv, int):
        return [f"nheads_kv={nheads_kv!r} must be an int, the number of KV heads"]
    if per == "tensor":
        return [f"nheads_kv={nheads_kv} groups heads, and per='tensor' has one scale; leave it out"]
    if x.ndim in (3, 4) and (nheads_kv < 1 or x.shape[-2] % nheads_kv):
        return [
            f"nheads_kv={nheads_kv} does not divide the {x.shape[-2]} heads of x; give a divisor"
        ]
    return []


def _cu_seqlens_faults(cu_seqlens: object, x: Tensor) -> list[str]:
    if not isinstance(cu_seqlens, Tensor):
        return [f"cu_seqlens must be a vector of int32, got {describe(cu_seqlens)}"]
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.ndim != 1:
        return [f"cu_seqlens must be a vector of int32, got {describe(cu_seqlens)}"]
    if cu_seqlens.device != x.device:
        return [f"cu_seqlens is on {cu_seqlens.device} and x on {x.device}; move one"]
    if cu_seqlens.shape[0] == 0 or (cu_seqlens.shape[0] == 1 and x.shape[0] > 0):
        count = cu_seqlens.shape[0]
        return [f"cu_seqlens has {count} entries, which bound no sequence; give batch + 1"]
    return []


def _amax(x: Tensor, per: str, nheads_kv: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """Largest finite magnitude of each group, in the descale's shape; 0 for empty groups."""
    size = torch.where(x.isfinite(), x.abs(), 0.0)
    if per == "tensor":
        return size.amax() if size.numel() else size.new_zeros(())
    if nheads_kv is not None:
        size = rearrange(size, "... (hk g) d -> ... hk (g d)", hk=nheads_kv)
    by_token = size.amax(-1) if size.shape[-1] else size.new_zeros(size.shape[:-1])
    if per == "token_head":
        return by_token if x.ndim == 4 else by_token[None]
    if per == "head":
        by_token = by_token.flatten(0, -2)
        return by_token.amax(0) if by_token.shape[0] else by_token.sum(0)  # no tokens: zeros
    return _over_tokens(by_token, "amax", cu_seqlens)


def _token_mean(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Mean of each channel's finite values over the tokens of a sequence, as `Quantized.mean`.

    Summed in fp64, each value rounded to a multiple of 2**-52 of (at least) the largest times their
    number: such sums are exact, so that no device's order of additions shows.
    """
    counts = x.isfinite()
    if cu_seqlens is not None:
        counts = counts & rows_in_use(cu_seqlens, x.shape[0])[:, None, None]
    x = torch.where(counts, x, 0.0).double()
    largest = _over_tokens(x.abs(), "amax", cu_seqlens)
    count = _over_tokens(counts.double(), "sum", cu_seqlens).clamp(min=1)
    step = _power_of_two(largest) * _power_of_two(count) * 2.0**-52
    steps = (x / _over_rows(_with_tokens(step, x), x, cu_seqlens)).round()
    mean = _over_tokens(steps, "sum", cu_seqlens) * step / count
    return _with_tokens(mean.float(), x)


def _power_of_two(x: Tensor) -> Tensor:
    """The least power of two above x >= 0; 1 for 0."""
    return torch.where(x == 0, 1.0, x / torch.frexp(x).mantissa)


def _over_tokens(x: Tensor, how: Literal["sum", "amax"], cu_seqlens: Tensor | None) -> Tensor:
    """x (batch, seqlen, ...) or packed (total, ...), x >= 0 for "amax", to (batch, ...)."""
    if x.ndim == 4 or cu_seqlens is None:
        return x.amax(1) if how == "amax" and x.shape[1] else x.sum(1)
    sequence = sequence_of_rows(cu_seqlens, x.shape[0])
    sequence = sequence.reshape(-1, *([1] * (x.ndim - 1))).expand_as(x)
    return x.new_zeros(cu_seqlens.shape[0] - 1, *x.shape[1:]).scatter_reduce(0, sequence, x, how)


def _with_tokens(by_sequence: Tensor, x: Tensor) -> Tensor:
    """(batch, heads, d) broadcastable to a batched x; as it is where x is packed."""
    return by_sequence[:, None] if x.ndim == 4 else by_sequence


def _over_rows(by_sequence: Tensor, x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """What belongs to sequences, broadcastable to the rows of x."""
    if x.ndim == 4 or cu_seqlens is None:
        return by_sequence
    return by_sequence[sequence_of_rows(cu_seqlens, x.shape[0])]


def _without_strays(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Packed x with 0 in the rows that belong to no sequence."""
    return torch.where(rows_in_use(cu_seqlens, x.shape[0])[:, None, None], x, 0.0)
