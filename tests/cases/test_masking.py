"""Cases 11, 12, 30, 34, 36, 37: which keys a row sees, and what a row without keys gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.cases import limits
from tests.cases.arrange import FP8_MIXES, MIXES, Answer, Mix, Question
from tests.cases.exact import mean_of_visible, visible
from tests.cases.limits import assert_near
from tests.data import one_hot_v, visible_keys

E4M3 = MIXES[0]
FP32 = torch.float32


def uniform(mix: Mix, seqlen_q: int, seqlen_k: int, *, heads: tuple[int, int] = (2, 1)) -> Question:
    """q = 0 over any K and a one-hot V: the output names the keys that were seen."""
    nheads, nheads_kv = heads
    q = torch.zeros(1, seqlen_q, nheads, 16)
    k = torch.randn(1, seqlen_k, nheads_kv, 16, generator=torch.Generator().manual_seed(0))
    return Question(*mix.cast(q, k, one_hot_v(seqlen_k, nheads_kv, 16, torch.float32)), mix.ones)


def assert_sees(answer: Answer, seen: Tensor, shift: float = 0.0) -> None:
    """Row i's output is the mean of the V rows of seen[i], its LSE ln(count) + shift."""
    out, lse = mean_of_visible(seen, answer.question.v[0, :, 0].float())
    assert_near(answer.out, out[None, :, None].expand(answer.out.shape), limits.EXACT_ABS)
    assert_near(answer.lse, lse.expand(answer.lse.shape) + shift, limits.EXACT_ABS)


# ------------------------------------------------------------------------------------ case 11


@pytest.mark.parametrize("window", [(None, None), (200, None)], ids=["causal", "window"])
def test_case_11_negative_scores(
    impl: str, layout: str, mix: Mix, window: tuple[int | None, int | None]
) -> None:
    """Case 11: a first tile that is wholly masked for some rows leaves no maximum of 0 behind."""
    x = uniform(mix, 88, 448, heads=(14, 2))
    x.q[..., 0], x.k[..., 0] = 1, -8
    answer = x.ask(
        layout, impl=impl, causal=True, window_size=window, softmax_scale=1.0, out_dtype=FP32
    )
    assert_sees(answer, visible(88, 448, 448, window[0], 0), shift=-8)


@pytest.mark.parametrize("score", [-500.0, 500.0])
def test_case_11_far_from_zero(impl: str, layout: str, fp8_mix: Mix, score: float) -> None:
    """Case 11's kind: scores of any size and sign, every row with its own first tile."""
    x = uniform(fp8_mix, 300, 300)
    x.q[..., 0], x.k[..., 0] = 1, 1 if score > 0 else -1
    x.q[..., 1:], x.k[..., 1:] = 0, 0
    answer = x.ask(layout, impl=impl, causal=True, softmax_scale=abs(score), out_dtype=FP32)
    assert_sees(answer, visible(300, 300, 300, None, 0), shift=score)


# ------------------------------------------------------------------------------------ case 12

CAPPED = 2 * math.tanh(2)
# The factor of 4 that makes the true logits 4 and 0 can sit in any of these; 16 bits take no
# descale (case 21).
PLACES = ("q", "softmax_scale", "q_descale", "k_descale", "k_descale per token")
CAPS = [
    (mix, place)
    for mix in MIXES
    for place in PLACES
    if not (place == "q_descale" and mix not in FP8_MIXES)
    and not (place.startswith("k_descale") and not mix.kv_is_8bit)
]


def capped(mix: Mix, place: str) -> tuple[Question, dict[str, object]]:
    q, k, v = (torch.zeros(1, n, 1, 64) for n in (1, 2, 2))
    q[..., 0] = 4 if place == "q" else 1
    k[0, 0, 0, 0] = 1
    v[0, 0] = 1
    scales = dict(mix.ones)
    if place in ("q_descale", "k_descale"):
        scales[place] = torch.tensor(4.0)
    if place == "k_descale per token":
        scales["k_descale"] = torch.full((1, 2, 1), 4.0)
    options = {"softcap": 2.0, "softmax_scale": 4.0 if place == "softmax_scale" else 1.0}
    return Question(*mix.cast(q, k, v), scales), options


@pytest.mark.parametrize(("mix", "place"), CAPS, ids=[f"{m}-{p}" for m, p in CAPS])
def test_case_12_softcap(impl: str, layout: str, mix: Mix, place: str) -> None:
    """Case 12: the cap replaces the score, after every scale: 2 tanh(4 / 2), wherever 4 is from."""
    x, options = capped(mix, place)
    answer = x.ask(layout, impl=impl, **options)
    assert_near(answer.out, 1 / (1 + math.exp(-CAPPED)), limits.CASE_12_ABS)
    assert_near(answer.lse, math.log1p(math.exp(CAPPED)), limits.EXACT_ABS)


# ------------------------------------------------------------------------------------ case 30


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 3), (129, 1), (300, 130), (7, 0)])
def test_case_30_rows_before_the_first_key(
    impl: str, layout: str, mix: Mix, seqlen_q: int, seqlen_k: int
) -> None:
    """Case 30: causal rows without keys give 0 and -inf, and the first key is the next row's."""
    x = uniform(mix, seqlen_q, seqlen_k)
    answer = x.ask(layout, impl=impl, causal=True, out_dtype=FP32, poisoned=True)
    assert_sees(answer, visible(seqlen_q, seqlen_k, seqlen_k, None, 0))
    empty = max(0, seqlen_q - seqlen_k)
    assert answer.lse[..., :empty].isneginf().all()
    assert not answer.out[:, :empty].any()


def test_case_30_window_before_the_first_key(execution: dict[str, object], layout: str) -> None:
    """Case 30's kind: a window that ends before key 0, or begins behind the last, is empty."""
    x = uniform(E4M3, 40, 20)
    answer = x.ask(layout, window_size=(3, 2), out_dtype=FP32, poisoned=True, **execution)
    assert_sees(answer, visible(40, 20, 20, 3, 2))


# ------------------------------------------------------------------------------------ case 34

SINKS = (0.5, 0.0, 100.0, -math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_case_34_sink(
    execution: dict[str, object], layout: str, mix: Mix, dtype: torch.dtype
) -> None:
    """Case 34: a sink without keys gives O = 0 and LSE = sink, the very bits.

    Beside 3 keys it is one more logit, and in four splits still one, not four.
    """
    q, k = torch.zeros(2, 2, 4, 16), torch.zeros(2, 140, 1, 16)
    x = Question(*mix.cast(q, k, torch.ones_like(k)), mix.ones, lengths=[0, 3])
    sink = torch.tensor(SINKS).to(dtype)
    answer = x.ask(layout, learnable_sink=sink, out_dtype=FP32, poisoned=True, **execution)
    assert not answer.out[0].any()
    assert torch.equal(answer.lse[0], torch.tensor(SINKS)[:, None].expand(4, 2))
    total = 3 + torch.tensor(SINKS, dtype=torch.float64).exp()
    assert_near(answer.lse[1], total.log()[:, None].expand(4, 2), limits.EXACT_ABS)
    assert_near(answer.out[1], (3 / total)[:, None].expand(2, 4, 16), limits.EXACT_ABS)


@pytest.mark.parametrize("level", [-3e38, -1e4, 1e4, 3e38])
def test_case_34_extreme_sink(execution: dict[str, object], level: float) -> None:
    """Case 34's kind: a sink of any finite size gives a finite LSE, far from the scores or not."""
    x = uniform(E4M3, 3, 130)
    sink = torch.full((2,), level)
    answer = x.ask("dense", learnable_sink=sink, out_dtype=FP32, **execution)
    expected = level if level > 0 else math.log(130)
    assert_near(
        answer.lse / max(1.0, abs(expected)), expected / max(1.0, abs(expected)), limits.EXACT_ABS
    )
    assert torch.isfinite(answer.out).all()


# ------------------------------------------------------------------------------------ case 36


@pytest.mark.parametrize("window", [(-1, -1), (None, None)], ids=str)
def test_case_36_unbounded(impl: str, layout: str, mix: Mix, window: tuple[int, int]) -> None:
    """Case 36: -1 on both sides is unbounded, as None is: LSE = ln 70."""
    answer = uniform(mix, 70, 70).ask(layout, impl=impl, window_size=window, out_dtype=FP32)
    assert_sees(answer, visible(70, 70, 70))


@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (None, None), (None, 0), (-1, 5)], ids=str)
def test_case_36_causal_and_unbounded(
    impl: str, layout: str, mix: Mix, window: tuple[int | None, int | None]
) -> None:
    """Case 36: beside causal -1 is unbounded too, and the right bound is the query's own key."""
    x = uniform(mix, 70, 70)
    answer = x.ask(layout, impl=impl, window_size=window, causal=True, out_dtype=FP32)
    assert_sees(answer, visible(70, 70, 70, None, 0))


@pytest.mark.parametrize("window", [(-1, 0), (0, -1), (8, -1), (-1, 8)], ids=str)
def test_case_36_one_sided_minus_one(impl: str, window: tuple[int, int]) -> None:
    """Case 36: without causal a lone -1 means 'unlimited' in FA3 and a width in FA4: refused.

    The refusal names both meanings; None on that side says the first, and gives ln(i + 1) here.
    """
    x = uniform(E4M3, 70, 70)
    with pytest.raises(ValueError, match=r"window_size=.*FA3.*FA4.*None"):
        x.ask("dense", impl=impl, window_size=window)
    said = tuple(None if side == -1 else side for side in window)
    answer = x.ask("dense", impl=impl, window_size=said, out_dtype=FP32)
    assert_sees(answer, visible(70, 70, 70, *said))


def test_case_36_kvcache_default_is_unbounded(impl: str) -> None:
    """Case 36: FA3's default of (-1, -1) reaches flash_attn_with_kvcache as unbounded."""
    x = uniform(E4M3, 70, 70)
    _, lse = fa.flash_attn_with_kvcache(x.q, x.k, x.v, return_softmax_lse=True, impl=impl)
    assert_near(lse, math.log(70), limits.EXACT_ABS)


# ------------------------------------------------------------------------------------ case 37

WINDOWS = (
    (300, 300, (128, 0)),
    (300, 300, (0, 0)),
    (300, 300, (299, 0)),
    (300, 300, (3, 2)),
    (3, 300, (128, 0)),
    (3, 300, (127, 0)),
    (200, 140, (16, 130)),
)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "window"), WINDOWS, ids=str)
def test_case_37_window_is_inclusive(
    impl: str, layout: str, mix: Mix, seqlen_q: int, seqlen_k: int, window: tuple[int, int]
) -> None:
    """Case 37: [p - left, p + right] with p = i + Sk - Sq, both ends included."""
    x = uniform(mix, seqlen_q, seqlen_k)
    answer = x.ask(layout, impl=impl, window_size=window, out_dtype=FP32, poisoned=True)
    assert_sees(answer, visible(seqlen_q, seqlen_k, seqlen_k, *window))


def test_case_37_published_counts(impl: str) -> None:
    """Case 37: the counts as they were published, not as our definition gives them."""
    i = torch.arange(300.0)
    counts = {
        (128, 0): i.clamp(max=128) + 1,
        (0, 0): torch.ones(300),
        (299, 0): i + 1,
        (3, 2): i.clamp(max=3) + 1 + (299 - i).clamp(max=2),
    }
    for window, count in counts.items():
        answer = uniform(E4M3, 300, 300).ask("dense", impl=impl, window_size=window)
        assert_near(answer.lse, count.log().expand(1, 2, 300), limits.EXACT_ABS)
    short = uniform(E4M3, 3, 300).ask("dense", impl=impl, window_size=(128, 0))
    assert_near(short.lse, math.log(129), limits.EXACT_ABS)


def test_case_37_whole_window_equals_causal(execution: dict[str, object], mix: Mix) -> None:
    """Case 37: window (S - 1, 0) and causal give the same bits."""
    x = uniform(mix, 300, 300)
    window = x.ask("dense", window_size=(299, 0), **execution)
    causal = x.ask("dense", causal=True, **execution)
    limits.assert_bitwise(window.out, causal.out)
    limits.assert_bitwise(window.lse, causal.lse)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_case_37_every_small_window(impl: str, causal: bool) -> None:
    """Case 37's kind: every window of a small shape, against the definition key by key."""
    x = uniform(E4M3, 5, 7)
    for left in (None, *range(8)):
        for right in (None, *range(8)):
            answer = x.ask(
                "dense", impl=impl, causal=causal, window_size=(left, right), out_dtype=FP32
            )
            assert_sees(answer, visible_keys(5, 7, causal, (left, right)))


@pytest.mark.parametrize("sink", [-90.0, -1e4, -1e9])
def test_case_34_empty_rows_with_a_low_sink(impl: str, sink: float) -> None:
    """Case 34: a row without keys is 0 with lse = sink, however low a finite sink is."""
    x = torch.zeros(1, 3, 1, 64, dtype=torch.float8_e4m3fn)
    out, lse = fa.flash_attn_func(
        x, x[:, :1], x[:, :1], causal=True, learnable_sink=torch.tensor([sink]), return_lse=True,
        impl=impl,
    )  # fmt: skip
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse[0, 0, :2], torch.full((2,), sink))
