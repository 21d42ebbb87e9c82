"""One case of the sweep on one executor: run, compare with the definition, return the numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.call import Operands
from flash_attn_fp8.formats import FORMATS
from tests.budget import (
    CODE_ERROR,
    FP32_EPS,
    FP32_STEPS,
    Budget,
    assert_like_emulation,
    assert_rounded_once,
    budget_of,
    check_within,
    rel_l2,
)
from tests.cases.exact import attention
from tests.conftest import KERNELS
from tests.data import normal
from tests.plan.sequences import Form, arranged, sequence
from tests.sweep.grid import HEADS, Case


@dataclass(frozen=True)
class Outcome:
    """What one case measured: errors against the definition in fp64, and the error's budget.

    Of a kernel also its distance from the emulation of its tiles, and the ratio of their errors.
    """

    rel_l2: float
    budget: float
    lse_error: float
    from_emulation: float | None = None
    error_ratio: float | None = None


def run(case: Case, impl: str, device: str = "cpu") -> Outcome:
    """Run `case` on `impl`, and raise AssertionError where a result leaves its budget."""
    prepared = _prepare(case.shared(), device)
    # The definition does not split: `reference` proves everything else about those cases.
    splits = 1 if impl == "reference" else case.num_splits
    ways = {"num_splits": splits, "pack_gqa": case.pack_gqa}
    out, lse = fa.flash_attn_varlen_func(**prepared.arguments, **ways, impl=impl)
    check_within(prepared.budget, out, lse)
    if impl == "reference":  # it rounds no P: the budget, which allows for that, would hide much
        assert_rounded_once(out, prepared.exact)
        assert_rounded_once(lse, prepared.exact_lse)
    outcome = Outcome(
        rel_l2(out, prepared.budget.out),
        prepared.budget.rel_l2,
        float((lse - prepared.budget.lse).nan_to_num(nan=0.0).abs().max()),
    )
    if impl not in KERNELS:
        return outcome
    emulated, _ = fa.flash_attn_varlen_func(**prepared.arguments, **ways, impl="tiled")
    alike = assert_like_emulation(out, lse, emulated, prepared.budget)
    return replace(outcome, from_emulation=alike.rel_l2, error_ratio=alike.error_ratio)


def run_on_sm90(case: Case, exp2: str) -> Outcome:
    """Run `case` by the SM90 kernel on its device, with exponentials or with codes.

    Hopper's sums of 8-bit products have 13 fraction bits, of scores too, which the budget does not
    know: LSE and output are those of the emulation, which has the same sums, and the output's error
    is within the budget's model, for codes within twice that.
    """
    prepared = _prepare(case.shared(), "cuda")
    policy = fa.policy_for(case.fmt).replace(rescale_threshold=0)
    if exp2 == "code":
        policy = fa.policy_for(case.fmt, "sm90")
    ways = {"num_splits": case.num_splits, "pack_gqa": case.pack_gqa, "fp8_policy": policy}
    (out, lse), (emulated, emulated_lse) = (
        fa.flash_attn_varlen_func(**prepared.arguments, **ways, impl=impl)
        for impl in ("cute", "tiled")
    )
    budget = prepared.budget
    alike = assert_like_emulation(out, lse, emulated, budget, emulated_lse=emulated_lse)
    found = rel_l2(out, budget.out)
    limit = (
        budget.rel_l2_limit * (CODE_ERROR if exp2 == "code" else 1) + FORMATS["bf16"].unit_roundoff
    )
    assert found <= limit, f"rel_l2 {found:.4g} > budget {limit:.4g}"
    return Outcome(found, budget.rel_l2, alike.lse_error, alike.rel_l2, alike.error_ratio)


@dataclass(frozen=True)
class _Prepared:
    arguments: dict[str, Any]
    budget: Budget
    exact: Tensor
    exact_lse: Tensor


@lru_cache(maxsize=2)  # the executors of one case run after one another
def _prepare(case: Case, device: str) -> _Prepared:
    """Inputs and budget of a case; the budget's exact results are checked on the way."""
    sink = torch.linspace(-1, 2, HEADS[case.heads][0], device=device) if case.sink else None
    arguments = dict(
        causal=case.mask == "causal",
        window_size=case.window,
        learnable_sink=sink,
        return_lse=True,
    )
    arranged = _dense if case.layout == "dense" else _sequences
    more, (exact, exact_lse) = arranged(case, arguments, device)
    arguments |= more
    budget = budget_of(fa.flash_attn_varlen_func.describe_call(**arguments))
    assert rel_l2(budget.out, exact) <= FP32_STEPS * FP32_EPS, "the reference left the definition"
    assert torch.equal(budget.lse.isneginf(), exact_lse.isneginf())
    return _Prepared(arguments, budget, exact, exact_lse)


Arranged = tuple[dict[str, Any], tuple[Tensor, Tensor]]


def _dense(case: Case, score: dict[str, Any], device: str) -> Arranged:
    inputs = normal(
        batch=case.batch,
        seqlen_q=case.seqlens[0],
        seqlen_k=case.seqlens[1],
        nheads=HEADS[case.heads][0],
        nheads_kv=HEADS[case.heads][1],
        d=case.head_dims[0],
        dv=case.head_dims[1],
        fmt=case.fmt,
        device=device,
    )
    arguments = {"q": inputs.q, "k": inputs.k, "v": inputs.v, **inputs.scales}
    call = fa.flash_attn_varlen_func.describe_call(**arguments, **score)
    return arguments, definition(call.operands, case)


def _sequences(case: Case, score: dict[str, Any], device: str) -> Arranged:
    """Sequences of several lengths with scales of their own, packed or over pages."""
    (heads, heads_kv), (d, dv) = HEADS[case.heads], case.head_dims
    form = Form(case.fmt, case.fmt, heads, heads_kv, d, dv, scaled=False)
    sequences = [sequence(form, *size, seed=i) for i, size in enumerate(case.sequences)]
    shape = len(sequences), heads_kv
    generator = torch.Generator().manual_seed(0)
    scales = {f"{n}_descale": torch.rand(shape, generator=generator) + 0.5 for n in "qkv"}
    arguments = arranged(form, sequences, case.layout, case.page_size, seed=0) | scales
    rows = arguments["q"].shape[0]  # some belong to no sequence
    exact = torch.zeros(rows, heads, dv, dtype=torch.float64)
    exact_lse = torch.full((heads, rows), -math.inf, dtype=torch.float64)
    sink = score["learnable_sink"]
    sink = None if sink is None else sink.cpu()
    start = 0
    for b, s in enumerate(sequences):
        mine = {name: scale[b : b + 1] for name, scale in scales.items()}
        out, lse = attention(
            s.q[None], s.k[None], s.v[None], scales=mine, sink=sink,
            causal=score["causal"], window_size=score["window_size"],
        )  # fmt: skip
        exact[start : start + len(s.q)], exact_lse[:, start : start + len(s.q)] = out[0], lse[0]
        start += len(s.q)
    there = {name: t.to(device) for name, t in arguments.items()}
    return there, (exact.to(device), exact_lse.to(device))


def definition(o: Operands, case: Case) -> tuple[Tensor, Tensor]:
    """Attention of a dense case spelled out in fp64: no blocks, no tiles, no shared code."""
    group = o.q.shape[2] // o.k.shape[2]
    q = o.q.double() * _per_head(o.q_descale, o.q.shape[2])
    k = (o.k.double() * _per_head(o.k_descale, o.k.shape[2])).repeat_interleave(group, dim=2)
    v = (o.v.double() * _per_head(o.v_descale, o.v.shape[2])).repeat_interleave(group, dim=2)
    s = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(o.q.shape[-1])
    sq, sk = case.seqlens
    row = torch.arange(sq, device=s.device)[:, None]
    ahead = torch.arange(sk, device=s.device)[None] - (row + sk - sq)
    left, right = case.window
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if case.mask == "causal":
        hidden |= ahead > 0
    if left is not None and right is not None:
        hidden |= (ahead < -left) | (ahead > right)
    s = s.masked_fill(hidden, -math.inf)
    if o.learnable_sink is not None:
        logit = o.learnable_sink.double()[None, :, None, None].expand(*s.shape[:3], 1)
        s = torch.cat([s, logit], dim=-1)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - torch.where(lse.isneginf(), 0.0, lse)[..., None])[..., :sk]
    return (p @ v.transpose(1, 2)).transpose(1, 2), lse


def _per_head(descale: Tensor, heads: int) -> Tensor:
    """(batch, KV heads) to (batch, 1, heads, 1)."""
    spread = descale.double().repeat_interleave(heads // descale.shape[1], dim=1)
    return spread[:, None, :, None]
