"""Mbarriers, named and cluster barriers: counts, phases, and the order that they hand on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from flash_attn_fp8.sim.errors import BarrierMisuse
from flash_attn_fp8.sim.order import Clocks

if TYPE_CHECKING:
    from flash_attn_fp8.sim.state import Warp

_MAX_TX = (1 << 20) - 1  # PTX: the valid range of a transaction count


class HasWaiters(Protocol):
    """What wakes the warps that it lists."""

    waiters: list[Warp]


def wake_all(waiters: list[Warp]) -> None:
    """Let the listed warps look again whether they can go on; empties the list."""
    for warp in waiters:
        warp.wake()
    waiters.clear()


@dataclass
class Wait:
    """Why lanes of a warp cannot go on: `ready()` tells whether they can now."""

    on: HasWaiters
    ready: Callable[[], bool]
    describe: Callable[[], str]
    can_time_out: bool = False  # `try_wait` may return false instead

    @property
    def name(self) -> str:
        """What it is waited for, in counts."""
        return getattr(self.on, "name", type(self.on).__name__)


@dataclass
class Mbarrier:
    """One mbarrier: `phase` counts the completed ones.

    `pending` arrivals and `tx` bytes are of the current phase. `arriving` and `completed` are what
    everything that arrived had observed, in this phase and in the last.
    """

    name: str
    count: int
    actor: int
    made: tuple[int, int] | None = None  # who initialised it, and when: actor and epoch
    pending: int = 0
    tx: int = 0
    phase: int = 0
    arriving: Clocks = field(default_factory=Clocks.zero)
    completed: Clocks = field(default_factory=Clocks.zero)
    arrived_by: list[str] = field(default_factory=list)
    waiters: list[Warp] = field(default_factory=list)
    waited: dict[int, tuple[int, str]] = field(default_factory=dict)  # for the last phase, by actor

    def __post_init__(self) -> None:
        self.pending = self.count

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity is over, as `try_wait.parity` asks."""
        return (self.phase & 1) != parity

    def arrive(self, count: int, clocks: Clocks | None, who: str) -> None:
        """`count` arrivals, handing on what `clocks` have observed."""
        if count > self.pending:
            raise BarrierMisuse(
                f"{self.name} (phase {self.phase}) expects {self.count} arrivals, and {who} makes "
                f"{count} where {self.pending} are pending; arrived: {', '.join(self.arrived_by)}"
            )
        if clocks is not None:
            self.arriving.join(clocks)
        self.arrived_by.append(who)
        self.pending -= count
        self._complete()

    def expect_tx(self, nbytes: int, who: str) -> None:
        self.tx += nbytes
        self._check_tx(who)

    def stamp(self) -> int:
        """The epoch of an operation that starts now and completes on this barrier."""
        return self.phase + 1

    def complete_tx(
        self, nbytes: int, epoch: int, who: str, waits: Iterable[tuple[int, int]] = ()
    ) -> None:
        """An operation that started at `epoch` (`stamp`) is complete.

        `waits` are what it was started after, as (actor, epoch).
        """
        for actor, event in waits:
            self.arriving.observe(actor, event)
        self.tx -= nbytes
        self._check_tx(who)
        self.arriving.observe(self.actor, epoch)
        self._complete()

    def _check_tx(self, who: str) -> None:
        if abs(self.tx) > _MAX_TX:
            raise BarrierMisuse(f"{self.name}: {who} takes the pending bytes to {self.tx}")

    def _complete(self) -> None:
        if self.pending or self.tx:
            return
        self._check_waited()
        self.phase += 1
        self.pending = self.count
        self.arriving, self.completed = self.completed, self.arriving
        self.arriving.clear()
        self.arriving.join(self.completed)  # later phases come after earlier ones
        self.arrived_by.clear()
        wake_all(self.waiters)

    def _check_waited(self) -> None:
        """This phase must not end before those waits that were for the one before it."""
        for actor, (event, who) in self.waited.items():
            if self.arriving.generic[actor] < event:
                raise BarrierMisuse(
                    f"{self.name} ends phase {self.phase}, and nothing orders that after the wait "
                    f"of {who}, for phase {self.phase - 1}: a wait that came later would miss its "
                    f"phase; arrived: {', '.join(self.arrived_by) or 'bytes only'}"
                )
        self.waited.clear()

    def missing(self) -> str:
        """What the current phase lacks, for reports."""
        lacks = []
        if self.pending:
            lacks.append(f"{self.pending} of {self.count} arrivals")
        if self.tx:
            lacks.append(f"{self.tx} bytes")
        by = f"; so far {', '.join(self.arrived_by)}" if self.arrived_by else "; none so far"
        return f"{self.name} phase {self.phase} lacks {' and '.join(lacks) or 'nothing'}{by}"


class Vote(NamedTuple):
    """How many true and false predicates a warp brings to a barrier, and what takes all those."""

    true: int
    false: int
    receive: Callable[[int, int], None]


@dataclass
class NamedBarrier:
    """`barrier` of a CTA, or of a cluster: warps arrive, and some of them wait.

    `threads` is the expected number in the current round; `rounds` the completed ones. Who has
    exited is not waited for where `everyone` is expected. `votes` are of the current round, and
    what they come to is told as it completes: other warps may complete the next one before those
    that waited go on.
    """

    name: str
    threads: int = 0
    arrived: int = 0
    rounds: int = 0
    everyone: bool = False
    votes: list[Vote] = field(default_factory=list)
    arriving: Clocks = field(default_factory=Clocks.zero)
    completed: Clocks = field(default_factory=Clocks.zero)
    arrived_by: list[str] = field(default_factory=list)
    waiters: list[Warp] = field(default_factory=list)

    def of_all(self, warps: list[Warp]) -> int:
        """How many threads the current round expects if it is for all that have not exited."""
        if self.arrived and self.everyone:
            return self.threads
        return 32 * sum(not warp.exited for warp in warps)

    def arrive(
        self,
        threads: int,
        expected: int,
        clocks: Clocks,
        who: str,
        *,
        everyone: bool = False,
        vote: Vote | None = None,
    ) -> None:
        if self.arrived and self.threads != expected:
            raise BarrierMisuse(
                f"{self.name}: {who} expects {expected} threads, those before {self.threads}"
            )
        self.threads, self.everyone = expected, everyone
        self.arrived += threads
        if vote is not None:
            self.votes.append(vote)
        if self.arrived > expected:
            raise BarrierMisuse(
                f"{self.name}: {self.arrived} threads arrived at a barrier of {expected}: "
                f"{', '.join([*self.arrived_by, who])}"
            )
        self.arriving.join(clocks)
        self.arrived_by.append(who)
        self._complete()

    def exits(self, threads: int) -> None:
        """So many have exited that had not arrived in this round."""
        if self.arrived and self.everyone:
            self.threads -= threads
            self._complete()

    def _complete(self) -> None:
        if self.arrived == self.threads:
            self.rounds += 1
            self.arrived = 0
            true, false = sum(v.true for v in self.votes), sum(v.false for v in self.votes)
            for vote in self.votes:
                vote.receive(true, false)
            self.votes.clear()
            self.arriving, self.completed = self.completed, self.arriving
            self.arriving.clear()
            self.arrived_by.clear()
            wake_all(self.waiters)

    def missing(self) -> str:
        by = ", ".join(self.arrived_by) or "nobody"
        return f"{self.name} has {self.arrived} of {self.threads} threads; so far {by}"
