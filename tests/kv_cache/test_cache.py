"""The container: its tensors go into attention as they are, in every form that it has."""

from __future__ import annotations

import pytest
import torch

import flash_attn_fp8 as fa
from tests.kv_cache.caches import new_tokens

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
FORMS = {
    "contiguous": {},
    "paged": dict(page_size=3),
    "inline": dict(page_size=16, inline_scales=True),
    "contiguous, inline": dict(inline_scales=True),
    "per tensor": dict(k_scale=torch.tensor(0.03), v_scale=torch.tensor([0.02])),
    "per head": dict(k_scale=torch.tensor([0.03, 0.04]), v_scale=torch.tensor(0.02)),
}


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [(64, 64), (192, 128)], ids=str)
def test_attention_reads_what_was_appended(
    dtype: torch.dtype, form: str, dims: tuple[int, int]
) -> None:
    """As attention over the dequantised tokens does: the definition folds scales in exactly."""
    cache = fa.QuantizedKVCache(2, 20, 2, *dims, dtype=dtype, **FORMS[form])
    lengths = [17, 5]
    k, v = (x.clamp(-2, 2) for x in new_tokens(22, 2, dims=dims, source="fp32"))
    cache.append(k, v, cu_seqlens=torch.tensor([0, 17, 22], dtype=torch.int32))
    assert cache.seqlens.tolist() == lengths
    back_k, back_v = cache.dequantize()
    assert back_k.shape == (2, cache.capacity, 2, dims[0])
    q = torch.randn(2, 1, 4, dims[0], generator=torch.Generator().manual_seed(0)).bfloat16()
    how = dict(impl="reference", out_dtype=torch.float32, softmax_scale=0.1)
    out = fa.flash_attn_with_kvcache(q, **cache.attention_arguments(), **how)
    for sequence, length in enumerate(lengths):
        scores = torch.einsum(
            "hd,nhd->hn",
            q[sequence, 0].double(),
            back_k[sequence, :length].repeat_interleave(2, 1).double(),
        )
        weights = (scores * 0.1).softmax(-1)
        values = back_v[sequence, :length].repeat_interleave(2, 1).double()
        wanted = torch.einsum("hn,nhd->hd", weights, values)
        bound = 2.0**-18 * float(values.abs().max())  # fp32 sums of 17 addends
        assert float((out[sequence, 0] - wanted).abs().max()) <= bound


def test_inline_rows_are_whole_vectors() -> None:
    cache = fa.QuantizedKVCache(2, 8, 3, 96, 64, inline_scales=True)
    assert cache.k.stride() == (8 * 3 * 112, 3 * 112, 112, 1)
    assert cache.v.stride(2) == 80
    assert cache.k_descale.data_ptr() == cache.k.data_ptr() + 96
    assert cache.k.untyped_storage().data_ptr() == cache.k_descale.untyped_storage().data_ptr()


def test_pages_are_the_callers_where_they_are_numbered() -> None:
    cache = fa.QuantizedKVCache(2, 40, 1, 64, page_size=16, num_pages=5)
    assert cache.k.shape[0] == 5
    assert cache.page_table.tolist() == [[-1] * 3] * 2
    assert cache.capacity == 48
    given = fa.QuantizedKVCache(2, 40, 1, 64, page_size=16)
    assert given.page_table.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_one_token_a_sequence_and_none() -> None:
    cache = fa.QuantizedKVCache(3, 4, 1, 16)
    x = torch.randn(3, 1, 1, 16)
    for _ in range(4):
        cache.append(x, x)
    cache.append(x[:, :0], x[:, :0])
    assert cache.seqlens.tolist() == [4, 4, 4]
    assert torch.equal(cache.k_descale[:, 0], cache.k_descale[:, 3])


def test_it_says_what_it_is() -> None:
    assert repr(fa.QuantizedKVCache(2, 33, 4, 192, 128, dtype=torch.int8, page_size=16)) == (
        "QuantizedKVCache(int8, per token_head, batch 2 of 48 tokens in 6 pages of 16, "
        "4 heads of 192 and 128)"
    )


def test_keys_and_values_in_one_pool() -> None:
    """Interleaved page by page, as serving engines allocate them: it is no overlap."""
    pool = torch.zeros(5, 2, 16, 2, 80, dtype=torch.uint8)
    codes, scales = pool[..., :64].view(torch.int8), pool[..., 64:68].view(torch.float32)[..., 0]
    table = torch.tensor([[4, 1], [0, 3]], dtype=torch.int32)
    cache = fa.QuantizedKVCache.adopt(
        codes[:, 0], codes[:, 1], k_descale=scales[:, 0], v_descale=scales[:, 1], page_table=table
    )
    own = fa.QuantizedKVCache(2, 32, 2, 64, dtype=torch.int8)
    k, v = new_tokens(2, 20, 2, dims=(64, 64))
    for one in (cache, own):
        one.append(k, v)
    for mine, yours in zip(cache.dequantize(), own.dequantize(), strict=True):
        assert torch.equal(mine, yours)
    assert not pool[2].any()
    assert not pool[..., 68:].any()
