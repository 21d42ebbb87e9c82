"""Cases 31, 39, 45, 52: parts of the keys, empty ones included, merge into the whole."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.budget import assert_within_budget, rel_l2
from tests.cases import limits
from tests.cases.arrange import MIXES, Answer, Mix, Question, int32, nan_like, offsets
from tests.cases.exact import attention
from tests.cases.limits import assert_bitwise, assert_near, assert_noise
from tests.conftest import EXECUTORS
from tests.data import one_hot_v, paged

E4M3 = MIXES[0]
FP32 = torch.float32
SPLITTING = [name for name in EXECUTORS if name != "reference"]

# ------------------------------------------------------------------------------------ case 31

USED = [0, 1, 128, 129]


def partly_used(mix: Mix) -> Question:
    q, k = torch.zeros(4, 1, 4, 16), torch.zeros(4, 256, 2, 16)
    v = torch.randint(-3, 4, k.shape, generator=torch.Generator().manual_seed(0)).float()
    return Question(*mix.cast(q, k, v), mix.ones, USED)


def assert_partly_used(out: Tensor, lse: Tensor, x: Question) -> None:
    for b, n in enumerate(USED):
        mean = x.v[b, :n].double().sum(0).repeat_interleave(2, 0) / max(1, n)
        assert_near(out[b, 0], mean, limits.EXACT_ABS)
        assert_near(lse[b], math.log(n) if n else -math.inf, limits.EXACT_ABS)


def test_case_31_length_zero_in_a_batch(
    execution: dict[str, object], layout: str, mix: Mix
) -> None:
    """Case 31: a sequence of length 0 gives 0 and -inf, not what its buffers held; so do splits."""
    x = partly_used(mix)
    answer = x.ask(layout, poisoned=True, out_dtype=FP32, **execution)
    assert_partly_used(answer.out, answer.lse, x)
    assert not answer.out[0].any()


def test_case_31_through_the_cache_interface(execution: dict[str, object], mix: Mix) -> None:
    """Case 31: flash_attn_with_kvcache, whose outputs are fresh or given and full of NaN."""
    x = partly_used(mix)
    pages, table = paged(x.k, 16)
    options = {"cache_seqlens": int32(*USED), "return_softmax_lse": True, **x.scales, **execution}
    dense = fa.flash_attn_with_kvcache(x.q, x.k, x.v, out_dtype=FP32, **options)
    out = nan_like(dense[0])
    scattered = fa.flash_attn_with_kvcache(
        x.q, pages, paged(x.v, 16)[0], page_table=table, out=out, **options
    )
    assert scattered[0] is out
    for got in (dense, scattered):
        assert_partly_used(*got, x)


# ------------------------------------------------------------------------------------ case 39


def halves(mix: Mix, layout: str, impl: str) -> tuple[Answer, Answer, Answer]:
    """The uniform probe over 100 keys with V = 0, over 28 with V = 1, and over both."""
    q, k = torch.zeros(2, 5, 6, 16), torch.zeros(2, 128, 2, 16)
    v = torch.zeros_like(k)
    v[:, 100:] = 1
    x = Question(*mix.cast(q, k, v), mix.ones)
    parts = (slice(0, 100), slice(100, 128), slice(0, 128))
    prefix, suffix, both = (
        replace(x, k=x.k[:, part], v=x.v[:, part]).ask(layout, impl=impl, out_dtype=FP32)
        for part in parts
    )
    return prefix, suffix, both


def test_case_39_merging_outside(impl: str, layout: str, mix: Mix) -> None:
    """Case 39: merged by hand with natural-log weights, and by flash_attn_combine: 28 / 128."""
    prefix, suffix, both = halves(mix, layout, impl)
    weight = torch.sigmoid(suffix.lse - prefix.lse).transpose(1, 2)[..., None]
    merged = prefix.out * (1 - weight) + suffix.out * weight
    assert_near(merged, 28 / 128, limits.EXACT_ABS)
    lse = torch.stack([part.lse.transpose(1, 2) for part in (prefix, suffix)])
    out, total = fa.flash_attn_combine(torch.stack([prefix.out, suffix.out]), lse)
    assert_near(out, 28 / 128, limits.EXACT_ABS)
    assert_near(total.transpose(1, 2), both.lse, limits.EXACT_ABS)
    assert_near(both.lse, math.log(128), limits.EXACT_ABS)


def test_case_39_layout_of_the_lse(execution: dict[str, object], layout: str, mix: Mix) -> None:
    """Case 39: fp32, (batch, heads, rows), or (heads, total) where packed; row i in place i."""
    q, k = torch.zeros(2, 5, 6, 16), torch.zeros(2, 128, 2, 16)
    answer = Question(*mix.cast(q, k, k), mix.ones).ask(layout, causal=True, **execution)
    assert answer.raw_lse.dtype == torch.float32
    assert answer.raw_lse.shape == ((6, 10) if layout == "varlen" else (2, 6, 5))
    count = torch.arange(124, 129).double()
    assert_near(answer.lse, count.log().expand(2, 6, 5), limits.EXACT_ABS)


@pytest.mark.parametrize("splits", [1, 2, 3, 7])
def test_case_39_empty_parts_add_nothing(splits: int) -> None:
    """Case 39's kind: a part without keys has weight 0 whatever its output buffer holds."""
    out = torch.full((splits + 1, 1, 3, 2, 8), math.nan)
    lse = torch.full((splits + 1, 1, 3, 2), -math.inf)
    out[1:], lse[1:] = 0.5, math.log(4)
    merged, total = fa.flash_attn_combine(out, lse)
    assert_near(merged, 0.5, limits.EXACT_ABS)
    assert_near(total, math.log(4 * splits), limits.EXACT_ABS)
    nothing, empty = fa.flash_attn_combine(out[:1], lse[:1])
    assert not nothing.any()
    assert empty.isneginf().all()


# ------------------------------------------------------------------------------------ case 45

CU_Q = int32(0, 1, 4, 4, 9)
KEYS = [700, 33, 0, 4097]
WAYS = (
    *({"num_splits": n} for n in (1, 2, 3, 8, 0)),
    {"num_splits": 0, "deterministic": True},
    {"seqlen_k_per_split": 256},
)


def ragged(mix: Mix, factor: Tensor | None = None) -> tuple[Question, dict[str, object]]:
    """Packed queries over a paged cache, 8/2 heads, page 16; the cache dense, and the call.

    `factor` (2, batch, slots, heads_kv) makes the scales of K and V per token.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(s, generator=generator) for s in ((1, 9, 8, 64), *[(4, 4097, 2, 64)] * 2)
    )
    x = replace(mix.quantized(q, k, v), lengths=KEYS)
    pages, table = paged(x.k, 16)
    call = {"q": x.q[0], "k": pages, "v": paged(x.v, 16)[0], "page_table": table, **x.scales}
    for name, by in zip(("k_descale", "v_descale"), () if factor is None else factor, strict=False):
        head = x.scales.get(name)
        x.scales[name] = by if head is None else head[:, None] * by
        call[name] = paged(x.scales[name], 16)[0]
    return x, {**call, "cu_seqlens_q": CU_Q, "seqused_k": int32(*KEYS), "return_lse": True}


Exact = list[tuple[slice, tuple[Tensor, Tensor]]]


def by_sequence(x: Question, causal: bool) -> Exact:
    """R0 of each sequence that has rows, beside those rows."""
    exact = []
    for b, n in enumerate(KEYS):
        rows, one = slice(int(CU_Q[b]), int(CU_Q[b + 1])), slice(b, b + 1)
        scales = {name: s[one, :n] if s.ndim == 3 else s[one] for name, s in x.scales.items()}
        if rows.start < rows.stop:
            k, v = x.k[one, :n], x.v[one, :n]
            exact.append((rows, attention(x.q[:, rows], k, v, causal=causal, scales=scales)))
    return exact


def assert_ragged(out: Tensor, lse: Tensor, exact: Exact, p_format: str) -> None:
    """Each sequence against R0, apart."""
    for rows, expected in exact:
        assert_noise(out[None, rows], lse[None, :, rows], expected, p_format)


@pytest.mark.parametrize("impl", SPLITTING)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_case_45_varlen_paged_splits(impl: str, mix: Mix, causal: bool) -> None:
    """Case 45: packed q + pages + any number of splits: R0, and near what one split gives.

    Sequence 2 has no rows and no keys; most splits of sequence 1 are empty.
    """
    x, call = ragged(mix)
    exact = by_sequence(x, causal)
    one = fa.flash_attn_varlen_func(**call, causal=causal, impl=impl)
    for way in WAYS:
        out, lse = fa.flash_attn_varlen_func(**call, causal=causal, impl=impl, **way)
        assert_ragged(out, lse, exact, mix.p_name)
        assert rel_l2(out, one[0]) <= limits.CASE_45_REL_RMS[mix.p_name]
        assert_near(lse, one[1], limits.CASE_45_LSE_ABS)


@pytest.mark.parametrize("impl", SPLITTING)
def test_case_45_scales_per_token(impl: str, cached_mix: Mix) -> None:
    """Case 45's kind: with a scale for each cache slot as well, and within the derived budget."""
    per_token = torch.rand(2, 4, 4097, 2, generator=torch.Generator().manual_seed(1)) + 0.5
    x, call = ragged(cached_mix, per_token)
    exact = by_sequence(x, causal=False)
    for way in WAYS[:5:2]:
        described = fa.flash_attn_varlen_func.describe_call(**call, impl=impl, **way)
        out, lse = fa.flash_attn_varlen_func(**call, impl=impl, **way)
        assert_within_budget(described, out, lse)
        assert_ragged(out, lse, exact, cached_mix.p_name)


@pytest.mark.parametrize("impl", SPLITTING)
@pytest.mark.parametrize("splits", [2, 3, 4, 8, 256])
def test_case_45_no_key_is_lost(impl: str, layout: str, mix: Mix, splits: int) -> None:
    """Case 45's kind: lengths that fill the splits exactly, or miss that by one key."""
    lengths = [128 * splits // 2 + more for more in (-1, 0, 1)] if splits < 256 else [256, 300, 1]
    lengths += [512, 513, 384]
    q, k = torch.zeros(6, 1, 1, 8), torch.zeros(6, max(lengths), 1, 8)
    x = Question(*mix.cast(q, k, one_hot_v(k.shape[1], 1, 8, FP32, 6)), mix.ones, lengths)
    answer = x.ask(layout, num_splits=splits, impl=impl, out_dtype=FP32)
    count = torch.stack([torch.bincount(torch.arange(n) % 8, minlength=8) for n in lengths])
    assert_near(answer.out[:, 0, 0], count / count.sum(-1, keepdim=True), limits.EXACT_ABS)
    assert_near(answer.lse[:, 0, 0], count.sum(-1).double().log(), limits.EXACT_ABS)


def test_case_45_reference_does_not_split(impl: str) -> None:
    """Case 45: auto runs everywhere; an executor that cannot split says so, and is not replaced."""
    x, call = ragged(E4M3)
    out, lse = fa.flash_attn_varlen_func(**call, num_splits=0, impl=impl)
    assert_ragged(out, lse, by_sequence(x, causal=False), E4M3.p_name)
    if impl in SPLITTING:
        assert fa.explain(fa.flash_attn_varlen_func, **call, num_splits=8, impl=impl).ok
        return
    with pytest.raises(NotImplementedError, match="num_splits"):
        fa.flash_attn_varlen_func(**call, num_splits=8, impl=impl)


def test_case_45_auto_splits_on_a_gpu() -> None:
    """Case 45: auto takes several splits where the work is small beside the machine."""
    _, call = ragged(E4M3)
    answer = fa.explain(fa.flash_attn_varlen_func, **call, num_splits=0, target="sm_100a")
    assert answer.plan.split.num_splits > 1
    answer = fa.explain(
        fa.flash_attn_varlen_func, **call, num_splits=0, deterministic=True, target="sm_100a"
    )
    assert answer.plan.split.keys


@pytest.mark.parametrize("impl", SPLITTING)
@pytest.mark.parametrize("logit", [-100.0, -1e30, 20.0])
def test_case_45_parts_without_keys_beside_a_sink(impl: str, mix: Mix, logit: float) -> None:
    """Case 45's kind: a narrow window leaves most parts empty, the sink's among them."""
    generator = torch.Generator().manual_seed(0)
    x = mix.quantized(*(torch.randn(1, 384, 2, 16, generator=generator) for _ in "qkv"))
    call = {"causal": True, "window_size": (10, None), "learnable_sink": torch.full((2,), logit)}
    one, three = (x.ask("dense", impl=impl, num_splits=n, out_dtype=FP32, **call) for n in (1, 3))
    for answer in (one, three):
        answer.assert_within_budget()
    assert_near(three.lse, one.lse, limits.CASE_45_LSE_ABS)


# ------------------------------------------------------------------------------------ case 52


def many_sequences(batch: int, queries: list[int], mix: Mix) -> dict[str, object]:
    """b mod 5 keys each, in pages of 16 that sequences share."""
    pool = torch.zeros(7, 16, 1, 16).to(mix.kv)
    table = (torch.arange(batch, dtype=torch.int32) % 7)[:, None]
    keys = torch.arange(batch, dtype=torch.int32) % 5
    q = torch.zeros(sum(queries), 2, 16).to(mix.q)
    index = {"cu_seqlens_q": offsets(queries), "seqused_k": keys, "page_table": table}
    return {"q": q, "k": pool, "v": pool, **index, **mix.ones}


@pytest.mark.parametrize(
    ("batch", "queries_of"),
    [(4097, lambda b: 1), (1025, lambda b: b % 3)],
    ids=["4097 of 1", "1025 of b mod 3"],
)
def test_case_52_large_varlen_batch(impl: str, mix: Mix, batch: int, queries_of: object) -> None:
    """Case 52: thousands of sequences with automatic splits end in time, LSE = ln(b mod 5)."""
    queries = [queries_of(b) for b in range(batch)]
    call = many_sequences(batch, queries, mix)
    start = time.process_time()
    out, lse = fa.flash_attn_varlen_func(**call, num_splits=0, impl=impl, return_lse=True)
    assert time.process_time() - start < limits.CASE_52_SECONDS
    owner = torch.repeat_interleave(torch.arange(batch), torch.tensor(queries))
    assert_near(lse, (owner % 5).double().log().expand(lse.shape), limits.EXACT_ABS)
    assert not out.any()


@pytest.mark.parametrize("impl", SPLITTING)
def test_case_52_many_splits_of_few_keys(impl: str) -> None:
    """Case 52's kind: more splits than tiles, for thousands of sequences, change no bit."""
    call = many_sequences(1025, [1] * 1025, E4M3)
    one = fa.flash_attn_varlen_func(**call, num_splits=1, impl=impl, return_lse=True)
    many = fa.flash_attn_varlen_func(**call, num_splits=64, impl=impl, return_lse=True)
    assert_bitwise(many[0], one[0])
    assert_near(many[1], one[1], limits.CASE_45_LSE_ABS)
