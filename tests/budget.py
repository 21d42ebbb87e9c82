"""Error budgets that are computed from the call, never chosen.

For a call whose P is rounded as its policy says, two bounds are derived from the exact attention:

* element by element, a rigorous one. P_j carries a relative error of at most the format's unit
  roundoff u, or an absolute one of 2**tail_log2 of the row's largest weight where it flushes, so

      |O - O*| <= c * sum_j max(u p_j, 2**tail p_max) |v_j|,   c = 1 (exact sum) or 2 (quantised),

  plus fp32 and output rounding;
* in the l2 norm, a sharp one: the error of a one-shot low-precision model that rounds P once under
  the final maximum, taken at its worst over the lags that the threshold allows.

What is independent of the executors here: scores, softmax, output and LSE are computed again, in
fp64 and over all keys at once. What is not: `reference/blocks` and `Output` gather the operands and
put the rows back, `saturating_cast` rounds, and the policy's limits are the package's own. Those
are held to the definition by tests/cases/exact.py and `tests.sweep.check.definition`, which share
nothing with the package.

P's codes made without an exponential (`exp2`) have no model here; such a call has no budget but in
terms of the call's with exponentials (`assert_codes_within`).

This is the only module of the tests that may hold tolerances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_fp8.accuracy.measure import rel_l2
from flash_attn_fp8.call import Call
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.formats import FORMATS, saturating_cast
from flash_attn_fp8.problem import Problem
from flash_attn_fp8.reference.blocks import Block, blocks
from flash_attn_fp8.reference.output import Output

FP32_EPS = 2.0**-23
# Roundings of fp32 on the way from a score to an output: scale, subtract, exponential (2 ulp),
# product, the tree of the sums, the final division. Counted generously; u of e4m3 is 2**-4.
FP32_STEPS = 32
# The one-shot model shares the data, not the rounding errors, of what it budgets for. The squared
# error is a sum over (row, key) of weights w = p^2 |v|^2 times squared relative roundings, so with
# n = (sum w)^2 / sum w^2 effective terms two such errors differ, relative and in the root, by a
# standard deviation of sqrt(2 K / n) / 2. K = var(e^2) / E(e^2)^2 of a rounding error e is 0.8 for
# a uniform one; binades of different size make it a little larger.
KURTOSIS = 1.25
SIGMAS = 4.0
# What one lag for all rows misses of lags that differ from row to row and tile to tile.
MODEL_SLACK = 1.05
# Issue 4's bars for a kernel beside the emulation of its own tiles and policy: what the output may
# differ, what its error against fp32 may differ from the emulation's, and the LSE from fp32's.
KERNEL_REL_L2 = 3e-3
KERNEL_ERROR_SHARE = 0.03
KERNEL_LSE_ABS = 1.1e-4
# An accumulator of 13 fraction bits that moves to fp32 every 128 keys, at any length: what it may
# add to an output of 0.75, and its error of noise over that of an exact accumulator.
PROMOTED_ABS = 0.002
PROMOTED_ERROR_RATIO = 1.1
# A code straight from the logarithm is off by up to a whole one where a rounded exponential is by a
# half: half of rounding, and the shift's half of what log2 is off a straight line.
CODE_ERROR = 2.0
# Shares of the rescale threshold. Not halves: whole octaves leave the largest P a power of two,
# which does not round, and that is the best case.
LAGS = (0.0, 0.37, 0.81)


@dataclass(frozen=True)
class Budget:
    """Exact results of a call and the errors it may have. Shapes as the call's outputs."""

    out: Tensor
    lse: Tensor
    bound: Tensor
    lse_bound: Tensor
    rel_l2: float
    effective_terms: float

    @property
    def rel_l2_limit(self) -> float:
        """What the model's error allows another error of its kind to be."""
        spread = math.sqrt(2 * KURTOSIS / max(1.0, self.effective_terms)) / 2
        return self.rel_l2 * (MODEL_SLACK + SIGMAS * spread)


def budget_of(call: Call) -> Budget:
    """Derive the budget of a call from its own operands and policy."""
    call = call.with_tensors()
    call = call._replace(
        options=call.options._replace(out_dtype=torch.float32, return_lse=True, impl=None),
        operands=call.operands._replace(out=None, lse=None, output_scale=None),
    )
    problem = problem_of(call)
    policy = problem.traits.policy
    assert policy.exp2 == "exact", f"no budget for exp2={policy.exp2!r}: its error has no model"
    device = call.operands.q.device
    names = ("out", "bound", *map(str, LAGS))
    fields = {name: torch.empty(problem.out_shape, device=device) for name in names}
    lse, lse_bound = (torch.empty(problem.lse_shape, device=device) for _ in range(2))
    writers = {name: Output(call.operands, problem, t, lse) for name, t in fields.items()}
    writers["bound"] = Output(call.operands, problem, fields["bound"], lse_bound)
    weights, squares = 0.0, 0.0
    for block in blocks(call.operands, problem, 1 << 22, keys_at_once=None):
        exact = _Exact.of(block, problem)
        w = exact.p.square() * exact.v.square().sum(-1)[:, :, None, None]
        weights, squares = weights + float(w.sum()), squares + float(w.square().sum())
        writers["out"].store(block, exact.out, exact.lse)
        writers["bound"].store(block, exact.bound(), exact.lse_bound())
        for lag in LAGS:
            writers[str(lag)].store(block, exact.one_shot(lag), exact.lse)
    for writer in writers.values():
        writer.finish()
    norm = float(fields["out"].norm()) or 1.0
    worst = max(float((fields[str(lag)] - fields["out"]).norm()) for lag in LAGS)
    terms = weights**2 / (squares or 1.0)
    return Budget(fields["out"], lse, fields["bound"], lse_bound, worst / norm, terms)


def assert_within_budget(call: Call, out: Tensor, lse: Tensor | None = None) -> Budget:
    """Check a call's results against its budget; returns it for further checks."""
    budget = budget_of(call)
    check_within(budget, out, lse, call.with_tensors().operands.output_scale)
    return budget


def check_within(
    budget: Budget, out: Tensor, lse: Tensor | None = None, scale: Tensor | None = None
) -> None:
    """Check results against a budget; `scale` is the output_scale of fp8 outputs."""
    rounding = FORMATS[_format_name(out)].unit_roundoff
    got = out.float() if scale is None else out.float() * scale.float()
    assert torch.isfinite(got).all(), "the output holds NaN or infinity"
    error = (got - budget.out).abs()
    allowed = budget.bound + rounding * (budget.out.abs() + budget.bound)
    step = 2.0 ** FORMATS[_format_name(out)].flush_log2  # half a subnormal
    allowed = allowed + step * (1.0 if scale is None else float(scale))
    worst = int((error - allowed).flatten().argmax()) if error.numel() else 0
    assert bool((error <= allowed).all()), (
        f"element {worst}: error {error.flatten()[worst]:.3g} exceeds its bound "
        f"{allowed.flatten()[worst]:.3g}"
    )
    found = rel_l2(got, budget.out)
    limit = budget.rel_l2_limit + rounding + FP32_STEPS * FP32_EPS
    assert found <= limit, f"rel_l2 {found:.4g} > budget {limit:.4g}"
    if lse is not None:
        assert_lse(lse, budget)


def assert_codes_within(budget: Budget, out: Tensor, lse: Tensor) -> None:
    """Results of a call with exp2="code", against the budget of the same call with "exact"."""
    assert_lse(lse, budget)
    found = rel_l2(out.float(), budget.out)
    limit = CODE_ERROR * budget.rel_l2_limit
    assert found <= limit, f"rel_l2 {found:.4g} > {limit:.4g} of codes"


def assert_lse(lse: Tensor, budget: Budget) -> None:
    """The LSE never feels P's rounding: only fp32's."""
    assert lse.dtype == torch.float32
    empty = budget.lse.isneginf()
    assert torch.equal(lse.isneginf(), empty), "rows without keys must have lse -inf, others not"
    error = torch.where(empty, 0.0, (lse - budget.lse).abs())
    # A row of no sequence has neither keys nor a bound.
    within = (error <= budget.lse_bound) | empty
    assert bool(within.all()), f"lse off by {float(error.max()):.3g}"


@dataclass(frozen=True)
class Likeness:
    """A kernel beside the emulation: rel_l2 between them, and the ratio of their errors."""

    rel_l2: float
    error_ratio: float
    lse_error: float


def assert_like_emulation(
    out: Tensor,
    lse: Tensor,
    emulated: Tensor,
    budget: Budget,
    *,
    own_tiles: bool = False,
    emulated_lse: Tensor | None = None,
) -> Likeness:
    """A kernel's results are those of the emulation `emulated`, to issue 4's bars.

    With `own_tiles` the kernel's tiles are others than the emulation's, so that the maxima under
    which P is rounded lag in other places: the error's size is then left to `check_within`, whose
    model takes the worst of the lags.

    `emulated_lse` is what the LSE is to be, if not the exact one: where Hopper accumulates fp8, the
    scores themselves have 13 fraction bits.
    """
    assert torch.isfinite(out).all(), "the output holds NaN or infinity"
    apart = rel_l2(out, emulated)
    assert apart <= KERNEL_REL_L2, f"rel_l2 {apart:.3g} from the emulation > {KERNEL_REL_L2:g}"
    error, theirs = rel_l2(out, budget.out), rel_l2(emulated, budget.out)
    assert own_tiles or abs(error - theirs) <= KERNEL_ERROR_SHARE * theirs, (
        f"error {error:.4g}, and the emulation's is {theirs:.4g}"
    )
    empty = budget.lse.isneginf()
    assert torch.equal(lse.isneginf(), empty), "rows without keys must have lse -inf, others not"
    expected = budget.lse if emulated_lse is None else emulated_lse
    off = float(torch.where(empty, 0.0, (lse - expected).abs()).max())
    assert off <= KERNEL_LSE_ABS, f"lse off by {off:.3g} > {KERNEL_LSE_ABS:g}"
    return Likeness(apart, error / theirs if theirs else 1.0, off)


def assert_rounded_once(actual: Tensor, exact: Tensor) -> None:
    """`actual` is `exact`, known in fp64, but for one rounding to actual's format.

    And for what an exact value that is known only to fp64 adds to it, far below fp32's roundoff.
    """
    fmt = FORMATS[_format_name(actual)]
    same = actual.double() == exact  # infinities among them
    error = torch.where(same, 0.0, (actual.double() - exact).abs())
    size = torch.where(same, 0.0, exact.abs())
    allowed = fmt.unit_roundoff * size + FP32_EPS * size + 2.0**fmt.flush_log2
    # fp64 sums cancel: relative to the largest element, not to each.
    allowed = allowed + FP32_EPS**2 * (size.amax() if size.numel() else 0.0)
    worst = int((error - allowed).flatten().argmax()) if error.numel() else 0
    assert bool((error <= allowed).all()), (
        f"element {worst}: {error.flatten()[worst]:.3g} from the exact value, one rounding to "
        f"{fmt.name} is {allowed.flatten()[worst]:.3g}"
    )


def _format_name(out: Tensor) -> str:
    return next(f.name for f in FORMATS.values() if f.dtype == out.dtype)


@dataclass(frozen=True)
class _Exact:
    """One block's attention in fp64, with what the bounds need."""

    problem: Problem
    x: Tensor  # natural-log scores, (n, hk, g, r, s)
    lse: Tensor
    p: Tensor
    v: Tensor  # dequantised, (n, hk, s, dv)
    v_scale: Tensor | None  # (n, hk, 1, 1, s) where it sits in P, else None
    sink: Tensor | None

    @classmethod
    def of(cls, block: Block, problem: Problem) -> _Exact:
        s = problem.sizes
        q = block.q.double() if block.q_scale is None else block.q.double() * block.q_scale.double()
        k, v = block.k.double(), block.v.double()
        if block.k_scale is not None:
            k = k * block.k_scale.double()[..., None]
        if block.v_scale is not None:
            v = v * block.v_scale.double()[..., None]
        x = torch.einsum("nhgrd,nhsd->nhgrs", q, k) * s.softmax_scale
        if s.softcap:
            x = s.softcap * torch.tanh(x / s.softcap)
        visible = block.visible(0, k.shape[2], s.window_left, s.window_right)
        x = x.masked_fill(~visible, -math.inf)
        lse = torch.logsumexp(x, -1)
        if block.sink is not None:
            lse = torch.logaddexp(lse, block.sink.double())
        p = torch.exp(x - lse.nan_to_num(neginf=0.0)[..., None])
        traits = problem.traits
        in_p = traits.v_descale is not None and traits.v_descale.per_token
        v_scale = block.v_scale.double()[:, :, None, None] if in_p else None  # type: ignore[union-attr]
        sink = None if block.sink is None else block.sink.double()
        return cls(problem, x, lse, p, v, v_scale, sink)

    @property
    def out(self) -> Tensor:
        return torch.einsum("nhgrs,nhsd->nhgrd", self.p, self.v)

    def bound(self) -> Tensor:
        policy = self.problem.traits.policy
        weight = self.p if self.v_scale is None else self.p * self.v_scale
        top = weight.amax(-1, keepdim=True) if weight.shape[-1] else weight.sum(-1, keepdim=True)
        floor = 2.0**policy.tail_log2 * top
        floor = floor if self.v_scale is None else floor / self.v_scale
        error = torch.maximum(policy.format.unit_roundoff * self.p, floor) * (self.p > 0)
        error = error + FP32_STEPS * FP32_EPS * (1 + self.x.abs().nan_to_num(posinf=0.0)) * self.p
        factor = 1.0 if self.problem.traits.exact_row_sum else 2.0
        u = policy.format.unit_roundoff
        return factor / (1 - u) * torch.einsum("nhgrs,nhsd->nhgrd", error, self.v.abs())

    def lse_bound(self) -> Tensor:
        size = self.x.abs().nan_to_num(posinf=0.0)
        largest = size.amax(-1) if size.shape[-1] else size.sum(-1)
        return FP32_STEPS * FP32_EPS * (1 + largest + self.lse.abs().nan_to_num(posinf=0.0))

    def one_shot(self, lag: float) -> Tensor:
        """Attention with P rounded once, under a maximum that lags by a share of the threshold.

        V's scales of tokens enter the maximum where P is fp8, and multiply P where it has 16 bits.
        """
        policy = self.problem.traits.policy
        x = self.x * math.log2(math.e)
        scale = torch.ones((), device=x.device) if self.v_scale is None else self.v_scale
        scaled = x + torch.log2(scale)
        ruling = scaled if policy.format.is_fp8 else x
        top = ruling.amax(-1, keepdim=True) if x.shape[-1] else x.sum(-1, keepdim=True)
        top = top.nan_to_num(neginf=0.0) - lag * policy.rescale_threshold
        p = torch.exp2((scaled - top + policy.max_offset).float())
        rounded = saturating_cast(p, policy.format).float()
        used = p if self.problem.traits.exact_row_sum else rounded
        total = (used / scale).double().sum(-1, keepdim=True)
        if self.sink is not None:
            total = total + torch.exp2(
                self.sink[..., None] * math.log2(math.e) - top + policy.max_offset
            )
        v = self.v if self.v_scale is None else self.v / self.v_scale[:, :, 0, 0, :, None]
        out = torch.einsum("nhgrs,nhsd->nhgrd", rounded, v.float()).double()
        return out / torch.where(total == 0, 1.0, total)
