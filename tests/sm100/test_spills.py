"""Kernels whose rows are hardest to address still keep everything in registers.

`benchmarks/static_sm100.py` has the same bar for plain calls; here are splits, pages, windows,
sinks and groups that divide no tile.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from benchmarks import sass
from flash_attn_fp8.compiler import cache, link
from flash_attn_fp8.specs import Sm100Spec

pytestmark = [
    pytest.mark.skipif(sys.platform == "darwin", reason="nvdisasm is not made for macOS"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
WINDOW: dict[str, Any] = {"window_size": (127, 0), "learnable_sink": torch.zeros(16)}
CODES: dict[str, Any] = {"fp8_policy": "sm90"}
KINDS: dict[str, dict[str, Any]] = {
    "a cache of small pages, split": {"head_dim": 128, "heads": (16, 2), "page_size": 16},
    "the same, window and sinks": {
        "head_dim": 64, "heads": (16, 2), "page_size": 16, "options": WINDOW,
    },
    "groups of 3, partly used keys": {"head_dim": 128, "heads": (3, 1)},
    "the same, codes": {"head_dim": 128, "heads": (3, 1), "options": CODES},
    "codes and ones, groups of 3": {"head_dim": 64, "heads": (3, 1), "options": CODES},
    "codes, a cache of small pages, split": {
        "head_dim": 128, "heads": (16, 2), "page_size": 16, "options": CODES,
    },
}  # fmt: skip


def spec_of(
    head_dim: int,
    heads: tuple[int, int],
    page_size: int | None = None,
    options: dict[str, Any] | None = None,
) -> Sm100Spec:
    """Of a batch of two, whose keys are partly used."""
    many, few = (torch.empty(2, 128, n, head_dim).to(torch.float8_e4m3fn) for n in heads)
    scales = {f"{name}_descale": torch.ones(2, heads[1]) for name in "qkv"}
    call = {"q": many, "k": few, "v": few, "causal": True, **scales, **(options or {})}
    if "window_size" in call:
        del call["causal"]
    if page_size:
        pages = torch.empty(16, page_size, heads[1], head_dim).to(torch.float8_e4m3fn)
        table = torch.zeros(2, 8, dtype=torch.int32)
        call |= {"k": pages, "v": pages, "page_table": table, "num_splits": 2}
    used = torch.full((2,), 100, dtype=torch.int32)
    explained = fa.explain(fa.flash_attn_varlen_func, **call, seqused_k=used, impl="sim")
    spec = explained.plan.spec if explained.plan else None
    assert isinstance(spec, Sm100Spec), str(explained)
    return spec


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_spilt(kind: str) -> None:
    spec = spec_of(**KINDS[kind])
    assert spec.split == (spec.page_size is not None)
    cubin = (cache.keep(spec, "sm_100a", "simulator") / link.CUBIN).read_bytes()
    (blocks,) = sass.functions(sass.printed("nvdisasm", cubin=cubin)).values()
    assert any(sass.loops(blocks))
    assert sass.spills(blocks) == {}
