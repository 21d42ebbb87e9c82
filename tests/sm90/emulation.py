"""What `tiled` gives on the CPU for a call that is planned for SM90: Hopper accumulates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.plan import Accumulator, TiledSpec, plan_for
from flash_attn_fp8.reference import tiled
from flash_attn_fp8.target import target_named

SM90 = target_named("sm_90a:2")


def emulated(
    function: Any, *tensors: Tensor, accumulator: Accumulator = "sm90_fp8", **options: Any
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a public function's call; `accumulator` "fp32" takes that instead."""
    call = function.describe_call(*tensors, impl="tiled", **options).with_tensors()
    problem = problem_of(call)
    plan = plan_for(problem, SM90)
    assert isinstance(plan.spec, TiledSpec)
    assert plan.spec.accumulator == "sm90_fp8"
    out = torch.empty(problem.out_shape, dtype=options.get("out_dtype", torch.bfloat16))
    lse = torch.empty(problem.lse_shape)
    spec = replace(plan.spec, accumulator=accumulator)
    tiled.run(problem, call.operands, out, lse, spec=spec, split=plan.split)
    return out, lse
