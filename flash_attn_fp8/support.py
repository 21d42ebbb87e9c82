"""What runs where, as rules: each a sentence that says why an executor cannot take a problem.

`plan_for` asks them, `explain` prints them, and the support table of the docs and of
`flash-attn-fp8 support` is generated from them; there is no second copy in prose.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flash_attn_fp8.check_options import MAX_SPLITS, SPLIT_MULTIPLE
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.problem import DETERMINISTIC_KEYS_PER_SPLIT, Problem
from flash_attn_fp8.specs import TILE
from flash_attn_fp8.target import SHARED_MEMORY, Target, simulated

# In order of preference where the caller leaves the choice open.
EXECUTORS = ("cute", "tiled", "reference", "sim")

Rule = Callable[[Problem, Target], str | None]


SM90 = "sm_90a"

# What the forward kernels are built for. Head dims: on SM100 two outputs of 128 rows, or one, fit
# tensor memory.
FORWARD_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128))
FORWARD_PAGE_SIZES = (8, 16, 32, 64, 128, 256)


# What the cache kernel is built for: rows of whole 32-byte blocks, outputs that fit registers.
CACHE_HEAD_DIMS = FORWARD_HEAD_DIMS


def uses_cache_kernel(problem: Problem, arch: str) -> bool:
    """Whether a problem can be the cache kernel's: 16-bit queries, and what has no other kernel.

    Over 8-bit codes, of chosen keys, or where no forward kernel is better at a few queries. On
    SM90 it is not the only one: `fits_forward_kernel`, and the plan chooses.
    """
    traits = problem.traits
    if FORMATS[traits.q_format].is_8bit:
        return False
    other = traits.q_format != traits.kv_format or traits.selection is not None
    return other or not _is_sm100(arch)


def fits_forward_kernel(problem: Problem, target: Target) -> bool:
    """Whether an architecture's kernel for long queries can run a problem, formats apart."""
    return has_forward_kernel(target.arch) and not any(rule(problem, target) for rule in _FORWARD)


def has_forward_kernel(arch: str) -> bool:
    """Whether there is a kernel for long queries."""
    return _is_sm100(arch) or arch == SM90


def _is_sm100(arch: str) -> bool:
    return arch.startswith("sm_100")


def _needs_kernel(problem: Problem, target: Target) -> str | None:
    if not target.is_gpu:
        return "needs a CUDA device; the tensors are on the CPU"
    if target.arch not in SHARED_MEMORY:
        return f"this version has no compiled kernel for {target.arch}"
    if not has_forward_kernel(target.arch) and not uses_cache_kernel(problem, target.arch):
        q = problem.traits.q_format
        return f"this version has no compiled kernel for {q} queries on {target.arch}"
    return None


def _forward_selection(problem: Problem, target: Target) -> str | None:
    if problem.traits.selection is None:
        return None
    return f"its kernel reads all keys, not chosen ones; {problem.traits.q_format} queries do"


def _forward_head_dims(problem: Problem, target: Target) -> str | None:
    dims = problem.traits.head_dim, problem.traits.head_dim_v
    if dims in FORWARD_HEAD_DIMS:
        return None
    known = ", ".join(str(d) if d == dv else f"({d}, {dv})" for d, dv in FORWARD_HEAD_DIMS)
    return f"its kernel has head dims {known}, not {dims}"


def _forward_pages(problem: Problem, target: Target) -> str | None:
    page_size = problem.sizes.page_size
    if page_size is None or page_size in FORWARD_PAGE_SIZES:
        return None
    known = ", ".join(map(str, FORWARD_PAGE_SIZES))
    return f"its kernel reads pages of {known} tokens, not {page_size}"


def _forward_group(problem: Problem, target: Target) -> str | None:
    group = problem.traits.q_heads_per_kv_head
    rows = 64 if target.arch == SM90 else 128
    if group > rows and problem.request.pack_gqa is not False:
        return (
            f"{group} query heads of a KV head do not fit a tile of {rows} rows; use pack_gqa=False"
        )
    return None


def _sm90_promotion(problem: Problem, target: Target) -> str | None:
    policy = problem.traits.policy
    if target.arch != SM90 or not policy.format.is_fp8:
        return None
    if policy.promote_every is not None and policy.promote_every >= TILE:
        return None
    return (
        f"its kernel adds P·V to O in fp32 once a tile of {TILE} keys or more, not as "
        f"promote_every={policy.promote_every}; use impl='tiled'"
    )


def _forward_exp2(problem: Problem, target: Target) -> str | None:
    exp2 = problem.traits.policy.exp2
    return (
        None if exp2 in ("exact", "code") else f"its kernel has no exp2={exp2!r}; use impl='tiled'"
    )


def _where_it_runs(rule: Rule) -> Rule:
    """A rule of a kernel, asked on its device alone: elsewhere the device is the reason."""

    def asked(problem: Problem, target: Target) -> str | None:
        return None if _needs_kernel(problem, target) else rule(problem, target)

    return asked


def _cache_head_dims(problem: Problem, target: Target) -> str | None:
    dims = problem.traits.head_dim, problem.traits.head_dim_v
    if dims in CACHE_HEAD_DIMS:
        return None
    known = ", ".join(str(d) if d == dv else f"({d}, {dv})" for d, dv in CACHE_HEAD_DIMS)
    return f"its kernel has head dims {known}, not {dims}"


def _of(rule: Rule, cache: bool) -> Rule:
    """A rule of the cache kernel, or of the other one, asked where that one is meant."""

    def asked(problem: Problem, target: Target) -> str | None:
        return rule(problem, target) if uses_cache_kernel(problem, target.arch) == cache else None

    return asked


_FORWARD: tuple[Rule, ...] = (
    _forward_selection,
    _forward_head_dims,
    _forward_pages,
    _forward_group,
    _forward_exp2,
    _sm90_promotion,
)
_KERNELS = (
    *(_of(rule, cache=False) for rule in _FORWARD),
    _of(_cache_head_dims, cache=True),
)


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
    keys, longest = problem.request.keys_per_split, problem.keys
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


def _parts_too_large(problem: Problem, target: Target) -> str | None:
    """The combine kernel counts elements of an output in 32 bits."""
    elements = math.prod(problem.out_shape)
    request = problem.request
    if (request.num_splits > 1 or request.keys_per_split is not None) and elements >= 2**31:
        return f"parts of an output of {elements} elements cannot be merged; use num_splits=1"
    return None


def _no_stand_in_for_long_keys(problem: Problem, target: Target) -> str | None:
    """A length alone does not exchange the kernels' numerics for the definition's."""
    return _too_many_splits(problem, target) if problem.request.impl is None else None


_RULES: dict[str, tuple[Rule, ...]] = {
    "cute": (
        _needs_kernel,
        *map(_where_it_runs, (*_KERNELS, _too_many_splits, _parts_too_large)),
    ),
    "sim": (*_KERNELS, _too_many_splits, _parts_too_large),
    "tiled": (_too_many_splits,),
    "reference": (
        _reference_has_no_policy,
        _reference_does_not_split,
        _no_stand_in_for_long_keys,
    ),
}


def reasons_against(impl: str, problem: Problem, target: Target) -> tuple[str, ...]:
    """Why `impl` cannot execute `problem` on `target`; empty where it can."""
    target = simulated(target) if impl == "sim" else target
    found = (rule(problem, target) for rule in _RULES[impl])
    return tuple(reason for reason in found if reason)
