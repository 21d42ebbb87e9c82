"""Whether a quantised cache is worth it: what it costs in accuracy, and what it saves in bytes.

A decode step reads the weights and the whole cache once and computes little, so that its time goes
as the bytes it reads: the predicted speed-up is the ratio of those. It is an upper bound, reached
where both caches are read at the memory's speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_fp8.call import literal
from flash_attn_fp8.errors import InvalidArguments
from flash_attn_fp8.formats import QUANTIZED, dtype_name, format_of
from flash_attn_fp8.quantization import Per, quantize

_SCALE = 4  # bytes
_PER = ("token_head", "head", "tensor")


@dataclass(frozen=True)
class KVError:
    """Relative l2 errors of quantised keys and values: |x - x'| / |x| over the whole tensor."""

    k: float
    v: float
    dtype: str
    per: str


def kv_error(
    k: Tensor, v: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, per: Per = "token_head"
) -> KVError:
    """What quantising a layer's keys and values loses.

    N(0, 1) rows have 0.026 in e4m3, 0.051 in e5m2 and 0.0065 in int8; next to a channel 100 times
    as large, e4m3 and e5m2 keep theirs in the other channels and int8 has 0.23, which this error
    over all channels hides: compare them without that channel.

    Args:
        k, v: (batch, seqlen, nheads_kv, head_dim[_v]) or (total, nheads_kv, head_dim[_v]); bf16,
            fp16 or fp32, as a layer appends them.
        dtype: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8.
        per: "token_head", "head" or "tensor": what shares a scale.

    Raises:
        InvalidArguments: as `quantize`.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> k = torch.randn(1, 512, 4, 128, generator=torch.Generator().manual_seed(0))
        >>> round(fa.kv_error(k, k).k, 3)
        0.026
    """
    return KVError(_error(k, dtype, per), _error(v, dtype, per), dtype_name(dtype), per)


def _error(x: Tensor, dtype: torch.dtype, per: Per) -> float:
    back, exact = quantize(x, dtype=dtype, per=per).dequantize().double(), x.double()
    size = float(exact.norm())
    return float((back - exact).norm()) / size if size > 0 else 0.0


@dataclass(frozen=True)
class KVCacheShare:
    """What a decode step reads before and after the cache is quantised, in bytes.

    `bytes_before` and `bytes_after` are the cache's, scales included; the shares are those of all
    bytes that a step reads.
    """

    bytes_before: int
    bytes_after: int
    other_bytes: int

    @property
    def share_before(self) -> float:
        return self.bytes_before / (self.bytes_before + self.other_bytes)

    @property
    def share_after(self) -> float:
        return self.bytes_after / (self.bytes_after + self.other_bytes)

    @property
    def speed_up(self) -> float:
        """Bytes of a step before over those after: the predicted speed-up."""
        return (self.bytes_before + self.other_bytes) / (self.bytes_after + self.other_bytes)


def kv_cache_share(
    batch: int,
    tokens: int,
    layers: int,
    kv_heads: int,
    head_dim: int,
    other_bytes: int,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    from_dtype: torch.dtype = torch.bfloat16,
    per: str = "token_head",
) -> KVCacheShare:
    """How much of a decode step is the cache, and what quantising it can gain.

    Args:
        batch: sequences of the step.
        tokens: keys in use of each, on average.
        layers: attention layers of the model.
        kv_heads, head_dim, head_dim_v: of a layer, on this device.
        other_bytes: what else a step reads on this device: the weights, above all.
        dtype: of the quantised cache: torch.float8_e4m3fn, torch.float8_e5m2 or torch.int8.
        from_dtype: of the cache as it is.
        per: "token_head", "head" or "tensor": what shares a scale of the quantised cache.

    Raises:
        InvalidArguments: with every fault.

    Example: 64 sequences of 8,192 tokens over a model of 16 GB with 32 layers of 8 KV heads.

        >>> import flash_attn_fp8 as fa
        >>> share = fa.kv_cache_share(64, 8192, 32, 8, 128, 16 * 10**9)
        >>> round(share.share_before, 2), round(share.speed_up, 2)
        (0.81, 1.65)
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    counts = dict(
        batch=batch, tokens=tokens, layers=layers, kv_heads=kv_heads, head_dim=head_dim,
        head_dim_v=head_dim_v, other_bytes=other_bytes,
    )  # fmt: skip
    faults = [
        f"{name}={n!r} must be an integer of at least {least}"
        for name, n in counts.items()
        for least in (0 if name == "other_bytes" else 1,)
        if isinstance(n, bool) or not isinstance(n, int) or n < least
    ]
    if not isinstance(dtype, torch.dtype) or format_of(dtype) not in QUANTIZED:
        faults.append(f"dtype={literal(dtype)} must be e4m3, e5m2 or int8, as torch names them")
    if not isinstance(from_dtype, torch.dtype):
        faults.append(f"from_dtype={literal(from_dtype)} must be a torch.dtype")
    if per not in _PER:
        faults.append(f"per={per!r} is not one of {', '.join(_PER)}")
    if faults:
        raise InvalidArguments("kv_cache_share: " + "; ".join(faults), tuple(faults))
    rows = batch * tokens * layers * kv_heads
    elements = rows * (head_dim + head_dim_v)
    scales = 2 * {"token_head": rows, "head": layers * kv_heads, "tensor": layers}[per]
    after = elements * dtype.itemsize + scales * _SCALE
    return KVCacheShare(elements * from_dtype.itemsize, after, other_bytes)
