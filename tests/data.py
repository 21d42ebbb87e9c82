"""Inputs that the tests share: quantised random tensors, and probes whose results are exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = {f.name: f.dtype for f in FORMATS.values()}


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the keyword arguments that carry their scales."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: dict[str, Tensor] = field(default_factory=dict)


def normal(
    *,
    batch: int = 2,
    seqlen_q: int = 64,
    seqlen_k: int = 128,
    nheads: int = 4,
    nheads_kv: int = 2,
    d: int = 64,
    dv: int | None = None,
    fmt: str = "e4m3",
    kv_fmt: str | None = None,
    per: str | None = "batch_head",
    seed: int = 0,
    gain: float = 1.0,
    device: str = "cpu",
) -> Inputs:
    """q ~ gain N(0, 1), k, v ~ N(0, 1), quantised per `per` where 8 bits (None: cast, no scale)."""
    g = torch.Generator().manual_seed(seed)
    dv = d if dv is None else dv
    raw = {
        "q": torch.randn(batch, seqlen_q, nheads, d, generator=g) * gain,
        "k": torch.randn(batch, seqlen_k, nheads_kv, d, generator=g),
        "v": torch.randn(batch, seqlen_k, nheads_kv, dv, generator=g),
    }
    values, scales = {}, {}
    for name, x in raw.items():
        kind = FORMATS[fmt if name == "q" or kv_fmt is None else kv_fmt]
        if not kind.is_8bit or per is None:
            values[name] = x.to(kind.dtype).to(device)
            continue
        codes = fa.quantize(x, dtype=kind.dtype, per=per)
        values[name] = codes.values.to(device)
        scales[f"{name}_descale"] = codes.descale.to(device)
    return Inputs(values["q"], values["k"], values["v"], scales)


def one_hot_v(seqlen_k: int, nheads_kv: int, dv: int, dtype: torch.dtype, batch: int = 1) -> Tensor:
    """V[j, d] = 1 where j = d (mod dv), else 0: with q = 0 the output names the keys it saw."""
    v = torch.eye(dv)[torch.arange(seqlen_k) % dv]
    return v[None, :, None].expand(batch, -1, nheads_kv, -1).contiguous().to(dtype)


def visible_keys(
    seqlen_q: int, seqlen_k: int, causal: bool, window: tuple[int | None, int | None] = (None, None)
) -> Tensor:
    """(seqlen_q, seqlen_k) bool, spelled out key by key: the definition, slowly."""
    left, right = window
    seen = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i in range(seqlen_q):
        p = i + seqlen_k - seqlen_q
        for j in range(seqlen_k):
            if causal and j > p:
                continue
            if left is not None and j < p - left:
                continue
            if right is not None and j > p + right:
                continue
            seen[i, j] = True
    return seen


def paged(x: Tensor, page_size: int, seed: int = 0, spare: int = 3) -> tuple[Tensor, Tensor]:
    """A batched cache (batch, seqlen, ...) scattered over pages, and its page table.

    `spare` pages more than needed lie between; their bytes are 0x7F (NaN in e4m3 and e5m2).
    """
    batch, seqlen = x.shape[:2]
    per_seq = -(-seqlen // page_size)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(batch * per_seq + spare, generator=g)[: batch * per_seq]
    table = order.reshape(batch, per_seq).to(torch.int32)
    pool = torch.full(
        (batch * per_seq + spare, page_size, *x.shape[2:], x.element_size()),
        0x7F,
        dtype=torch.uint8,
    ).view(x.dtype)[..., 0]
    padded = x.new_zeros(batch, per_seq * page_size, *x.shape[2:])
    padded.view(torch.uint8)[:, :seqlen] = x.contiguous().view(torch.uint8)
    pages = padded.reshape(batch * per_seq, page_size, *x.shape[2:])
    pool.view(torch.uint8)[order] = pages.view(torch.uint8)
    return pool, table.to(x.device)
