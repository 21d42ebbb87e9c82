"""P as codes without an exponential: the scale that they have, where it does not cancel."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.reference.tiled import code_of
from tests.budget import FP32_EPS, FP32_STEPS, KERNEL_LSE_ABS, rel_l2
from tests.sm90.emulation import emulated

FP8 = ("e4m3", "e5m2")
ROW_SUMS = ("quantized", "exact")
TARGETS = ("sm_90a:2", "sm_100a:2")


def _octaves(fmt: str) -> Tensor:
    """Biased logarithms of normal numbers, evenly spread over two octaves, none between codes."""
    middle = FORMATS[fmt].exponent_bias
    return middle + (torch.arange(1 << 14, dtype=torch.float64) + 0.5) / (1 << 13)


@pytest.mark.parametrize("fmt", FP8)
def test_the_mean_excess_of_a_code(fmt: str) -> None:
    policy = fa.policy_for(fmt).replace(exp2="code")
    octaves = _octaves(fmt)
    decoded = code_of(octaves, policy.format, curved=False).double()
    mean = float((decoded / torch.exp2(octaves - policy.format.exponent_bias)).mean())
    assert abs(math.log2(mean) - policy.code_excess_log2) <= FP32_STEPS * FP32_EPS
    assert policy.code_excess_log2 > 0
    assert policy.replace(exp2="exact").code_excess_log2 == 0
    assert policy.replace(exp2="code_quadratic").code_excess_log2 == 0


@pytest.mark.parametrize("fmt", FP8)
def test_a_code_is_the_nearest_integer(fmt: str) -> None:
    """From 0 to the largest, ties to even; 0 below, for a masked key, too; NaN stays NaN."""
    f = FORMATS[fmt]
    largest = int(torch.tensor(f.max).to(f.dtype).view(torch.uint8))
    codes = torch.arange(-9, largest + 9, dtype=torch.float64)
    for off in (0.0, 0.49, -0.49):
        found = code_of((codes + off) / 2**f.mantissa_bits, f, curved=False).view(torch.uint8)
        assert torch.equal(found, codes.clamp(0, largest).to(torch.uint8))
    ties = code_of((torch.arange(4) + 0.5) / 2**f.mantissa_bits, f, curved=False)
    assert ties.view(torch.uint8).tolist() == [0, 2, 2, 4]
    odd = code_of(torch.tensor([-math.inf, math.nan]), f, curved=False).float()
    assert odd[0] == 0
    assert odd[1].isnan()


@pytest.mark.parametrize("accumulator", ["fp32", "sm90_fp8"])
@pytest.mark.parametrize("row_sum", ROW_SUMS)
@pytest.mark.parametrize("fmt", FP8)
def test_what_does_not_cancel_has_the_right_scale(fmt: str, row_sum: str, accumulator: str) -> None:
    """A sink of half the mass, V = 1: nearer to the truth than to what no correction would give."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 1, 32, generator=g) for n in (64, 2048))
    x = [t.to(FORMATS[fmt].dtype) for t in (q, k, torch.ones_like(k))]
    policy = fa.policy_for(fmt).replace(exp2="code", row_sum=row_sum)
    sink = torch.tensor([math.log(2048) + 0.5])
    call = dict(out_dtype=torch.float32, return_lse=True)
    out, lse = emulated(fa.flash_attn_func, *x, fp8_policy=policy, learnable_sink=sink,
                        accumulator=accumulator, **call)  # fmt: skip
    exact, exact_lse = fa.flash_attn_func(*x, learnable_sink=sink, impl="reference", **call)
    excess = 2.0**policy.code_excess_log2
    # P V is too large by the excess; its normaliser would be in part, or not at all.
    uncorrected = excess * exact
    if row_sum == "quantized":
        uncorrected = uncorrected / (1 + (excess - 1) * exact)
    assert 10 * rel_l2(out, exact) < rel_l2(uncorrected, exact)
    if accumulator == "fp32":
        assert float((lse - exact_lse).abs().max()) <= KERNEL_LSE_ABS


@pytest.mark.parametrize("exp2", ["code", "code_quadratic"])
@pytest.mark.parametrize("fmt", FP8)
def test_splits_of_codes_are_one(fmt: str, exp2: str) -> None:
    """Parts are merged by the exact sums: V = 1 stays 1."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, n, 1, 32, generator=g) for n in (16, 600))
    x = [t.to(FORMATS[fmt].dtype) for t in (q, k, torch.ones_like(k))]
    policy = fa.policy_for(fmt).replace(exp2=exp2)
    call = dict(out_dtype=torch.float32, return_lse=True)
    # Not Hopper's accumulator: what it does to a score is no business of a merge.
    out, lse = emulated(fa.flash_attn_func, *x, fp8_policy=policy, num_splits=3,
                        accumulator="fp32", **call)  # fmt: skip
    _, exact_lse = fa.flash_attn_func(*x, impl="reference", **call)
    assert float((out - 1).abs().max()) <= FP32_STEPS * FP32_EPS
    assert float((lse - exact_lse).abs().max()) <= KERNEL_LSE_ABS


@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_code_is_a_number(target: str) -> None:
    """Of a maximum that lags by all that it may: half a code more would be NaN."""
    q, k = torch.zeros(1, 64, 1, 64), torch.zeros(1, 256, 1, 64)
    q[..., :2] = torch.tensor([16.0, 1.0])
    for key, score in ((200, 244), (5, 246)):
        k[0, key, 0, :2] = torch.tensor([float(score // 16), float(score % 16)])
    q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, torch.ones(1, 256, 1, 64)))
    (out, _), _ = fa.simulate(
        fa.flash_attn_func, q8, k8, v8, softmax_scale=0.2741946578, target=target,
        fp8_policy=fa.Fp8Policy("e4m3", 8, 0.75, exp2="code"),
    )  # fmt: skip
    assert torch.equal(out, torch.ones_like(out))


@pytest.mark.parametrize("target", TARGETS)
def test_rounding_of_large_scores_makes_no_code_too_large(target: str) -> None:
    """Of millions of octaves, where fp32 has quarters: a code above the largest would be NaN."""
    largest = FORMATS["e4m3"].max
    q, k = (torch.full((1, n, 1, 128), largest).to(torch.float8_e4m3fn) for n in (64, 256))
    v = torch.ones_like(k.float()).to(k.dtype)
    policy = fa.policy_for("e4m3", "sm90")
    (out, _), _ = fa.simulate(fa.flash_attn_func, q, k, v, target=target, fp8_policy=policy)
    assert torch.equal(out, torch.ones_like(out))
