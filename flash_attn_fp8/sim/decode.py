"""From PTX instructions to micro-operations: a kernel as arrays that the engine walks.

A warp's registers are `uint64[rows, 32]`: a row for each virtual register that occurs (b128: two,
low half first), then rows that never change: immediates, special registers, symbols' addresses. A
value narrower than 64 bits is zero-extended, a predicate is 0 or 1. So every operand is a row.

An instruction becomes one micro-operation or several; the first has `COUNTS` 1 and the others 0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from flash_attn_fp8.sim.errors import Unmodelled
from flash_attn_fp8.sim.isa import bitfield, convert, floating, integer, moves, table
from flash_attn_fp8.sim.ptx.program import (
    Entry,
    Guard,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

LANE_MODULES = (integer, bitfield, floating, convert, moves)  # importing them fills the table

# Columns of `Code.micro`. A guard is 2 × row + negated, or −1.
OP, DST, A, B, C, D, MODE, GUARD, TARGET, COUNTS = range(10)
COLUMNS = 10
# Operations of the engine itself; those of lanes follow, in the order of their names.
TRAP, BRANCH, EXIT, UNPACK = range(4)
FIRST_LANE_OPERATION = 4

# Special registers that keep their value while a warp runs.
_AXES = tuple(
    f"%{name}.{axis}"
    for name in (
        *("tid", "ntid", "ctaid", "nctaid"),
        *("clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid"),
    )
    for axis in "xyz"
)
CONSTANT_SPECIALS = frozenset(
    (
        *_AXES,
        *(f"%{name}" for name in ("laneid", "warpid", "nwarpid", "smid", "nsmid", "gridid")),
        *(f"%lanemask_{kind}" for kind in ("eq", "le", "lt", "ge", "gt")),
        *("%cluster_ctarank", "%cluster_nctarank", "%is_explicit_cluster"),
        *("%dynamic_smem_size", "%total_smem_size", "%aggr_smem_size"),
    )
)

# Opcodes that change nothing but registers, or what is only their warp's: a loop of these that also
# polls does not get anywhere by them.
_LOOKING = frozenset(
    (
        *("ld", "ldu", "cvta", "mapa", "getctarank", "isspacep", "prefetch", "prefetchu"),
        *("createpolicy", "elect", "activemask", "vote", "match", "shfl", "redux", "mov"),
        *("fence", "membar", "nanosleep"),
    )
)

Source = int | Special | Symbol


@dataclass
class Code:
    """A decoded kernel.

    `micro` is `int32[n, COLUMNS]`; `handlers` has a callable where the operation is TRAP;
    `instructions` gives for each micro-operation the index of its instruction; `constants` are the
    rows to fill, each with its bits or with what only the warp's place determines.
    """

    entry: Entry
    micro: npt.NDArray[np.int32]
    handlers: list[Callable[[Any, int], Any] | None]
    instructions: list[int]
    rows: dict[str, int]
    n_rows: int
    constants: list[tuple[int, Source]]

    @functools.cached_property
    def counting(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The micro-operations that count as an instruction, and the instructions' indices."""
        owners = np.array(self.instructions)
        pcs = np.flatnonzero((owners >= 0) & (self.micro[:, COUNTS] != 0))
        return pcs, owners[pcs]

    def registers(
        self, resolve: Callable[[Special | Symbol], int | npt.NDArray[np.uint64]]
    ) -> npt.NDArray[np.uint64]:
        """Registers of a new warp: 0, but for constants.

        `resolve` gives a special register's value, one for the warp or `[32]` for its lanes, or the
        address of a variable or parameter, its `offset` not yet added.
        """
        registers = np.zeros((self.n_rows, 32), dtype=np.uint64)
        for row, source in self.constants:
            if isinstance(source, int):
                registers[row] = source
            elif isinstance(source, Symbol):
                registers[row] = (int(resolve(source)) + source.offset) % (1 << 64)
            else:
                registers[row] = resolve(source)
        return registers

    @functools.cached_property
    def only_looks(self) -> list[bool]:
        """For each micro-operation, whether nobody but its warp can notice that it executed."""
        found = [self.instruction(pc) for pc in range(len(self.micro))]
        return [
            i is not None and (i.parts[0] in _LOOKING or i.opcode.startswith("bar.warp"))
            for i in found
        ]

    def instruction(self, pc: int) -> Instruction | None:
        """The instruction of a micro-operation; None of the return that ends every kernel."""
        index = self.instructions[pc]
        return self.entry.instructions[index] if index >= 0 else None


def counts_by_instruction(code: Code, counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Executions of each instruction, from those of micro-operations."""
    totals = np.zeros(len(code.entry.instructions), dtype=np.int64)
    pcs, owners = code.counting
    np.add.at(totals, owners, counts[pcs])
    return totals


@dataclass
class Context:
    """What a binder or macro sees of the kernel being decoded; see `isa/table.py`."""

    entry: Entry
    instruction: Instruction
    suffixes: tuple[str, ...] = ()
    row_of: dict[str, int] = field(default_factory=dict)
    constant_rows: dict[Source, int] = field(default_factory=dict)
    n_rows: int = 0
    micro: list[list[int]] = field(default_factory=list)

    def fail(self, message: str) -> NoReturn:
        """Raise `Unmodelled`, saying where."""
        at = self.instruction
        raise Unmodelled(f"line {at.line}: {message}: {at.text.strip()}")

    # ------------------------------------------------------------------------------ operands

    def _allocate(self, count: int = 1) -> int:
        row = self.n_rows
        self.n_rows += count
        return row

    def _register(self, register: Register, width: int | None) -> int:
        name = register.name
        declared = self.entry.registers.get(name)
        if declared is None:
            self.fail(f"register {name} is not declared")
        bits = table.WIDTH.get(declared)
        if bits is None:
            self.fail(f"register {name} is declared .{declared}")
        if width is not None and bits != width:
            self.fail(f"register {name} has {bits} bits, the instruction takes {width}")
        if name not in self.row_of:
            self.row_of[name] = self._allocate(2 if bits == 128 else 1)
        return self.row_of[name]

    def constant(self, source: Source) -> int:
        """The row that holds the same bits, special register or address for all of a run."""
        if source not in self.constant_rows:
            self.constant_rows[source] = self._allocate()
        return self.constant_rows[source]

    def scratch(self, use: str = "") -> int:
        """A row of the decoder's own, the same for the same use."""
        name = f"scratch {use}"
        if name not in self.row_of:
            self.row_of[name] = self._allocate()
        return self.row_of[name]

    def width(self, operand: Operand) -> int | None:
        """Bits of a register; None of anything else."""
        if isinstance(operand, Register):
            return table.WIDTH[self.entry.registers[operand.name]]
        return None

    def row(self, operand: Operand, type: str | None = None, *, wider: bool = False) -> int:
        """The row of a source. `wider`: a register may be wider than the type."""
        width = None if type is None else table.WIDTH[type]
        if isinstance(operand, Register):
            found = self._register(operand, None if wider else width)
            if wider and width is not None and (self.width(operand) or 0) < width:
                self.fail(f"register {operand.name} is narrower than {width} bits")
            return found
        if isinstance(operand, Immediate):
            return self.constant(self._immediate(operand, type))
        if isinstance(operand, Special):
            if operand.name not in CONSTANT_SPECIALS:
                self.fail(f"special register {operand.name} as an operand")
            return self.constant(operand)
        if isinstance(operand, Symbol):
            return self.constant(operand)
        if isinstance(operand, Negated):
            row = self.scratch(f"not {operand.operand.name}")
            self.emit("not.pred", row, [self._register(operand.operand, 1)])
            return row
        self.fail(f"operand {operand!r}")

    def rows(self, operand: Operand, type: str | None = None) -> list[int]:
        """The rows of a vector's elements, of a b128 register, or the one row of a scalar."""
        if isinstance(operand, Vector):
            return [row for element in operand.elements for row in self.rows(element, type)]
        if self.width(operand) == 128:
            first = self.row(operand)
            return [first, first + 1]
        return [self.row(operand, type)]

    def destination(self, operand: Operand, type: str | None = None, *, wider: bool = False) -> int:
        """The row of a result."""
        if isinstance(operand, Sink):
            return self.scratch("sink")
        if not isinstance(operand, Register):
            self.fail(f"destination {operand!r}")
        return self.row(operand, type, wider=wider)

    def destinations(self, operand: Operand, type: str | None = None) -> list[int]:
        """The rows of `{a, b}`, `p|q`, a b128 register, or a single result."""
        if isinstance(operand, Vector):
            return [row for one in operand.elements for row in self.destinations(one, type)]
        if isinstance(operand, Pair):
            return [self.destination(operand.first), self.destination(operand.second)]
        if self.width(operand) == 128:
            return self.rows(operand)
        return [self.destination(operand, type)]

    def _immediate(self, operand: Immediate, type: str | None) -> int:
        """An immediate's bits in a register of the type.

        In a float's instruction a literal is a float: `0f` or `0d` of the type, or of the other,
        converted. Everything else takes integers, and `0f` as 32 bits, `0d` as 64.
        """
        value = operand.value
        if type in ("f32", "f64"):
            if operand.kind == "int":
                self.fail(f"integer {value} where .{type} is needed")
            if operand.kind == type:
                return value
            source, target = (np.uint32, np.float64) if type == "f64" else (np.uint64, np.float32)
            real = np.float32 if type == "f64" else np.float64
            with np.errstate(all="ignore"):
                converted = np.array(value, source).view(real).astype(target)
            return int(converted.view(np.uint64 if type == "f64" else np.uint32))
        width = 64 if type is None else table.WIDTH[type]
        if operand.kind != "int":
            if width != (32 if operand.kind == "f32" else 64) or (type or "b")[0] != "b":
                self.fail(f"float literal where .{type} is needed")
            return value
        if type is not None and type.startswith(("f16", "bf16", "f32x2")):
            self.fail(f"integer {value} where .{type} is needed")
        if type == "pred":
            return int(value != 0)
        if type is not None and not -(1 << (width - 1)) <= value < 1 << width:
            self.fail(f"{value} does not fit .{type}")
        return value % (1 << width)

    # ------------------------------------------------------------------------ micro-operations

    def emit(self, operation: str, destination: int, sources: Sequence[int], mode: int = 0) -> None:
        """Append an operation of lanes, by name."""
        if operation not in table.OPERATIONS:
            self.fail(f"no operation {operation}")
        if len(sources) != len(table.OPERATIONS[operation].sources):
            self.fail(f"{operation} with {len(sources)} sources")
        self.emit_raw(operation_number(operation), destination, sources, mode)

    def emit_unpack(self, low: int, high: int, source: int, width: int) -> None:
        """Append the engine's own unpacking into two parts of `width` bits, two rows at once."""
        self.emit_raw(UNPACK, low, [source, high], width)

    def emit_raw(self, op: int, destination: int, sources: Sequence[int], mode: int = 0) -> None:
        """Append a micro-operation by number."""
        line = [op, destination, *sources, *[0] * (4 - len(sources)), mode, -1, -1, 0]
        self.micro.append(line)


_NUMBERS: dict[str, int] = {}


def operation_number(name: str) -> int:
    """The dispatcher's number of an operation."""
    if len(_NUMBERS) != len(table.OPERATIONS):
        _NUMBERS.clear()
        for number, known in enumerate(sorted(table.OPERATIONS), FIRST_LANE_OPERATION):
            _NUMBERS[known] = number
    return _NUMBERS[name]


# ------------------------------------------------------------------------------------ decoding


def _expand_lane(ctx: Context, stem: str) -> None:
    """One operation, named by the stem and the types; its modifiers become mode bits."""
    instruction = ctx.instruction
    types = tuple(part for part in ctx.suffixes if part in table.WIDTH)
    names = [part for part in ctx.suffixes if part not in table.WIDTH]
    given = instruction.operands[1:]
    more = f"_{stem}{len(given)}"  # `max.f32` of three sources
    stem = more if more in table.FORMS else stem
    forms = [form for form in table.FORMS[stem] if types in form.types]
    if not forms:
        ctx.fail(f"{stem} of {'.'.join(types) or 'no type'}")
    form = forms[0]
    for name in names:
        if name not in form.modifiers:
            ctx.fail(f"modifier .{name} of {stem}.{'.'.join(types)}")
    if len(set(names)) != len(names) or len(set(names).intersection(table.ROUNDINGS)) > 1:
        ctx.fail("modifiers that exclude one another")
    for group in form.requires:
        if len(group.intersection(names)) != 1:
            ctx.fail(f"needs one of {', '.join(sorted(group))}")
    mode = sum(form.modifiers[name] for name in names)
    signature = form.types[types]
    if len(given) != len(signature.sources):
        ctx.fail(f"{len(given)} sources where {len(signature.sources)} are needed")
    sources = [
        ctx.row(operand, kind) for operand, kind in zip(given, signature.sources, strict=True)
    ]
    destination = ctx.destination(instruction.operands[0], signature.result)
    ctx.emit(signature.operation, destination, sources, mode)


def _label(ctx: Context) -> int:
    """The index of the instruction that a branch goes to."""
    target = ctx.instruction.operands[-1]
    if not isinstance(target, Symbol) or target.name not in ctx.entry.labels or target.offset:
        ctx.fail(f"branch to {target!r}")
    return ctx.entry.labels[target.name]


def _changing_special(instruction: Instruction) -> str | None:
    """The name under which a read of a changing special register is bound, `%clock64`."""
    for operand in instruction.operands:
        if isinstance(operand, Special) and operand.name in table.BINDERS:
            return operand.name
    return None


def _guard_row(ctx: Context, guard: Guard, first: int) -> int:
    """The guard's code; of a copy where an operation before the last overwrites the guard."""
    row = ctx._register(Register(guard.register), 1)
    overwritten = any(
        line[DST] == row or (line[OP] == UNPACK and line[B] == row) for line in ctx.micro[first:-1]
    )
    if overwritten:
        copy = ctx.scratch("guard")
        line = [operation_number("_mov.pred"), copy, row, 0, 0, 0, 0, -1, -1, 0]
        ctx.micro.insert(first, line)
        row = copy
    return 2 * row + guard.negated


def decode(entry: Entry) -> Code:
    """Decode a kernel; raises `Unmodelled` at the first instruction that the table lacks."""
    if not entry.instructions:
        raise Unmodelled(f"kernel {entry.name} has no instructions")
    ctx = Context(entry, entry.instructions[0])
    handlers: dict[int, Callable[[Any, int], Any]] = {}
    starts: list[int] = []
    owners: list[int] = []
    branches: list[tuple[int, int]] = []
    for index, instruction in enumerate(entry.instructions):
        first = len(ctx.micro)
        starts.append(first)
        ctx.instruction = instruction
        parts = instruction.parts
        changing = _changing_special(instruction)
        stem = changing or table.find_stem(parts)
        if parts[0] == "bra" and set(parts[1:]) <= {"uni"}:
            branches.append((first, _label(ctx)))
            ctx.emit_raw(BRANCH, 0, [])
        elif parts in (("exit",), ("ret",), ("ret", "uni")):
            ctx.emit_raw(EXIT, 0, [])
        elif stem is None:
            ctx.suffixes = parts
            ctx.fail(f"opcode {instruction.opcode}")
        else:
            ctx.suffixes = parts[len(stem.split(".")) :] if changing is None else parts[1:]
            if stem in table.BINDERS:
                handler = table.BINDERS[stem](ctx, instruction)
                handlers[len(ctx.micro)] = handler
                ctx.emit_raw(TRAP, 0, [])
            elif stem in table.MACROS:
                table.MACROS[stem](ctx, instruction)
            else:
                _expand_lane(ctx, stem)
        before = len(ctx.micro)
        if instruction.guard is not None:
            # Only the guard's copy, where there is one, runs without it.
            code = _guard_row(ctx, instruction.guard, first)
            for line in ctx.micro[first + len(ctx.micro) - before :]:
                line[GUARD] = code
            if len(ctx.micro) != before and first in handlers:
                raise AssertionError("a trap has one micro-operation")
        if len(ctx.micro) > first:
            ctx.micro[first][COUNTS] = 1
        owners.extend([index] * (len(ctx.micro) - first))
    starts.append(len(ctx.micro))
    # A kernel returns where its text ends.
    ctx.emit_raw(EXIT, 0, [])
    owners.append(-1)
    for pc, target in branches:
        ctx.micro[pc][TARGET] = starts[target]
    micro = np.array(ctx.micro, dtype=np.int32)
    bound = [handlers.get(pc) for pc in range(len(micro))]
    constants = [(row, source) for source, row in ctx.constant_rows.items()]
    return Code(entry, micro, bound, owners, ctx.row_of, ctx.n_rows, constants)
