"""SASS as data: instructions, the loops among them, and the pipe that each instruction keeps busy.

What nvdisasm prints of a cubin becomes basic blocks, a control-flow graph and its natural loops. A
block of a loop is executed in every round if it dominates the jump back; others are conditional.
Standard library alone, so that it can be loaded by its path from any checkout.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

_FUNCTION = re.compile(r"^\.text\.([^\s:]+):")
_LABEL = re.compile(r"^(\.L_\w+|\$\w+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_TARGET = re.compile(r"`\(([^)]+)\)")

# Pipe and cycles of a warp instruction on its sub-partition, by the mnemonic's stem; see PIPES.
_FMA_SCALAR = "FADD FFMA FMUL FADD32I FFMA32I FMUL32I"
_FMA = "FADD2 FFMA2 FMUL2 HADD2 HFMA2 HMUL2 IMAD"
_ALU = (
    "FMNMX FMNMX3 FSEL FSET FSETP FSWZADD F2FP I2FP HMNMX2 HSETP2 HSET2 IADD IADD3 IABS ISETP "
    "IMNMX LEA LOP3 MOV PLOP3 PRMT P2R R2P SEL SGXT SHF SHL SHR BMSK VIADD VIADD2 VIADDMNMX "
    "VIMNMX VIMNMX3 VABSDIFF"
)
_XU = "MUFU F2F F2I FRND I2F POPC FLO BREV"
_LSU = "LDS STS LDSM STSM LDG STG LD ST LDL STL ATOM ATOMS ATOMG RED REDUX SHFL"
_COST: dict[str, tuple[str, int]] = {
    **dict.fromkeys(_FMA_SCALAR.split(), ("FMA", 1)),
    **dict.fromkeys(_FMA.split(), ("FMA", 2)),
    **dict.fromkeys(_ALU.split(), ("ALU", 2)),
    **dict.fromkeys(_XU.split(), ("MUFU", 8)),
    **dict.fromkeys(_LSU.split(), ("LSU", 2)),
}
PIPES = ("MUFU", "FMA", "ALU", "LSU")


@dataclass(frozen=True)
class Instruction:
    """One line: where, under which predicate, what."""

    address: int
    predicate: str | None
    opcode: str
    operands: str

    @property
    def stem(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def target(self) -> str | None:
        """The label that it may continue at."""
        found = _TARGET.search(self.operands)
        return found[1] if found else None


@dataclass
class Block:
    """Instructions that are executed one after another, and the blocks that may come next."""

    labels: tuple[str, ...]
    instructions: list[Instruction] = field(default_factory=list)
    successors: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Loop:
    """A natural loop: all its blocks, and those of them that every round passes through."""

    header: int
    blocks: frozenset[int]
    always: frozenset[int]


# ---------------------------------------------------------------------------------- reading


def tool(name: str) -> Path:
    """A CUDA binary utility as its PyPI package installs it (nvidia-cuda-nvdisasm, ...)."""
    package = f"nvidia-cuda-{name}"
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name:
            return Path(str(file.locate()))
    raise FileNotFoundError(f"{name} is not there: pip install {package}")


def printed(name: str, *arguments: str, cubin: bytes) -> str:
    """What a utility says of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool(name)), *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def functions(text: str) -> dict[str, list[Block]]:
    """The kernels in nvdisasm's text, as blocks with their successors."""
    found: dict[str, list[Block]] = {}
    blocks: list[Block] = []
    inside = False
    for line in text.splitlines():
        if start := _FUNCTION.match(line):
            blocks = found.setdefault(start[1], [Block(())])
            inside = True
        elif line.lstrip().startswith(".section"):
            inside = False
        elif not inside:
            continue
        elif label := _LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(Block(()))
            blocks[-1].labels += (label[1],)
        elif parts := _INSTRUCTION.match(line):
            if blocks[-1].instructions and _ends_block(blocks[-1].instructions[-1]):
                blocks.append(Block(()))
            address, predicate, opcode, operands = parts.groups()
            blocks[-1].instructions.append(
                Instruction(int(address, 16), predicate, opcode, operands)
            )
    for each in found.values():
        _connect(each)
    return found


_LEAVES = ("EXIT", "RET", "BRX", "JMX", "KILL")


def _ends_block(i: Instruction) -> bool:
    return i.stem in ("BRA", "BSYNC", "BREAK", *_LEAVES)


def _connect(blocks: list[Block]) -> None:
    at = {label: number for number, block in enumerate(blocks) for label in block.labels}
    meeting: dict[str, str] = {}  # by convergence barrier, the label of its last BSSY
    for number, block in enumerate(blocks):
        for i in block.instructions:
            if i.stem == "BSSY" and i.target:
                meeting[i.operands.split(",")[0]] = i.target
        if not block.instructions:
            continue
        last = block.instructions[-1]
        conditional = last.predicate is not None or (last.stem == "BRA" and _has_condition(last))
        target = last.target
        if last.stem == "BSYNC":
            target = meeting.get(last.operands.split(",")[0])
        if last.stem in ("BRA", "BSYNC") and target in at:
            block.successors.add(at[target])
        goes_on = conditional or last.stem not in ("BRA", "BSYNC", *_LEAVES)
        if (goes_on or (last.stem == "BSYNC" and target is None)) and number + 1 < len(blocks):
            block.successors.add(number + 1)


def _has_condition(branch: Instruction) -> bool:
    """`BRA.U UP0, label` and `BRA.DIV ...` have a condition among their operands."""
    return "," in branch.operands


# ------------------------------------------------------------------------------------ loops


def loops(blocks: Sequence[Block]) -> list[Loop]:
    """Natural loops, loops of one header taken together; the smallest first."""
    before = _predecessors(blocks)
    dominators = _dominators(blocks, before)
    latches: dict[int, set[int]] = {}
    for number, block in enumerate(blocks):
        for successor in block.successors:
            if successor in dominators[number]:
                latches.setdefault(successor, set()).add(number)
    found = []
    for header, ends in latches.items():
        inside, todo = {header}, list(ends)
        while todo:
            if (number := todo.pop()) not in inside:
                inside.add(number)
                todo += before[number]
        always = frozenset.intersection(*(dominators[end] for end in ends)) & inside
        found.append(Loop(header, frozenset(inside), always))
    return sorted(found, key=lambda loop: len(loop.blocks))


def _predecessors(blocks: Sequence[Block]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in blocks]
    for number, block in enumerate(blocks):
        for successor in block.successors:
            before[successor].append(number)
    return before


def _dominators(blocks: Sequence[Block], before: list[list[int]]) -> list[frozenset[int]]:
    """Of each block, those that every way to it passes; what only BRX leads to is an entry too."""
    everything = frozenset(range(len(blocks)))
    dominators = [everything if before[n] else frozenset({n}) for n in range(len(blocks))]
    dominators[0] = frozenset({0})
    changed = True
    while changed:
        changed = False
        for n in range(1, len(blocks)):
            if before[n]:
                new = frozenset({n}).union(
                    frozenset.intersection(*(dominators[p] for p in before[n]))
                )
                if new != dominators[n]:
                    dominators[n], changed = new, True
    return dominators


def loop_with(blocks: Sequence[Block], counts: Mapping[str, int]) -> Loop | None:
    """Of the innermost loops with at least so many instructions of each kind, the shortest.

    A kind is how an opcode begins. Of a loop in two versions (with and without a mask, say) the
    shortest is the one of most rounds.
    """
    found: list[Loop] = []
    for loop in loops(blocks):
        opcodes = [i.opcode for n in loop.blocks for i in blocks[n].instructions]
        enough = all(sum(o.startswith(k) for o in opcodes) >= n for k, n in counts.items())
        if enough and not any(inner.blocks < loop.blocks for inner in found):
            found.append(loop)
    return min(found, key=lambda loop: len(always_executed(blocks, loop)), default=None)


def always_executed(blocks: Sequence[Block], loop: Loop) -> list[Instruction]:
    """The instructions of every round."""
    return [i for n in sorted(loop.always) for i in blocks[n].instructions]


def conditional(blocks: Sequence[Block], loop: Loop) -> Iterator[list[Instruction]]:
    """The other blocks of a loop, retries of waits left out."""
    for n in sorted(loop.blocks - loop.always):
        instructions = blocks[n].instructions
        if any(i.opcode.startswith("SYNCS.PHASECHK") for i in instructions):
            continue
        if all(i.stem in ("BRA", "NANOSLEEP", "NOP") for i in instructions):
            continue
        yield instructions


# ------------------------------------------------------------------------------------ costs


def classes(instructions: Iterable[Instruction]) -> Counter[str]:
    """Counts by mnemonic, coarse: the uniform data path and control flow are one class each."""
    return Counter(_class(i) for i in instructions)


def _class(i: Instruction) -> str:
    stem = i.stem
    if stem == "MUFU":
        return i.opcode
    if stem in _COST or stem in ("LDTM", "STTM", "SYNCS", "R2UR", "NOP", "VOTE", "FENCE"):
        return stem
    if stem.startswith(("UTC", "UTMA", "UBLK")):
        return stem
    if stem.startswith("U"):
        return "uniform"
    if stem in ("BRA", "BSSY", "BSYNC", "BREAK", "EXIT", "WARPSYNC", "BAR", "ELECT"):
        return "control"
    return stem


def pipes(instructions: Iterable[Instruction]) -> dict[str, int]:
    """Cycles of each pipe of a sub-partition for one warp; "issue" has one an instruction."""
    found = dict.fromkeys(("issue", *PIPES), 0)
    for i in instructions:
        found["issue"] += 1
        pipe, cycles = _COST.get(i.stem, ("", 0))
        if pipe:
            found[pipe] += cycles
    return found


def bound(cycles: Mapping[str, float]) -> tuple[str, float]:
    """The pipe that is busy longest, and for how long."""
    return max(cycles.items(), key=lambda item: item[1])


def resources(cubin: bytes) -> dict[str, int]:
    """Registers a thread at launch, bytes of stack, of local and of static shared memory."""
    text = printed("cuobjdump", "--dump-resource-usage", cubin=cubin)
    return {name: int(n) for name, n in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}


def spills(blocks: Sequence[Block]) -> dict[int | None, int]:
    """Accesses to local memory, by the outermost loop that holds them: by its header."""
    outermost: dict[int, int] = {}
    for loop in loops(blocks):  # the largest comes last
        outermost.update(dict.fromkeys(loop.blocks, loop.header))
    found: Counter[int | None] = Counter()
    for number, block in enumerate(blocks):
        count = sum(i.stem in ("LDL", "STL") for i in block.instructions)
        if count:
            found[outermost.get(number)] += count
    return dict(found)
