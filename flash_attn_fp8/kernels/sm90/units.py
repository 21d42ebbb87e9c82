"""Which unit of work a CTA takes next: every so many, or the next one that nobody has taken.

Where units differ in length (bounds, packed sequences), the load warp claims them one by one from
a counter that all CTAs share, and tells the other warps through a ring in shared memory. A CTA's
first unit is its own number, so that nothing waits for the counter. Who works on a unit decides
none of its bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from flash_attn_fp8.kernels.forward.rings import Ring, arrive


@dataclass(frozen=True)
class Claims:
    """Numbers of claimed units, on their way from the load warp to the others."""

    ring: Ring
    numbers: cute.Tensor  # (slot,)
    counter: cute.Tensor  # (1,): units claimed by all CTAs, beyond the first of each


@cute.jit
def claim(claims: cutlass.Constexpr, count: Int32) -> Int32:
    """For the load warp: the unit after its `count`th."""
    ring = claims.ring
    ring.wait_empty(count)
    # The kernel before, if there is one, makes the counter 0; a unit without keys has not waited.
    cute.arch.griddepcontrol_wait()
    number = Int32(0)
    if cute.arch.lane_idx() == 0:
        claimed = cute.arch.atomic_add(claims.counter.iterator, Int32(1), scope="gpu")
        number = Int32(claimed) + cute.arch.grid_dim()[0]
        claims.numbers[ring.slot(count)] = number
    arrive(ring.full(count))
    return cute.arch.shuffle_sync(number, 0)


@cute.jit
def hear(claims: cutlass.Constexpr, count: Int32) -> Int32:
    """For every other warp: what the load warp claimed."""
    ring = claims.ring
    ring.wait_full(count)
    number = claims.numbers[ring.slot(count)]
    arrive(ring.empty(count))
    return number
