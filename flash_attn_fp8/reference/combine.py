"""Merging the partial results of splits: out = sum(w out_i), w = exp(lse_i - lse).

lse = log(sum exp lse_i). A split without keys has lse_i = -inf and weight 0; where every split is
empty the row is 0 with lse -inf.
"""

from __future__ import annotations

import torch
from torch import Tensor


def combine(out_partial: Tensor, lse_partial: Tensor) -> tuple[Tensor, Tensor]:
    """Merge out_partial (splits, ..., dv) and lse_partial (splits, ...), natural log, in fp32."""
    top = lse_partial.amax(0)
    finite = torch.where(top.isneginf(), 0.0, top)
    # An infinite sink makes both infinite, and their difference NaN.
    weight = torch.exp(torch.where(lse_partial == finite, 0.0, lse_partial - finite))
    total = weight.sum(0)
    weight = weight / torch.where(total == 0, 1.0, total)
    # An empty split's output is whatever its buffer held: a weight of 0 must hide NaN too.
    used = torch.where(weight[..., None] == 0, 0.0, out_partial.float() * weight[..., None])
    return used.sum(0), finite + torch.log(total)
