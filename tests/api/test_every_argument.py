"""No argument is accepted and ignored: each, passed alone, changes something that one can see.

One entry for every parameter of every public function: a value that is not the default, on which
small call, and what changes: the result, the buffer that it names, the explanation, or a refusal
that names the argument. A new parameter without an entry fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.accuracy import measure
from tests.api.calls import BASES, Arguments, codes, ints, same_bits


@dataclass(frozen=True)
class Alone:
    """A value for one parameter, the call that it is added to, and the visible effect."""

    effect: str
    value: Any
    base: str
    beside: tuple[tuple[str, Any], ...] = ()


def result(value: Any, base: str, **beside: Any) -> Alone:
    return Alone("result", value, base, tuple(beside.items()))


def plan(value: Any, base: str, **beside: Any) -> Alone:
    return Alone("plan", value, base, tuple(beside.items()))


def refused(value: Any, base: str, **beside: Any) -> Alone:
    return Alone("refused", value, base, tuple(beside.items()))


def written(value: Any, base: str, **beside: Any) -> Alone:
    return Alone("written", value, base, tuple(beside.items()))


def _like(base: str, name: str) -> torch.Tensor:
    return codes(*BASES[base]()[name].shape, seed=9)


def _shared(base: str) -> dict[str, Alone]:
    """What the forward functions have in common."""
    heads = torch.tensor([0.25, 4.0])
    return {
        "softmax_scale": result(0.7, base),
        "causal": result(True, base),
        "softcap": result(0.5, base),
        "num_splits": plan(3, base),
        "pack_gqa": plan(False, base),
        "q_descale": result(heads, base),
        "k_descale": result(heads, base),
        "v_descale": result(heads, base),
        "learnable_sink": result(torch.ones(4), base),
        "fp8_policy": result("reference_fix", base),
        "output_scale": result(0.5, base),
        "out_dtype": result(torch.float32, base),
        "impl": result("reference", base),
        "qv": refused(codes(1), base),
        "q": result(_like(base, "q"), base),
        "window_size": result((3, None), base),
    }


def _unsupported(base: str) -> dict[str, Alone]:
    return {
        "gather_kv_indices": refused(ints(0), base),
        "score_mod": refused(abs, base),
        "score_mod_bwd": refused(abs, base),
        "mask_mod": refused(abs, base),
        "aux_tensors": refused([torch.ones(1)], base),
        "aux_scalars": refused((1.0,), base),
        "block_sparse_tensors": refused(object(), base),
        "block_sparse_tensors_bwd": refused(object(), base),
        "gather_bwd_recompute_p": refused(True, base),
        "gather_bwd_token_chunk": refused(64, base),
    }


_OUT = torch.empty(2, 6, 4, 16, dtype=torch.bfloat16)
_PACKED_OUT = torch.empty(12, 4, 16, dtype=torch.bfloat16)

_DENSE = {
    **_shared("dense"),
    **_unsupported("dense"),
    "k": result(_like("dense", "k"), "dense"),
    "v": result(_like("dense", "v"), "dense"),
    "deterministic": plan(True, "dense", num_splits=0),
    "return_lse": result(True, "dense"),
    "seqlen_k_per_split": plan(128, "dense"),
    "out": written(_OUT, "dense"),
    "lse": written(torch.empty(2, 4, 6), "dense"),
}

_PACKED = {
    **_shared("packed"),
    **_unsupported("packed"),
    "k": result(_like("packed", "k"), "packed"),
    "v": result(_like("packed", "v"), "packed"),
    "cu_seqlens_q": result(ints(0, 7, 12), "packed"),
    "cu_seqlens_k": result(ints(0, 7, 80), "packed"),
    "max_seqlen_q": plan(9, "packed"),
    "max_seqlen_k": plan(64, "packed"),
    "min_seqlen_k": refused(31, "packed"),
    "seqused_q": result(ints(1, 8), "packed"),
    "seqused_k": result(ints(1, 50), "packed"),
    "page_table": result(ints(1, 0)[:, None], "dense"),
    "deterministic": plan(True, "packed", num_splits=0),
    "return_lse": result(True, "packed"),
    "scheduler_metadata": refused(object(), "packed"),
    "seqlen_k_per_split": plan(128, "packed"),
    "disable_scheduler_metadata": plan(True, "packed"),
    "out": written(_PACKED_OUT, "packed"),
    "lse": written(torch.empty(4, 12), "packed"),
}

_PRIVATE = {
    **_PACKED,
    "window_size_left": result(3, "packed"),
    "window_size_right": result(3, "packed"),
    "tile_mn": refused((128, 64), "packed"),
    "mma_pv_is_rs": refused(True, "packed"),
    "intra_wg_overlap": refused(True, "packed"),
    "num_threads": refused(256, "packed"),
    "_arch": refused(100, "packed"),
}

_CHOSEN = torch.tensor([0, 2, 3], dtype=torch.int32).expand(2, 2, 3).contiguous()
_CACHE = {
    **_shared("cache"),
    "k_cache": result(_like("cache", "k_cache"), "cache"),
    "v_cache": result(_like("cache", "v_cache"), "cache"),
    "k": refused(codes(2, 1, 2, 16), "cache"),
    "v": refused(codes(2, 1, 2, 16), "cache"),
    "rotary_cos": refused(torch.ones(4, 8), "cache"),
    "rotary_sin": refused(torch.ones(4, 8), "cache"),
    "cache_seqlens": result(9, "cache"),
    "cache_batch_idx": result(ints(1, 0), "cache"),
    "cache_leftpad": refused(ints(1, 1), "cache"),
    "page_table": result(ints(1, 0)[:, None], "cache"),
    "cu_seqlens_q": result(ints(0, 4, 12), "cache", q=codes(12, 4, 16)),
    "cu_seqlens_k_new": refused(ints(0, 1, 2), "cache"),
    "max_seqlen_q": refused(5, "cache"),
    "rotary_seqlens": refused(ints(1, 1), "cache"),
    "attention_chunk": refused(64, "cache"),
    "rotary_interleaved": refused(False, "cache"),
    "scheduler_metadata": refused(ints(1), "cache"),
    "sm_margin": refused(8, "cache"),
    "return_softmax_lse": result(True, "cache"),
    "out": written(_OUT, "cache"),
    "deterministic": plan(True, "cache"),
    "selection": result(_CHOSEN, "cache"),
    "selection_lens": result(ints(1, 2, 3, 1).view(2, 2), "cache", selection=_CHOSEN),
    "select_pages": result(True, "cache", selection=_CHOSEN, page_table=ints(1, 0)[:, None]),
}

_COMBINE = {
    "out_partial": result(torch.ones(3, 2, 5, 4, 16), "partials"),
    "lse_partial": result(torch.zeros(3, 2, 5, 4), "partials"),
    "out": written(torch.empty(2, 5, 4, 16), "partials"),
    "out_dtype": result(torch.bfloat16, "partials"),
    "cu_seqlens": result(ints(0, 4, 9), "packed_partials"),
    "seqused": result(ints(5, 2), "partials"),
    "virtual_batch_idx": refused(ints(1, 0), "partials"),
    "return_lse": result(False, "partials"),
}

_QUANTIZE = {
    "x": result(torch.ones(2, 6, 3, 8), "raw"),
    "dtype": result(torch.float8_e5m2, "raw"),
    "per": result("tensor", "raw"),
    "nheads_kv": result(1, "raw"),
    "smooth": result(True, "raw"),
    "cu_seqlens": result(ints(0, 6, 12), "packed_raw"),
}

_KV_ERROR = {
    "k": result(torch.ones(2, 6, 3, 8).cumsum(1), "keys_and_values"),
    "v": result(torch.ones(2, 6, 3, 8).cumsum(1), "keys_and_values"),
    "dtype": result(torch.float8_e5m2, "keys_and_values"),
    "per": result("tensor", "keys_and_values"),
}

_KV_CACHE_SHARE = {
    "batch": result(3, "model"),
    "tokens": result(101, "model"),
    "layers": result(4, "model"),
    "kv_heads": result(8, "model"),
    "head_dim": result(128, "model"),
    "other_bytes": result(0, "model"),
    "head_dim_v": result(128, "model"),
    "dtype": refused(torch.float16, "model"),
    "from_dtype": result(torch.float32, "model"),
    "per": result("tensor", "model"),
}

_POLICY_FOR = {
    "dtype": Alone("result", "e5m2", "policy_for"),
    "name": Alone("result", "balanced", "policy_for"),
}

_REPORT = {
    "q": result(torch.ones(2, 6, 4, 16), "unquantized"),
    "k": result(torch.ones(2, 40, 2, 16), "unquantized"),
    "v": result(torch.ones(2, 40, 2, 16), "unquantized"),
    "dtype": result(torch.float8_e5m2, "unquantized"),
    "per": result("tensor", "unquantized"),
    "fp8_policy": result("reference_fix", "unquantized"),
    "softmax_scale": result(0.7, "unquantized"),
    "causal": result(True, "unquantized"),
    "window_size": result((3, None), "unquantized"),
    "softcap": result(0.5, "unquantized"),
    "learnable_sink": result(torch.ones(4), "unquantized"),
    "cu_seqlens_q": result(ints(0, 7, 12), "packed_unquantized"),
    "cu_seqlens_k": result(ints(0, 7, 80), "packed_unquantized"),
    "max_seqlen_q": refused(7, "packed_unquantized"),
    "max_seqlen_k": refused(49, "packed_unquantized"),
}

ENTRIES: dict[str, dict[str, Alone]] = {
    "flash_attn_func": _DENSE,
    "flash_attn_varlen_func": _PACKED,
    "_flash_attn_fwd": _PRIVATE,
    "flash_attn_with_kvcache": _CACHE,
    "flash_attn_combine": _COMBINE,
    "kv_cache_share": _KV_CACHE_SHARE,
    "kv_error": _KV_ERROR,
    "quantize": _QUANTIZE,
    "policy_for": _POLICY_FOR,
    "accuracy_report": _REPORT,
}
# Their arguments are another function's, and a few more: test_explain.py, tests/compiler,
# tests/sm100. What append_kv does is seen in its tensors: tests/kv_cache.
ELSEWHERE = {"append_kv", "explain", "precompile", "simulate"}


EXPORTED = {name: getattr(fa, name) for name in fa.__all__}
FUNCTIONS = {n: f for n, f in EXPORTED.items() if callable(f) and not isinstance(f, type)}


def _parameters(fn: Callable[..., Any]) -> Iterator[str]:
    """Names of all parameters, those that `**name: Unpack[...]` stands for included."""
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            record = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
            yield from getattr(measure, record).__annotations__
        else:
            yield parameter.name


EVERY = [
    (name, parameter)
    for name, fn in FUNCTIONS.items()
    if name not in ELSEWHERE
    for parameter in _parameters(fn)
]


def _base(entry: Alone) -> Arguments:
    if entry.base == "policy_for":
        return {"dtype": "e4m3"}
    return BASES[entry.base]() | dict(entry.beside)


@pytest.mark.parametrize(("function", "parameter"), EVERY)
def test_an_argument_passed_alone_is_seen(function: str, parameter: str) -> None:
    assert parameter in ENTRIES[function], f"say what {parameter} of {function} changes"
    entry, fn = ENTRIES[function][parameter], FUNCTIONS[function]
    before = _base(entry)
    after = before | {parameter: entry.value}
    if entry.effect == "refused":
        fn(**before)
        _check_refused(fn, after, parameter)
    elif entry.effect == "plan":
        _check_explanations_differ(fn, before, after)
        fn(**after)
    elif entry.effect == "written":
        _check_written(fn, before, after, entry.value)
    else:
        assert not same_bits(_run_or_none(fn, before), _run(fn, after))


def _run_or_none(fn: Callable[..., Any], arguments: Arguments) -> object:
    """The result, or None where only the argument in question makes the call legal."""
    try:
        return _run(fn, arguments)
    except fa.InvalidArguments:
        return None


def _run(fn: Callable[..., Any], arguments: Arguments) -> object:
    got = fn(**arguments)
    return str(got).partition("\n")[2] if fn is fa.accuracy_report else got  # a title comes first


def _check_refused(fn: Callable[..., Any], arguments: Arguments, parameter: str) -> None:
    with pytest.raises(fa.FlashAttnFp8Error) as refusal:
        fn(**arguments)
    assert len(refusal.value.reasons) == 1
    assert refusal.value.reasons[0].startswith((f"{parameter}=", f"{parameter}:"))


def _check_explanations_differ(fn: Callable[..., Any], before: Arguments, after: Arguments) -> None:
    one, other = fa.explain(fn, **before), fa.explain(fn, **after)
    assert one.ok
    assert other.ok
    assert (one.problem, one.plan) != (other.problem, other.plan)
    assert str(one).splitlines()[1:] != str(other).splitlines()[1:]


def _check_written(
    fn: Callable[..., Any], before: Arguments, after: Arguments, buffer: torch.Tensor
) -> None:
    buffer.fill_(float("nan"))
    got = fn(**after)
    got = got if isinstance(got, tuple) else (got,)
    assert any(t is buffer for t in got)
    before = before | ({"return_lse": True} if got[-1] is buffer and len(got) > 1 else {})
    wanted = fn(**before)
    assert same_bits(got, wanted if isinstance(wanted, tuple) else (wanted,))


def test_entries_name_parameters() -> None:
    assert set(ENTRIES) | ELSEWHERE == set(FUNCTIONS)
    for name in set(ENTRIES) - {"_flash_attn_fwd", "flash_attn_varlen_func"}:
        assert set(ENTRIES[name]) == set(_parameters(FUNCTIONS[name]))


# Each field of a policy changes what the policy does.
FIELDS = {
    "p_format": "e5m2",
    "max_offset": 4.0,
    "rescale_threshold": 0.0,
    "row_sum": "exact",
    "exp2": "code",
    "promote_every": 64,
}


@pytest.mark.parametrize("field", inspect.signature(fa.Fp8Policy).parameters)
def test_a_policys_field_is_seen(field: str) -> None:
    before = fa.policy_for("e4m3")
    after = before.replace(**{field: FIELDS[field]})
    assert str(after) != str(before)
    assert (after, hash(after)) != (before, hash(before))


@pytest.mark.parametrize("field", ["max_offset", "rescale_threshold", "row_sum", "exp2"])
def test_a_policys_field_changes_the_result(field: str) -> None:
    x = {"q": codes(1, 4, 2, 64), "k": codes(1, 600, 2, 64, seed=1), "v": codes(1, 600, 2, 64)}
    policy = fa.policy_for("e4m3")
    changed = policy.replace(**{field: FIELDS[field]})
    one, other = (
        fa.flash_attn_func(**x, fp8_policy=p, softmax_scale=0.5) for p in (policy, changed)
    )
    assert not same_bits(one, other)
