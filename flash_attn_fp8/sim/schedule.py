"""Who runs next, and how late asynchronous operations complete: any order that hardware may show.

A schedule decides at *visible* operations only (memory, barriers, asynchronous starts); between
them warps cannot notice each other. The same seed replays the same run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from flash_attn_fp8.sim.state import Warp

NEVER = 1 << 40  # a delay that ends only when nobody else can go on


class Schedule(Protocol):
    """Chooses warps and delays. One object serves one cluster."""

    name: str

    def pick(self, runnable: list[Warp]) -> Warp:
        """The warp that runs now."""

    def switches(self) -> bool:
        """Whether the running warp gives way after the visible operation that it just did."""

    def delay(self) -> int:
        """Visible operations until an asynchronous operation that starts now completes."""


class RoundRobin:
    """Warps in turn, each until it waits; asynchronous operations complete at once."""

    name = "round robin"

    def __init__(self) -> None:
        self._turn = 0

    def pick(self, runnable: list[Warp]) -> Warp:
        self._turn += 1
        return runnable[self._turn % len(runnable)]

    def switches(self) -> bool:
        return False

    def delay(self) -> int:
        return 0


class Random:
    """Any runnable warp, changed often; delays from none to thousands of operations."""

    def __init__(self, seed: int) -> None:
        self.name = f"random, seed {seed}"
        self._rng = np.random.default_rng(seed)

    def pick(self, runnable: list[Warp]) -> Warp:
        return runnable[int(self._rng.integers(len(runnable)))]

    def switches(self) -> bool:
        return bool(self._rng.random() < 1 / 8)

    def delay(self) -> int:
        scale = int(self._rng.integers(0, 13))
        return int(self._rng.integers(0, 1 << scale)) if scale else 0


class Adversarial:
    """Priorities that change at a few random moments; half of all completions come last.

    Probabilistic concurrency testing (Burckhardt et al., ASPLOS 2010): a bug that needs few
    particular orderings is found with a known probability, where uniform choice rarely gets there.
    """

    def __init__(self, seed: int) -> None:
        self.name = f"adversarial, seed {seed}"
        self._rng = np.random.default_rng(seed)
        self._priority: dict[int, float] = {}

    def pick(self, runnable: list[Warp]) -> Warp:
        for warp in runnable:
            if id(warp) not in self._priority:
                self._priority[id(warp)] = float(self._rng.random())
        chosen = max(runnable, key=lambda w: self._priority[id(w)])
        if self._rng.random() < 1 / 64:
            self._priority[id(chosen)] = float(self._rng.random()) - 1
        return chosen

    def switches(self) -> bool:
        return bool(self._rng.random() < 1 / 32)

    def delay(self) -> int:
        return NEVER if self._rng.random() < 0.5 else 0


def schedule_named(name: str, seed: int = 0) -> Schedule:
    """A schedule by name: round_robin, random or adversarial."""
    if name == "round_robin":
        return RoundRobin()
    if name == "random":
        return Random(seed)
    if name == "adversarial":
        return Adversarial(seed)
    raise ValueError(f"schedule {name!r} is none of round_robin, random, adversarial")
