"""P's codes without an exponential in the SM100 kernel, simulated: the emulation's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.kernels.sm100.geometry import TMEM_COLUMNS, Geometry
from flash_attn_fp8.specs import Sm100Spec
from tests.api.calls import same_bits
from tests.budget import (
    FP32_EPS,
    FP32_STEPS,
    KERNEL_LSE_ABS,
    KERNEL_REL_L2,
    assert_codes_within,
    budget_of,
    rel_l2,
)
from tests.data import Inputs, normal
from tests.sm100.configurations import CAUSAL, Configuration

SINK: dict[str, Any] = {"learnable_sink": torch.tensor([-1.0, 2.0])}
LSE: dict[str, Any] = {"return_lse": True}
SLOW = pytest.mark.slow
EXACT_SUM: dict[str, Any] = {"row_sum": "exact"}


def inputs(fmt: str, d: int, **more: Any) -> Inputs:
    """Several tiles of rows and of keys, the last of each in part; P of far keys is 0."""
    return normal(**dict(batch=1, seqlen_q=150, seqlen_k=300, nheads=2, nheads_kv=1, d=d, fmt=fmt,
                         gain=2.0) | more)  # fmt: skip


def codes(fmt: str, name: str = "default", **changes: Any) -> fa.Fp8Policy:
    return fa.policy_for(fmt, name).replace(exp2="code", **changes)


def both(x: Inputs, **call: Any) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of the kernel, and of the emulation."""
    call |= x.scales
    return [fa.flash_attn_func(x.q, x.k, x.v, impl=impl, **call) for impl in ("sim", "tiled")]


def geometry(x: Inputs, **call: Any) -> Geometry:
    plan = fa.explain(fa.flash_attn_func, x.q, x.k, x.v, impl="sim", **call, **x.scales).plan
    assert plan
    assert isinstance(plan.spec, Sm100Spec)
    return Geometry(plan.spec)


@pytest.mark.parametrize(
    ("fmt", "d", "options"),
    [
        ("e4m3", 64, {}),
        pytest.param("e5m2", 64, {**CAUSAL, **SINK}, marks=SLOW),
        ("e4m3", 96, CAUSAL),
        ("e4m3", 128, {}),
        ("e5m2", 128, {**CAUSAL, **LSE}),
        ("e4m3", 256, {**CAUSAL, **SINK, **LSE}),
    ],
)
def test_the_kernel_is_emulated(fmt: str, d: int, options: dict[str, Any]) -> None:
    x = inputs(fmt, d)
    call = dict(fp8_policy=codes(fmt), **options)
    (out, lse), (expected, _) = both(x, **call)
    assert rel_l2(out, expected) <= KERNEL_REL_L2
    if lse is not None:
        _, exact = fa.flash_attn_func(x.q, x.k, x.v, impl="reference", **options, **x.scales)
        assert float((lse - exact).abs().max()) <= KERNEL_LSE_ABS


@pytest.mark.parametrize(
    ("fmt", "d", "policy", "options"),
    [
        ("e4m3", 64, {}, CAUSAL),  # the sum is the tensor core's
        ("e5m2", 64, {}, SINK),
        ("e4m3", 128, EXACT_SUM, {**CAUSAL, **SINK}),
        pytest.param("e5m2", 128, EXACT_SUM, LSE, marks=SLOW),
        pytest.param("e4m3", 256, EXACT_SUM, {}, marks=SLOW),
    ],
)
def test_codes_are_emulated_to_the_bit(
    fmt: str, d: int, policy: dict[str, Any], options: dict[str, Any]
) -> None:
    """One code more or less would be seen in an fp32 output, also of a score next to a tie."""
    x = inputs(fmt, d, seed=1)
    call = dict(fp8_policy=codes(fmt, **policy), out_dtype=torch.float32, **options)
    (out, _), (expected, _) = both(x, **call)
    assert rel_l2(out, expected) <= FP32_STEPS * FP32_EPS


def test_splits_have_the_exact_lse() -> None:
    """Parts are merged by sums of exponentials; the first of them counts the sink."""
    x = inputs("e4m3", 64, seqlen_q=20)
    call = dict(num_splits=3, out_dtype=torch.float32, **LSE, **SINK)
    (out, lse), (expected, _) = both(x, fp8_policy=codes("e4m3"), **call)
    del call["num_splits"]
    _, exact = fa.flash_attn_func(x.q, x.k, x.v, impl="reference", **call, **x.scales)
    assert rel_l2(out, expected) <= KERNEL_REL_L2
    assert float((lse - exact).abs().max()) <= KERNEL_LSE_ABS


def test_where_the_tensor_core_sums_up() -> None:
    """Where tensor memory has columns for it, if nothing wants exponentials beside the codes."""

    def by_mma(d: int, policy: fa.Fp8Policy, **options: Any) -> bool:
        return geometry(inputs("e4m3", d), fp8_policy=policy, **options).sums_by_mma

    assert [by_mma(d, codes("e4m3")) for d in (64, 96, 128, 192)] == [True, True, False, False]
    widest = geometry(inputs("e4m3", 96), fp8_policy=codes("e4m3"))
    assert widest.sum_column(widest.q_stage) <= TMEM_COLUMNS
    assert not by_mma(64, fa.policy_for("e4m3"))
    assert not by_mma(64, codes("e4m3", **EXACT_SUM))
    assert not by_mma(64, codes("e4m3"), **LSE)
    assert not by_mma(64, codes("e4m3"), num_splits=2)


def test_quadratic_codes_are_the_emulations_alone() -> None:
    x, policy = inputs("e4m3", 64), codes("e4m3").replace(exp2="code_quadratic")
    explained = fa.explain(fa.flash_attn_func, x.q, x.k, x.v, impl="sim", fp8_policy=policy)
    assert "its kernel has no exp2='code_quadratic'" in str(explained)


@pytest.mark.parametrize("d", [64, pytest.param(128, marks=SLOW)])
def test_rows_without_keys_are_zero(d: int) -> None:
    """More rows than keys: those before the first key see none, with a sink and without."""
    x = inputs("e4m3", d, seqlen_q=200, seqlen_k=130)
    (out, _), (expected, _) = both(x, fp8_policy=codes("e4m3"), **CAUSAL, **SINK)
    assert bool((out[:, :70] == 0).all())
    assert rel_l2(out, expected) <= KERNEL_REL_L2


@pytest.mark.parametrize("d", [64, pytest.param(128, marks=SLOW)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_score_that_is_not_finite_makes_its_row_nan(value: float, d: int) -> None:
    """Other rows keep their bits: one whose score is -inf has no weight there."""
    random = torch.Generator().manual_seed(0)
    q, k = (torch.rand(1, n, 1, d, generator=random) + 0.5 for n in (4, 256))
    q[0, 1] = -q[0, 1]
    damaged = k.clone()
    damaged[0, 6, 0, 3] = value
    v = torch.ones_like(k)
    call = dict(impl="sim", fp8_policy=codes("e5m2"), out_dtype=torch.float32)
    out, _ = fa.flash_attn_func(*(x.to(torch.float8_e5m2) for x in (q, damaged, v)), **call)
    assert bool(out[0, [0, 2, 3]].isnan().all())
    assert bool(out[0, 1].isnan().all()) == math.isnan(value)
    if not math.isnan(value):
        assert torch.equal(out[0, 1], torch.ones_like(out[0, 1]))


# The tensor core's sums under packed and partly used rows: no LSE, which would have them elsewhere.
SUMMED = Configuration(
    "varlen, codes, ones columns, packed GQA of 3", heads=(3, 1), lengths=((130, 300), (40, 129)),
    options={**CAUSAL, "return_lse": False, "fp8_policy": codes("e4m3", "sm90")},
)  # fmt: skip


def test_clean_and_the_same_bits_under_schedules() -> None:
    arguments = SUMMED.arguments()
    results = [
        fa.simulate(fa.flash_attn_varlen_func, schedule=schedule, seed=0, **arguments)[0]
        for schedule in ("random", "adversarial")
    ]
    assert same_bits(*results)
    exact = arguments | {"fp8_policy": codes("e4m3", "sm90").replace(exp2="exact"), **LSE}
    budget = budget_of(fa.flash_attn_varlen_func.describe_call(**exact))
    emulated, _ = fa.flash_attn_varlen_func(**arguments, impl="tiled")
    assert rel_l2(results[0][0], emulated) <= KERNEL_REL_L2
    assert_codes_within(budget, results[0][0], budget.lse)
