"""What a launch hands to the combine kernel."""

from typing import NamedTuple

import cutlass.cute as cute


class CombineTensors(NamedTuple):
    """Parts first; the rest as the forward's results. None: the spec has no use for it."""

    partial: cute.Tensor  # (parts, b, s, h, dv) or (parts, total, h, dv) fp32
    lse_partial: cute.Tensor  # (parts, b, h, s) or (parts, h, total) fp32
    out: cute.Tensor
    lse: cute.Tensor | None
    output_scale: cute.Tensor | None  # (1,)
