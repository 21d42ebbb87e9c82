"""Chosen keys: attention over a selection is attention over the keys that it names, gathered."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from tests.api.calls import ints, same_bits
from tests.budget import (
    FP32_EPS,
    FP32_STEPS,
    assert_like_emulation,
    budget_of,
    check_within,
    rel_l2,
)
from tests.data import normal, paged

pytestmark = pytest.mark.usefixtures("on_either")

BATCH, HEADS_KV, GROUP, D, SLOTS = 2, 2, 3, 64, 160
LENGTHS = (150, 77)


@dataclass(frozen=True)
class Cache:
    """A batched cache with a scale for each token and head, and queries over it."""

    q: Tensor
    k: Tensor
    v: Tensor
    scales: dict[str, Tensor]

    @classmethod
    def of(cls, tokens: int, kv_fmt: str = "e4m3", per: str = "token_head") -> Cache:
        x = normal(
            batch=BATCH, seqlen_q=tokens, seqlen_k=SLOTS, nheads=HEADS_KV * GROUP,
            nheads_kv=HEADS_KV, d=D, fmt="bf16", kv_fmt=kv_fmt, per=per, gain=2.0,
        )  # fmt: skip
        return cls(x.q, x.k, x.v, x.scales)

    def call(self, page_size: int | None = None) -> dict[str, Any]:
        """Arguments of flash_attn_with_kvcache."""
        call: dict[str, Any] = {
            "q": self.q, "k_cache": self.k, "v_cache": self.v, "cache_seqlens": ints(*LENGTHS),
            "return_softmax_lse": True, **self.scales,
        }  # fmt: skip
        if page_size:
            call["k_cache"], call["page_table"] = paged(self.k, page_size)
            call["v_cache"], _ = paged(self.v, page_size)
            call |= {
                name: paged(x, page_size)[0] if x.ndim == 3 else x
                for name, x in self.scales.items()
            }
        return call


def chosen(
    selection: Tensor, lens: Tensor | None, page_size: int | None, b: int, head: int
) -> list[int]:
    """Positions of the keys that a sequence and KV head reads, in order."""
    count = selection.shape[2] if lens is None else int(lens[b, head])
    entries = selection[b, head, :count].tolist()
    if page_size:
        entries = [e * page_size + i if e >= 0 else -1 for e in entries for i in range(page_size)]
    return [e for e in entries if 0 <= e < LENGTHS[b]]


def definition(cache: Cache, keys: list[list[list[int]]], causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) in fp64 of gathered keys, sequence by sequence and head by head."""
    tokens = cache.q.shape[1]
    out = torch.zeros(*cache.q.shape, dtype=torch.float64)
    lse = torch.full((BATCH, HEADS_KV * GROUP, tokens), -math.inf, dtype=torch.float64)
    scales = {n: s.double().expand(BATCH, SLOTS, HEADS_KV) for n, s in cache.scales.items()}
    for b in range(BATCH):
        for head in range(HEADS_KV):
            at = torch.tensor(keys[b][head], dtype=torch.int64)
            k = cache.k.double()[b, at, head] * scales["k_descale"][b, at, head, None]
            v = cache.v.double()[b, at, head] * scales["v_descale"][b, at, head, None]
            mine = slice(head * GROUP, head * GROUP + GROUP)
            s = torch.einsum("igd,jd->gij", cache.q[b, :, mine].double(), k) / math.sqrt(D)
            if causal:
                last = torch.arange(tokens)[:, None] + LENGTHS[b] - tokens
                s = s.masked_fill(at[None] > last, -math.inf)
            lse[b, mine] = torch.logsumexp(s, -1)
            p = torch.exp(s - lse[b, mine].nan_to_num(neginf=0.0)[..., None])
            out[b, :, mine] = torch.einsum("gij,jd->igd", p, v)
    return out, lse


@dataclass(frozen=True)
class Choice:
    """A selection, and what the call does besides."""

    name: str
    unit: str = "tokens"
    page_size: int | None = None
    tokens: int = 1
    lens: tuple[tuple[int, int], tuple[int, int]] | None = None
    options: tuple[tuple[str, Any], ...] = ()
    kv_fmt: str = "e4m3"
    per: str = "token_head"

    def __str__(self) -> str:
        return self.name

    @property
    def selection(self) -> Tensor:
        """Entries in any order; -1 among them, some past the end, some named twice."""
        generator = torch.Generator().manual_seed(len(self.name))
        entries = 75 if self.unit == "tokens" else 9
        limit = SLOTS + 20 if self.unit == "tokens" else -(-SLOTS // (self.page_size or 1)) + 1
        shape = BATCH, HEADS_KV, entries
        x = torch.randint(-10 if self.unit == "tokens" else -1, limit, shape, generator=generator)
        x[0, 0, 1::4] = x[0, 0, 0]  # many times the same
        x[..., 5] = -1
        x[1, 1, -1] = 2**31 - 1 if self.unit == "tokens" else 10**6
        return x.clamp(min=-2).int()


CHOICES = (
    Choice("tokens of a batched cache", lens=((75, 0), (31, 1))),
    Choice("tokens of pages, causal, several queries", page_size=3, tokens=8,
           options=(("causal", True),)),
    Choice("tokens of pages, splits", page_size=16, options=(("num_splits", 2),), kv_fmt="int8",
           lens=((70, 75), (0, 40))),
    Choice("pages", "pages", 16, lens=((9, 0), (5, 9)), per="head"),
    Choice("pages, causal, several queries, splits", "pages", 16, 4,
           options=(("causal", True), ("num_splits", 2))),
    Choice("pages of 1", "pages", 1),
)  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_attention_over_the_gathered_keys(choice: Choice) -> None:
    """-1 and what lies past the end are skipped; what is named twice counts twice."""
    cache = Cache.of(choice.tokens, choice.kv_fmt, choice.per)
    selection = choice.selection
    lens = None if choice.lens is None else torch.tensor(choice.lens, dtype=torch.int32)
    options = dict(choice.options)
    call = cache.call(choice.page_size) | options | {
        "selection": selection, "selection_lens": lens, "select_pages": choice.unit == "pages",
    }  # fmt: skip
    size = choice.page_size if choice.unit == "pages" else None
    keys = [[chosen(selection, lens, size, b, h) for h in range(HEADS_KV)] for b in range(BATCH)]
    exact, exact_lse = definition(cache, keys, options.get("causal", False))
    budget = budget_of(fa.flash_attn_with_kvcache.describe_call(**call))
    assert rel_l2(budget.out, exact) <= FP32_STEPS * FP32_EPS
    assert torch.equal(budget.lse.isneginf(), exact_lse.isneginf())
    out, lse = fa.flash_attn_with_kvcache(**call, impl="sim")
    check_within(budget, out, lse)
    emulated, _ = fa.flash_attn_with_kvcache(**call, impl="tiled")
    assert_like_emulation(out, lse, emulated, budget, own_tiles=True)


@pytest.mark.parametrize("page_size", [None, 16])
def test_the_bits_of_a_dense_call_over_the_gathered_keys(page_size: int | None) -> None:
    """Where all entries count, the tiles are those of the gathered cache."""
    cache = Cache.of(1)
    generator = torch.Generator().manual_seed(0)
    selection = torch.stack([
        torch.randint(0, LENGTHS[b], (HEADS_KV, 70), generator=generator) for b in range(BATCH)
    ]).int()  # fmt: skip
    out, lse = fa.flash_attn_with_kvcache(
        **cache.call(page_size), selection=selection, impl="sim", num_splits=1
    )
    for head in range(HEADS_KV):
        at = selection[:, head].long()
        k, v = (
            torch.stack([x[b, at[b], head : head + 1] for b in range(BATCH)])
            for x in (cache.k, cache.v)
        )
        scales = {
            name: torch.stack([x[b, at[b], head : head + 1] for b in range(BATCH)])
            for name, x in cache.scales.items()
        }
        mine = slice(head * GROUP, head * GROUP + GROUP)
        expected = fa.flash_attn_with_kvcache(
            cache.q[:, :, mine], k, v, **scales, impl="sim", num_splits=1, return_softmax_lse=True
        )
        assert same_bits((out[:, :, mine].contiguous(), lse[:, mine].contiguous()), expected)


def test_all_pages_in_order_are_the_whole_cache() -> None:
    cache = Cache.of(4)
    everything = torch.arange(10).expand(BATCH, HEADS_KV, 10).int().contiguous()
    call = cache.call(16) | {"impl": "sim", "causal": True, "num_splits": 1}
    expected = fa.flash_attn_with_kvcache(**call)
    found = fa.flash_attn_with_kvcache(**call, selection=everything, select_pages=True)
    assert same_bits(found, expected)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"selection": torch.zeros(BATCH, HEADS_KV, 4, dtype=torch.int64)},
        "selection=int64[2, 2, 4] must be int32: selection.int()",
    ),
    "rank": (
        {"selection": torch.zeros(BATCH, 4, dtype=torch.int32)},
        "selection=int32[2, 4] must be (batch, nheads_kv, entries) with nheads_kv 2",
    ),
    "heads": (
        {"selection": torch.zeros(BATCH, HEADS_KV * GROUP, 4, dtype=torch.int32)},
        "selection=int32[2, 6, 4] must be (batch, nheads_kv, entries) with nheads_kv 2",
    ),
    "batch": (
        {"selection": torch.zeros(3, HEADS_KV, 4, dtype=torch.int32)},
        "q=bf16[2, 1, 6, 64] is a batch of 2, selection=int32[3, 2, 4] one of 3",
    ),
    "lens dtype": (
        {"selection_lens": torch.ones(BATCH, HEADS_KV)},
        "selection_lens=fp32[2, 2] must be int32: selection_lens.int()",
    ),
    "lens shape": (
        {"selection_lens": torch.ones(BATCH, dtype=torch.int32)},
        "selection_lens=int32[2] must be (batch, nheads_kv) with nheads_kv 2",
    ),
    "lens alone": (
        {"selection": None, "selection_lens": torch.ones(BATCH, HEADS_KV, dtype=torch.int32)},
        "selection_lens says how long selection is, which is missing",
    ),
    "pages, no bool": ({"select_pages": 1}, "select_pages=1 must be a bool"),
    "pages alone": (
        {"selection": None, "select_pages": True},
        "select_pages says what selection holds, which is missing",
    ),
    "pages without pages": (
        {"select_pages": True},
        "select_pages needs a page_table, whose columns are selected",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_calls_name_the_argument(name: str) -> None:
    changes, reason = REFUSED[name]
    plain = {"selection": torch.zeros(BATCH, HEADS_KV, 4, dtype=torch.int32)}
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.flash_attn_with_kvcache(**Cache.of(1).call() | plain | changes, impl="sim")
    assert reason in refusal.value.reasons


@pytest.mark.parametrize("entry", [2**28 + 1, 2**31 - 1, -(2**31), 2**27])
def test_pages_far_past_the_end_do_not_come_round(entry: int) -> None:
    """Their first token's position has more than 32 bits."""
    call = Cache.of(4).call(16) | {"impl": "sim", "causal": True, "num_splits": 1}
    call["select_pages"] = True
    first, wild = (
        torch.tensor(entries, dtype=torch.int32).expand(BATCH, HEADS_KV, 2).contiguous()
        for entries in ([0, -1], [0, entry])
    )
    expected, found = (fa.flash_attn_with_kvcache(**call, selection=s) for s in (first, wild))
    assert same_bits(found, expected)
