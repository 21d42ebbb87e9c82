"""Checks of `out` and `lse`, the tensors that are written."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch

from flash_attn_fp8.call import Call, Operands
from flash_attn_fp8.errors import Refusal, Unsupported
from flash_attn_fp8.formats import dtype_name
from flash_attn_fp8.overlap import overlaps_itself, share_memory
from flash_attn_fp8.problem import Problem


def check_buffers(o: Operands, problem: Problem, refusal: Refusal) -> None:
    """Check shapes, strides and dtypes of out and lse."""
    for name, t, shape in (("out", o.out, problem.out_shape), ("lse", o.lse, problem.lse_shape)):
        if t is None:
            continue
        if tuple(t.shape) != tuple(shape):
            refusal.invalid.append(f"{name} must have shape {list(shape)}, got {list(t.shape)}")
        elif name == "out" and t.shape[-1] > 1 and t.stride(-1) != 1:
            refusal.invalid.append("out must be contiguous in its last dimension")
        elif overlaps(t):
            refusal.invalid.append(
                f"{name} has strides {list(t.stride())}, in which elements of its shape "
                f"{list(t.shape)} share memory; clone it"
            )
    if o.lse is not None and o.lse.dtype != torch.float32:
        refusal.invalid.append(f"lse must be fp32, got {dtype_name(o.lse.dtype)}")


def overlaps(t: Tensor) -> bool:
    """Whether elements of `t` share memory, as far as its extents are known (not symbolic)."""
    shape, strides = tuple(t.shape), tuple(t.stride())
    if all(isinstance(n, int) for n in (*shape, *strides)):
        return overlaps_itself(shape, strides)
    return any(n > 1 and step == 0 for n, step in zip(shape, strides, strict=True))


def check_mapped(name: str, buffer: Tensor, result: Tensor) -> None:
    """Refuse a buffer that the samples of a vmap share; each has a result of its own.

    Raises:
        Unsupported: the result is mapped, and the buffer is not.
    """
    if _functorch.is_batchedtensor(result) and not _functorch.is_batchedtensor(buffer):
        raise Unsupported(
            f"{name} is one tensor for all samples of vmap, and each has a result of its own; map "
            f"it as well, or drop it and use the result"
        )


def check_memory(call: Call) -> None:
    """Refuse an out or lse that shares memory with anything else of the call.

    Raises:
        InvalidArguments: with every pair.
    """
    refusal, o = Refusal(names=call.names), call.operands
    for name, buffer in (("out", o.out), ("lse", o.lse)):
        if buffer is None:
            continue
        for other, t in o._asdict().items():
            if other == name or not isinstance(t, Tensor) or (name, other) == ("lse", "out"):
                continue
            if share_memory(buffer, t):
                refusal.invalid.append(
                    f"{name} shares memory with {refusal.name(other)}; give it memory of its own"
                )
    if refusal.reasons:
        raise refusal.error(str(call))
