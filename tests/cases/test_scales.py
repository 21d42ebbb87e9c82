"""Cases 19, 20, 21, 22: every scale is applied, once, to its own operand, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.budget import assert_within_budget, rel_l2
from tests.cases import limits
from tests.cases.arrange import CACHED_MIXES, FP8_MIXES, MIXES, Mix, Question, int32, offsets
from tests.cases.exact import attention
from tests.cases.limits import assert_bitwise, assert_near

E4M3 = MIXES[0]
FP32 = torch.float32
BATCH, KEYS, HEADS, HEADS_KV, D = 2, 130, 8, 2, 64
NAMES = ("q_descale", "k_descale", "v_descale")

# ------------------------------------------------------------------------------------ case 19

K_SCALE = torch.tensor([[0.25, 2.0], [4.0, 0.125]])
V_SCALE = torch.tensor([[0.5, 3.0], [0.25, 7.0]])
# What each (sequence, KV head) adds to the LSE, as published.
ADDED = torch.tensor([[0.125, 1.0], [2.0, 0.0625]])


def per_query_head(x: Tensor) -> Tensor:
    return x.repeat_interleave(HEADS // HEADS_KV, -1)


def random_v() -> Tensor:
    """Small integers, exact in every format."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-3, 4, (BATCH, KEYS, HEADS_KV, D), generator=generator).float()


def v_probe(mix: Mix, v_descale: Tensor) -> Question:
    """q = 0: O = v_descale[b, h // 4] * mean V."""
    q, k = torch.zeros(BATCH, 3, HEADS, D), torch.zeros(BATCH, KEYS, HEADS_KV, D)
    return Question(*mix.cast(q, k, random_v()), {**mix.ones, "v_descale": v_descale})


def k_probe(mix: Mix, k_descale: Tensor) -> tuple[Question, float]:
    """q = e_0, K[:, 0] = 1, and the softmax_scale that makes the whole query scale 0.5."""
    q, k = torch.zeros(BATCH, 3, HEADS, D), torch.zeros(BATCH, KEYS, HEADS_KV, D)
    q[..., 0] = k[..., 0] = 1
    scales = {**mix.ones, "k_descale": k_descale}
    if mix in FP8_MIXES:
        scales["q_descale"] = torch.tensor(0.5)
    x = Question(*mix.cast(q, k, random_v()), scales)
    return x, 1.0 if mix in FP8_MIXES else 0.5


def at_granularity(scale: Tensor, per: str) -> Tensor:
    """(batch, heads) as it is, or repeated for every token."""
    if per == "batch_head":
        return scale
    return scale[:, None].expand(BATCH, KEYS, HEADS_KV).contiguous()


granularity = pytest.mark.parametrize("per", ["batch_head", "token_head"])


@granularity
def test_case_19_v_descale(impl: str, layout: str, cached_mix: Mix, per: str) -> None:
    """Case 19: v_descale reaches the output, each value its own sequence and KV head."""
    x = v_probe(cached_mix, at_granularity(V_SCALE, per))
    answer = x.ask(layout, impl=impl, out_dtype=FP32)
    expected = x.v.double().mean(1) * V_SCALE[..., None]
    expected = expected.repeat_interleave(HEADS // HEADS_KV, 1)[:, None]
    assert_near(answer.out, expected.expand(answer.out.shape), limits.EXACT_ABS)
    assert_near(answer.lse, math.log(KEYS), limits.EXACT_ABS)


@granularity
def test_case_19_q_and_k_descale(impl: str, layout: str, cached_mix: Mix, per: str) -> None:
    """Case 19: q_descale * k_descale reaches the scores: the published additions to the LSE."""
    x, softmax_scale = k_probe(cached_mix, at_granularity(K_SCALE, per))
    answer = x.ask(layout, impl=impl, softmax_scale=softmax_scale, out_dtype=FP32)
    expected = per_query_head(ADDED.double() + math.log(KEYS))[..., None]
    assert_near(answer.lse, expected.expand(answer.lse.shape), limits.EXACT_ABS)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("heads", [HEADS, HEADS_KV])
def test_case_19_every_shape_of_a_scale(
    impl: str, layout: str, fp8_mix: Mix, name: str, heads: int
) -> None:
    """Case 19's kind: scales of every granularity, all values distinct, against R0."""
    if name != "q_descale" and heads == HEADS:
        heads = 1  # per tensor
    tokens = 3 if name == "q_descale" else KEYS
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(BATCH, n, h, D, generator=generator) for n, h in
               ((3, HEADS), (KEYS, HEADS_KV), (KEYS, HEADS_KV)))  # fmt: skip
    shapes = ((), (1,)) if heads == 1 else ((heads,), (BATCH, heads), (BATCH, tokens, heads))
    for shape in shapes:
        scale = torch.rand(shape, generator=generator) + 0.5
        x = Question(*fp8_mix.cast(q, k, v), {name: scale})
        answer = x.ask(layout, impl=impl)
        answer.assert_within_budget()
        _, lse = attention(x.q, x.k, x.v, scales=x.scales)
        assert_near(answer.lse, lse, limits.NOISE_LSE_ABS)


def through_kvcache(x: Question, **options: object) -> tuple[Tensor, Tensor]:
    return fa.flash_attn_with_kvcache(x.q, x.k, x.v, return_softmax_lse=True, **x.scales, **options)


def through_paged_kvcache(x: Question, **options: object) -> tuple[Tensor, Tensor]:
    """The dense cache as two pages, one a sequence."""
    table = torch.arange(BATCH, dtype=torch.int32)[:, None]
    return through_kvcache(x, page_table=table, cache_seqlens=KEYS, **options)


def through_private(x: Question, **options: object) -> tuple[Tensor, Tensor]:
    return fa._flash_attn_fwd(x.q, x.k, x.v, return_lse=True, **x.scales, **options)


@pytest.mark.parametrize("through", [through_kvcache, through_paged_kvcache, through_private])
def test_case_19_every_function_hands_scales_on(
    impl: str, cached_mix: Mix, through: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    """Case 19: no public function accepts a scale and drops it: all give the same bits."""
    x, softmax_scale = k_probe(cached_mix, K_SCALE)
    x.scales["v_descale"] = V_SCALE
    options = {"impl": impl, "softmax_scale": softmax_scale, "out_dtype": FP32}
    expected = x.ask("dense", **options)
    out, lse = through(x, num_splits=1, **options)
    assert_bitwise(out, expected.raw_out)
    assert_bitwise(lse, expected.raw_lse)


def test_case_19_output_scale(impl: str, fp8_mix: Mix) -> None:
    """Case 19: output_scale divides what is stored; number and tensor alike."""
    x = v_probe(fp8_mix, V_SCALE)
    plain = x.ask("dense", impl=impl, out_dtype=fp8_mix.q).out
    for scale in (0.25, torch.tensor(0.25), torch.tensor([0.25])):
        scaled = x.ask("dense", impl=impl, out_dtype=fp8_mix.q, output_scale=scale).out
        # A power of two moves the exponent alone, but for what was subnormal before.
        normal = plain.float().abs() >= torch.finfo(fp8_mix.q).tiny
        assert torch.equal(scaled.float()[normal] * 0.25, plain.float()[normal])


# ------------------------------------------------------------------------------------ case 20


@pytest.mark.parametrize("given", range(8))
def test_case_20_an_absent_scale_is_one(impl: str, layout: str, fp8_mix: Mix, given: int) -> None:
    """Case 20: every combination of given scales equals the call with explicit ones, bitwise."""
    generator = torch.Generator().manual_seed(given)
    q, k, v = (torch.randn(BATCH, n, 2, 16, generator=generator) for n in (3, KEYS, KEYS))
    some = {name: torch.tensor(2.0) for i, name in enumerate(NAMES) if given >> i & 1}
    plain = Question(*fp8_mix.cast(q, k, v), some).ask(layout, impl=impl)
    for shape in ((), (2,), (BATCH, 2)):
        ones = {name: torch.ones(shape) for name in NAMES}
        full = Question(*fp8_mix.cast(q, k, v), {**ones, **some}).ask(layout, impl=impl)
        assert_bitwise(full.raw_out, plain.raw_out)
        assert_bitwise(full.raw_lse, plain.raw_lse)


@pytest.mark.parametrize("given", range(4))
def test_case_20_16_bit_queries(impl: str, layout: str, given: int) -> None:
    """Case 20 for a cache under 16-bit queries: k_descale and v_descale, each alone."""
    for mix in CACHED_MIXES[2:4]:
        generator = torch.Generator().manual_seed(given)
        q, k, v = (torch.randn(BATCH, n, 2, 16, generator=generator) for n in (3, KEYS, KEYS))
        some = {name: torch.tensor(2.0) for i, name in enumerate(NAMES[1:]) if given >> i & 1}
        plain = Question(*mix.cast(q, k, v), some).ask(layout, impl=impl)
        ones = {name: torch.ones(()) for name in NAMES[1:]}
        full = Question(*mix.cast(q, k, v), {**ones, **some}).ask(layout, impl=impl)
        assert_bitwise(full.raw_out, plain.raw_out)
        assert_bitwise(full.raw_lse, plain.raw_lse)


@pytest.mark.parametrize("per", ["head", "token_head"])
def test_case_20_ones_per_token(impl: str, layout: str, fp8_mix: Mix, per: str) -> None:
    """Case 20: ones per token are ones too, folded into the exponent or not.

    With a V scale per token the row sum is always the exact one (`Traits.exact_row_sum`).
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCH, n, 2, 16, generator=generator) for n in (3, KEYS, KEYS))
    options = {}
    if impl != "reference" and per == "token_head":
        options["fp8_policy"] = fa.policy_for(fp8_mix.p_name).replace(row_sum="exact")
    plain = Question(*fp8_mix.cast(q, k, v)).ask(layout, impl=impl, **options)
    shape = (2,) if per == "head" else (BATCH, KEYS, 2)
    ones = {name: torch.ones(shape) for name in NAMES[1:]}
    full = Question(*fp8_mix.cast(q, k, v), ones).ask(layout, impl=impl)
    assert_bitwise(full.raw_out, plain.raw_out)
    assert_bitwise(full.raw_lse, plain.raw_lse)


@pytest.mark.parametrize("missing", NAMES[1:])
def test_case_20_int8_has_no_default(impl: str, layout: str, missing: str) -> None:
    """Case 20: int8 codes without their scale are nonsense, so the missing one is asked for."""
    for mix in CACHED_MIXES[4:]:
        x = v_probe(mix, V_SCALE)
        del x.scales[missing]
        with pytest.raises(ValueError, match=f"{missing} missing"):
            x.ask(layout, impl=impl)


# ------------------------------------------------------------------------------------ case 21


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mix", [MIXES[2], MIXES[3]], ids=str)
def test_case_21_16_bits_take_no_descale(impl: str, layout: str, mix: Mix, name: str) -> None:
    """Case 21a: a scale of a 16-bit operand is refused by its name, never ignored."""
    q, k = torch.zeros(BATCH, 3, HEADS, D), torch.zeros(BATCH, KEYS, HEADS_KV, D)
    x = Question(*mix.cast(q, k, random_v()), {name: torch.tensor(2.0)})
    with pytest.raises(ValueError, match=name):
        x.ask(layout, impl=impl)


@pytest.mark.parametrize("mix", CACHED_MIXES[2:], ids=str)
def test_case_21_16_bit_queries_over_a_cache(impl: str, layout: str, mix: Mix) -> None:
    """Case 21b: k_descale = 3 and v_descale = 5 are applied once; q_descale is refused by name."""
    x, _ = k_probe(mix, torch.tensor(3.0))
    x.scales["v_descale"] = torch.tensor(5.0)
    answer = x.ask(layout, impl=impl, softmax_scale=0.5, out_dtype=FP32)
    assert_near(answer.lse, 3 * 0.5 + math.log(KEYS), limits.EXACT_ABS)
    mean = 5 * x.v.double().mean(1).repeat_interleave(HEADS // HEADS_KV, 1)[:, None]
    assert_near(answer.out, mean.expand(answer.out.shape), limits.EXACT_ABS)
    x.scales["q_descale"] = torch.tensor(7.0)
    with pytest.raises(ValueError, match=r"q_descale.*16 bits"):
        x.ask(layout, impl=impl, softmax_scale=0.5)


# ------------------------------------------------------------------------------------ case 22

SEQUENCES = (2, 1, 5)


def packed_call(paged: bool, **scales: Tensor) -> dict[str, object]:
    """Three sequences, whose cu_seqlens has four entries; 8 heads over 2."""
    total = sum(SEQUENCES)
    q = torch.zeros(total, HEADS, D).to(E4M3.q)
    k = torch.ones(*((6, 4) if paged else (total,)), HEADS_KV, D).to(E4M3.kv)
    index = {"page_table": torch.arange(6, dtype=torch.int32).reshape(3, 2),
             "seqused_k": int32(*SEQUENCES)}  # fmt: skip
    if not paged:
        index = {"cu_seqlens_k": offsets(list(SEQUENCES))}
    return {"q": q, "k": k, "v": k, "cu_seqlens_q": offsets(list(SEQUENCES)), **index, **scales}


kv = pytest.mark.parametrize("paged", [False, True], ids=["varlen", "paged"])


@kv
def test_case_22_batch_is_that_of_cu_seqlens(impl: str, paged: bool) -> None:
    """Case 22: (3, Hkv) is per sequence, and each sequence gets its own row of it."""
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    call = packed_call(paged, v_descale=scale)
    out, _ = fa.flash_attn_varlen_func(**call, impl=impl, out_dtype=FP32)
    owner = torch.repeat_interleave(torch.arange(3), torch.tensor(SEQUENCES))
    expected = per_query_head(scale[owner])[..., None]
    assert_near(out, expected.expand(out.shape), limits.EXACT_ABS)


@kv
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(3, 2), (2,), (), (1,), (1, 1)], ids=str)
def test_case_22_documented_shapes_run(
    impl: str, paged: bool, name: str, shape: tuple[int, ...]
) -> None:
    """Case 22: per sequence and head, per head, per tensor: they run, and scale what they say."""
    out, lse = fa.flash_attn_varlen_func(
        **packed_call(paged, **{name: torch.full(shape, 2.0)}), impl=impl, return_lse=True
    )
    assert torch.equal(out, torch.full_like(out, 2.0 if name == "v_descale" else 1.0))
    lengths = torch.repeat_interleave(torch.tensor(SEQUENCES), torch.tensor(SEQUENCES))
    assert_near(lse, lengths.double().log().expand(lse.shape), limits.EXACT_ABS)


@kv
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shape",
    [(4, 2), (8, 2), (3, 8), (8,), (3,), (3, 1), (1, 2), (2, 3), (3, 2, 1), (1, 3, 2)],
    ids=str,
)
def test_case_22_every_other_shape_is_refused(
    impl: str, paged: bool, name: str, shape: tuple[int, ...]
) -> None:
    """Case 22: a padded batch, a wrong head count: refused with the wanted and the given shape."""
    if name == "q_descale" and shape in ((3, 8), (8,)):
        shape = (3, 4) if len(shape) == 2 else (4,)  # per query head is q's own
    call = packed_call(paged, **{name: torch.ones(shape)})
    with pytest.raises(ValueError, match=name) as refusal:
        fa.flash_attn_varlen_func(**call, impl=impl)
    assert str(list(shape)) in str(refusal.value)
    assert "[3, 2]" in str(refusal.value)


def test_case_22_dtype_and_order(impl: str) -> None:
    """Case 22's kind: fp64 scales and transposed ones are refused, not reinterpreted."""
    for scale in (torch.ones(3, 2, dtype=torch.float64), torch.ones(2, 3), torch.ones(3, 2).half()):
        with pytest.raises(ValueError, match="k_descale"):
            fa.flash_attn_varlen_func(**packed_call(False, k_descale=scale), impl=impl)


@pytest.mark.parametrize("rows", ["lognormal", "one zero row"])
def test_token_scales_of_any_spread(rows: str) -> None:
    """V's token scales far apart, or of a row of zeros, cost P's rounding and no more.

    A scale in the exponent makes keys with a small one flush in P, which must not reach the sum;
    and a zero row's must not lead the maximum. Both were an order of magnitude wrong.
    """
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, n, 2, 64, generator=g) for n in (64, 512, 512))
    if rows == "lognormal":
        v = v * torch.exp(2 * torch.randn(1, 512, 2, 1, generator=g))
    else:
        v = v * 1e-3
        v[:, 256] = 0
    q8, k8, v8 = (fa.quantize(x, per="token_head") for x in (q, k, v))
    scales = dict(q_descale=q8.descale, k_descale=k8.descale, v_descale=v8.descale)
    arguments = dict(scales, out_dtype=torch.float32, return_lse=True)
    out, lse = fa.flash_attn_func(q8.values, k8.values, v8.values, impl="tiled", **arguments)
    exact, _ = fa.flash_attn_func(q8.values, k8.values, v8.values, impl="reference", **arguments)
    call = fa.flash_attn_func.describe_call(q8.values, k8.values, v8.values, **arguments)
    assert_within_budget(call, out, lse)
    assert rel_l2(out, exact) <= limits.NOISE_REL_RMS["e4m3"]
