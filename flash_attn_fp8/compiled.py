"""Executes plans of compiled kernels: on the device, or the same kernels on the simulated one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8 import sim
from flash_attn_fp8.call import Operands
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.kernels.sm90.geometry import Geometry
from flash_attn_fp8.plan import Plan
from flash_attn_fp8.preparation import aligned, is_aligned, preparation_of, scale_of
from flash_attn_fp8.problem import Problem
from flash_attn_fp8.simulation import settings
from flash_attn_fp8.specs import (
    CacheSpec,
    Kernel,
    Sm90Spec,
    Sm100Spec,
)
from flash_attn_fp8.target import Target

_UNBOUNDED = 0  # a bound that the kernel was compiled without
_MEMO_LIMIT = 8192
# Of K and V that the units of work in flight should share. On SM100 flash-attention 4's figure,
# less than half of a B200's 126 MB, since what multiprocessors on both sides of the chip read lies
# in both halves; on SM90 what was fastest of 10 to 50 MiB (docs/kernel_sm90.md).
_L2_BYTES = {"sm_100a": 50 * 2**20, "sm_90a": 10 * 2**20}
_UNITS_PER_SM = 4


def run(plan: Plan, problem: Problem, operands: Operands, out: Tensor, lse: Tensor | None) -> None:
    """Fill `out` (and `lse`) by the plan's kernels."""
    if plan.impl == "sim":
        _simulate(plan, problem, operands, out, lse)
    else:
        _launch(plan, problem, operands, out, lse)


def _kernel(spec: Kernel, arch: str) -> Callable[..., Any]:
    from flash_attn_fp8.compiler import cache

    return cache.kernel(spec, arch)


def _simulate(
    plan: Plan, problem: Problem, operands: Operands, out: Tensor, lse: Tensor | None
) -> None:
    asked = settings()
    if asked.trace is not None and not asked.trace.names:
        asked.trace.names.update(_roles(plan))
    with sim.device(asked.target.arch, **asked.device_options()) as gpu:
        # Memory that the device knows: an access outside of any of these is an error.
        copies = [None if t is None else _twin(t) for t in operands]
        o = Operands(*copies)  # type: ignore[arg-type]
        here = _twin(out), None if lse is None else _twin(lse)
        gpu.runs = asked.runs  # known even if a launch ends in a finding
        _launch(plan, problem, o, *here, asked.target)
    out.copy_(here[0])
    if lse is not None and here[1] is not None:
        lse.copy_(here[1])


def _roles(plan: Plan) -> dict[int, str]:
    """Names of a forward kernel's warps."""
    if isinstance(plan.spec, Sm100Spec):
        from flash_attn_fp8.kernels.sm100 import geometry as sm100

        return sm100.ROLES
    if isinstance(plan.spec, Sm90Spec):
        from flash_attn_fp8.kernels.sm90 import geometry as sm90

        return sm90.ROLES
    return {}


def _twin(x: Tensor) -> Tensor:
    """A copy with the same strides; where those leave gaps or overlap, of all the memory."""
    copy = x.clone()
    if copy.stride() == x.stride():
        return copy
    storage = x.untyped_storage().clone()  # type: ignore[no-untyped-call]
    memory = torch.empty(0, dtype=x.dtype).set_(storage)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


class _Launcher:
    """What all calls of a plan have in common, found once: a launch is on every call's way."""

    def __init__(self, plan: Plan, problem: Problem, target: Target) -> None:
        spec = plan.spec
        if not isinstance(spec, Sm90Spec | Sm100Spec | CacheSpec):
            raise TypeError(f"no compiled kernel has the spec {spec!r}")
        self.plan = plan  # lives as long as this, so that its id is no other plan's
        self.problem = problem
        self.kernel = _kernel(spec, target.arch)
        self.combine = _kernel(spec.combine, target.arch) if spec.split else None
        self.traits = spec.traits  # those of K and V as the kernel gets them
        self.claims_units = isinstance(spec, Sm90Spec) and spec.claims_units
        self.preparation = preparation_of(plan, problem, partial(_kernel, arch=target.arch))
        self.parts = plan.split.parts(problem.keys) if spec.split else 1
        self.scalars = _scalars(plan, problem, self.parts, target)
        self.is_cache = isinstance(spec, CacheSpec)

    def launch(self, o: Operands, out: Tensor, lse: Tensor | None) -> None:
        if self.combine is not None:
            self._launch_parts(self.combine, o, out, lse)
            return
        fits = is_aligned(out)
        target = out if fits else torch.empty(out.shape, dtype=out.dtype, device=out.device)
        self.kernel(self.tensors(o, target, lse), self.scalars)
        if not fits:
            out.copy_(target)

    def _launch_parts(
        self, combine: Callable[..., Any], o: Operands, out: Tensor, lse: Tensor | None
    ) -> None:
        partial = torch.empty(self.parts, *out.shape, dtype=torch.float32, device=out.device)
        shape = self.problem.lse_shape
        lse_partial = torch.empty(self.parts, *shape, dtype=torch.float32, device=out.device)
        self.kernel(self.tensors(o, partial, lse_partial), self.scalars)
        scale = None if o.output_scale is None else o.output_scale.reshape(1)
        combine((partial, lse_partial, out, lse, scale))

    def tensors(self, o: Operands, out: Tensor, lse: Tensor | None) -> tuple[Any, ...]:
        """`Tensors` of the kernel's `operands`, as a plain tuple."""
        traits, counter, units = self.traits, self._counter(o.q.device), None
        if self.preparation is not None and counter is not None:
            o, units = self.preparation(o, counter)
        shared = (
            aligned(o.q), aligned(o.k), aligned(o.v), out, lse,
            o.cu_seqlens_q, o.cu_seqlens_k, o.seqused_q, o.seqused_k, o.page_table,
            None if o.learnable_sink is None else o.learnable_sink.float(),
        )  # fmt: skip
        scales = (
            scale_of(o.k_descale, traits.k_descale, traits.kv_layout),
            scale_of(o.v_descale, traits.v_descale, traits.kv_layout),
            None if o.output_scale is None else o.output_scale.reshape(1),
        )
        if self.is_cache:
            return (*shared, *scales, o.selection, o.selection_lens)
        if not self.claims_units:
            counter = None
        q_scale = scale_of(o.q_descale, traits.q_descale, traits.q_layout)
        return (*shared, q_scale, *scales, counter, units)

    def _counter(self, device: torch.device) -> Tensor | None:
        """Of the units of work that CTAs claim; a kernel that runs before makes it 0."""
        if self.preparation is not None:
            return torch.empty(1, dtype=torch.int32, device=device)
        return torch.zeros(1, dtype=torch.int32, device=device) if self.claims_units else None


_launchers: dict[tuple[int, Target | None, bool], _Launcher] = {}


def _launch(
    plan: Plan,
    problem: Problem,
    o: Operands,
    out: Tensor,
    lse: Tensor | None,
    target: Target | None = None,
) -> None:
    """Launch on a target: the plan's, unless `simulate` was asked for another."""
    # By identity: plans are memoised by problem, and equal ones of two problems have other scalars.
    # (To hash a plan takes as long as to launch.) A simulated device has kernels of its own, also
    # for the plan of a GPU that a program believes in.
    key = id(plan), target, sim.is_active()
    launcher = _launchers.get(key)
    if launcher is None:
        if len(_launchers) >= _MEMO_LIMIT:
            _launchers.clear()
        launcher = _launchers[key] = _Launcher(plan, problem, target or plan.target)
    launcher.launch(o, out, lse)


def _scalars(plan: Plan, problem: Problem, parts: int, target: Target) -> tuple[float | int, ...]:
    """`Scalars` of the kernel's `operands`, as a plain tuple."""
    sizes, traits = problem.sizes, problem.traits
    shared = (
        sizes.softmax_scale,
        sizes.softcap,
        _UNBOUNDED if sizes.window_left is None else sizes.window_left,
        _UNBOUNDED if sizes.window_right is None else sizes.window_right,
        sizes.seqlen_q,
        parts,
        plan.split.keys or 0,
    )
    if isinstance(plan.spec, CacheSpec):
        return shared
    at_once = _heads_at_once(plan, problem, parts, target) if traits.bounded_right else 1
    return (*shared, at_once, target.sm_count)


def _heads_at_once(plan: Plan, problem: Problem, parts: int, target: Target) -> int:
    """How many heads' units of work are neighbours in the schedule: their K and V share the L2."""
    sizes, spec = problem.sizes, plan.spec
    traits = spec.traits if isinstance(spec, Sm90Spec | Sm100Spec) else problem.traits
    bytes_per_key = (traits.head_dim + traits.head_dim_v) * FORMATS[traits.kv_format].bits // 8
    at_once = _L2_BYTES[target.arch] // max(1, sizes.seqlen_k * bytes_per_key)
    # No more than there are: the kernel multiplies them by the blocks of a head, in 32 bits.
    triples = sizes.batch * sizes.nheads * parts
    if isinstance(plan.spec, Sm90Spec):
        # Enough units that the long ones of the last group are not left over; groups alike.
        units = max(1, -(-sizes.seqlen_q // Geometry(plan.spec).unit_tokens))
        at_once = max(1, at_once, -(-_UNITS_PER_SM * target.sm_count // units))
        triples = max(1, triples // plan.spec.group)
        at_once = -(-triples // -(-triples // at_once))
    return max(1, min(at_once, triples))
