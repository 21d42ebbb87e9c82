"""Mbarriers, and how their phases are counted.

Every user of a barrier counts how often it has used it. Use number `i` of a ring of `slots` is slot
`i % slots` in round `i // slots`; a consumer waits for the round's parity, a producer for the other
one, which a fresh barrier passes at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64


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
        return _divided(use, self.slots)[1]

    def full(self, use):
        return self._full + self.slot(use)

    def empty(self, use):
        return self._empty + self.slot(use)

    def wait_full(self, use) -> None:
        cute.arch.mbarrier_wait(self.full(use), _divided(use, self.slots)[0] & 1)

    def wait_empty(self, use) -> None:
        cute.arch.mbarrier_wait(self.empty(use), (_divided(use, self.slots)[0] & 1) ^ 1)

    def wait_all_empty(self, uses) -> None:
        """Wait until all of so many uses are over; slots that were never used pass at once."""
        for slot in range(self.slots):
            self.wait_empty(uses + slot)


def _divided(use, slots: int):
    """(round, slot) of a use. Counts are not negative, which a compiler does not know."""
    if slots & (slots - 1):
        return use // slots, use % slots
    return use >> slots.bit_length() - 1, use & slots - 1


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


@cute.jit
def arrive(barrier, cta: cutlass.Constexpr = None):
    """One arrival for a warp whose lanes have all done what they announce.

    At the barrier of CTA `cta` of a pair; by default of its own.
    """
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(barrier, cta)
