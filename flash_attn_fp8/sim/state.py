"""What a running kernel is made of: warps, CTAs, and the cluster that shares their barriers."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flash_attn_fp8.sim.barriers import Mbarrier, NamedBarrier, Wait, wake_all
from flash_attn_fp8.sim.decode import COUNTS
from flash_attn_fp8.sim.engine import EXITED
from flash_attn_fp8.sim.errors import BarrierMisuse, OutOfBounds, Race
from flash_attn_fp8.sim.memory import (
    OFFSET_MASK,
    RANK_SHIFT,
    Checks,
    GlobalMemory,
    SharedMemory,
    TensorMemory,
)
from flash_attn_fp8.sim.order import Access, Actors, Clocks

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Code
    from flash_attn_fp8.sim.groups import BulkGroups, CopyGroups
    from flash_attn_fp8.sim.launch import Launch
    from flash_attn_fp8.sim.schedule import Schedule

WARP_SIZE = 32
ALL_LANES = 0xFFFFFFFF
_BIT = 1 << np.arange(WARP_SIZE, dtype=np.int64)


@dataclass(frozen=True)
class Converge:
    """A `.sync` instruction needs the lanes `required` together, and some are elsewhere."""

    required: int


@dataclass
class Pending:
    """Asynchronous completions that are due, in the order that the schedule gives them.

    Operations of one `channel` complete in their order; others in any.
    """

    schedule: Schedule
    _heap: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _last: dict[object, int] = field(default_factory=dict)
    _serial: int = 0
    now: int = 0

    def add(self, completion: Callable[[], None], channel: object = None) -> None:
        delay = self.schedule.delay()
        if delay == 0 and channel not in self._last:
            completion()
            return
        due = self.now + delay
        if channel is not None:
            due = self._last[channel] = max(due, self._last.get(channel, 0))
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, completion))

    def deliver(self, until: int) -> None:
        """Let everything happen that is due at `until`."""
        self.now = until
        while self._heap and self._heap[0][0] <= until:
            heapq.heappop(self._heap)[2]()
        if not self._heap:
            self._last.clear()

    def deliver_next(self) -> bool:
        """Nobody can go on: let the next completion happen. False where none is due."""
        if not self._heap:
            return False
        self.deliver(max(self.now, self._heap[0][0]))
        return True


@dataclass
class Cluster:
    """CTAs that run together. Actors, pending completions and the cluster barrier are theirs."""

    ctas: list[Cta]
    memory: GlobalMemory
    checks: Checks
    actors: Actors
    pending: Pending
    barrier_names: Mapping[int, str]
    roles: Mapping[int, str] = field(default_factory=dict)  # of warps
    target: str = "sm_100a"
    barrier: NamedBarrier = field(default_factory=lambda: NamedBarrier("cluster barrier"))
    sync_points: dict[int, Clocks] = field(default_factory=dict)

    def release(self) -> None:
        """Let go of what has run: parts that name one another would stay until a collection.

        That is tens of MB a CTA, and so few objects that Python rarely sees a reason to collect.
        """
        for cta in self.ctas:
            cta.warps.clear()
        self.ctas.clear()

    def cta_of(self, address: int) -> Cta:
        """The CTA whose shared memory the 32-bit address names."""
        rank = address >> RANK_SHIFT
        if rank >= len(self.ctas):
            raise OutOfBounds(
                f"shared address {address:#x} names rank {rank} of a cluster of {len(self.ctas)}"
            )
        return self.ctas[rank]

    def mbarrier(self, address: int) -> Mbarrier:
        """The initialised mbarrier at a 32-bit shared address."""
        cta, offset = self.cta_of(address), address & OFFSET_MASK
        found = cta.mbarriers.get(offset)
        if found is None:
            near = min(cta.mbarriers, key=lambda o: abs(o - offset), default=None)
            hint = (
                "none is initialised"
                if near is None
                else f"the nearest is {cta.mbarriers[near].name}"
            )
            raise BarrierMisuse(
                f"no mbarrier is initialised at {cta.shared.name}+{offset:#x}; {hint}"
            )
        return found


@dataclass
class RegisterPool:
    """Registers a thread that warps have given back; those of a launch are all given out."""

    free: int = 0
    waiters: list[Warp] = field(default_factory=list)

    def take(self, registers: int) -> None:
        """Take some, or give back a negative number of them."""
        self.free -= registers
        wake_all(self.waiters)


@dataclass
class TensorWaiters:
    """Warps that wait for columns of tensor memory."""

    waiters: list[Warp] = field(default_factory=list)

    def wake(self) -> None:
        wake_all(self.waiters)


@dataclass
class Cta:
    """One CTA: its memories, barriers and warps. `rank` is its place in the cluster."""

    index: tuple[int, int, int]
    rank: int
    cluster: Cluster
    shared: SharedMemory
    tensor: TensorMemory
    params: np.ndarray
    launch: Launch
    pool: RegisterPool
    warps: list[Warp] = field(default_factory=list)
    mbarriers: dict[int, Mbarrier] = field(default_factory=dict)
    named: dict[int, NamedBarrier] = field(default_factory=dict)
    may_allocate_tensor: bool = True
    counters: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[int, str]] = field(default_factory=Counter)  # by warp and barrier
    tensor_waiters: TensorWaiters = field(default_factory=lambda: TensorWaiters())
    warpgroups: dict[int, Any] = field(default_factory=dict)  # what `wgmma` keeps of each

    @property
    def name(self) -> str:
        return f"cta{self.index}"

    @property
    def base(self) -> int:
        """What a shared address of this CTA has above its offset."""
        return self.rank << RANK_SHIFT

    def init_mbarrier(self, offset: int, count: int, by: Warp | None = None) -> None:
        """Make an mbarrier; whoever uses it must have observed that `by` did."""
        name = f"mbarrier {self.cluster.barrier_names.get(offset) or hex(offset)}"
        if len(self.cluster.ctas) > 1:
            name += f" of rank {self.rank}"
        actor = self.cluster.actors.number(
            ("mbarrier", self.rank, offset), f"a copy that completes on {name}"
        )
        self.mbarriers[offset] = Mbarrier(name, count, actor, by.note_init() if by else None)


@dataclass(frozen=True)
class LoadUnderWay:
    """A `tcgen05.ld` that nothing shows to be over yet.

    `users` are the micro-operations that begin an instruction with one of its registers, `used` is
    how often they had executed before it, `rows` are the registers.
    """

    actor: int
    epoch: int
    rows: frozenset[int]
    users: np.ndarray
    used: int


@dataclass
class Warp:
    """One warp: registers by row, a program counter per lane, clocks, and why it waits."""

    index: int
    cta: Cta
    code: Code
    registers: np.ndarray
    counts: np.ndarray
    pcs: np.ndarray
    existing: int  # lanes that exist: blocks need not be a multiple of 32
    local: np.ndarray
    launch_registers: int
    clocks: Clocks = field(default_factory=Clocks.zero)
    actor: int = 0
    held: int = 0
    waits: list[tuple[int, Wait]] = field(default_factory=list)
    converging: dict[int, tuple[int, int]] = field(default_factory=dict)  # pc: (mask, required)
    gave_up: set[int] = field(default_factory=set)  # each `try_wait` fails once where it may
    loads: list[LoadUnderWay] = field(default_factory=list)  # of tensor memory
    fenced: Clocks = field(default_factory=Clocks.zero)  # what relaxed arrivals hand on
    relaxed: Clocks = field(default_factory=Clocks.zero)  # what an acquiring fence would observe
    # The barrier that a warp has arrived at and not left, and the round it arrived in.
    token: tuple[NamedBarrier, int] | None = None
    cluster_round: int | None = None  # between arriving at the cluster barrier and waiting
    barrier_used: str = ""  # the mbarrier that the last instruction with one named: for a trace
    timed_out: bool = False
    polled: bool = False  # what it just did may only have looked whether something happened
    polls: int = 0  # how often, since `polls_since` visible operations had changed something
    polls_since: int = -1
    looked: int = 0  # operations in a row that changed nothing
    exited: bool = False
    runnable: bool = True
    pc: int = 0
    instructions_left: int = 0
    counted: int = 0
    sequence: Counter[str] = field(default_factory=Counter)  # groups and operations of its own
    groups: dict[tuple[str, int], BulkGroups | CopyGroups] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.actor = self.cluster.actors.number(("warp", self.cta.rank, self.index), f"{self.name}")
        # Not of `async_`: what a warp writes first needs a proxy fence as well.
        self.clocks.generic[self.actor] = 1

    @property
    def cluster(self) -> Cluster:
        return self.cta.cluster

    @property
    def name(self) -> str:
        role = self.cluster.roles.get(self.index)
        name = f"warp {self.index} ({role})" if role else f"warp {self.index}"
        return f"{name} of rank {self.cta.rank}" if len(self.cluster.ctas) > 1 else name

    @property
    def epoch(self) -> int:
        return int(self.clocks.generic[self.actor])

    @property
    def live(self) -> int:
        """Lanes that have not exited."""
        return int(_BIT[self.pcs != EXITED].sum())

    def step_past(self, mask: int) -> None:
        """The lanes are done with the micro-operation that they stand at."""
        self.counts[self.pc] += self.code.micro[self.pc, COUNTS]
        self.pcs[self.lanes(mask)] += 1

    def wake(self) -> None:
        self.runnable = True

    def exit(self) -> None:
        """All lanes have exited; barriers of everyone do not wait for them."""
        self.exited = True
        for barrier in self.cta.named.values():
            barrier.exits(WARP_SIZE)
        if self.cluster_round != self.cluster.barrier.rounds:  # else it has arrived
            self.cluster.barrier.exits(WARP_SIZE)

    # ---------------------------------------------------------------------------- holding lanes

    def hold_waiting(self, mask: int, wait: Wait) -> None:
        self.held |= mask
        self.waits.append((mask, wait))
        wait.on.waiters.append(self)

    def hold_converging(self, pc: int, mask: int, required: int) -> None:
        self.held |= mask
        self.converging[pc] = (mask, required)

    def join_converging(self, pc: int, mask: int) -> int:
        """Lanes that have reached the `.sync` instruction at `pc`, those before included."""
        if not self.converging or pc not in self.converging:
            return mask
        before, _ = self.converging.pop(pc)
        self.held &= ~before
        return mask | before

    def release_converged(self) -> bool:
        """Let lanes go on whose missing partners have exited since; False where there are none."""
        live = self.live
        for pc, (mask, required) in list(self.converging.items()):
            if not required & live & ~mask:
                del self.converging[pc]
                self.held &= ~mask
                return True
        return False

    def lanes(self, mask: int) -> np.ndarray:
        """Indices of the lanes in `mask`."""
        return _lanes(mask)

    def uncounted(self) -> int:
        """Micro-operations executed since the last call: a trace's ticks."""
        total = int(self.counts.sum())
        new, self.counted = total - self.counted, total
        return new

    # -------------------------------------------------------------------------------- order

    def mbarrier(self, address: int, *, asynchronous: bool = False) -> Mbarrier:
        """The mbarrier at a shared address, which this warp, or what it starts, may use."""
        found = self.cluster.mbarrier(address)
        self.barrier_used = found.name
        checks = self.cluster.checks
        if found.made is not None and checks.races:
            proxy = asynchronous and checks.proxies
            clock = self.clocks.async_ if proxy else self.clocks.generic
            actor, epoch = found.made
            if clock[actor] < epoch:
                seen = self.clocks.generic[actor] >= epoch
                whom = "the asynchronous proxy" if seen else self.name
                raise Race(
                    f"{found.name} is used by {self.name}, and nothing makes its initialisation by "
                    f"{self.cluster.actors.names[actor]} visible to {whom}"
                )
        return found

    def note_wait(self, barrier: Mbarrier) -> None:
        """The warp has seen the end of the barrier's last phase."""
        if not self.cluster.checks.phases:
            return
        actor = self.cluster.actors.number_of_waits(
            ("wait", self.cta.rank, self.index), f"a wait of {self.name}"
        )
        self.sequence["wait"] += 1
        self.clocks.observe(actor, self.sequence["wait"])
        site = self.cluster.actors.site
        who = self.name if site is None else f"{self.name} at {site}"
        barrier.waited[actor] = self.sequence["wait"], who

    def relaxed_release(self) -> Clocks:
        """What a relaxed operation hands on: what was fenced, and which waits came before it."""
        handed = self.fenced.copy()
        for actor, event in self.waits_before():
            handed.observe(actor, event)
        return handed

    def relaxed_acquire(self, clocks: Clocks) -> None:
        """What a relaxed operation takes, for a fence to make it known."""
        self.relaxed.join(clocks)
        for actor in self.cluster.actors.waits:
            self.clocks.observe(actor, int(clocks.generic[actor]))

    def waits_before(self) -> list[tuple[int, int]]:
        """Which waits, as (actor, epoch), came before what this warp does now."""
        known = self.clocks.generic
        return [(actor, int(known[actor])) for actor in self.cluster.actors.waits]

    def note_init(self) -> tuple[int, int]:
        """The stamp of an `mbarrier.init`, which this warp itself sees at once."""
        actor = self.own_actor("mbarrier.init", "mbarrier.init")
        self.clocks.generic[actor] += 1
        return actor, int(self.clocks.generic[actor])

    def fence_inits(self) -> None:
        """`fence.mbarrier_init`: this warp's are visible to all proxies, and to the cluster."""
        actor = self.own_actor("mbarrier.init", "mbarrier.init")
        self.fenced.observe(actor, int(self.clocks.generic[actor]))
        self.clocks.observe(actor, int(self.clocks.generic[actor]))

    def fence(self) -> None:
        """A releasing and acquiring fence: relaxed operations around it then hand on order."""
        self.acquire(self.relaxed)
        self.fenced.join(self.release())

    def settle_loads(self, rows: frozenset[int] = frozenset()) -> None:
        """Loads of tensor memory are over, in order, once something has used what they loaded.

        `rows` are used by the instruction that executes now.
        """
        last = None
        for load in self.loads:
            if load.rows & rows or int(self.counts[load.users].sum()) != load.used:
                last = load
        if last is not None:
            self.end_loads(last.actor, last.epoch)

    def end_loads(self, actor: int, epoch: int) -> None:
        self.clocks.observe(actor, epoch)
        self.loads = [load for load in self.loads if load.epoch > epoch]

    def access(self) -> Access:
        """Generic loads and stores of this warp."""
        g = self.clocks.generic
        return Access(self.actor, self.epoch, g, g, True)

    def release(self) -> Clocks:
        """What this warp hands on now; what it does later is not covered by it."""
        if self.loads:
            self.settle_loads()
        handed = self.clocks.copy()
        self.clocks.generic[self.actor] += 1
        return handed

    def acquire(self, clocks: Clocks) -> None:
        self.clocks.join(clocks)

    def fence_proxy_async(self) -> None:
        """Generic accesses that this warp has made or observed become visible to async ones."""
        if self.loads:
            self.settle_loads()
        np.maximum(self.clocks.async_, self.clocks.generic, out=self.clocks.async_)
        self.clocks.generic[self.actor] += 1

    def async_access(self, actor: int, epoch: int, in_order: bool = False) -> Access:
        """An asynchronous operation that this warp starts, stamped (actor, epoch).

        Earlier writes must be visible to the asynchronous proxy; earlier reads only be over.
        """
        if self.loads:
            self.settle_loads()
        checks = self.cluster.checks
        covered = self.clocks.async_ if checks.proxies else self.clocks.generic
        return Access(actor, epoch, covered, self.clocks.generic, in_order)

    def own_actor(self, kind: str, what: str) -> int:
        """An actor for asynchronous operations of this warp: 'mma', 'bulk read', ..."""
        return self.cluster.actors.number(
            (kind, self.cta.rank, self.index), f"{what} of {self.name}"
        )


_LANES: dict[int, np.ndarray] = {}


def _lanes(mask: int) -> np.ndarray:
    found = _LANES.get(mask)
    if found is None:
        if len(_LANES) > 4096:
            _LANES.clear()
        found = _LANES[mask] = np.flatnonzero((mask >> np.arange(32)) & 1)
    return found
