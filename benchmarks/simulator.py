"""How fast the simulator is: python -m benchmarks.simulator; a minute after the first time.

flash-attn-4's forward, captured once and executed repeatedly, 256 queries a head: with every check
and without, over growing numbers of keys (time should be linear in the work), and several heads
over several processes. Medians of RUNS executions in wall-clock seconds; each launch's first is
left out (it decodes; the first ever also compiles the engine, into the cache). Memory is the
process's peak.
Writes benchmarks/results/simulator.{json,md}.
"""

import os
import resource
import time

import torch

from benchmarks import RESULTS, ROOT
from benchmarks.peers import flash_attn_4
from flash_attn_fp8 import sim
from flash_attn_fp8.results import Results, Row, write
from flash_attn_fp8.sim.launch import CapturedLaunch

RUNS = 7
QUERIES = 256
BARS = {"all": 2.0, "none": 0.5}  # seconds of e4m3, 1024 keys, 1 head, on one core
_CHECKS = {"all": sim.Checks(), "none": sim.Checks(False, False, False, False, False)}
_DTYPES = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}


class Captured:
    """A launch of FA4's forward, and the tensors that it points into."""

    def __init__(self, fmt: str, keys: int, heads: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.case = {"format": fmt, "head_dim": 128, "keys": keys, "heads": heads}
        self.tensors = [
            torch.randn(1, rows, heads, 128, generator=generator).to(_DTYPES[fmt])
            for rows in (QUERIES, keys, keys)
        ]
        launches: list[CapturedLaunch] = []
        forward = flash_attn_4()._flash_attn_fwd
        with sim.device("sm_100a", on_launch=launches.append, sm_count=heads):
            self.results = forward(*self.tensors, causal=False)
        (self.launch,) = launches
        self.program = sim.parse(self.launch.ptx)

    def seconds(self, machine: sim.Machine) -> list[float]:
        """Wall-clock seconds of RUNS executions, after one that warms up."""
        times = []
        for _ in range(RUNS + 1):
            start = time.perf_counter()
            machine.launch(self.program, self.launch.entry, self.launch)
            times.append(time.perf_counter() - start)
        return times[1:]

    def row(self, checks: str, workers: int = 1) -> Row:
        machine = sim.Machine("sm_100a", checks=_CHECKS[checks], workers=workers)
        case = {**self.case, "checks": checks, "workers": workers}
        return Row.of(case, "flash-attn-4 forward", "execution", "s", *self.seconds(machine))

    def instructions(self) -> Row:
        run = sim.Machine("sm_100a").launch(self.program, self.launch.entry, self.launch)
        case = {**self.case, "checks": "all", "workers": 1}
        count = float(run.warp_instructions)
        return Row.of(case, "flash-attn-4 forward", "executed", "warp instructions", count)


def rows() -> list[Row]:
    """Checks on and off, lengths, processes."""
    found = []
    for fmt in _DTYPES:
        for keys in (512, 1024, 2048, 4096):
            captured = Captured(fmt, keys, heads=1)
            found += [captured.row("all"), captured.row("none"), captured.instructions()]
    wide = Captured("e4m3", 1024, heads=4)
    for workers in sorted({1, 2, os.cpu_count() or 1}):
        if workers <= 4:
            found.append(wide.row("all", workers))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    case = {**wide.case, "checks": "all", "workers": 1}
    found.append(Row.of(case, "flash-attn-4 forward", "peak memory", "GiB", peak))
    return found


def main() -> None:
    """Measure, save, and say whether the bars are kept."""
    found = rows()
    results = Results.here(found, "python -m benchmarks.simulator", ROOT)
    print(write(results, "simulator", RESULTS, ("checks",)).with_suffix(".md"))
    for row in found:
        same = row.case["format"] == "e4m3" and row.case["keys"] == 1024 and row.case["heads"] == 1
        if same and row.metric == "execution":
            bar = BARS[str(row.case["checks"])]
            kept = "within" if row.value <= bar else "over"
            print(f"checks {row.case['checks']}: {row.value:.2f} s, {kept} the bar of {bar:g} s")


if __name__ == "__main__":
    main()
