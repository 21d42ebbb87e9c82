"""The cache kernel under a spec of one's choice: its partial results, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_fp8 import compiled, sim
from flash_attn_fp8.call import Call, Operands
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.plan import Plan, plan_for
from flash_attn_fp8.simulation import Settings, _as_active, settings
from flash_attn_fp8.specs import CacheSpec, CacheTile, WarpgroupTile
from flash_attn_fp8.target import Target


class Parts(NamedTuple):
    """What the forward kernel wrote: of each split, in front, in fp32 where there are any."""

    out: Tensor
    lse: Tensor


def spec_of(call: Call) -> CacheSpec:
    """What the plan would run for a call with impl='sim'."""
    spec = plan_for(problem_of(call.with_tensors()), settings().planned_for).spec
    assert isinstance(spec, CacheSpec)
    return spec


def launched(call: Call, tile: CacheTile | WarpgroupTile, **device: Any) -> Parts:
    """The forward kernel of a call, with this tile instead of the plan's."""
    call = call.with_tensors()
    problem = problem_of(call)
    target = settings().planned_for
    plan: Plan = plan_for(problem, target)
    assert isinstance(plan.spec, CacheSpec)
    spec = replace(plan.spec, tile=tile)
    with sim.device(target.arch, **device):
        launcher = compiled._Launcher(replace(plan, spec=spec), problem, target)
        operands = Operands(*(None if x is None else x.clone() for x in call.operands))
        parts = (launcher.parts,) if spec.split else ()
        out = torch.full((*parts, *problem.out_shape), torch.nan).to(FORMATS[spec.out_format].dtype)
        lse = torch.full((*parts, *problem.lse_shape), torch.nan) if spec.writes_lse else None
        launcher.kernel(launcher.tensors(operands, out, lse), launcher.scalars)
        if lse is None:
            lse = torch.empty(0)
        return Parts(out.clone(), lse.clone())


def merged(call: Call, parts: Parts) -> tuple[Tensor, Tensor]:
    """(out, lse) of partial results by the combine kernel."""
    problem, spec = problem_of(call.with_tensors()), spec_of(call)
    arch = settings().target.arch
    with sim.device(arch):
        kernel = compiled._kernel(spec.combine, arch)
        out = torch.empty(problem.out_shape, dtype=FORMATS[spec.traits.out_format].dtype)
        lse = torch.empty(problem.lse_shape)
        kernel((parts.out.clone(), parts.lse.clone(), out, lse, None))
        return out.clone(), lse.clone()


def simulated(call: Call, target: Target) -> tuple[Tensor, Tensor]:
    """(out, lse) on another device, of what sm_100a may have another kernel for, which refuses."""
    call = call.with_tensors()
    problem = problem_of(call)
    plan = plan_for(problem, target)
    assert isinstance(plan.spec, CacheSpec)
    out = torch.empty(problem.out_shape, dtype=FORMATS[problem.traits.out_format].dtype)
    lse = torch.empty(problem.lse_shape)
    with _as_active(Settings(target)):
        compiled.run(plan, problem, call.operands, out, lse)
    return out, lse
