"""Cases 1, 2, 4, 5, 6, 9: P keeps its whole range, at both ends and at any length."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.formats import BF16
from flash_attn_fp8.plan import Split, TiledSpec
from flash_attn_fp8.policy import POLICIES, Fp8Policy, policy_for
from flash_attn_fp8.reference import tiled
from tests.budget import rel_l2
from tests.cases import limits
from tests.cases.arrange import MIXES, Answer, Mix, Question
from tests.cases.exact import attention
from tests.cases.limits import assert_near, assert_noise

E4M3, E5M2 = MIXES[:2]
SAFE_POLICIES = [(mix, name) for mix in (E4M3, E5M2) for name in POLICIES[mix.p_name]]
policies = pytest.mark.parametrize(
    ("mix", "policy"), SAFE_POLICIES, ids=[f"{m}-{name}" for m, name in SAFE_POLICIES]
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------- case 1

EDGE_OF_TILES = (1, 64, 127, 128, 129, 192, 257, 512, 1023)


def decode(mix: Mix, seeds: int, seqlen_k: int) -> Question:
    """One query row of 6 heads over 1; each seed is a sequence of its own."""
    q, k, v = normal(seeds, 1, 6, 128, seed=1), *normal(2, seeds, seqlen_k, 1, 128, seed=seqlen_k)
    return mix.quantized(q, k, v)


def assert_decodes(x: Question, answer: Answer, mix: Mix) -> None:
    exact = attention(x.q, x.k, x.v, scales=x.scales)
    assert_noise(answer.out, answer.lse, exact, mix.p_name)
    cosine = torch.cosine_similarity(answer.out.double().flatten(1), exact[0].flatten(1))
    assert float(cosine.min()) >= limits.CASE_1_COSINE[mix.p_name]


@pytest.mark.parametrize("seqlen_k", EDGE_OF_TILES)
@pytest.mark.parametrize("layout", ["dense", "paged"])
def test_case_1_decode_past_one_tile(impl: str, layout: str, seqlen_k: int) -> None:
    """Case 1: 50 seeds, each within the limits, on either side of every tile boundary."""
    x = replace(decode(E4M3, 50, seqlen_k), page_size=128)
    assert_decodes(x, x.ask(layout, impl=impl), E4M3)


@pytest.mark.parametrize("seqlen_k", [128, 129, 385])
def test_case_1_in_every_mix(impl: str, layout: str, seqlen_k: int, mix: Mix) -> None:
    """Case 1's kind: crossing a tile costs nothing in any format or layout, by budget too."""
    x = decode(mix, 4, seqlen_k)
    answer = x.ask(layout, impl=impl)
    assert_decodes(x, answer, mix)
    answer.assert_within_budget()


def test_case_1_bites() -> None:
    """Case 1: the policy that upstream shipped (offset 8, threshold 4) fails this very check."""
    x = decode(E4M3, 50, 129)
    broken = Fp8Policy.breaking_the_budget("e4m3", 8, 4, row_sum="exact")
    with pytest.raises(AssertionError, match="rel-RMS"):
        assert_decodes(x, x.ask("dense", impl="tiled", fp8_policy=broken), E4M3)


# ------------------------------------------------------------------------------------- case 2


def peak(mix: Mix, height: int, places: list[int], seqlen_k: int, on_peak: int = 1) -> Question:
    """The peak probe, one sequence per place: V is `on_peak` there and 1 - `on_peak` elsewhere."""
    q = torch.zeros(len(places), 1, 1, 16)
    q[..., 0] = 1
    k = torch.zeros(len(places), seqlen_k, 1, 16)
    v = torch.full_like(k, 1 - on_peak)
    for b, place in enumerate(places):
        k[b, place, :, 0] = height
        v[b, place] = on_peak
    return Question(*mix.cast(q, k, v), mix.ones)


def assert_peak(answer: Answer, height: int) -> None:
    weight = 2**height / (2**height + 255)
    assert_near(answer.out, weight, limits.CASE_2_REL * weight)
    assert_near(answer.lse, math.log(2**height + 255), limits.EXACT_ABS)


@pytest.mark.parametrize("height", [1, 2, 3, 4])
def test_case_2_late_maximum(impl: str, layout: str, mix: Mix, height: int) -> None:
    """Case 2: a maximum that rises late, whichever end the tiles are visited from, keeps its P."""
    x = peak(mix, height, [5, 250], 256)
    answer = x.ask(layout, impl=impl, softmax_scale=math.log(2))
    assert_peak(answer, height)
    answer.assert_within_budget()


@policies
@pytest.mark.parametrize("height", [1, 2, 3, 4])
def test_case_2_under_every_policy(mix: Mix, policy: str, height: int) -> None:
    """Case 2: no named policy lets P saturate, in one split or two."""
    x = peak(mix, height, [5, 250], 256)
    for splits in (1, 2):
        answer = x.ask(
            "dense", impl="tiled", softmax_scale=math.log(2), fp8_policy=policy, num_splits=splits
        )
        assert_peak(answer, height)


@pytest.mark.parametrize("height", [1, 2, 3, 4])
def test_case_2_bites(height: int) -> None:
    """Case 2: a policy past its budget gives the published shares of O, and an exact LSE."""
    x = peak(E4M3, height, [5], 256)
    broken = Fp8Policy.breaking_the_budget("e4m3", 8, 4, row_sum="exact")
    answer = x.ask("dense", impl="tiled", softmax_scale=math.log(2), fp8_policy=broken)
    share = answer.out.double() * (2**height + 255) / 2**height
    digit = limits.CASE_2_SATURATED_DIGIT + BF16.unit_roundoff
    assert_near(share, limits.CASE_2_SATURATED[height], digit)
    assert_near(answer.lse, math.log(2**height + 255), limits.EXACT_ABS)


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_case_2_no_policy_past_the_budget(name: str) -> None:
    """Case 2: such a policy cannot be made by accident; the refusal says what would saturate."""
    top = math.floor(policy_for(name).format.log2_max)
    Fp8Policy(name, top, 0)
    for offset, threshold in ((top, 1), (top + 1, 0), (0, top + 1), (top / 2, top / 2 + 1)):
        with pytest.raises(ValueError, match="saturate"):
            Fp8Policy(name, offset, threshold)


# ------------------------------------------------------------------------------------- case 4

SPREADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)


def spread_error(mix: Mix, spread: float, impl: str, policy: str | Fp8Policy | None) -> float:
    """rel-RMS at natural logits of that standard deviation: 32 rows, 8192 keys."""
    x = mix.quantized(
        normal(1, 32, 1, 128),
        normal(1, 8192, 1, 128, seed=1) * spread,
        normal(1, 8192, 1, 128, seed=2),
    )
    exact, lse = attention(x.q, x.k, x.v, scales=x.scales)
    answer = x.ask("dense", impl=impl, fp8_policy=policy)
    assert_near(answer.lse, lse, limits.NOISE_LSE_ABS)
    return rel_l2(answer.out, exact)


def assert_flat(errors: list[float], p_format: str) -> None:
    """Small at every spread, and not rising with it beyond the output's own rounding."""
    assert max(errors) <= limits.NOISE_REL_RMS[p_format]
    assert errors[-1] <= max(errors[0], BF16.unit_roundoff)


@pytest.mark.parametrize("mix", [MIXES[i] for i in (0, 1, 4, 6)], ids=str)
def test_case_4_wide_logits(impl: str, mix: Mix) -> None:
    """Case 4: the error does not grow with the spread of the logits."""
    assert_flat([spread_error(mix, spread, impl, None) for spread in SPREADS[::2]], mix.p_name)


@policies
def test_case_4_under_every_policy(mix: Mix, policy: str) -> None:
    """Case 4: nor under any named policy."""
    assert_flat([spread_error(mix, s, "tiled", policy) for s in (0.25, 1.5, 4.0)], mix.p_name)


def test_case_4_bites() -> None:
    """Case 4: past the budget the error rises far over the limit, as published."""
    broken = Fp8Policy.breaking_the_budget("e4m3", 8, 4, row_sum="exact")
    for spread in (1.0, 2.0):
        assert spread_error(E4M3, spread, "tiled", broken) > limits.NOISE_REL_RMS["e4m3"]


# ------------------------------------------------------------------------------------- case 5


def format_errors(impl: str, seqlen: int, rows: int, causal: bool, heads: int) -> dict[str, float]:
    """rel-RMS of both fp8 formats on the same data, each against its own dequantised operands."""
    errors = {}
    q, k, v = normal(1, rows, heads, 128), *normal(2, 1, seqlen, 1, 128, seed=seqlen)
    for mix in (E4M3, E5M2):
        x = mix.quantized(q, k, v)
        exact, lse = attention(x.q, x.k, x.v, causal=causal)
        answer = x.ask("dense", impl=impl, causal=causal, out_dtype=torch.float32)
        assert_near(answer.lse, lse, limits.NOISE_LSE_ABS)
        errors[mix.p_name] = rel_l2(answer.out, exact)
    return errors


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seqlen", "rows", "heads"),
    [(256, 256, 4), (1024, 256, 2), (4096, 64, 2)],
    ids=["256", "1024", "4096"],
)
def test_case_5_e4m3_beats_e5m2(
    rounding_impl: str, seqlen: int, rows: int, heads: int, causal: bool
) -> None:
    """Case 5: the format with one more mantissa bit is better, at any length. Last `rows` rows."""
    error = format_errors(rounding_impl, seqlen, rows, causal, heads)
    assert error["e4m3"] <= limits.NOISE_REL_RMS["e4m3"]
    assert error["e5m2"] <= limits.NOISE_REL_RMS["e5m2"]
    assert error["e4m3"] <= limits.CASE_5_E4M3_OVER_E5M2 * error["e5m2"]


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_case_5_all_rows_of_4096(rounding_impl: str, causal: bool) -> None:
    """Case 5 with every row of the longest published shape."""
    error = format_errors(rounding_impl, 4096, 4096, causal, 1)
    assert error["e4m3"] <= limits.CASE_5_E4M3_OVER_E5M2 * error["e5m2"]


# ------------------------------------------------------------------------------------- case 6


@pytest.mark.parametrize("spread", [0.5, 1.0, 2.0])
def test_case_6_ones_give_one(impl: str, mix: Mix, spread: float) -> None:
    """Case 6: with V = 1 the output is 1: what the row sum counts is in P as well."""
    q, k = normal(1, 4, 1, 128), normal(1, 4096, 1, 128, seed=1) * spread
    x = mix.quantized(q, k, torch.ones(1, 4096, 1, 128))
    answer = x.ask("dense", impl=impl)
    assert_near(answer.out, 1.0, limits.CASE_6_ABS)


@policies
def test_case_6_ones_give_one_under_every_policy(mix: Mix, policy: str) -> None:
    """Case 6: whichever sum normalises, exact or quantised."""
    q, k = normal(1, 4, 1, 128), normal(1, 4096, 1, 128, seed=1)
    x = mix.quantized(q, k, torch.ones(1, 4096, 1, 128))
    for row_sum in ("exact", "quantized"):
        chosen = POLICIES[mix.p_name][policy].replace(row_sum=row_sum)
        answer = x.ask("dense", impl="tiled", fp8_policy=chosen)
        assert_near(answer.out, 1.0, limits.CASE_6_ABS)


@pytest.mark.parametrize("on_peak", [1, 0], ids=["peak", "tail"])
def test_case_6_tail_of_a_peak(impl: str, layout: str, mix: Mix, on_peak: int) -> None:
    """Case 6: 4095 keys at 2**-12 of the top one hold half the mass, and keep it.

    The row sum of the rounded P would hide a lost tail from V = 1, but not from V = 1 on one side.
    """
    x = peak(mix, 12, [5, 4090], 4096, on_peak)
    answer = x.ask(layout, impl=impl, softmax_scale=math.log(2))
    share = (4096 if on_peak else 4095) / (4096 + 4095)
    assert_near(answer.out, share, limits.CASE_6_ABS)
    assert_near(answer.lse, math.log(4096 + 4095), limits.EXACT_ABS)


@policies
def test_case_6_tail_under_every_policy(mix: Mix, policy: str) -> None:
    """Case 6: every named policy keeps weights of 2**-12."""
    x = peak(mix, 12, [5, 4090], 4096, on_peak=0)
    answer = x.ask("dense", impl="tiled", softmax_scale=math.log(2), fp8_policy=policy)
    assert_near(answer.out, 4095 / (4096 + 4095), limits.CASE_6_ABS)


def test_case_6_bites() -> None:
    """Case 6: offset 0 loses the tail of a peak seen first: the published 0.5 for V = 1."""
    x = peak(E4M3, 12, [4090], 4096)
    x = Question(x.q, x.k, torch.ones_like(x.v))
    no_shift = Fp8Policy("e4m3", 0, 0, row_sum="exact")
    answer = x.ask("dense", impl="tiled", softmax_scale=math.log(2), fp8_policy=no_shift)
    assert_near(answer.out, limits.CASE_6_LOST_TAIL, limits.CASE_6_ABS)


# ------------------------------------------------------------------------------------- case 9

LENGTHS = tuple(limits.CASE_9_NARROW)


def on_hopper(x: Question, promote_every: int | None) -> Tensor:
    """The output on an emulated SM90 accumulator, one split.

    Kernels that never promote divide by the fp32 sum; the sum of the rounded P would stall, too.
    """
    row_sum = "quantized" if promote_every else "exact"
    policy = policy_for("e4m3").replace(promote_every=promote_every, row_sum=row_sum)
    spec = TiledSpec(policy, accumulator="sm90_fp8")
    options = dict(fp8_policy=policy, out_dtype=torch.float32)
    call = fa.flash_attn_func.describe_call(x.q, x.k, x.v, **options)
    out = torch.empty(problem_of(call).out_shape)
    tiled.run(problem_of(call), call.operands, out, None, spec=spec, split=Split(1))
    return out


def level(seqlen_k: int, mix: Mix = E4M3) -> Question:
    """q = 0, V = 0.75; the head dimension does not matter."""
    q, k = torch.zeros(1, 1, 1, 8), torch.zeros(1, seqlen_k, 1, 8)
    return Question(*mix.cast(q, k, torch.full_like(k, 0.75)))


@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_case_9_promoted_accumulator(seqlen_k: int) -> None:
    """Case 9: Hopper's 13 fraction bits, promoted to fp32 every 128 keys, hold 0.75."""
    assert_near(on_hopper(level(seqlen_k), 128), 0.75, limits.CASE_9_ABS)


@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_case_9_bites(seqlen_k: int) -> None:
    """Case 9: never promoted, the emulation gives the published 0.667, 0.250, 0.063."""
    out = on_hopper(level(seqlen_k), None)
    assert_near(out, limits.CASE_9_NARROW[seqlen_k], limits.CASE_9_DIGIT)


def test_case_9_noise_on_a_promoted_accumulator() -> None:
    """Case 9: N(0, 1) logits and V ~ N(0.5, 1) over 8192 keys cost no more than rounding P."""
    x = E4M3.quantized(
        normal(1, 8, 1, 16), normal(1, 8192, 1, 16, seed=1), normal(1, 8192, 1, 16, seed=2) + 0.5
    )
    exact, _ = attention(x.q, x.k, x.v)
    assert rel_l2(on_hopper(x, 128), exact) <= limits.NOISE_REL_RMS["e4m3"]
    assert rel_l2(on_hopper(x, None), exact) > limits.NOISE_REL_RMS["e4m3"]


@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("mix", [m for m in MIXES if m.kv_name != "int8"], ids=str)
def test_case_9_at_any_length(impl: str, mix: Mix, seqlen_k: int) -> None:
    """Case 9's kind: what the executors give is 0.75 at every length, in one split."""
    answer = level(seqlen_k, mix).ask("dense", impl=impl, out_dtype=torch.float32)
    assert_near(answer.out, 0.75, limits.CASE_9_ABS)
    assert_near(answer.lse, math.log(seqlen_k), limits.EXACT_ABS)
