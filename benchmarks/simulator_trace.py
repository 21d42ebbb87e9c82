"""The picture of a trace in docs/simulator.md: python -m benchmarks.simulator_trace; half a minute.

flash-attn-4's e4m3 forward, 256 queries x 512 keys. Writes docs/images/simulator_trace.png, and
build/simulator_trace.json, which ui.perfetto.dev opens.
"""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import Patch

from benchmarks import ROOT
from benchmarks.simulator import Captured
from flash_attn_fp8 import sim

# As FA4's forward numbers its warps (flash_fwd_sm100.py, 4.0.0b36).
ROLES = {
    **dict.fromkeys(range(4), "softmax 0"),
    **dict.fromkeys(range(4, 8), "softmax 1"),
    **dict.fromkeys(range(8, 12), "correction"),
    12: "mma", 13: "epilogue", 14: "load", 15: "idle",
}  # fmt: skip
_COLOURS = {"run": "#3b6ea5", "wait": "#e4e4e4"}


def draw(trace: sim.Trace, path: Path) -> None:
    """Bars where warps execute, grey where they wait, ticks where asynchronous work starts."""
    figure, axes = pyplot.subplots(figsize=(11, 5.2), layout="constrained")
    for event in trace.events:
        row = event["tid"]
        if event["ph"] == "X":
            kind = "run" if event["name"] == "run" else "wait"
            axes.broken_barh([(event["ts"], event["dur"])], (row - 0.4, 0.8), color=_COLOURS[kind])
        elif event["ph"] == "i":
            colour = "#c0392b" if "mma" in event["name"] else "#2e8b57"
            axes.plot([event["ts"]] * 2, [row - 0.4, row + 0.4], color=colour, linewidth=0.6)
    axes.set_yticks(list(ROLES), [f"{w} {role}" for w, role in ROLES.items()], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("executed instructions along the longest chain of dependences")
    handles = [
        Patch(color=_COLOURS["run"], label="executes"),
        Patch(color=_COLOURS["wait"], label="waits"),
        Patch(color="#c0392b", label="starts an MMA"),
        Patch(color="#2e8b57", label="starts a copy"),
    ]
    axes.legend(handles=handles, loc="lower right", fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    """Run, and save both forms."""
    captured = Captured("e4m3", keys=512, heads=1)
    trace = sim.Trace(ROLES)
    sim.Machine("sm_100a", trace=trace).launch(
        captured.program, captured.launch.entry, captured.launch
    )
    (ROOT / "build").mkdir(exist_ok=True)
    trace.write(ROOT / "build" / "simulator_trace.json")
    picture = ROOT / "docs" / "images" / "simulator_trace.png"
    picture.parent.mkdir(exist_ok=True)
    draw(trace, picture)
    print(picture)


if __name__ == "__main__":
    main()
