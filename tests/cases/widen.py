"""Cases on kernels: head dims that a kernel has, around those of the case, which are small.

Zeros beside q and k change no score, and zeros beside v are columns of their own, so that a widened
call has the results of the call that it stands for, in its first columns.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8.call import Call
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.support import FORWARD_HEAD_DIMS
from tests.conftest import KERNELS

CACHES = {"k": "k_cache", "v": "v_cache"}


def widened(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, with its head dims widened where a kernel runs it and has none so small."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(fn).bind(*args, **kwargs).arguments
        if given.get("impl") not in KERNELS:
            return fn(*args, **kwargs)
        call: Call = fn.describe_call(*args, **kwargs)  # type: ignore[attr-defined]
        traits = problem_of(call).traits
        dims = _dims(traits.head_dim, traits.head_dim_v)
        if dims is None or dims == (traits.head_dim, traits.head_dim_v):
            return fn(*args, **kwargs)
        return _run_wide(fn, given, call, dims)

    return run


def _dims(d: int, dv: int) -> tuple[int, int] | None:
    """The least head dims of the kernel that hold these; None where there are none."""
    fitting = [dims for dims in FORWARD_HEAD_DIMS if dims[0] >= d and dims[1] >= dv]
    return min(fitting, key=sum, default=None)


def _run_wide(
    fn: Callable[..., Any], given: dict[str, Any], call: Call, dims: tuple[int, int]
) -> Any:
    names = {n: n if n in given else CACHES[n] for n in "qkv"}
    wide = dict(given)
    for name, width in zip("qkv", (dims[0], *dims), strict=True):
        wide[names[name]] = _pad(given[names[name]], width)
    if given.get("softmax_scale") is None:
        wide["softmax_scale"] = given["q"].shape[-1] ** -0.5
    out = given.get("out")
    if out is not None:
        wide["out"] = torch.full((*out.shape[:-1], dims[1]), math.nan).to(out.dtype)
    result = fn(**wide)
    found, *others = result if isinstance(result, tuple) else (result,)
    narrow = found[..., : call.operands.v.shape[-1]].contiguous()
    if out is not None:
        narrow = out.copy_(narrow)
    return (narrow, *others) if isinstance(result, tuple) else narrow


def _pad(x: Tensor, width: int) -> Tensor:
    """Zeros to the right, in any format, 8-bit ones included."""
    wide = torch.zeros(*x.shape[:-1], width * x.element_size(), dtype=torch.uint8)
    used = x.shape[-1] * x.element_size()
    wide[..., :used] = x.contiguous().view(torch.uint8)
    return wide.view(x.dtype)
