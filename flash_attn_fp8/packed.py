"""Rows of packed sequences, and the scales that cover them.

Packed operands hold the rows of all sequences one after another; sequence b has rows
cu_seqlens[b] to cu_seqlens[b + 1]. What lies outside of them is nobody's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flash_attn_fp8.errors import InvalidArguments


def sequence_of_rows(cu_seqlens: Tensor, total: int) -> Tensor:
    """Which sequence each of `total` packed rows belongs to, (total,) int64.

    Nobody's rows go with a sequence beside them; `rows_in_use` tells them apart.
    """
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence.clamp(max=cu_seqlens.shape[0] - 2)


def rows_in_use(cu_seqlens: Tensor, total: int) -> Tensor:
    """Which of `total` packed rows belong to any sequence, (total,) bool."""
    row = torch.arange(total, device=cu_seqlens.device)
    return (row >= cu_seqlens[0]) & (row < cu_seqlens[-1])


def spread(scale: Tensor, values: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """A descale of any granularity, broadcastable to the values that it belongs to.

    values: (batch, seqlen, heads, d), pages (num_pages, page_size, heads, d) or packed (total,
    heads, d). scale: (), (h,), (batch, h), (batch, seqlen, h), or (1, total, h) where packed; h is
    heads, or a divisor of it: each scale then serves a group of neighbouring heads. cu_seqlens:
    (batch + 1,) int32, read for a (batch, h) scale of packed values.

    Raises:
        InvalidArguments: a (batch, h) scale of packed values without cu_seqlens.
    """
    if scale.ndim == 0:
        return scale
    if values.ndim == 4 and scale.ndim == 2:
        scale = scale[:, None]
    elif values.ndim == 3 and scale.ndim == 3:
        scale = scale[0]
    elif values.ndim == 3 and scale.ndim == 2:
        if cu_seqlens is None:
            raise InvalidArguments(
                f"descale {list(scale.shape)} is per sequence and head, and the values "
                f"{list(values.shape)} are packed: give the cu_seqlens that say whose row is whose"
            )
        scale = scale[sequence_of_rows(cu_seqlens, values.shape[0])]
    if scale.shape[-1] != values.shape[-2]:
        scale = scale.repeat_interleave(values.shape[-2] // scale.shape[-1], -1)
    return scale[..., None]
