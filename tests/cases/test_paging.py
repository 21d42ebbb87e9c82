"""Cases 26, 41, 42, 44, 47: pages lie anywhere, and nothing past a length is ever read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.budget import rel_l2
from tests.cases import limits
from tests.cases.arrange import MIXES, Answer, Mix, Question, int32
from tests.cases.limits import assert_bitwise, assert_near
from tests.data import paged

E4M3 = MIXES[0]
FP32 = torch.float32


def assert_same(actual: Answer, expected: Answer) -> None:
    assert_bitwise(actual.raw_out, expected.raw_out)
    assert_bitwise(actual.raw_lse, expected.raw_lse)


# ------------------------------------------------------------------------------------ case 26

PAGES, SLOTS, HEADS, D = 6, 16, 4, 64
USED = [90, 17]


def padded(x: Tensor) -> Tensor:
    """x with pages further apart than they are long; bytes 0x7F (NaN in fp8) lie between."""
    n = x[0].numel()
    room = torch.full((PAGES, (n + 48) * x.element_size()), 0x7F, dtype=torch.uint8).view(x.dtype)
    pool = room[:, :n].unflatten(1, x.shape[1:])
    pool.copy_(x)
    return pool


def interleaved(x: Tensor) -> Tensor:
    """x as one half of a pool that holds K and V side by side."""
    return torch.stack([torch.zeros_like(x), x], dim=1)[:, 1]


def heads_first(x: Tensor) -> Tensor:
    """x as a view of pages that lie as (page, head, slot, ...)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def pool_call(mix: Mix, q: Tensor) -> dict[str, Tensor]:
    """Codes and scales of a whole pool; every slot's scale is its own."""
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randint(-8, 9, (PAGES, SLOTS, HEADS, D), generator=generator) for _ in "kv")
    slot = torch.arange(PAGES * SLOTS * HEADS).reshape(PAGES, SLOTS, HEADS)
    call = {"q": q.to(mix.q), "k": k.to(mix.kv), "v": v.to(mix.kv), "seqused_k": int32(*USED)}
    if mix.kv_is_8bit:
        call |= {"k_descale": 1 + slot / 64, "v_descale": 1 + slot.flip(0) / 64}
    table = torch.stack([torch.randperm(PAGES, generator=generator) for _ in USED])
    return call | {"page_table": table.int()}


@pytest.mark.parametrize("stride", [padded, interleaved, heads_first])
def test_case_26_strided_pages(
    execution: dict[str, object], mix: Mix, stride: Callable[[Tensor], Tensor]
) -> None:
    """Case 26: pools and their scales with any strides give the bits of packed ones."""
    q = torch.randn(2, 3, 2 * HEADS, D, generator=torch.Generator().manual_seed(1))
    packed = pool_call(mix, q)
    apart = {
        n: stride(t) if n in ("k", "v", "k_descale", "v_descale") else t for n, t in packed.items()
    }
    assert not apart["k"].is_contiguous()
    expected = fa.flash_attn_varlen_func(**packed, return_lse=True, **execution)
    got = fa.flash_attn_varlen_func(**apart, return_lse=True, **execution)
    assert_bitwise(got[0], expected[0])
    assert_bitwise(got[1], expected[1])


def test_case_26_scale_of_each_slot(execution: dict[str, object], cached_mix: Mix) -> None:
    """Case 26: q = 0 gives the mean of v_scale * V over the slots that the page table names."""
    call = pool_call(cached_mix, torch.zeros(2, 1, HEADS, D))
    call["v"] = call["v"].float().abs().to(cached_mix.kv)  # a mean far from zero
    call |= {"k_descale": padded(call["k_descale"]), "v_descale": padded(call["v_descale"])}
    out, lse = fa.flash_attn_varlen_func(**call, return_lse=True, out_dtype=FP32, **execution)
    real = call["v"].float() * call["v_descale"][..., None]
    for b, used in enumerate(USED):
        rows = real[call["page_table"][b].long()].flatten(0, 1)[:used]
        assert rel_l2(out[b, 0], rows.mean(0)) <= limits.NOISE_REL_RMS[cached_mix.p_name]
    assert_near(lse, int32(*USED).double().log()[:, None, None].expand(lse.shape), limits.EXACT_ABS)


# ------------------------------------------------------------------------------------ case 41

LENGTHS = [1, 31, 33, 127, 0]
# Codes that no finite number has, or (int8) the most harmful ones.
GARBAGE = {
    "e4m3": (0x7F, 0xFF),
    "e5m2": (0x7C, 0x7F),
    "int8": (0x7F, 0x80),
    "bf16": (0x7FC0, 0x7F80),
    "fp16": (0x7E00, 0x7C00),
}
BAD_SCALES = (math.nan, math.inf, 0.0, -1.0)


def spoil(x: Tensor, name: str, unused: Tensor) -> Tensor:
    """x with garbage in the unused slots, (batch, slots)."""
    bits = torch.uint8 if x.element_size() == 1 else torch.int16
    codes = torch.tensor(GARBAGE[name]).to(torch.int32).to(bits)
    spoilt = x.clone()
    view = spoilt.view(bits)
    pattern = codes.repeat(view[unused].numel() // len(codes) + 1)[: view[unused].numel()]
    view[unused] = pattern.reshape(view[unused].shape)
    return spoilt


def spoil_scale(x: Tensor, unused: Tensor) -> Tensor:
    spoilt = x.clone()
    bad = torch.tensor(BAD_SCALES).repeat(x.numel())[: spoilt[unused].numel()]
    spoilt[unused] = bad.reshape(spoilt[unused].shape)
    return spoilt


def cache(mix: Mix, d: int, slots: int = 128) -> tuple[Question, Question]:
    """A partly used cache with zeros in its unused slots, and the same with garbage there."""
    generator = torch.Generator().manual_seed(d)
    q, k, v = (torch.randn(len(LENGTHS), n, 2, d, generator=generator) for n in (2, slots, slots))
    unused = torch.arange(slots) >= torch.tensor(LENGTHS)[:, None]
    k[unused] = v[unused] = 0
    scales = {}
    if mix.kv_is_8bit:
        scales = {
            n: torch.rand(*k.shape[:3], generator=generator) + 0.5
            for n in ("k_descale", "v_descale")
        }
    clean = Question(*mix.cast(q, 8 * k if mix.kv_name == "int8" else k, v), scales, LENGTHS)
    garbage = replace(
        clean,
        k=spoil(clean.k, mix.kv_name, unused),
        v=spoil(clean.v, mix.kv_name, unused),
        scales={n: spoil_scale(s, unused) for n, s in scales.items()},
    )
    return clean, garbage


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("layout", ["dense", "paged"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_case_41_garbage_past_the_length(
    execution: dict[str, object], layout: str, mix: Mix, d: int, causal: bool
) -> None:
    """Case 41: NaN and infinity in unused slots and scales leave every bit as it was."""
    clean, garbage = cache(mix, d)
    assert not torch.equal(clean.k.view(torch.uint8), garbage.k.view(torch.uint8))
    expected = clean.ask(layout, causal=causal, **execution)
    got = garbage.ask(
        layout, causal=causal, poisoned=True, out_dtype=expected.raw_out.dtype, **execution
    )
    assert_same(got, expected)
    assert not got.out[4].any()
    assert got.lse[4].isneginf().all()


def test_case_41_garbage_in_unused_queries(impl: str, mix: Mix) -> None:
    """Case 41's kind: query rows past seqused_q, and packed rows past cu_seqlens, hold garbage."""
    clean, _ = cache(mix, 64)
    used = torch.tensor([2, 1, 0, 2, 1])
    spoilt = spoil(clean.q, mix.q_name, torch.arange(2) >= used[:, None])
    options = {"seqused_q": used.int(), "impl": impl, "poisoned": True}
    expected = clean.ask("dense", **options)
    assert_same(replace(clean, q=spoilt).ask("dense", **options), expected)
    assert expected.lse[2].isneginf().all()
    assert not expected.out[2].any()
    assert torch.isfinite(expected.out).all()


def test_case_41_garbage_past_the_packed_end(impl: str, mix: Mix) -> None:
    """Case 41's kind: a packed K and V whose tail belongs to no sequence, or is not in use."""
    clean, garbage = cache(mix, 64)
    flat = {"cu_seqlens_k": torch.arange(0, 641, 128, dtype=torch.int32)}
    flat |= {"seqused_k": int32(*LENGTHS), "return_lse": True, "impl": impl}

    def ask(x: Question) -> tuple[Tensor, Tensor]:
        scales = {n: s.flatten(0, 1)[None] for n, s in x.scales.items()}
        return fa.flash_attn_varlen_func(
            x.q, x.k.flatten(0, 1), x.v.flatten(0, 1), **scales, **flat
        )

    expected, got = ask(clean), ask(garbage)
    assert_bitwise(got[0], expected[0])
    assert_bitwise(got[1], expected[1])


# ------------------------------------------------------------------------------------ case 42

WILD = (-1, 2**30, -(2**31), 2**31 - 1, 7)


def context(mix: Mix, seqlen_q: int) -> tuple[dict[str, Tensor], Tensor]:
    """257 keys in 5 columns of pages of 64, and the table that is exactly as wide."""
    generator = torch.Generator().manual_seed(seqlen_q)
    q, k, v = (torch.randn(1, n, 2, 64, generator=generator) for n in (seqlen_q, 257, 257))
    q, k, v = mix.cast(q, 8 * k if mix.kv_name == "int8" else k, v)
    pages, table = paged(k, 64)
    call = {"q": q, "k": pages, "v": paged(v, 64)[0], "seqused_k": int32(257), **mix.ones}
    return call, table


@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_case_42_tail_of_the_page_table(
    execution: dict[str, object], mix: Mix, seqlen_q: int
) -> None:
    """Case 42a: columns past the length hold anything: -1, ids far out of range, stale ids."""
    call, table = context(mix, seqlen_q)
    options = {"causal": True, "return_lse": True, **execution}
    expected = fa.flash_attn_varlen_func(**call, page_table=table, **options)
    for wild in WILD:
        wider = torch.cat([table, torch.full((1, 3), wild, dtype=torch.int32)], dim=1)
        got = fa.flash_attn_varlen_func(**call, page_table=wider, **options)
        assert_bitwise(got[0], expected[0])
        assert_bitwise(got[1], expected[1])


def test_case_42_tails_of_a_ragged_batch(execution: dict[str, object], mix: Mix) -> None:
    """Case 42a: each sequence has a tail of its own, beside longer ones that use those columns."""
    clean, _ = cache(mix, 64)
    pages, table = paged(clean.k, 16)
    scales = {n: paged(s, 16)[0] for n, s in clean.scales.items()}
    call = {"q": clean.q, "k": pages, "v": paged(clean.v, 16)[0], **scales, **execution}
    call |= {"seqused_k": int32(*LENGTHS), "return_lse": True}
    expected = fa.flash_attn_varlen_func(**call, page_table=table)
    unused = 16 * torch.arange(table.shape[1]) >= int32(*LENGTHS)[:, None]
    for wild in WILD:
        got = fa.flash_attn_varlen_func(**call, page_table=table.masked_fill(unused, wild))
        assert_bitwise(got[0], expected[0])
        assert_bitwise(got[1], expected[1])


@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_case_42_exact_width(execution: dict[str, object], mix: Mix, seqlen_q: int) -> None:
    """Case 42b: five columns and no more, last in their allocation, or wild ids right behind."""
    call, table = context(mix, seqlen_q)
    options = {"causal": True, "return_lse": True, **execution}
    expected = fa.flash_attn_varlen_func(**call, page_table=table, **options)
    behind = torch.cat([table, torch.full((1, 3), 2**30, dtype=torch.int32)], dim=1)[:, :5]
    last = torch.cat([torch.full((1, 3), 2**30, dtype=torch.int32), table], dim=1)[:, 3:]
    for view in (behind, last):
        got = fa.flash_attn_varlen_func(**call, page_table=view, **options)
        assert_bitwise(got[0], expected[0])
        assert_bitwise(got[1], expected[1])


def test_case_42_a_wild_id_in_use_is_refused(impl: str) -> None:
    """Case 42's kind: inside the length a wild id is an error that names its place, on the CPU."""
    call, table = context(E4M3, 1)
    for wild in WILD[:4]:
        spoilt = table.clone()
        spoilt[0, 4] = wild
        with pytest.raises(ValueError, match=rf"page_table\[0, 4\]={wild}"):
            fa.flash_attn_varlen_func(**call, page_table=spoilt, impl=impl)


# ------------------------------------------------------------------------------------ case 44


def small_call(**changes: object) -> dict[str, object]:
    """Two columns of pages of 16: room for 32 keys."""
    pool = torch.ones(4, 16, 2, 64).to(E4M3.kv)
    call = {"q": torch.ones(1, 1, 2, 64).to(E4M3.q), "k": pool, "v": pool}
    return call | {"page_table": int32(0, 1)[None], "seqused_k": int32(20)} | changes


REFUSED = {
    "max_seqlen_k beyond the table": ({"max_seqlen_k": 40}, "max_seqlen_k=40.*32"),
    "seqused_k beyond the table": ({"seqused_k": int32(33)}, r"seqused_k\[0\]=33.*32"),
    "negative length": ({"seqused_k": int32(-1)}, r"seqused_k\[0\]=-1"),
    "int64 page_table": ({"page_table": torch.tensor([[0, 1]])}, "page_table must be int32"),
    "int64 seqused_k": ({"seqused_k": torch.tensor([20])}, "seqused_k must be int32"),
    "1-d page_table": ({"page_table": int32(0, 1)}, "page_table must be"),
    "other page size of v": ({"v": torch.ones(4, 32, 2, 64).to(E4M3.kv)}, "k=.*v=.*agree"),
    "other number of pages of v": ({"v": torch.ones(5, 16, 2, 64).to(E4M3.kv)}, "k=.*v=.*agree"),
    "more tables than sequences": ({"page_table": int32(0, 1)[None].expand(2, 2)}, "page_table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_case_44_refused_before_launch(impl: str, name: str) -> None:
    """Case 44: what the host can see is refused as ValueError and TypeError; nothing is written."""
    changes, message = REFUSED[name]
    out, lse = torch.full((1, 1, 2, 64), 7.0), torch.full((1, 2, 1), 7.0)
    with pytest.raises(ValueError, match=message) as refusal:
        fa.flash_attn_varlen_func(**small_call(**changes), out=out, lse=lse, impl=impl)
    assert isinstance(refusal.value, TypeError)
    assert torch.equal(out, torch.full_like(out, 7.0))
    assert torch.equal(lse, torch.full_like(lse, 7.0))


@pytest.mark.parametrize("name", ["page_table", "seqused_k", "v", "k_descale"])
def test_case_44_tensors_on_another_device(name: str) -> None:
    """Case 44: an operand on another device than q is refused by name, before anything runs."""
    call = small_call(k_descale=torch.ones(()))
    moved = {n: t if n == name else t.to("meta") for n, t in call.items()}
    answer = fa.explain(fa.flash_attn_varlen_func, **moved)
    assert not answer.ok
    assert any(f"{name} on cpu" in reason for reason in answer.reasons)


def test_case_44_duties_are_documented() -> None:
    """Case 44: the documentation says which values are the caller's duty on a device."""
    text = " ".join((fa.flash_attn_varlen_func.__doc__ or "").split())
    assert "caller's duty" in text
    assert "page_table" in text.partition("Raises:")[2].partition("caller's duty")[0]


# ------------------------------------------------------------------------------------ case 47

PAGE_SIZES = (1, 2, 3, 16, 19, 64, 128, 256)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_case_47_any_page_size(execution: dict[str, object], mix: Mix, causal: bool) -> None:
    """Case 47: one logical cache, scattered over pages of any size, gives the same bits."""
    lengths = [1, 19, 20, 255, 257]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(5, n, h, 64, generator=generator) for n, h in ((2, 4), (257, 2), (257, 2))
    )
    per_token = torch.rand(2, 5, 257, 2, generator=generator) + 0.5
    scales = {"k_descale": per_token[0], "v_descale": per_token[1]} if mix.kv_is_8bit else {}
    x = Question(*mix.cast(q, 8 * k if mix.kv_name == "int8" else k, v), scales, lengths)
    expected = x.ask("dense", causal=causal, **execution)
    for page_size in PAGE_SIZES:
        got = replace(x, page_size=page_size).ask("paged", causal=causal, **execution)
        assert_same(got, expected)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_case_47_page_sizes_name_their_keys(impl: str, page_size: int) -> None:
    """Case 47: q = 0 and distinct V rows: each sequence gets the mean of its own keys."""
    lengths = [1, 19, 20, 255, 257]
    q, k = torch.zeros(5, 1, 1, 16), torch.zeros(5, 257, 1, 16)
    v = (torch.arange(257)[None, :, None, None] % 13 + torch.arange(5)[:, None, None, None]).float()
    x = Question(*E4M3.cast(q, k, v.expand(k.shape)), {}, lengths, page_size)
    answer = x.ask("paged", impl=impl, out_dtype=FP32, poisoned=True)
    mean = torch.stack([x.v[b, :n].double().mean(0) for b, n in enumerate(lengths)])
    assert_near(answer.out[:, 0], mean, limits.EXACT_ABS)
