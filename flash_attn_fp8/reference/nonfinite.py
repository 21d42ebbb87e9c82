"""Values of V that are NaN or infinite: they reach the rows that see their key, and no other.

In a product of whole tiles a hidden key has P = 0, and 0 times NaN or infinity is NaN. So the
product is taken of V with zeros in their place, and their terms are added to it: for the visible
keys alone, in IEEE arithmetic,

    V = NaN: NaN;   V = +-inf: +-inf where P > 0, NaN where P is 0;   +inf and -inf together: NaN.

A visible key whose P is zero (flushed, or underflowed) thus gives what the tensor core's 0 * inf
gives.
"""

from __future__ import annotations

import torch
from torch import Tensor


def without(v: Tensor) -> Tensor:
    """`v` with 0 where it is NaN or infinite."""
    return torch.where(v.isfinite(), v, 0.0)


def terms(p: Tensor, visible: Tensor, v: Tensor) -> Tensor | None:
    """What `without` leaves out of P·V, (n, hk, g, r, dv) in fp32: NaN, +-inf, or 0 for nothing.

    p (n, hk, g, r, s) are the weights, `visible` broadcasts against them, v (n, hk, s, dv). None
    where v is known to be finite; off the CPU that would have to be read back, and is not.
    """
    if v.device.type == "cpu" and bool(v.isfinite().all()):
        return None
    visible = visible.expand_as(p)
    some, none = visible & (p > 0), visible & (p == 0)
    up, down = _any(some, v.isposinf()), _any(some, v.isneginf())
    nan = _any(visible, v.isnan()) | _any(none, v.isinf()) | (up & down)
    zero = torch.zeros(nan.shape, device=v.device)
    infinite = zero.masked_fill(up, float("inf")).masked_fill(down, float("-inf"))
    return infinite.masked_fill(nan, float("nan"))


def _any(rows: Tensor, keys: Tensor) -> Tensor:
    """Whether a row (n, hk, g, r, s) has any of the keys (n, hk, s, dv): (n, hk, g, r, dv).

    Counted in bf16, in which a positive sum stays positive.
    """
    return torch.einsum("nhgrs,nhsd->nhgrd", rows.bfloat16(), keys.bfloat16()) > 0
