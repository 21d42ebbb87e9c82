"""Random appends against a plain model: right ones write their slots, wrong ones nothing at all."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_attn_fp8 as fa
from tests.kv_cache.caches import (
    LAYOUTS,
    Layout,
    assert_same_memory,
    cache_of,
    memory_of,
    model_of,
    new_tokens,
)

DIMS = (16, 8)

layouts = st.builds(
    Layout,
    kind=st.sampled_from(LAYOUTS),
    fmt=st.sampled_from(["e4m3", "e5m2", "int8"]),
    heads=st.integers(1, 3),
    dims=st.just(DIMS),
    pages=st.integers(2, 6),
    page_size=st.sampled_from([1, 3, 16]),
    batch=st.integers(1, 2),
    per=st.sampled_from(["token_head", "token_head", "head", "tensor"]),
)


def faulty(slots: list[int], layout: Layout) -> bool:
    used = [s for s in slots if s >= 0]
    return len(set(used)) < len(used) or any(s >= layout.slots for s in used)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_slot_mapping(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    cache = cache_of(layout)
    model = model_of(cache)
    for round in range(data.draw(st.integers(1, 3))):
        low, high = data.draw(st.sampled_from([(-2, layout.slots - 1), (-2, layout.slots + 1)]))
        unique = data.draw(st.booleans())
        slots = data.draw(st.lists(st.integers(low, high), max_size=8, unique=unique))
        k, v = new_tokens(len(slots), layout.heads, dims=DIMS, seed=round)
        spoiled = bool(slots) and data.draw(st.sampled_from([False, False, True]))
        if spoiled:
            at = data.draw(st.integers(0, len(slots) - 1))
            k[at, 0, 1] = data.draw(st.sampled_from([torch.inf, torch.nan]))
            spoiled = slots[at] >= 0  # a token that is skipped may hold anything
        kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
        mapping = torch.tensor(slots, dtype=kind)
        before = memory_of(cache)
        if faulty(slots, layout) or spoiled:
            with pytest.raises(fa.InvalidArguments) as caught:
                cache.append(k, v, slot_mapping=mapping)
            assert len(caught.value.reasons) >= faulty(slots, layout) + spoiled
            assert_same_memory(before, memory_of(cache))
        else:
            cache.append(k, v, slot_mapping=mapping)
            model.append(cache, k, v, slots)
            model.assert_is(cache)
            assert torch.equal(memory_of(cache)[4], before[4])  # lengths are the caller's here


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_growth(data: st.DataObject) -> None:
    """Batched and packed appends go behind what is there, through whatever pages."""
    layout = data.draw(layouts)
    cache = cache_of(layout)
    model, lengths = model_of(cache), [0] * cache.batch
    for round in range(data.draw(st.integers(1, 4))):
        packed = data.draw(st.booleans())
        if packed:
            more = [data.draw(st.integers(0, 4)) for _ in lengths]
            stray = data.draw(st.integers(0, 2))
            k, v = new_tokens(sum(more) + stray, layout.heads, dims=DIMS, seed=round)
            k[sum(more) :] = torch.nan  # rows of nobody
            how = dict(cu_seqlens=torch.tensor([0, *more]).cumsum(0).int())
        else:
            more = [data.draw(st.integers(0, 4))] * len(lengths)
            stray = 0
            k, v = new_tokens(len(lengths), more[0], layout.heads, dims=DIMS, seed=round)
            how = {}
        before = memory_of(cache)
        full = any(a + b > cache.capacity for a, b in zip(lengths, more, strict=True))
        if full:
            with pytest.raises(fa.InvalidArguments, match="do not fit"):
                cache.append(k, v, **how)
            assert_same_memory(before, memory_of(cache))
            continue
        cache.append(k, v, **how)
        slots = [
            slot_of(cache, sequence, lengths[sequence] + i)
            for sequence, count in enumerate(more)
            for i in range(count)
        ]
        model.append(cache, k, v, slots + [-1] * stray)
        model.assert_is(cache)
        lengths = [a + b for a, b in zip(lengths, more, strict=True)]
        assert cache.seqlens.tolist() == lengths


def slot_of(cache: fa.QuantizedKVCache, sequence: int, position: int) -> int:
    if cache.page_table is None:
        return sequence * cache.capacity + position
    size = cache.k.shape[1]
    return int(cache.page_table[sequence, position // size]) * size + position % size


def test_out_of_pages() -> None:
    """A table with holes: what needs a page that is not there is refused, the rest works."""
    table = torch.tensor([[2, -1, -1], [0, 1, 99]], dtype=torch.int32)
    cache = cache_of(Layout(pages=4, page_size=4), table)
    k, v = new_tokens(2, 4, 2, dims=(64, 64))
    cache.append(k, v)
    before = memory_of(cache)
    with pytest.raises(fa.InvalidArguments, match="sequence 0 is out of pages") as caught:
        cache.append(k[:, :1], v[:, :1])
    assert len(caught.value.reasons) == 1
    assert_same_memory(before, memory_of(cache))
    table[0, 1] = 3
    cache.append(k, v)
    with pytest.raises(fa.InvalidArguments, match=r"page_table\[1, 2\]=99"):
        cache.append(k[:, :1], v[:, :1])
    cache.append(k[:, :1], v[:, :1], check=False)  # what has no place is skipped
    assert cache.seqlens.tolist() == [9, 9]


def test_lengths_stop_at_the_capacity() -> None:
    cache = cache_of(Layout("contiguous", pages=2, page_size=5))
    k, v = new_tokens(2, 4, 2, dims=(64, 64))
    cache.append(k, v, check=False)
    model = model_of(cache)
    cache.append(k, v, check=False)
    model.append(cache, k, v, [4, -1, -1, -1, 9, -1, -1, -1])
    model.assert_is(cache)
    assert cache.seqlens.tolist() == [5, 5]


def test_broken_lengths_and_bounds() -> None:
    cache = cache_of(Layout("contiguous", pages=2, page_size=5))
    k, v = new_tokens(4, 2, dims=(64, 64))
    for bounds in ([0, 3, 2], [1, 2, 4], [0, 2, 9]):
        with pytest.raises(fa.InvalidArguments, match="must start at 0"):
            cache.append(k, v, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    cache.seqlens[1] = -3
    with pytest.raises(fa.InvalidArguments, match=r"seqlens\[1\]=-3"):
        cache.append(k[None, :1].expand(2, -1, -1, -1), v[None, :1].expand(2, -1, -1, -1))
