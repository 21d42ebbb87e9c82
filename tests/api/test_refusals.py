"""A refusal names every fault at once, with values and remedies, before anything is touched."""

from __future__ import annotations

import ast
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import flash_attn_fp8 as fa
from flash_attn_fp8 import (
    call,
    check_buffers,
    check_options,
    check_scales,
    check_selection,
    checks,
    entry,
    errors,
    kvcache,
    ops,
    values,
)
from tests.api.calls import BASES, Arguments, codes, dense, ints, packed, paged_pool, same_bits
from tests.api.refusal_cases import INVALID, Case
from tests.api.unsupported_cases import UNSUPPORTED, VALUES

METADATA = (*INVALID, *UNSUPPORTED)
EVERY = (*METADATA, *VALUES)


def _refusal(case: Case, **more: Any) -> fa.FlashAttnFp8Error:
    with pytest.raises(fa.FlashAttnFp8Error) as raised:
        getattr(fa, case.function)(**case.arguments | more)
    return raised.value


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_all_reasons_to_the_letter(case: Case) -> None:
    refusal = _refusal(case)
    assert refusal.reasons == case.reasons
    kind = fa.Unsupported if case in UNSUPPORTED else fa.InvalidArguments
    assert type(refusal) is kind
    first, *lines = str(refusal).splitlines()
    assert first.startswith(f"{case.function}(")
    numbered = [f"  {i}. {reason}" for i, reason in enumerate(case.reasons, 1)]
    assert lines[: len(numbered) + 1] == [*numbered, "Nothing was allocated, compiled or written."]


def test_either_handler_of_old_code_catches_a_wrong_call() -> None:
    assert issubclass(fa.InvalidArguments, ValueError)
    assert issubclass(fa.InvalidArguments, TypeError)
    assert issubclass(fa.Unsupported, NotImplementedError)
    assert not issubclass(fa.Unsupported, (ValueError, TypeError))


def test_both_kinds_of_reason_are_listed_as_invalid() -> None:
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.flash_attn_func(**dense(), score_mod=abs, softcap=-1.0)
    assert [r.partition("=")[0] for r in refusal.value.reasons] == ["softcap", "score_mod"]


@pytest.mark.parametrize("case", METADATA, ids=str)
def test_explain_gives_the_same_reasons(case: Case) -> None:
    explanation = fa.explain(case.function, **case.arguments)
    assert (explanation.ok, explanation.reasons) == (False, case.reasons)


@pytest.mark.parametrize("case", METADATA, ids=str)
def test_the_line_to_reproduce_it_does(case: Case) -> None:
    last = str(_refusal(case)).splitlines()[-1]
    if not last.startswith("Reproduce: "):
        assert _beyond_text(case.arguments)
        return
    program, verb, text = shlex.split(last.removeprefix("Reproduce: "))
    assert (program, verb) == ("flash-attn-fp8", "explain")
    assert fa.explain(text).reasons == case.reasons


def _beyond_text(arguments: Arguments) -> bool:
    """Whether a fault lies in what the text of a call does not say: devices, grad, no tensors."""
    tensors = [t for t in arguments.values() if isinstance(t, torch.Tensor)]
    names = {*call.Operands._fields, *kvcache.NAMES_WITH_SEQUENCES.values()}
    numbers = {"output_scale": (int, float), "cache_seqlens": (int,)}
    operands = {n: t for n, t in arguments.items() if n in names}
    wrong = [n for n, t in operands.items()
             if not isinstance(t, torch.Tensor) and type(t) not in numbers.get(n, ())]  # fmt: skip
    return bool(wrong) or any(t.requires_grad or t.is_meta for t in tensors)


def test_remedies_can_be_told_from_values_in_text() -> None:
    assert not any(": " in remedy for remedy in entry.REMEDY.values())


def test_values_are_no_matter_of_text() -> None:
    assert not any("Reproduce" in str(_refusal(case)) for case in VALUES)


@pytest.mark.parametrize("case", EVERY, ids=str)
def test_nothing_is_allocated_or_written(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_: object, **__: object) -> None:
        raise AssertionError("allocated or executed")

    for name in ("_empty_out", "_empty_lse", "execute"):
        monkeypatch.setattr(ops, name, touched)
    if case not in VALUES:  # whose numbers are tensors by then
        monkeypatch.setattr(call.Call, "with_tensors", touched)
    if (
        "out" in case.changes
        or "out" not in inspect.signature(getattr(fa, case.function)).parameters
    ):
        _refusal(case)
        return
    shape = (12, 4, 16) if "cu_seqlens_q" in BASES[case.base]() else (2, 6, 4, 16)
    out = torch.full(shape, 7.0, dtype=torch.bfloat16)
    _refusal(case, out=out)
    assert bool((out == 7.0).all())


@pytest.mark.parametrize("case", INVALID, ids=str)
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_data_are_refused_alike(case: Case, kind: str) -> None:
    if _beyond_text(case.arguments):
        pytest.skip("the fault is one of devices, of grad, or of no tensors")
    mode = FakeTensorMode()

    def empty(x: object) -> object:
        if not isinstance(x, torch.Tensor):
            return x
        if kind == "fake":
            return mode.from_tensor(x)
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    arguments = {name: empty(x) for name, x in case.arguments.items()}
    with pytest.raises(fa.FlashAttnFp8Error) as refusal:
        getattr(fa, case.function)(**arguments)
    assert refusal.value.reasons == case.reasons


# ---------------------------------------------------------------- what is read, and what is not


def _per_token(*shape: int, bad: tuple[object, ...]) -> torch.Tensor:
    """Scales of 1 with NaN at the index `bad`."""
    x = torch.ones(*shape)
    x[bad] = float("nan")
    return x


def _unused_page_slots() -> tuple[object, ...]:
    """Index of the slots that the paged base does not use: spare pages, and past its keys."""
    x = paged_pool()
    used = torch.zeros(x["k"].shape[:2], dtype=torch.bool)
    for row, length in zip(x["page_table"], x["seqused_k"], strict=True):
        for j in range(int(length)):
            used[row[j // 8], j % 8] = True
    return (~used,)


WILD_TABLE = paged_pool()["page_table"].clone()
WILD_TABLE[1, 3:] = torch.tensor([-5, 10**6], dtype=torch.int32)

# Calls whose unused slots hold nonsense, which the same calls with 1 there must equal.
UNREAD: dict[str, tuple[str, Callable[[], Arguments], Arguments]] = {
    "k past seqused_k": (
        "flash_attn_varlen_func",
        lambda: dense() | {"seqused_k": ints(40, 17)},
        {"k_descale": _per_token(2, 40, 2, bad=(1, slice(17, None)))},
    ),
    "q past seqused_q": (
        "flash_attn_varlen_func",
        lambda: dense() | {"seqused_q": ints(6, 2)},
        {"q_descale": _per_token(2, 6, 2, bad=(1, slice(2, None)))},
    ),
    "v past the last sequence": (
        "flash_attn_varlen_func",
        lambda: packed() | {"cu_seqlens_k": ints(0, 30, 60)},
        {"v_descale": _per_token(1, 80, 2, bad=(0, slice(60, None)))},
    ),
    "v between sequences": (
        "flash_attn_varlen_func",
        lambda: packed() | {"seqused_k": ints(20, 50)},
        {"v_descale": _per_token(1, 80, 2, bad=(0, slice(20, 30)))},
    ),
    "unused slots of pages": (
        "flash_attn_varlen_func",
        paged_pool,
        {"k_descale": _per_token(13, 8, 2, bad=_unused_page_slots())},
    ),
    "pages past the length": ("flash_attn_varlen_func", paged_pool, {"page_table": WILD_TABLE}),
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_lies_in_unused_slots_is_not_looked_at(case: str, impl: str) -> None:
    function, base, nonsense = UNREAD[case]
    clean = {n: torch.ones_like(t) for n, t in nonsense.items() if n != "page_table"}
    run = getattr(fa, function)
    got = run(**base() | nonsense, return_lse=True, impl=impl)
    assert same_bits(got, run(**base() | clean, return_lse=True, impl=impl))


def test_token_scales_of_whole_pages_need_no_lengths(impl: str) -> None:
    x = paged_pool()
    del x["seqused_k"]
    x["page_table"] = x["page_table"].clamp(min=0)
    scale = torch.rand(13, 8, 2) + 0.5
    got = fa.flash_attn_varlen_func(**x, k_descale=scale, impl=impl)
    used = x | {"seqused_k": ints(40, 40)}
    assert same_bits(got, fa.flash_attn_varlen_func(**used, k_descale=scale, impl=impl))


def test_a_bad_scale_in_a_used_slot_is_found() -> None:
    scale = _per_token(2, 40, 2, bad=(1, 16))
    with pytest.raises(fa.InvalidArguments, match="k_descale must be finite and positive"):
        fa.flash_attn_varlen_func(**dense(), seqused_k=ints(40, 17), k_descale=scale)


def test_a_refusal_does_not_depend_on_what_ran_before() -> None:
    """1 == True and 2.0 == 2, but only one of each is legal."""
    fa.flash_attn_func(**dense(), causal=True, num_splits=2)
    with pytest.raises(fa.InvalidArguments):
        fa.flash_attn_func(**dense(), causal=1, num_splits=2)
    with pytest.raises(fa.InvalidArguments):
        fa.flash_attn_func(**dense(), causal=True, num_splits=2.0)


def test_grad_is_refused_only_where_it_is_recorded() -> None:
    x = dense() | {"learnable_sink": torch.ones(4, requires_grad=True)}
    with pytest.raises(fa.Unsupported):
        fa.flash_attn_func(**x)
    with torch.no_grad():
        out, _ = fa.flash_attn_func(**x)
    assert not out.requires_grad


def _of_dual(fn: Callable[[torch.Tensor], object], x: torch.Tensor) -> object:
    with forward_ad.dual_level():
        return fn(forward_ad.make_dual(x, torch.ones_like(x)))


FORWARD_MODE: dict[str, Callable[[Callable[..., Any], torch.Tensor], object]] = {
    "jvp": lambda fn, x: torch.func.jvp(fn, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda fn, x: torch.func.jacfwd(fn)(x),
    "dual": _of_dual,
    "jvp of vmap": lambda fn, x: torch.func.jvp(
        torch.func.vmap(fn), (torch.stack([x, x]),), (torch.ones(2, *x.shape),)
    ),
    "vmap of jvp": lambda fn, x: torch.func.vmap(
        lambda x: torch.func.jvp(fn, (x,), (torch.ones_like(x),))[1]
    )(torch.stack([x, x])),
}


@pytest.mark.parametrize("way", FORWARD_MODE)
@pytest.mark.parametrize("fn", ["flash_attn_func", "flash_attn_with_kvcache", "flash_attn_combine"])
def test_tangents_are_refused_and_not_lost(way: str, fn: str) -> None:
    base, name = {
        "flash_attn_func": ("dense", "learnable_sink"),
        "flash_attn_with_kvcache": ("cache", "learnable_sink"),
        "flash_attn_combine": ("partials", "lse_partial"),
    }[fn]
    arguments = BASES[base]()
    x = arguments.pop(name) if name in arguments else torch.ones(4)

    def of(x: torch.Tensor) -> torch.Tensor:
        out = getattr(fa, fn)(**arguments, **{name: x})
        return out[0] if isinstance(out, tuple) else out

    with pytest.raises(fa.Unsupported) as refusal:
        FORWARD_MODE[way](of, x)
    assert refusal.value.reasons == (
        f"{name} carry tangents: this package has no derivatives, in forward mode neither; "
        "detach them",
    )
    got = _of_dual(lambda x: of(x.detach()), x)
    assert isinstance(got, torch.Tensor)
    assert same_bits(got, of(x))


# ------------------------------------------------------------------------------ the other functions

COMBINE = {
    "no tensor": ({"out_partial": [1]}, ("out_partial must be a torch.Tensor, got list [1]",)),
    "out is none": ({"out": 3}, ("out must be a torch.Tensor, got int 3",)),
    "virtual": (
        {"virtual_batch_idx": ints(0, 1)},
        ("virtual_batch_idx: batches are not reordered here; drop it",),
    ),
    "rank": (
        {"out_partial": torch.ones(3, 5, 16), "lse_partial": torch.ones(3, 5)},
        ("out_partial must be (num_splits, [batch,] seqlen, nheads, head_dim)",),
    ),
    "splits": (
        {"out_partial": torch.ones(257, 1, 1, 8), "lse_partial": torch.ones(257, 1, 1)},
        ("num_splits=257 must be from 1 to 256",),
    ),
    "FA4's forward lse": (
        {"lse_partial": torch.ones(3, 2, 4, 5)},
        ("lse_partial must have shape [3, 2, 5, 4] (heads last)",),
    ),
    "dtypes": (
        {"lse_partial": torch.ones(3, 2, 5, 4).half()},
        ("out_partial must be fp32, bf16 or fp16, and lse_partial fp32",),
    ),
    "out dtype": (
        {"out_dtype": torch.float8_e4m3fn},
        ("output cannot be e4m3; it can be fp32, bf16, fp16",),
    ),
    "out": (
        {"out": torch.ones(2, 5, 4, 8)},
        ("out must be fp32[2, 5, 4, 16], got fp32[2, 5, 4, 8]",),
    ),
    "lengths": (
        {"seqused": ints(1, 2).long()},
        ("seqused must be a vector of int32, got int64[2]",),
    ),
    "unpacked": (
        {"cu_seqlens": ints(0, 5)},
        ("cu_seqlens is for packed rows: out_partial of rank 4",),
    ),
    "batch": ({"seqused": ints(1, 2, 3)}, ("seqused must have 2 elements, got 3",)),
    "out with overlaps": (
        {"out": torch.ones(1, 5, 4, 16).expand(2, 5, 4, 16)},
        ("out has strides [0, 64, 16, 1], in which elements share memory; clone it",),
    ),
    "device": (
        {"lse_partial": torch.ones(3, 2, 5, 4, device="meta")},
        ("lse_partial is on meta, out_partial on cpu",),
    ),
    "grad": (
        {"lse_partial": torch.ones(3, 2, 5, 4, requires_grad=True)},
        (
            "lse_partial require grad: this package is forward only; call it under "
            "torch.no_grad() or detach them",
        ),
    ),
    "flag": (
        {"return_lse": torch.ones(2, 5, 4)},
        ("return_lse=fp32[2, 5, 4] must be True or False",),
    ),
    "dtype is none": (
        {"out_dtype": torch.ones(2)},
        ("out_dtype=fp32[2] must be a torch.dtype: that of fp32, bf16, fp16",),
    ),
    "all at once": (
        {"seqused": ints(1), "virtual_batch_idx": 1, "lse_partial": torch.ones(3)},
        (
            "lse_partial must have shape [3, 2, 5, 4] (heads last)",
            "seqused must have 2 elements, got 1",
            "virtual_batch_idx: batches are not reordered here; drop it",
        ),
    ),
}


@pytest.mark.parametrize("case", COMBINE)
def test_combine(case: str) -> None:
    changes, reasons = COMBINE[case]
    with pytest.raises(fa.FlashAttnFp8Error) as refusal:
        fa.flash_attn_combine(**BASES["partials"]() | changes)
    assert refusal.value.reasons == reasons
    kind = fa.Unsupported if case in ("virtual", "grad") else fa.InvalidArguments
    assert type(refusal.value) is kind


def test_combine_of_packed_rows_needs_their_bounds() -> None:
    x = BASES["packed_partials"]()
    del x["cu_seqlens"]
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.flash_attn_combine(**x, seqused=ints(1, 2))
    assert refusal.value.reasons == ("seqused of packed rows needs cu_seqlens",)


_NAMES = "token_head, batch_head, head, tensor"
QUANTIZE = {
    "dtype": (
        {"dtype": torch.float16},
        "dtype=torch.float16 is none of torch.float8_e4m3fn, torch.float8_e5m2, torch.int8",
    ),
    "x": ({"x": 3}, "x must be a torch.Tensor, got int"),
    "x dtype": ({"x": codes(2, 6, 3, 8)}, "x is e4m3; it must be bf16, fp16 or fp32"),
    "rank": ({"x": torch.ones(6, 8)}, "x has shape [6, 8]; it must be ([batch,] seqlen, heads, d)"),
    "per": ({"per": "page"}, f"per='page' is not one of {_NAMES}"),
    "bounds": (
        {"x": torch.ones(6, 3, 8), "per": "batch_head"},
        "a packed x needs cu_seqlens for per='batch_head' and for smooth",
    ),
    "no use": (
        {"cu_seqlens": ints(0, 6)},
        "cu_seqlens is only read for a packed x with per='batch_head' or smooth",
    ),
    "bounds dtype": (
        {"x": torch.ones(6, 3, 8), "smooth": True, "cu_seqlens": ints(0, 6).long()},
        "cu_seqlens must be a vector of int32, got int64[2]",
    ),
    "bounds rank": (
        {"x": torch.ones(6, 3, 8), "smooth": True, "cu_seqlens": torch.zeros(2, 2).int()},
        "cu_seqlens must be a vector of int32, got int32[2, 2]",
    ),
    "bounds type": (
        {"x": torch.ones(6, 3, 8), "smooth": True, "cu_seqlens": [0, 6]},
        "cu_seqlens must be a vector of int32, got list [0, 6]",
    ),
    "bounds device": (
        {"x": torch.ones(6, 3, 8), "smooth": True, "cu_seqlens": ints(0, 6).to("meta")},
        "cu_seqlens is on meta and x on cpu; move one",
    ),
    "no sequence": (
        {"x": torch.ones(6, 3, 8), "smooth": True, "cu_seqlens": ints(0)},
        "cu_seqlens has 1 entries, which bound no sequence; give batch + 1",
    ),
    "KV heads": ({"nheads_kv": 2}, "nheads_kv=2 does not divide the 3 heads of x; give a divisor"),
    "no KV heads": (
        {"nheads_kv": 0},
        "nheads_kv=0 does not divide the 3 heads of x; give a divisor",
    ),
    "KV heads type": (
        {"nheads_kv": True},
        "nheads_kv=True must be an int, the number of KV heads",
    ),
    "KV heads of a tensor": (
        {"nheads_kv": 3, "per": "tensor"},
        "nheads_kv=3 groups heads, and per='tensor' has one scale; leave it out",
    ),
}


@pytest.mark.parametrize("case", QUANTIZE)
def test_quantize(case: str) -> None:
    changes, reason = QUANTIZE[case]
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.quantize(**BASES["raw"]() | changes)
    assert refusal.value.reasons == (reason,)


def test_quantize_lists_all_faults() -> None:
    with pytest.raises(fa.InvalidArguments) as refusal:
        fa.quantize(codes(6, 8), dtype=torch.half, per="page")  # type: ignore[arg-type]
    assert len(refusal.value.reasons) == 4


# --------------------------------------------------------------- every reason is in a table above


class _Recorder(list[str]):
    """A list of reasons that remembers which lines of the package added to it."""

    sites: set[tuple[str, int]]

    def append(self, reason: str) -> None:
        frame = sys._getframe(1)
        self.sites.add((frame.f_code.co_filename, frame.f_lineno))
        super().append(reason)


def _lines_that_add_reasons(module: Any) -> Iterator[tuple[str, range]]:
    """Statements `....invalid.append(...)` and `....unsupported.append(...)` of a module."""
    path = inspect.getsourcefile(module)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called.endswith((".invalid.append", ".unsupported.append")):
                yield str(path), range(node.lineno, (node.end_lineno or node.lineno) + 1)


def test_no_reason_is_missing_in_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    sites: set[tuple[str, int]] = set()

    class Recording(errors.Refusal):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.invalid = _Recorder(self.invalid)
            self.unsupported = _Recorder(self.unsupported)
            self.invalid.sites = self.unsupported.sites = sites

    for module in (checks, check_buffers, values, ops):
        monkeypatch.setattr(module, "Refusal", Recording)
    for case in EVERY:
        _refusal(case)
    with pytest.raises(fa.Unsupported):  # a tangent is no part of an argument
        _of_dual(lambda x: fa.flash_attn_func(**dense(), learnable_sink=x), torch.ones(4))
    for module in (checks, check_options, check_scales, check_selection, values):
        for path, lines in _lines_that_add_reasons(module):
            hit = any(where == path and line in lines for where, line in sites)
            assert hit, f"{path}:{lines.start}: no case has this reason"
