"""What a launch executed and moved, as data: the base of static performance models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from flash_attn_fp8.sim.decode import counts_by_instruction
from flash_attn_fp8.sim.ptx.program import Entry, Symbol
from flash_attn_fp8.sim.roles import alike
from flash_attn_fp8.sim.state import Cluster


@dataclass(frozen=True)
class Loop:
    """A loop of the PTX: from the line that a backward branch goes to, to that branch's line."""

    first_line: int
    last_line: int


@dataclass(frozen=True)
class Row:
    """Executions of one opcode by warps (of any CTA) in one innermost loop.

    `who` is a warp's number, or a role's name.
    """

    who: int | str
    loop: Loop | None
    opcode: str
    executed: int


Counts = tuple[npt.NDArray[np.int64], "Counter[str]", "Counter[tuple[int, str]]"]


@dataclass
class Run:
    """Counts of a launch, over all its CTAs.

    `executed` by warp and instruction of the entry; `roles` has the names that the caller gave to
    warps; `traffic` bytes and tensor-core operations by kind; `waits` by (warp, barrier): how often
    a warp had to stop there under the schedule that ran.
    """

    entry: Entry
    executed: npt.NDArray[np.int64]
    roles: Mapping[int, str]
    traffic: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[int, str]] = field(default_factory=Counter)

    @classmethod
    def zero(cls, entry: Entry, warps: int, roles: Mapping[int, str]) -> Run:
        """Of a kernel that has not run; `warps` a CTA."""
        return cls(entry, np.zeros((warps, len(entry.instructions)), np.int64), roles)

    @property
    def kernel(self) -> str:
        """The entry's name."""
        return self.entry.name

    @property
    def warp_instructions(self) -> int:
        """Instructions executed, each counted once a warp."""
        return int(self.executed.sum())

    @property
    def instructions(self) -> Counter[tuple[int, int]]:
        """Executions by (PTX line, warp)."""
        found: Counter[tuple[int, int]] = Counter()
        for warp, at in np.argwhere(self.executed).tolist():
            found[self.entry.instructions[at].line, warp] += int(self.executed[warp, at])
        return found

    def add(self, cluster: Cluster) -> None:
        """Count a cluster that has run."""
        for cta in cluster.ctas:
            self.traffic.update(cta.counters)
            self.waits.update(cta.waits)
            for warp in cta.warps:
                self.executed[warp.index] += counts_by_instruction(warp.code, warp.counts)

    def update(self, other: Run) -> None:
        """Add another part of the same launch."""
        self.add_counts(other.counts())

    def counts(self) -> Counts:
        """What is counted, without the kernel: what processes send each other."""
        return self.executed, self.traffic, self.waits

    def add_counts(self, counts: Counts) -> None:
        """Add the counts of another part of the same launch."""
        executed, traffic, waits = counts
        self.executed += executed
        self.traffic.update(traffic)
        self.waits.update(waits)

    def groups(self) -> list[tuple[int, ...]]:
        """Warps that executed the same code: the roles of a kernel that nobody named."""
        return alike(self.executed)

    def rows(self) -> list[Row]:
        """Executions by warp, innermost loop and opcode."""
        return self._rows({})

    def role_rows(self) -> list[Row]:
        """Executions by role, innermost loop and opcode; of a warp without one, by its number."""
        return self._rows(self.roles)

    def group_rows(self) -> list[Row]:
        """Executions by group, innermost loop and opcode; a group is named by its warps, "0-3"."""
        return self._rows({w: _spans(group) for group in self.groups() for w in group})

    def _rows(self, names: Mapping[int, str]) -> list[Row]:
        inner = _innermost_loops(self.entry)
        first_warp: dict[int | str, int] = {}
        totals: Counter[tuple[int | str, Loop | None, str]] = Counter()
        for warp, at in np.argwhere(self.executed).tolist():
            who = names.get(warp, warp)
            first_warp.setdefault(who, warp)
            opcode = self.entry.instructions[at].opcode
            totals[who, inner[at], opcode] += int(self.executed[warp, at])

        def order(key: tuple[int | str, Loop | None, str]) -> tuple[int, int, str]:
            who, loop, opcode = key
            return first_warp[who], loop.first_line if loop else 0, opcode

        return [Row(*key, executed=totals[key]) for key in sorted(totals, key=order)]

    def as_data(self) -> dict[str, object]:
        """Everything, ready for `json.dump`.

        Warps have the roles that the caller gave them, null without one. `groups` are derived.
        """
        return {
            "kernel": self.kernel,
            "warp_instructions": self.warp_instructions,
            "roles": [
                {"role": role, "warps": [w for w, name in self.roles.items() if name == role]}
                for role in dict.fromkeys(self.roles.values())
            ],
            "groups": [list(group) for group in self.groups()],
            "instructions": [
                {
                    "warp": row.who,
                    "role": self.roles.get(int(row.who)),
                    "loop": asdict(row.loop) if row.loop else None,
                    "opcode": row.opcode,
                    "executed": row.executed,
                }
                for row in self.rows()
            ],
            "traffic": dict(sorted(self.traffic.items())),
            "waits": [
                {"warp": warp, "role": self.roles.get(warp), "barrier": name, "waits": n}
                for (warp, name), n in sorted(self.waits.items())
            ],
        }


def _spans(numbers: Sequence[int]) -> str:
    """Ascending numbers as text: "0-3, 7"."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else f"{a}" for a, b in spans)


def _innermost_loops(entry: Entry) -> list[Loop | None]:
    """The smallest loop around each instruction."""
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
    return [None if loop is None else Loop(lines[loop[0]], lines[loop[1]]) for loop in found]
