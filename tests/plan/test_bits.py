"""The bits of a row follow from its own query, keys, scales, policy and splits, and nothing else.

Not from the batch, its order, the neighbours, padding, pages, strides, or the other heads and rows
of the call (design, invariant 8).
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8 import ops
from flash_attn_fp8.target import Target
from tests.api.calls import same_bits
from tests.cases.exact import attention, visible
from tests.conftest import EXECUTORS
from tests.data import one_hot_v, visible_keys
from tests.plan.sequences import LAYOUTS, Form, alone, forms, lengths, sequence, together

SEEDS = st.integers(0, 2**20)
MODERATE = settings(deadline=None, derandomize=True, database=None, max_examples=25)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_in_any_company_as_alone(layout: str, impl: str) -> None:
    @settings(MODERATE, max_examples=100 if impl == "tiled" else 30)
    @given(forms(impl), st.lists(lengths(), min_size=1, max_size=4), st.integers(1, 40), SEEDS)
    def check(form: Form, sizes: list[tuple[int, int]], page_size: int, seed: int) -> None:
        sequences = [sequence(form, *size, seed + i) for i, size in enumerate(sizes)]
        for s, results in zip(
            sequences, together(form, sequences, layout, page_size, seed), strict=True
        ):
            assert same_bits(results, alone(form, s))

    check()


@pytest.mark.parametrize("shortest", [1, 129])
@pytest.mark.parametrize("seed", range(8))
def test_beside_a_longer_sequence_as_alone(shortest: int, seed: int, impl: str) -> None:
    """Two that share their key tiles: only the width of the last one tells them apart."""
    options = {"impl": impl, "out_dtype": torch.float32}
    form = Form("e4m3", "e4m3", 4, 2, d=16, dv=8, scaled=True, options=options)
    sizes = [(33 + seed, shortest + 15 * seed), (40, shortest + 121)]
    pair = [sequence(form, *size, seed + i) for i, size in enumerate(sizes)]
    for s, results in zip(pair, together(form, pair, "varlen", 1, seed), strict=True):
        assert same_bits(results, alone(form, s))


def test_a_zero_is_positive_in_any_company(impl: str) -> None:
    """Weights of 0 times negative values are -0, which any positive 0 beside them would hide."""
    options = {"impl": impl, "out_dtype": torch.float32, "causal": True}
    form = Form("e4m3", "e4m3", 1, 1, d=8, dv=8, scaled=False, options=options)
    pair = [
        replace(s, v=(-s.v.float().abs()).to(s.v.dtype))
        for s in (sequence(form, 2, keys, seed=keys) for keys in (1, 127))
    ]
    for s, results in zip(pair, together(form, pair, "varlen", 1, 0), strict=True):
        assert same_bits(results, alone(form, s))
        assert not bool((results[0].signbit() & (results[0] == 0)).any())


@pytest.mark.parametrize(
    ("fmt", "value"),
    [("e4m3", "nan"), ("e5m2", "nan"), ("e5m2", "inf"), ("e5m2", "-inf"), ("bf16", "inf")],
)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_value_that_is_not_finite_stays_with_its_key(
    layout: str, num_splits: int, fmt: str, value: str, impl: str
) -> None:
    """Only rows that see the key, in its head and column, differ: and as the definition says."""
    if impl == "reference" and num_splits > 1:
        pytest.skip("it does not split")
    key, head, column = 270, 1, 3
    options = {"impl": impl, "out_dtype": torch.float32, "num_splits": num_splits}
    options |= {"causal": True, "window_size": (20, None)}
    form = Form(fmt, fmt, 4, 2, d=16, dv=8, scaled=True, options=options)
    clean = [sequence(form, *size, seed=i) for i, size in enumerate([(40, 300), (50, 257), (3, 1)])]
    v = clean[0].v.float()
    v[key, head, column] = float(value)
    damaged = [replace(clean[0], v=v.to(clean[0].v.dtype)), *clean[1:]]
    for s, results in zip(clean[1:], together(form, damaged, layout, 16, 0)[1:], strict=True):
        assert same_bits(results, alone(form, s))
    want, want_lse = alone(form, clean[0])
    sees = torch.zeros(40, 4, 8, dtype=torch.bool)
    rows = visible(40, 300, 300, left=20, right=0)[:, key]
    sees[rows, 2 * head : 2 * head + 2, column] = True
    assert 0 < int(rows.sum()) < 40
    scales = {f"{n}_descale": x[None] for n, x in damaged[0].scales.items()}
    by_definition, _ = attention(
        *(getattr(damaged[0], n)[None] for n in "qkv"), scales=scales, causal=True,
        window_size=(20, None),
    )  # fmt: skip
    assert not bool(by_definition[0][sees].isfinite().any())
    out, lse = together(form, damaged, layout, 16, 0)[0]
    assert same_bits((out, lse), alone(form, damaged[0]))
    assert same_bits((out[~sees], lse), (want[~sees], want_lse))
    assert torch.allclose(out[sees], by_definition[0][sees].float(), rtol=0, atol=0, equal_nan=True)


def test_infinite_values_where_p_is_zero_or_signs_differ(impl: str) -> None:
    """0 * inf is NaN, as in a tensor core: for a P that is flushed to 0, not the definition's."""
    inf, flushed = math.inf, math.inf if impl == "reference" else math.nan
    q, k = torch.ones(1, 1, 1, 8), torch.zeros(1, 3, 1, 8)
    k[0, 2] = 8.0  # the others lie 64 / sqrt(8) nats or 32.6 octaves below it
    v = torch.tensor([
        # a column of V for each kind, a row for each key: two far below the peak, and the peak
        [inf, 0.0, inf, inf, 0.0, 0.0, 0.0, 0.0],
        [0.0, 0.0, 0.0, -inf, 0.0, 0.0, 0.0, 0.0],
        [0.0, inf, inf, 0.0, -inf, 0.0, 0.0, 0.0],
    ])[None, :, None]  # fmt: skip
    wanted = torch.tensor([flushed, inf, flushed, math.nan, -inf, 0.0, 0.0, 0.0])
    out, _ = fa.flash_attn_func(
        *(x.to(torch.float8_e5m2) for x in (q, k, v)), impl=impl, out_dtype=torch.float32
    )
    assert torch.allclose(out[0, 0, 0], wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("promote_every", [None, 32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_on_sm90_in_any_company_as_alone(
    fmt: str, promote_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its narrow accumulator is promoted by where a key lies, whatever tiles neighbours need."""
    monkeypatch.setattr(ops, "target_of", lambda device: Target("sm_90a", 132))
    monkeypatch.setattr(ops, "_memo", {})
    policy = fa.policy_for(fmt).replace(promote_every=promote_every)
    options = {"impl": "tiled", "out_dtype": torch.float32, "fp8_policy": policy}
    for more in ({"causal": True}, {"window_size": (150, 30)}, {"num_splits": 2}):
        form = Form(fmt, fmt, 2, 1, d=8, dv=8, scaled=False, options=options | more)
        sizes = [(33, 260), (64, 384), (40, 300), (50, 345)]  # of one block
        sequences = [sequence(form, *size, seed=i) for i, size in enumerate(sizes)]
        for s, results in zip(sequences, together(form, sequences, "varlen", 1, 0), strict=True):
            assert same_bits(results, alone(form, s))


def test_of_an_lse_with_a_sink_in_a_batch_of_256_as_alone(impl: str) -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(256, 1, 1, 8, generator=g), torch.randn(256, 5, 1, 8, generator=g)
    q, k = q.to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn)
    call = {"learnable_sink": torch.tensor([0.3]), "return_lse": True, "impl": impl}
    both = fa.flash_attn_func(q, k, k, **call)
    for b in range(256):
        one = fa.flash_attn_func(q[b : b + 1], k[b : b + 1], k[b : b + 1], **call)
        assert same_bits(one, (both[0][b : b + 1], both[1][b : b + 1]))


@pytest.mark.parametrize("rounding_impl", [name for name in EXECUTORS if name != "reference"])
def test_key_tiles_are_visited_right_to_left(rounding_impl: str) -> None:
    """Invariant 7. A tail seen before its peak is rounded under its own maximum, and survives.

    The peak lies 24 octaves above the tail: seen first it leaves the tail nothing above P's
    smallest value. So the tail's values come out for a peak on the left, and not for one on the
    right; visited left to right it would be the other way round.
    """
    policy = fa.policy_for("e4m3")
    octaves = 24
    assert -octaves < policy.tail_log2
    out = {}
    for side, peak in {"left": 0, "right": 255}.items():
        q, k, v = torch.ones(1, 1, 1, 8), torch.zeros(1, 256, 1, 8), torch.ones(1, 256, 1, 8)
        k[0, peak, 0, 0], v[0, peak] = octaves, 0
        x = (t.to(torch.float8_e4m3fn) for t in (q, k, v))
        out[side], _ = fa.flash_attn_func(
            *x, softmax_scale=math.log(2), out_dtype=torch.float32, impl=rounding_impl,
            fp8_policy=policy,
        )  # fmt: skip
    assert bool((out["left"] > 0).all())
    assert not bool(out["right"].any())


def test_of_the_last_rows_as_of_all(impl: str) -> None:
    """The window is aligned with the last key, so that a prompt may be computed in chunks."""

    @MODERATE
    @given(forms(impl), st.integers(1, 30), st.integers(0, 300), st.data())
    def check(form: Form, rows: int, keys: int, data: st.DataObject) -> None:
        s = sequence(form, rows, keys, seed=rows)
        last = data.draw(st.integers(1, rows))
        scales = {n: x[-last:] if n == "q" else x for n, x in s.scales.items()}
        chunk = type(s)(s.q[-last:], s.k, s.v, scales)
        out, lse = alone(form, s)
        assert same_bits(alone(form, chunk), (out[-last:], lse[:, -last:]))

    check()


def test_of_one_kv_head_as_of_all(impl: str) -> None:
    @MODERATE
    @given(forms(impl), lengths(), SEEDS, st.data())
    def check(form: Form, size: tuple[int, int], seed: int, data: st.DataObject) -> None:
        s = sequence(form, *size, seed)
        group = form.nheads // form.nheads_kv
        head = data.draw(st.integers(0, form.nheads_kv - 1))
        theirs, kv = slice(head * group, (head + 1) * group), slice(head, head + 1)
        scales = {n: x[:, theirs if n == "q" else kv] for n, x in s.scales.items()}
        one = type(s)(s.q[:, theirs], s.k[:, kv], s.v[:, kv], scales)
        sink = form.options.get("learnable_sink")
        more = {} if sink is None else {"learnable_sink": sink[theirs]}
        out, lse = alone(form, s)
        assert same_bits(alone(form, one, **more), (out[:, theirs], lse[theirs]))

    check()


def _strided(x: Tensor, order: list[int], gap: int) -> Tensor:
    """`x` with its leading dimensions in memory in `order`, and `gap` elements after each row."""
    last = x.ndim - 1
    bits = x.view(torch.uint8) if x.element_size() == 1 else x
    shape = [*(x.shape[i] for i in order), x.shape[last] + gap]
    buffer = torch.full(
        shape, 0x7F if bits.dtype == torch.uint8 else float("nan"), dtype=bits.dtype
    )
    view = buffer.permute(*(order.index(i) for i in range(last)), last)[..., : x.shape[last]]
    view.copy_(bits)
    return view.view(x.dtype) if bits.dtype != x.dtype else view


def test_with_any_strides_as_contiguous(impl: str) -> None:
    @MODERATE
    @given(forms(impl), lengths(max_keys=150), SEEDS, st.data())
    def check(form: Form, size: tuple[int, int], seed: int, data: st.DataObject) -> None:
        pair = [sequence(form, *size, seed + i) for i in range(2)]
        x = {n: _stack([getattr(s, n) for s in pair]) for n in "qkv"}
        scales = {n: torch.stack([s.scales[n] for s in pair]) for n in form.scaled_operands}

        def spread(t: Tensor, free_last: bool = False) -> Tensor:
            order = data.draw(st.permutations(range(3)))
            if free_last:  # a scale's last dimension may have any stride
                return _strided(t[..., None], order, gap=2)[..., 0]
            return _strided(t, order, gap=data.draw(st.sampled_from([0, 1, 8])))

        wanted = _batched(form, x, scales)
        got = _batched(
            form,
            {n: spread(t) for n, t in x.items()},
            {n: spread(t, free_last=True) for n, t in scales.items()},
        )
        assert same_bits(got, wanted)

    check()


def _stack(parts: list[Tensor]) -> Tensor:
    if parts[0].element_size() == 1:
        return torch.stack([x.view(torch.uint8) for x in parts]).view(parts[0].dtype)
    return torch.stack(parts)


def _batched(form: Form, x: dict[str, Tensor], scales: dict[str, Tensor]) -> object:
    descales = {f"{n}_descale": t for n, t in scales.items()}
    return fa.flash_attn_func(**x, **descales, return_lse=True, **form.options)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("per", ["token_head", "batch_head"])
def test_of_quantised_sequences_in_any_company(dtype: str, per: str) -> None:
    @MODERATE
    @given(st.lists(st.integers(0, 30), min_size=1, max_size=4), SEEDS)
    def check(sizes: list[int], seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        parts = [torch.randn(n, 2, 8, generator=g) for n in sizes]
        bounds = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)
        kind = {"dtype": getattr(torch, dtype), "per": per}
        needed = {"cu_seqlens": bounds} if per == "batch_head" else {}
        packed = fa.quantize(torch.cat(parts), **kind, **needed)
        for b, x in enumerate(parts):
            one = fa.quantize(x[None], **kind)
            rows = slice(int(bounds[b]), int(bounds[b + 1]))
            scale = packed.descale[b][None] if per == "batch_head" else packed.descale[:, rows]
            assert same_bits((packed.values[rows], scale), (one.values[0], one.descale))

    check()


# ------------------------------------------------------------------------------------ visible keys


def test_rows_see_the_keys_that_the_definition_says(impl: str) -> None:
    """q = 0 makes P uniform and one-hot values name the keys: out counts them by column."""
    bound = st.none() | st.integers(0, 200)

    @settings(MODERATE, max_examples=40)
    @given(st.integers(1, 40), st.integers(1, 200), st.booleans(), st.tuples(bound, bound))
    def check(rows: int, keys: int, causal: bool, window: tuple[int | None, int | None]) -> None:
        q = torch.zeros(1, rows, 1, 8).to(torch.float8_e4m3fn)
        k = torch.ones(1, keys, 1, 8).to(torch.float8_e4m3fn)
        v = one_hot_v(keys, 1, 64, torch.float8_e4m3fn)
        out, lse = fa.flash_attn_func(
            q, k, v, causal=causal, window_size=window, return_lse=True, out_dtype=torch.float32,
            impl=impl,
        )  # fmt: skip
        seen = visible_keys(rows, keys, causal, window)
        count = seen.sum(1)
        by_column = torch.zeros(rows, 64).index_add_(1, torch.arange(keys) % 64, seen.float())
        assert torch.equal((out[0, :, 0] * count[:, None]).round(), by_column)
        assert torch.equal(lse[0, 0].exp().round(), count.float())

    check()
