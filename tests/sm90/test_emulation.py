"""The SM90 kernel, simulated, gives what the emulation of SM90's tensor cores gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.budget import (
    FP32_EPS,
    FP32_STEPS,
    KERNEL_REL_L2,
    assert_like_emulation,
    budget_of,
    rel_l2,
)
from tests.data import Inputs, normal
from tests.sm90.emulation import SM90, emulated

EXP2 = ("exact", "code")
SINK: dict[str, Any] = {"learnable_sink": torch.tensor([-1.0, 2.0])}


def inputs(fmt: str, d: int, **more: Any) -> Inputs:
    """Several tiles of rows and of keys, the last of each in part; P of far keys is 0."""
    return normal(**dict(batch=1, seqlen_q=150, seqlen_k=300, nheads=2, nheads_kv=1, d=d, fmt=fmt,
                         gain=2.0) | more)  # fmt: skip


def simulated(x: Inputs, **options: Any) -> tuple[Tensor, Tensor]:
    """What the kernel gives."""
    target = f"{SM90.arch}:{SM90.sm_count}"
    result, _ = fa.simulate(fa.flash_attn_func, x.q, x.k, x.v, target=target, **options, **x.scales)
    return result


@pytest.mark.parametrize("sink", [{}, SINK], ids=["", "sink"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("exp2", EXP2)
def test_the_kernel_is_emulated(exp2: str, d: int, causal: bool, sink: dict[str, Any]) -> None:
    x = inputs("e4m3", d)
    call = dict(fp8_policy=fa.policy_for("e4m3").replace(exp2=exp2), causal=causal, **sink)
    out, _ = simulated(x, **call)
    expected, _ = emulated(fa.flash_attn_func, x.q, x.k, x.v, **call, **x.scales)
    assert rel_l2(out, expected) <= KERNEL_REL_L2


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_codes_are_emulated_to_the_bit(fmt: str) -> None:
    """One code more or less would be seen in an fp32 output, as an exact accumulator is."""
    x = inputs(fmt, 64)
    policy = fa.policy_for(fmt).replace(exp2="code")
    call = dict(fp8_policy=policy, causal=True, out_dtype=torch.float32, **SINK)
    out, _ = simulated(x, **call)
    of_hopper, of_fp32 = (
        emulated(fa.flash_attn_func, x.q, x.k, x.v, accumulator=a, **call, **x.scales)[0]
        for a in ("sm90_fp8", "fp32")
    )
    assert rel_l2(out, of_hopper) <= FP32_STEPS * FP32_EPS
    assert rel_l2(out, of_fp32) > FP32_STEPS * FP32_EPS


@pytest.mark.parametrize("row_sum", ["exact", "quantized"])
@pytest.mark.parametrize("sink", [{}, SINK], ids=["", "sink"])
def test_lse_and_sums_of_exponentials(row_sum: str, sink: dict[str, Any]) -> None:
    """The LSE is the emulation's: Hopper's 13 bits of a score are in both, so not the exact one."""
    x = inputs("e4m3", 128)
    policy = fa.policy_for("e4m3").replace(row_sum=row_sum)
    call = dict(fp8_policy=policy, causal=True, return_lse=True, **sink)
    out, lse = simulated(x, **call)
    expected, expected_lse = emulated(fa.flash_attn_func, x.q, x.k, x.v, **call, **x.scales)
    described = fa.flash_attn_func.describe_call(x.q, x.k, x.v, **call, **x.scales)
    assert_like_emulation(out, lse, expected, budget_of(described), emulated_lse=expected_lse)
