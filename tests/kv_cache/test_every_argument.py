"""Each argument of an append and of a cache, passed alone, changes something that one can see."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.kv_cache.caches import Layout, cache_of, memory_of

Arguments = dict[str, Any]
ONE = torch.ones(())


def new(seed: int = 0, **at: float) -> Tensor:
    x = torch.randn(3, 2, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
    for value in at.values():
        x[1, 0, 0] = value
    return x


def function_call() -> Arguments:
    codes = torch.zeros(4, 16, 2, 64, dtype=torch.float8_e4m3fn)
    scales = torch.zeros(4, 16, 2)
    return dict(
        k=new(),
        v=new(1),
        k_cache=codes,
        v_cache=codes.clone(),
        slot_mapping=torch.tensor([1, 2, 63]),
        k_scale_cache=scales,
        v_scale_cache=scales.clone(),
    )


def outcome(call: Arguments) -> object:
    """What there is after an append: its refusal, or the bytes of all it may have written."""
    try:
        fa.append_kv(**call)
    except fa.FlashAttnFp8Error as refusal:
        return refusal.reasons
    names = ("k_cache", "v_cache", "k_scale_cache", "v_scale_cache")
    return [None if call.get(n) is None else call[n].view(torch.uint8).tolist() for n in names]


def static() -> Arguments:
    return dict(k_scale_cache=None, v_scale_cache=None, k_scale=ONE, v_scale=ONE)


# Another value, and what is said beside it both times.
FUNCTION: dict[str, Callable[[], tuple[Any, Arguments]]] = {
    "k": lambda: (new(5), {}),
    "v": lambda: (new(5), {}),
    "k_cache": lambda: (torch.zeros(4, 16, 2, 64, dtype=torch.int8), {}),
    "v_cache": lambda: (torch.zeros(4, 16, 2, 64, dtype=torch.int8), {}),
    "slot_mapping": lambda: (torch.tensor([1, -1, 63]), {}),
    "k_scale_cache": lambda: (None, {}),
    "v_scale_cache": lambda: (None, {}),
    "k_scale": lambda: (ONE * 2, static()),
    "v_scale": lambda: (ONE * 2, static()),
    "nonfinite": lambda: ("keep", dict(k=new(nan=torch.nan))),
    "check": lambda: (False, dict(slot_mapping=torch.tensor([1, 99, 63]))),
    "impl": lambda: ("cute", {}),
}


@pytest.mark.parametrize("name", inspect.signature(fa.append_kv).parameters)
def test_an_argument_of_the_function(name: str) -> None:
    value, beside = FUNCTION[name]()
    before = outcome(function_call() | beside)
    assert outcome(function_call() | beside | {name: value}) != before


METHOD: dict[str, tuple[Any, Arguments]] = {
    "k": (new(5)[None], {}),
    "v": (new(5)[None], {}),
    "slot_mapping": (torch.tensor([3, 5, -1]), {}),
    "cu_seqlens": (torch.tensor([0, 1], dtype=torch.int32), dict(k=new(), v=new(1))),
    "nonfinite": ("keep", dict(k=new(nan=torch.nan)[None])),
    "check": (False, dict(k=new()[None].repeat(1, 9, 1, 1), v=new()[None].repeat(1, 9, 1, 1))),
    "impl": ("cute", {}),
}


def after_append(call: Arguments) -> object:
    cache = cache_of(Layout(batch=1))
    try:
        cache.append(**(dict(k=new()[None], v=new(1)[None]) | call))
    except fa.FlashAttnFp8Error as refusal:
        return refusal.reasons
    return [bytes.tolist() for bytes in memory_of(cache)]


@pytest.mark.parametrize(
    "name", [n for n in inspect.signature(fa.QuantizedKVCache.append).parameters if n != "self"]
)
def test_an_argument_of_the_method(name: str) -> None:
    value, beside = METHOD[name]
    assert after_append(beside | {name: value}) != after_append(beside)


CONSTRUCTOR: dict[str, tuple[Any, Arguments]] = {
    "batch": (3, {}),
    "capacity": (9, {}),
    "nheads_kv": (1, {}),
    "head_dim": (96, {}),
    "head_dim_v": (32, {}),
    "dtype": (torch.int8, {}),
    "page_size": (4, {}),
    "num_pages": (7, dict(page_size=4)),
    "k_scale": (ONE * 2, dict(k_scale=ONE, v_scale=ONE)),
    "v_scale": (ONE * 2, dict(k_scale=ONE, v_scale=ONE)),
    "inline_scales": (True, {}),
    "device": ("meta", {}),
}


def made(call: Arguments) -> list[object]:
    cache = fa.QuantizedKVCache(**(dict(batch=2, capacity=8, nheads_kv=2, head_dim=64) | call))
    tensors = [t for t in vars(cache).values() if t is not None]
    values = [s.tolist() for s in (cache.k_descale, cache.v_descale) if s.ndim == 0]
    return [*((t.shape, t.stride(), t.dtype, t.device) for t in tensors), *values]


@pytest.mark.parametrize("name", inspect.signature(fa.QuantizedKVCache).parameters)
def test_an_argument_of_the_constructor(name: str) -> None:
    value, beside = CONSTRUCTOR[name]
    assert made(beside | {name: value}) != made(beside)
