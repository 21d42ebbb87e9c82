"""`python -m tests.sweep --impl tiled`: the whole sweep, with progress; resumes where it stopped.

`python -m tests.sweep --impl sim --cases proof` is issue 4's: the 420 cases of the reference fix,
and what lies beyond them, on the simulated kernel. `--impl cute` runs them by the SM90 kernel, on a
device that has it, with exponentials or, by `--exp2 code`, without.

Finished cases are kept in build/sweep/IMPL-DEVICE.jsonl, one line each, written as they finish;
`--fresh` starts over. A kernel's are run again where its sources have changed since. `--shard I/N`
shares them between processes; a last run without it gathers what all have done. At the end (or with
what is there, on Ctrl-C) the result file is written: benchmarks/results/sweep_IMPL_DEVICE.json,
with the Markdown table beside it. Exit status 1 if a case left its budget.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flash_attn_fp8 import compiled, preparation
from flash_attn_fp8.compiler.key import fingerprint
from flash_attn_fp8.results import FOLDER, Results, Row, Scalar, write
from flash_attn_fp8.sim.errors import SimulationError
from tests.conftest import EXECUTORS, KERNELS
from tests.sweep import check, grid

STATE = Path("build/sweep")
State = dict[str, dict[str, object]]


def main(
    impl: Annotated[
        str, typer.Option(help=f"executor: {', '.join(EXECUTORS + KERNELS)}; cute is SM90's")
    ] = "tiled",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    exp2: Annotated[str, typer.Option(help="how cute makes P: exact or code")] = "exact",
    cases: Annotated[str, typer.Option(help=f"which: {', '.join(grid.GRIDS)}")] = "full",
    fresh: Annotated[bool, typer.Option(help="forget what an earlier run finished")] = False,
    shard: Annotated[
        str, typer.Option(help="I/N: the cases of every N-th kernel from I, for N processes")
    ] = "0/1",
    limit_s: Annotated[float, typer.Option(help="stop after this many seconds")] = float("inf"),
    out: Annotated[Path, typer.Option(help="folder of the result file")] = FOLDER,
) -> None:
    """Run the fp8 sweep on one executor."""
    first, step = map(int, shard.split("/"))
    everything = grid.GRIDS[cases]()
    numbers = {spec: n for n, spec in enumerate(dict.fromkeys(case.spec for case in everything))}
    wanted = [case for case in everything if numbers[case.spec] % step == first]
    if impl == "cute":
        device, impl = "cuda", f"cute_{exp2}"
    state = STATE / f"{impl}-{device}.jsonl"
    if fresh:
        state.unlink(missing_ok=True)
    done = _load(state, impl)
    todo = [case for case in wanted if str(case) not in done]
    typer.echo(f"{len(wanted)} cases, {len(wanted) - len(todo)} done before")
    try:
        _run(todo, impl, device, state, done, limit_s)
    except KeyboardInterrupt:
        typer.echo("stopped; run again to resume")
    reached = [case for case in wanted if str(case) in done]
    _write(wanted, done, (impl, device, cases), out)
    failed = [str(case) for case in reached if "fault" in done[str(case)]]
    for name in failed:
        typer.echo(f"FAILED {name}: {done[name]['fault']}")
    typer.echo(f"{len(reached) - len(failed)} passed, {len(failed)} failed")
    sys.exit(bool(failed))


def _load(state: Path, impl: str) -> State:
    if not state.exists():
        return {}
    lines = (json.loads(line) for line in state.read_text().splitlines() if line.endswith("}"))
    sources = _sources_of(impl)
    valid = (line for line in lines if line.pop("sources", None) == sources)
    return {line.pop("case"): line for line in valid}


def _sources_of(impl: str) -> str | None:
    """What identifies the sources of a kernel; None where no kernel runs."""
    if impl not in KERNELS and "cute" not in impl:
        return None
    launches = b"".join(Path(m.__file__).read_bytes() for m in (compiled, preparation))
    simulated = impl in KERNELS
    kernel = fingerprint(*("simulator", "Sm100Spec") if simulated else ("gpu", "Sm90Spec"))
    return hashlib.sha256(launches + kernel.encode()).hexdigest()[:16]


def _run(
    todo: list[grid.Case],
    impl: str,
    device: str,
    state: Path,
    done: State,
    limit_s: float,
) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    sources = _sources_of(impl)
    mark = {} if sources is None else {"sources": sources}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress, state.open("a") as log:
        task = progress.add_task(f"sweep {impl}", total=len(todo))
        for case in todo:
            if (progress.tasks[0].elapsed or 0) > limit_s:
                return
            try:
                if impl.startswith("cute"):
                    found = vars(check.run_on_sm90(case, impl.removeprefix("cute_")))
                else:
                    found = vars(check.run(case, impl, device))
                outcome = {name: x for name, x in found.items() if x is not None}
            except (AssertionError, SimulationError) as fault:
                outcome = {"fault": f"{type(fault).__name__}: {str(fault).splitlines()[0]}"}
            done[str(case)] = outcome
            log.write(json.dumps({"case": str(case), **outcome, **mark}) + "\n")
            log.flush()
            progress.advance(task)


def _write(cases: list[grid.Case], done: State, what: tuple[str, str, str], out: Path) -> None:
    """One row for each format, lengths and head dims: how near its cases came to their budgets.

    Cases that were not run are counted, so that a page cannot look more complete than it is.
    """
    impl, device, which = what
    groups: dict[tuple[object, ...], list[dict[str, object] | None]] = {}
    for case in cases:
        seqlens, head_dims = "x".join(map(str, case.seqlens)), "/".join(map(str, case.head_dims))
        key = (case.fmt, case.layout, seqlens, head_dims)
        groups.setdefault(key, []).append(done.get(str(case)))
    rows = []
    for (fmt, layout, seqlens, head_dims), wanted in groups.items():
        outcomes = [o for o in wanted if o is not None]
        case = {"format": fmt, "seqlens": seqlens, "head_dims": head_dims}
        case |= {} if layout == "dense" else {"layout": layout}
        passed = [o for o in outcomes if "fault" not in o]
        rows.append(Row.of(case, impl, "cases passed", "cases", len(passed)))
        rows.append(Row.of(case, impl, "cases failed", "cases", len(outcomes) - len(passed)))
        rows.append(Row.of(case, impl, "cases not run", "cases", len(wanted) - len(outcomes)))
        if passed:
            used = [float(o["rel_l2"]) / float(o["budget"]) for o in passed]  # type: ignore[arg-type]
            rows.append(Row.of(case, impl, "rel_l2 / one-shot model, worst", "ratio", max(used)))
            lse = max(float(o["lse_error"]) for o in passed)  # type: ignore[arg-type]
            rows.append(Row.of(case, impl, "LSE error, worst", "nats", lse))
            rows += _beside_emulation(case, impl, passed)
    command = f"python -m tests.sweep --impl {impl} --device {device}".replace("_", " --exp2 ")
    command += "" if which == "full" else f" --cases {which}"
    if rows:
        write(Results.here(rows, command), f"sweep_{impl}_{device}", out, columns=("head_dims",))


def _beside_emulation(
    case: dict[str, Scalar], impl: str, passed: list[dict[str, object]]
) -> list[Row]:
    """How far a kernel's cases are from the emulation of the same tiles and policy."""
    if impl not in KERNELS and not impl.startswith("cute"):
        return []
    apart = [float(o["from_emulation"]) for o in passed]  # type: ignore[arg-type]
    ratios = [float(o["error_ratio"]) for o in passed]  # type: ignore[arg-type]
    return [
        Row.of(case, impl, "rel_l2 from the emulation, worst", "ratio", max(apart)),
        Row.of(case, impl, "error / the emulation's, largest", "ratio", max(ratios)),
        Row.of(case, impl, "error / the emulation's, smallest", "ratio", min(ratios)),
    ]


if __name__ == "__main__":
    typer.run(main)
