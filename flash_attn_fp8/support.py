"""What runs where, as rules: each a sentence that says why an executor cannot take a problem.

`plan_for` asks them, `explain` prints them, and the support table of the docs and of
`flash-attn-fp8 support` is generated from them; there is no second copy in prose.
"""

from __future__ import annotations

from collections.abc import Callable

from flash_attn_fp8.check_options import MAX_SPLITS, SPLIT_MULTIPLE
from flash_attn_fp8.problem import DETERMINISTIC_KEYS_PER_SPLIT, Problem
from flash_attn_fp8.target import Target

# In order of preference where the caller leaves the choice open.
EXECUTORS = ("cute", "tiled", "reference", "sim")

Rule = Callable[[Problem, Target], str | None]


def _no_kernels(problem: Problem, target: Target) -> str | None:
    if not target.is_gpu:
        return "needs a CUDA device; the tensors are on the CPU"
    return f"this version has no compiled kernel for {target.arch}"


def _no_simulator(problem: Problem, target: Target) -> str | None:
    return "this version has no simulator"


def _reference_has_no_policy(problem: Problem, target: Target) -> str | None:
    if problem.request.policy_given:
        return "it keeps P exact, so fp8_policy would have no effect; use impl='tiled'"
    return None


def _reference_does_not_split(problem: Problem, target: Target) -> str | None:
    request = problem.request
    if request.num_splits > 1 or request.seqlen_k_per_split is not None:
        return "it does not split the keys; use impl='tiled', or num_splits=1"
    return None


def _too_many_splits(problem: Problem, target: Target) -> str | None:
    """The combine kernel's limit holds for the parts that a length of parts makes, too."""
    keys, longest = problem.request.keys_per_split, problem.sizes.seqlen_k
    if keys is None or longest <= MAX_SPLITS * keys:
        return None
    asked = f"seqlen_k_per_split={keys}"
    if problem.request.seqlen_k_per_split is None:
        asked = f"num_splits=0 with deterministic=True (parts of {DETERMINISTIC_KEYS_PER_SPLIT})"
    enough = -(-longest // (MAX_SPLITS * SPLIT_MULTIPLE)) * SPLIT_MULTIPLE
    shorter = {
        "dense": "",
        "varlen": f", or max_seqlen_k, if no sequence has all {longest} packed rows",
        "paged": f", or max_seqlen_k, if no sequence fills all {longest} slots of its pages",
    }
    return (
        f"{asked} cuts {longest} keys into {-(-longest // keys)} parts, and at most {MAX_SPLITS} "
        f"can be combined: write seqlen_k_per_split={enough} or more"
        f"{shorter[problem.traits.kv_layout]}"
    )


def _no_stand_in_for_long_keys(problem: Problem, target: Target) -> str | None:
    """A length alone does not exchange the kernels' numerics for the definition's."""
    return _too_many_splits(problem, target) if problem.request.impl is None else None


_RULES: dict[str, tuple[Rule, ...]] = {
    "cute": (_no_kernels,),
    "sim": (_no_simulator,),
    "tiled": (_too_many_splits,),
    "reference": (
        _reference_has_no_policy,
        _reference_does_not_split,
        _no_stand_in_for_long_keys,
    ),
}


def reasons_against(impl: str, problem: Problem, target: Target) -> tuple[str, ...]:
    """Why `impl` cannot execute `problem` on `target`; empty where it can."""
    found = (rule(problem, target) for rule in _RULES[impl])
    return tuple(reason for reason in found if reason)
