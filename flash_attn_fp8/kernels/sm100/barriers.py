"""Mbarriers of the SM100 forward kernel, by name (`forward/rings.py` says how they count)."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import tcgen05

from flash_attn_fp8.kernels.forward.geometry import TOKEN_SCALE_SLOTS
from flash_attn_fp8.kernels.forward.rings import Ring, Signal, arrive
from flash_attn_fp8.kernels.sm100.geometry import (
    CORRECTION_WARPS,
    S_SLOTS,
    SOFTMAX_WARPS,
    Geometry,
)

# K and V tiles share a ring, in the order in which the MMA warp reads them: K of the first
# `lookahead` key tiles, then V of each, and after it K of the tile that is `lookahead` ahead. A
# unit of work of `n` key tiles, before which the CTA had `tiles`, uses the ring `2 * n` times.


def k_use(geometry, tiles, i):
    """Which use of the ring is K of key tile `i` of a unit."""
    return tiles * 2 + i + cutlass.max(i + 1 - geometry.lookahead, 0)


def v_use(geometry, tiles, n, i):
    """Which use of the ring is V of key tile `i` of a unit of `n`."""
    return tiles * 2 + i + cutlass.min(i + geometry.lookahead, n)


@dataclass(frozen=True)
class Barriers:
    """All of them. A score tile's slot and an output's stage are both called `slot` here."""

    q: Ring  # load -> mma
    kv: Ring  # load -> mma
    s_full: Signal  # mma -> softmax
    p_full: Signal  # softmax and correction -> mma: P is written, O is rescaled
    o_full: Signal  # mma -> correction
    scale_full: Signal  # softmax -> correction: a factor for each row
    scale_empty: Signal
    tail_asked: Signal  # mma -> tail: the first V tile of a unit is there
    tail_clean: Signal  # tail -> mma: it holds nothing past the sequence's end
    token_scales: Ring  # scales -> softmax: what belongs to each key of a tile

    @classmethod
    def of(cls, smem, geometry: Geometry) -> Barriers:
        stages = geometry.q_stage
        return cls(
            q=Ring.of(smem, geometry.q_slots),
            kv=Ring.of(smem, geometry.kv_slots),
            s_full=Signal.of(smem, S_SLOTS, 1),
            p_full=Signal.of(smem, S_SLOTS, geometry.ctas * (SOFTMAX_WARPS + CORRECTION_WARPS)),
            o_full=Signal.of(smem, stages, 1),
            scale_full=Signal.of(smem, stages, SOFTMAX_WARPS),
            scale_empty=Signal.of(smem, stages, CORRECTION_WARPS),
            tail_asked=Signal.of(smem, 1, 1),
            tail_clean=Signal.of(smem, 1, 1),
            token_scales=Ring.of(smem, TOKEN_SCALE_SLOTS, 1, SOFTMAX_WARPS * stages),
        )

    def init(self) -> None:
        """By one thread, before the CTA synchronises."""
        for group in vars(self).values():
            group.init()


@cute.jit
def arrive_at_leader(geometry: cutlass.Constexpr, barrier):
    """One arrival for a warp at the CTA whose MMA warp issues: rank 0 of a pair, or its own."""
    arrive(barrier, None if geometry.ctas == 1 else 0)


@cute.jit
def commit(geometry: cutlass.Constexpr, barrier):
    """Arrive at `barrier`, in all CTAs, when the tensor core has done everything issued before."""
    with cute.arch.elect_one():
        if const_expr(geometry.ctas == 1):
            tcgen05.commit(barrier)
        else:
            tcgen05.commit(barrier, 0b11, tcgen05.CtaGroup.TWO)
