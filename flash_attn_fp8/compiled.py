"""Executes plans of compiled kernels: on the device, or the same kernels on the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8.call import Operands
from flash_attn_fp8.plan import Plan
from flash_attn_fp8.problem import Descale, Problem
from flash_attn_fp8.specs import CombineSpec, Sm100Spec

_ALIGNMENT = 16  # bytes of a row: what TMA and 16-byte stores need
_UNBOUNDED = 0  # a bound that the kernel was compiled without
_L2_BYTES = 50 * 2**20  # of K and V that the units of work in flight should share


def run(plan: Plan, problem: Problem, operands: Operands, out: Tensor, lse: Tensor | None) -> None:
    """Fill `out` (and `lse`) by the plan's kernels."""
    assert isinstance(plan.spec, Sm100Spec)
    if plan.impl == "sim":
        _simulate(plan, problem, operands, out, lse)
    else:
        _launch(plan, problem, operands, out, lse)


def _kernel(spec: Sm100Spec | CombineSpec, arch: str) -> Callable[..., Any]:
    from flash_attn_fp8.compiler import cache

    return cache.kernel(spec, arch)


def _simulate(
    plan: Plan, problem: Problem, operands: Operands, out: Tensor, lse: Tensor | None
) -> None:
    from flash_attn_fp8 import sim

    with sim.device(plan.target.arch, sm_count=plan.target.sm_count):
        # Memory that the device knows: an access outside of any of these is an error.
        copies = [None if t is None else t.clone() for t in operands]
        o = Operands(*copies)  # type: ignore[arg-type]
        here = torch.empty_like(out), None if lse is None else torch.empty_like(lse)
        _launch(plan, problem, o, *here)
    out.copy_(here[0])
    if lse is not None and here[1] is not None:
        lse.copy_(here[1])


def _launch(plan: Plan, problem: Problem, o: Operands, out: Tensor, lse: Tensor | None) -> None:
    assert isinstance(plan.spec, Sm100Spec)
    kernel = _kernel(plan.spec, plan.target.arch)
    if not plan.spec.split:
        target = _aligned_output(out)
        kernel(_tensors(problem, o, target, lse), _scalars(plan, problem, 1))
        if target is not out:
            out.copy_(target)
        return
    parts = plan.split.parts(problem.sizes.seqlen_k)
    partial = torch.empty(parts, *out.shape, dtype=torch.float32, device=out.device)
    shape = problem.lse_shape
    lse_partial = torch.empty(parts, *shape, dtype=torch.float32, device=out.device)
    kernel(_tensors(problem, o, partial, lse_partial), _scalars(plan, problem, parts))
    scale = None if o.output_scale is None else o.output_scale.reshape(1)
    _kernel(plan.spec.combine, plan.target.arch)((partial, lse_partial, out, lse, scale))


def _tensors(problem: Problem, o: Operands, out: Tensor, lse: Tensor | None) -> tuple[Any, ...]:
    """`kernels.sm100.operands.Tensors`, as a plain tuple."""
    traits = problem.traits
    return (
        _aligned(o.q), _aligned(o.k), _aligned(o.v), out, lse,
        o.cu_seqlens_q, o.cu_seqlens_k, o.seqused_q, o.seqused_k, o.page_table,
        None if o.learnable_sink is None else o.learnable_sink.float(),
        _scale(o.q_descale, traits.q_descale, o.q.ndim),
        _scale(o.k_descale, traits.k_descale, o.k.ndim),
        _scale(o.v_descale, traits.v_descale, o.v.ndim),
        None if o.output_scale is None else o.output_scale.reshape(1),
    )  # fmt: skip


def _scalars(plan: Plan, problem: Problem, parts: int) -> tuple[float | int, ...]:
    """`kernels.sm100.operands.Scalars`, as a plain tuple."""
    sizes, traits = problem.sizes, problem.traits
    bytes_per_key = (traits.head_dim + traits.head_dim_v) * traits.p_format.bits // 8
    heads_at_once = _L2_BYTES // max(1, sizes.seqlen_k * bytes_per_key)
    return (
        sizes.softmax_scale,
        sizes.softcap,
        _UNBOUNDED if sizes.window_left is None else sizes.window_left,
        _UNBOUNDED if sizes.window_right is None else sizes.window_right,
        sizes.seqlen_q,
        parts,
        plan.split.keys or 0,
        max(1, heads_at_once) if traits.bounded_right else 1,
        plan.target.sm_count,
    )


def _aligned(x: Tensor) -> Tensor:
    """A tensor whose rows TMA can address: itself, or a copy."""
    if _is_aligned(x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _aligned_output(x: Tensor) -> Tensor:
    return x if _is_aligned(x) else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _is_aligned(x: Tensor) -> bool:
    step = _ALIGNMENT // x.element_size()
    strides = x.stride()
    return (
        x.data_ptr() % _ALIGNMENT == 0
        and strides[-1] == 1
        and all(stride % step == 0 for stride in strides[:-1])
    )


def _scale(scale: Tensor | None, kind: Descale | None, rank: int) -> Tensor | None:
    if scale is None or kind is None:
        return None
    if kind.granularity == "tensor":
        return scale.reshape(1)
    return scale[0] if kind.per_token and rank == 3 else scale
