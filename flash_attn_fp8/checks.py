"""Calls to problems: every fault of a call's metadata, found before anything is allocated.

`problem_of(call)` reads shapes, strides, dtypes and devices only, never data: it needs no
synchronisation and works on meta and fake tensors. `values.py` has the checks that read data.

One function per topic; each appends its reasons to the refusal and returns what the next ones
need. A reason names the argument, the value found and what to write instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad

from flash_attn_fp8.call import Call, Operands, Options, describe
from flash_attn_fp8.check_buffers import check_buffers
from flash_attn_fp8.check_options import (
    check_number,
    check_options,
    check_window_of_lengths,
    is_int,
    is_number,
    takes_number,
)
from flash_attn_fp8.check_scales import output_descale, scale_granularities
from flash_attn_fp8.check_selection import (
    check_select_pages,
    check_selection,
    selected_keys,
    unit_of_selection,
)
from flash_attn_fp8.errors import FlashAttnFp8Error, InvalidArguments, Refusal
from flash_attn_fp8.formats import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    INT8,
    OUT_FORMATS,
    Format,
    dtype_name,
    format_of,
    format_of_p,
)
from flash_attn_fp8.policy import POLICIES, Fp8Policy, policy_for
from flash_attn_fp8.problem import Problem, Request, Sizes, Traits

MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8

_16BIT = (BF16, FP16)
_INT32_VECTORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")


def problem_of(call: Call) -> Problem:
    """Check `call` and describe it.

    Raises:
        InvalidArguments: with every fault of the arguments.
        Unsupported: the arguments are legal and no executor of this version takes them.
    """
    problem, refusal = examine(call)
    if problem is None:
        raise refusal_of(call, refusal)
    return problem


def refusal_of(call: Call, refusal: Refusal) -> FlashAttnFp8Error:
    """The exception for a call that `explain` would refuse too."""
    repro = f"flash-attn-fp8 explain {str(call)!r}" if refusal.shows_in_text else None
    return refusal.error(str(call), repro)


def examine(call: Call) -> tuple[Problem | None, Refusal]:
    """Like `problem_of`, but returns the refusal; the problem is None where there is a reason."""
    refusal = Refusal(names=call.names)
    refusal.unsupported += call.refused
    window = check_constants(call, refusal)
    if not _are_tensors(call, refusal):
        return None, refusal
    operands = call.operands._asdict()
    tensors = {refusal.name(n): t for n, t in operands.items() if isinstance(t, Tensor)}
    check_autograd(tensors, refusal)
    _check_devices(tensors, refusal)
    check_select_pages(call.operands, call.options, refusal)
    layout = _layout(call.operands, refusal)
    formats = _formats(call.operands, refusal)
    if formats is None:
        return None, refusal
    before = len(refusal.invalid)
    policy = _policy(call.options, formats, refusal)
    policy_is_given = call.options.fp8_policy is not None and len(refusal.invalid) == before
    out_format = _out_format(call, formats, refusal)
    output_descale(call.operands, out_format, refusal)
    if layout is None:
        return None, refusal
    sizes = _sizes(call, layout, window, refusal)
    traits = _traits(call, layout, (formats, out_format), window, policy, refusal)
    if policy_is_given:
        _check_policy_of_traits(call.options.fp8_policy, traits, refusal)
    problem = Problem(traits, sizes, _request(call.options))
    check_buffers(call.operands, problem, refusal)
    return (None if refusal.reasons else problem), refusal


def check_constants(call: Call, refusal: Refusal) -> tuple[int | None, int | None]:
    """The checks that no tensor is needed for, which a compiler can trace; see `check_options`."""
    for name, value in call.operands._asdict().items():
        if not (isinstance(value, Tensor) or (value is None and name not in ("q", "k", "v"))):
            check_number(name, value, refusal)
    return check_options(call.options, refusal)


def _are_tensors(call: Call, refusal: Refusal) -> bool:
    """Whether every operand is a tensor, or a number where that is allowed."""
    for name, value in call.operands._asdict().items():
        absent = value is None and name not in ("q", "k", "v")
        if not (absent or isinstance(value, Tensor) or takes_number(name, value, refusal)):
            refusal.shows_in_text = False
            return False
    return True


def check_autograd(tensors: Mapping[str, Tensor], refusal: Refusal) -> None:
    """Refuse tensors of a derivative, backward or forward; the result would have lost it."""
    needing = [name for name, t in tensors.items() if t.requires_grad and torch.is_grad_enabled()]
    if needing:
        refusal.shows_in_text = False
        refusal.unsupported.append(
            f"{', '.join(needing)} require grad: this package is forward only; call it under "
            f"torch.no_grad() or detach them"
        )
    dual = [name for name, t in tensors.items() if has_tangent(t)]
    if dual:
        refusal.shows_in_text = False
        refusal.unsupported.append(
            f"{', '.join(dual)} carry tangents: this package has no derivatives, in forward mode "
            f"neither; detach them"
        )


def has_tangent(t: Tensor) -> bool:
    """Whether `t` is a dual number of forward-mode differentiation (torch.func.jvp, jacfwd)."""
    if forward_ad._current_level < 0:
        return False
    while _functorch.is_batchedtensor(t):
        if torch.compiler.is_compiling():
            return True  # nothing looks into it there; all that is known is that jvp runs
        t = _functorch.get_unwrapped(t)
    return forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]


def _check_devices(tensors: Mapping[str, Tensor], refusal: Refusal) -> None:
    device = tensors["q"].device
    elsewhere = {n: str(t.device) for n, t in tensors.items() if t.device != device}
    if elsewhere:
        refusal.shows_in_text = False
        refusal.invalid.append(
            f"q is on {device}, but {', '.join(f'{n} on {d}' for n, d in elsewhere.items())}; "
            f"all tensors must be on one device"
        )


# ---------------------------------------------------------------------------------- layout


@dataclass(frozen=True)
class _Layout:
    q: Literal["dense", "varlen"]
    kv: Literal["dense", "varlen", "paged"]
    batch: int
    nheads: int
    nheads_kv: int
    head_dim: int
    head_dim_v: int


def _layout(o: Operands, refusal: Refusal) -> _Layout | None:
    before = len(refusal.invalid)
    q_layout: Literal["dense", "varlen"] = "dense" if o.cu_seqlens_q is None else "varlen"
    kv_layout: Literal["dense", "varlen", "paged"] = "dense"
    if o.page_table is not None:
        kv_layout = "paged"
        if o.cu_seqlens_k is not None:
            refusal.invalid.append(
                "page_table and cu_seqlens_k exclude each other: a paged cache takes seqused_k"
            )
    elif o.cu_seqlens_k is not None:
        kv_layout = "varlen"
    _check_ranks(o, q_layout, kv_layout, refusal)
    _check_index_tensors(o, refusal)
    if len(refusal.invalid) > before:
        return None
    _check_kv_shapes(o, kv_layout, refusal)
    _check_head_counts(o, refusal)
    check_selection(o, refusal)
    batch = _batch(o, q_layout, kv_layout, refusal)
    for field, t in (("q", o.q), ("k", o.k), ("v", o.v)):
        name = refusal.name(field)
        if t.stride(-1) != 1 and t.shape[-1] != 1:
            refusal.invalid.append(
                f"{name} has stride {t.stride(-1)} in its last dimension; it must be contiguous "
                f"there (any stride is fine elsewhere): {name}.contiguous()"
            )
    if len(refusal.invalid) > before:
        return None
    return _Layout(
        q_layout,
        kv_layout,
        batch,
        nheads=o.q.shape[-2],
        nheads_kv=o.k.shape[-2],
        head_dim=o.q.shape[-1],
        head_dim_v=o.v.shape[-1],
    )


_SHAPES = {
    "dense": "(batch, seqlen, nheads, head_dim)",
    "varlen": "(total, nheads, head_dim)",
    "paged": "(num_pages, page_size, nheads_kv, head_dim)",
}


def _check_ranks(o: Operands, q_layout: str, kv_layout: str, refusal: Refusal) -> None:
    for name, t, layout in (("q", o.q, q_layout), ("k", o.k, kv_layout), ("v", o.v, kv_layout)):
        rank = 3 if layout == "varlen" else 4
        if t.ndim == rank:
            continue
        hint = ""
        if t.ndim == 3 and rank == 4 and layout == "dense":
            hint = f"; packed sequences need cu_seqlens_{'q' if name == 'q' else 'k'}"
        if t.ndim == 4 and rank == 3:
            hint = f"; drop cu_seqlens_{'q' if name == 'q' else 'k'} for batched sequences"
        refusal.invalid.append(
            f"{refusal.name(name)}={describe(t)} must be {_SHAPES[layout]}{hint}"
        )


def _check_index_tensors(o: Operands, refusal: Refusal) -> None:
    for field in (*_INT32_VECTORS, "page_table"):
        t, name = getattr(o, field), refusal.name(field)
        if not isinstance(t, Tensor):
            continue
        rank = 2 if name == "page_table" else 1  # a page_table by another name: cache_batch_idx
        if t.dtype != torch.int32:
            refusal.invalid.append(f"{name} must be int32, got {dtype_name(t.dtype)}: {name}.int()")
        if t.ndim != rank:
            shape = "(batch, max_pages)" if rank == 2 else "one-dimensional"
            refusal.invalid.append(f"{name} must be {shape}, got shape {list(t.shape)}")
        elif name.startswith("cu_") and t.shape[0] < 1:
            refusal.invalid.append(f"{name} must hold batch + 1 offsets, got none")
        elif t.shape[-1] > 1 and t.stride(-1) != 1 and name != "cache_batch_idx":
            refusal.invalid.append(f"{name} must be contiguous in its last dimension")


def _check_kv_shapes(o: Operands, kv_layout: str, refusal: Refusal) -> None:
    k, v = refusal.name("k"), refusal.name("v")
    if o.k.shape[:-1] != o.v.shape[:-1]:
        refusal.invalid.append(
            f"{k}={describe(o.k)} and {v}={describe(o.v)} must agree in all dimensions but the last"
        )
    if o.q.shape[-1] != o.k.shape[-1]:
        refusal.invalid.append(
            f"q has head_dim {o.q.shape[-1]} and {k} {o.k.shape[-1]}; they must be equal"
        )
    for name, t in (("head_dim", o.q), ("head_dim_v", o.v)):
        d = t.shape[-1]
        if not 0 < d <= MAX_HEAD_DIM or d % HEAD_DIM_MULTIPLE:
            refusal.invalid.append(
                f"{name}={d} is not supported; it must be a multiple of {HEAD_DIM_MULTIPLE} from "
                f"{HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}: {HEAD_DIM_MULTIPLE}, "
                f"{2 * HEAD_DIM_MULTIPLE}, ..., {MAX_HEAD_DIM}"
            )
    if kv_layout == "paged" and o.k.shape[1] < 1:
        refusal.invalid.append(f"page_size={o.k.shape[1]} must be at least 1")


def _check_head_counts(o: Operands, refusal: Refusal) -> None:
    nheads, nheads_kv = o.q.shape[-2], o.k.shape[-2]
    if nheads < 1 or nheads_kv < 1 or nheads % nheads_kv:
        refusal.invalid.append(
            f"q has {nheads} heads and {refusal.name('k')}, {refusal.name('v')} have {nheads_kv}: "
            f"the first must be a positive multiple of the second"
        )
    sink = o.learnable_sink
    if sink is None:
        return
    if sink.ndim != 1 or sink.shape[0] != nheads:
        refusal.invalid.append(
            f"learnable_sink must have one logit per query head, shape [{nheads}], got "
            f"{list(sink.shape)}"
        )
    if format_of(sink.dtype) not in (*_16BIT, FP32):
        refusal.invalid.append(
            f"learnable_sink must be bf16, fp16 or fp32, got {dtype_name(sink.dtype)}"
        )


def _batch(o: Operands, q_layout: str, kv_layout: str, refusal: Refusal) -> int:
    """The batch size; every tensor that has one must agree with q's."""
    cu_q = o.cu_seqlens_q
    batch = o.q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    source = f"q={describe(o.q)}" if cu_q is None else f"cu_seqlens_q={describe(cu_q)}"
    found: dict[str, int] = {}
    if kv_layout == "dense":
        found["k"] = o.k.shape[0]
    for name, extra in (
        ("cu_seqlens_k", 1),
        ("seqused_q", 0),
        ("seqused_k", 0),
        ("page_table", 0),
        ("selection", 0),
        ("selection_lens", 0),
    ):
        t = getattr(o, name)
        if isinstance(t, Tensor):
            found[name] = t.shape[0] - extra
    for name, size in found.items():
        if size != batch:
            refusal.invalid.append(
                f"{source} is a batch of {batch}, {refusal.name(name)}="
                f"{describe(getattr(o, name))} one of {size}"
            )
    return batch


# --------------------------------------------------------------------------------- formats


@dataclass(frozen=True)
class _Formats:
    q: Format
    kv: Format


def _formats(o: Operands, refusal: Refusal) -> _Formats | None:
    q, k = (format_of(t.dtype) for t in (o.q, o.k))
    named = zip("qkv", (o.q, o.k, o.v), strict=True)
    names = ", ".join(f"{refusal.name(name)}={dtype_name(t.dtype)}" for name, t in named)
    kv = f"{refusal.name('k')} and {refusal.name('v')}"
    if o.k.dtype != o.v.dtype:
        refusal.invalid.append(f"{kv} must have one dtype, got {names}")
        return None
    allowed = {
        E4M3: (E4M3,),
        E5M2: (E5M2,),
        BF16: (BF16, E4M3, E5M2, INT8),
        FP16: (FP16, E4M3, E5M2, INT8),
    }
    if q is None or k is None or k not in allowed.get(q, ()):
        refusal.invalid.append(
            f"{names} is no supported mix: q, {kv} all e4m3, e5m2, bf16 or fp16, or bf16/fp16 "
            f"q over e4m3, e5m2 or int8 {kv} (torch.uint8 codes: use .view(dtype))"
        )
        return None
    return _Formats(q, k)


def _out_format(call: Call, formats: _Formats, refusal: Refusal) -> Format:
    """What `out` holds: out's dtype, out_dtype, e4m3 where output_scale is given, q's, or bf16."""
    o, wanted = call.operands, call.options.out_dtype
    default = formats.q if not formats.q.is_8bit else BF16
    if wanted is not None and not isinstance(wanted, torch.dtype):
        return default  # refused by `check_options`
    dtype = wanted if wanted is not None else (o.out.dtype if o.out is not None else None)
    if dtype is None:
        return E4M3 if o.output_scale is not None else default
    if o.out is not None and o.out.dtype != dtype:
        refusal.invalid.append(
            f"out is {dtype_name(o.out.dtype)}, out_dtype asks for {dtype_name(dtype)}"
        )
    fmt = format_of(dtype)
    if fmt not in OUT_FORMATS:
        refusal.invalid.append(
            f"output cannot be {dtype_name(dtype)}; it can be "
            f"{', '.join(f.name for f in OUT_FORMATS)}"
        )
        return default
    return fmt


def _request(o: Options) -> Request:
    return Request(
        num_splits=o.num_splits,
        seqlen_k_per_split=o.seqlen_k_per_split,
        pack_gqa=o.pack_gqa,
        deterministic=o.deterministic,
        disable_scheduler_metadata=o.disable_scheduler_metadata,
        policy_given=o.fp8_policy is not None,
        impl=o.impl,
    )


def _policy(options: Options, formats: _Formats, refusal: Refusal) -> Fp8Policy:
    given, p_format = options.fp8_policy, format_of_p(formats.q, formats.kv).name
    default = policy_for(p_format)
    if given is None:
        return default
    if isinstance(given, str):
        try:
            is_name = given in POLICIES[p_format] or " " not in given
            given = policy_for(p_format, given) if is_name else Fp8Policy.parse(given)
        except InvalidArguments as fault:
            refusal.invalid.append(f"fp8_policy: {fault}")
            return default
    if not isinstance(given, Fp8Policy):
        return default  # refused by `check_options`
    if given.p_format != p_format:
        refusal.invalid.append(
            f"fp8_policy is for P in {given.p_format}; with q in {formats.q.name} and v in "
            f"{formats.kv.name} P is {p_format}: "
            f"policy_for({p_format!r})"
        )
    return given


def _check_policy_of_traits(given: object, traits: Traits, refusal: Refusal) -> None:
    """What a policy cannot have where V's scales for each token sit in the exponent of P."""
    policy = traits.policy
    if not traits.v_scale_in_exponent:
        return
    if policy.exp2 != "exact":
        refusal.invalid.append(
            f"fp8_policy has exp2={policy.exp2!r} and v_descale is per token: the row sum needs P "
            f"before it is rounded, and codes made straight from the exponent have none. Write "
            f"exp2='exact', or give v_descale per batch and head"
        )
    # A name leaves the row sum to the call, as no policy at all does; the text of one does not.
    is_name = isinstance(given, str) and given in POLICIES[policy.p_format]
    if policy.row_sum != "exact" and not is_name:
        refusal.invalid.append(
            f"fp8_policy has row_sum={policy.row_sum!r} and v_descale is per token: keys whose "
            f"scale is small are zero in the rounded P whatever their share of the row sum. Write "
            f"row_sum='exact', or give v_descale per batch and head"
        )


# ---------------------------------------------------------------------------------- records


def _sizes(
    call: Call, layout: _Layout, window: tuple[int | None, int | None], refusal: Refusal
) -> Sizes:
    o, options = call.operands, call.options
    if layout.q == "dense":
        seqlen_q, total_q = o.q.shape[1], None
    else:
        total_q = o.q.shape[0]
        seqlen_q = total_q if options.max_seqlen_q is None else options.max_seqlen_q
    num_pages = page_size = total_k = None
    if layout.kv == "dense":
        capacity = o.k.shape[1]
    elif layout.kv == "varlen":
        total_k = capacity = o.k.shape[0]
    else:
        num_pages, page_size = o.k.shape[0], o.k.shape[1]
        columns = o.page_table.shape[1:]  # type: ignore[union-attr]
        capacity = columns[0] * page_size if columns else page_size
    seqlen_k = capacity
    rows = seqlen_q if total_q is None else total_q
    check_window_of_lengths(options, (rows, capacity), refusal)
    _check_fixed_lengths(o, options, layout, seqlen_q, capacity, refusal)
    if is_int(options.max_seqlen_k) and layout.kv != "dense":
        if layout.kv == "paged" and options.max_seqlen_k > capacity:  # type: ignore[operator]
            refusal.invalid.append(
                f"max_seqlen_k={options.max_seqlen_k} does not fit in page_table's "
                f"{o.page_table.shape[1]} pages x {page_size} = {capacity} keys"  # type: ignore[union-attr]
            )
        seqlen_k = options.max_seqlen_k  # type: ignore[assignment]
    scale = options.softmax_scale
    return Sizes(
        batch=layout.batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        nheads=layout.nheads,
        nheads_kv=layout.nheads_kv,
        softmax_scale=layout.head_dim**-0.5 if scale is None else scale,
        window_left=window[0],
        window_right=window[1],
        softcap=options.softcap,
        total_q=total_q,
        total_k=total_k,
        num_pages=num_pages,
        page_size=page_size,
        selected=selected_keys(o, options),
    )


def _check_fixed_lengths(
    o: Operands, options: Options, layout: _Layout, seqlen_q: int, capacity: int, refusal: Refusal
) -> None:
    """Bounds of lengths that no tensor holds; `values.py` checks them against the others."""
    used: object = o.seqused_k
    if is_int(used) and used > capacity:  # type: ignore[operator]
        refusal.invalid.append(
            f"{refusal.name('seqused_k')}={used}, but {refusal.name('k')} has room for {capacity} "
            f"keys of each sequence"
        )
    rows = seqlen_q if layout.q == "dense" and o.seqused_q is None else None
    keys = capacity if layout.kv != "varlen" and o.seqused_k is None else None
    for name, length in (("max_seqlen_q", rows), ("max_seqlen_k", keys), ("min_seqlen_k", keys)):
        bound = getattr(options, name)
        if length is None or not is_int(bound):
            continue
        if bound > length if name.startswith("min") else bound < length:
            refusal.invalid.append(f"{name}={bound}, but every sequence has length {length}")


def _traits(
    call: Call,
    layout: _Layout,
    formats_and_out: tuple[_Formats, Format],
    window: tuple[int | None, int | None],
    policy: Fp8Policy,
    refusal: Refusal,
) -> Traits:
    o, (formats, out_format) = call.operands, formats_and_out
    scales = scale_granularities(o, formats.q, formats.kv, layout.batch, refusal)
    return Traits(
        q_format=formats.q.name,
        kv_format=formats.kv.name,
        out_format=out_format.name,
        head_dim=layout.head_dim,
        head_dim_v=layout.head_dim_v,
        q_layout=layout.q,
        kv_layout=layout.kv,
        q_heads_per_kv_head=layout.nheads // layout.nheads_kv,
        seqused_q=o.seqused_q is not None,
        seqused_k=o.seqused_k is not None,
        bounded_left=window[0] is not None,
        bounded_right=window[1] is not None,
        softcap=is_number(call.options.softcap) and bool(call.options.softcap),
        sink=o.learnable_sink is not None,
        q_descale=scales["q"],
        k_descale=scales["k"],
        v_descale=scales["v"],
        output_scale=o.output_scale is not None,
        lse=call.options.return_lse is True or o.lse is not None,
        policy=policy,
        selection=unit_of_selection(o, call.options),
        selection_lens=o.selection_lens is not None,
    )
