"""`flash-attn-fp8 sim script.py`: run a CuTe-DSL script on the simulated device."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flash_attn_fp8.sim import Run
    from flash_attn_fp8.sim.schedule import Schedule


class Order(str, Enum):
    """Schedules by name."""

    round_robin = "round-robin"
    random = "random"
    adversarial = "adversarial"


def sim(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python script.")],
    target: Annotated[str, typer.Option(help="sm_90a or sm_100a.")] = "sm_100a",
    sms: Annotated[int, typer.Option(help="Multiprocessors that the device claims.", min=1)] = 4,
    schedule: Annotated[Order, typer.Option(help="Who runs next.")] = Order.round_robin,
    seed: Annotated[int, typer.Option(help="Of the random schedules; a seed replays.")] = 0,
    races: Annotated[bool, typer.Option(help="Look for races.")] = True,
    proxies: Annotated[bool, typer.Option(help="Demand proxy fences.")] = True,
    uninitialised: Annotated[bool, typer.Option(help="Look for unwritten reads.")] = True,
    phases: Annotated[bool, typer.Option(help="Look for phases that overtake a wait.")] = True,
    exits: Annotated[bool, typer.Option(help="Look for copies that outlive their CTA.")] = True,
    workers: Annotated[int, typer.Option(help="Processes that share a grid.", min=1)] = 1,
    counters: Annotated[Path | None, typer.Option(help="Write executed instructions here.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for Perfetto here.")] = None,
) -> None:
    """Run a CuTe-DSL script unmodified on the simulator: no GPU, no driver, CPU tensors.

    What follows the script's name is its own. A finding (a race, a deadlock, an access out of
    bounds, ...) ends it with exit code 1 and says where.
    """
    from flash_attn_fp8 import sim as simulator
    from flash_attn_fp8.sim.errors import SimulationError

    timeline = simulator.Trace() if trace else None
    argv, sys.argv = sys.argv, [str(script), *context.args]
    sys.path.insert(0, str(script.parent))
    try:
        with simulator.device(
            target,
            sm_count=sms,
            checks=simulator.Checks(races, proxies, uninitialised, phases, exits),
            schedule=_schedule(schedule, seed),
            workers=workers,
            trace=timeline,
        ) as gpu:
            runpy.run_path(str(script), run_name="__main__")
    except SimulationError as fault:
        typer.echo(f"{type(fault).__name__}: {fault}", err=True)
        raise typer.Exit(1) from None
    finally:
        sys.argv = argv
        sys.path.remove(str(script.parent))
        if timeline is not None and trace is not None:
            timeline.write(trace)
    _report(gpu.runs, counters)


def _schedule(order: Order, seed: int) -> Callable[[], Schedule]:
    from flash_attn_fp8.sim.schedule import schedule_named

    return lambda: schedule_named(order.name, seed)


def _report(runs: list[Run], counters: Path | None) -> None:
    for number, run in enumerate(runs, 1):
        typer.echo(f"launch {number}: {run.kernel[:60]}: {run.warp_instructions} warp instructions")
    typer.echo(f"{len(runs)} launches simulated; nothing found")
    if counters is not None:
        text = json.dumps([run.as_data() for run in runs], indent=1)
        counters.write_text(text + "\n", encoding="utf-8")
