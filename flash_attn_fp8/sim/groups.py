"""Async-groups: operations that a thread commits together and waits for in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flash_attn_fp8.sim.barriers import Wait, wake_all
from flash_attn_fp8.sim.errors import Unmodelled

if TYPE_CHECKING:
    from flash_attn_fp8.sim.state import Pending, Warp


@dataclass(eq=False)
class BulkGroups:
    """Bulk async-groups of one thread. A group's number is the epoch of its operations' reads.

    `actor` reads shared memory. What operations write goes to global memory, whose order is not
    judged, so `wait_group` without `.read` waits longer but observes no more.
    """

    name: str
    actor: int
    committed: int = 0
    reading: Counter[int] = field(default_factory=Counter)
    writing: Counter[int] = field(default_factory=Counter)
    waiters: list[Warp] = field(default_factory=list)

    @property
    def open(self) -> int:
        """The number of the group that takes operations now."""
        return self.committed + 1

    def start(self, pending: Pending) -> None:
        """An operation begins that is part of the open group."""
        group = self.open
        self.reading[group] += 1
        self.writing[group] += 1

        def written() -> None:
            self._finish(self.writing, group)

        def read() -> None:
            self._finish(self.reading, group)
            pending.add(written)

        pending.add(read)

    def _finish(self, outstanding: Counter[int], group: int) -> None:
        outstanding[group] -= 1
        if not outstanding[group]:
            del outstanding[group]
        wake_all(self.waiters)

    def commit(self) -> None:
        self.committed += 1

    def wait(self, warp: Warp, pending_groups: int, reads_only: bool) -> Wait | None:
        """Wait until at most that many of the latest groups are pending, and observe the others."""
        target = self.committed - pending_groups
        outstanding = self.reading if reads_only else self.writing

        def ready() -> bool:
            return not any(group <= target for group in outstanding)

        if not ready():
            what = "reads of " if reads_only else ""
            return Wait(
                self,
                ready=ready,
                describe=lambda: f"for {what}{self.name}, group {target} of {self.committed}",
            )
        if target > 0:
            warp.clocks.observe(self.actor, target)
        return None


@dataclass(eq=False)
class CopyGroups:
    """`cp.async` groups of a warp's lanes.

    Operations are numbered by `serial`, which grows with every commit and every
    `cp.async.mbarrier.arrive`; `commits` has the serial and the lanes of each commit. Operations of
    one warp complete in their order (the manual promises none), which is what lets an arrival wait
    for those before it. They belong to the generic proxy: observing them needs no more for it, and
    a proxy fence for the asynchronous one.
    """

    name: str
    actor: int
    serial: int = 0
    commits: list[tuple[int, int]] = field(default_factory=list)
    uncommitted: int = 0  # lanes with operations that they have not committed
    outstanding: Counter[int] = field(default_factory=Counter)
    waiters: list[Warp] = field(default_factory=list)

    @property
    def channel(self) -> tuple[str, int]:
        """Operations complete in its order."""
        return ("cp.async", self.actor)

    @property
    def epoch(self) -> int:
        """The stamp of an operation that starts now."""
        return self.serial + 1

    def start(self, pending: Pending, mask: int) -> None:
        """An operation of the lanes `mask` begins."""
        epoch = self.epoch
        self.uncommitted |= mask
        self.outstanding[epoch] += 1

        def finish() -> None:
            self.outstanding[epoch] -= 1
            if not self.outstanding[epoch]:
                del self.outstanding[epoch]
            wake_all(self.waiters)

        pending.add(finish, self.channel)

    def commit(self, mask: int) -> None:
        if self.uncommitted & ~mask:
            raise Unmodelled(
                f"lanes {mask:#010x} commit a cp.async group while lanes "
                f"{self.uncommitted & ~mask:#010x} of the warp have copies of their own open"
            )
        self.serial += 1
        self.commits.append((self.serial, mask))
        self.uncommitted = 0

    def arrive(self, pending: Pending, arrival: Callable[[int], None]) -> None:
        """Call `arrival(epoch)` once the operations so far are complete; they have that epoch."""
        self.serial += 1
        epoch = self.serial
        pending.add(lambda: arrival(epoch), self.channel)

    def wait(self, warp: Warp, mask: int, pending_groups: int) -> Wait | None:
        """The lanes `mask` wait until at most that many of their latest groups are pending."""
        target = self._target(mask, pending_groups)

        def ready() -> bool:
            return not any(epoch <= target for epoch in self.outstanding)

        if not ready():
            return Wait(
                self,
                ready=ready,
                describe=lambda: f"for {self.name}, all but the last {pending_groups} groups",
            )
        generic = warp.clocks.generic
        generic[self.actor] = max(int(generic[self.actor]), target)
        return None

    def _target(self, mask: int, pending_groups: int) -> int:
        """The last serial that all of the lanes have waited for; 0 for none."""
        latest = self.commits[-pending_groups - 1 :]
        if len(latest) == pending_groups + 1 and all(lanes & mask == mask for _, lanes in latest):
            return latest[0][0]
        targets = []
        for lane in range(32):
            if mask >> lane & 1:
                own = [serial for serial, lanes in self.commits if lanes >> lane & 1]
                if len(own) > pending_groups:
                    targets.append(own[-pending_groups - 1])
        return min(targets, default=0)


def bulk_groups(warp: Warp, lane: int) -> BulkGroups:
    """Those of one lane, made at first use."""
    key = ("bulk", lane)
    found = warp.groups.get(key)
    if found is None:
        what = "bulk copies" if lane == 0 else f"bulk copies by lane {lane}"
        actor = warp.own_actor(f"bulk read {lane}", what)
        found = warp.groups[key] = BulkGroups(f"{what} of {warp.name}", actor)
    if not isinstance(found, BulkGroups):
        raise TypeError(f"{key} are {type(found).__name__}, not bulk groups")
    return found


def copy_groups(warp: Warp) -> CopyGroups:
    """Those of a warp, made at first use."""
    key = ("cp.async", 0)
    found = warp.groups.get(key)
    if found is None:
        actor = warp.own_actor("cp.async", "cp.async copies")
        found = warp.groups[key] = CopyGroups(f"cp.async copies of {warp.name}", actor)
    if not isinstance(found, CopyGroups):
        raise TypeError(f"{key} are {type(found).__name__}, not groups of cp.async")
    return found
