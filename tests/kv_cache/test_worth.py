"""What quantising a cache costs and saves, against sums done by hand."""

from __future__ import annotations

import pytest
import torch

import flash_attn_fp8 as fa


def test_share_and_speed_up() -> None:
    """2 layers of 4 heads: 10 sequences of 100 tokens, 64 + 32 numbers a head."""
    found = fa.kv_cache_share(10, 100, 2, 4, 64, 10**6, head_dim_v=32)
    rows = 10 * 100 * 2 * 4
    assert found.bytes_before == rows * 96 * 2
    assert found.bytes_after == rows * (96 + 8)
    assert found.share_before == found.bytes_before / (found.bytes_before + 10**6)
    assert found.share_after == found.bytes_after / (found.bytes_after + 10**6)
    assert found.speed_up == (found.bytes_before + 10**6) / (found.bytes_after + 10**6)


def test_scales_of_other_kinds() -> None:
    codes = 8 * 128
    for per, scales in (("head", 2 * 4 * 4), ("tensor", 2 * 4), ("token_head", 8 * 4)):
        found = fa.kv_cache_share(1, 1, 1, 4, 128, 0, per=per, dtype=torch.int8)
        assert found.bytes_after == codes + scales
        assert found.share_before == 1.0
    whole = fa.kv_cache_share(1, 1, 3, 4, 128, 0, per="tensor", from_dtype=torch.float32)
    assert whole.bytes_before == 3 * codes * 4
    assert whole.bytes_after == 3 * (codes + 8)


def test_every_fault_of_the_share() -> None:
    with pytest.raises(fa.InvalidArguments) as caught:
        fa.kv_cache_share(0, 1, 1, True, 64, -1, per="row", dtype=torch.float16)
    assert caught.value.reasons == (
        "batch=0 must be an integer of at least 1",
        "kv_heads=True must be an integer of at least 1",
        "other_bytes=-1 must be an integer of at least 0",
        "dtype=fp16 must be e4m3, e5m2 or int8, as torch names them",
        "per='row' is not one of token_head, head, tensor",
    )


def test_errors_are_those_of_the_cache() -> None:
    """Of what an append writes, not of another quantiser."""
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 50, 2, 64, generator=g) for _ in range(2))
    cache = fa.QuantizedKVCache(1, 50, 2, 64)
    cache.append(k, v)
    found = fa.kv_error(k, v)
    for back, x, error in zip(cache.dequantize(), (k, v), (found.k, found.v), strict=True):
        assert error == float((back.double() - x).norm() / x.double().norm())
    assert (found.dtype, found.per) == ("e4m3", "token_head")
    assert fa.kv_error(k * 0, v).k == 0.0
    assert fa.kv_error(k, v, torch.int8).k < found.k < fa.kv_error(k, v, torch.float8_e5m2).k
