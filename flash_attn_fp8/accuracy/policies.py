"""Evidence for the default policies: what each does to P alone, at both ends of its range.

The operands are exact in both fp8 formats, so that all policies see the same problem and nothing
but P is rounded. Measured for each case and policy:

    rel_l2      error of the fp32 output against the exact attention, by source of the row sum
    top of P    largest P that occurred / largest value of the format (above 1: saturated)
    flushed     share of the probability mass whose P became 0, mean over rows
    rescales    share of (tile of 128 keys, warp of 32 rows) steps that rescale the accumulator,
                of those after a row's first tile: what a rescale threshold saves

Scores are in natural logits and V ~ N(0, 1) unless the name says otherwise. "sink": one key scores
about log(keys) above the rest, so that it holds half of the mass, and has V = 0; tiles are visited
right to left, so a sink at the last key is seen first. "tail": every other key lies 14.3 octaves
below the last, which has V = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from flash_attn_fp8.accuracy.measure import emulate, emulate_problem, emulation, exact, rel_l2
from flash_attn_fp8.api import flash_attn_func
from flash_attn_fp8.call import Call
from flash_attn_fp8.checks import problem_of
from flash_attn_fp8.formats import saturating_cast
from flash_attn_fp8.plan import TiledSpec
from flash_attn_fp8.policy import LOG2E, Fp8Policy, RowSum
from flash_attn_fp8.problem import Traits
from flash_attn_fp8.quantization import quantize
from flash_attn_fp8.reference import exact as definition
from flash_attn_fp8.reference.tiled import TileStats
from flash_attn_fp8.results import Row, Scalar

_E4M3, _E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
WARP_ROWS = 32  # rows whose maxima one warp keeps: any of them rescales the warp's accumulator
HEAD_DIM = 64
_TAIL_OCTAVES = 14.3

POLICIES: dict[str, Fp8Policy] = {
    "e4m3 (8, 4) UNSAFE": Fp8Policy.breaking_the_budget("e4m3", 8, 4),
    "e4m3 (8, 0)": Fp8Policy("e4m3", 8, 0),
    "e4m3 (8, 0.75)": Fp8Policy("e4m3", 8, 0.75),
    "e4m3 (6, 2.75)": Fp8Policy("e4m3", 6, 2.75),
    "e4m3 (4, 4)": Fp8Policy("e4m3", 4, 4),
    "e5m2 (7, 8)": Fp8Policy("e5m2", 7, 8),
    "e5m2 (8, 4)": Fp8Policy("e5m2", 8, 4),
    "e5m2 (11, 4)": Fp8Policy("e5m2", 11, 4),
    "e5m2 (13, 2)": Fp8Policy("e5m2", 13, 2),
    "e5m2 (15, 0.75)": Fp8Policy("e5m2", 15, 0.75),
}


# ----------------------------------------------------------------------------------- cases


@dataclass(frozen=True)
class Drawn:
    """One attention problem: q, k, v (1, length, heads, HEAD_DIM), fp32, exact in both formats."""

    q: Tensor
    k: Tensor
    v: Tensor
    softmax_scale: float = HEAD_DIM**-0.5


@dataclass(frozen=True)
class Case:
    """A kind of scores and a number of keys, with the query rows and heads that are averaged."""

    scores: str
    keys: int
    rows: int
    heads: int

    def draw(self, seed: int = 0) -> Drawn:
        """The operands, from a seed."""
        generator = torch.Generator().manual_seed(seed)
        return _KINDS[self.scores](self, generator)


def _randn(case: Case, length: int, generator: torch.Generator) -> Tensor:
    return torch.randn(1, length, case.heads, HEAD_DIM, generator=generator)


def _representable(x: Tensor) -> Tensor:
    """Rounded to values that e4m3 and e5m2 share."""
    return x.to(_E4M3).float().to(_E5M2).float()


def _normal(std: float, v_mean: float = 0.0) -> Callable[[Case, torch.Generator], Drawn]:
    """Scores of standard deviation `std`, as q . k / sqrt(d) has them."""

    def draw(case: Case, generator: torch.Generator) -> Drawn:
        q = _randn(case, case.rows, generator) * std
        k, v = (_randn(case, case.keys, generator) for _ in range(2))
        return Drawn(_representable(q), _representable(k), _representable(v + v_mean))

    return draw


def _sink(first: bool) -> Callable[[Case, torch.Generator], Drawn]:
    """Scores ~ N(0, 1) and a sink that holds half of the mass, at the first or the last key."""

    def draw(case: Case, generator: torch.Generator) -> Drawn:
        q, k = _randn(case, case.rows, generator), _randn(case, case.keys, generator)
        v = _randn(case, case.keys, generator)
        at = 0 if first else case.keys - 1
        # The first channel is the sink's own: q . k / sqrt(d) = 8 gap / 8.
        q[..., 0], k[..., 0] = HEAD_DIM**0.5, 0
        k[:, at], v[:, at] = 0, 0
        k[:, at, :, 0] = math.log(case.keys) + 0.5  # N(0, 1) logits sum to keys * sqrt(e)
        return Drawn(_representable(q), _representable(k), _representable(v))

    return draw


def _tail(case: Case, generator: torch.Generator) -> Drawn:
    """All keys equal but the last, which lies _TAIL_OCTAVES above."""
    q = torch.zeros(1, case.rows, case.heads, HEAD_DIM)
    k = torch.zeros(1, case.keys, case.heads, HEAD_DIM)
    v = _randn(case, case.keys, generator)
    q[..., 0], k[:, -1, :, 0], v[:, -1] = 8, 8, 0
    return Drawn(q, k, _representable(v), softmax_scale=_TAIL_OCTAVES / LOG2E / 64)


_KINDS: dict[str, Callable[[Case, torch.Generator], Drawn]] = {
    "std 1 (uniform)": _normal(1),
    "std 2": _normal(2),
    "std 4": _normal(4),
    "std 8 (peaked)": _normal(8),
    "std 1, V + 1": _normal(1, v_mean=1),
    "sink at first key": _sink(first=True),
    "sink at last key": _sink(first=False),
    "tail": _tail,
}


def cases(keys: Sequence[int], scores_per_case: int) -> list[Case]:
    """Every kind of scores at every length, with about `scores_per_case` scores each."""
    found = []
    for length in keys:
        rows = max(WARP_ROWS, min(256, scores_per_case // length // WARP_ROWS * WARP_ROWS))
        heads = max(1, min(8, scores_per_case // (rows * length)))
        found += [Case(kind, length, rows, heads) for kind in _KINDS]
    return found


# --------------------------------------------------------------------------------- measures


class _Mass(NamedTuple):
    """Sums over the tiles of one block, (n, hk, g, r) in fp64, relative to its first maximum."""

    base: Tensor
    all: Tensor
    flushed: Tensor


@dataclass
class _Ends:
    """An observer of tiles that adds up what the docstring of this module defines."""

    policy: Fp8Policy
    top: float = 0.0
    steps: int = 0
    rescaled: int = 0
    shares: list[Tensor] = field(default_factory=list)  # flushed share of each row, by block
    _mass: _Mass | None = None

    def __call__(self, tile: TileStats) -> None:
        p = tile.p.double()
        if self._mass is None or not bool(tile.alive.any()):
            self.close_block()
            zeros = torch.zeros_like(tile.row_max, dtype=torch.float64)
            self._mass = _Mass(tile.row_max.double(), zeros, zeros)
        mass = self._mass
        self.top = max(self.top, float(p.max()) / self.policy.format.max)
        self.steps += int(_by_warp(tile.alive).sum())
        self.rescaled += int(_by_warp(tile.rescaled).sum())
        vanished = saturating_cast(tile.p, self.policy.format).float() == 0
        weight = torch.exp2(tile.row_max.double() - mass.base)
        self._mass = _Mass(
            mass.base,
            mass.all + weight * p.sum(-1),
            mass.flushed + weight * (p * vanished).sum(-1),
        )

    def close_block(self) -> None:
        """Record the rows so far; what follows is another block of rows."""
        if self._mass is not None:
            self.shares.append((self._mass.flushed / self._mass.all).flatten())
        self._mass = None


def _by_warp(rows: Tensor) -> Tensor:
    """Whether any of a warp's rows is set: (..., r) to (..., r / WARP_ROWS)."""
    return rows.reshape(*rows.shape[:-1], -1, WARP_ROWS).any(-1)


@dataclass(frozen=True)
class Comparison:
    """Which cases and policies are measured."""

    cases: Sequence[Case]
    policies: Sequence[str] = tuple(POLICIES)

    def __len__(self) -> int:
        """How many (case, policy) pairs `rows` works through."""
        return len(self.cases) * len(self.policies)

    def rows(self) -> Iterator[list[Row]]:
        """The result rows of each pair in turn."""
        for case in self.cases:
            drawn = case.draw()
            expected = exact(drawn.q, drawn.k, drawn.v, softmax_scale=drawn.softmax_scale)
            for name in self.policies:
                yield _pair_rows(case, drawn, expected, name)


def _pair_rows(case: Case, drawn: Drawn, expected: Tensor, name: str) -> list[Row]:
    labels: dict[str, Scalar] = {"scores": case.scores, "keys": case.keys, "policy": name}
    labels |= emulation()
    policy = POLICIES[name]
    q, k, v = (x.to(policy.format.dtype) for x in (drawn.q, drawn.k, drawn.v))
    ends = _Ends(policy)
    found = []
    for row_sum in get_args(RowSum):
        observer = ends if row_sum == policy.row_sum else None  # P is the same for both
        how = policy.replace(row_sum=row_sum)
        out = emulate(q, k, v, how, observer=observer, softmax_scale=drawn.softmax_scale)
        error = rel_l2(out, expected)
        found.append(Row.of({**labels, "row_sum": row_sum}, "tiled", "rel_l2", "ratio", error))
    ends.close_block()
    flushed = float(torch.cat(ends.shares).mean())
    found.append(Row.of(labels, "tiled", "top of P", "of the format's largest", ends.top))
    found.append(Row.of(labels, "tiled", "flushed", "share of mass", flushed))
    if ends.steps:
        rate = ends.rescaled / ends.steps
        found.append(Row.of(labels, "tiled", "rescales", "share of steps", rate))
    return found


# ------------------------------------------------------------------- where V's scale belongs

_V_ROWS, _V_KEYS, _V_HEADS, _V_FAR = 64, 512, 16, -40.0


def _v_kinds(generator: torch.Generator) -> dict[str, Tensor]:
    v = torch.randn(1, _V_KEYS, _V_HEADS, HEAD_DIM, generator=generator)
    outlier = v.clone()
    outlier[:, _V_KEYS // 2] *= 1e5
    spread = torch.randn(1, _V_KEYS, _V_HEADS, 1, generator=generator)
    with_zero = v * 1e-3
    with_zero[:, _V_KEYS // 2] = 0
    return {
        "N(0, 1) × 0.01": v * 0.01,
        "N(0, 1)": v,
        "N(0, 1) × 1000": v * 1000,
        "one token × 1e5 whose score is −40": outlier,
        "rows × lognormal(σ = 0.5)": v * torch.exp(0.5 * spread),
        "rows × lognormal(σ = 2)": v * torch.exp(2 * spread),
        "N(0, 1) × 0.001, one token 0": with_zero,
    }


@dataclass(frozen=True)
class _Altered(Traits):
    """Traits of a kernel that the package would not build: both choices about V's scale are free.

    P is multiplied by V's scale before rounding unless `in_exponent`.
    """

    in_exponent: bool = True
    exact_sum: bool = True

    @property
    def v_scale_in_exponent(self) -> bool:
        return self.in_exponent

    @property
    def exact_row_sum(self) -> bool:
        return self.exact_sum


@dataclass(frozen=True)
class VScale:
    """Three places for V's (token, head) scale where P is fp8; e4m3 (8, 0.75), both row sums."""

    seed: int = 0

    def __len__(self) -> int:
        """How many kinds of V `rows` works through."""
        return 7

    def rows(self) -> Iterator[list[Row]]:
        """rel_l2 of the output and the largest error of the LSE, for each kind of V in turn."""
        generator = torch.Generator().manual_seed(self.seed)
        q = torch.randn(1, _V_ROWS, _V_HEADS, HEAD_DIM, generator=generator)
        k = torch.randn(1, _V_KEYS, _V_HEADS, HEAD_DIM, generator=generator)
        q[..., 0], k[..., 0] = HEAD_DIM**0.5, 0
        kinds = _v_kinds(generator)
        far = k.clone()
        far[:, _V_KEYS // 2] = 0
        far[:, _V_KEYS // 2, :, 0] = _V_FAR
        for name, v in kinds.items():
            keys = far if "score" in name else k
            yield _v_scale_rows(name, _representable(q), _representable(keys), v)


def _v_scale_rows(name: str, q: Tensor, k: Tensor, v: Tensor) -> list[Row]:
    codes = quantize(v, per="token_head")
    largest = codes.descale.amax(1, keepdim=True)
    q8, k8 = q.to(_E4M3), k.to(_E4M3)

    def call(v_descale: Tensor) -> Call:
        described: Call = flash_attn_func.describe_call(  # type: ignore[attr-defined]
            q8, k8, codes.values, v_descale=v_descale, return_lse=True, out_dtype=torch.float32
        )
        return described

    plain = call(codes.descale)
    problem = problem_of(plain)
    expected, lse = torch.empty(problem.out_shape), torch.empty(problem.lse_shape)
    definition.run(problem, plain.operands, expected, lse)
    ways = {
        "P · v_scale": (False, plain),
        "P · v_scale / max over the head": (False, call(codes.descale / largest)),
        "v_scale in the exponent": (True, plain),
    }
    found = []
    for (way, (in_exponent, described)), row_sum in product(ways.items(), get_args(RowSum)):
        traits = _Altered(
            **vars(problem.traits), in_exponent=in_exponent, exact_sum=row_sum == "exact"
        )
        how = replace(problem, traits=traits)
        spec = TiledSpec(POLICIES["e4m3 (8, 0.75)"].replace(row_sum=row_sum))
        out, found_lse = emulate_problem(how, described, spec)
        out = out * largest[..., None] if "max" in way else out
        case = {"V": name, "v_scale": way, "row_sum": row_sum, **emulation()}
        found.append(Row.of(case, "tiled", "rel_l2, per-token V", "ratio", rel_l2(out, expected)))
        error = float((found_lse - lse).abs().max())
        found.append(Row.of(case, "tiled", "LSE error, per-token V", "nats", error))
    return found
