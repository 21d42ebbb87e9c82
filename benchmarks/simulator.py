"""How fast the simulator is: python -m benchmarks.simulator; four minutes after the first time.

flash-attn-4's forward, captured once and executed repeatedly, 256 queries a head: with every check
and without, over growing numbers of keys (time should be linear in the work), and 32 heads over
several processes. Medians of several executions in wall-clock seconds; each launch's first is left
out (it decodes; the first ever also compiles the engine, into the cache). "processor" is the
seconds of all processes together, which say what the processes cost where the cores are shared.

Each figure has a process of its own, so that memory is one configuration's: "simulate" has only
numpy, numba and the launch, read from a file; "whole" is the user's: torch, the DSL, its
compilation of the kernel, and one execution.

Writes benchmarks/results/simulator.{json,md}.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, ROOT
from benchmarks.peers import flash_attn_4
from benchmarks.simulator_launch import peak_gib, save
from flash_attn_fp8 import sim
from flash_attn_fp8.results import Results, Row, write
from flash_attn_fp8.sim.launch import CapturedLaunch

QUERIES = 256
HEADS = 32  # of the grid that is spread over processes
BARS = {"all": 2.0, "none": 0.5}  # seconds of e4m3, 1024 keys, 1 head, on one core
MEMORY_BAR = 2.0  # GiB of the same, with every check
_DTYPES = {"e4m3": torch.float8_e4m3fn, "bf16": torch.bfloat16}


class Captured:
    """A launch of FA4's forward, and the tensors that it points into."""

    def __init__(self, fmt: str, keys: int, heads: int) -> None:
        generator = torch.Generator().manual_seed(0)
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


def _process(module: str, *arguments: object) -> dict[str, Any]:
    """What a module prints, as a process of its own, in its last line."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def capture(fmt: str, keys: int, heads: int, path: Path) -> None:
    """Compile, execute once, print the peak of that, and save the launch."""
    captured = Captured(fmt, keys, heads)
    save(captured.launch, path)
    sim.Machine("sm_100a").launch(captured.program, captured.launch.entry, captured.launch)
    print(json.dumps({"peak": peak_gib()}))


def _row(case: dict[str, Any], metric: str, unit: str, *runs: float) -> Row:
    return Row.of(case, "flash-attn-4 forward", metric, unit, *runs)


def rows(folder: Path) -> list[Row]:
    """Checks on and off, lengths, processes, memory."""
    found = []
    for fmt in _DTYPES:
        for keys in (512, 1024, 2048, 4096):
            found += _one_head(folder, fmt, keys)
    path = folder / "wide"
    _process("benchmarks.simulator", "--capture", "e4m3", 1024, HEADS, path)
    for workers in sorted({1, 2, min(4, os.cpu_count() or 1)}):
        taken = _process("benchmarks.simulator_launch", path, "--runs", 3, "--workers", workers)
        case = _case("e4m3", 1024, HEADS) | {"checks": "all", "workers": workers}
        found.append(_row(case, "execution", "s", *taken["wall"]))
        found.append(_row(case, "processor", "s", *taken["processor"]))
        if workers == 1:
            found.append(_row(case | {"process": "simulate"}, "peak memory", "GiB", taken["peak"]))
    return found


def _case(fmt: str, keys: int, heads: int) -> dict[str, Any]:
    return {"format": fmt, "head_dim": 128, "keys": keys, "heads": heads}


def _one_head(folder: Path, fmt: str, keys: int) -> list[Row]:
    path = folder / f"{fmt}_{keys}"
    whole = _process("benchmarks.simulator", "--capture", fmt, keys, 1, path)
    checked = _process("benchmarks.simulator_launch", path)
    unchecked = _process("benchmarks.simulator_launch", path, "--no-checks")
    case = _case(fmt, keys, 1) | {"checks": "all", "workers": 1}
    return [
        _row(case, "execution", "s", *checked["wall"]),
        _row(case, "processor", "s", *checked["processor"]),
        _row(case | {"checks": "none"}, "processor", "s", *unchecked["processor"]),
        _row(case | {"checks": "none"}, "execution", "s", *unchecked["wall"]),
        _row(case, "executed", "warp instructions", checked["instructions"]),
        _row(case | {"process": "simulate"}, "peak memory", "GiB", checked["peak"]),
        _row(case | {"process": "whole"}, "peak memory", "GiB", whole["peak"]),
    ]


def _judge(found: list[Row]) -> None:
    for row in found:
        if (row.case["format"], row.case["keys"], row.case["heads"]) != ("e4m3", 1024, 1):
            continue
        if row.metric not in ("execution", "peak memory"):
            continue
        bar = MEMORY_BAR if row.metric == "peak memory" else BARS[str(row.case["checks"])]
        what = f"{row.metric}, checks {row.case['checks']}, process {row.at('process')}"
        kept = "within" if row.value < bar else "over"
        print(f"{what}: {row.value:.2f} {row.unit}, {kept} the bar of {bar:g}")


def main() -> None:
    """Measure, save, and say whether the bars are kept."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--capture", nargs=4, metavar=("FORMAT", "KEYS", "HEADS", "FILE"))
    chosen = parser.parse_args()
    if chosen.capture:
        fmt, keys, heads, path = chosen.capture
        capture(fmt, int(keys), int(heads), Path(path))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = rows(Path(folder))
    results = Results.here(found, "python -m benchmarks.simulator", ROOT)
    print(write(results, "simulator", RESULTS, ("checks", "process")).with_suffix(".md"))
    _judge(found)


if __name__ == "__main__":
    main()
