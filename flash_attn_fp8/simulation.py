"""`simulate`: a call with `impl="sim"`, under a schedule of one's choice, and what was executed.

`impl="sim"` is its plain form. What `simulate` was given is known to the executor of compiled
kernels through `settings`, while its function runs and in its thread only: a plan does not depend
on who watches.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flash_attn_fp8.errors import InvalidArguments
from flash_attn_fp8.target import SIMULATED, SIMULATED_ARCHS, Target, target_named

if TYPE_CHECKING:
    from flash_attn_fp8.sim import Checks, Run, Trace
    from flash_attn_fp8.sim.schedule import Schedule

R = TypeVar("R")
SCHEDULES = ("round_robin", "random", "adversarial")


@dataclass(frozen=True)
class Settings:
    """How `impl="sim"` simulates; `runs` collects what each launch executed."""

    target: Target = SIMULATED
    schedule: Callable[[], Schedule] | None = None  # None: round robin
    checks: Checks | None = None  # None: all of them
    workers: int = 1
    trace: Trace | None = None
    runs: list[Run] = field(default_factory=list)

    @property
    def planned_for(self) -> Target:
        """The device that plans are made for: how many SMs it has decides no automatic split."""
        return Target(self.target.arch, SIMULATED.sm_count)

    def device_options(self) -> dict[str, Any]:
        """Keyword arguments of `sim.device`; what is None is left at its default there."""
        given = {"schedule": self.schedule, "checks": self.checks, "trace": self.trace}
        options: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
        return options | {"sm_count": self.target.sm_count, "workers": self.workers}


_active: ContextVar[Settings | None] = ContextVar("flash_attn_fp8_simulation", default=None)


def settings() -> Settings:
    """What the simulation that runs now was asked for; the plain form's outside of `simulate`."""
    return _active.get() or Settings()


def simulate(
    fn: Callable[..., R],
    *args: Any,
    target: str = f"{SIMULATED.arch}:{SIMULATED.sm_count}",
    schedule: str | Callable[[], Schedule] = "round_robin",
    seed: int = 0,
    checks: Checks | None = None,
    trace: str | Path | Trace | None = None,
    roles: Mapping[int, str] | None = None,
    workers: int = 1,
    **kwargs: Any,
) -> tuple[R, list[Run]]:
    """Call `fn(*args, **kwargs, impl="sim")` and say what its kernels executed.

    The result has the same bits as with `impl="sim"`, whatever the settings: a schedule that finds
    others has found a bug. Automatic splits are planned as for `impl="sim"`, whatever the target.

    Args:
        fn: `flash_attn_func` or another function of this package that takes `impl`.
        args: its arguments.
        target: the device, `sm_100a:SMS`, or another that there is a kernel for. Few
            multiprocessors make a CTA work on several tiles, which is what exercises the reuse of
            its buffers and barriers.
        schedule: who runs next and when copies complete: "round_robin", "random", "adversarial",
            or what makes a `sim.Random` or another schedule (called for each cluster).
        seed: of the random schedules; the same seed replays a run.
        checks: what is looked for; everything by default (`sim.Checks`).
        trace: a file for a timeline that ui.perfetto.dev opens, or a `sim.Trace` to collect it in.
        roles: names of warps in the timeline, by number; the kernel's own by default.
        workers: processes that share a grid's CTAs; a trace needs 1.
        kwargs: keyword arguments of `fn`.

    Returns:
        (result of `fn`, a `sim.Run` of each launch: the kernel first, then what merges splits).

    Raises:
        InvalidArguments: an argument is wrong; all faults are listed.
        Unsupported: the kernel cannot take this call, and why.
        flash_attn_fp8.sim.errors.Finding: the kernel is at fault (a race, a deadlock, ...).

    Example:
        >>> import torch
        >>> import flash_attn_fp8 as fa
        >>> q = torch.randn(1, 130, 2, 64).to(torch.float8_e4m3fn)
        >>> (out, lse), runs = fa.simulate(fa.flash_attn_func, q, q, q, schedule="random", seed=7)
        >>> [run.traffic["bulk tensor bytes global to shared"] for run in runs]
        [98304]
    """
    faults = [*_faults_of_call(fn, kwargs), *_faults_of_schedule(schedule, seed)]
    faults += _faults_of_observers(checks, trace, roles, workers)
    device, fault = _device(target)
    faults += fault
    if faults:
        raise InvalidArguments("simulate: " + "; ".join(faults), tuple(faults))
    timeline = _timeline(trace, roles)
    asked = Settings(device, _schedule_maker(schedule, seed), checks, workers, timeline)
    try:
        with _as_active(asked):
            result = fn(*args, **kwargs | {"impl": "sim"})
    finally:  # a timeline that ends at a finding is the one to look at
        if timeline is not None and isinstance(trace, str | Path):
            timeline.write(trace)
    return result, asked.runs


@contextmanager
def _as_active(asked: Settings) -> Iterator[None]:
    token = _active.set(asked)
    try:
        yield
    finally:
        _active.reset(token)


def _faults_of_call(fn: object, kwargs: Mapping[str, object]) -> Iterator[str]:
    if not callable(fn):
        yield f"fn={fn!r} must be a function, such as flash_attn_func"
    elif not _takes_impl(fn):
        name = getattr(fn, "__name__", repr(fn))
        yield f"fn={name} has no argument impl; pass flash_attn_func or another that has"
    if kwargs.get("impl") not in (None, "sim"):
        yield f"impl={kwargs['impl']!r}: simulate runs impl='sim'; leave impl out"
    if _active.get() is not None:
        yield "fn calls simulate itself; call it once"


def _takes_impl(fn: Callable[..., object]) -> bool:
    try:
        return "impl" in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # a built-in without a signature
        return False


def _faults_of_schedule(schedule: object, seed: object) -> Iterator[str]:
    if schedule not in SCHEDULES and not callable(schedule):
        known = ", ".join(map(repr, SCHEDULES))
        yield f"schedule={schedule!r} is none of {known}, nor something that makes a schedule"
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        yield f"seed={seed!r} must be an integer of at least 0"
    elif seed and schedule not in SCHEDULES[1:]:
        yield f"seed={seed} has no effect on schedule={schedule!r}; use schedule='random'"


def _faults_of_observers(
    checks: object, trace: object, roles: object, workers: object
) -> Iterator[str]:
    if checks is not None and not _is_a("memory", "Checks", checks):
        yield f"checks={checks!r} must be a sim.Checks"
    if (
        trace is not None
        and not isinstance(trace, str | Path)
        and not _is_a("trace", "Trace", trace)
    ):
        yield f"trace={trace!r} must be a path or a sim.Trace"
    if roles is not None and trace is None:
        yield "roles name warps in a trace; pass trace, too"
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        yield f"workers={workers!r} must be an integer of at least 1"
    elif workers > 1 and trace is not None:
        yield f"workers={workers}: a trace needs 1"


def _is_a(module: str, name: str, value: object) -> bool:
    """Whether it is of a class of the simulator, which is not loaded to find that out."""
    home = sys.modules.get(f"flash_attn_fp8.sim.{module}")
    return home is not None and isinstance(value, getattr(home, name))


def _device(target: str) -> tuple[Target, list[str]]:
    try:
        found = target_named(target)
    except (InvalidArguments, TypeError):
        return SIMULATED, [f"target={target!r} is no device; write sm_100a or sm_100a:SMS"]
    if found.arch not in SIMULATED_ARCHS:
        known = ", ".join(SIMULATED_ARCHS)
        return found, [f"target={target!r}: the simulator knows {known}"]
    if found.sm_count < 1:
        return found, [f"target={target!r} has no multiprocessor; write {found.arch}:1 or more"]
    return found, []


def _schedule_maker(schedule: str | Callable[[], Schedule], seed: int) -> Callable[[], Schedule]:
    if not isinstance(schedule, str):
        return schedule
    from flash_attn_fp8.sim.schedule import schedule_named

    return lambda: schedule_named(schedule, seed)


def _timeline(trace: str | Path | Trace | None, roles: Mapping[int, str] | None) -> Trace | None:
    from flash_attn_fp8.sim.trace import Trace

    if trace is None:
        return None
    timeline = trace if isinstance(trace, Trace) else Trace()
    timeline.names.update(roles or {})
    return timeline
