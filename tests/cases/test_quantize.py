"""Cases 13, 14, 18, 29: codes are the nearest ones and saturate; scales come from the data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS, Format, saturating_cast
from flash_attn_fp8.quantization import ZERO_DESCALE
from tests.budget import rel_l2
from tests.cases import limits
from tests.cases.arrange import CACHED_MIXES, Question
from tests.cases.exact import attention
from tests.cases.limits import assert_noise

CODES = [FORMATS[name] for name in ("e4m3", "e5m2", "int8")]
SOURCES = (torch.float32, torch.bfloat16, torch.float16)
PER = ("token_head", "batch_head", "head", "tensor")

fmts = pytest.mark.parametrize("fmt", CODES, ids=lambda fmt: fmt.name)
sources = pytest.mark.parametrize("source", SOURCES, ids=str)
granularity = pytest.mark.parametrize("per", PER)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def step_of(q: fa.Quantized) -> Tensor:
    """The scale of each element, in the shape of the codes."""
    return q._replace(values=torch.ones(q.values.shape)).dequantize().double()


def finite_codes(fmt: Format) -> Tensor:
    """Every finite value of a format, ascending, without -0."""
    codes = torch.arange(256).to(torch.uint8).view(fmt.dtype).double()
    return codes[codes.isfinite() & (codes.abs() <= fmt.max)].unique()


# ------------------------------------------------------------------------------------ case 13


def test_case_13_int8_rounds_to_nearest() -> None:
    """Case 13: the published row, whose scale is 1: no code is cut toward zero."""
    x = torch.zeros(1, 1, 1, 128)
    x[..., :6] = torch.tensor([127, 0.6, 1.6, -0.6, -1.6, 126.7])
    q = fa.quantize(x, dtype=torch.int8)
    assert float(q.descale) == 1.0
    assert q.values[0, 0, 0, :7].tolist() == [127, 1, 2, -1, -2, 127, 0]


@granularity
@sources
def test_case_13_int8_error(per: str, source: torch.dtype) -> None:
    """Case 13: each element within half a step, and no bias toward zero over 4096 rows."""
    x = normal(1, 4096, 1, 128).to(source)
    q = fa.quantize(x, dtype=torch.int8, per=per)
    true, got = x.double(), q.dequantize().double()
    slack = limits.CASE_13_STEP_SLACK * true.abs().amax(-1, keepdim=True)
    assert bool(((got - true).abs() <= step_of(q) / 2 + slack).all())
    slope = float((true * got).sum() / (true * true).sum())
    assert abs(slope - 1) <= limits.CASE_13_SLOPE_ABS
    if per == "token_head":
        expected = limits.CASE_18_REL_RMS["int8", False]
        assert abs(rel_l2(got, true) / expected - 1) <= limits.CASE_18_REL


@fmts
@granularity
def test_case_13_nearest_code(fmt: Format, per: str) -> None:
    """Case 13's kind: in every format no code is nearer than the one that was chosen."""
    x = normal(2, 50, 2, 16)
    q = fa.quantize(x, dtype=fmt.dtype, per=per)
    steps, codes = x.double() / step_of(q), finite_codes(fmt)
    nearest = (steps[..., None] - codes).abs().amin(-1)
    chosen = (steps - q.values.double()).abs()
    # A tie, or what one fp32 division may move across one.
    assert bool((chosen <= nearest * (1 + limits.CASE_13_STEP_SLACK) + steps.abs() * 2**-23).all())


# ------------------------------------------------------------------------------------ case 14

BEYOND = {"e4m3": (0x7E, 0xFE), "e5m2": (0x7B, 0xFB), "int8": (0x7F, 0x81)}


@fmts
def test_case_14_saturation(fmt: Format) -> None:
    """Case 14: under a given scale of 1, what is too large becomes the largest code, never NaN."""
    for size in (fmt.max * 1.01, 1e4, 65504.0, 3e38, math.inf):
        if size <= fmt.max:
            continue
        codes = saturating_cast(torch.tensor([size, -size]), fmt).view(torch.uint8)
        assert tuple(codes.tolist()) == BEYOND[fmt.name]


@pytest.mark.parametrize("fmt", CODES[:2], ids=lambda fmt: fmt.name)
def test_case_14_saturated_outputs(impl: str, fmt: Format) -> None:
    """Case 14: an fp8 output written with a given scale saturates too, on either side of 0."""
    q = torch.zeros(1, 1, 1, 8).to(fmt.dtype)
    v = torch.tensor([1.0, -1.0] * 4).to(fmt.dtype).reshape(1, 1, 1, 8)
    for scale in (None, 1.0):
        out, _ = fa.flash_attn_func(
            q, q, v, v_descale=torch.tensor(1e6), out_dtype=fmt.dtype, output_scale=scale, impl=impl
        )
        assert tuple(out.view(torch.uint8).flatten()[:2].tolist()) == BEYOND[fmt.name]


ROWS = {
    "zeros": torch.zeros(128),
    "one 1e4 among zeros": torch.tensor([1e4, *[0.0] * 127]),
    "65504 and 1e-7": torch.tensor([65504.0, *[1e-7] * 127]),
    "denormals": torch.full((128,), 1e-39),
    "smallest denormal": torch.full((128,), 1e-45),
    "largest": torch.tensor([torch.finfo(torch.float32).max] * 64 + [-1.0] * 64),
    "both ends": torch.tensor([torch.finfo(torch.float32).max, 1e-45] * 64),
    "minus zero": torch.full((128,), -0.0),
}


@fmts
@granularity
@sources
@pytest.mark.parametrize("name", ROWS)
def test_case_14_finite_in_finite_out(
    fmt: Format, per: str, source: torch.dtype, name: str
) -> None:
    """Case 14: no finite row gives a non-finite code, scale or value, nor a scale of 0."""
    x = ROWS[name].to(source)
    if not torch.isfinite(x).all():  # beyond the source's own range
        x = x.clamp(-torch.finfo(source).max, torch.finfo(source).max)
    q = fa.quantize(x.reshape(1, 1, 1, 128), dtype=fmt.dtype, per=per)
    assert torch.isfinite(q.values.float()).all()
    assert torch.isfinite(q.descale).all()
    assert (q.descale > 0).all()
    assert torch.isfinite(q.dequantize()).all()
    if not x.any():
        assert not q.dequantize().any()


@fmts
def test_case_14_rows_in_attention(impl: str, fmt: Format) -> None:
    """Case 14: zero rows, huge rows and denormal rows side by side stay finite in a cache."""
    rows = torch.stack([ROWS[n] for n in ("zeros", "65504 and 1e-7", "denormals", "minus zero")])
    k = fa.quantize(rows.reshape(1, 4, 1, 128), dtype=fmt.dtype)
    q = torch.full((1, 2, 1, 128), 1e-3).bfloat16()
    scales = {"k_descale": k.descale, "v_descale": k.descale}
    out, lse = fa.flash_attn_func(
        q, k.values, k.values, **scales, return_lse=True, out_dtype=torch.float32, impl=impl
    )
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@fmts
def test_case_14_smoothing_stays_finite(fmt: Format) -> None:
    """Case 14's kind: constant channels, which smoothing empties, get a usable scale."""
    x = torch.full((1, 8, 1, 128), 65504.0)
    q = fa.quantize(x, dtype=fmt.dtype, smooth=True)
    assert torch.equal(q.descale, torch.full_like(q.descale, ZERO_DESCALE))
    assert torch.equal(q.dequantize(), x)


# ------------------------------------------------------------------------------------ case 18


@pytest.mark.parametrize(("name", "outlier"), limits.CASE_18_REL_RMS, ids=str)
def test_case_18_outlier_channel(name: str, outlier: bool) -> None:
    """Case 18: the published errors of rows without and with a channel 100 times the rest."""
    x = normal(1, 4096, 1, 128)
    others = torch.arange(128) != 3
    if outlier:
        x[..., 3] *= 100
    q = fa.quantize(x, dtype=FORMATS[name].dtype, per="token_head")
    error = rel_l2(q.dequantize()[..., others], x[..., others])
    assert abs(error / limits.CASE_18_REL_RMS[name, outlier] - 1) <= limits.CASE_18_REL


def test_case_18_is_documented() -> None:
    """Case 18: the documentation says which format suits which data."""
    about_dtype = (fa.quantize.__doc__ or "").partition("dtype:")[2].partition("per:")[0]
    assert "outlier" in about_dtype
    assert all(fmt.name in about_dtype for fmt in CODES)


def test_case_18_smoothing_cures_a_constant_channel() -> None:
    """Case 18's kind: an outlier that all tokens share goes with the mean, and int8 is fine."""
    x = normal(1, 4096, 1, 128)
    others = torch.arange(128) != 3
    x[..., 3] += 100
    q = fa.quantize(x, dtype=torch.int8, smooth=True)
    error = rel_l2(q.dequantize()[..., others], x[..., others])
    assert abs(error / limits.CASE_18_REL_RMS["int8", False] - 1) <= limits.CASE_18_REL


# ------------------------------------------------------------------------------------ case 29


@fmts
@pytest.mark.parametrize("d", [96, 40, 72, 80, 136])
@pytest.mark.parametrize("packed", [False, True], ids=["batched", "packed"])
def test_case_29_scale_of_the_real_elements(fmt: Format, d: int, packed: bool) -> None:
    """Case 29: a row of odd size in [3, 4]: scale = amax / max of its own elements, symmetric."""
    x = 3 + torch.rand(2, 33, 2, d, generator=torch.Generator().manual_seed(d))
    q = fa.quantize(x.flatten(0, 1) if packed else x, dtype=fmt.dtype)
    amax = x.abs().amax(-1)
    assert torch.equal(q.descale.reshape(amax.shape), amax / fmt.max)
    error = (q.dequantize().reshape(x.shape) - x).abs()
    if fmt.name == "int8":
        half_step = amax[..., None] / fmt.max / 2
        assert bool((error <= half_step + limits.CASE_13_STEP_SLACK * amax[..., None]).all())
    # The top quarter of the range, where all of it lies: symmetric codes waste no zero point.
    assert bool((q.values.float() >= fmt.max / 2).all())


def test_case_29_attention_at_96(impl: str, layout: str) -> None:
    """Case 29: the same rows through attention at D = 96, against what was quantised."""
    for mix in CACHED_MIXES[2:]:
        k, v = (fa.quantize(3 + torch.rand(2, 70, 2, 96), dtype=mix.kv) for _ in "kv")
        scales = {"k_descale": k.descale, "v_descale": v.descale}
        x = Question(normal(2, 3, 4, 96).to(mix.q), k.values, v.values, scales)
        answer = x.ask(layout, impl=impl)
        assert_noise(answer.out, answer.lse, attention(x.q, x.k, x.v, scales=scales), mix.p_name)
