"""Mbarriers of the SM100 forward kernel, by name, and how their phases are counted.

Every user of a barrier counts how often it has used it. Use number `i` of a ring of `slots` is slot
`i % slots` in round `i // slots`; a consumer waits for the round's parity, a producer for the other
one, which a fresh barrier passes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64, const_expr
from cutlass.cute.nvgpu import tcgen05

from flash_attn_fp8.kernels.sm100.geometry import (
    CORRECTION_WARPS,
    S_SLOTS,
    SOFTMAX_WARPS,
    TOKEN_SCALE_SLOTS,
    Geometry,
)


@dataclass(frozen=True)
class Ring:
    """Full and empty barriers of `slots` buffers, and how many arrive at each."""

    slots: int
    producers: int
    consumers: int
    _full: Any
    _empty: Any

    @classmethod
    def of(cls, smem, slots: int, producers: int = 1, consumers: int = 1) -> Ring:
        full, empty = (smem.allocate_array(Int64, slots) for _ in range(2))
        return cls(slots, producers, consumers, full, empty)

    def init(self) -> None:
        for slot in range(self.slots):
            cute.arch.mbarrier_init(self._full + slot, self.producers)
            cute.arch.mbarrier_init(self._empty + slot, self.consumers)

    def slot(self, use):
        return use % self.slots

    def full(self, use):
        return self._full + self.slot(use)

    def empty(self, use):
        return self._empty + self.slot(use)

    def wait_full(self, use) -> None:
        cute.arch.mbarrier_wait(self.full(use), (use // self.slots) & 1)

    def wait_empty(self, use) -> None:
        cute.arch.mbarrier_wait(self.empty(use), ((use // self.slots) & 1) ^ 1)

    def wait_all_empty(self, uses) -> None:
        """Wait until all of so many uses are over; slots that were never used pass at once."""
        for slot in range(self.slots):
            self.wait_empty(uses + slot)


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
class Signal:
    """`slots` barriers that say that something has happened, after so many arrivals."""

    slots: int
    arrivals: int
    _barrier: Any

    @classmethod
    def of(cls, smem, slots: int, arrivals: int) -> Signal:
        return cls(slots, arrivals, smem.allocate_array(Int64, slots))

    def init(self) -> None:
        for slot in range(self.slots):
            cute.arch.mbarrier_init(self._barrier + slot, self.arrivals)

    def at(self, slot):
        return self._barrier + slot

    def wait(self, slot, use) -> None:
        """Wait for use number `use` of a slot."""
        cute.arch.mbarrier_wait(self.at(slot), use & 1)

    def wait_previous(self, slot, use) -> None:
        """Wait for use number `use - 1`; there is nothing before number 0."""
        cute.arch.mbarrier_wait(self.at(slot), (use & 1) ^ 1)


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
def arrive(barrier, cta: cutlass.Constexpr = None):
    """One arrival for a warp whose lanes have all done what they announce.

    At the barrier of CTA `cta` of a pair; by default of its own.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, cta)


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
