"""Leaves out every synchronising instruction of a kernel in turn, flips every parity, and says
which of these mutants were noticed.

    python -m tests.sim.planted.sweep fa4 --out build/planted_fa4.json   # about 3 minutes
    python -m tests.sim.planted.sweep gemm --out build/planted_gemm.json # 10 seconds

Each mutant runs under round robin, and where that is clean under the other schedules. The results
name, for each, what was found, or that the run was clean and how many elements came out wrong.
Instructions that the launch never executes are counted apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from flash_attn_fp8.sim.errors import Finding, SimulationError
from flash_attn_fp8.sim.machine import Machine, Run
from flash_attn_fp8.sim.schedule import Adversarial, Random, RoundRobin, Schedule
from tests.sim.planted.mutants import Removal, flips, removals

SCHEDULES: tuple[Callable[[], Schedule], ...] = (
    RoundRobin,
    lambda: Random(0),
    lambda: Adversarial(0),
    lambda: Adversarial(1),
)


@dataclass(frozen=True)
class Kernel:
    """A kernel to damage: `run(text, machine)`, then `wrong()` elements."""

    text: str
    run: Callable[[str, Machine], Run]
    wrong: Callable[[], int]


@dataclass(frozen=True)
class Outcome:
    """Of one mutant. `found` names the exception; `runs` counts those until then."""

    kind: str
    line: int
    instruction: str
    executed: int
    found: str | None
    message: str
    runs: int
    wrong: int

    @property
    def verdict(self) -> str:
        if self.found:
            return "found"
        if not self.executed:
            return "not executed"
        return "wrong numbers only" if self.wrong else "missed"


def gemm() -> Kernel:
    """The GEMM of tests/sim/kernels: four tiles for one CTA."""
    from tests.sim.kernels.gemm import TEXT, Problem

    problem = Problem()

    def run(text: str, machine: Machine) -> Run:
        problem.c[:], problem.row_max[:] = 0xFFFF, float("nan")
        return problem.run(text, machine)

    return Kernel(TEXT, run, problem.wrong)


def chain() -> Kernel:
    """The two products of tests/sim/kernels: three rounds."""
    from tests.sim.kernels.chain import TEXT, Problem

    problem = Problem()
    return Kernel(TEXT, problem.run, problem.wrong)


def fa4() -> Kernel:
    """flash-attn-4's e4m3 forward, two tiles for one CTA; needs flash-attn-4."""
    from tests.sim.planted.fa4 import captured

    found = captured()
    return Kernel(found.launch.ptx, found.run, found.wrong)


def mutants(text: str) -> list[Removal]:
    """Each synchronising instruction left out, and each wait with the other parity."""
    return [*removals(text), *flips(text)]


def outcomes(kernel: Kernel, only: list[Removal] | None = None) -> Iterator[Outcome]:
    """The kernel itself, which must be clean, and then each mutant."""
    clean = kernel.run(kernel.text, Machine())
    if kernel.wrong():
        raise AssertionError("the undamaged kernel gives wrong numbers")
    lines: Counter[int] = Counter()
    for (line, _), times in clean.instructions.items():
        lines[line] += times
    limit = 20 * max(Counter(clean.instructions).values(), default=1) + 100_000
    for removal in mutants(kernel.text) if only is None else only:
        yield _outcome(kernel, removal, lines[removal.line], limit)


def _outcome(kernel: Kernel, removal: Removal, executed: int, limit: int) -> Outcome:
    wrong, runs = 0, 0
    for schedule in SCHEDULES if executed else SCHEDULES[:1]:
        runs += 1
        try:
            kernel.run(removal.text, Machine(schedule=schedule, instruction_limit=limit))
        except SimulationError as e:
            kind = (
                type(e).__name__ if isinstance(e, Finding) else f"{type(e).__name__} (no finding)"
            )
            return _as(removal, executed, kind, str(e), runs, wrong)
        wrong = max(wrong, kernel.wrong())
    return _as(removal, executed, None, "", runs, wrong)


def _as(r: Removal, executed: int, found: str | None, text: str, runs: int, wrong: int) -> Outcome:
    return Outcome(r.kind, r.line, r.instruction, executed, found, text, runs, wrong)


def summary(results: list[Outcome]) -> str:
    """A line for each class of instruction: how many of those executed were found, and as what."""
    by_kind: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in results:
        by_kind[outcome.kind].append(outcome)
    lines = []
    for kind, of_kind in [*by_kind.items(), ("all", results)]:
        executed = [o for o in of_kind if o.executed]
        found = [o for o in executed if o.found]
        by_name = Counter(o.found for o in found)
        first = sum(o.runs == 1 for o in found)
        names = ", ".join(f"{n} {name}" for name, n in by_name.most_common())
        lines.append(
            f"{kind:20} {len(found):3} of {len(executed):3} found "
            f"({first} by round robin; {names}); "
            f"{len(of_kind) - len(executed)} not executed"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("kernel", choices=("gemm", "chain", "fa4"))
    parser.add_argument("--out", type=Path, default=Path("sweep.json"), help="results as JSON")
    chosen = parser.parse_args(arguments)
    kernel = {"gemm": gemm, "chain": chain, "fa4": fa4}[chosen.kernel]()
    total, results, start = len(mutants(kernel.text)), [], time.monotonic()
    for outcome in outcomes(kernel):
        results.append(outcome)
        sys.stdout.write(
            f"[{len(results):3}/{total} {time.monotonic() - start:5.0f} s] line {outcome.line:5} "
            f"{outcome.kind:20} {outcome.found or outcome.verdict}\n"
        )
        sys.stdout.flush()
        chosen.out.write_text(json.dumps([asdict(o) for o in results], indent=1) + "\n")
    sys.stdout.write(summary(results) + "\n")


if __name__ == "__main__":
    main()
