"""R0 of CASES.md: attention by its definition, in fp64 on dense tensors, sharing no code with us.

The package's `reference` executor gathers, groups and pads; this does none of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    lengths: list[int] | None = None,
    scales: dict[str, Tensor] | None = None,
    sink: Tensor | None = None,
    **score: object,
) -> tuple[Tensor, Tensor]:
    """(out, lse), (batch, seqlen_q, nheads, dv) and (batch, nheads, seqlen_q), in fp64.

    `lengths` are the keys in use of each sequence; `score` has causal, window_size, softcap and
    softmax_scale as the public functions take them.
    """
    scales, group = scales or {}, q.shape[2] // k.shape[2]
    q = q.double() * _spread(scales.get("q_descale"), q.shape[2])
    k = k.double() * _spread(scales.get("k_descale"), k.shape[2])
    v = v.double() * _spread(scales.get("v_descale"), v.shape[2])
    q = q.unflatten(2, (k.shape[2], group))
    s = torch.einsum("bihgd,bjhd->bhgij", q, k) * (
        score.get("softmax_scale") or q.shape[-1] ** -0.5
    )
    cap = score.get("softcap")
    s = cap * torch.tanh(s / cap) if cap else s
    left, right = score.get("window_size", (None, None))
    right = 0 if score.get("causal") else right
    seen = torch.stack(
        [
            visible(
                q.shape[1], k.shape[1], k.shape[1] if lengths is None else lengths[b], left, right
            )
            for b in range(q.shape[0])
        ]
    )
    s = s.masked_fill(~seen[:, None, None], -math.inf)
    lse = torch.logsumexp(s, -1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.double().reshape(-1, group, 1))
    p = torch.exp(s - lse.nan_to_num(neginf=0.0)[..., None])
    return _over_visible(p, v, seen).flatten(2, 3), lse.flatten(1, 2)


def _over_visible(p: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """sum_j P_ij V_j over the keys j that row i sees, (b, i, h, g, d).

    0 times NaN or infinity is not 0: keys that have any are multiplied one by one and masked.
    """
    odd = ~v.isfinite().all(-1).all(-1).all(0)
    out = torch.einsum("bhgij,bjhd->bihgd", p, v.masked_fill(odd[:, None, None], 0.0))
    for j in odd.nonzero().flatten().tolist():
        term = torch.einsum("bhgi,bhd->bihgd", p[..., j], v[:, j])
        out = out + torch.where(seen[:, :, j, None, None, None], term, 0.0)
    return out


def visible(
    seqlen_q: int, slots: int, length: int, left: int | None = None, right: int | None = None
) -> Tensor:
    """(seqlen_q, slots) bool: row i sits at p = i + length - seqlen_q and sees [p - l, p + r]."""
    p = torch.arange(seqlen_q)[:, None] + length - seqlen_q
    j = torch.arange(slots)
    seen = (j < length).expand(seqlen_q, -1)
    seen = seen if left is None else seen & (j >= p - left)
    return seen if right is None else seen & (j <= p + right)


def mean_of_visible(seen: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The uniform probe's result for V (slots, dv): the mean of the visible rows, and ln(count)."""
    count = seen.sum(-1)
    out = torch.where(seen[..., None], v.double(), 0.0).sum(-2) / count.clamp(min=1)[..., None]
    return out, torch.log(count.double())


def _spread(scale: Tensor | None, heads: int) -> Tensor | float:
    """A descale of any granularity with the rank of (batch, seqlen, heads, d)."""
    if scale is None:
        return 1.0
    scale = scale.double()
    if scale.ndim and scale.shape[-1] not in (1, heads):  # q's scale per KV head
        scale = scale.repeat_interleave(heads // scale.shape[-1], -1)
    if scale.ndim == 2:
        scale = scale[:, None]
    return scale[..., None] if scale.ndim else scale
