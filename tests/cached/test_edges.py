"""The cache kernel at the edges: no queries, lengths that lie, scales that are NaN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8 import ops
from tests.quantize.test_groups import ints

pytestmark = pytest.mark.usefixtures("on_either")


def cache(slots: int = 64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    k, v = (fa.quantize(torch.randn(2, slots, 2, 64, generator=generator)) for _ in "kv")
    scales = {"k_descale": k.descale, "v_descale": v.descale}
    return {"k_cache": k.values, "v_cache": v.values, **scales, "impl": "sim"}


@pytest.mark.parametrize("batch", [0, 2])
def test_no_queries(batch: int) -> None:
    """Nothing is launched, and shapes are right."""
    given = {n: x[:batch] if isinstance(x, torch.Tensor) and x.ndim > 2 else x
             for n, x in cache().items()}  # fmt: skip
    q = torch.empty(batch, 0 if batch else 3, 4, 64, dtype=torch.bfloat16)
    out, lse = fa.flash_attn_with_kvcache(q, **given, return_softmax_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (batch, 4, q.shape[1])


def test_packed_rows_of_no_sequence() -> None:
    """With sequences that have no rows all of the output is 0, its LSE -inf."""
    q = torch.randn(5, 4, 64).bfloat16()
    out, lse = fa.flash_attn_with_kvcache(
        q, **cache(), cu_seqlens_q=ints(0, 0, 0), max_seqlen_q=0, return_softmax_lse=True
    )
    assert not out.any()
    assert (lse == -math.inf).all()


def test_more_chosen_keys_than_there_are_entries() -> None:
    """Refused where values are looked at; elsewhere the kernel reads what there is."""
    q = torch.randn(2, 1, 4, 64).bfloat16()
    selection = torch.arange(4, dtype=torch.int32).expand(2, 2, 4).contiguous()
    given = cache() | {"selection": selection}
    wrong = given | {"selection_lens": torch.full((2, 2), 9, dtype=torch.int32)}
    with pytest.raises(fa.InvalidArguments, match="selection_lens must be from 0 to the 4"):
        fa.flash_attn_with_kvcache(q, **wrong)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "check_values", lambda *_: None)
        found = fa.flash_attn_with_kvcache(q, **wrong)
    assert torch.equal(found, fa.flash_attn_with_kvcache(q, **given))


def test_a_scale_that_is_nan_stays_with_the_rows_that_see_its_key() -> None:
    """As int8 codes of a row with NaN have it; CUDA does not look at scales."""
    q = torch.randn(2, 2, 4, 64).bfloat16()
    given = cache()
    given["v_descale"] = given["v_descale"].clone()
    clean = fa.flash_attn_with_kvcache(q, **given, causal=True)
    given["v_descale"][:, -1] = math.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "check_values", lambda *_: None)
        out = fa.flash_attn_with_kvcache(q, **given, causal=True)
    assert torch.equal(out[:, 0], clean[:, 0])
    assert out[:, 1].isnan().all()
