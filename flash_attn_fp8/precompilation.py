"""Compiling what a call would run, without running it."""

from __future__ import annotations

from collections.abc import Callable

from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.explanation import Explanation, explain
from flash_attn_fp8.plan import plan_for


def precompile(
    fn: Callable[..., object] | str, *args: object, target: str | None = None, **kwargs: object
) -> Explanation:
    """Compile the kernels that `fn(*args, **kwargs)` would run, and run nothing.

    They are kept in the cache on disk (docs/compile.md). Where they are there already, nothing
    happens; nor where no kernel would be compiled, since another executor would run.

    Args:
        fn: as for `explain`.
        *args, **kwargs: the call's arguments. Meta tensors are welcome: no data is read.
        target: compile for "sm_100a", "sm_90a:SMS" or another instead of the tensors' device.

    Returns:
        What `explain` says of the call.

    Raises:
        InvalidArguments, Unsupported: the call would be refused; or there is no C compiler.
        OSError: the cache cannot be written.

    Example:
        >>> import torch, flash_attn_fp8 as fa
        >>> q = torch.empty(1, 128, 8, 64, dtype=torch.float8_e4m3fn, device="meta")
        >>> fa.precompile(fa.flash_attn_func, q, q, q, target="cpu").plan.impl
        'tiled'
    """
    explained = explain(fn, *args, target=target, **kwargs)
    # What a call would raise, where there is no plan.
    plan = explained.plan or plan_for(problem_of(explained.call), explained.target)
    if plan.kernels:
        from flash_attn_fp8.compiler import cache

        for spec in plan.kernels:
            cache.keep(spec, plan.target.arch, cache.linkage_of(plan.impl))
    return explained
