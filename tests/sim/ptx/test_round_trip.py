"""Printing what was parsed and parsing it again changes nothing: instructions, entries, modules."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_attn_fp8.sim.errors import SimulationError
from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.ptx.program import (
    Address,
    Guard,
    Immediate,
    Instruction,
    Negated,
    Pair,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)
from tests.sim.ptx.printing import entry_of, print_instruction, print_program

KERNELS = sorted((Path(__file__).parent / "kernels").glob("*.ptx"))

VALUES = ["%r0", "%r11", "%rd3", "tmem_acc", "a$1", "_x", "$y"]
PREDICATES = ["%p0", "P1"]
VARIABLES = ["smem", "__dynamic_shmem__0", "map"]
DECLARED = " ".join(
    [f".reg .b64 {', '.join(VALUES)};", f".reg .pred {', '.join(PREDICATES)};"]
    + [f".shared .b8 {name};" for name in VARIABLES]
)

registers = st.sampled_from(VALUES + PREDICATES).map(Register)
symbols = st.builds(Symbol, st.sampled_from(VARIABLES), st.integers(-(2**31), 2**31))
immediates = st.one_of(
    st.builds(Immediate, st.integers(-(2**63), 2**64 - 1)),
    st.builds(Immediate, st.integers(0, 2**32 - 1), st.just("f32")),
    st.builds(Immediate, st.integers(0, 2**64 - 1), st.just("f64")),
)
specials = st.sampled_from(["%tid.x", "%nctaid.z", "%laneid", "%clock64"]).map(Special)
scalars = st.one_of(registers, immediates, specials, symbols, st.just(Sink()))
lists = st.lists(scalars, min_size=1, max_size=8).map(tuple)
results = st.one_of(registers, st.just(Sink()))
bases = st.one_of(registers, st.sampled_from(VARIABLES).map(Symbol), st.none())
operands = st.one_of(
    scalars,
    st.builds(Address, bases, st.integers(-(2**31), 2**31), st.one_of(st.none(), lists)),
    st.builds(Vector, lists),
    st.builds(Pair, results, results),
    st.builds(Negated, registers),
)
words = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=9)
suffixes = st.lists(words, min_size=1, max_size=3).map("::".join)
# Labels and functions are operands of their own kind; they have tests of their own.
stems = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True).filter(
    lambda stem: stem not in ("bra", "brx") and not stem.startswith(("brx", "call"))
)
opcodes = st.builds(lambda s, rest: ".".join([s, *rest]), stems, st.lists(suffixes, max_size=6))
guards = st.one_of(st.none(), st.builds(Guard, st.sampled_from(PREDICATES), st.booleans()))
instructions = st.builds(
    Instruction,
    line=st.just(5),
    text=st.just(""),
    opcode=opcodes,
    operands=st.lists(operands, max_size=6).map(tuple),
    guard=guards,
).map(lambda i: replace(i, text=print_instruction(i)))


@given(instructions)
def test_an_instruction_survives_printing(instruction: Instruction) -> None:
    assert entry_of(instruction.text, DECLARED).instructions == (instruction,)


@given(st.lists(instructions, min_size=2, max_size=5))
def test_instructions_do_not_disturb_one_another(found: list[Instruction]) -> None:
    """The cache of operands is the only state between two instructions."""
    parsed = entry_of("\n".join(i.text for i in found), DECLARED).instructions
    assert list(parsed) == [replace(i, line=5 + n) for n, i in enumerate(found)]


@given(st.text(alphabet='%r1pP@!{}[](),;:.|_+-0fx \n/*"$', max_size=60))
def test_no_text_breaks_the_parser_itself(body: str) -> None:
    """Whatever stands in a function is parsed or refused with its line, never another exception."""
    try:
        found = [i.line for i in entry_of(body, DECLARED).instructions]
    except SimulationError as error:
        found = [int(n) for n in re.findall(r"^PTX line (\d+): ", str(error))]
        found = found or [0]
    assert all(1 <= line <= 6 + body.count("\n") for line in found)


def without_places(program: Program) -> Program:
    """The program less the lines and texts of its instructions."""
    entries = {
        name: replace(
            entry,
            instructions=tuple(replace(i, line=0, text="") for i in entry.instructions),
        )
        for name, entry in program.entries.items()
    }
    return replace(program, entries=entries)


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_a_module_survives_printing(path: Path) -> None:
    program = parse(path.read_text())
    printed = print_program(program)
    assert without_places(parse(printed)) == without_places(program)


def test_sm80() -> None:
    program = parse((KERNELS[0].parent / "sm80.ptx").read_text())
    entry = program.entries["tile"]
    assert program.target == "sm_80"
    assert len(entry.instructions) == 30
    assert [p.offset for p in entry.parameters] == [0, 8, 16, 24]
    assert entry.labels == {"$L__BB0_1": 11, "$L__BB0_2": 29}
    mma = entry.instructions[18]
    assert mma.opcode == "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    assert mma.line == 42
    accumulators = Vector(tuple(Register(f"%f{n}") for n in range(1, 5)))
    assert (mma.operands[0], mma.operands[3]) == (accumulators, accumulators)


def test_sm90a() -> None:
    program = parse((KERNELS[0].parent / "sm90a.ptx").read_text())
    entry = program.entries["product"]
    directives = {"reqntid": (128, 1, 1), "explicitcluster": (), "reqnctapercluster": (2, 1, 1)}
    assert (program.target, entry.directives) == ("sm_90a", directives)
    copy = next(i for i in entry.instructions if i.opcode.startswith("cp.async.bulk.tensor"))
    assert copy.operands == (
        Address(Register("%r3")),
        Address(Register("%rd2"), 0, (Register("%r4"), Immediate(0), Special("%ctaid.x"))),
        Address(Symbol("full")),
        Immediate(3),
    )
    product = next(i for i in entry.instructions if i.opcode.startswith("wgmma.mma_async"))
    assert product.operands[3:] == (Register("p$2"), *map(Immediate, (1, 1, 0, 1)))


def test_sm100a() -> None:
    program = parse((KERNELS[0].parent / "sm100a.ptx").read_text())
    entry = program.entries["product"]
    assert program.target == "sm_100a"
    both = [i for i in entry.instructions if i.opcode.startswith("tcgen05.mma")]
    assert [i.guard for i in both] == [Guard("leader_thread$1", False)] * 2
    assert both[0].operands[4:] == (Vector((Immediate(0),) * 4), Register("p$1"))
    assert both[1].operands == (
        Address(Register("tmem_acc$1"), 16),
        Address(Register("tmem_acc$1"), 32),
        Register("desc_1$1"),
        Register("idesc$1"),
        Negated(Register("p$1")),
    )
    assert entry.instructions[-3].operands[0] == Vector(
        (Register("%r11"), Register("%r12"), Register("%r13"), Sink())
    )
