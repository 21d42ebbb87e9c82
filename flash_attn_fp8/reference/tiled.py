"""The kernels' numerics in plain torch: what a compiled kernel should give, element by element.

Key tiles are visited right to left. Units are log2: x = S * log2(e) where S is the scaled score,
m the running row maximum of x (it may lag by rescale_threshold), and per tile

    P   = 2 ** (x - m + offset)            rounded to P's format, saturating
    l   = l * a + sum(P * w)               fp32, from the unrounded P
    l_q = l_q * a + sum(round(P) * w)      fp32, from the rounded P
    O   = O * a + round(P) @ V

with a = 2 ** (m_old - m) and w = 1. Per-token V scales are folded into the exponent: x includes
log2(v_scale), which keeps P in range whatever the scales are, and w = 1 / v_scale makes l the true
sum again. At the end

    O / (l or l_q, by traits.exact_row_sum) * v_descale,    LSE = ln 2 * (m - max_offset + log2 l).

Products of codes are summed in fp64 and rounded to fp32 once a tile: fp8 products are then exact,
so that the result does not depend on how many rows or sequences ride together. With the accumulator
"sm90_fp8" they are summed as Hopper's tensor cores do, the scores among them; l_q then comes from a
column of ones beside V's, and x - m + offset from one FMA of S.

With policy.exp2 = "code" P's code comes straight from the logarithm: it is the integer next to
2 ** mantissa_bits * (x - m + offset + bias), from one FMA; m is rounded up, offset + bias - m down.
What the codes stand for is 2 ** code_excess_log2 times P in the mean, which enters where l or a
sink is compared with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attn_fp8.call import Operands
from flash_attn_fp8.formats import FORMATS, Format, saturating_cast
from flash_attn_fp8.plan import Split, TiledSpec
from flash_attn_fp8.policy import LN2, LOG2E, Fp8Policy
from flash_attn_fp8.problem import Problem
from flash_attn_fp8.reference import nonfinite
from flash_attn_fp8.reference.accumulate import accumulator_for, fma, narrow_scores
from flash_attn_fp8.reference.blocks import Block, blocks
from flash_attn_fp8.reference.combine import combine
from flash_attn_fp8.reference.output import Output

_NEG_INF = float("-inf")

# Elements of a score tile that is worked on at once: 8 MiB in fp32, near the caches' size.
_SCORES_AT_ONCE = 1 << 21

# 2**f - 1 = f - _CURVE f (1 - f) at f = 0, 1/2 and 1.
_CURVE = 4 * (1.5 - math.sqrt(2))
_NAN_CODE = 0x7F  # in both fp8 formats


@dataclass(frozen=True)
class TileStats:
    """What one visited tile did, handed to an observer: for evidence, never for the result.

    `alive` (n, hk, g, r) marks rows that had a maximum before the tile, `rescaled` those of them
    whose accumulator was rescaled; `p` (n, hk, g, r, tile) is P before rounding, under the running
    maximum `row_max` (n, hk, g, r), log2, 0 where a row has none.
    """

    alive: Tensor
    rescaled: Tensor
    p: Tensor
    row_max: Tensor


Observer = Callable[[TileStats], None]


def run(
    problem: Problem,
    operands: Operands,
    out: Tensor,
    lse: Tensor | None,
    *,
    spec: TiledSpec,
    split: Split,
    observer: Observer | None = None,
) -> None:
    """Fill `out` and `lse` (None: not wanted) with what a kernel of this spec would give."""
    output = Output(operands, problem, out, lse)
    for block in blocks(operands, problem, _SCORES_AT_ONCE, keys_at_once=spec.tile_n):
        output.store(block, *attend(block, problem, spec, split, observer))
    output.finish()


def attend(
    block: Block,
    problem: Problem,
    spec: TiledSpec,
    split: Split,
    observer: Observer | None = None,
) -> tuple[Tensor, Tensor]:
    """O (n, hk, g, r, dv) and LSE (n, hk, g, r) of one block, in fp32."""
    slots = block.k.shape[2]
    parts = split.parts(slots)
    if parts == 1:
        softmax = _OnlineSoftmax(block, problem, spec, block.sink, observer)
        softmax.visit_tiles(block.key_lo, block.key_hi)
        return softmax.finish()
    # Each sequence splits its own keys, so a row's bits do not depend on its neighbours.
    per_split = split.keys_per_split(block.keys, spec.tile_n)
    shortest, longest = _bounds(per_split, spec.tile_n, split.keys_per_split(slots, spec.tile_n))
    partials = []
    for part in range(parts):
        sink = block.sink if part == 0 else None
        softmax = _OnlineSoftmax(block, problem, spec, sink, observer)
        softmax.only_keys = (part * per_split, (part + 1) * per_split)
        softmax.visit_tiles(
            max(block.key_lo, part * shortest), min(block.key_hi, (part + 1) * longest)
        )
        partials.append(softmax.finish())
    out, lse = zip(*partials, strict=True)
    return combine(torch.stack(out), torch.stack(lse))


def _bounds(per_split: Tensor, tile_n: int, of_all_slots: int) -> tuple[int, int]:
    """Smallest and largest split of a block, without reading a device's memory."""
    if per_split.device.type == "cpu":
        return int(per_split.min()), int(per_split.max())
    return 0, of_all_slots


class _OnlineSoftmax:
    """Running maximum, sums and accumulator of one block over the tiles of one split."""

    def __init__(
        self,
        block: Block,
        problem: Problem,
        spec: TiledSpec,
        sink: Tensor | None,
        observer: Observer | None,
    ) -> None:
        self.block, self.problem, self.spec = block, problem, spec
        self.policy: Fp8Policy = spec.policy
        self.on_sm90 = spec.accumulator == "sm90_fp8"
        # Whether columns of ones beside V's sum up P as it was rounded.
        self.sums_in_product = self.on_sm90 and not problem.traits.exact_row_sum
        self.sink, self.observer = sink, observer
        self.only_keys: tuple[Tensor, Tensor] | None = None
        n, hk, g, r, _ = block.q.shape
        zeros = torch.zeros(n, hk, g, r, device=block.q.device)
        self.row_max = torch.full_like(zeros, _NEG_INF)
        self.row_sum = zeros
        self.row_sum_quantized = zeros.clone()
        columns = block.v.shape[-1] + self.sums_in_product
        self.acc = accumulator_for(
            spec, FORMATS[problem.traits.kv_format], (n, hk, g, r, columns), block.q.device
        )
        self.q = block.q.double()
        self.row_scale = self._row_scale()

    def _row_scale(self) -> Tensor:
        """What multiplies q.k of a row: softmax_scale and every scale constant along the keys."""
        # full, not tensor: a copy from the host would synchronise and break graph capture
        scale = torch.full(
            (1, 1, 1, 1, 1), self.problem.sizes.softmax_scale, device=self.block.q.device
        )
        if self.block.q_scale is not None:
            scale = scale * self.block.q_scale
        if self.block.k_scale is not None and not self._per_token("k"):
            scale = scale * self.block.k_scale[:, :, None, None]
        return scale

    def _per_token(self, operand: str) -> bool:
        kind = getattr(self.problem.traits, f"{operand}_descale")
        return kind is not None and kind.per_token

    def visit_tiles(self, lo: int, hi: int) -> None:
        """Visit the tiles that cover keys [lo, hi), right to left."""
        tile_n, slots = self.spec.tile_n, self.block.k.shape[2]
        for start in reversed(range(lo // tile_n * tile_n, min(hi, slots), tile_n)):
            self._visit(start, min(start + tile_n, slots))

    def _visit(self, lo: int, hi: int) -> None:
        s, factor = self._scores(lo, hi)
        v_scale = None
        if self._per_token("v") and self.block.v_scale is not None:
            v_scale = self.block.v_scale[:, :, None, None, lo:hi]
            if self.problem.traits.v_scale_in_exponent:
                s, factor = s * factor + torch.log2(v_scale), torch.ones_like(factor)
        visible = self._visible(lo, hi)
        x = (s * factor).masked_fill(~visible, _NEG_INF)
        rescale = self._update_max(x, self._top(s, factor, visible, x))
        shift = self.policy.max_offset - self._finite_max()
        log2_p = x + shift
        if self.on_sm90 or self.policy.exp2 != "exact":
            log2_p = fma(s, factor, shift).masked_fill(~visible, _NEG_INF)
        p = _exp2(log2_p)
        if self.policy.exp2 == "exact":
            rounded, weight = self._round(p, v_scale)
        else:
            at_zero = self.policy.max_offset + self.policy.format.exponent_bias
            octaves = fma(s, factor, -_upwards(self._finite_max().double() - at_zero))
            octaves = octaves.masked_fill(~visible, _NEG_INF)
            curved = self.policy.exp2 == "code_quadratic"
            rounded, weight = code_of(octaves, self.policy.format, curved).float(), 1.0
        self.row_sum = self.row_sum * rescale + _sum(p * self._sum_weight(v_scale))
        self.row_sum_quantized = self.row_sum_quantized * rescale + _sum(rounded * weight)
        self.acc.rescale(rescale)
        v = self.block.v[:, :, lo:hi].double()
        if self.sums_in_product:
            v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        self.acc.add(rounded, nonfinite.without(v), lo)
        terms = nonfinite.terms(rounded, visible, v)
        if terms is not None:
            self.acc.add_terms(terms)

    def _scores(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """Scores of a tile, and the factor of each row that makes x of them, without V's scale."""
        k = self.block.k[:, :, lo:hi]
        traits = self.problem.traits
        if self.on_sm90:
            formats = FORMATS[traits.q_format], FORMATS[traits.kv_format]
            s = narrow_scores(self.block.q, k, formats)
        else:
            s = torch.einsum("nhgrd,nhsd->nhgrs", self.q, k.double()).float()
        if self._per_token("k") and self.block.k_scale is not None:
            s = s * self.block.k_scale[:, :, None, None, lo:hi]
        softcap = self.problem.sizes.softcap
        if softcap:
            capped = torch.tanh(s * (self.row_scale / softcap)) * (softcap * LOG2E)
            return capped, torch.ones_like(self.row_scale)
        return s, self.row_scale * LOG2E

    def _visible(self, lo: int, hi: int) -> Tensor:
        """Which keys of a tile each row sees in this part, (n, 1, 1, r, hi - lo)."""
        sizes = self.problem.sizes
        visible = self.block.visible(lo, hi, sizes.window_left, sizes.window_right)
        if self.only_keys is not None:
            key = torch.arange(lo, hi, device=visible.device)
            first, last = (bound[:, None, None, None, None] for bound in self.only_keys)
            visible = visible & (key >= first) & (key < last)
        return visible

    def _top(self, s: Tensor, factor: Tensor, visible: Tensor, x: Tensor) -> Tensor:
        """The maximum of x; that codes are made with is not to be below it, so rounded up."""
        if self.policy.exp2 == "exact":
            return x.amax(-1)
        s_top = s.masked_fill(~visible, _NEG_INF).amax(-1)
        top = _upwards(s_top.double() * factor.double()[..., 0])
        return torch.where(s_top.isneginf(), _NEG_INF, top)

    def _update_max(self, x: Tensor, top: Tensor) -> Tensor:
        """Raise the running maximum where it lags behind x's by more than the threshold; return a.

        `top` is the maximum of x (`_top`).
        """
        old, new = self.row_max, torch.maximum(self.row_max, top)
        lag = torch.where(new.isneginf(), 0.0, new - old)
        keep = lag <= self.policy.rescale_threshold
        self.row_max = torch.where(keep, old, new)
        rescale = torch.where(keep, 1.0, _exp2(-lag))
        if self.observer is not None:
            alive = ~old.isneginf()
            finite = self._finite_max()
            p = _exp2(x - finite + self.policy.max_offset)
            self.observer(TileStats(alive, alive & ~keep, p, finite[..., 0]))
        return rescale

    def _finite_max(self) -> Tensor:
        """The maximum to subtract; 0 where a row has seen no key, so that P becomes 2**-inf = 0."""
        return torch.where(self.row_max.isneginf(), 0.0, self.row_max)[..., None]

    def _sum_weight(self, v_scale: Tensor | None) -> Tensor | float:
        """w of the exact sum: undoes a V scale that sits in the exponent."""
        if v_scale is None or not self.problem.traits.v_scale_in_exponent:
            return 1.0
        return 1.0 / v_scale

    def _round(self, p: Tensor, v_scale: Tensor | None) -> tuple[Tensor, Tensor | float]:
        """P as the tensor core reads it, and the w that makes its sum comparable to l."""
        fmt = self.policy.format
        if v_scale is not None and not self.problem.traits.v_scale_in_exponent:
            # No kernel does: `accuracy.policies` shows why.
            return saturating_cast(p * v_scale, fmt).float(), 1.0 / v_scale
        return saturating_cast(p, fmt).float(), self._sum_weight(v_scale)

    def finish(self) -> tuple[Tensor, Tensor]:
        """Add the sink, normalise, apply V's scale; O and LSE."""
        top, offset = self.row_max, self.policy.max_offset
        excess = self.policy.code_excess_log2
        rescale = torch.ones_like(top)
        in_sink: Tensor | float = 0.0
        if self.sink is not None:
            # A sink far above every score would overflow 2**(sink - m): raise m to it first.
            sink = (self.sink * LOG2E).clamp(max=torch.finfo(torch.float32).max)
            top = torch.maximum(self.row_max, sink)
            finite = torch.where(top.isneginf(), 0.0, top)
            # 0 for a row without keys: 2**(0 - sink) could be inf, and 0 * inf is NaN
            lag = torch.where(self.row_max.isneginf(), 0.0, self.row_max - finite)
            rescale = torch.where(self.row_max.isneginf(), 0.0, _exp2(lag))
            in_sink = _exp2(sink - finite + (offset + excess))
        acc, used = self.acc.value(), self.row_sum_quantized
        if self.problem.traits.exact_row_sum:
            used = self.row_sum * 2.0**excess
        elif self.sums_in_product:
            acc, used = acc[..., :-1], acc[..., -1]
        total = used * rescale + in_sink
        out = acc * (rescale / torch.where(total == 0, 1.0, total))[..., None]
        if self.block.v_scale is not None and not self._per_token("v"):
            out = out * self.block.v_scale[:, :, None, None]
        lse = LN2 * (self._finite_max()[..., 0] - offset + torch.log2(self.row_sum))
        return out, lse if self.sink is None else _logaddexp(lse, self.sink)


def _logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """In fp64, rounded once: torch's fp32 kernel gives a tensor's last elements other bits."""
    return torch.logaddexp(a.double(), b.double()).float()


def _exp2(x: Tensor) -> Tensor:
    """2 ** x, correctly rounded but for ties.

    torch.exp2 gives the last elements of a tensor, which it does not vectorise, other bits.
    """
    return torch.exp(x.double() * LN2).float()


def _sum(p: Tensor) -> Tensor:
    """Row sums of a tile, rounded once.

    The order of fp32 additions would follow the width of a tile, which neighbours decide.
    """
    return p.sum(-1, dtype=torch.float64).float()


def _upwards(x: Tensor) -> Tensor:
    """fp64 as fp32, rounded towards infinity."""
    nearest = x.float()
    above = torch.nextafter(nearest, torch.full_like(nearest, math.inf))
    return torch.where(nearest.double() < x, above, nearest)


def code_of(octaves: Tensor, fmt: Format, curved: bool) -> Tensor:
    """P in an fp8 format straight from its logarithm: an fp8 bit pattern is nearly linear in log2.

    `octaves` is log2 P + the exponent bias, so that code = round(2**mantissa_bits * octaves), ties
    to even, clamped to [0, largest]; `curved` adds a quadratic correction of the fraction. Below
    the normal range the map no longer holds: P there comes out smaller than it is, and 0 at last.
    """
    codes_per_octave = 2**fmt.mantissa_bits
    octaves = octaves.clamp(min=-1.0)  # NaN stays NaN
    if curved:
        fraction = octaves - octaves.floor()
        octaves = octaves - _CURVE * fraction * (1 - fraction)
    largest = int(torch.tensor(fmt.max).to(fmt.dtype).view(torch.uint8))
    code = (codes_per_octave * octaves).round().clamp(0, largest)
    codes: Tensor = code.nan_to_num(nan=_NAN_CODE).to(torch.uint8).view(fmt.dtype)
    return codes
