"""What happens before what: actors, vector clocks, and the shadow of a memory.

The machine gives every operation its effect at once. Whether the program may rely on that effect is
a question of order, and this module keeps the books for it:

* An *actor* is whatever makes accesses in an order of its own: a warp; the tensor core as fed by
  one warp; the bytes that complete on one mbarrier; the bulk stores of one warp. An access is
  stamped with its actor and the actor's *epoch*.
* A *clock* says up to which epoch of each actor its owner has observed. A warp has one per proxy:
  `generic` orders its own loads and stores, `async_` orders the operations that it starts on the
  asynchronous proxy (TMA, tensor core). Barriers hand both on. A generic write enters `async_`
  only by `fence.proxy.async`, at the writer or downstream; so a missing fence is a missing order.
* A successful wait for a phase of an mbarrier is itself an event, of an actor of its own. The next
  phase must not end before it, or else the wait, had it been late, would have missed its phase.
  Whatever was caused by it counts here, relaxed or not.
* A *shadow* remembers the last write and the reads since, place by place, and finds those that the
  clock of a later access has not observed: a race, whether or not the numbers came out right. When
  a CTA exits, its warps together must have observed everything that its shared memory's shadow has.

Bytes that complete on an mbarrier are stamped (mbarrier, phase): who has waited for the phase has
seen them, and phases complete in order. The tensor core works through one warp's operations in
order, so its stamp is a count, and a commit hands that count to an mbarrier.

Not judged: lanes of one warp against each other, and global memory.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numba import njit

from flash_attn_fp8.sim.errors import Unmodelled

_MAX_ACTORS = 1024
_FIRST_READERS = 16
_MAX_SITES = 3  # remembered for a stamp: a report need not name more


class Access(NamedTuple):
    """One operation's view of order: its stamp, and the clock that must cover what it meets.

    `clock` must cover the writes that it meets, `clock_reads` the reads where it writes. An actor
    that works `in_order` (a warp, the tensor core) needs neither for what it did itself.
    """

    actor: int
    epoch: int
    clock: np.ndarray
    clock_reads: np.ndarray
    in_order: bool


@dataclass
class Clocks:
    """The clocks of one warp, or those that a barrier carries.

    `time` is how long the longest chain of instructions behind it is: what a trace draws.
    """

    generic: np.ndarray
    async_: np.ndarray
    time: int = 0

    @classmethod
    def zero(cls) -> Clocks:
        return cls(np.zeros(_MAX_ACTORS, np.uint32), np.zeros(_MAX_ACTORS, np.uint32))

    def join(self, other: Clocks) -> None:
        np.maximum(self.generic, other.generic, out=self.generic)
        np.maximum(self.async_, other.async_, out=self.async_)
        self.time = max(self.time, other.time)

    def observe(self, actor: int, epoch: int) -> None:
        """An asynchronous operation is complete: every proxy sees it."""
        if self.generic[actor] < epoch:
            self.generic[actor] = epoch
        if self.async_[actor] < epoch:
            self.async_[actor] = epoch

    def copy(self) -> Clocks:
        return Clocks(self.generic.copy(), self.async_.copy(), self.time)

    def clear(self) -> None:
        self.generic[:] = 0
        self.async_[:] = 0
        self.time = 0


class Actors:
    """Numbers for actors, and their names for reports."""

    def __init__(self) -> None:
        self._number: dict[Hashable, int] = {}
        self.names: list[str] = []
        self.waits: list[int] = []  # the actors that are warps' waits
        self.site: object = None  # what executes now; its text is for reports
        self._sites: dict[tuple[int, int, str, bool], list[object]] = {}

    def number(self, key: Hashable, name: str) -> int:
        found = self._number.get(key)
        if found is None:
            found = self._number[key] = len(self.names)
            if found >= _MAX_ACTORS:
                raise Unmodelled(f"more than {_MAX_ACTORS} actors in one cluster")
            self.names.append(name)
        return found

    def number_of_waits(self, key: Hashable, name: str) -> int:
        """The number of the actor that a warp's waits are."""
        found = self.number(key, name)
        if found not in self.waits:
            self.waits.append(found)
        return found

    def note(self, access: Access, memory: str, writes: bool) -> None:
        """What executes now makes this access of the memory."""
        sites = self._sites.setdefault((access.actor, access.epoch, memory, writes), [])
        if self.site not in sites and len(sites) < _MAX_SITES:
            sites.append(self.site)

    def whence(self, actor: int, epoch: int, memory: str, writes: bool) -> str:
        """Where the operations of that stamp were, for reports."""
        sites = self._sites.get((actor, epoch, memory, writes), [])
        return " or ".join(str(site) for site in sites if site is not None)


class Conflict(NamedTuple):
    """What a shadow found: at `place` (a granule), against `actor` at `epoch`."""

    place: int
    actor: int
    epoch: int
    earlier_was_write: bool


class Shadow:
    """Last write and later reads of each granule of a memory."""

    def __init__(self, granules: int) -> None:
        self.write_actor = np.full(granules, -1, np.int32)
        self.write_epoch = np.zeros(granules, np.uint32)
        self.reads = np.zeros((granules, _FIRST_READERS), np.uint32)
        self._slots: dict[int, int] = {}
        self._slot_actor = np.zeros(_FIRST_READERS, np.int32)

    def _slot(self, actor: int) -> int:
        slot = self._slots.get(actor)
        if slot is None:
            slot = self._slots[actor] = len(self._slots)
            if slot == self.reads.shape[1]:
                self.reads = np.concatenate([self.reads, np.zeros_like(self.reads)], 1)
                self._slot_actor = np.concatenate([self._slot_actor, self._slot_actor])
            self._slot_actor[slot] = actor
        return slot

    def read(self, places: np.ndarray, span: int, access: Access) -> Conflict | None:
        """Granules [p, p + span) for each p of `places` are read."""
        bad = _read(
            self.write_actor, self.write_epoch, self.reads, places, span,
            access.actor if access.in_order else -1,
            np.uint32(access.epoch), access.clock, self._slot(access.actor),
        )  # fmt: skip
        if bad < 0:
            return None
        return Conflict(bad, int(self.write_actor[bad]), int(self.write_epoch[bad]), True)

    def write(self, places: np.ndarray, span: int, access: Access) -> Conflict | None:
        """The same granules are written."""
        bad, slot = _write(
            self.write_actor, self.write_epoch, self.reads, self._slot_actor, len(self._slots),
            places, span, access.actor, access.actor if access.in_order else -1,
            np.uint32(access.epoch), access.clock, access.clock_reads,
        )  # fmt: skip
        if bad < 0:
            return None
        if slot < 0:
            return Conflict(bad, int(self.write_actor[bad]), int(self.write_epoch[bad]), True)
        actor = int(self._slot_actor[slot])
        return Conflict(bad, actor, int(self.reads[bad, slot]), False)

    def unobserved(self, clock: np.ndarray) -> Conflict | None:
        """A use, of any granule, that the clock does not cover."""
        known = np.append(clock, np.uint32(0xFFFFFFFF))  # of actor -1: nobody wrote it
        bad = np.flatnonzero(self.write_epoch > known[self.write_actor])
        if bad.size:
            at = int(bad[0])
            return Conflict(at, int(self.write_actor[at]), int(self.write_epoch[at]), True)
        slots = len(self._slots)
        late = self.reads[:, :slots] > clock[self._slot_actor[:slots]]
        if not late.any():
            return None
        at, slot = (int(i) for i in np.argwhere(late)[0])
        return Conflict(at, int(self._slot_actor[slot]), int(self.reads[at, slot]), False)

    def forget(self, places: np.ndarray, span: int) -> None:
        """Nobody has used the granules [p, p + span) for each p of `places`."""
        for place in places.tolist():
            self.write_actor[place : place + span] = -1
            self.reads[place : place + span] = 0


@njit(cache=True, nogil=True)
def _read(write_actor, write_epoch, reads, places, span, itself, epoch, clock, slot):  # type: ignore[no-untyped-def]
    for i in range(places.size):
        for g in range(places[i], places[i] + span):
            writer = write_actor[g]
            if writer >= 0 and writer != itself and write_epoch[g] > clock[writer]:
                return g
            reads[g, slot] = epoch
    return -1


@njit(cache=True, nogil=True)
def _write(  # type: ignore[no-untyped-def]
    write_actor, write_epoch, reads, slot_actor, n_slots,
    places, span, actor, itself, epoch, clock, clock_reads,
):  # fmt: skip
    for i in range(places.size):
        for g in range(places[i], places[i] + span):
            writer = write_actor[g]
            if writer >= 0 and writer != itself and write_epoch[g] > clock[writer]:
                return g, -1
            for slot in range(n_slots):
                seen = reads[g, slot]
                if seen:
                    reader = slot_actor[slot]
                    if reader != itself and seen > clock_reads[reader]:
                        return g, slot
                    reads[g, slot] = 0
            write_actor[g] = actor
            write_epoch[g] = epoch
    return -1, -1
