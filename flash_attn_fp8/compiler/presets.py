"""Kernels by the model that needs them: what `flash-attn-fp8 compile --preset` builds.

A preset stands for calls, made on meta tensors, and its specs are those of their plans: each is one
that a real call of that kind runs. Those of dense calls are made for few and for many rows, since
that decides whether CTAs work in pairs, and which kernel runs 16 bits on SM90; the split of paged
ones is asked for, where a real call's may follow from its lengths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from flash_attn_fp8.call import Call, Operands, Options
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.compiler.cache_presets import CACHE_PRESETS, CachePreset
from flash_attn_fp8.errors import InvalidArguments
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.plan import plan_for
from flash_attn_fp8.specs import Spec
from flash_attn_fp8.target import SHARED_MEMORY, target_named

_FORWARD_ARCHS = ("sm_90a", "sm_100a")  # of kernels for long queries, in fp8 as well
ARCHS = tuple(SHARED_MEMORY)
Layout = Literal["dense", "packed", "paged"]
# Queries of dense calls: as few and as many as decide on pairs of CTAs, whatever the group.
_SEQLENS_Q = (1, 1024)


@dataclass(frozen=True)
class Preset:
    """Every combination of its fields is a call; calls that differ in kernels give several.

    `groups`: query heads of a KV head, packed into one tile. `page_sizes` are those of paged calls,
    which are also compiled for split keys, with the kernel that merges the parts.
    """

    about: str
    layouts: tuple[Layout, ...]
    groups: tuple[int, ...]
    head_dims: tuple[int, int] = (128, 128)
    formats: tuple[str, ...] = ("e4m3",)
    causal: tuple[bool, ...] = (True,)
    windows: tuple[int | None, ...] = (None,)
    page_sizes: tuple[int, ...] = (16, 64, 128)
    sink: bool = False
    scales: bool = True
    lse: tuple[bool, ...] = (False, True)

    def calls(self) -> Iterator[Call]:
        """The calls."""
        return _calls(self)


PRESETS: dict[str, Preset | CachePreset] = {
    "smoke": Preset(
        "one small kernel, to see that it works", ("dense",), (1,), (64, 64), lse=(False,)
    ),
    "llama": Preset(
        "head dim 128, 4 or 8 query heads a KV head: training-like, packed prefill, paged cache",
        ("dense", "packed", "paged"),
        (4, 8),
    ),
    "llama-bf16": Preset(
        "the same in bf16",
        ("dense", "packed", "paged"),
        (4, 8),
        formats=("bf16",),
        scales=False,
    ),
    "gpt-oss": Preset(
        "head dim 64, 8 query heads a KV head, sinks, full and 128-key windows in turn",
        ("packed", "paged"),
        (8,),
        (64, 64),
        windows=(None, 127),
        sink=True,
    ),
    "deepseek": Preset("head dims 192 and 128, prefill", ("packed",), (1,), (192, 128)),
    "encoder": Preset(
        "head dim 128, bidirectional, no GQA: image and video transformers",
        ("dense", "packed"),
        (1,),
        causal=(False,),
    ),
    **CACHE_PRESETS,
}


def preset_named(name: str) -> Preset | CachePreset:
    """A preset.

    Raises:
        InvalidArguments: there is none of this name.
    """
    if name not in PRESETS:
        raise InvalidArguments(f"preset={name!r} is not one of {', '.join(PRESETS)}")
    return PRESETS[name]


def specs_of(preset: Preset | CachePreset, arch: str) -> tuple[Spec, ...]:
    """The kernels of a preset on an architecture, each once.

    Raises:
        InvalidArguments: there are no kernels for the architecture.
    """
    archs = ARCHS if isinstance(preset, CachePreset) else _FORWARD_ARCHS
    if arch not in archs:
        raise InvalidArguments(f"arch={arch!r}: this preset is compiled for {', '.join(archs)}")
    found: dict[Spec, None] = {}
    for call in preset.calls():
        plan = plan_for(problem_of(call), target_named(arch))
        found.update(dict.fromkeys(plan.kernels))
    if isinstance(preset, CachePreset):
        found.update(dict.fromkeys(preset.appends(arch)))
    return tuple(found)


def _calls(preset: Preset) -> Iterator[Call]:
    options = Options(impl="cute")
    kinds = product(
        preset.layouts, preset.groups, preset.formats, preset.causal, preset.windows, preset.lse
    )
    for layout, group, fmt, causal, window, lse in kinds:
        asked = options._replace(causal=causal, window_left=window, return_lse=lse)
        if layout == "packed":
            yield _call(preset, layout, group, fmt, asked)
            continue
        if layout == "dense":
            for seqlen_q in _SEQLENS_Q:
                yield _call(preset, layout, group, fmt, asked, seqlen_q)
            continue
        for page_size, parts in product(preset.page_sizes, (1, 2)):
            asked = asked._replace(num_splits=parts)
            yield _call(replace(preset, page_sizes=(page_size,)), layout, group, fmt, asked)


def _call(
    preset: Preset, layout: Layout, group: int, fmt: str, options: Options, seqlen_q: int = 128
) -> Call:
    """A call of two sequences of 128 keys and two KV heads; `seqlen_q` queries where dense."""
    dtype, int32, fp32 = FORMATS[fmt].dtype, torch.int32, torch.float32
    d, dv = preset.head_dims
    page_size = preset.page_sizes[0]
    rows = {"dense": (2, 128), "packed": (256,), "paged": (16, page_size)}
    of_q = (2, seqlen_q) if layout == "dense" else rows["packed"]
    bounds = None if layout == "dense" else _meta(int32, 3)
    scale = _meta(fp32, 2, 2) if preset.scales else None
    operands = Operands(
        _meta(dtype, *of_q, 2 * group, d),
        _meta(dtype, *rows[layout], 2, d),
        _meta(dtype, *rows[layout], 2, dv),
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds if layout == "packed" else None,
        seqused_k=_meta(int32, 2) if layout == "paged" else None,
        page_table=_meta(int32, 2, 8) if layout == "paged" else None,
        learnable_sink=_meta(torch.bfloat16, 2 * group) if preset.sink else None,
        q_descale=scale,
        k_descale=scale,
        v_descale=scale,
    )
    function = "flash_attn_func" if layout == "dense" else "flash_attn_varlen_func"
    return Call(function, operands, options)


def _meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
