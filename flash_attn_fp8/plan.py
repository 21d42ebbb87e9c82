"""Problems to plans: which executor runs, with which spec, and how the keys are split.

`plan_for(problem, target)` is pure and memoised: no tensor, no device, no environment. What it
decided, and what struck the other executors out, is in the plan for `explain` to show.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeVar, get_args

from torch import Tensor

from flash_attn_fp8.cache_tile import tile_for, warpgroup_tile_for
from flash_attn_fp8.errors import InvalidArguments, Refusal
from flash_attn_fp8.formats import FORMATS, FP16
from flash_attn_fp8.policy import POLICIES, Fp8Policy
from flash_attn_fp8.problem import Descale, Problem, Sizes, Traits
from flash_attn_fp8.specs import (
    TILE,
    CacheSpec,
    CacheTile,
    Kernel,
    Sm90Spec,
    Sm100Spec,
    WarpgroupTile,
    WidenSpec,
)
from flash_attn_fp8.support import (
    EXECUTORS,
    SM90,
    fits_forward_kernel,
    reasons_against,
    uses_cache_kernel,
)
from flash_attn_fp8.target import (
    SHARED_MEMORY,
    Target,
    compute_capability,
    has_fp8,
    simulated,
)

TILE_M, TILE_N = TILE, TILE  # the kernels' tile of query rows x keys, which `tiled` mirrors

# Query rows of a KV head up to which the cache kernel takes 16-bit queries on SM90.
FEW_ROWS = 64
# The same over 8-bit codes, whose conversion costs five times their bytes: rows of each key (an
# H200, 65,536 keys: docs/kernel_cache.md).
FEW_ROWS_OF_CODES = 256
WIDENED_BYTES = 4 * 2**30  # of K and V in 16 bits that a call may take while it runs
# Of the cache kernel: below that, merging parts takes longer than the parts save (an H200).
CACHE_KEYS_PER_SPLIT = 512
MAX_AUTO_SPLITS = 128  # FA4's cap for its heuristic


_Length = TypeVar("_Length", int, Tensor)


@dataclass(frozen=True)
class Split:
    """How each sequence's keys are divided: into `num_splits` equal parts, or by `keys`.

    Parts end on tiles. `keys` set means that the number of parts follows from the length.
    """

    num_splits: int = 1
    keys: int | None = None

    @property
    def divides(self) -> bool:
        """Whether there are parts to be merged."""
        return self.keys is not None or self.num_splits > 1

    def keys_per_split(self, seqlen_k: _Length, tile_n: int) -> _Length:
        """Keys in each part of a sequence (or of each of a tensor of lengths); whole tiles."""
        if self.keys is not None:
            return seqlen_k * 0 + self.keys
        tiles = -(-seqlen_k // tile_n)
        return -(-tiles // self.num_splits) * tile_n

    def parts(self, seqlen_k: int) -> int:
        """Number of parts that cover `seqlen_k` keys."""
        return self.num_splits if self.keys is None else max(1, -(-seqlen_k // self.keys))


KEYS_PER_MMA = 32  # of 8-bit operands: the depth of one tensor core instruction
Accumulator = Literal["fp32", "sm90_fp8"]


@dataclass(frozen=True)
class TiledSpec:
    """What the emulation mirrors of a kernel: its tiles, its policy and its accumulator.

    `accumulator` is "fp32", or "sm90_fp8": Hopper's fp8 tensor cores, which keep 13 fraction bits
    (then `policy.promote_every` matters).

    Raises:
        InvalidArguments: a field is out of range.
    """

    policy: Fp8Policy
    tile_n: int = TILE_N
    accumulator: Accumulator = "fp32"

    def __post_init__(self) -> None:
        faults = []
        if not isinstance(self.policy, Fp8Policy):
            faults.append(
                f"policy={self.policy!r} must be an Fp8Policy, such as policy_for('e4m3')"
            )
        n = self.tile_n
        if isinstance(n, bool) or not isinstance(n, int) or n <= 0:
            faults.append(f"tile_n={n!r} must be a positive number of keys, such as {TILE_N}")
        elif self.accumulator == "sm90_fp8" and n % KEYS_PER_MMA:
            faults.append(
                f"tile_n={n} must be a multiple of the {KEYS_PER_MMA} keys of one instruction of "
                f"the sm90_fp8 accumulator, such as {TILE_N}"
            )
        if self.accumulator not in get_args(Accumulator):
            known = ", ".join(map(repr, get_args(Accumulator)))
            faults.append(f"accumulator={self.accumulator!r} is not one of {known}")
        if faults:
            raise InvalidArguments("TiledSpec: " + "; ".join(faults), tuple(faults))


@dataclass(frozen=True)
class ReferenceSpec:
    """The definition in fp64; nothing to choose."""


@dataclass(frozen=True)
class Plan:
    """What will run. `rejected` maps the executors passed over to the reasons."""

    impl: str
    target: Target
    spec: Sm90Spec | Sm100Spec | CacheSpec | TiledSpec | ReferenceSpec
    split: Split
    pack_gqa: bool
    disable_scheduler_metadata: bool
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    widen: WidenSpec | None = None

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """The compiled kernels that it launches, in their order."""
        spec = self.spec
        if not isinstance(spec, Sm90Spec | Sm100Spec | CacheSpec):
            return ()
        transpose = spec.transpose if isinstance(spec, Sm90Spec) else None
        before = transpose or self.widen
        after = spec.combine if spec.split else None
        return tuple(kernel for kernel in (before, spec, after) if kernel is not None)


@lru_cache(maxsize=4096)
def plan_for(problem: Problem, target: Target) -> Plan:
    """The plan of a problem on a target.

    Raises:
        Unsupported: the executor that was asked for, or every one, has a reason against it.
    """
    impl, rejected = executor_for(problem, target)
    return _plan(impl, problem, simulated(target) if impl == "sim" else target, rejected)


def executor_for(
    problem: Problem, target: Target
) -> tuple[str, tuple[tuple[str, tuple[str, ...]], ...]]:
    """The executor of a problem, whose sizes may be symbolic, and those passed over, with reasons.

    Raises:
        Unsupported: see `plan_for`.
    """
    asked = problem.request.impl
    candidates = EXECUTORS if asked is None else (asked,)
    rejected: list[tuple[str, tuple[str, ...]]] = []
    for impl in candidates:
        reasons = reasons_against(impl, problem, target)
        if not reasons:
            return impl, tuple(rejected)
        rejected.append((impl, reasons))
    refusal = Refusal(unsupported=[f"impl={impl!r}: {r}" for impl, why in rejected for r in why])
    raise refusal.error(f"no executor on {target.arch} for this call")


def _plan(
    impl: str,
    problem: Problem,
    target: Target,
    rejected: tuple[tuple[str, tuple[str, ...]], ...],
) -> Plan:
    traits, request = problem.traits, problem.request
    group = traits.q_heads_per_kv_head
    pack_gqa = group > 1 if request.pack_gqa is None else request.pack_gqa
    split = _split(problem, target, pack_gqa)
    spec = _spec(impl, problem, target, pack_gqa, split)
    widen = None
    if isinstance(spec, Sm90Spec) and spec.widened:
        widen = _widen_spec(traits, spec)
    return Plan(
        impl=impl,
        target=target,
        spec=spec,
        split=split,
        pack_gqa=pack_gqa,
        disable_scheduler_metadata=request.disable_scheduler_metadata or traits.q_layout == "dense",
        rejected=rejected,
        widen=widen,
    )


def _spec(
    impl: str, problem: Problem, target: Target, pack_gqa: bool, split: Split
) -> Sm90Spec | Sm100Spec | CacheSpec | TiledSpec | ReferenceSpec:
    if impl == "tiled":
        return _tiled(problem, target, split)
    if impl == "reference":
        return ReferenceSpec()
    if _runs_cache_kernel(problem, target):
        return _cache_spec(problem, target, split)
    traits = problem.traits
    if target.arch == SM90:
        widened = traits.q_format != traits.kv_format
        problem = _widened(problem) if widened else problem
        group = traits.q_heads_per_kv_head if pack_gqa else 1
        traits = replace(problem.traits, policy=policy_of(problem, target))
        return Sm90Spec(traits, group, problem.sizes.page_size, split.divides, widened)
    # Its tensor cores accumulate in fp32: promotion means nothing, and must not be in the key.
    policy = traits.policy.replace(promote_every=None)
    group = traits.q_heads_per_kv_head if pack_gqa else 1
    return Sm100Spec(
        replace(traits, policy=policy),
        group=group,
        page_size=problem.sizes.page_size,
        split=split.divides,
        pair=_pays_to_pair(problem, group),
    )


def policy_of(problem: Problem, target: Target) -> Fp8Policy:
    """The policy that a problem runs under: the call's, or what is best on the target."""
    traits = problem.traits
    policy = traits.policy
    if problem.request.policy_given or target.arch != SM90 or not policy.format.is_fp8:
        return policy
    if traits.v_scale_in_exponent:  # the sum is of exponentials, which have no codes
        return policy.replace(rescale_threshold=0, row_sum="exact")
    return POLICIES[policy.p_format]["sm90"]


def _runs_cache_kernel(problem: Problem, target: Target) -> bool:
    """Whether the cache kernel runs a problem: what no other kernel can, and few queries on SM90.

    There 16-bit queries have two kernels. A tile of the forward kernel has 128 rows, of which few
    queries leave most idle, and every CTA of it waits for its first keys alone; the cache kernel
    gives warps, or over codes warpgroups, keys of their own, which is what reading a cache as fast
    as memory goes takes. From more rows on the tensor core is the limit, of which the cache kernel
    reaches less. Then it pays, too, to convert 8-bit codes to what the forward kernel reads.
    """
    if not uses_cache_kernel(problem, target.arch):
        return False
    rows = problem.sizes.seqlen_q * problem.traits.q_heads_per_kv_head
    if target.arch != SM90 or rows <= FEW_ROWS:
        return True
    if problem.traits.q_format == problem.traits.kv_format:
        return not fits_forward_kernel(problem, target)
    return not (_pays_to_widen(problem) and fits_forward_kernel(_widened(problem), target))


def _pays_to_widen(problem: Problem) -> bool:
    """Whether so many rows see a key on average that it is worth converting, if there is room.

    Room is the batch's matter, so never where bits must not depend on that.
    """
    if problem.request.deterministic:
        return False
    fits = copied_bytes(problem) <= WIDENED_BYTES
    return fits and rows_of_a_key(problem) > FEW_ROWS_OF_CODES


def copied_bytes(problem: Problem) -> int:
    """What K and V take in 16 bits."""
    sizes, traits = problem.sizes, problem.traits
    row_bytes = 2 * (traits.head_dim + traits.head_dim_v)
    return copied_rows(sizes) * sizes.nheads_kv * row_bytes


def copied_rows(sizes: Sizes) -> int:
    """Rows of a KV head in those copies; packed sequences begin at tiles of their own there."""
    if sizes.total_k is not None:
        return sizes.total_k + sizes.batch * TILE
    return sizes.batch * sizes.seqlen_k


def rows_of_a_key(problem: Problem) -> float:
    """How many query rows of a KV head see a key on average, where no right bound hides any."""
    sizes = problem.sizes
    seen = sizes.seqlen_k
    if sizes.window_left is not None:
        seen = min(seen, sizes.window_left + sizes.seqlen_q)
    return sizes.seqlen_q * problem.traits.q_heads_per_kv_head * seen / max(1, sizes.seqlen_k)


def _widened(problem: Problem) -> Problem:
    """A problem over 8-bit codes as it is once `WidenSpec`'s kernel has run."""
    traits, policy = problem.traits, problem.traits.policy
    if traits.v_scale_in_exponent:  # which it no longer is; tiles of keys still have units
        policy = policy.replace(row_sum="exact")
    traits = replace(
        traits,
        kv_format=FP16.name if _is_per_token(traits.k_descale) else traits.q_format,
        kv_layout="varlen" if traits.kv_layout == "varlen" else "dense",
        k_descale=_of_tiles(traits.k_descale),
        v_descale=_of_tiles(traits.v_descale),
        policy=policy,
    )
    sizes = replace(problem.sizes, page_size=None, num_pages=None)
    return replace(problem, traits=traits, sizes=sizes)


def _of_tiles(kind: Descale | None) -> Descale | None:
    return Descale("tile") if _is_per_token(kind) else kind


def _is_per_token(kind: Descale | None) -> bool:
    return kind is not None and kind.per_token


def _widen_spec(traits: Traits, spec: Sm90Spec) -> WidenSpec:
    return WidenSpec(
        kv_format=traits.kv_format,
        k_format=spec.traits.kv_format,
        v_format=spec.v_format,
        head_dim=traits.head_dim,
        head_dim_v=traits.head_dim_v,
        kv_layout=traits.kv_layout,
        seqused_k=traits.seqused_k,
        k_scale=_is_per_token(traits.k_descale),
        v_scale=traits.v_scale_in_exponent,
    )


def _pays_to_pair(problem: Problem, group: int) -> bool:
    """Whether two SM100 CTAs share K and V.

    Sizes have a part in the choice of a kernel here, in `_runs_cache_kernel`, in `_cache_tile` and
    in an automatic split, nowhere else.

    From head dim 128 on, with both operands of Q Kᵀ in shared memory, one CTA reads that at its
    limit of 128 bytes a clock or beyond; a pair reads a third less
    (benchmarks/results/static_sm100.md). A pair's unit of work has 512 rows at head dim 128, of
    which bounds would mask more tiles in part: not there, but at 192 and 256, where it has the 256
    rows of one CTA's unit elsewhere. What cleans the tails of sequences is not made for pairs.
    """
    traits = problem.traits
    bounded = traits.bounded_left or traits.bounded_right
    plain_keys = traits.kv_layout == "dense" and not traits.seqused_k
    rows = problem.sizes.seqlen_q * group
    if traits.head_dim_v > 128:
        return plain_keys and rows > TILE_M
    return traits.head_dim_v == 128 and plain_keys and not bounded and rows > 2 * TILE_M


def _cache_spec(problem: Problem, target: Target, split: Split) -> CacheSpec:
    traits = problem.traits
    return CacheSpec(
        replace(traits, policy=traits.policy.replace(promote_every=None)),
        tile=_cache_tile(problem, target, split.parts(problem.keys)),
        split=split.divides,
        has_fp8=has_fp8(target.arch),
        overlaps=compute_capability(target.arch) >= 90,
    )


def _cache_tile(problem: Problem, target: Target, parts: int = 1) -> CacheTile | WarpgroupTile:
    """The tile, of which rows are the same however many parts of the keys there are."""
    traits, sizes = problem.traits, problem.sizes
    rows = sizes.seqlen_q * traits.q_heads_per_kv_head
    dims = traits.head_dim, traits.head_dim_v
    shared_memory = SHARED_MEMORY[target.arch]
    if not _in_warpgroups(traits, target):
        return tile_for(rows, *dims, FORMATS[traits.kv_format].bits // 8, shared_memory)
    ctas = sizes.batch * sizes.nheads_kv * parts
    scattered = traits.selection is not None or sizes.page_size == 1
    full = ctas > target.sm_count
    return warpgroup_tile_for(rows, *dims, shared_memory, full=full, scattered=scattered)


def _in_warpgroups(traits: Traits, target: Target) -> bool:
    """Whether warpgroups multiply in the cache kernel: over codes, where V's columns fill them.

    Over 16 bits, which nothing widens, they were not tried.
    """
    of_codes = FORMATS[traits.kv_format].bits == 8
    fits = traits.head_dim <= 192 and traits.head_dim_v in (64, 128)
    return target.arch == SM90 and of_codes and fits


def _tiled(problem: Problem, target: Target, split: Split) -> TiledSpec:
    """The numerics of the target's kernel and tensor cores; those of fp32 sums elsewhere."""
    policy = policy_of(problem, target)
    if target.arch != SM90 or not policy.format.is_fp8:
        return TiledSpec(policy)
    traits = replace(problem.traits, policy=policy)
    tile_n = Sm90Spec(traits, split=split.divides).tile_n
    promote = None if policy.promote_every is None else min(policy.promote_every, tile_n)
    return TiledSpec(policy.replace(promote_every=promote), tile_n, accumulator="sm90_fp8")


def _split(problem: Problem, target: Target, pack_gqa: bool) -> Split:
    request, sizes = problem.request, problem.sizes
    cached = target.is_gpu and _runs_cache_kernel(problem, target)
    if request.keys_per_split is not None:
        return Split(keys=request.keys_per_split)
    if request.num_splits:
        return Split(request.num_splits)
    # A block of query rows: of one head, or of all that share a KV head where they are packed.
    group = problem.traits.q_heads_per_kv_head if pack_gqa or cached else 1
    block_m = _cache_tile(problem, target).block_m if cached else TILE_M
    m_blocks = -(-sizes.seqlen_q * group // block_m)
    work = sizes.batch * (sizes.nheads // group) * m_blocks
    n_blocks = -(-problem.keys // TILE_N)
    if cached:
        n_blocks = problem.keys // CACHE_KEYS_PER_SPLIT
    n_blocks = max(1, n_blocks)
    return Split(max(1, min(target.sm_count // max(1, work), n_blocks, MAX_AUTO_SPLITS)))
