"""What a launch hands to the append kernel."""

from typing import NamedTuple

import cutlass.cute as cute


class AppendTensors(NamedTuple):
    """New keys and values, and the cache as pages; any strides, the last dimension contiguous."""

    k: cute.Tensor  # (b, s, h, d) fp32, bf16 or fp16
    v: cute.Tensor  # (b, s, h, dv)
    k_cache: cute.Tensor  # (pages, page_size, h, d), codes as bytes
    v_cache: cute.Tensor  # (pages, page_size, h, dv)
    slots: cute.Tensor  # (b * s,): page * page_size + offset; one that is nowhere is skipped
    k_scale: cute.Tensor  # written: (pages, page_size, h); or read: (h,), or (1,)
    v_scale: cute.Tensor
