"""`explain` says what a call would do, on any target, without doing it."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8 import ops
from flash_attn_fp8.explanation import Explanation
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.plan import Plan, Split, TiledSpec
from flash_attn_fp8.problem import Descale, Problem
from flash_attn_fp8.support import EXECUTORS
from flash_attn_fp8.target import Target
from tests.api.calls import BASES, dense, same_bits

EXPLAINED = {
    "flash_attn_func": "dense",
    "flash_attn_varlen_func": "packed",
    "flash_attn_with_kvcache": "cache",
    "_flash_attn_fwd": "packed",
}


def _meta(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _index(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _scale(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.float32)


def _serving() -> dict[str, Any]:
    """A server's step: packed queries over a paged cache with a scale for each token and head."""
    return {
        "q": _meta(7, 8, 128),
        "k": _meta(40, 16, 2, 128),
        "v": _meta(40, 16, 2, 128),
        "cu_seqlens_q": _index(4),
        "seqused_k": _index(3),
        "page_table": _index(3, 12),
        "max_seqlen_q": 4,
        "causal": True,
        "window_size": (256, None),
        "learnable_sink": _meta(8, dtype=torch.bfloat16),
        "q_descale": _scale(),
        "k_descale": _scale(40, 16, 2),
        "v_descale": _scale(40, 16, 2),
        "return_lse": True,
    }


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_call_that_runs(name: str) -> None:
    arguments = BASES[EXPLAINED[name]]()
    explanation = fa.explain(getattr(fa, name), **arguments)
    assert isinstance(explanation, Explanation)
    assert (explanation.ok, explanation.reasons) == (True, ())
    assert explanation.call.function == name
    assert explanation.target == Target("cpu")
    assert isinstance(explanation.problem, Problem)
    assert isinstance(explanation.plan, Plan)
    assert fa.explain(name, **arguments).plan == explanation.plan


def test_its_fields_are_what_was_understood() -> None:
    explanation = fa.explain(fa.flash_attn_varlen_func, **_serving())
    assert explanation.problem is not None
    traits, sizes = explanation.problem.traits, explanation.problem.sizes
    assert (traits.q_format, traits.kv_format, traits.out_format) == ("e4m3", "e4m3", "bf16")
    assert (traits.q_layout, traits.kv_layout) == ("varlen", "paged")
    assert (traits.head_dim, traits.head_dim_v, traits.q_heads_per_kv_head) == (128, 128, 4)
    assert (traits.seqused_q, traits.seqused_k, traits.sink, traits.softcap) == (
        False, True, True, False)  # fmt: skip
    assert (traits.bounded_left, traits.bounded_right, traits.lse) == (True, True, True)
    assert traits.q_descale == Descale("tensor")
    assert traits.k_descale == traits.v_descale == Descale("token_head")
    assert (sizes.batch, sizes.seqlen_q, sizes.seqlen_k) == (3, 4, 12 * 16)
    assert (sizes.nheads, sizes.nheads_kv, sizes.total_q) == (8, 2, 7)
    assert (sizes.num_pages, sizes.page_size, sizes.total_k) == (40, 16, None)
    assert (sizes.window_left, sizes.window_right) == (256, 0)
    assert sizes.softmax_scale == 128**-0.5
    assert explanation.problem.out_shape == (7, 8, 128)
    assert explanation.problem.lse_shape == (8, 7)


def test_an_explanation_is_frozen() -> None:
    explanation = fa.explain(fa.flash_attn_func, **dense())
    with pytest.raises(dataclasses.FrozenInstanceError):
        explanation.reasons = ("no",)  # type: ignore[misc]


@pytest.mark.parametrize("name", EXPLAINED)
def test_no_data_is_needed_nor_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(*_: object, **__: object) -> None:
        raise AssertionError("explain executed the call")

    arguments = BASES[EXPLAINED[name]]()
    wanted = fa.explain(name, **arguments)
    for step in ("execute", "check_values", "_empty_out"):
        monkeypatch.setattr(ops, step, ran)
    nothing = {n: x.to("meta") if isinstance(x, Tensor) else x for n, x in arguments.items()}
    got = fa.explain(name, **nothing)
    assert (got.problem, got.plan, str(got)) == (wanted.problem, wanted.plan, str(wanted))


# ------------------------------------------------------------------------------ what was understood


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((), Descale("tensor")),
        ((1,), Descale("tensor")),
        ((1, 1, 1), Descale("tensor")),
        ((2,), Descale("head")),
        ((4,), Descale("head", per_query_head=True)),
        ((3, 2), Descale("batch_head")),
        ((3, 4), Descale("batch_head", per_query_head=True)),
        ((3, 6, 2), Descale("token_head")),
        ((3, 6, 4), Descale("token_head", per_query_head=True)),
    ],
)
def test_the_number_of_dimensions_is_the_granularity(shape: tuple[int, ...], kind: Descale) -> None:
    explanation = fa.explain(
        "flash_attn_func", _meta(3, 6, 4, 16), _meta(3, 40, 2, 16), _meta(3, 40, 2, 16),
        q_descale=_scale(*shape),
    )  # fmt: skip
    assert explanation.problem is not None
    assert explanation.problem.traits.q_descale == kind


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        (None, fa.POLICIES["e4m3"]["default"]),
        ("balanced", fa.POLICIES["e4m3"]["balanced"]),
        (fa.POLICIES["e4m3"]["reference_fix"], fa.POLICIES["e4m3"]["reference_fix"]),
        ("e4m3 max_offset=5 rescale_threshold=0.5", fa.Fp8Policy("e4m3", 5, 0.5)),
    ],
)
def test_the_policy(given: object, policy: fa.Fp8Policy) -> None:
    explanation = fa.explain(fa.flash_attn_func, **dense(), fp8_policy=given)
    assert explanation.problem is not None
    assert explanation.problem.traits.policy == policy
    assert str(policy) in str(explanation)


def test_without_a_policy_p_over_an_8_bit_cache_is_fp16() -> None:
    arguments = dense() | {"q": _meta(2, 6, 4, 16, dtype=torch.bfloat16)}
    arguments = {n: x.to("meta") for n, x in arguments.items()}
    explanation = fa.explain(fa.flash_attn_func, **arguments)
    assert explanation.problem is not None
    assert explanation.problem.traits.policy == fa.policy_for("fp16")


# ------------------------------------------------------------------------------- targets, executors


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("cpu", Target("cpu", 1)),
        ("sm_100a", Target("sm_100a", 148)),
        ("sm_90a", Target("sm_90a", 132)),
        ("sm_100a:4", Target("sm_100a", 4)),
        ("sm_103f", Target("sm_103f", 1)),
    ],
)
def test_a_target_may_be_named(name: str, target: Target) -> None:
    explanation = fa.explain(fa.flash_attn_func, **dense(), target=name)
    assert explanation.target == target
    assert explanation.plan is not None
    assert explanation.plan.target == target
    assert str(explanation).splitlines()[1] == f"on {target.arch}"


@pytest.mark.parametrize("name", ["", "b200", "sm_100a:", "sm_100a:-1", "sm_100a x", "cuda:0"])
def test_no_target(name: str) -> None:
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.explain(fa.flash_attn_func, **dense(), target=name)
    assert refusal.value.reasons == (
        f"target={name!r} is no architecture; write cpu, sm_90a, sm_100a, or sm_100a:SMS",
    )


@pytest.mark.parametrize(
    ("more", "split"),
    [
        ({"num_splits": 1}, Split(1)),
        ({"num_splits": 7}, Split(7)),
        ({"seqlen_k_per_split": 256}, Split(keys=256)),
        ({"num_splits": 0, "deterministic": True}, Split(keys=2048)),
        # 148 SMs for 2 sequences of 2 heads of 1 block of queries: 37 splits each
        ({"num_splits": 0}, Split(37)),
    ],
)
def test_the_splits(more: dict[str, Any], split: Split) -> None:
    long = {"q": _meta(2, 1, 4, 64), "k": _meta(2, 65536, 2, 64), "v": _meta(2, 65536, 2, 64)}
    explanation = fa.explain(fa.flash_attn_func, **long, **more, target="sm_100a")
    assert explanation.plan is not None
    assert explanation.plan.split == split


@pytest.mark.parametrize(
    ("batch", "pack", "split"),
    [
        # 100 rows of 4 heads: 4 blocks packed on 2 KV heads -> 2 x 2; 4 heads of 1 block otherwise
        (1, True, Split(148 // 4)),
        (1, False, Split(148 // 4)),
        # 100 rows of 8 heads on 1: 800 packed rows are 7 blocks; alone, 8 heads of one block each
        (3, True, Split(148 // (3 * 7))),
        (3, False, Split(148 // (3 * 8))),
    ],
)
def test_automatic_splits_count_the_blocks_that_run(batch: int, pack: bool, split: Split) -> None:
    heads, heads_kv = (4, 2) if batch == 1 else (8, 1)
    q, kv = _meta(batch, 100, heads, 64), _meta(batch, 65536, heads_kv, 64)
    explanation = fa.explain(
        fa.flash_attn_func, q, kv, kv, num_splits=0, pack_gqa=pack, target="sm_100a"
    )
    assert explanation.plan is not None
    assert explanation.plan.split == split


@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "bf16"])
@pytest.mark.parametrize("target", ["cpu", "sm_90a", "sm_100a", "sm_80"])
def test_the_accumulator_is_the_targets(fmt: str, target: str) -> None:
    """13 bits only in SM90's fp8 tensor cores; P over a cache of bf16 queries is bf16."""
    q, kv = (_meta(1, 8, 2, 64, dtype=FORMATS[name].dtype) for name in (fmt, fmt))
    explanation = fa.explain(fa.flash_attn_func, q, kv, kv, impl="tiled", target=target)
    assert explanation.plan is not None
    narrow = target == "sm_90a" and fmt != "bf16"
    assert isinstance(explanation.plan.spec, TiledSpec)
    assert explanation.plan.spec.accumulator == ("sm90_fp8" if narrow else "fp32")
    line = next(t for t in str(explanation).splitlines() if t.startswith("  P·V"))
    said = "with 13 fraction bits, as SM90 does in fp8, promoted to fp32 every 256 keys"
    assert line.endswith(said if narrow else "in fp32 (promote_every has no effect)")


def _chunk(tokens: int) -> dict[str, Any]:
    """Of a prefill over a quantised cache, 4 query heads a KV head."""
    cache = _meta(1, 4096, 2, 128)
    return {
        "q": _meta(1, tokens, 8, 128, dtype=torch.bfloat16), "k": cache, "v": cache,
        "k_descale": _scale(1, 4096, 2), "v_descale": _scale(1, 4096, 2),
    }  # fmt: skip


def test_a_cache_that_is_converted_first() -> None:
    """With the copies' size, why that pays, and both kernels; where it does not, none of it."""
    text = str(fa.explain(fa.flash_attn_func, **_chunk(512), target="sm_90a")).splitlines()
    first = next(n for n, line in enumerate(text) if line.startswith("  converts  "))
    assert text[first] == (
        "  converts  k and v to 16 bits first, copies of 4194304 bytes: 2048 query rows see a key "
        "on average, and more than 256 pay for that"
    )
    conversion, kernel = (line[12:].partition(", ")[0] for line in text[first + 1 : first + 3])
    assert text[first + 2].startswith("  kernel    ")
    assert len({conversion, kernel}) == 2
    for call, target in ((_chunk(64), "sm_90a"), (_chunk(512), "sm_80"), (_chunk(512), "cpu")):
        assert "converts" not in str(fa.explain(fa.flash_attn_func, **call, target=target))


def test_a_policy_without_promotion_says_so() -> None:
    policy = fa.policy_for("e4m3").replace(promote_every=None)
    text = str(fa.explain(fa.flash_attn_func, **dense(), fp8_policy=policy, target="sm_90a"))
    assert "with 13 fraction bits, as SM90 does in fp8, never promoted" in text


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "quantized: of P as rounded"),
        ({"fp8_policy": "reference_fix"}, "exact: of P before it is rounded"),
        (
            {"v_descale": _scale(2, 40, 2), "fp8_policy": "balanced"},
            "exact: of P before it is rounded, since v_descale per token",
        ),
    ],
)
def test_the_row_sum_that_counts(more: dict[str, Any], said: str) -> None:
    arguments = {n: x.to("meta") for n, x in dense().items()}
    text = str(fa.explain(fa.flash_attn_func, **arguments, **more))
    assert f"  row sum   {said}" in text
    assert f" row_sum={said.partition(':')[0]} " in text
    assert text.count("row_sum=") == 1


def test_a_policy_past_its_budget_cannot_hide() -> None:
    broken = fa.Fp8Policy.breaking_the_budget("e4m3", 8, 4)
    text = str(fa.explain(fa.flash_attn_func, **dense(), fp8_policy=broken))
    assert "  policy    UNSAFE e4m3 max_offset=8 rescale_threshold=4 " in text
    assert "P SATURATES: its largest lie 3.193 octaves above e4m3" in text


def test_a_deterministic_plan_does_not_look_at_batch_lengths_or_device() -> None:
    plans = set()
    for batch, keys in ((1, 300), (7, 300), (1, 100_000)):
        x = {"q": _meta(batch, 1, 4, 64), "k": _meta(batch, keys, 2, 64)}
        for target in ("sm_100a", "sm_90a", "sm_100a:2"):
            explanation = fa.explain(
                fa.flash_attn_func, **x, v=x["k"], num_splits=0, deterministic=True, target=target
            )
            assert explanation.plan is not None
            plan = explanation.plan
            plans.add((plan.split, plan.pack_gqa, plan.disable_scheduler_metadata))
    assert len(plans) == 1


def test_a_length_does_not_exchange_the_executor() -> None:
    x = {"q": _meta(8, 4, 64), "cu_seqlens_q": _index(3)}
    for rows in (524_288, 524_289):
        kv = _meta(rows, 2, 64)
        explanation = fa.explain(
            fa.flash_attn_varlen_func,
            **x,
            k=kv,
            v=kv,
            cu_seqlens_k=x["cu_seqlens_q"],
            num_splits=0,
            deterministic=True,
        )
        if rows == 524_288:
            assert explanation.plan is not None
            assert explanation.plan.impl == "tiled"
    assert not explanation.ok
    refused = [r for r in explanation.reasons if "cuts 524289 keys into 257 parts" in r]
    named = [r.partition(":")[0] for r in refused]
    assert named == ["impl='tiled'", "impl='reference'", "impl='sim'"]


def test_the_executor_on_a_cpu() -> None:
    plan = fa.explain(fa.flash_attn_func, **dense()).plan
    assert plan is not None
    assert plan.impl == "tiled"
    assert plan.rejected == (("cute", ("needs a CUDA device; the tensors are on the CPU",)),)


def test_an_executor_asked_for_is_the_one_or_none(impl: str) -> None:
    plan = fa.explain(fa.flash_attn_func, **dense(), impl=impl).plan
    assert plan is not None
    assert (plan.impl, plan.rejected) == (impl, ())
    for other in ("cute", "sim"):
        explanation = fa.explain(fa.flash_attn_func, **dense(), impl=other)
        assert (explanation.ok, explanation.plan) == (False, None)
        assert explanation.problem is not None
        assert all(reason.startswith(f"impl={other!r}: ") for reason in explanation.reasons)


@pytest.mark.parametrize("target", ["cpu", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("impl", [None, "tiled", "reference"])
def test_every_executor_is_accounted_for(target: str, impl: str | None) -> None:
    explanation = fa.explain(fa.flash_attn_func, **dense(), impl=impl, target=target)
    assert explanation.plan is not None
    text = str(explanation).splitlines()
    assert f"  executor  {explanation.plan.impl}" in text
    for other in set(EXECUTORS) - {explanation.plan.impl}:
        (line,) = [t for t in text if t.startswith(f"  not {other}: ")]
        assert len(line) > len(f"  not {other}: ")


# ------------------------------------------------------------------------------ how it is asked


def test_a_call_as_text() -> None:
    by_text = fa.explain("flash_attn_func(q=e4m3[2, 6, 4, 16], k=e4m3[2, 40, 2, 16], "
                         "v=e4m3[2, 40, 2, 16], causal=True)")  # fmt: skip
    by_call = fa.explain(fa.flash_attn_func, **dense(), causal=True)
    assert (by_text.problem, by_text.plan) == (by_call.problem, by_call.plan)
    assert str(by_text) == str(by_call)


@pytest.mark.parametrize(
    "fn", [print, "flash_attn", torch.nn.functional.scaled_dot_product_attention, None]
)
def test_what_cannot_be_explained(fn: Any) -> None:
    with pytest.raises(fa.InvalidArguments, match=r"^explain takes flash_attn_func, "):
        fa.explain(fn, **dense())


def test_arguments_that_do_not_fit_the_signature() -> None:
    with pytest.raises(TypeError, match="dropout_p"):
        fa.explain(fa.flash_attn_func, **dense(), dropout_p=0.1)
    with pytest.raises(TypeError, match="missing"):
        fa.explain(fa.flash_attn_func)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("flash_attn(q=e4m3[1])", "is no call"),
        ("flash_attn_func(q=e4m3[1, 1, 1, 8]", "is no call"),
        ("flash_attn_func(q=e4m3[1, 1, 1, 8])", "k, v missing in"),
        ("flash_attn_func(q=e4m3[1], k=e4m3[1], v=e4m3[1], window=3)", "'window' is no part of a"),
        ("flash_attn_func(q=e4m3[1] !, k=e4m3[1], v=e4m3[1])", "write a tensor like"),
        ("flash_attn_func(q=e4m3[1], !, k=e4m3[1], v=e4m3[1])", "does not go on with name=value"),
        ("flash_attn_func(q=e4m3[1], k=fp9[1], v=e4m3[1])", "fp9 is no dtype"),
        ("flash_attn_func(q=e4m3[99999999999999999999], k=e4m3[1], v=e4m3[1])", "no such tensor"),
        ("flash_attn_func(q=e4m3[2, 2]{1}, k=e4m3[1], v=e4m3[1])", "no such tensor"),
    ],
)
def test_text_that_is_no_call(text: str, what: str) -> None:
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.explain(text)
    assert what in str(refusal.value)


def test_help_shows_the_results_of_a_call_not_its_description() -> None:
    for name in EXPLAINED:
        annotation = str(inspect.signature(getattr(fa, name)).return_annotation)
        assert "Tensor" in annotation
        assert "Call" not in annotation


def test_explaining_first_changes_nothing() -> None:
    before = fa.flash_attn_func(**dense())
    fa.explain(fa.flash_attn_func, **dense(), target="sm_100a")
    assert same_bits(fa.flash_attn_func(**dense()), before)


# -------------------------------------------------------------------------------------------- texts

PRINTED = """\
flash_attn_varlen_func(q=e4m3[7, 8, 128], k=e4m3[40, 16, 2, 128], v=e4m3[40, 16, 2, 128], \
cu_seqlens_q=int32[4], seqused_k=int32[3], page_table=int32[3, 12], learnable_sink=bf16[8], \
q_descale=fp32[], k_descale=fp32[40, 16, 2], v_descale=fp32[40, 16, 2], causal=True, \
window_left=256, max_seqlen_q=4, return_lse=True)
on cpu
understood:
  formats   q e4m3, k and v e4m3, out bf16
  sizes     batch 3, queries 4, keys 192, heads 8/2, head dims 128/128
  layout    q varlen, kv paged (pages of 16)
  mask      window left 256, right 0
  scores    softmax_scale 0.0883883, softcap none, sink yes
  descales  q per tensor, k per token and head, v per token and head
  policy    e4m3 max_offset=8 rescale_threshold=0.75 row_sum=exact exp2=exact promote_every=128
            P has 0.057 octaves of headroom and is zero below 2^-18 of the row's largest
  row sum   exact: of P before it is rounded, since v_descale per token sits in P's exponent
would run:
  executor  tiled
  P·V       accumulated in fp32 (promote_every has no effect)
  splits    1 of each sequence's keys
  tiles     query heads packed
  metadata  computed by the plan
  lse       returned
  not cute: needs a CUDA device; the tensors are on the CPU
  not reference: it could; tiled comes first
  not sim: it could; tiled comes first"""

REFUSED = """\
flash_attn_func(q=e4m3[2, 6, 4, 16], k=e4m3[2, 40, 2, 16], v=e4m3[2, 40, 2, 16], window_left=8, \
window_right=-1, softcap=-1.0)
on cpu
would be refused:
  1. window_size=(8, -1) with causal=False: -1 means 'unlimited' in FA2 and FA3 and 'up to the key \
before the query' in FA4; write None for unlimited, or causal=True
  2. softcap=-1.0 must be a finite number >= 0; 0 means none"""


def test_what_it_prints_of_a_call_that_runs() -> None:
    assert str(fa.explain(fa.flash_attn_varlen_func, **_serving())) == PRINTED


def test_what_it_prints_of_a_refusal() -> None:
    explanation = fa.explain(fa.flash_attn_func, **dense(), window_size=(8, -1), softcap=-1.0)
    assert str(explanation) == REFUSED
