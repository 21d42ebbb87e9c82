"""A configuration of the cache kernel beside the emulation and the definition."""

from __future__ import annotations

import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.target import target_named
from tests.budget import (
    FP32_EPS,
    FP32_STEPS,
    assert_like_emulation,
    budget_of,
    check_within,
    rel_l2,
)
from tests.cached.configurations import Configuration
from tests.cached.launch import simulated


def check_configuration(case: Configuration, target: str) -> None:
    """On a simulated device: like the emulation, and within the budget."""
    call = case.arguments()
    described = fa.flash_attn_varlen_func.describe_call(**call, impl="sim")
    out, lse = simulated(described, target_named(target))
    budget = budget_of(described)
    check_within(budget, out, lse)
    emulated, _ = fa.flash_attn_varlen_func(**call, impl="tiled")
    assert_like_emulation(out, lse, emulated, budget, own_tiles=True)
    exact = {k: v for k, v in call.items() if k not in ("num_splits", "seqlen_k_per_split")}
    exact["out_dtype"] = torch.float32
    reference, reference_lse = fa.flash_attn_varlen_func(**exact, impl="reference")
    assert rel_l2(reference, budget.out) <= FP32_STEPS * FP32_EPS
    assert torch.equal(reference_lse.isneginf(), lse.isneginf())
