"""The append kernel, simulated, has the bits of the CPU path, and the bytes of no other slot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8 import kv_append, simulation
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.specs import AppendSpec
from flash_attn_fp8.target import Target
from tests.kv_cache.caches import (
    LAYOUTS,
    Layout,
    assert_same_memory,
    cache_of,
    memory_of,
    model_of,
    new_tokens,
    spoil,
    static_scales,
)

pytest.importorskip("cutlass")

SLOTS = [4, -1, 0, 11, 8, 20, 3, -7, 14, 1]


def assert_same_both_ways(
    layout: Layout, k: Tensor, v: Tensor, slots: Tensor, arch: str = "sm_100a"
) -> None:
    """Appends by torch and by the kernel: all memory is the same, and the model's."""
    caches = cache_of(layout), cache_of(layout)
    model = model_of(caches[0])
    how = dict(slot_mapping=slots, nonfinite="keep")
    caches[0].append(k, v, **how)
    target = simulation.Settings(target=Target(arch, 2))
    with simulation._as_active(target):
        caches[1].append(k, v, **how, impl="sim")
    assert_same_memory(*(memory_of(cache) for cache in caches))
    model.append(caches[0], k, v, slots.tolist())
    model.assert_is(caches[0])


# What one kernel serves: the layouts and page sizes cost no compilation.
KERNELS = [
    ("e4m3", "bf16", (64, 64)),
    ("e5m2", "bf16", (128, 128)),
    ("int8", "bf16", (192, 128)),
    ("e4m3", "fp16", (192, 128)),
    ("e4m3", "fp32", (96, 96)),
    ("int8", "fp32", (64, 64)),
    ("int8", "fp16", (96, 96)),
    ("e5m2", "fp32", (64, 256)),
]


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("fmt", "source", "dims"), KERNELS)
def test_bits_in_every_layout(kind: str, fmt: str, source: str, dims: tuple[int, int]) -> None:
    layout = Layout(kind, fmt, heads=3, dims=dims)
    k, v = new_tokens(len(SLOTS), 3, dims=dims, source=source)
    assert_same_both_ways(layout, k, v, torch.tensor(SLOTS, dtype=torch.int32))


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("kind", ["paged", "inline", "padded"])
def test_page_sizes(kind: str, page_size: int) -> None:
    layout = Layout(kind, pages=31 // page_size + 1, page_size=page_size, batch=1)
    k, v = new_tokens(len(SLOTS), 2, dims=(64, 64))
    assert_same_both_ways(layout, k, v, torch.tensor(SLOTS, dtype=torch.int32))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("source", ["bf16", "fp16", "fp32"])
def test_infinities_and_nan(fmt: str, source: str) -> None:
    """They do not count in the scale; NaN keeps its sign, and marks the row in int8."""
    dims = (64, 64)
    k, v = (spoil(x) for x in new_tokens(len(SLOTS), 2, dims=dims, source=source))
    assert_same_both_ways(Layout(fmt=fmt), k, v, torch.tensor(SLOTS, dtype=torch.int32))


@pytest.mark.parametrize("per", ["head", "tensor"])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_static_scales(fmt: str, per: str) -> None:
    """They are read, large numbers saturate, and no scale is written."""
    k, v = new_tokens(len(SLOTS), 2, dims=(64, 64))
    k[3, 0, 5], v[0, 1, 0] = float("inf"), -float("inf")
    assert_same_both_ways(Layout(fmt=fmt, per=per), k, v, torch.tensor(SLOTS, dtype=torch.int32))


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_rounding_by_integers(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs below sm_89 has the same bits as the conversion instruction."""
    monkeypatch.setattr(kv_append, "has_fp8", lambda arch: False)
    k, v = (spoil(x) for x in new_tokens(len(SLOTS), 2, dims=(64, 64), source="fp32"))
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    assert_same_both_ways(Layout(fmt=fmt), k, v, slots)
    assert_same_both_ways(Layout(fmt=fmt, per="head"), *every_rounding(fmt, 2, (64, 64)), slots)


@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_on_hopper(fmt: str) -> None:
    k, v = new_tokens(len(SLOTS), 2, dims=(128, 64))
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    assert_same_both_ways(Layout(fmt=fmt, dims=(128, 64)), k, v, slots, arch="sm_90a")


def every_rounding(fmt: str, heads: int, dims: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """For `static_scales`: numbers around every midpoint of two codes, and codes themselves."""
    layout = Layout(fmt=fmt, per="head", heads=heads)
    return tuple(
        around_midpoints(fmt, static_scales(layout, seed), width, len(SLOTS))
        for seed, width in zip((1, 2), dims, strict=True)
    )


def around_midpoints(fmt: str, scale: Tensor, width: int, tokens: int) -> Tensor:
    """(tokens, heads, width) fp32: midpoints times a head's scale, and 2 neighbours each side."""
    form = FORMATS[fmt]
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(form.dtype).float()
    codes = codes[codes.isfinite() & (codes >= 0)].unique()
    points = torch.cat([(codes[1:] + codes[:-1]) / 2, codes])
    x = (points.double()[:, None] * scale.double()).float()
    near = [x]
    for towards in (torch.inf, 0.0):
        for distance in range(2):
            start = near[-1] if distance else x
            near.append(torch.nextafter(start, torch.tensor(towards)))
    flat = torch.cat(near).T  # (heads, numbers)
    flat = flat * torch.where(torch.arange(flat.shape[1]) % 2 == 0, 1.0, -1.0)
    room = tokens * width
    flat = flat.repeat(1, -(-room // flat.shape[1]))[:, :room]
    return flat.reshape(-1, tokens, width).transpose(0, 1).contiguous()


SCALES = (
    2.0**-126,
    2.0**-126 * (2 - 2.0**-23),
    1.0,
    2 - 2.0**-23,  # the fraction is all ones
    1 + 2.0**-23,
    2.0**100 * 1.5,
    0.0123456,
    1 / 3,
)


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_division_is_rounded_once(fmt: str) -> None:
    """Next to midpoints, where a quotient that is an ulp off changes the code."""
    heads, tokens, width = len(SCALES), 160, 64
    scale = torch.tensor(SCALES)
    x = around_midpoints(fmt, scale, width, tokens)
    caches = [torch.zeros(1, tokens, heads, width).to(FORMATS[fmt].dtype) for _ in range(4)]
    slots = torch.arange(tokens)
    for impl, k, v in (("reference", *caches[:2]), ("sim", *caches[2:])):
        fa.append_kv(x, -x, k, v, slots, k_scale=scale, v_scale=scale, impl=impl)
    for mine, yours in zip(caches[:2], caches[2:], strict=True):
        assert torch.equal(mine.view(torch.uint8), yours.view(torch.uint8))


@pytest.mark.parametrize("way", ["heads first", "part of qkv", "odd start", "batches", "expanded"])
def test_strides_of_sources(way: str) -> None:
    """Any, down to rows that start at odd elements."""
    layout = Layout(page_size=16, pages=4)
    k, v = new_tokens(2, 5, 2, dims=(64, 64), source="fp16")
    if way == "heads first":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif way == "part of qkv":
        k, v = torch.stack([k, v, k], 2)[:, :, 0], torch.stack([k, v, k], 2)[:, :, 1]
    elif way == "odd start":
        k, v = (torch.cat([x[..., :1], x], -1)[..., 1:] for x in (k, v))
    elif way == "batches":
        k, v = (torch.cat([x, x], 1)[:, :5] for x in (k, v))
    else:
        k, v = k[:1].expand(2, -1, -1, -1), v[:, :1].expand(-1, 5, -1, -1)
    assert_same_both_ways(layout, k, v, torch.tensor([5, 3, 60, 61, 62, 9, -1, 0, 40, 33]))


@pytest.mark.parametrize("width", [8, 72, 248])
def test_head_dims_that_are_no_multiple_of_16(width: int) -> None:
    layout = Layout(dims=(width, 16))
    k, v = new_tokens(len(SLOTS), 2, dims=layout.dims)
    assert_same_both_ways(layout, k, v, torch.tensor(SLOTS))


def test_slots_past_the_pool_are_skipped_unchecked() -> None:
    """What no check looked at must still not be written out of bounds (the simulator would say)."""
    layout = Layout()
    k, v = new_tokens(6, 2, dims=(64, 64))
    slots = torch.tensor([5, layout.slots, 2**31 - 1, -(2**31), 2**40, 20])
    caches = [cache_of(layout) for _ in range(3)]
    for cache, impl in zip(caches, ("sim", "reference"), strict=False):
        cache.append(k, v, slot_mapping=slots, check=False, impl=impl)
    caches[2].append(k[[0, 5]], v[[0, 5]], slot_mapping=slots[[0, 5]])
    for cache in caches[:2]:
        assert_same_memory(memory_of(cache), memory_of(caches[2]))


def test_a_small_pool_and_many_tokens() -> None:
    """Several CTAs, the last not full."""
    layout = replace(Layout(fmt="int8"), page_size=16, pages=20)
    slots = torch.randperm(layout.slots, generator=torch.Generator().manual_seed(0))[:301]
    k, v = new_tokens(301, 2, dims=(64, 64), seed=5)
    assert_same_both_ways(layout, k, v, slots)


def test_simulate_says_what_an_append_moves() -> None:
    """Each number is read once, each code and scale written once, in vectors of 16 bytes."""
    tokens, heads, width = 32, 4, 128
    k = torch.randn(tokens, heads, width, dtype=torch.bfloat16)
    cache = fa.QuantizedKVCache(1, tokens, heads, width)
    _, (run,) = fa.simulate(cache.append, k[None], k[None])
    rows = 2 * tokens * heads
    read, written = run.traffic["global bytes read"], run.traffic["global bytes written"]
    assert written == rows * (width + 4)
    slots = read - rows * width * 2
    assert slots == rows * 8 * (width // 32)  # its int64 slot, by each lane of a row
    loads = [i for i in run.as_data()["instructions"] if i["opcode"].startswith("ld.global.v4")]
    assert sum(i["executed"] for i in loads) == rows * width * 2 // (16 * 32)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_120a"])
def test_it_compiles_for_other_architectures(arch: str) -> None:
    """Whose instructions the simulator does not run: the assembler takes them."""
    from flash_attn_fp8.compiler.build import compile_kernel

    spec = AppendSpec("bf16", "e4m3", 128, 64, "token_head", converts=kv_append._converts(arch))
    assert spec.converts == (arch != "sm_80")
    kernel = compile_kernel(spec, f"--gpu-arch {arch}", no_jit_engine=True)
    assert kernel.ir_module is not None
