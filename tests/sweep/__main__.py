"""`python -m tests.sweep --impl tiled`: the whole sweep, with progress; resumes where it stopped.

Finished cases are kept in build/sweep/IMPL-DEVICE.jsonl, one line each, written as they finish;
`--fresh` starts over. `--shard I/N` shares them between processes; a last run without it gathers
what all have done. At the end (or with what is there, on Ctrl-C) the result file is written:
benchmarks/results/sweep_IMPL_DEVICE.json, with the Markdown table beside it. Exit status 1 if a
case left its budget.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flash_attn_fp8.results import FOLDER, Results, Row, write
from tests.conftest import EXECUTORS
from tests.sweep import check, grid

STATE = Path("build/sweep")
State = dict[str, dict[str, object]]


def main(
    impl: Annotated[str, typer.Option(help=f"executor: {', '.join(EXECUTORS)}")] = "tiled",
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    sample: Annotated[bool, typer.Option(help="only the sample that CI runs")] = False,
    fresh: Annotated[bool, typer.Option(help="forget what an earlier run finished")] = False,
    shard: Annotated[
        str, typer.Option(help="I/N: every N-th case from I, for N processes")
    ] = "0/1",
    limit_s: Annotated[float, typer.Option(help="stop after this many seconds")] = float("inf"),
    out: Annotated[Path, typer.Option(help="folder of the result file")] = FOLDER,
) -> None:
    """Run the fp8 sweep on one executor."""
    first, step = map(int, shard.split("/"))
    cases = (grid.sample() if sample else grid.full())[first::step]
    state = STATE / f"{impl}-{device}.jsonl"
    if fresh:
        state.unlink(missing_ok=True)
    done = _load(state)
    todo = [case for case in cases if str(case) not in done]
    typer.echo(f"{len(cases)} cases, {len(cases) - len(todo)} done before")
    try:
        _run(todo, impl, device, state, done, limit_s)
    except KeyboardInterrupt:
        typer.echo("stopped; run again to resume")
    reached = [case for case in cases if str(case) in done]
    _write(cases, done, impl, device, out)
    failed = [str(case) for case in reached if "fault" in done[str(case)]]
    for name in failed:
        typer.echo(f"FAILED {name}: {done[name]['fault']}")
    typer.echo(f"{len(reached) - len(failed)} passed, {len(failed)} failed")
    sys.exit(bool(failed))


def _load(state: Path) -> State:
    if not state.exists():
        return {}
    lines = (json.loads(line) for line in state.read_text().splitlines() if line.endswith("}"))
    return {line.pop("case"): line for line in lines}


def _run(
    todo: list[grid.Case],
    impl: str,
    device: str,
    state: Path,
    done: State,
    limit_s: float,
) -> None:
    state.parent.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress, state.open("a") as log:
        task = progress.add_task(f"sweep {impl}", total=len(todo))
        for case in todo:
            if (progress.tasks[0].elapsed or 0) > limit_s:
                return
            try:
                outcome: dict[str, object] = dict(vars(check.run(case, impl, device)))
            except AssertionError as fault:
                outcome = {"fault": str(fault).splitlines()[0]}
            done[str(case)] = outcome
            log.write(json.dumps({"case": str(case), **outcome}) + "\n")
            log.flush()
            progress.advance(task)


def _write(cases: list[grid.Case], done: State, impl: str, device: str, out: Path) -> None:
    """One row for each format, lengths and head dims: how near its cases came to their budgets.

    Cases that were not run are counted, so that a page cannot look more complete than it is.
    """
    groups: dict[tuple[object, ...], list[dict[str, object] | None]] = {}
    for case in cases:
        key = (case.fmt, "x".join(map(str, case.seqlens)), "/".join(map(str, case.head_dims)))
        groups.setdefault(key, []).append(done.get(str(case)))
    rows = []
    for (fmt, seqlens, head_dims), wanted in groups.items():
        outcomes = [o for o in wanted if o is not None]
        case = {"format": fmt, "seqlens": seqlens, "head_dims": head_dims}
        passed = [o for o in outcomes if "fault" not in o]
        rows.append(Row.of(case, impl, "cases passed", "cases", len(passed)))
        rows.append(Row.of(case, impl, "cases failed", "cases", len(outcomes) - len(passed)))
        rows.append(Row.of(case, impl, "cases not run", "cases", len(wanted) - len(outcomes)))
        if passed:
            used = [float(o["rel_l2"]) / float(o["budget"]) for o in passed]  # type: ignore[arg-type]
            rows.append(Row.of(case, impl, "rel_l2 / one-shot model, worst", "ratio", max(used)))
            lse = max(float(o["lse_error"]) for o in passed)  # type: ignore[arg-type]
            rows.append(Row.of(case, impl, "LSE error, worst", "nats", lse))
    command = f"python -m tests.sweep --impl {impl} --device {device}"
    if rows:
        write(Results.here(rows, command), f"sweep_{impl}_{device}", out, columns=("head_dims",))


if __name__ == "__main__":
    typer.run(main)
