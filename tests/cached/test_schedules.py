"""No schedule finds a fault in the cache kernel, or other bits (as tests/sm100/test_schedules)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from tests.api.calls import ints, same_bits
from tests.data import normal, paged


@dataclass(frozen=True)
class Scene:
    """A call that has much of what is synchronised."""

    name: str
    arguments: Callable[[], dict[str, Any]]

    def __str__(self) -> str:
        return self.name


def _pages() -> dict[str, Any]:
    """Decode over pages of 3 in parts: queries in shared memory, four groups of warps."""
    x = normal(batch=2, seqlen_q=4, seqlen_k=300, nheads=8, nheads_kv=1, d=128, fmt="bf16",
               kv_fmt="e4m3", per="token_head")  # fmt: skip
    (k, table), (v, _) = (paged(t, 3) for t in (x.k, x.v))
    scales = {name: paged(s, 3)[0] for name, s in x.scales.items()}
    return {"q": x.q, "k_cache": k, "v_cache": v, **scales, "page_table": table, "causal": True,
            "cache_seqlens": ints(300, 77), "num_splits": 3}  # fmt: skip


def _extend() -> dict[str, Any]:
    """More rows than decode has: warps share a ring and meet at a barrier for each tile."""
    x = normal(batch=2, seqlen_q=70, seqlen_k=150, nheads=2, nheads_kv=1, d=96, fmt="fp16",
               kv_fmt="int8", per="head")  # fmt: skip
    return {"q": x.q, "k_cache": x.k, "v_cache": x.v, **x.scales, "window_size": (40, 5),
            "cache_seqlens": ints(150, 71), "learnable_sink": torch.linspace(0, 1, 2)}  # fmt: skip


def _chosen() -> dict[str, Any]:
    """Indices of chosen keys, two loads before the keys themselves."""
    x = normal(batch=2, seqlen_q=2, seqlen_k=200, nheads=6, nheads_kv=2, d=64, fmt="bf16",
               kv_fmt="e5m2", per="token_head")  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    selection = torch.randint(-20, 220, (2, 2, 170), generator=generator).int()
    return {"q": x.q, "k_cache": x.k, "v_cache": x.v, **x.scales, "selection": selection,
            "cache_seqlens": ints(200, 150), "num_splits": 1, "causal": True}  # fmt: skip


def _wide() -> dict[str, Any]:
    """V of 256: two groups of warps, which exchange their outputs in several rounds."""
    x = normal(batch=1, seqlen_q=3, seqlen_k=333, nheads=8, nheads_kv=1, d=256, fmt="bf16",
               kv_fmt="e4m3", per="tensor")  # fmt: skip
    return {"q": x.q, "k_cache": x.k, "v_cache": x.v, **x.scales, "num_splits": 1, "softcap": 5.0}


SCENES = [Scene(f.__name__.strip("_"), f) for f in (_pages, _extend, _chosen, _wide)]
RANDOM = 4


@lru_cache(maxsize=len(SCENES))
def plain(scene: Scene) -> tuple[dict[str, Any], Any]:
    """The call, and what impl='sim' gives for it."""
    call = scene.arguments() | {"return_softmax_lse": True}
    return call, fa.flash_attn_with_kvcache(**call, impl="sim")


SCHEDULES = [("adversarial", 0), *(("random", seed) for seed in range(RANDOM))]
FEW = SCHEDULES[:2]


@pytest.mark.parametrize(
    ("schedule", "seed"),
    [s if s in FEW else pytest.param(*s, marks=pytest.mark.slow) for s in SCHEDULES],
)
@pytest.mark.parametrize("scene", SCENES, ids=str)
def test_clean_and_the_same_bits_under_any_schedule(scene: Scene, schedule: str, seed: int) -> None:
    call, expected = plain(scene)
    found, runs = fa.simulate(fa.flash_attn_with_kvcache, **call, schedule=schedule, seed=seed)
    assert same_bits(found, expected)
    assert "cache_forward" in runs[0].kernel


@pytest.mark.parametrize("target", ["sm_80:4", "sm_90a:4"])
@pytest.mark.parametrize(
    "scene", [SCENES[0], *(pytest.param(s, marks=pytest.mark.slow) for s in SCENES[1:])], ids=str
)
def test_clean_on_other_architectures(scene: Scene, target: str) -> None:
    """Bits are those of the architecture's own tile and tensor core."""
    call, _ = plain(scene)
    results = [
        fa.simulate(fa.flash_attn_with_kvcache, **call, schedule=s, target=target)[0]
        for s in ("round_robin", "adversarial")
    ]
    assert same_bits(*results)
