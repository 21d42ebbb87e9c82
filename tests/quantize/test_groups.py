"""Which values share a scale, in every layout: codes and scales give the tensor back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.packed import rows_in_use, sequence_of_rows, spread
from tests.budget import assert_within_budget
from tests.data import paged

PER = ("token_head", "batch_head", "head", "tensor")
LAYOUTS = ("dense", "packed", "paged")
HEADS, HEAD_DIM, PAGE = 6, 16, 8
LENGTHS = (5, 0, 9, 2)  # an empty sequence between others
EDGES = [0, 5, 5, 14, 16]
E4M3_MAX = 448.0

granularity = pytest.mark.parametrize("per", PER)
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def uneven(*shape: int) -> Tensor:
    """Rows whose sizes differ by orders of magnitude: a scale from elsewhere is far off."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g)
    return x * 10 ** torch.empty(*shape[:-1], 1).uniform_(-3, 3, generator=g)


def laid_out(layout: str) -> Tensor:
    if layout == "packed":
        return uneven(sum(LENGTHS), HEADS, HEAD_DIM)
    return uneven(4, PAGE if layout == "paged" else 9, HEADS, HEAD_DIM)


def groups(layout: str, per: str, heads: int) -> Tensor:
    """A number for each (row, head) of a layout, equal where the scale is shared."""
    x = laid_out(layout)
    rows = x[..., 0, 0].numel()
    row = torch.arange(rows)
    if layout == "packed":
        sequence = torch.repeat_interleave(torch.tensor(LENGTHS))
    else:
        sequence = row // x.shape[1]
    head = torch.arange(HEADS) // (HEADS // heads)
    of_row = {"token_head": row, "batch_head": sequence}.get(per, torch.zeros_like(row))
    number = of_row[:, None] * heads + (0 if per == "tensor" else head)
    return number.expand(rows, HEADS).reshape(x.shape[:-1])


def quantized(layout: str, per: str, nheads_kv: int | None = None, **kwargs) -> fa.Quantized:
    if layout == "packed" and per == "batch_head":
        kwargs["cu_seqlens"] = ints(*EDGES)
    return fa.quantize(laid_out(layout), per=per, nheads_kv=nheads_kv, **kwargs)


CASES = [(per, None) for per in PER] + [(per, n) for per in PER[:-1] for n in (1, 2, HEADS)]


@pytest.mark.parametrize(("per", "nheads_kv"), CASES)
@layouts
def test_scales_are_those_of_their_group(layout: str, per: str, nheads_kv: int | None) -> None:
    """Each (row, head) is scaled by the largest magnitude of its group, found by brute force."""
    x, codes = laid_out(layout), quantized(layout, per, nheads_kv)
    group = groups(layout, per, nheads_kv or HEADS)
    size = x.abs().amax(-1)
    expected = torch.stack(
        [size[group == g].amax() / E4M3_MAX for g in group.flatten().tolist()]
    ).reshape(group.shape)
    scale = spread(codes.descale, codes.values, codes.cu_seqlens)
    assert torch.equal(scale.expand(*x.shape[:-1], 1)[..., 0], expected)
    assert torch.equal(codes.dequantize(), codes.values.float() * expected[..., None])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@granularity
@layouts
@pytest.mark.parametrize("smooth", [False, True])
def test_codes_give_the_tensor_back(
    layout: str, per: str, dtype: torch.dtype, smooth: bool
) -> None:
    """Every value comes back to within half a step at its group's largest."""
    x = laid_out(layout)
    kwargs = {"cu_seqlens": ints(*EDGES)} if layout == "packed" and smooth else {}
    codes = quantized(layout, per, dtype=dtype, smooth=smooth, **kwargs)
    largest = torch.finfo(dtype).max if dtype.is_floating_point else 127
    step = spread(codes.descale, codes.values, codes.cu_seqlens) * largest
    half = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3, torch.int8: 1 / 254}[dtype]
    fp32 = 2**-22 * (x.abs() + step)
    assert bool(((codes.dequantize() - x).abs() <= step * half + fp32).all())


@pytest.mark.parametrize(("per", "wanted"), [("head", (2,)), ("batch_head", (4, 2))])
def test_shapes_under_grouped_heads(per: str, wanted: tuple[int, ...]) -> None:
    assert quantized("packed", per, nheads_kv=2).descale.shape == wanted


def test_a_packed_scale_without_bounds_is_refused() -> None:
    codes = quantized("packed", "batch_head")._replace(cu_seqlens=None)
    with pytest.raises(fa.InvalidArguments, match="give the cu_seqlens"):
        codes.dequantize()


@granularity
def test_rows_outside_every_sequence_are_not_read(per: str) -> None:
    """Rows before the first and past the last sequence: no influence, and 0 in the result."""
    x = laid_out("packed")
    stray = torch.full((3, HEADS, HEAD_DIM), torch.nan)
    stray[1:] = 1e30
    surrounded = torch.cat([stray, x, stray])
    kwargs = dict(per=per, smooth=True, dtype=torch.int8)
    alone = fa.quantize(x, cu_seqlens=ints(*EDGES), **kwargs)
    found = fa.quantize(surrounded, cu_seqlens=ints(*EDGES) + 3, **kwargs)
    assert torch.equal(found.values[3:-3], alone.values)
    assert torch.equal(found.mean, alone.mean)
    back = found.dequantize()
    assert torch.equal(back[3:-3], alone.dequantize())
    assert not back[:3].any()
    assert not back[-3:].any()


def test_an_empty_batch_is_legal() -> None:
    codes = fa.quantize(torch.empty(0, 2, 8), per="batch_head", smooth=True, cu_seqlens=ints(0))
    assert codes.descale.shape == (0, 2)
    assert codes.dequantize().shape == (0, 2, 8)


def test_rows_and_sequences() -> None:
    """Empty sequences own nothing; rows outside go with a neighbour and are told apart."""
    cu_seqlens = ints(1, 1, 3, 3, 4, 4)
    assert sequence_of_rows(cu_seqlens, 6).tolist() == [0, 1, 1, 3, 4, 4]
    assert rows_in_use(cu_seqlens, 6).tolist() == [False, True, True, True, False, False]


# ------------------------------------------------------------------------- one scale a KV head


@pytest.mark.parametrize("per", ["token_head", "batch_head", "head"])
def test_grouped_scales_of_q_feed_attention(impl: str, per: str) -> None:
    """q_descale of (.., nheads_kv) is what the functions take: right, and not the finer one."""
    q, k = uneven(2, 20, 6, HEAD_DIM), uneven(2, 30, 2, HEAD_DIM).clamp(-1, 1)
    q8, k8 = fa.quantize(q, per=per, nheads_kv=2), fa.quantize(k, per="batch_head")
    call = dict(q_descale=q8.descale, k_descale=k8.descale, causal=True, return_lse=True)
    out, lse = fa.flash_attn_func(q8.values, k8.values, k8.values, **call, impl=impl)
    # The same real numbers with one scale a query head: the functions' own finer form.
    finer = call | {"q_descale": q8.descale.repeat_interleave(3, -1)}
    want, want_lse = fa.flash_attn_func(q8.values, k8.values, k8.values, **finer, impl=impl)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    described = fa.flash_attn_func.describe_call(q8.values, k8.values, k8.values, **call)
    assert described.operands.q_descale.shape[-1] == 2
    assert_within_budget(described, out, lse)


def test_grouped_scales_of_packed_q_feed_attention(impl: str) -> None:
    """(batch, nheads_kv) of a packed q gives what its sequences give alone."""
    q, k = uneven(16, 6, HEAD_DIM), uneven(16, 2, HEAD_DIM).clamp(-1, 1)
    bounds = ints(0, 5, 16)
    q8 = fa.quantize(q, per="batch_head", nheads_kv=2, cu_seqlens=bounds)
    k8 = fa.quantize(k, per="head")
    kv = dict(k_descale=k8.descale, v_descale=k8.descale, impl=impl)
    out, _ = fa.flash_attn_varlen_func(
        q8.values, k8.values, k8.values, q_descale=q8.descale,
        cu_seqlens_q=bounds, cu_seqlens_k=bounds, **kv,
    )  # fmt: skip
    for a, b in ((0, 5), (5, 16)):
        alone = fa.quantize(q[None, a:b], per="batch_head", nheads_kv=2)
        k_alone = k8.values[None, a:b]
        want, _ = fa.flash_attn_func(alone.values, k_alone, k_alone, q_descale=alone.descale, **kv)
        assert torch.equal(out[a:b], want[0])


def test_paged_pages_have_their_own_scale_by_token() -> None:
    """A cache quantised by token and then scattered equals one scattered and then quantised."""
    x = uneven(2, 24, HEADS, HEAD_DIM)
    pool, table = paged(x, PAGE)
    pool = pool.nan_to_num(0)
    codes, scattered = fa.quantize(x), fa.quantize(pool)
    page, slot = table[:, torch.arange(24) // PAGE].long(), torch.arange(24) % PAGE
    assert torch.equal(scattered.descale[page, slot], codes.descale)
    assert torch.equal(scattered.dequantize()[page, slot], codes.dequantize())
