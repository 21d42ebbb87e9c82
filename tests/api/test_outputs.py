"""What comes back: dtypes, scales of fp8 outputs, buffers of any strides, the lse's layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS, saturating_cast
from tests.api.calls import BASES, codes, dense, ints, packed, paged_pool, same_bits
from tests.budget import assert_within_budget
from tests.data import normal

OUT_FORMATS = ("bf16", "fp16", "fp32", "e4m3", "e5m2")
BUFFERS = {"dense": (2, 6, 4, 16), "packed": (12, 4, 16), "paged_pool": (2, 6, 4, 16)}


def _forward(base: str) -> Any:
    return fa.flash_attn_func if base == "dense" else fa.flash_attn_varlen_func


@pytest.mark.parametrize("name", OUT_FORMATS)
def test_out_dtype_rounds_the_same_result_once(name: str, impl: str) -> None:
    """fp32 is what the executor computed; any other dtype is its rounding to nearest."""
    exact, _ = fa.flash_attn_func(**dense(), out_dtype=torch.float32, impl=impl)
    out, _ = fa.flash_attn_func(**dense(), out_dtype=FORMATS[name].dtype, impl=impl)
    assert out.dtype == FORMATS[name].dtype
    assert same_bits(out, exact.to(FORMATS[name].dtype))


@pytest.mark.parametrize("name", OUT_FORMATS)
def test_every_out_dtype_is_within_budget(name: str) -> None:
    x = normal(seqlen_q=64, seqlen_k=96, d=32)
    arguments = {"q": x.q, "k": x.k, "v": x.v, **x.scales, "out_dtype": FORMATS[name].dtype}
    out, lse = fa.flash_attn_func(**arguments, return_lse=True)
    assert_within_budget(fa.flash_attn_func.describe_call(**arguments), out, lse)


@pytest.mark.parametrize(
    ("q_format", "kv_format", "expected"),
    [
        ("e4m3", "e4m3", torch.bfloat16),
        ("e5m2", "e5m2", torch.bfloat16),
        ("bf16", "bf16", torch.bfloat16),
        ("fp16", "fp16", torch.float16),
        ("fp16", "e4m3", torch.float16),
        ("bf16", "e5m2", torch.bfloat16),
    ],
)
def test_the_default_dtype_is_qs_or_bf16(
    q_format: str, kv_format: str, expected: torch.dtype
) -> None:
    x = normal(seqlen_q=3, seqlen_k=9, d=16, fmt=q_format, kv_fmt=kv_format, per=None)
    assert fa.flash_attn_func(x.q, x.k, x.v)[0].dtype == expected


# ------------------------------------------------------------------------------------ output_scale


def test_a_scale_alone_means_e4m3() -> None:
    assert fa.flash_attn_func(**dense(), output_scale=0.5)[0].dtype == torch.float8_e4m3fn
    buffer = torch.empty(2, 6, 4, 16, dtype=torch.float8_e5m2)
    out, _ = fa.flash_attn_func(**dense(), output_scale=0.5, out=buffer)
    assert out is buffer


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("scale", [0.25, 1.0, 3.0])
def test_stored_is_real_over_scale(name: str, scale: float, impl: str) -> None:
    fmt = FORMATS[name]
    real, _ = fa.flash_attn_func(**dense(), out_dtype=torch.float32, impl=impl)
    out, _ = fa.flash_attn_func(**dense(), output_scale=scale, out_dtype=fmt.dtype, impl=impl)
    if impl == "tiled":  # fp32 throughout; the reference divides in fp64
        assert same_bits(out, saturating_cast(real / scale, fmt))
    steps = _ordinal(out) - _ordinal(saturating_cast(real / scale, fmt))
    assert int(steps.abs().max()) <= 1
    assert int((steps != 0).sum()) <= out.numel() // 50


def _ordinal(x: Tensor) -> Tensor:
    """Codes of an fp8 format numbered in the order of their values."""
    code = x.view(torch.int8).int()
    return torch.where(code < 0, -(code & 0x7F), code)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_what_does_not_fit_saturates(name: str, impl: str) -> None:
    fmt = FORMATS[name]
    x = dense() | {"v": torch.full((2, 40, 2, 16), -448.0).to(torch.float8_e4m3fn)}
    out, _ = fa.flash_attn_func(**x, output_scale=2.0**-20, out_dtype=fmt.dtype, impl=impl)
    assert bool((out.float() == -fmt.max).all())


@pytest.mark.parametrize("form", ["number", "int", "scalar", "vector"])
def test_a_scale_may_be_a_number_or_one_element(form: str) -> None:
    scale = {"number": 2.0, "int": 2, "scalar": torch.tensor(2.0), "vector": torch.tensor([2.0])}
    out = fa.flash_attn_func(**dense(), output_scale=scale[form])
    assert same_bits(out, fa.flash_attn_func(**dense(), output_scale=2.0))


def test_nan_in_is_nan_out(impl: str) -> None:
    x = dense()
    x["v"].view(torch.uint8)[0, 3, 1, 5] = 0x7F
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        out, _ = fa.flash_attn_func(**x, out_dtype=dtype, impl=impl)
        hit = torch.zeros(2, 6, 4, 16, dtype=torch.bool)
        hit[0, :, 2:, 5] = True
        assert torch.equal(out.float().isnan(), hit)


# ----------------------------------------------------------------------------------------- buffers


def _strided(shape: tuple[int, ...], dtype: torch.dtype, order: tuple[int, ...]) -> Tensor:
    """A NaN-filled buffer with the dimensions in memory in `order` and gaps between its rows."""
    physical = [shape[i] for i in order]
    physical[-1] += 3 if order[-1] == len(shape) - 1 else 0
    whole = torch.full((physical[0] + 1, *physical[1:]), float("nan")).to(dtype)
    inverse = [order.index(i) for i in range(len(shape))]
    return whole.permute(inverse)[tuple(slice(n) for n in shape)]


@pytest.mark.parametrize("base", BUFFERS)
@pytest.mark.parametrize("name", ["bf16", "e4m3"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 1, 0, 3), (1, 0, 2, 3)], ids=str)
def test_out_may_have_any_strides(base: str, name: str, order: tuple[int, ...], impl: str) -> None:
    shape = BUFFERS[base]
    order = order if len(shape) == 4 else tuple(i - 1 for i in order if i)
    buffer = _strided(shape, FORMATS[name].dtype, order)
    assert not buffer.is_contiguous()
    around = buffer.untyped_storage().nbytes() // buffer.element_size() - buffer.numel()
    out, lse = _forward(base)(**BASES[base](), out=buffer, impl=impl)
    assert out is buffer
    assert lse is None
    wanted = _forward(base)(**BASES[base](), out_dtype=FORMATS[name].dtype, impl=impl)
    assert same_bits(out, wanted[0])
    everything = torch.empty(0, dtype=buffer.dtype).set_(buffer.untyped_storage())
    assert int(everything.float().isnan().sum()) == around, "written outside its elements"


@pytest.mark.parametrize("base", BUFFERS)
@pytest.mark.parametrize("flip", [False, True])
def test_lse_may_have_any_strides(base: str, flip: bool, impl: str) -> None:
    shape = (4, 12) if base == "packed" else (2, 4, 6)
    order = tuple(reversed(range(len(shape)))) if flip else tuple(range(len(shape)))
    buffer = _strided(shape, torch.float32, order)
    _, lse = _forward(base)(**BASES[base](), lse=buffer, impl=impl)
    assert lse is buffer
    _, wanted = _forward(base)(**BASES[base](), return_lse=True, impl=impl)
    assert same_bits(lse, wanted)


def test_both_buffers_are_what_is_returned() -> None:
    out, lse = torch.empty(2, 6, 4, 16, dtype=torch.half), torch.empty(2, 4, 6)
    got = fa.flash_attn_func(**dense(), out=out, lse=lse)
    assert got[0] is out
    assert got[1] is lse


def test_the_cache_function_writes_out_and_returns_it() -> None:
    out = torch.empty(2, 6, 4, 16, dtype=torch.bfloat16)
    assert fa.flash_attn_with_kvcache(**BASES["cache"](), out=out) is out
    assert same_bits(out, fa.flash_attn_with_kvcache(**BASES["cache"]()))


def test_combine_writes_out_in_any_dtype_and_strides() -> None:
    x = BASES["partials"]()
    buffer = _strided((2, 5, 4, 16), torch.bfloat16, (0, 2, 1, 3))
    out, lse = fa.flash_attn_combine(**x, out=buffer)
    assert out is buffer
    wanted, wanted_lse = fa.flash_attn_combine(**x, out_dtype=torch.bfloat16)
    assert same_bits((out, lse), (wanted, wanted_lse))


# ------------------------------------------------------------------------------ the lse and results


@pytest.mark.parametrize("base", BUFFERS)
def test_the_forward_returns_a_pair_always(base: str) -> None:
    run = _forward(base)
    out, lse = run(**BASES[base]())
    assert lse is None
    with_lse = run(**BASES[base](), return_lse=True)
    assert isinstance(with_lse, tuple)
    assert same_bits(with_lse[0], out)
    assert with_lse[1].dtype == torch.float32
    assert with_lse[1].shape == ((4, 12) if base == "packed" else (2, 4, 6))


def test_the_cache_function_returns_as_fa3() -> None:
    out = fa.flash_attn_with_kvcache(**BASES["cache"]())
    assert isinstance(out, Tensor)
    pair = fa.flash_attn_with_kvcache(**BASES["cache"](), return_softmax_lse=True)
    assert isinstance(pair, tuple)
    assert same_bits(pair[0], out)
    assert pair[1].shape == (2, 4, 6)


def test_combine_returns_a_pair_always() -> None:
    out, lse = fa.flash_attn_combine(**BASES["partials"]())
    assert (out.shape, lse.shape, lse.dtype) == ((2, 5, 4, 16), (2, 5, 4), torch.float32)
    assert fa.flash_attn_combine(**BASES["partials"](), return_lse=False)[1] is None


def test_the_lse_is_the_natural_logarithm_of_the_sum_of_exponentials() -> None:
    """q = 0: every score is 0, so that the sum counts keys."""
    x = dense() | {"q": torch.zeros(2, 6, 4, 16).to(torch.float8_e4m3fn)}
    _, lse = fa.flash_attn_varlen_func(
        **x, seqused_k=ints(40, 7), return_lse=True, impl="reference"
    )
    counts = torch.tensor([40.0, 7.0], dtype=torch.float64).log().float()
    assert same_bits(lse, counts[:, None, None].expand(2, 4, 6).contiguous())


@pytest.mark.parametrize("sink", [False, True])
def test_rows_without_keys_are_zero_and_their_lse_is_the_sinks(sink: bool, impl: str) -> None:
    logits = torch.tensor([0.5, -2.0, 3.0, 0.0]) if sink else None
    out, lse = fa.flash_attn_varlen_func(
        **dense(), seqused_k=ints(0, 3), causal=True, learnable_sink=logits, return_lse=True,
        impl=impl,
    )  # fmt: skip
    empty = torch.tensor([[True] * 6, [True] * 3 + [False] * 3])
    assert bool((out[empty] == 0).all())
    assert bool((out[~empty] != 0).any())
    rows = lse.transpose(1, 2)[empty]
    wanted = torch.full((4,), float("-inf")) if logits is None else logits
    if impl == "reference" or not sink:
        assert same_bits(rows, wanted.expand_as(rows).contiguous())
    assert torch.equal(rows.isneginf(), wanted.isneginf().expand_as(rows))


def test_rows_that_no_sequence_owns_are_zero(impl: str) -> None:
    x = packed() | {"cu_seqlens_q": ints(0, 3, 9)}
    buffer = torch.full((12, 4, 16), 7.0, dtype=torch.bfloat16)
    out, lse = fa.flash_attn_varlen_func(
        **x, seqused_q=ints(2, 6), out=buffer, return_lse=True, impl=impl
    )
    unowned = torch.tensor([2, 9, 10, 11])
    assert bool((out[unowned] == 0).all())
    assert bool(lse[:, unowned].isneginf().all())
    assert int(lse.isneginf().sum()) == 4 * len(unowned)


@pytest.mark.parametrize("shape", ["no batch", "no queries", "no keys"])
def test_empty_calls_have_empty_results(shape: str, impl: str) -> None:
    b, sq, sk = {"no batch": (0, 6, 40), "no queries": (2, 0, 40), "no keys": (2, 6, 0)}[shape]
    out, lse = fa.flash_attn_func(
        codes(b, sq, 4, 16), codes(b, sk, 2, 16), codes(b, sk, 2, 16), return_lse=True, impl=impl
    )
    assert (out.shape, lse.shape) == ((b, sq, 4, 16), (b, 4, sq))
    assert not bool(out.any())
    assert bool(lse.isneginf().all())


def test_paged_results_do_not_change_their_inputs() -> None:
    x = paged_pool()
    fa.flash_attn_varlen_func(**x, return_lse=True)
    assert all(same_bits(x[name], t) for name, t in paged_pool().items())
