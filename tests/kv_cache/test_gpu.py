"""The append kernel on a CUDA device: the CPU's bits, graphs without synchronisation."""

from __future__ import annotations

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS
from tests.gpu.test_device import synchronisation_raises
from tests.kv_cache.caches import (
    LAYOUTS,
    Layout,
    assert_same_memory,
    cache_of,
    memory_of,
    new_tokens,
    spoil,
)
from tests.kv_cache.test_bits import SCALES, around_midpoints

pytestmark = pytest.mark.gpu

SLOTS = torch.tensor([4, -1, 0, 11, 8, 20, 3, -7, 14, 1])


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("per", ["token_head", "head", "tensor"])
def test_bits(kind: str, source: str, fmt: str, per: str) -> None:
    layouts = [Layout(kind, fmt, dims=(128, 96), per=per, device=d) for d in ("cpu", "cuda")]
    caches = [cache_of(layout) for layout in layouts]
    k, v = new_tokens(len(SLOTS), 2, dims=(128, 96), source=source)
    if per == "token_head":
        k, v = spoil(k), spoil(v)
    for cache, device in zip(caches, ("cpu", "cuda"), strict=True):
        slots = SLOTS.to(device)
        cache.append(k.to(device), v.to(device), slot_mapping=slots, nonfinite="keep")
    assert_same_memory(*(memory_of(cache) for cache in caches))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_division(fmt: str) -> None:
    scale = torch.tensor(SCALES)
    x = around_midpoints(fmt, scale, 64, 160)
    found = []
    for device in ("cpu", "cuda"):
        cache = fa.QuantizedKVCache(
            1, 160, len(SCALES), 64, dtype=FORMATS[fmt].dtype, k_scale=scale.to(device),
            v_scale=scale.to(device),
        )  # fmt: skip
        cache.append(x[None].to(device), -x[None].to(device))
        found.append(memory_of(cache))
    assert_same_memory(*found)


def test_many_tokens() -> None:
    """As a prefill appends them, in random order over the pool."""
    sizes = dict(heads=8, dims=(128, 128), pages=300, page_size=16)
    layouts = [Layout("padded", **sizes, device=d) for d in ("cpu", "cuda")]
    slots = torch.randperm(4800, generator=torch.Generator().manual_seed(0))[:4097]
    k, v = new_tokens(4097, 8, dims=(128, 128))
    caches = [cache_of(layout) for layout in layouts]
    for cache, device in zip(caches, ("cpu", "cuda"), strict=True):
        cache.append(k.to(device), v.to(device), slot_mapping=slots.to(device))
    assert_same_memory(*(memory_of(cache) for cache in caches))


def test_a_graph_appends_where_lengths_say() -> None:
    """Captured once, replayed: each replay goes behind the one before, without synchronisation."""
    caches = [cache_of(Layout(page_size=16, pages=6, device=d)) for d in ("cpu", "cuda")]
    k, v = (x.cuda() for x in new_tokens(2, 1, 2, dims=(64, 64)))
    caches[1].append(k, v)  # compiles
    caches[1].seqlens.zero_()
    with synchronisation_raises():
        caches[1].append(k, v, check=False)
    caches[1].seqlens.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        caches[1].append(k, v, check=False)
    for seed in range(5):
        new = new_tokens(2, 1, 2, dims=(64, 64), seed=seed)
        caches[0].append(*new)
        k.copy_(new[0])
        v.copy_(new[1])
        graph.replay()
    assert_same_memory(*(memory_of(cache) for cache in caches))


def test_a_failed_append_writes_nothing() -> None:
    cache = cache_of(Layout(device="cuda"))
    before = memory_of(cache)
    k, v = (x.cuda() for x in new_tokens(3, 2, dims=(64, 64)))
    for slots in ([0, 0, 1], [0, 1, 21]):
        with pytest.raises(fa.InvalidArguments, match="slot_mapping"):
            cache.append(k, v, slot_mapping=torch.tensor(slots, device="cuda"))
    assert_same_memory(before, memory_of(cache))


def test_slots_past_the_pool_are_skipped() -> None:
    cache, wanted = (cache_of(Layout(device=d)) for d in ("cuda", "cpu"))
    k, v = new_tokens(4, 2, dims=(64, 64))
    slots = torch.tensor([5, 21, 2**40, -(2**40)])
    cache.append(k.cuda(), v.cuda(), slot_mapping=slots.cuda(), check=False)
    wanted.append(k[:1], v[:1], slot_mapping=slots[:1])
    assert_same_memory(memory_of(cache), memory_of(wanted))
