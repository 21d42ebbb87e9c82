"""Real PTX, of flash-attn-4's kernels: nothing is lost, and it takes no time.

The corpus is large and not ours, so it lies outside the repository.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from pathlib import Path

import pytest

from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.ptx.program import Address, Entry, Operand, Pair, Register, Symbol, Vector
from tests.sim.ptx.printing import print_program
from tests.sim.ptx.test_round_trip import without_places

CORPUS = Path("/work/corpus")
FILES = sorted(CORPUS.glob("*.ptx"))
pytestmark = pytest.mark.skipif(not FILES, reason=f"no PTX in {CORPUS}")


def opcodes_by_line(text: str) -> Counter[str]:
    """What `grep` finds: an instruction begins a line, though `mma.sync` goes on over several."""
    line = re.compile(r"^[ \t]*(?:@!?[%\w]+[ \t]+)?([a-z][a-z0-9_]*(?:[.:]+\w+)*)(?=[\s;])", re.M)
    return Counter(line.findall(text))


def names(operand: Operand) -> set[str]:
    """The registers that an operand names."""
    match operand:
        case Register(name):
            return {name}
        case Address(base, _, coordinates):
            inside = (*(coordinates or ()), *((base,) if base is not None else ()))
        case Vector(elements):
            inside = elements
        case Pair(first, second):
            inside = (first, second)
        case _:
            inside = ()
    return {name for operand in inside for name in names(operand)}


def assert_every_name_is_known(entry: Entry) -> None:
    for instruction in entry.instructions:
        used = {name for operand in instruction.operands for name in names(operand)}
        assert used <= entry.registers.keys()
        if instruction.opcode.startswith("bra"):
            (target,) = instruction.operands
            assert isinstance(target, Symbol)
            assert target.name in entry.labels


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_instruction_is_there(path: Path) -> None:
    text = path.read_text()
    entries = parse(text).entries.values()
    parsed = Counter(i.opcode for entry in entries for i in entry.instructions)
    assert parsed == opcodes_by_line(text)
    assert parsed.total() > 100
    lines = text.split("\n")
    for entry in entries:
        assert_every_name_is_known(entry)
        for instruction in entry.instructions:
            following = [line.split("//")[0] for line in lines[instruction.line - 1 :][:8]]
            assert " ".join(" ".join(following).split()).startswith(instruction.text)


@pytest.mark.parametrize("path", FILES[::8], ids=lambda path: path.stem)
def test_modules_survive_printing(path: Path) -> None:
    program = parse(path.read_text())
    assert without_places(parse(print_program(program))) == without_places(program)


def test_time_is_linear_in_the_text() -> None:
    """About 10 us a line; ten times that would be noticed by whoever waits for a kernel."""
    text = max((path.read_text() for path in FILES), key=len)
    begun = time.process_time()
    parse(text)
    assert (time.process_time() - begun) / text.count("\n") < 100e-6
