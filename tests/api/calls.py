"""One small legal call of each kind, for tests that vary it, and equality of results to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8.formats import E4M3
from tests.data import normal, paged

Arguments = dict[str, Any]


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def dense() -> Arguments:
    x = normal(seqlen_q=6, seqlen_k=40, d=16, per=None)
    return {"q": x.q, "k": x.k, "v": x.v}


def packed() -> Arguments:
    """Sequences of 4 and 8 queries over 30 and 50 keys."""
    x = {name: t.flatten(0, 1) for name, t in dense().items()}
    return {**x, "cu_seqlens_q": ints(0, 4, 12), "cu_seqlens_k": ints(0, 30, 80)}


def paged_pool() -> Arguments:
    """Batched queries over pages of 8, with 40 and 17 keys in use."""
    x = dense()
    k, table = paged(x["k"], 8)
    v, _ = paged(x["v"], 8)
    return {"q": x["q"], "k": k, "v": v, "page_table": table, "seqused_k": ints(40, 17)}


def cache() -> Arguments:
    x = dense()
    return {"q": x["q"], "k_cache": x["k"], "v_cache": x["v"], "cache_seqlens": ints(40, 17)}


def partials() -> Arguments:
    """Three splits of 2 sequences of 5 rows; heads come last in the lse."""
    g = torch.Generator().manual_seed(0)
    return {
        "out_partial": torch.randn(3, 2, 5, 4, 16, generator=g),
        "lse_partial": torch.randn(3, 2, 5, 4, generator=g),
    }


def packed_partials() -> Arguments:
    x = partials()
    return {name: t.flatten(1, 2) for name, t in x.items()} | {"cu_seqlens": ints(0, 4, 10)}


def unquantized() -> Arguments:
    return {name: x.float() for name, x in dense().items()}


def packed_unquantized() -> Arguments:
    return {name: x.float() if name in "qkv" else x for name, x in packed().items()}


def raw() -> Arguments:
    """What `quantize` takes: values whose groups differ in size."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 3, 8, generator=g) * torch.arange(1, 7)[None, :, None, None]
    return {"x": x + 0.5}


def keys_and_values() -> Arguments:
    return {"k": raw()["x"], "v": raw()["x"] + 1}


def model() -> Arguments:
    """A model and a step of `kv_cache_share`."""
    sizes = {"batch": 2, "tokens": 100, "layers": 3, "kv_heads": 2}
    return sizes | {"head_dim": 64, "other_bytes": 10**6}


def packed_raw() -> Arguments:
    return {"x": raw()["x"].flatten(0, 1), "per": "batch_head", "cu_seqlens": ints(0, 4, 12)}


_ALL = (
    dense, packed, paged_pool, cache, partials, packed_partials, unquantized, packed_unquantized,
    raw, packed_raw, keys_and_values, model,
)  # fmt: skip
BASES: dict[str, Callable[[], Arguments]] = {f.__name__: f for f in _ALL}


def same_bits(a: object, b: object) -> bool:
    """Equality of dtypes, shapes and bits of tensors, also in pairs; NaN equals itself."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        return torch.equal(_bits(a), _bits(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def _bits(x: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(sizes[x.element_size()])


def codes(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g).to(E4M3.dtype)
