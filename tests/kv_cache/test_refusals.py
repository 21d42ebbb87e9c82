"""What an append and a cache refuse, in which words; nothing is written then."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.kv_cache.caches import Layout, assert_same_memory, cache_of, memory_of

E4M3 = torch.float8_e4m3fn


def arguments() -> dict[str, Tensor]:
    """A right call of `append_kv`."""
    k = torch.ones(3, 2, 64, dtype=torch.bfloat16)
    pool = torch.zeros(4, 16, 2, 64, dtype=E4M3)
    return dict(
        k=k,
        v=k.clone(),
        k_cache=pool,
        v_cache=pool.clone(),
        slot_mapping=torch.tensor([1, 2, 63]),
        k_scale_cache=torch.zeros(4, 16, 2),
        v_scale_cache=torch.zeros(4, 16, 2),
    )


def static(value: object) -> dict[str, object]:
    scale = torch.as_tensor(value, dtype=torch.float32)
    return dict(k_scale_cache=None, v_scale_cache=None, k_scale=scale, v_scale=scale)


def overlapping() -> dict[str, object]:
    """Keys that are read from where values are written."""
    memory = torch.zeros(4 * 16 * 2 * 64, dtype=torch.uint8)
    cache = memory.view(E4M3).view(4, 16, 2, 64)
    return dict(v_cache=cache, k=memory.view(torch.bfloat16)[: 3 * 128].view(3, 2, 64))


def with_value(x: Tensor, at: tuple[int, ...], value: float) -> Tensor:
    x = x.clone()
    x[at] = value
    return x


ONES = torch.ones(3, 2, 64, dtype=torch.bfloat16)
CASES: list[tuple[Callable[[], dict[str, object]], str]] = [
    (lambda: dict(k=[1.0]), "k must be a torch.Tensor, got list [1.0]"),
    (lambda: dict(k=ONES.double()), "k is float64; new tokens are bf16, fp16 or fp32"),
    (lambda: dict(v=ONES.half()), "k is bf16 and v fp16; give them one dtype"),
    (lambda: dict(k=ONES[0]), "k must be (tokens, nheads_kv, head_dim), or batched"),
    (lambda: dict(v=ONES[:2]), "k [3, 2, 64] and v [2, 2, 64] must agree in all but the head dim"),
    (
        lambda: dict(k=ONES.mT.contiguous().mT),
        "k must be contiguous in its last dimension",
    ),
    (lambda: dict(k_cache=torch.zeros(4, 16, 2, 64)), "k_cache is fp32; a cache has e4m3, e5m2"),
    (
        lambda: dict(k_cache=torch.zeros(4, 16, 2, 60, dtype=E4M3)),
        "k_cache has head dim 60; it must be a multiple of 8 up to 256",
    ),
    (
        lambda: dict(k_cache=torch.zeros(4, 16, 3, 64, dtype=E4M3)),
        "k has [2, 64] (heads, head dim) and k_cache [3, 64]",
    ),
    (
        lambda: dict(v_cache=torch.zeros(4, 16, 2, 64, dtype=torch.int8)),
        "must agree in dtype and in all but the head dim",
    ),
    (
        lambda: dict(slot_mapping=torch.tensor([1, 2])),
        "slot_mapping must be a vector of int32 or int64 with an element for each of the 3 tokens",
    ),
    (lambda: dict(slot_mapping=torch.ones(3)), "slot_mapping must be a vector of int32 or int64"),
    (lambda: dict(k_scale_cache=None), "give either k_scale_cache and v_scale_cache, which are"),
    (lambda: dict(k_scale=torch.ones(())), "give either k_scale_cache and v_scale_cache, which"),
    (
        lambda: dict(k_scale_cache=torch.zeros(4, 16)),
        "k_scale_cache must have shape [4, 16, 2], got fp32[4, 16]",
    ),
    (lambda: dict(k_scale_cache=torch.zeros(4, 16, 2).half()), "k_scale_cache must be fp32"),
    (lambda: static([1.0, 1, 1]), "k_scale must have shape [], [1] or [2], got fp32[3]"),
    (
        lambda: dict(k_cache=torch.zeros(4, 16, 1, 64, dtype=E4M3).expand(4, 16, 2, 64)),
        "k_cache has strides [1024, 64, 0, 1], in which elements of its shape",
    ),
    (overlapping, "v_cache shares memory with k; give it memory of its own"),
    (lambda: dict(k=ONES.to("meta")), "k is on meta, k_cache on cpu"),
    (lambda: dict(k=ONES.clone().requires_grad_()), "k require grad: this package is forward only"),
    (lambda: dict(nonfinite="drop"), "nonfinite='drop' must be 'raise' or 'keep'"),
    (lambda: dict(check=1), "check=1 must be True or False"),
    (lambda: dict(impl="tiled"), "impl='tiled' must be None, 'cute', 'sim' or 'reference'"),
    (lambda: dict(impl="cute"), "impl='cute' runs on CUDA tensors, these are on cpu"),
    (
        lambda: dict(slot_mapping=torch.tensor([1, 64, 2])),
        "slot_mapping[1]=64 is past the 64 slots of 4 pages of 16",
    ),
    (
        lambda: dict(slot_mapping=torch.tensor([7, 1, 7])),
        "slot_mapping has slot 7 for tokens [0, 2]; each goes to a slot of its own",
    ),
    (
        lambda: dict(v=with_value(ONES, (1, 0, 0), torch.inf)),
        "v has an infinity or NaN in token 1; nonfinite='keep' takes it",
    ),
    (lambda: static([1.0, 0.0]), "k_scale[1]=0.0 must be from 1.18e-38 to 7.6e+35"),
    (lambda: static(torch.nan), "k_scale[0]=nan must be from 1.18e-38 to 7.6e+35"),
    (
        lambda: dict(
            static(1.0),
            k_cache=torch.zeros(4, 16, 2, 64, dtype=torch.int8),
            v_cache=torch.zeros(4, 16, 2, 64, dtype=torch.int8),
            k=with_value(ONES, (2, 1, 3), torch.nan),
            nonfinite="keep",
        ),
        "k has a NaN, which int8 does not have in token 2",
    ),
]


@pytest.mark.parametrize(("changes", "reason"), CASES, ids=[reason[:40] for _, reason in CASES])
def test_append_refuses(changes: Callable[[], dict[str, object]], reason: str) -> None:
    call = arguments() | changes()
    tensors = [t for t in call.values() if isinstance(t, Tensor) and not t.is_meta]
    before = [t.detach().clone() for t in tensors]
    with pytest.raises(fa.FlashAttnFp8Error, match=re.escape(reason)) as caught:
        fa.append_kv(**call)
    assert any(reason in text for text in caught.value.reasons)
    assert "Nothing was allocated, compiled or written." in str(caught.value)
    for a, b in zip(tensors, before, strict=True):
        assert torch.equal(a.detach().float().nan_to_num(), b.float().nan_to_num())


def test_every_fault_at_once() -> None:
    """Of data: two slots, a number and a scale in one exception."""
    call = arguments() | static([1.0, -2.0]) | dict(slot_mapping=torch.tensor([5, 5, 900]))
    call["k"] = with_value(call["k"], (0, 0, 0), torch.nan)
    with pytest.raises(fa.InvalidArguments) as caught:
        fa.append_kv(**call)
    assert len(caught.value.reasons) == 5  # k_scale and v_scale are one tensor


def test_a_right_append_excuses_no_other() -> None:
    """What is remembered of one that was right says nothing of where another reads."""
    memory = torch.zeros(4 * 16 * 2 * 64 + 768, dtype=torch.uint8)
    call = arguments() | dict(v_cache=memory[768:].view(E4M3).view(4, 16, 2, 64))
    fa.append_kv(**call)
    inside = memory[768:][: 3 * 256].view(torch.bfloat16).view(3, 2, 64)
    before = memory.clone()
    with pytest.raises(fa.InvalidArguments, match="v_cache shares memory with k"):
        fa.append_kv(**call | dict(k=inside))
    other = memory[768 : 768 + 512].view(torch.float32).view(4, 16, 2)
    with pytest.raises(fa.InvalidArguments, match="v_cache shares memory with k_scale_cache"):
        fa.append_kv(**call | dict(k_scale_cache=other))
    assert torch.equal(before, memory)
    fa.append_kv(**call | dict(k=memory[:768].view(torch.bfloat16).view(3, 2, 64)))
    with pytest.raises(NotImplementedError, match="k require grad"):
        fa.append_kv(**call | dict(k=call["k"].clone().requires_grad_()))


METHOD = [
    (dict(k=ONES[None], v=ONES[None]), "k has 1 sequences and the cache 2"),
    (dict(k=ONES, v=ONES), "packed tokens need cu_seqlens or slot_mapping"),
    (
        dict(k=ONES, v=ONES, cu_seqlens=torch.tensor([0, 3])),
        "cu_seqlens must be a vector of int32",
    ),
    (
        dict(k=ONES, v=ONES, cu_seqlens=torch.tensor([0, 3], dtype=torch.int32)),
        "cu_seqlens must have 3 elements",
    ),
    (
        dict(k=ONES, v=ONES, slot_mapping=torch.arange(3), cu_seqlens=torch.arange(3)),
        "slot_mapping says where tokens go; leave cu_seqlens out",
    ),
    (dict(k=ONES, v=ONES.half(), slot_mapping=torch.arange(3)), "k is bf16 and v fp16"),
]


@pytest.mark.parametrize(("call", "reason"), METHOD, ids=[reason[:40] for _, reason in METHOD])
def test_the_method_refuses(call: dict[str, Tensor], reason: str) -> None:
    cache = cache_of(Layout())
    before = memory_of(cache)
    with pytest.raises(fa.InvalidArguments, match=re.escape(reason)):
        cache.append(**call)
    assert_same_memory(before, memory_of(cache))


ONE = torch.ones(())
CONSTRUCTIONS = [
    (dict(batch=0), "batch=0 must be an integer of at least 1"),
    (dict(head_dim=60), "head_dim=60 must be a multiple of 8 up to 256"),
    (dict(head_dim_v=264), "head_dim_v=264 must be a multiple of 8 up to 256"),
    (dict(dtype=torch.bfloat16), "must be e4m3, e5m2 or int8"),
    (dict(page_size=0), "page_size=0 must be an integer of at least 1"),
    (dict(num_pages=3), "num_pages is of a paged cache; give page_size"),
    (dict(k_scale=ONE), "give k_scale and v_scale, or neither"),
    (dict(k_scale=ONE, v_scale=ONE, inline_scales=True), "k_scale is static, and inline_scales"),
    (dict(k_scale=ONE, v_scale=torch.ones(3)), "v_scale must have shape [], [1] or [2]"),
]


@pytest.mark.parametrize(
    ("changes", "reason"), CONSTRUCTIONS, ids=[r[:40] for _, r in CONSTRUCTIONS]
)
def test_the_constructor_refuses(changes: dict[str, object], reason: str) -> None:
    sizes = dict(batch=2, capacity=8, nheads_kv=2, head_dim=64) | changes
    with pytest.raises(fa.InvalidArguments, match=re.escape(reason)):
        fa.QuantizedKVCache(**sizes)


def tensors() -> dict[str, Tensor]:
    codes, scale = torch.zeros(2, 8, 2, 64, dtype=torch.int8), torch.zeros(2, 8, 2)
    return dict(k=codes, v=codes.clone(), k_descale=scale, v_descale=scale.clone())


SHARED = torch.zeros(2, 8, 2)
ADOPTIONS = [
    (
        dict(k=torch.zeros(2, 8, 64, dtype=torch.int8)),
        "k and v must be (batch, capacity, nheads_kv",
    ),
    (dict(k_descale=ONE), "must both be per token and head, or both be static"),
    (dict(k_descale=torch.zeros(2, 8, 3)), "k_descale must have shape [2, 8, 2]"),
    (dict(k_descale=SHARED, v_descale=SHARED), "k_descale shares memory with v_descale"),
    (dict(seqlens=torch.zeros(3, dtype=torch.int32)), "seqlens must be 2 int32"),
    (dict(page_table=torch.zeros(3, dtype=torch.int32)), "page_table must be a matrix of int32"),
    (dict(v=torch.zeros(2, 8, 2, 64, dtype=E4M3)), "must agree in dtype"),
]


@pytest.mark.parametrize(("changes", "reason"), ADOPTIONS, ids=[r[:40] for _, r in ADOPTIONS])
def test_adopt_refuses(changes: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(fa.InvalidArguments, match=re.escape(reason)):
        fa.QuantizedKVCache.adopt(**(tensors() | changes))
