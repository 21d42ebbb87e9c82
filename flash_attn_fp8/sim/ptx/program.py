"""PTX as data: what a text says, each line once, with no meaning attached.

`parse.py` makes a `Program` of a module's text; `decode.py` gives its instructions meaning. Names
are PTX's own, types and directives without their dot. Registers, labels and variables declared
inside braces get names of their own, so that here a name means one thing: `P1` of the third pair
of braces becomes `P1$3`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Space = Literal["reg", "param", "global", "const", "local", "shared"]


@dataclass(frozen=True)
class Register:
    """A declared register, `%r12`; the type is in `Entry.registers`."""

    name: str


@dataclass(frozen=True)
class Special:
    """A special register, `%tid.x`, `%clock64`, `%dynamic_smem_size`."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A literal. Of an integer, its value as written; of `0f3F800000` and `0d...`, the bits.

    A decimal float is f64, as in PTX, until an instruction's type says otherwise.
    """

    value: int
    kind: Literal["int", "f32", "f64"] = "int"


@dataclass(frozen=True)
class Symbol:
    """The address of a variable or parameter, or a label where the operand is one."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; base None for an absolute address.

    `coordinates` are those of `[%rd1, {%r1, %r2}]`, as tensor copies take them.
    """

    base: Register | Symbol | None
    offset: int = 0
    coordinates: tuple[Operand, ...] | None = None


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`p|q`: two destinations of `setp` and `shfl`."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    """`!p` as a source."""

    operand: Register


@dataclass(frozen=True)
class Sink:
    """`_`: a result that nobody wants."""


Operand = Register | Special | Immediate | Symbol | Address | Vector | Pair | Negated | Sink


@dataclass(frozen=True)
class Guard:
    """`@p` or `@!p`."""

    register: str
    negated: bool


@dataclass(frozen=True)
class Instruction:
    """One instruction. `opcode` is all of `fma.rn.f32`; `line`, from 1, is where it begins.

    `text` is its source, names as written there, spaced as on one line.
    """

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The opcode cut at its dots; `::` does not cut, so `shared::cta` is one part."""
        return tuple(self.opcode.split("."))

    @property
    def place(self) -> str:
        """Where and what it is, for reports."""
        return f"PTX line {self.line}: {self.text.strip()}"

    def __str__(self) -> str:
        return self.place


@dataclass(frozen=True)
class Variable:
    """A variable of some space. `size` in bytes, 0 for `extern .shared` arrays of unknown length.

    `initial` is `size` bytes, or None without an initialiser: zeros in the global and const spaces.
    """

    name: str
    space: Space
    align: int
    size: int
    initial: bytes | None = None


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter, at `offset` of the parameter space."""

    name: str
    size: int
    align: int
    offset: int


@dataclass(frozen=True)
class Entry:
    """A kernel. `labels` maps a label to the index of the instruction that it precedes.

    `labels` of the very end have the index len(instructions). `registers` maps a name to its type,
    `b32`. `directives` are those of the header, as written: `{"reqntid": (512, 1, 1)}`.
    `branch_targets` maps the label of a `.branchtargets` list, that of `brx.idx`, to its labels.
    """

    name: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, str]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    variables: tuple[Variable, ...]
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """A PTX module: `.version`, `.target` ("sm_100a"), its entries, variables of module scope."""

    version: str
    target: str
    entries: dict[str, Entry]
    variables: tuple[Variable, ...]
