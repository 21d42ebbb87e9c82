"""Cases 33, 49, 54, 56, 57, 59: any length, head ratio, head size and stride; none too small."""

from __future__ import annotations

import math
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS
from tests.cases import limits
from tests.cases.arrange import MIXES, Mix, Question, int32, nan_like, offsets
from tests.cases.exact import attention, mean_of_visible, visible
from tests.cases.limits import assert_bitwise, assert_near, assert_noise
from tests.data import one_hot_v, paged

E4M3 = MIXES[0]
FP32 = torch.float32

# ------------------------------------------------------------------------------------ case 33

NOTHING = ((2, 4, 0), (2, 0, 8), (0, 4, 8), (0, 0, 0), (2, 0, 0))


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), NOTHING, ids=str)
def test_case_33_nothing_to_attend(
    execution: dict[str, object], layout: str, mix: Mix, batch: int, seqlen_q: int, seqlen_k: int
) -> None:
    """Case 33: an empty batch, no queries or no keys: shapes and dtypes as ever, 0 and -inf."""
    q, k = torch.ones(batch, seqlen_q, 4, 64), torch.ones(batch, seqlen_k, 2, 64)
    answer = Question(*mix.cast(q, k, k[..., :32]), mix.ones).ask(layout, causal=True, **execution)
    packed = layout == "varlen"
    rows = (batch * seqlen_q,) if packed else (batch, seqlen_q)
    assert answer.raw_out.shape == (*rows, 4, 32)
    assert answer.raw_out.dtype == (mix.q if not FORMATS[mix.q_name].is_8bit else torch.bfloat16)
    assert answer.raw_lse.shape == ((4, *rows) if packed else (batch, 4, seqlen_q))
    assert answer.raw_lse.dtype == torch.float32
    assert not answer.raw_out.any()
    assert answer.raw_lse.isneginf().all()


@pytest.mark.parametrize("cu_seqlens", [[0], [0, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("keys", [0, 9])
def test_case_33_no_packed_rows(impl: str, mix: Mix, cu_seqlens: list[int], keys: int) -> None:
    """Case 33: total_q = 0, from no sequence or from empty ones, over packed or paged keys."""
    batch = len(cu_seqlens) - 1
    cu_q = int32(*cu_seqlens)
    q, k = torch.ones(0, 4, 64).to(mix.q), torch.ones(keys * batch, 2, 64).to(mix.kv)
    pool = torch.ones(3, 4, 2, 64).to(mix.kv)
    table = torch.zeros(batch, 3, dtype=torch.int32)
    options = {"cu_seqlens_q": cu_q, "return_lse": True, "impl": impl, **mix.ones}
    for more in (
        {"k": k, "v": k, "cu_seqlens_k": keys * torch.arange(batch + 1, dtype=torch.int32)},
        {"k": pool, "v": pool, "page_table": table, "seqused_k": cu_q[:-1] + keys},
    ):
        out, lse = fa.flash_attn_varlen_func(q, **more, **options)
        assert out.shape == (0, 4, 64)
        assert lse.shape == (4, 0)


# ------------------------------------------------------------------------------------ case 49

RATIOS = ((96, 8), (40, 4), (28, 4), (71, 1), (7, 7), (5, 1))


@pytest.mark.parametrize("heads", RATIOS, ids=lambda pair: f"{pair[0]}-over-{pair[1]}")
@pytest.mark.parametrize("mix", [MIXES[0], MIXES[1], MIXES[6]], ids=str)
def test_case_49_head_ratios(
    execution: dict[str, object], layout: str, mix: Mix, heads: tuple[int, int]
) -> None:
    """Case 49: query head h reads KV head h // (Hq / Hkv), whatever divides a tile."""
    nheads, nheads_kv = heads
    k = torch.zeros(1, 200, nheads_kv, 16)
    v = (torch.arange(nheads_kv).float() + 1)[:, None].expand(k.shape)
    owner = (torch.arange(nheads) // (nheads // nheads_kv) + 1).bfloat16()
    for seqlen_q in (1, 3, 17):
        x = Question(*mix.cast(torch.zeros(1, seqlen_q, nheads, 16), k, v), mix.ones)
        answer = x.ask(layout, causal=True, poisoned=True, out_dtype=torch.bfloat16, **execution)
        assert torch.equal(answer.out, owner[:, None].expand(answer.out.shape))
        count = torch.arange(200 - seqlen_q, 200).double() + 1
        assert_near(answer.lse, count.log().expand(answer.lse.shape), limits.EXACT_ABS)


def test_case_49_more_than_fits_at_once(impl: str) -> None:
    """Case 49's kind: so many heads and rows that any executor works through them in parts."""
    q, k = torch.zeros(1, 600, 128, 8), torch.zeros(1, 300, 8, 8)
    v = (torch.arange(8.0) + 1)[:, None].expand(k.shape)
    answer = Question(*E4M3.cast(q, k, v)).ask("dense", impl=impl)
    owner = (torch.arange(128) // 16 + 1).bfloat16()
    assert torch.equal(answer.out, owner[:, None].expand(answer.out.shape))
    assert_near(answer.lse, math.log(300), limits.EXACT_ABS)


@pytest.mark.parametrize("heads", [(4, 3), (3, 4), (0, 1), (1, 0)], ids=str)
def test_case_49_other_ratios_are_refused(impl: str, heads: tuple[int, int]) -> None:
    """Case 49's kind: a ratio that is no whole number is an error, not a wrong head."""
    q, k = (torch.ones(1, 4, n, 64).to(E4M3.q) for n in heads)
    with pytest.raises(ValueError, match=f"q has {heads[0]} heads and k, v have {heads[1]}"):
        fa.flash_attn_func(q, k, k, impl=impl)


# ------------------------------------------------------------------------------------ case 54


def mla(mix: Mix, seqlen_q: int, seqlen_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """D = 192, Dv = 128, 16 heads; q = 0 and a one-hot V."""
    q, k = torch.zeros(1, seqlen_q, 16, 192), torch.randn(1, seqlen_k, 16, 192)
    return mix.cast(q, k, one_hot_v(seqlen_k, 16, 128, FP32))


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(3, 7), (3, 99), (1, 300)])
def test_case_54_head_sizes_192_and_128(
    execution: dict[str, object], layout: str, mix: Mix, seqlen_q: int, seqlen_k: int
) -> None:
    """Case 54: every element of a given buffer is written, and is the mean of V."""
    x = Question(*mla(mix, seqlen_q, seqlen_k), mix.ones)
    answer = x.ask(layout, poisoned=True, **execution)
    out, lse = mean_of_visible(visible(seqlen_q, seqlen_k, seqlen_k), x.v[0, :, 0].float())
    assert answer.out.shape == (1, seqlen_q, 16, 128)
    assert_near(answer.out, out[None, :, None].expand(answer.out.shape), limits.EXACT_ABS)
    assert_near(answer.lse, lse.expand(answer.lse.shape), limits.EXACT_ABS)


@pytest.mark.parametrize(("d", "dv"), [(192, 128), (128, 192), (64, 256), (256, 8)])
def test_case_54_noise(impl: str, layout: str, mix: Mix, d: int, dv: int) -> None:
    """Case 54: normal data within case 1's limits, with the default scale 1 / sqrt(D)."""
    generator = torch.Generator().manual_seed(d)
    q, k, v = (
        torch.randn(2, n, 2, c, generator=generator) for n, c in ((9, d), (150, d), (150, dv))
    )
    x = mix.quantized(q, k, v)
    answer = x.ask(layout, impl=impl)
    exact = attention(x.q, x.k, x.v, scales=x.scales, softmax_scale=1 / math.sqrt(d))
    assert_noise(answer.out, answer.lse, exact, mix.p_name)


# ------------------------------------------------------------------------------------ case 56

HEAD_DIMS = (8, 16, 40, 64, 72, 80, 96, 128, 136, 192)


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_case_56_head_sizes(execution: dict[str, object], mix: Mix, d: int) -> None:
    """Case 56: output column c counts the keys j = c (mod D), and its neighbours stay untouched."""
    for seqlen in (1, 255, 257):
        q, k = torch.zeros(1, seqlen, 2, d), torch.zeros(1, seqlen, 1, d)
        x = Question(*mix.cast(q, k, one_hot_v(seqlen, 1, d, FP32)), mix.ones)
        guarded = torch.full((1, seqlen, 4, d + 16), math.nan)
        inner = guarded[:, :, 1:3, 8 : 8 + d]
        out, _ = fa.flash_attn_func(x.q, x.k, x.v, out=inner, **x.scales, **execution)
        assert out is inner
        count = torch.bincount(torch.arange(seqlen) % d, minlength=d)
        assert_near(out, (count / seqlen).expand(out.shape), limits.EXACT_ABS)
        inner.fill_(math.nan)
        assert guarded.isnan().all()


def test_case_56_other_head_sizes_are_refused(impl: str, layout: str, mix: Mix) -> None:
    """Case 56: any other head size is refused before anything is written, with the list."""
    good = torch.ones(1, 4, 2, 64)
    for d in (0, 1, 4, 12, 63, 100, 250, 257, 264, 512):
        bad = torch.ones(1, 4, 2, d)
        for name, operands in (("head_dim", (bad, bad, good)), ("head_dim_v", (good, good, bad))):
            x = Question(*mix.cast(*operands), mix.ones)
            with pytest.raises(ValueError, match=rf"{name}={d} .*multiple of 8 from 8 to 256: 8"):
                x.ask(layout, impl=impl)


# ------------------------------------------------------------------------------------ case 57


def transposed(x: Tensor) -> Tensor:
    """The same values in a (batch, heads, rows, d) tensor, seen as (batch, rows, heads, d)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def in_one_projection(x: Tensor) -> Tensor:
    """The same values as a slice of a wider last dimension."""
    wide = torch.zeros(*x.shape[:-1], 3 * x.shape[-1]).to(x.dtype)
    wide[..., x.shape[-1] : 2 * x.shape[-1]].copy_(x)
    return wide[..., x.shape[-1] : 2 * x.shape[-1]]


def every_other_row(x: Tensor) -> Tensor:
    """The same values in the even rows of a tensor twice as long."""
    return x.repeat_interleave(2, dim=1)[:, ::2]


@pytest.mark.parametrize("d", [64, 128, 256])
def test_case_57_strided_operands(execution: dict[str, object], mix: Mix, d: int) -> None:
    """Case 57: views give the bits of contiguous copies: in, and into a strided output."""
    x = mix.quantized(*torch.randn(3, 2, 130, 4, d, generator=torch.Generator().manual_seed(d)))
    options = {"causal": True, "return_lse": True, **x.scales, **execution}
    expected = fa.flash_attn_func(x.q, x.k, x.v, **options)
    for view in (transposed, in_one_projection, every_other_row):
        seen = [view(t) for t in (x.q, x.k, x.v)]
        assert not any(t.is_contiguous() for t in seen)
        out, lse = view(nan_like(expected[0])), transposed(nan_like(expected[1]))
        got = fa.flash_attn_func(*seen, out=out, lse=lse, **options)
        assert_bitwise(got[0], expected[0])
        assert_bitwise(got[1], expected[1])


def test_case_57_strided_packed_rows(impl: str, mix: Mix) -> None:
    """Case 57's kind: packed rows whose heads lie outermost."""
    x = mix.quantized(*torch.randn(3, 1, 130, 4, 64, generator=torch.Generator().manual_seed(0)))
    cu = offsets([100, 30])
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "return_lse": True, "impl": impl}
    scales = {n: s.expand(2, 4) for n, s in x.scales.items()}
    rows = [t[0] for t in (x.q, x.k, x.v)]
    expected = fa.flash_attn_varlen_func(*rows, **scales, **options)
    seen = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in rows]
    got = fa.flash_attn_varlen_func(*seen, **scales, **options)
    assert_bitwise(got[0], expected[0])
    assert_bitwise(got[1], expected[1])


def test_case_57_strided_last_dimension_is_refused(impl: str, mix: Mix) -> None:
    """Case 57: what no kernel reads is refused by name, not read as if it were packed."""
    x = Question(*mix.cast(*torch.ones(3, 1, 8, 2, 64)), mix.ones)
    for name in "qkv":
        operands = {"q": x.q, "k": x.k, "v": x.v}
        operands[name] = operands[name].repeat_interleave(2, -1)[..., ::2]
        with pytest.raises(ValueError, match=f"{name} has stride 2 in its last dimension"):
            fa.flash_attn_func(**operands, **x.scales, impl=impl)


# ------------------------------------------------------------------------------------ case 59

SEQLENS = (1, 63, 64, 65, 127, 128, 129, 191, 255, 257)
masks = pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])


@masks
@pytest.mark.parametrize("seqlen_q", SEQLENS)
def test_case_59_no_multiple_of_a_tile(impl: str, seqlen_q: int, causal: bool) -> None:
    """Case 59: every pair of lengths round the tiles' edges, one shape a call."""
    for seqlen_k in SEQLENS:
        q, k = torch.zeros(1, seqlen_q, 1, 8), torch.zeros(1, seqlen_k, 1, 8)
        x = Question(*E4M3.cast(q, k, one_hot_v(seqlen_k, 1, 8, FP32)))
        answer = x.ask("dense", impl=impl, causal=causal, out_dtype=FP32, poisoned=True)
        seen = visible(seqlen_q, seqlen_k, seqlen_k, None, 0 if causal else None)
        out, lse = mean_of_visible(seen, x.v[0, :, 0].float())
        assert_near(answer.out[0, :, 0], out, limits.EXACT_ABS)
        assert_near(answer.lse[0, 0], lse, limits.EXACT_ABS)


PAIRS = list(product(SEQLENS[::3], SEQLENS))


@cache
def of_all_pairs(causal: bool) -> tuple[Tensor, Tensor]:
    """Results of the pairs, one after the other."""
    right = 0 if causal else None
    exact = [
        mean_of_visible(visible(r, s, s, None, right), one_hot_v(s, 1, 8, FP32)[0, :, 0])
        for r, s in PAIRS
    ]
    return torch.cat([out for out, _ in exact]), torch.cat([lse for _, lse in exact])


@masks
@pytest.mark.parametrize("kv_layout", ["varlen", "paged"])
def test_case_59_all_pairs_in_one_batch(
    execution: dict[str, object], mix: Mix, kv_layout: str, causal: bool
) -> None:
    """Case 59's kind: the same pairs as one ragged batch, in every format."""
    rows, keys = ([pair[i] for pair in PAIRS] for i in (0, 1))
    q, k = torch.zeros(sum(rows), 1, 8), torch.zeros(sum(keys), 1, 8)
    v = torch.cat([one_hot_v(n, 1, 8, FP32)[0] for n in keys])
    q, k, v = mix.cast(q, k, v)
    call = {"q": q, "cu_seqlens_q": offsets(rows), "causal": causal, **mix.ones, **execution}
    if kv_layout == "varlen":
        call |= {"k": k, "v": v, "cu_seqlens_k": offsets(keys)}
    else:
        longest = one_hot_v(max(keys), 1, 8, FP32).expand(len(keys), -1, -1, -1).to(mix.kv)
        pages, table = paged(longest, 32)
        call |= {"k": pages, "v": pages, "page_table": table, "seqused_k": int32(*keys)}
    out, lse = fa.flash_attn_varlen_func(**call, return_lse=True, out_dtype=FP32)
    expected = of_all_pairs(causal)
    assert_near(out[:, 0], expected[0], limits.EXACT_ABS)
    assert_near(lse[0], expected[1], limits.EXACT_ABS)
