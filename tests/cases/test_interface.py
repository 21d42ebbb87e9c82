"""Cases 53, 68, 69, 77: nothing is accepted and ignored, and what is said is what happens."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.check_options import IMPLS
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.plan import plan_for
from flash_attn_fp8.run import execute
from flash_attn_fp8.support import EXECUTORS
from flash_attn_fp8.target import target_named
from tests.cases.arrange import MIXES, Mix, int32
from tests.cases.limits import assert_bitwise

E4M3 = MIXES[0]
TINY = (1, 4, 2, 64)


def tiny(mix: Mix = E4M3) -> tuple[Tensor, Tensor, Tensor]:
    return mix.cast(*torch.ones(3, *TINY))


# ------------------------------------------------------------------------------------ case 53

HALF = torch.ones(4, 32)
APPENDING = {
    "k": {"k": torch.ones(1, 2, 2, 64).to(E4M3.kv)},
    "v": {"v": torch.ones(1, 2, 2, 64).to(E4M3.kv)},
    "k and v": {n: torch.ones(1, 2, 2, 64).to(E4M3.kv) for n in "kv"},
    "cu_seqlens_k_new": {"cu_seqlens_k_new": int32(0, 2)},
    "rotary_cos": {"rotary_cos": HALF},
    "rotary_sin": {"rotary_sin": HALF},
    "rotary_cos and rotary_sin": {"rotary_cos": HALF, "rotary_sin": HALF},
    "rotary_seqlens": {"rotary_seqlens": int32(2)},
    "rotary_interleaved": {"rotary_interleaved": False},
    "cache_leftpad": {"cache_leftpad": int32(1)},
    "attention_chunk": {"attention_chunk": 16},
    "qv": {"qv": torch.ones(TINY).to(E4M3.q)},
}


@pytest.mark.parametrize("name", APPENDING)
def test_case_53_no_silent_append(impl: str, name: str) -> None:
    """Case 53: appending and rotary arguments are refused by name; the cache keeps its bytes."""
    q, k_cache, v_cache = tiny()
    before = k_cache.clone(), v_cache.clone()
    scale = torch.ones(1, 4, 2)
    with pytest.raises(NotImplementedError) as refusal:
        fa.flash_attn_with_kvcache(
            q, k_cache, v_cache, **APPENDING[name], cache_seqlens=2, k_descale=scale,
            v_descale=scale, impl=impl,
        )  # fmt: skip
    for argument in APPENDING[name]:
        assert any(reason.startswith(f"{argument}=") for reason in refusal.value.reasons)
    assert_bitwise(k_cache, before[0])
    assert_bitwise(v_cache, before[1])
    assert torch.equal(scale, torch.ones_like(scale))


# ------------------------------------------------------------------------------------ case 68

PAIR_FUNCTIONS = (fa.flash_attn_func, fa.flash_attn_varlen_func, fa._flash_attn_fwd)


@pytest.mark.parametrize("fn", PAIR_FUNCTIONS, ids=lambda fn: fn.__name__)
def test_case_68_fa4_functions_return_a_pair(
    impl: str, mix: Mix, fn: Callable[..., object]
) -> None:
    """Case 68: FA4's names give FA4's pair, (out, None) or (out, lse): always two values."""
    q, k, v = tiny(mix)
    for wanted in (False, True):
        result = fn(q, k, v, return_lse=wanted, impl=impl, **mix.ones)
        assert isinstance(result, tuple)
        assert len(result) == 2
        assert (result[1] is not None) == wanted


def test_case_68_kvcache_returns_as_fa3(impl: str, mix: Mix) -> None:
    """Case 68: FA3's function gives one tensor, or (out, lse)."""
    q, k, v = tiny(mix)
    alone = fa.flash_attn_with_kvcache(q, k, v, impl=impl, **mix.ones)
    out, lse = fa.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, impl=impl, **mix.ones)
    assert_bitwise(alone, out)
    assert lse.shape == (1, 2, 4)


def test_case_68_combine_returns_a_pair() -> None:
    """Case 68: flash_attn_combine too, with and without the LSE."""
    parts, lse = torch.ones(2, *TINY), torch.zeros(2, *TINY[:-1])
    assert fa.flash_attn_combine(parts, lse, return_lse=False)[1] is None
    assert len(fa.flash_attn_combine(parts, lse)) == 2


EVERY_FUNCTION = (*PAIR_FUNCTIONS, fa.flash_attn_with_kvcache)


@pytest.mark.parametrize("fn", EVERY_FUNCTION, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("which", "qkv")
@pytest.mark.parametrize("mix", MIXES[:4], ids=str)
def test_case_68_forward_only(impl: str, mix: Mix, fn: Callable[..., object], which: str) -> None:
    """Case 68: inputs that require grad are refused as forward only; under no_grad they run."""
    operands = dict(zip("qkv", tiny(mix), strict=True))
    operands[which] = operands[which].clone().requires_grad_()
    name = list(inspect.signature(fn).parameters)["qkv".index(which)]
    with pytest.raises(NotImplementedError, match=rf" {name} require grad.*forward only"):
        fn(*operands.values(), impl=impl)
    with torch.no_grad():
        result = fn(*operands.values(), impl=impl)
    out = result[0] if isinstance(result, tuple) else result
    assert not out.requires_grad
    assert torch.equal(out, torch.ones_like(out))


# ------------------------------------------------------------------------------------ case 69

DTYPES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
    torch.uint8,
    torch.bfloat16,
    torch.float16,
    torch.float32,
)
NAMED_WRONG = (
    (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.float8_e5m2),
    (torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e4m3fn),
    (torch.int8, torch.int8, torch.int8),
    (torch.uint8, torch.uint8, torch.uint8),
    (torch.float8_e4m3fn, torch.bfloat16, torch.bfloat16),
    (torch.float8_e4m3fn, torch.int8, torch.int8),
    (torch.bfloat16, torch.float16, torch.float16),
)
LEGAL = {(mix.q, mix.kv) for mix in MIXES} | {
    (torch.float16, torch.float8_e4m3fn),
    (torch.float16, torch.float8_e5m2),
}


@pytest.mark.parametrize("dtypes", NAMED_WRONG, ids=str)
def test_case_69_mixed_8_bit_types(impl: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Case 69: q, k and v of types that do not go together are a TypeError that names all three."""
    q, k, v = (torch.ones(TINY).to(dtype) for dtype in dtypes)
    with pytest.raises(TypeError, match=r"q=.* k=.* v=") as refusal:
        fa.flash_attn_func(q, k, v, impl=impl)
    assert isinstance(refusal.value, ValueError)


def test_case_69_only_these_mixes(impl: str) -> None:
    """Case 69: of all 343 triples of types exactly the documented ones run, and all give 1."""
    one = torch.ones(())
    for q, k, v in product(DTYPES, repeat=3):
        operands = [torch.ones(TINY).to(dtype) for dtype in (q, k, v)]
        scales = {"k_descale": one, "v_descale": one} if k is v is torch.int8 else {}
        if k is not v or (q, k) not in LEGAL:
            with pytest.raises(TypeError):
                fa.flash_attn_func(*operands, **scales, impl=impl)
            continue
        out, _ = fa.flash_attn_func(*operands, **scales, impl=impl)
        assert torch.equal(out, torch.ones_like(out))


# ------------------------------------------------------------------------------------ case 77

SIZES = (0, 4, 8, 60, 64, 96, 128, 192, 256, 264)


def runs(fn: Callable[..., object], *args: Tensor, **kwargs: object) -> tuple[str, ...]:
    """The reasons why a real call is refused; empty where it ran."""
    try:
        fn(*args, **kwargs)
    except fa.FlashAttnFp8Error as refused:
        return refused.reasons
    return ()


@pytest.mark.parametrize("impl_or_none", [None, *IMPLS])
@pytest.mark.parametrize("d", SIZES)
def test_case_77_explain_agrees_with_the_call(d: int, impl_or_none: str | None) -> None:
    """Cases 69 and 77: over types x head sizes x executors, `ok` says whether the call runs.

    The reasons are the same ones, word for word.
    """
    one = torch.ones(())
    for q, kv in product(DTYPES, repeat=2):
        operands = [torch.ones(1, 4, 2, d).to(dtype) for dtype in (q, kv, kv)]
        scales = {"k_descale": one, "v_descale": one} if kv is torch.int8 else {}
        options = {**scales, "impl": impl_or_none}
        answer = fa.explain(fa.flash_attn_func, *operands, **options)
        assert runs(fa.flash_attn_func, *operands, **options) == answer.reasons
        on_meta = fa.explain(
            fa.flash_attn_func,
            *(t.to("meta") for t in operands),
            **{n: t.to("meta") if isinstance(t, Tensor) else t for n, t in options.items()},
        )
        assert on_meta.reasons == answer.reasons


@pytest.mark.parametrize("page_size", [1, 3, 16, 128])
@pytest.mark.parametrize("num_splits", [0, 1, 4])
@pytest.mark.parametrize("seqlen_q", [1, 5])
def test_case_77_explain_agrees_on_caches(
    mix: Mix, page_size: int, num_splits: int, seqlen_q: int
) -> None:
    """Case 77: and over cache formats x page sizes x query lengths x splits."""
    q, pool = torch.ones(2, seqlen_q, 4, 64).to(mix.q), torch.ones(3, page_size, 2, 64).to(mix.kv)
    table = torch.zeros(2, 2, dtype=torch.int32)
    for impl in (None, *IMPLS):
        options = {"page_table": table, "num_splits": num_splits, "impl": impl, **mix.ones}
        answer = fa.explain(fa.flash_attn_varlen_func, q, pool, pool, **options)
        assert runs(fa.flash_attn_varlen_func, q, pool, pool, **options) == answer.reasons


def test_case_77_explain_names_the_executor(impl: str, mix: Mix) -> None:
    """Case 77: the plan and the text name what runs, what was passed over, and why."""
    answer = fa.explain(fa.flash_attn_func, *tiny(mix), impl=impl, **mix.ones)
    assert answer.plan.impl == impl
    assert f"executor  {impl}" in str(answer)
    for other in EXECUTORS:
        assert other == impl or f"not {other}:" in str(answer)
    chosen = fa.explain(fa.flash_attn_func, *tiny(mix), **mix.ones)
    assert chosen.plan.impl in EXECUTORS
    assert {name for name, _ in chosen.plan.rejected} < set(EXECUTORS)


@pytest.mark.parametrize("impl_or_none", [None, *IMPLS])
def test_case_77_what_explain_names_is_what_runs(impl_or_none: str | None) -> None:
    """Case 77: the bits of a call are those of the executor that explain named."""
    x = torch.randn(3, 1, 200, 2, 64, generator=torch.Generator().manual_seed(0))
    q, k, v = x.to(E4M3.q)
    answer = fa.explain(fa.flash_attn_func, q, k, v, impl=impl_or_none)
    if not answer.ok:
        assert runs(fa.flash_attn_func, q, k, v, impl=impl_or_none) == answer.reasons
        return
    problem = problem_of(fa.flash_attn_func.describe_call(q, k, v, impl=answer.plan.impl))
    out = torch.full(problem.out_shape, math.nan).bfloat16()
    execute(plan_for(problem, answer.plan.target), problem, answer.call.operands, out, None)
    assert_bitwise(fa.flash_attn_func(q, k, v, impl=impl_or_none)[0], out)


@pytest.mark.parametrize(("impl_given", "head_dim"), [("cute", 64), ("sim", 72)])
def test_case_77_an_explicit_executor_never_falls_back(impl_given: str, head_dim: int) -> None:
    """Case 77: where it cannot run it is refused by name, in every function, and nothing runs."""
    shape = (*TINY[:-1], head_dim)
    q, k, v = E4M3.cast(*torch.ones(3, *shape))
    for fn in EVERY_FUNCTION:
        with pytest.raises(NotImplementedError, match=f"impl='{impl_given}'"):
            fn(q, k, v, impl=impl_given)
    out = torch.full(shape, 7.0)
    with pytest.raises(NotImplementedError):
        fa.flash_attn_func(q, k, v, out=out, impl=impl_given)
    assert torch.equal(out, torch.full_like(out, 7.0))


@pytest.mark.parametrize("impl_given", ["fa3", "", "Tiled", "auto"])
def test_case_77_an_unknown_executor(impl_given: str) -> None:
    """Case 77: a name that does not exist is an error with the names that do."""
    with pytest.raises(ValueError, match=r"impl=.*cute.*tiled.*reference"):
        fa.flash_attn_func(*tiny(), impl=impl_given)


def test_case_77_a_fallback_on_a_gpu_warns_once() -> None:
    """Case 77: a GPU user to whom no kernel was offered is told which executor runs, and why.

    sm_89a is no other test's target: the warning comes once a process and reason.
    """
    q, k, v = tiny()
    call = fa.flash_attn_func.describe_call(q, k, v)
    problem = problem_of(call)
    plan = plan_for(problem, target_named("sm_89a"))
    out = torch.empty(problem.out_shape, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=rf"'{plan.impl}' executor on sm_89a.*cute: "):
        execute(plan, problem, call.operands, out, None)
    execute(plan, problem, call.operands, out, None)  # a second warning would be an error
    asked = problem_of(fa.flash_attn_func.describe_call(q, k, v, impl=plan.impl))
    execute(plan_for(asked, target_named("sm_89a:3")), asked, call.operands, out, None)
    assert torch.equal(out, torch.ones_like(out))
