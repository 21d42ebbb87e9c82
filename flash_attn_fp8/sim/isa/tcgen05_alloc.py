"""`tcgen05.alloc`, `.dealloc` and `.relinquish_alloc_permit`: columns of tensor memory.

With `.cta_group::2` one warp of each CTA of the pair takes part, and the first blocks until the
second has come; both CTAs then get, or free, the same columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import numpy as np

from flash_attn_fp8.sim.barriers import Wait, wake_all
from flash_attn_fp8.sim.errors import TensorMemoryMisuse, Unmodelled
from flash_attn_fp8.sim.memory import OFFSET_MASK, TMEM_COLUMNS
from flash_attn_fp8.sim.state import Cta, Warp


@dataclass
class Meeting:
    """A collective operation of a pair that one CTA has begun."""

    operation: str
    first: int  # column; of an allocation, known once it is complete
    columns: int
    arrived: list[Warp] = field(default_factory=list)
    complete: bool = False
    waiters: list[Warp] = field(default_factory=list)


def pair(cta: Cta) -> tuple[Cta, Cta]:
    """The CTAs of `.cta_group::2`, the even rank first."""
    ctas = cta.cluster.ctas
    if len(ctas) % 2:
        raise Unmodelled(f"cta_group::2 in a cluster of {len(ctas)} CTAs")
    even = cta.rank & ~1
    return ctas[even], ctas[even + 1]


def group(cta: Cta, ctas: int) -> tuple[Cta, ...]:
    """The CTAs of `.cta_group::{ctas}`."""
    return (cta,) if ctas == 1 else pair(cta)


def allocate(warp: Warp, ctas: int, address: int, columns: int) -> Wait | None:
    """Take columns, or wait for them; their address goes to shared memory at `address`."""
    if columns not in (32, 64, 128, 256, 512):
        raise TensorMemoryMisuse(
            f"{warp.name} allocates {columns} columns: not a power of 2 from 32 to {TMEM_COLUMNS}"
        )
    members = group(warp.cta, ctas)
    if warp.token is None:
        _check_group(warp.cta, ctas)
        if not warp.cta.may_allocate_tensor:
            raise TensorMemoryMisuse(
                f"{warp.name} allocates {columns} columns of {warp.cta.tensor.name} after "
                f"tcgen05.relinquish_alloc_permit"
            )
    meeting, wait = _meet(warp, "alloc", -1, columns, members)
    if wait is not None:
        return wait
    if not meeting.complete:
        first = _common_free(members, columns)
        if first is None:
            return _wait_for_columns(warp, columns, members)
        meeting.first = first
        for cta in members:
            cta.tensor.allocate(first, columns)
        _end(meeting)
    warp.token = None
    _store_address(warp, address, meeting.first)
    return None


def deallocate(warp: Warp, ctas: int, address: int, columns: int) -> Wait | None:
    """Give columns back."""
    if address >> 16:
        raise TensorMemoryMisuse(f"{warp.name} frees tensor memory at {address:#x}: not at lane 0")
    tensor = warp.cta.tensor
    members = group(warp.cta, ctas)
    if warp.token is None:
        _check_group(warp.cta, ctas)
        warp.settle_loads()
        tensor.check_free(address, columns, warp.access())
    meeting, wait = _meet(warp, "dealloc", address, columns, members)
    if wait is not None:
        return wait
    if not meeting.complete:
        for cta in members:
            cta.tensor.free(address)
            cta.tensor_waiters.wake()
        _end(meeting)
    warp.token = None
    return None


def relinquish(warp: Warp, ctas: int) -> None:
    """This CTA allocates no more."""
    _check_group(warp.cta, ctas)
    warp.cta.may_allocate_tensor = False


def _common_free(members: tuple[Cta, ...], columns: int) -> int | None:
    for first in range(0, TMEM_COLUMNS, columns):
        if not any(cta.tensor.allocated[first : first + columns].any() for cta in members):
            return first
    return None


def _wait_for_columns(warp: Warp, columns: int, members: tuple[Cta, ...]) -> Wait:
    tensor = warp.cta.tensor

    def describe() -> str:
        return (
            f"tcgen05.alloc of {columns} columns of {tensor.name}, of which "
            f"{int(tensor.allocated.sum())} are allocated"
        )

    waiters = warp.cta.tensor_waiters
    return Wait(waiters, lambda: _common_free(members, columns) is not None, describe)


def _meet(
    warp: Warp, operation: str, first: int, columns: int, members: tuple[Cta, ...]
) -> tuple[Meeting, Wait | None]:
    """The collective operation, and what to wait for until every member has come."""
    open_meetings = members[0].tensor.meetings
    if warp.token is None:
        meeting = open_meetings.setdefault(operation, Meeting(operation, first, columns))
        _join(meeting, warp, first, columns)
        if len(meeting.arrived) == len(members):
            del open_meetings[operation]
        warp.token = meeting
    else:
        meeting = cast("Meeting", warp.token)
    if meeting.complete or (len(meeting.arrived) == len(members) and warp is meeting.arrived[-1]):
        return meeting, None
    return meeting, Wait(
        meeting,
        lambda: meeting.complete,
        lambda: f"the peer CTA's part of tcgen05.{operation}.cta_group::2",
    )


def _join(meeting: Meeting, warp: Warp, first: int, columns: int) -> None:
    for other in meeting.arrived:
        if (meeting.first, meeting.columns) != (first, columns) or other.cta is warp.cta:
            raise TensorMemoryMisuse(
                f"{warp.name} begins tcgen05.{meeting.operation} of {columns} columns while "
                f"{other.name} is in one of {meeting.columns}"
            )
    meeting.arrived.append(warp)


def _end(meeting: Meeting) -> None:
    meeting.complete = True
    wake_all(meeting.waiters)


def _store_address(warp: Warp, address: int, first: int) -> None:
    value = np.frombuffer(first.to_bytes(4, "little"), np.uint8).reshape(1, 4)
    cta = warp.cluster.cta_of(address)
    cta.shared.write(np.array([address & OFFSET_MASK]), value, warp.access())


def _check_group(cta: Cta, ctas: int) -> None:
    """All tcgen05 instructions of a kernel have one `.cta_group`."""
    if cta.tensor.cta_group not in (0, ctas):
        raise TensorMemoryMisuse(
            f"tcgen05 with cta_group::{ctas} in {cta.name}, which has used "
            f"cta_group::{cta.tensor.cta_group}"
        )
    cta.tensor.cta_group = ctas
