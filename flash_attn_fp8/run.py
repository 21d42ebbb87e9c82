"""Plans to results: the one place that knows which module executes which plan."""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

from torch import Tensor

from flash_attn_fp8.call import Operands
from flash_attn_fp8.plan import Plan, TiledSpec
from flash_attn_fp8.problem import Problem


def execute(
    plan: Plan, problem: Problem, operands: Operands, out: Tensor, lse: Tensor | None
) -> None:
    """Fill `out` (and `lse`, unless None) as `plan` says."""
    if plan.target.is_gpu and problem.request.impl is None and plan.impl != "cute":
        _warn_of_fallback(plan.impl, plan.target.arch, plan.rejected)
    if isinstance(plan.spec, TiledSpec):
        from flash_attn_fp8.reference import tiled

        tiled.run(problem, operands, out, lse, spec=plan.spec, split=plan.split)
    elif plan.impl == "reference":
        from flash_attn_fp8.reference import exact

        exact.run(problem, operands, out, lse)
    elif problem.sizes.batch == 0 or problem.sizes.seqlen_q == 0:
        # No query: no kernel has to know what to do without work.
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    else:
        from flash_attn_fp8 import compiled

        compiled.run(plan, problem, operands, out, lse)


@lru_cache(maxsize=64)
def _warn_of_fallback(
    impl: str, arch: str, rejected: tuple[tuple[str, tuple[str, ...]], ...]
) -> None:
    """Once per reason: a GPU user must know that no kernel runs."""
    why = "; ".join(f"{name}: {reason}" for name, reasons in rejected for reason in reasons)
    warnings.warn(
        f"flash_attn_fp8 runs its {impl!r} executor on {arch}, which is slow ({why}). "
        f"Pass impl={impl!r} to ask for it without this warning.",
        stacklevel=2,
    )
