"""What eager calls refuse, compiled ones refuse, in the same words; and what vmap does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_attn_fp8 as fa
from tests.api.calls import BASES, Arguments, cache, dense, ints, packed, partials, raw, same_bits


def _compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(lambda **kw: fn(**kw), fullgraph=True, backend="aot_eager")


def _refusal(fn: Callable[..., Any], arguments: Arguments) -> fa.FlashAttnFp8Error:
    with pytest.raises(fa.FlashAttnFp8Error) as refusal:
        fn(**arguments)
    return refusal.value


# Function, base call, and what is wrong. What the op's schema would convert comes first.
WRONG: dict[str, tuple[str, str, Arguments]] = {
    "causal=1": ("flash_attn_func", "dense", {"causal": 1}),
    "num_splits=True": ("flash_attn_func", "dense", {"num_splits": True}),
    "pack_gqa=1": ("flash_attn_func", "dense", {"pack_gqa": 1}),
    "return_lse=1": ("flash_attn_func", "dense", {"return_lse": 1}),
    "softmax_scale=True": ("flash_attn_func", "dense", {"softmax_scale": True}),
    "window_size=True": ("flash_attn_func", "dense", {"window_size": (True, None)}),
    "max_seqlen_q=True": ("flash_attn_varlen_func", "packed", {"max_seqlen_q": True}),
    "output_scale=True": ("flash_attn_func", "dense", {"output_scale": True}),
    "fp8_policy=8": ("flash_attn_func", "dense", {"fp8_policy": 8}),
    "disable=0": ("flash_attn_varlen_func", "packed", {"disable_scheduler_metadata": 0}),
    "softmax_scale=1e-60": ("flash_attn_func", "dense", {"softmax_scale": 1e-60}),
    "num_splits=257": ("flash_attn_func", "dense", {"num_splits": 257}),
    "impl=3": ("flash_attn_func", "dense", {"impl": 3}),
    "out_dtype='bf16'": ("flash_attn_func", "dense", {"out_dtype": "bf16"}),
    "window of -2**70": ("flash_attn_func", "dense", {"window_size": (-(2**70), 0)}),
    "cu_seqlens_q=[]": ("flash_attn_varlen_func", "packed", {"cu_seqlens_q": [0, 4, 12]}),
    "cache_seqlens=2**40": ("flash_attn_with_kvcache", "cache", {"cache_seqlens": 2**40}),
    "cache_seqlens=True": ("flash_attn_with_kvcache", "cache", {"cache_seqlens": True}),
    "cache_batch_idx=[]": ("flash_attn_with_kvcache", "cache", {"cache_batch_idx": [0, 1]}),
    "score_mod": ("flash_attn_func", "dense", {"score_mod": abs}),
    "qv": ("flash_attn_func", "dense", {"qv": torch.ones(2, 6, 4, 64)}),
    "sm_margin": ("flash_attn_with_kvcache", "cache", {"sm_margin": 3}),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_full_graph_is_refused_while_tracing_and_shows_why(name: str) -> None:
    function, base, wrong = WRONG[name]
    fn, arguments = getattr(fa, function), BASES[base]() | wrong
    eager = _refusal(fn, arguments)
    with pytest.raises(torch._dynamo.exc.Unsupported) as refusal:
        _compiled(fn)(**arguments)
    assert f"raised exception {type(eager).__name__}(" in str(refusal.value)
    # In Dynamo's text ours is a literal. Reasons that need shapes come after the first, in eager.
    assert repr(eager.reasons[0])[1:-1].replace("'", "") in str(refusal.value).replace("'", "")


# Each costs seconds: what the schema would convert, or refuse, or never see; and a wrong shape.
BREAKING = {n: WRONG[n] for n in ("causal=1", "cache_seqlens=2**40", "score_mod")} | {
    "lse that broadcasts and converts": (
        "flash_attn_func",
        "dense",
        {"lse": torch.empty(3, 2, 4, 6, dtype=torch.float64)},
    ),
}


@pytest.mark.parametrize("name", BREAKING)
def test_where_graphs_may_break_the_refusal_is_eagers(name: str) -> None:
    function, base, wrong = BREAKING[name]
    fn, arguments = getattr(fa, function), BASES[base]() | wrong
    eager = _refusal(fn, arguments)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    refusal = _refusal(torch.compile(partial(fn), backend="aot_eager"), arguments)
    assert (type(refusal), refusal.reasons) == (type(eager), eager.reasons)
    # What leads to the eager path is compiled piece by piece: a dozen frames, 80 with its checks.
    assert torch._dynamo.utils.counters["frames"]["total"] < 20


def test_what_needs_shapes_is_refused_by_the_fake() -> None:
    with pytest.raises(Exception, match="learnable_sink must have one logit per query head"):
        _compiled(fa.flash_attn_func)(**dense(), learnable_sink=torch.ones(3))


def test_the_fake_uses_the_callers_names() -> None:
    x = cache()
    wrong = x | {"k_cache": x["k_cache"][..., :8], "cache_batch_idx": ints(1, 0)}
    (reason,) = _refusal(fa.flash_attn_with_kvcache, wrong).reasons
    assert reason == "q has head_dim 16 and k_cache 8; they must be equal"
    with pytest.raises(Exception, match=reason):
        _compiled(fa.flash_attn_with_kvcache)(**wrong)


@pytest.mark.parametrize("name", ["cache_seqlens", "cache_batch_idx"])
def test_values_are_refused_as_in_eager_when_the_graph_runs(name: str) -> None:
    wrong = cache() | {name: ints(1, 99)}
    eager = _refusal(fa.flash_attn_with_kvcache, wrong)
    assert eager.reasons[0].startswith(f"{name}[1]=99 ")
    compiled = _refusal(_compiled(fa.flash_attn_with_kvcache), wrong)
    assert (type(compiled), str(compiled)) == (type(eager), str(eager))


def test_tangents_are_refused_while_tracing() -> None:
    x = dense()

    def derivative(sink: Tensor) -> Tensor:
        tangent: Tensor = torch.func.jvp(
            lambda sink: fa.flash_attn_func(**x, learnable_sink=sink)[0],
            (sink,),
            (torch.ones(4),),
        )[1]
        return tangent

    with pytest.raises(torch._dynamo.exc.Unsupported, match="learnable_sink carry tangents"):
        _compiled(derivative)(sink=torch.ones(4))


# ------------------------------------------------------------------------------------- executors

UNEXECUTED: tuple[Arguments, ...] = (
    {"impl": "cute"},
    {"impl": "sim"},
    {"impl": "reference", "num_splits": 2},
    {"impl": "reference", "fp8_policy": "default"},
)


@pytest.mark.parametrize("more", UNEXECUTED, ids=str)
@pytest.mark.parametrize("into_out", [False, True])
def test_what_no_executor_takes_is_refused_without_data(more: Arguments, into_out: bool) -> None:
    out = {"out": torch.empty(2, 6, 4, 16, dtype=torch.bfloat16)} if into_out else {}
    arguments = dense() | out
    eager = _refusal(fa.flash_attn_func, arguments | more)
    assert type(eager) is fa.Unsupported
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(t) for n, t in arguments.items()}
        fake = _refusal(fa.flash_attn_func, fakes | more)
    metas = {n: t.to("meta") for n, t in arguments.items()}
    meta = _refusal(fa.flash_attn_func, metas | more)
    assert fake.reasons == meta.reasons == eager.reasons


def test_what_no_executor_takes_is_refused_while_tracing() -> None:
    ran = []

    def backend(graph: Any, inputs: Any) -> Any:
        ran.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(partial(fa.flash_attn_func), fullgraph=True, backend=backend)
    with pytest.raises(Exception, match="its kernel has head dims"):
        compiled(**dense(), impl="sim")
    assert not ran


# --------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("huge", [2**30, 2**31 - 1, 2**31, sys.maxsize, 2**63, 2**70])
@pytest.mark.parametrize("causal", [False, True])
def test_huge_bounds_of_a_window_are_none(huge: int, causal: bool, impl: str) -> None:
    more = {"causal": causal, "impl": impl, "return_lse": True}
    for window, same in (
        ((huge, None), (None, None)),
        ((huge, 1), (None, 1)),
        ((3, huge), (3, None)),
        ((huge, huge), (None, None)),
    ):
        wanted = fa.flash_attn_func(**dense(), **more, window_size=same)
        assert same_bits(fa.flash_attn_func(**dense(), **more, window_size=window), wanted)
        one, other = (fa.explain(fa.flash_attn_func, **dense(), **more, window_size=w)
                      for w in (window, same))  # fmt: skip
        assert one.problem == other.problem


@pytest.mark.parametrize("huge", [2**30, sys.maxsize, 2**70])
def test_huge_bounds_of_a_window_are_none_in_compiled_calls(huge: int) -> None:
    for window, same in (((huge, 1), (None, 1)), ((3, huge), (3, None))):
        wanted = fa.flash_attn_func(**dense(), window_size=same)
        call = partial(fa.flash_attn_func, window_size=window)
        assert same_bits(_compiled(call)(**dense()), wanted)


@pytest.mark.parametrize("bound", [40, 2**30 - 1])
def test_bounds_past_the_lengths_are_none(bound: int, impl: str) -> None:
    wanted = fa.flash_attn_func(**dense(), return_lse=True, impl=impl)
    got = fa.flash_attn_func(**dense(), window_size=(bound, bound), return_lse=True, impl=impl)
    assert same_bits(got, wanted)


# ------------------------------------------------------------------------------------------ vmap

MAPPED: dict[str, tuple[Callable[..., Any], Callable[[], Arguments], Arguments]] = {
    "dense": (fa.flash_attn_func, dense, {"causal": True, "return_lse": True}),
    "packed": (fa.flash_attn_varlen_func, packed, {"return_lse": True}),
    "cache": (fa.flash_attn_with_kvcache, cache, {"return_softmax_lse": True}),
    "cache, one length": (
        fa.flash_attn_with_kvcache,
        cache,
        {"cache_seqlens": 9, "cache_batch_idx": ints(1, 0), "return_softmax_lse": True},
    ),
    "combine": (fa.flash_attn_combine, partials, {}),
    "quantize": (fa.quantize, raw, {"per": "batch_head", "smooth": True}),
}


@pytest.mark.parametrize("name", MAPPED)
def test_a_mapped_call_has_the_bits_of_its_samples(name: str) -> None:
    fn, base, more = MAPPED[name]
    arguments = base() | more
    # Lengths are the same in all samples, the others differ.
    mapped = {n: torch.stack([x, x.flip(1), x.flip(0)]) for n, x in arguments.items()
              if isinstance(x, Tensor) and x.dtype != torch.int32}  # fmt: skip
    rest = {n: x for n, x in arguments.items() if n not in mapped}

    def of(*tensors: Tensor) -> tuple[Any, ...]:
        results = fn(**dict(zip(mapped, tensors, strict=True)), **rest)
        return tuple(x for x in results if x is not None)  # vmap takes no None

    got = torch.func.vmap(of)(*mapped.values())
    samples = [of(*(t[i] for t in mapped.values())) for i in range(3)]
    assert same_bits(got, tuple(torch.stack(parts) for parts in zip(*samples, strict=True)))


def test_a_mapped_call_is_checked() -> None:
    q, k = dense()["q"], torch.stack([dense()["k"]] * 2)
    with pytest.raises(fa.InvalidArguments, match=r"softcap=-1\.0 must be"):
        torch.func.vmap(lambda k: fa.flash_attn_func(q, k, k, softcap=-1.0)[0])(k)


def test_a_mapped_buffer_is_written() -> None:
    x, lse = dense(), torch.empty(2, 2, 4, 6)
    q = torch.stack([x["q"], x["q"].flip(0)])
    torch.func.vmap(lambda q, lse: fa.flash_attn_func(q, x["k"], x["v"], lse=lse)[0])(q, lse)
    for i in range(2):
        wanted = fa.flash_attn_func(q[i], x["k"], x["v"], return_lse=True)[1]
        assert same_bits(lse[i], wanted)
    x = partials()
    parts, out = torch.stack([x["out_partial"], x["out_partial"] + 1]), torch.empty(2, 2, 5, 4, 16)
    torch.func.vmap(lambda part, out: fa.flash_attn_combine(part, x["lse_partial"], out=out)[0])(
        parts, out
    )
    for i in range(2):
        assert same_bits(out[i], fa.flash_attn_combine(parts[i], x["lse_partial"])[0])


def test_a_buffer_of_all_samples_is_refused() -> None:
    x = dense()
    q, lse = torch.stack([x["q"]] * 2), torch.zeros(2, 4, 6)
    with pytest.raises(fa.Unsupported, match="lse is one tensor for all samples of vmap"):
        torch.func.vmap(lambda q: fa.flash_attn_func(q, x["k"], x["v"], lse=lse)[0])(q)
    x = partials()
    parts, out = torch.stack([x["out_partial"]] * 2), torch.zeros(2, 5, 4, 16)
    with pytest.raises(fa.Unsupported, match="out is one tensor for all samples of vmap"):
        torch.func.vmap(lambda p: fa.flash_attn_combine(p, x["lse_partial"], out=out)[0])(parts)
    assert not lse.any()
    assert not out.any()


def test_a_mapped_forward_writes_no_out() -> None:
    q, k = dense()["q"], torch.stack([dense()["k"]] * 2)
    out = torch.empty(2, 2, 6, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(fa.Unsupported, match="out cannot be written under vmap"):
        torch.func.vmap(lambda k, out: fa.flash_attn_func(q, k, k, out=out))(k, out)
