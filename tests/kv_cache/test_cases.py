"""Faults of caches that were reported in public (the numbers of /tests/cases), as appends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS, INT8
from tests.kv_cache.caches import (
    PATTERN,
    Layout,
    assert_same_memory,
    cache_of,
    memory_of,
    model_of,
    new_tokens,
)

DTYPES = {name: FORMATS[name].dtype for name in ("e4m3", "e5m2", "int8")}
IMPLS = ("reference", "sim")
executors = pytest.mark.parametrize("impl", IMPLS)


def simulated(impl: str) -> str:
    if impl == "sim":
        pytest.importorskip("cutlass")
    return impl


def appended(x: Tensor, dtype: torch.dtype, impl: str) -> tuple[Tensor, Tensor]:
    """What a cache gives back for (tokens, d) rows, and their scales."""
    cache = fa.QuantizedKVCache(1, len(x), 1, x.shape[-1], dtype=dtype)
    cache.append(x[None, :, None], x[None, :, None], impl=simulated(impl))
    return cache.dequantize()[0][0, :, 0], cache.k_descale[0, :, 0]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@executors
def test_case_13_int8_rounds_to_nearest(impl: str) -> None:
    """A writer that cut toward zero lost 5 % of a task's score."""
    ramp = torch.zeros(1, 128)
    ramp[0, :6] = torch.tensor([127, 0.6, 1.6, -0.6, -1.6, 126.7])
    back, scale = appended(ramp, torch.int8, impl)
    assert scale.tolist() == [1.0]
    assert back[0, :6].tolist() == [127, 1, 2, -1, -2, 127]
    x = torch.randn(512, 128, generator=torch.Generator().manual_seed(0))
    back, scale = appended(x, torch.int8, impl)
    assert bool(((back - x).abs() <= scale[:, None] * (0.5 + 1e-6 * INT8.max)).all())
    slope = float((back.double() * x).sum() / (x.double() * x).sum())
    assert abs(slope - 1) < 0.002
    assert relative(back, x) < 0.0068  # 0.0129 where it is cut


@executors
@pytest.mark.parametrize("fmt", DTYPES)
def test_case_14_nothing_finite_becomes_nan(fmt: str, impl: str) -> None:
    """Casts past the largest code saturate, and zeros have a finite scale."""
    form = FORMATS[fmt]
    x = torch.zeros(4, 64)
    x[1, 3], x[2, 0], x[2, 1], x[3] = 1e4, 65504.0, 1e-7, 1e-39
    back, scale = appended(x, form.dtype, impl)
    assert bool(back.isfinite().all() & scale.isfinite().all() & (scale > 0).all())
    assert back[0].tolist() == [0.0] * 64
    one = torch.ones(())
    cache = fa.QuantizedKVCache(1, 4, 1, 64, dtype=form.dtype, k_scale=one, v_scale=one)
    cache.append(x[None, :, None] * 100, -x[None, :, None] * 100, impl=simulated(impl))
    assert float(cache.k[0, 1, 0, 3].float()) == form.max
    assert float(cache.v[0, 1, 0, 3].float()) == -form.max
    top = {"e4m3": 0x7E, "e5m2": 0x7B, "int8": 0x7F}[fmt]
    assert int(cache.k.view(torch.uint8)[0, 1, 0, 3]) == top


# Published (int8) and emulated (e4m3) errors of the other channels, without and with an outlier.
OUTLIER = {"int8": (0.0065, 0.227), "e4m3": (0.026, 0.026)}


@pytest.mark.parametrize("fmt", OUTLIER)
def test_case_18_an_outlier_channel(fmt: str) -> None:
    x = torch.randn(1024, 128, generator=torch.Generator().manual_seed(0))
    spiked = x.clone()
    spiked[:, 3] *= 100
    others = torch.arange(128) != 3
    for rows, wanted in zip((x, spiked), OUTLIER[fmt], strict=True):
        back, _ = appended(rows, DTYPES[fmt], "reference")
        assert abs(relative(back[:, others], rows[:, others]) / wanted - 1) < 0.1


@executors
def test_case_26_padded_pages(impl: str) -> None:
    """Pages padded in the pool: scales were read, and written, in the wrong place."""
    layout = dict(fmt="int8", heads=4, dims=(64, 64), pages=6, page_size=16, batch=1)
    table = torch.tensor([[3, 0, 5, 1, 4, 2]], dtype=torch.int32)
    k, v = new_tokens(1, 90, 4, dims=(64, 64))
    padded, packed = (cache_of(Layout(kind, **layout), table) for kind in ("padded", "paged"))
    for cache in (padded, packed):
        cache.append(k, v, impl=simulated(impl))
    for mine, yours in zip(padded.dequantize(), packed.dequantize(), strict=True):
        assert torch.equal(mine, yours)
    assert torch.equal(padded.k_descale, packed.k_descale)
    between = torch.as_strided(padded.k.view(torch.uint8), (6, 48), (16 * 256 + 48, 1), 16 * 256)
    assert bool((between == PATTERN).all())
    q = torch.zeros(1, 1, 4, 64, dtype=torch.bfloat16)
    out = fa.flash_attn_with_kvcache(q, **padded.attention_arguments(), out_dtype=torch.float32)
    again = fa.flash_attn_with_kvcache(q, **packed.attention_arguments(), out_dtype=torch.float32)
    assert torch.equal(out, again)


@executors
@pytest.mark.parametrize("kind", ["paged", "inline", "padded", "contiguous"])
def test_case_28_only_its_own_slots(kind: str, impl: str) -> None:
    """Appending touched scales of other slots, and did not skip -1."""
    layout = Layout(kind, pages=4, page_size=16)
    cache = cache_of(layout)
    model = model_of(cache)
    k, v = new_tokens(4, 2, dims=(64, 64), seed=1)
    slots = [-1, 5, -1, 17]
    cache.append(k, v, slot_mapping=torch.tensor(slots), impl=simulated(impl))
    model.append(cache, k, v, slots)
    model.assert_is(cache)
    assert model.written == {5, 17}
    before = memory_of(cache)
    with pytest.raises(fa.InvalidArguments, match=r"slot_mapping\[1\]=64 is past the 64 slots"):
        cache.append(k, v, slot_mapping=torch.tensor([0, 64, -1, 3]), impl=impl)
    assert_same_memory(before, memory_of(cache))


@executors
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_case_29_no_pad_enters_the_range(fmt: str, impl: str) -> None:
    """Head dim 96 was padded to 128 with zeros, which an asymmetric range took in."""
    x = torch.rand(40, 96, generator=torch.Generator().manual_seed(0)) + 3
    back, scale = appended(x, DTYPES[fmt], impl)
    assert torch.equal(scale, x.amax(-1) / FORMATS[fmt].max)
    if fmt == "int8":
        assert bool(((back - x).abs() <= scale[:, None] * (0.5 + 1e-6 * INT8.max)).all())


GARBAGE = {"e4m3": (0x7F, 0xFF), "e5m2": (0x7C, 0x7F)}


@pytest.mark.parametrize("fmt", GARBAGE)
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("d", [64, 128])
def test_case_41_unused_slots_are_never_read(fmt: str, page_size: int | None, d: int) -> None:
    lengths = [1, 31, 33, 127, 0]
    caches = [
        fa.QuantizedKVCache(5, 128, 2, d, dtype=DTYPES[fmt], page_size=page_size) for _ in range(2)
    ]
    for i, codes in enumerate((caches[1].k, caches[1].v)):
        codes.view(torch.uint8).fill_(GARBAGE[fmt][i])
    caches[1].k_descale.fill_(torch.nan)
    caches[1].v_descale.fill_(torch.inf)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    k, v = (
        torch.randn(int(cu[-1]), 2, d, generator=torch.Generator().manual_seed(i)) for i in (0, 1)
    )
    q = torch.randn(5, 1, 4, d, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for cache in caches:
        cache.append(k, v, cu_seqlens=cu)
        assert cache.seqlens.tolist() == lengths
        arguments = cache.attention_arguments()
        results.append(fa.flash_attn_with_kvcache(q, **arguments, return_softmax_lse=True))
    (out, lse), (clean, clean_lse) = results
    assert torch.equal(out, clean)
    assert torch.equal(lse, clean_lse)
    assert bool((out[4] == 0).all() & (lse[4] == -torch.inf).all())


@executors
def test_case_53_append_then_attend(impl: str) -> None:
    """The bytes of the two slots are the quantiser's, and attention covers them."""
    cache = fa.QuantizedKVCache(1, 32, 2, 64, page_size=4)
    k, v = new_tokens(1, 7, 2, dims=(64, 64), seed=3)
    k, v = k.clamp(-4, 4), v.clamp(-4, 4)
    cache.append(k[:, :5], v[:, :5], impl=simulated(impl))
    cache.append(k[:, 5:], v[:, 5:], impl=impl)
    assert cache.seqlens.tolist() == [7]
    made = fa.quantize(k), fa.quantize(v)
    for mine, codes in zip(cache.dequantize(), made, strict=True):
        assert torch.equal(mine[:, :7], codes.dequantize())
    q = torch.randn(1, 2, 4, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    out = fa.flash_attn_with_kvcache(q, **cache.attention_arguments(), causal=True)
    dense = dict(k_descale=made[0].descale, v_descale=made[1].descale, causal=True)
    assert torch.equal(out, fa.flash_attn_with_kvcache(q, made[0].values, made[1].values, **dense))


def test_case_53_the_attention_function_still_refuses_new_tokens() -> None:
    """Never a silent no-op: what it does not append, it says."""
    cache = fa.QuantizedKVCache(1, 32, 2, 64)
    x = torch.randn(1, 2, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(NotImplementedError, match="k"):
        fa.flash_attn_with_kvcache(x, **cache.attention_arguments(), k=x, v=x)
