"""What a launch executed and moved, as data: the base of static performance models."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

import numpy as np

from flash_attn_fp8.sim.decode import counts_by_instruction
from flash_attn_fp8.sim.ptx.program import Entry, Symbol
from flash_attn_fp8.sim.state import Cluster


@dataclass(frozen=True)
class Loop:
    """A loop of the PTX: from the line that a backward branch goes to, to that branch's line."""

    first_line: int
    last_line: int


@dataclass(frozen=True)
class Row:
    """Executions of one opcode by one warp (of any CTA) in one innermost loop."""

    warp: int
    loop: Loop | None
    opcode: str
    executed: int


@dataclass
class Run:
    """Counts of a launch, over all its CTAs.

    `instructions` by (PTX line, warp); `traffic` bytes and tensor-core operations by kind; `waits`
    by (warp, barrier): how often a warp had to stop there under the schedule that ran.
    """

    entry: Entry
    instructions: Counter[tuple[int, int]] = field(default_factory=Counter)
    traffic: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[int, str]] = field(default_factory=Counter)

    @property
    def kernel(self) -> str:
        """The entry's name."""
        return self.entry.name

    @property
    def warp_instructions(self) -> int:
        """Instructions executed, each counted once a warp."""
        return sum(self.instructions.values())

    def add(self, cluster: Cluster) -> None:
        """Count a cluster that has run."""
        for cta in cluster.ctas:
            self.traffic.update(cta.counters)
            self.waits.update(cta.waits)
            for warp in cta.warps:
                executed = counts_by_instruction(warp.code, warp.counts)
                some = np.flatnonzero(executed)
                for i, times in zip(some.tolist(), executed[some].tolist(), strict=True):
                    self.instructions[self.entry.instructions[i].line, warp.index] += times

    def update(self, other: Run) -> None:
        """Add another part of the same launch."""
        self.instructions.update(other.instructions)
        self.traffic.update(other.traffic)
        self.waits.update(other.waits)

    def rows(self) -> list[Row]:
        """Executions by warp, innermost loop and opcode."""
        inner = _innermost_loops(self.entry)
        opcode = {i.line: i.opcode for i in self.entry.instructions}
        totals: Counter[tuple[int, Loop | None, str]] = Counter()
        for (line, warp), executed in self.instructions.items():
            totals[warp, inner[line], opcode[line]] += executed

        def order(key: tuple[int, Loop | None, str]) -> tuple[int, int, str]:
            warp, loop, name = key
            return warp, loop.first_line if loop else 0, name

        return [Row(*key, executed=totals[key]) for key in sorted(totals, key=order)]

    def as_data(self) -> dict[str, object]:
        """Everything, ready for `json.dump`."""
        return {
            "kernel": self.kernel,
            "warp_instructions": self.warp_instructions,
            "instructions": [asdict(row) for row in self.rows()],
            "traffic": dict(sorted(self.traffic.items())),
            "waits": [
                {"warp": warp, "barrier": name, "waits": n}
                for (warp, name), n in sorted(self.waits.items())
            ],
        }


def _innermost_loops(entry: Entry) -> dict[int, Loop | None]:
    """The smallest loop around each PTX line that has an instruction."""
    loops = []
    for at, instruction in enumerate(entry.instructions):
        if instruction.parts[0] != "bra":
            continue
        for operand in instruction.operands:
            if isinstance(operand, Symbol) and entry.labels.get(operand.name, at + 1) <= at:
                loops.append((entry.labels[operand.name], at))
    loops.sort(key=lambda loop: loop[1] - loop[0], reverse=True)
    found: list[tuple[int, int] | None] = [None] * len(entry.instructions)
    for first, last in loops:  # the widest first, so that the innermost is written last
        found[first : last + 1] = [(first, last)] * (last + 1 - first)
    lines = [i.line for i in entry.instructions]
    return {
        line: None if loop is None else Loop(lines[loop[0]], lines[loop[1]])
        for line, loop in zip(lines, found, strict=True)
    }
