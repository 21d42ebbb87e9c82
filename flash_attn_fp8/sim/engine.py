"""One warp's execution, compiled: the interface to the generated inner loop.

A warp is `registers` (`Code.registers`), `pcs` (int32[32], a micro-operation's index for each lane,
EXITED for one that has exited) and a mask of lanes that are *held*, which only its scheduler
changes: a held lane neither runs nor keeps others from running.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import config

from flash_attn_fp8.sim.isa import compiled

EXITED = 0x7FFFFFFF
# Why `run` returned.
DONE, TRAPPED, LIMIT, HELD = range(4)


class Stop(NamedTuple):
    """Why and where a warp stopped, and how many instructions it executed until then.

    TRAPPED: lanes `mask` stand at the trap `pc`, for Python to execute; lanes whose guard does not
    hold have passed. LIMIT: lanes `mask` stand at `pc`, nothing of it executed. HELD: every lane
    that has not exited is held. DONE: all lanes have exited.
    """

    status: int
    pc: int
    mask: int
    executed: int


@functools.cache
def _compiled_run() -> Callable[..., tuple[int, int, int, int]]:
    run: Callable[..., tuple[int, int, int, int]] = compiled.load().run
    if not config.DISABLE_JIT:  # type: ignore[attr-defined]
        return run

    def quiet(*arguments: Any) -> tuple[int, int, int, int]:
        with np.errstate(all="ignore"):
            return run(*arguments)

    return quiet


@functools.cache
def warm_up() -> None:
    """Compile the loop, some 40 s of CPU once per machine and version; else load it, under 1 s.

    The first `run` does the same. Of processes that come here together one compiles, the others
    wait for it and load what it compiled.
    """
    with compiled.lock():
        _compiled_run()(
            np.array([[2, 0, 0, 0, 0, 0, 0, -1, -1, 0]], dtype=np.int32),  # EXIT
            np.zeros((1, 32), dtype=np.uint64),
            new_pcs(),
            0,
            0,
            np.zeros(1, dtype=np.int64),
            1,
        )


def new_pcs(lanes: int = 32) -> npt.NDArray[np.int32]:
    """The pcs of a warp that starts, with that many lanes; the others count as exited."""
    pcs = np.full(32, EXITED, dtype=np.int32)
    pcs[:lanes] = 0
    return pcs


def run(
    micro: npt.NDArray[np.int32],
    registers: npt.NDArray[np.uint64],
    pcs: npt.NDArray[np.int32],
    held: int,
    advance: int,
    counts: npt.NDArray[np.int64],
    limit: int,
) -> Stop:
    """Run a warp until a trap, until no lane may run, or for `limit` instructions.

    First the lanes of `advance`, which must be at one trap, step past it; that counts it as
    executed (once, however many lanes). `registers` and `micro` are C-contiguous. `counts`
    (int64[n]) grows at each micro-operation that begins an instruction, whether or not its guard
    holds.
    """
    warm_up()
    return Stop(*_compiled_run()(micro, registers, pcs, held, advance, counts, limit))
