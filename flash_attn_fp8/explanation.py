"""What a call would do and why, without doing it: no GPU, no data, no compilation."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flash_attn_fp8 import api, kvcache
from flash_attn_fp8.call import Call, Operands, Options
from flash_attn_fp8.checks import examine
from flash_attn_fp8.entry import REMEDY
from flash_attn_fp8.errors import FlashAttnFp8Error, InvalidArguments
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.plan import (
    FEW_ROWS_OF_CODES,
    Plan,
    TiledSpec,
    copied_bytes,
    plan_for,
    policy_of,
    rows_of_a_key,
)
from flash_attn_fp8.policy import Fp8Policy
from flash_attn_fp8.problem import Problem, Traits
from flash_attn_fp8.specs import Kernel
from flash_attn_fp8.support import EXECUTORS, reasons_against
from flash_attn_fp8.target import Target, target_named, target_of

_FUNCTIONS = {
    "flash_attn_func": api.flash_attn_func,
    "flash_attn_varlen_func": api.flash_attn_varlen_func,
    "flash_attn_with_kvcache": kvcache.flash_attn_with_kvcache,
    "_flash_attn_fwd": api._flash_attn_fwd,
}


@dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; prints itself.

    `ok` says whether the call would run; `reasons` why not, all of them. `problem` is what was
    understood, `plan` what would run; either is None where it was not reached.
    """

    call: Call
    target: Target
    problem: Problem | None
    plan: Plan | None
    reasons: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.reasons

    def __str__(self) -> str:
        lines = [f"{self.call}", f"on {self.target.arch}"]
        if not self.ok:
            lines += ["would be refused:"]
            lines += [f"  {i}. {reason}" for i, reason in enumerate(self.reasons, 1)]
        if self.problem is not None:
            lines += self._understood(self.problem, self.plan)
        if self.problem is not None and self.plan is not None:
            lines += self._planned(self.problem, self.plan)
        return "\n".join(lines)

    @staticmethod
    def _understood(problem: Problem, plan: Plan | None) -> list[str]:
        t, s = problem.traits, problem.sizes
        if plan is not None and plan.impl != "reference":
            t = replace(t, policy=policy_of(problem, plan.target))
        scales = ", ".join(
            f"{name} per {kind.granularity.replace('_', ' and ')}"
            for name, kind in (("q", t.q_descale), ("k", t.k_descale), ("v", t.v_descale))
            if kind
        )
        window = f"left {_bound(s.window_left)}, right {_bound(s.window_right)}"
        return [
            "understood:",
            f"  formats   q {t.q_format}, k and v {t.kv_format}, out {t.out_format}",
            f"  sizes     batch {s.batch}, queries {s.seqlen_q}, keys {s.seqlen_k}, heads "
            f"{s.nheads}/{s.nheads_kv}, head dims {t.head_dim}/{t.head_dim_v}",
            f"  layout    q {t.q_layout}, kv {t.kv_layout}"
            + (f" (pages of {s.page_size})" if s.page_size is not None else ""),
            f"  mask      window {window}",
            f"  scores    softmax_scale {s.softmax_scale:g}, softcap {s.softcap or 'none'}, sink "
            f"{'yes' if t.sink else 'no'}",
            f"  descales  {scales or 'none'}",
            f"  policy    {t.policy_in_force}",
            f"            P {_headroom(t.policy)} and is zero below "
            f"2^{t.policy.tail_log2:g} of the row's largest",
            f"  row sum   {_row_sum(t)}",
        ]

    @staticmethod
    def _planned(problem: Problem, plan: Plan) -> list[str]:
        split = plan.split
        parts = (
            f"{split.num_splits} of each sequence's keys"
            if split.keys is None
            else f"every {split.keys} keys"
        )
        lines = [
            "would run:",
            f"  executor  {plan.impl}",
            *(
                [f"  P·V       {_accumulation(plan.spec)}"]
                if isinstance(plan.spec, TiledSpec)
                else []
            ),
            f"  splits    {parts}",
            f"  tiles     {'query heads packed' if plan.pack_gqa else 'one query head each'}",
            f"  metadata  {'none' if plan.disable_scheduler_metadata else 'computed by the plan'}",
            f"  lse       {'returned' if problem.traits.lse else 'not returned'}",
        ]
        if plan.widen is not None:
            lines.append(f"  converts  {_conversion(problem)}")
            lines.append(f"            {_kernel(plan, plan.widen)}")
        lines += [f"  kernel    {_kernel(plan, k)}" for k in plan.kernels if k is plan.spec]
        first = " was asked for" if problem.request.impl else " comes first"
        others = [name for name in EXECUTORS if name != plan.impl]
        for name in others:
            why = reasons_against(name, problem, plan.target)
            lines.append(f"  not {name}: {'; '.join(why) or 'it could; ' + plan.impl + first}")
        return lines


def _headroom(policy: Fp8Policy) -> str:
    if policy.headroom_log2 >= 0:
        return f"has {policy.headroom_log2:.3f} octaves of headroom"
    return f"SATURATES: its largest lie {-policy.headroom_log2:.3f} octaves above {policy.p_format}"


def _row_sum(traits: Traits) -> str:
    """What normalises the output, and why where the call decides it."""
    if not traits.exact_row_sum:
        return "quantized: of P as rounded"
    why = ", since v_descale per token sits in P's exponent" if traits.v_scale_in_exponent else ""
    return f"exact: of P before it is rounded{why}"


def _accumulation(spec: TiledSpec) -> str:
    if spec.accumulator == "fp32":
        return "accumulated in fp32 (promote_every has no effect)"
    every = spec.policy.promote_every
    promotion = "never promoted" if every is None else f"promoted to fp32 every {every} keys"
    return f"accumulated with 13 fraction bits, as SM90 does in fp8, {promotion}"


def _conversion(problem: Problem) -> str:
    """What is copied before the kernel runs, and why."""
    return (
        f"k and v to 16 bits first, copies of {copied_bytes(problem)} bytes: "
        f"{rows_of_a_key(problem):.0f} query rows see a key on average, and more than "
        f"{FEW_ROWS_OF_CODES} pay for that"
    )


def _kernel(plan: Plan, spec: Kernel) -> str:
    """Which kernel, as the name of its entry in the cache, and whether a call would wait for it."""
    from flash_attn_fp8.compiler import cache
    from flash_attn_fp8.compiler.key import key_of

    linkage = cache.linkage_of(plan.impl)
    place = cache.where(spec, plan.target.arch, linkage)
    found = {"memory": "in memory", "bundle": "in a bundle", "disk": "on disk"}
    name = key_of(spec, plan.target.arch, linkage).digest[:12]
    return f"{name}, {found[place] if place else 'to be compiled by the first call'}"


def _bound(value: int | None) -> str:
    return "unbounded" if value is None else str(value)


def explain(
    fn: Callable[..., object] | str, *args: object, target: str | None = None, **kwargs: object
) -> Explanation:
    """Say what `fn(*args, **kwargs)` would run, or every reason why it would be refused.

    Args:
        fn: flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache or _flash_attn_fwd, its
            name, or a text such as "flash_attn_func(q=e4m3[1, 128, 8, 64], ...)", which is what
            error messages print.
        *args, **kwargs: the call's arguments. Meta tensors are welcome: no data is read.
        target: plan for "cpu", "sm_100a", "sm_90a" or "sm_100a:SMS" instead of the tensors' device.

    Returns:
        An `Explanation`.

    Raises:
        InvalidArguments: `fn` or `target` is none of these.
        TypeError: the arguments do not fit fn's signature.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> q = torch.empty(1, 128, 8, 64, dtype=torch.float8_e4m3fn, device="meta")
        >>> fa.explain(fa.flash_attn_func, q, q, q).plan.impl
        'tiled'
        >>> fa.explain(fa.flash_attn_func, q, q, q, window_size=(8, -1)).ok
        False
    """
    call = _describe(fn, args, kwargs)
    device = getattr(call.operands.q, "device", torch.device("cpu"))
    on = target_named(target) if target is not None else target_of(device)
    problem, refusal = examine(call)
    if problem is None:
        return Explanation(call, on, None, None, refusal.reasons)
    try:
        return Explanation(call, on, problem, plan_for(problem, on), ())
    except FlashAttnFp8Error as refused:
        return Explanation(call, on, problem, None, refused.reasons)


def _describe(
    fn: Callable[..., object] | str, args: tuple[object, ...], kwargs: dict[str, object]
) -> Call:
    if isinstance(fn, str) and "(" in fn and not args and not kwargs:
        return parse_call(fn)
    known = _FUNCTIONS.get(fn) if isinstance(fn, str) else fn
    describe_call = getattr(known, "describe_call", None)
    if describe_call is None:
        raise InvalidArguments(
            f"explain takes {', '.join(_FUNCTIONS)} or a call as text, got {fn!r}"
        )
    call: Call = describe_call(*args, **kwargs)
    return call


_TENSOR = re.compile(r"(\w+)\[([\d, ]*)\](?:\{([\d, ]*)\})?")
_QUOTED = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PLAIN = r"""[^,()\[\]{}'"]"""
_BRACKETED = "(?!)"  # no brackets; then brackets in brackets, four deep
for _ in range(4):
    _BRACKETED = rf"[(\[{{](?:{_QUOTED}|{_PLAIN}|,|{_BRACKETED})*[)\]}}]"
_ARGUMENT = re.compile(rf"\s*(\w+)=((?:{_QUOTED}|{_BRACKETED}|{_PLAIN})+)(?:,|$)")


def parse_call(text: str) -> Call:
    """The call that `str(call)` printed, on meta tensors.

    Raises:
        InvalidArguments: the text is no such call.
    """
    match = re.fullmatch(r"\s*([\w.]+)\((.*)\)\s*", text, re.DOTALL)
    if match is None or match[1] not in _FUNCTIONS:
        raise InvalidArguments(
            f"{text!r} is no call; write flash_attn_func(q=e4m3[1, 128, 8, 64], ...)"
        )
    operands: dict[str, object] = {}
    options: dict[str, object] = {}
    refused: list[str] = []
    names = kvcache.NAMES if match[1] == "flash_attn_with_kvcache" else {}
    fields = {names.get(field, field): field for field in (*Operands._fields, *Options._fields)}
    for name, value in _arguments(match[2]):
        field = fields.get(name, "")
        if name == "cache_batch_idx" and names and "page_table" not in operands:
            names, field = kvcache.NAMES_WITH_SEQUENCES, "page_table"
        if field in Operands._fields and field not in operands:
            number = field in ("output_scale", "seqused_k") and not _TENSOR.fullmatch(value)
            operands[field] = (_parse_value if number else _parse_tensor)(name, value)
        elif field in Options._fields:
            options[field] = _parse_value(field, value)
        elif name in REMEDY:
            refused.append(f"{name}={value}: {REMEDY[name]}")
        else:
            known = ", ".join(fields)
            raise InvalidArguments(f"{name!r} is no part of a call; known: {known}")
    missing = [names.get(field, field) for field in "qkv" if field not in operands]
    if missing:
        raise InvalidArguments(f"{', '.join(missing)} missing in {text!r}")
    return Call(match[1], Operands(**operands), Options(**options), tuple(refused), names)  # type: ignore[arg-type]


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """The names and values of `name=value, ...`, which must be all that there is."""
    at = 0
    while text[at:].strip():
        found = _ARGUMENT.match(text, at)
        if found is None:
            raise InvalidArguments(f"{text[at:]!r} does not go on with name=value")
        yield found[1], found[2].strip()
        at = found.end()


def _parse_tensor(name: str, text: str) -> Tensor:
    match = _TENSOR.fullmatch(text.strip())
    if match is None:
        raise InvalidArguments(f"{name}={text}: write a tensor like e4m3[1, 128, 8, 64]")
    dtype = FORMATS[match[1]].dtype if match[1] in FORMATS else getattr(torch, match[1], None)
    if not isinstance(dtype, torch.dtype):
        raise InvalidArguments(f"{name}={text}: {match[1]} is no dtype")
    shape, strides = _ints(match[2]), None if match[3] is None else _ints(match[3])
    try:
        if strides is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    except (RuntimeError, TypeError, ValueError):
        raise InvalidArguments(f"{name}={text}: torch has no such tensor") from None


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]


@dataclass(frozen=True)
class _Unread:
    """A value of a kind that text does not bring back; to be refused, and printed as it was."""

    text: str

    def __repr__(self) -> str:
        return self.text


def _parse_value(name: str, text: str) -> object:
    if _TENSOR.fullmatch(text):
        return _parse_tensor(name, text)
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        value = float(text) if text in ("nan", "inf", "-inf") else _Unread(text)
        dtype = FORMATS[text].dtype if text in FORMATS else getattr(torch, text, None)
        return dtype if name == "out_dtype" and isinstance(dtype, torch.dtype) else value
    return value
