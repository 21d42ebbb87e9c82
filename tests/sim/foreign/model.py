"""Attention as flash-attn-4 rounds it, written from its source and from no simulator.

Keys are taken a tile at a time, the last tile first; P of a tile is relative to the row's maximum
so far, for f16 and bf16 to one that may be up to 2^8 too low (`rescale_threshold` in
`flash_fwd_sm100.py`). P is rounded to the inputs' type, for fp8 after a scaling by 2^8
(`max_offset`); the row's sum is of P as it was before. All the rest is float64.

Some of flash-attn-4's exponentials are a cubic polynomial (`POLY_EX2` in its `utils.py`), which is
off by up to 8.8e-5. P that lies so near to the middle between two numbers may be rounded to either,
a change far above that error; how far O may move by it is computed beside O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

_MAX_OFFSET = 8  # of fp8
_RESCALE_THRESHOLD = 8  # of f16 and bf16
_EXP2_ERROR = 1e-4  # relative: the polynomial's, and some for float32
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees. Query i stands at position i + seqlen_k - seqlen_q of the keys."""

    causal: bool = False
    left: int | None = None
    right: int | None = None

    def of(self, seqlen_q: int, seqlen_k: int) -> torch.Tensor:
        """bool[seqlen_q, seqlen_k]."""
        query = torch.arange(seqlen_q)[:, None] + seqlen_k - seqlen_q
        key = torch.arange(seqlen_k)[None]
        right = 0 if self.causal else self.right
        seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
        if right is not None:
            seen &= key <= query + right
        if self.left is not None:
            seen &= key >= query - self.left
        return seen


def head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    descales: tuple[float, float, float] = (1.0, 1.0, 1.0),
    tile: int = 128,
    splits: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One head's O (seqlen_q, head_dim_v), LSE (seqlen_q), and by how much O may be off.

    The keys are worked through in `splits` parts.
    """
    dtype = q.dtype
    q, k, v = (t.double() for t in (q, k, v))
    scale = descales[0] * descales[1] / math.sqrt(q.shape[1]) * math.log2(math.e)
    scores = torch.where(seen, q @ k.T * scale, -math.inf)
    tiles = -(-k.shape[0] // tile)
    part = -(-tiles // splits)
    parts = [
        _part(scores, v, dtype, tile, range(first, min(first + part, tiles)))
        for first in range(0, tiles, part)
    ]
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), 0)
    shares = [torch.nan_to_num(torch.exp(part[1] - lse))[:, None] * descales[2] for part in parts]
    o, slack = (
        torch.stack([share * part[i] for share, part in zip(shares, parts, strict=True)]).sum(0)
        for i in (0, 2)
    )
    return o, lse, slack


def _part(
    scores: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, tile: int, tiles: range
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    fp8 = dtype in _FP8
    offset, threshold = (_MAX_OFFSET, 0) if fp8 else (0, _RESCALE_THRESHOLD)
    rows = scores.shape[0]
    m = torch.full((rows,), -math.inf, dtype=torch.float64)
    total = torch.zeros(rows, dtype=torch.float64)
    o = torch.zeros(rows, v.shape[1], dtype=torch.float64)
    slack = o.clone()
    for t in reversed(tiles):
        s = scores[:, t * tile : (t + 1) * tile]
        new = torch.maximum(m, s.amax(1))
        new = torch.where((new - m <= threshold) & (m > -math.inf), m, new) if threshold else new
        safe = torch.where(new == -math.inf, 0.0, new)
        p = torch.exp2(s - safe[:, None] + offset)
        alpha = torch.exp2(m - safe)
        total = total * alpha + p.sum(1)
        values = v[t * tile : (t + 1) * tile]
        o = o * alpha[:, None] + _rounded(p, dtype) @ values
        either = _rounded(p * (1 + _EXP2_ERROR), dtype) - _rounded(p * (1 - _EXP2_ERROR), dtype)
        slack = slack * alpha[:, None] + either @ values.abs()
        m = new
    lse = (m + torch.log2(total) - offset) * math.log(2)
    empty = total == 0
    total = torch.where(empty, 1.0, total)[:, None]
    return o / total, torch.where(empty, -math.inf, lse), slack / total


def _rounded(p: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return p.float().to(dtype).double()
