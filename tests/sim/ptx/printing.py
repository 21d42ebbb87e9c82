"""PTX's data written as PTX again, and the parser's surroundings that most tests need."""

from __future__ import annotations

from collections import defaultdict

from flash_attn_fp8.sim.ptx.parse import parse
from flash_attn_fp8.sim.ptx.program import (
    Address,
    Entry,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Program,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"


def module(body: str, declarations: str = "", parameters: str = "") -> str:
    """A module of one kernel `k`; `body` begins on line 5."""
    return f"{HEADER}.visible .entry k({parameters}) {{ {declarations}\n{body}\n}}\n"


def entry_of(body: str, declarations: str = "", parameters: str = "") -> Entry:
    return parse(module(body, declarations, parameters)).entries["k"]


def offset_text(offset: int) -> str:
    return f"+{offset}" if offset else ""


def operand_text(operand: Operand) -> str:
    match operand:
        case Register(name) | Special(name):
            return name
        case Immediate(value, "int"):
            return str(value)
        case Immediate(value, "f32"):
            return f"0f{value:08X}"
        case Immediate(value):
            return f"0d{value:016X}"
        case Symbol(name, offset):
            return name + offset_text(offset)
        case Address(None, offset, coordinates):
            return f"[{offset}{coordinates_text(coordinates)}]"
        case Address(Register(name) | Symbol(name), offset, coordinates):
            return f"[{name}{offset_text(offset)}{coordinates_text(coordinates)}]"
        case Vector(elements):
            return f"{{{', '.join(map(operand_text, elements))}}}"
        case Pair(first, second):
            return f"{operand_text(first)}|{operand_text(second)}"
        case Negated(register):
            return f"!{register.name}"
        case Sink():
            return "_"
    raise TypeError(f"no operand: {operand!r}")


def coordinates_text(coordinates: tuple[Operand, ...] | None) -> str:
    return "" if coordinates is None else ", " + operand_text(Vector(coordinates))


def instruction_text(
    opcode: str, operands: tuple[Operand, ...], register: str | None = None, negated: bool = False
) -> str:
    guard = "" if register is None else f"@{'!' * negated}{register} "
    return f"{guard}{opcode} {', '.join(map(operand_text, operands))}".rstrip() + ";"


def print_instruction(instruction: Instruction) -> str:
    guard = instruction.guard
    if guard is None:
        return instruction_text(instruction.opcode, instruction.operands)
    return instruction_text(instruction.opcode, instruction.operands, guard.register, guard.negated)


def print_variable(variable: Variable) -> str:
    start = f".{variable.space} .align {variable.align} .b8 {variable.name}"
    if not variable.size:
        return f".extern {start}[];"
    if variable.initial is None:
        return f"{start}[{variable.size}];"
    return f"{start}[{variable.size}] = {{{', '.join(map(str, variable.initial))}}};"


def print_entry(entry: Entry) -> list[str]:
    """The entry without inner braces: unique names are declared at its top."""
    parameters = [f".param .align {p.align} .b8 {p.name}[{p.size}]" for p in entry.parameters]
    lines = [f".visible .entry {entry.name}(", ",\n".join(parameters), ")"]
    lines += [f".{name} {', '.join(map(str, v))}" for name, v in entry.directives.items()]
    lines += ["{"]
    lines += [f".reg .{kind} {name};" for name, kind in entry.registers.items()]
    lines += map(print_variable, entry.variables)
    labels = defaultdict(list)
    for label, at in entry.labels.items():
        labels[at].append(label)
    for at, instruction in enumerate(entry.instructions):
        lines += [f"{label}:" for label in labels[at]]
        lines += [print_instruction(instruction)]
    lines += [f"{label}:" for label in labels[len(entry.instructions)]]
    lines += [f"{name}: .branchtargets {', '.join(t)};" for name, t in entry.branch_targets.items()]
    return [*lines, "}"]


def print_program(program: Program) -> str:
    lines = [f".version {program.version}", f".target {program.target}", ".address_size 64"]
    lines += map(print_variable, program.variables)
    for entry in program.entries.values():
        lines += print_entry(entry)
    return "\n".join(lines) + "\n"
