"""A timeline of a run, in the Chrome trace format that Perfetto and chrome://tracing open.

Time is counted in executed instructions along the longest chain of dependences: a warp's time
advances with its instructions, and leaves a wait at the time of the last arrival. It is what would
be seen if every warp issued one instruction a tick and asynchronous work took none; it shows who
waits for whom, not how long hardware takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flash_attn_fp8.sim.ptx.program import Instruction
    from flash_attn_fp8.sim.state import Cta, Warp

ASYNCHRONOUS = (
    "cp.async.bulk",
    "cp.reduce.async.bulk",
    "tcgen05.mma",
    "tcgen05.cp",
    "wgmma.mma_async",
)


@dataclass
class Trace:
    """Collects slices; `write` saves them.

    `names` gives warps roles: `{12: "mma"}`; those of the machine's `roles` need not be repeated.
    """

    names: dict[int, str] = field(default_factory=dict)
    _events: list[dict[str, object]] = field(default_factory=list)
    _tracks: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    _processes: dict[str, int] = field(default_factory=dict)
    _since: dict[int, int] = field(default_factory=dict)

    def ran(self, warp: Warp, until: int) -> None:
        """The warp executed instructions from its last slice until now."""
        start = self._since.get(id(warp), 0)
        if until > start:
            self._slice(warp, "run", start, until, {})
        self._since[id(warp)] = until

    def ended(self, warp: Warp, until: int) -> None:
        """The warp has exited; another one may get its identity."""
        self.ran(warp, until)
        del self._since[id(warp)]

    def waited(self, warp: Warp, start: int, end: int, instruction: Instruction) -> None:
        """The warp waited at an instruction."""
        self.ran(warp, start)
        at = warp.barrier_used or instruction.parts[0]
        self._slice(warp, f"wait {at}", start, end, {"ptx": instruction.text})
        self._since[id(warp)] = end

    def started(self, warp: Warp, now: int, instruction: Instruction) -> None:
        """The warp executed an instruction; one that starts asynchronous work leaves a mark."""
        if instruction.opcode.startswith(ASYNCHRONOUS):
            name = ".".join(instruction.parts[:2])
            mark = {"name": name, "ph": "i", "s": "t", "ts": now, "args": {"ptx": instruction.text}}
            self._events.append({**mark, **self._track(warp)})

    def _slice(self, warp: Warp, name: str, start: int, end: int, args: dict[str, object]) -> None:
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "ts": start,
                "dur": end - start,
                "args": args,
                **self._track(warp),
            }
        )

    def _track(self, warp: Warp) -> dict[str, object]:
        pid = self._process(warp.cta)
        key = (warp.cta.name, warp.index)
        if key not in self._tracks:
            self._tracks[key] = (pid, warp.index)
            role = self.names.get(warp.index)
            name = f"warp {warp.index:2}" + (f" ({role})" if role else "")
            self._events.append(_metadata("thread_name", name, pid, warp.index))
        return {"pid": pid, "tid": warp.index}

    def _process(self, cta: Cta) -> int:
        if cta.name not in self._processes:
            self._processes[cta.name] = len(self._processes)
            self._events.append(_metadata("process_name", cta.name, len(self._processes) - 1, 0))
        return self._processes[cta.name]

    @property
    def events(self) -> list[dict[str, object]]:
        """The events of the format: slices ("X"), marks ("i") and names ("M")."""
        return self._events

    def write(self, path: str | Path) -> None:
        """Save as JSON."""
        document = {"traceEvents": self._events, "displayTimeUnit": "ns"}
        Path(path).write_text(json.dumps(document) + "\n", encoding="utf-8")


def _metadata(kind: str, name: str, pid: int, tid: int) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
