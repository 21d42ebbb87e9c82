"""The torch custom ops, and the way round them for eager calls.

`forward(call)` is what every public function runs. An eager call on plain tensors goes straight to
check, plan, run; a compiler, an exporter, vmap, a fake or meta tensor or a dispatch mode sees one
opaque node, `flash_attn_fp8::forward`, whose fake does the same checks on shapes that may be
symbolic. An op costs tens of microseconds in eager mode, so only those who need one pay.

Registered on import, before any backend is loaded, so that a first call can already be compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from flash_attn_fp8.call import Call, Operands, Options
from flash_attn_fp8.check_buffers import check_mapped, check_memory
from flash_attn_fp8.check_options import clamped
from flash_attn_fp8.checks import check_constants, has_tangent, problem_of, refusal_of
from flash_attn_fp8.errors import Refusal, Unsupported
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.plan import Plan, executor_for, plan_for
from flash_attn_fp8.problem import Problem
from flash_attn_fp8.run import execute
from flash_attn_fp8.simulation import settings
from flash_attn_fp8.target import Target, debug_checks, target_of
from flash_attn_fp8.values import check_values

_MEMO_LIMIT = 8192
T = TypeVar("T")
_PLAIN = (Tensor, torch.nn.Parameter)


def forward(call: Call) -> tuple[Tensor, Tensor | None]:
    """Check, plan and execute a call; (out, lse), lse None unless it was asked for."""
    if not torch.compiler.is_compiling() and _is_eager(call.operands):
        return _forward_eager(call)  # type: ignore[no-any-return]
    return _forward_through_op(call)


def prepare(call: Call) -> tuple[Problem, Plan]:
    """The problem and plan of an eager call, remembered by the metadata of its tensors.

    Raises:
        InvalidArguments, Unsupported: see `checks.problem_of`.
    """
    key = _metadata(call)
    found = _memo.get(key)
    if found is None:
        problem = problem_of(call)
        found = problem, _unless_refused(call, plan_for, problem)
        if len(_memo) >= _MEMO_LIMIT:
            _memo.clear()
        _memo[key] = found
    return found


def _unless_refused(call: Call, choose: Callable[[Problem, Target], T], problem: Problem) -> T:
    """What `choose` makes of a problem on the call's device, or a refusal that shows the call."""
    try:
        return choose(problem, _target_of(call))
    except Unsupported as refused:
        raise refusal_of(call, Refusal(unsupported=list(refused.reasons))) from None


def _target_of(call: Call) -> Target:
    """The device of the call's tensors, or the one that is simulated."""
    if call.options.impl == "sim":
        return settings().planned_for
    return target_of(call.operands.q.device)


_memo: dict[Any, tuple[Problem, Plan]] = {}


def _metadata(call: Call) -> Any:
    """All that a problem depends on, hashable; unlike any other where an option is not."""
    tensors = tuple(
        None
        if t is None
        else (t.dtype, t.shape, t.stride(), t.device, t.requires_grad and torch.is_grad_enabled())
        if isinstance(t, Tensor)
        else repr(t)
        for t in call.operands
    )
    try:
        hash(call.options)
    except TypeError:  # an unhashable option, which the checks are about to refuse
        return object()
    types = tuple(map(type, call.options))  # 1 == True, and only one is legal
    names = call.names.get("page_table")  # of one dimension where it is a cache_batch_idx
    target = settings().planned_for if call.options.impl == "sim" else None
    return call.function, names, tensors, call.options, types, call.refused, target


def _is_eager(o: Operands) -> bool:
    if not isinstance(o.q, Tensor):
        return True  # to be refused
    transformed = torch._C._functorch.maybe_current_level() is not None  # by vmap, jvp, ...
    plain = type(o.q) in _PLAIN and not o.q.is_meta
    dual = forward_ad._current_level >= 0
    return plain and not transformed and not dual and not is_in_torch_dispatch_mode()


# Where a refusal breaks a graph, Dynamo goes on with each function by itself, and would guard every
# entry of the memo: minutes, for a process that has seen thousands of calls.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward_eager(call: Call) -> tuple[Tensor, Tensor | None]:
    problem, plan = prepare(call)
    if call.operands.out is not None or call.operands.lse is not None:
        check_memory(call)
    call = call.with_tensors()
    o = call.operands
    if o.q.device.type == "cpu" or debug_checks():
        check_values(call, problem)
    out = o.out if o.out is not None else _empty_out(problem, o.q)
    lse = o.lse if o.lse is not None else _empty_lse(problem, o.q)
    execute(plan, problem, o, out, lse)
    return out, lse


def _empty_out(problem: Problem, like: Tensor) -> Tensor:
    dtype = FORMATS[problem.traits.out_format].dtype
    return torch.empty(problem.out_shape, dtype=dtype, device=like.device)


def _empty_lse(problem: Problem, like: Tensor) -> Tensor | None:
    if not problem.traits.lse:
        return None
    return torch.empty(problem.lse_shape, dtype=torch.float32, device=like.device)


# -------------------------------------------------------------------------------- custom ops

# The fields of Operands and Options, in their order, in the language of op schemas.
_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, "
    "Tensor? seqused_k, Tensor? page_table, Tensor? learnable_sink, Tensor? q_descale, "
    "Tensor? k_descale, Tensor? v_descale, Tensor? output_scale, Tensor? selection, "
    "Tensor? selection_lens"
)
_BUFFERS = "Tensor(a!) out, Tensor(b!)? lse"
_OPTIONS = (
    "float? softmax_scale, bool causal, SymInt? window_left, SymInt? window_right, float softcap, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, SymInt? min_seqlen_k, int num_splits, "
    "SymInt? seqlen_k_per_split, bool? pack_gqa, bool deterministic, "
    "bool disable_scheduler_metadata, bool return_lse, ScalarType? out_dtype, str? fp8_policy, "
    # caller: the public function and its names, see `_caller_of`
    "str? impl, bool select_pages, str caller"
)
_INPUTS = Operands._fields.index("out")  # tensors that are only read


def _forward_through_op(call: Call) -> tuple[Tensor, Tensor | None]:
    _check_before_op(call)
    o, options = call.with_tensors().operands, call.options
    o = o._replace(page_table=call.operands.page_table)  # whose rank belongs to its name
    caller = _caller_of(call)
    policy = None if options.fp8_policy is None else str(options.fp8_policy)
    wants_lse = options.return_lse or o.lse is not None
    options = options._replace(
        return_lse=wants_lse,
        fp8_policy=policy,
        window_left=clamped(options.window_left),
        window_right=clamped(options.window_right),
    )
    if o.out is not None:
        lse = o.lse
        if lse is None and wants_lse:
            lse = o.q.new_empty(_lse_shape(o), dtype=torch.float32)
        _forward_out_op(*o[:_INPUTS], o.out, lse, *options, caller)
        return o.out, lse
    out, lse = _forward_op(*o[:_INPUTS], *options, caller)
    if o.lse is not None:
        if o.lse.shape != lse.shape or o.lse.dtype != lse.dtype:
            problem_of(call)  # raises: copy_ would broadcast and convert
        check_mapped("lse", o.lse, lse)
        lse = o.lse.copy_(lse)
    return out, (lse if wants_lse else None)


def _check_before_op(call: Call) -> None:
    """The op's schema would refuse or convert arguments in its own words.

    While a compiler traces, only what no tensor is needed for is checked; the fake does the rest.
    """
    o = call.operands
    if not torch.compiler.is_compiling():
        problem_of(call)
        return
    refusal = Refusal(names=call.names)
    refusal.unsupported += call.refused
    check_constants(call, refusal)
    if refusal.reasons:
        raise refusal.error(f"{call.function}(...)")
    tensors = [t for t in o if isinstance(t, Tensor)]
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        problem_of(call)
    if any(has_tangent(t) for t in tensors):
        problem_of(call)
    batched = o.q if o.cu_seqlens_q is None else o.cu_seqlens_q
    if o.seqused_k is not None and not isinstance(o.seqused_k, Tensor) and batched.ndim == 0:
        problem_of(call)  # one length for all is about to be repeated for each sequence


def _lse_shape(o: Operands) -> tuple[int, ...]:
    if o.q.ndim == 3:
        return (o.q.shape[1], o.q.shape[0])
    return (o.q.shape[0], o.q.shape[2], o.q.shape[1])


@torch.library.custom_op(
    "flash_attn_fp8::forward",
    mutates_args=(),
    schema=f"({_TENSORS}, {_OPTIONS}) -> (Tensor, Tensor)",
)
def _forward_op(*args: Any) -> tuple[Tensor, Tensor]:
    """(out, lse); lse is empty unless return_lse."""
    out, lse = _forward_eager(_call_of(*args[:_INPUTS], None, None, *args[_INPUTS:]))
    return out, (lse if lse is not None else out.new_empty(0, dtype=torch.float32))


@_forward_op.register_fake
def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    call = _call_of(*args[:_INPUTS], None, None, *args[_INPUTS:])
    problem, q = _fake_problem(call), call.operands.q
    lse = _empty_lse(problem, q)
    return _empty_out(problem, q), (lse if lse is not None else q.new_empty(0, dtype=torch.float32))


@_forward_op.register_vmap
def _forward_vmap(
    info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Sample by sample, whose bits then are those of calls without vmap."""
    samples = [
        _forward_op(
            *(x if at is None else x.select(at, i) for x, at in zip(args, in_dims, strict=True))
        )
        for i in range(info.batch_size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*samples, strict=True)), (0, 0)


@torch.library.custom_op(
    "flash_attn_fp8::forward_out",
    mutates_args=("out", "lse"),
    schema=f"({_TENSORS}, {_BUFFERS}, {_OPTIONS}) -> ()",
)
def _forward_out_op(*args: Any) -> None:
    """Like `forward`, into `out` and (where it is given) `lse`."""
    _forward_eager(_call_of(*args))


@_forward_out_op.register_fake
def _forward_out_fake(*args: Any) -> None:
    _fake_problem(_call_of(*args))


@_forward_out_op.register_vmap
def _forward_out_vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> None:
    raise Unsupported("out cannot be written under vmap; drop it, and use the result")


def _fake_problem(call: Call) -> Problem:
    """The problem of a call without data, if an executor would take it."""
    problem = problem_of(call)
    if call.operands.q.device.type != "cuda" or torch.cuda.is_available():
        _unless_refused(call, executor_for, problem)
    return problem


def _caller_of(call: Call) -> str:
    """The function that was called and what it calls the fields, for refusals inside the op."""
    return " ".join([call.function, *(f"{field}={name}" for field, name in call.names.items())])


def _call_of(*args: Any) -> Call:
    """The call that the arguments of `forward_out` spell out."""
    operands, options = args[: len(Operands._fields)], args[len(Operands._fields) : -1]
    function, *names = args[-1].split()
    return Call(
        function,
        Operands(*operands),
        Options(*options),
        names=dict(name.split("=") for name in names),
    )
