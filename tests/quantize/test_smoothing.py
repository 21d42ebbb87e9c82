"""quantize(smooth=True): the mean of finite values, exactly summed; NaN and infinity stay alone."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_attn_fp8 as fa

MANY = settings(deadline=None, derandomize=True, database=None, max_examples=150)
LARGEST = torch.finfo(torch.float32).max
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ANY = st.floats(width=32)


def one_channel(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)


def mean_of(x: Tensor, **kwargs) -> Tensor:
    mean = fa.quantize(x, smooth=True, **kwargs).mean
    assert mean is not None
    return mean


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_a_value_without_a_mean_stays_alone(dtype: torch.dtype, bad: float) -> None:
    """The other tokens of its channel come back as if it were not there."""
    x = torch.randn(2, 16, 3, 8, generator=torch.Generator().manual_seed(0)) + 3
    broken = x.clone()
    broken[1, 5, 2, 4] = bad
    found = fa.quantize(broken, dtype=dtype, smooth=True)
    others = torch.ones(16, dtype=torch.bool)
    others[5] = False
    assert bool(found.mean.isfinite().all())
    want = fa.quantize(x[:, others], dtype=dtype, smooth=True)
    assert torch.equal(found.mean[1, 0, 2, 4], want.mean[1, 0, 2, 4])
    assert bool(found.dequantize()[:, others].isfinite().all())
    assert torch.equal(
        found.dequantize()[0], fa.quantize(x, dtype=dtype, smooth=True).dequantize()[0]
    )
    if math.isnan(bad):
        assert bool(found.dequantize()[1, 5, 2, 4].isnan())
    else:
        largest = torch.finfo(dtype).max if dtype.is_floating_point else 127
        assert float(found.values[1, 5, 2, 4]) == math.copysign(largest, bad)


@MANY
@given(st.lists(ANY, min_size=1, max_size=40))
def test_the_mean_is_that_of_the_finite_values(values: list[float]) -> None:
    """To half an ulp of fp32 beyond what the summing grid, 2**-45 of the largest, leaves."""
    finite = [Fraction(v) for v in values if math.isfinite(v)]
    exact = sum(finite, Fraction(0)) / max(1, len(finite))
    found = float(mean_of(one_channel(values)))
    largest = max((abs(v) for v in finite), default=Fraction(0))
    ulp = Fraction(math.ulp(float(exact)) * 2.0**29 if exact else 0)
    subnormal = Fraction(2) ** -149
    bound = ulp / 2 + subnormal / 2 + largest * Fraction(2) ** -45
    assert abs(Fraction(found) - exact) <= bound


@MANY
@given(st.lists(ANY, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_the_order_of_tokens_does_not_show(values: list[float], random: Random) -> None:
    """What a device's own order of additions would give: equal bits."""
    shuffled = random.sample(values, len(values))
    first, second = mean_of(one_channel(values)), mean_of(one_channel(shuffled))
    assert torch.equal(first, second)


@pytest.mark.parametrize("values", [(2.0**60, 1.0, -(2.0**60)), (1.0, 2.0**-54, 2.0**-54, -1.0)])
def test_no_order_of_tokens_shows(values: tuple[float, ...]) -> None:
    """Sums that fp64 alone gives differently in different orders."""
    found = {float(mean_of(one_channel(list(order)))) for order in permutations(values)}
    assert len(found) == 1


@MANY
@given(st.lists(FINITE, min_size=1, max_size=40))
def test_finite_stays_finite(values: list[float]) -> None:
    codes = fa.quantize(one_channel(values), smooth=True)
    for part in (codes.values.float(), codes.descale, codes.mean):
        assert bool(part.isfinite().all())


@pytest.mark.parametrize("bounds", [None, [0, 4]], ids=["dense", "packed"])
def test_means_near_the_end_of_fp32(bounds: list[int] | None) -> None:
    """A sum past 3.4e38 is none of the mean's business; a difference past it saturates."""
    x = torch.tensor([LARGEST, LARGEST, LARGEST, -LARGEST]).reshape(1, 4, 1, 1)
    kwargs = {}
    if bounds:
        x, kwargs = x[0], {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    codes = fa.quantize(x, smooth=True, per="batch_head", **kwargs)
    assert float(codes.mean) == LARGEST / 2
    back = codes.dequantize().flatten()
    assert bool(back.isfinite().all())
    assert float(back[3]) == pytest.approx(-LARGEST / 2)


def test_bf16_means_are_correctly_rounded() -> None:
    """16-bit values near one another leave nothing to the grid: the mean is rounded once."""
    x = torch.randn(2, 999, 3, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = [math.fsum(c) / 999 for c in x.double().movedim(1, -1).reshape(-1, 999).tolist()]
    assert torch.equal(mean_of(x).flatten(), torch.tensor(exact, dtype=torch.float64).float())


def test_packed_means_are_those_of_their_sequences() -> None:
    x = torch.randn(12, 2, 8, generator=torch.Generator().manual_seed(2)) + 5
    edges = [0, 4, 4, 12]
    codes = fa.quantize(x, smooth=True, cu_seqlens=torch.tensor(edges, dtype=torch.int32))
    assert codes.mean.shape == (3, 2, 8)
    assert not codes.mean[1].any()
    for b in (0, 2):
        alone = fa.quantize(x[None, edges[b] : edges[b + 1]], smooth=True)
        assert torch.equal(codes.mean[b], alone.mean[0, 0])
        assert torch.equal(codes.dequantize()[edges[b] : edges[b + 1]], alone.dequantize()[0])


def test_lse_falls_by_the_mean_as_documented() -> None:
    """LSE of the raw k = LSE of the smoothed k + softmax_scale * (q . mean)."""
    g = torch.Generator().manual_seed(3)
    q = torch.randn(1, 7, 2, 16, generator=g).bfloat16()
    k = torch.randn(1, 30, 2, 16, generator=g) + 4
    codes = fa.quantize(k, smooth=True)
    cache = dict(k_descale=codes.descale, v_descale=codes.descale, impl="reference")
    _, low = fa.flash_attn_func(q, codes.values, codes.values, return_lse=True, **cache)
    _, raw = fa.flash_attn_func(
        q, codes.dequantize().bfloat16(), k.bfloat16(), return_lse=True, impl="reference"
    )
    shift = 16**-0.5 * torch.einsum("bqhd,bxhd->bhq", q.double(), codes.mean.double())
    error = (low + shift - raw).abs().max()
    largest = 16**-0.5 * (q.double().abs().sum(-1) * k.abs().max()).max()
    assert float(error) <= float(largest) * 2**-8  # k rounded to bf16 in `raw`
