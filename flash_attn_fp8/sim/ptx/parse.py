"""`parse`: the text of a PTX module as a `Program`.

Knows PTX's syntax, not its instructions: any opcode and any number of operands pass. What has no
bearing on what a kernel computes (debug lines, pragmas that are hints, linkage) is stepped over by
name; whatever else it does not know is an error that names the line.
"""

from __future__ import annotations

import re
from dataclasses import replace

from flash_attn_fp8.sim.ptx import declare
from flash_attn_fp8.sim.ptx.lex import IDENTIFIER, STATEMENT, Source
from flash_attn_fp8.sim.ptx.names import Operands, Scope
from flash_attn_fp8.sim.ptx.program import (
    Entry,
    Guard,
    Instruction,
    Operand,
    Program,
    Register,
    Symbol,
    Variable,
)

_DIRECTIVE = re.compile(r"\.[a-z_]+")
_VERSION = re.compile(r"\s*(\d+\.\d+)")
_TARGET = re.compile(r"\s*(sm_\d+[af]?)((?:\s*,\s*\w+)*)")
_ADDRESS_SIZE = re.compile(r"\s*(\d+)")
_LINKAGE = re.compile(r"\s*(\.\w+)")
_ENTRY_NAME = re.compile(rf"\s*({IDENTIFIER})\s*(?:\(([^()]*)\))?", re.ASCII)
_NUMBERS = re.compile(r"\s*(\d+(?:\s*,\s*\d+)*)?")
_PRAGMA = re.compile(r'\s*("[^"]*"(?:\s*,\s*"[^"]*")*)\s*;')
_SECTION = re.compile(r"\s*\.\w+\s*\{[^{}]*\}")
_LABELS = re.compile(rf"{IDENTIFIER}(?:\s*,\s*{IDENTIFIER})*", re.ASCII)

# Directives of an entry's header, with the numbers of values that they may have.
_HEADER = {
    "maxnreg": (1,),
    "maxntid": (1, 2, 3),
    "reqntid": (1, 2, 3),
    "minnctapersm": (1,),
    "maxnctapersm": (1,),
    "reqnctapercluster": (1, 2, 3),
    "explicitcluster": (0,),
    "maxclusterrank": (1,),
    "blocksareclusters": (0,),
}
_SPACES = (".shared", ".global", ".const", ".local")
# Hints by the manual's chapter on pragmas. Others may mean something.
_HINTS = ("nounroll", "used_bytes_mask", "enable_smem_spilling", "frequency")


def parse(text: str) -> Program:
    """The module that `text` spells.

    Raises:
        PtxSyntaxError: the text is not PTX, or names what it does not declare.
        Unmodelled: PTX that the simulator has no use for, such as device functions.
    """
    return _Module(Source(text)).parse()


class _Module:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.version = ""
        self.target = ""
        self.address_size = ""
        self.scope = Scope(None)
        self.variables: list[Variable] = []
        self.entries: dict[str, Entry] = {}
        # A separator behind which no identifier of this text has a number already.
        self.separator = "$"
        while re.search(rf"[\w$]{re.escape(self.separator)}\d", source.text):
            self.separator += "$"

    def parse(self) -> Program:
        source = self.source
        while source.next():
            match = source.take(_DIRECTIVE)
            if match is None:
                source.fail("a directive belongs outside functions")
            self._directive(match[0])
        if not self.version or not self.target:
            source.fail("a module begins with .version and .target", line=1)
        return Program(self.version, self.target, self.entries, tuple(self.variables))

    def _directive(self, name: str) -> None:
        source = self.source
        if name in (".version", ".target", ".address_size"):
            self._heading(name)
        elif not self.address_size:
            # Without .address_size a module's addresses have 32 bits.
            source.fail("a module begins with .version, .target and .address_size 64")
        elif name in (".visible", ".extern", ".weak", ".common"):
            following = source.take(_LINKAGE)
            if following is None or following[1] not in (".entry", ".func", *_SPACES):
                source.fail(f"{name} must be followed by .entry, .func or a state space")
            if name == ".common":
                source.unmodelled(".common variables are shared with other modules")
            self._definition(following[1], extern=name == ".extern")
        elif name == ".section":
            if source.take(_SECTION) is None:
                source.fail(".section takes a name and braces")
        elif name == ".file":
            source.rest_of_line()
        elif name == ".pragma":
            pragma(source)
        else:
            self._definition(name, extern=False)

    def _heading(self, name: str) -> None:
        source = self.source
        if name == ".version":
            self.version = self._once(self.version, source.take(_VERSION), name)
        elif name == ".target":
            match = source.take(_TARGET)
            self.target = self._once(self.target, match, name)
            options = re.findall(r"\w+", match[2]) if match is not None else []
            if options not in ([], ["debug"]):
                source.unmodelled(f".target with {', '.join(options)}")
        else:
            self.address_size = self._once(self.address_size, source.take(_ADDRESS_SIZE), name)
            if self.address_size != "64":
                source.unmodelled("addresses other than 64 bits wide")

    def _once(self, before: str, match: re.Match[str] | None, name: str) -> str:
        if match is None or before:
            self.source.fail(f"{name} is there twice" if before else f"{name} needs a value")
        return match[1]

    def _definition(self, name: str, extern: bool) -> None:
        source = self.source
        if name == ".entry":
            if extern:
                source.unmodelled("an entry of another module")
            entry = _Function(self).parse()
            if entry.name in self.entries:
                source.fail(f"entry {entry.name} is there twice")
            self.entries[entry.name] = entry
        elif name in _SPACES:
            for variable in declare.variables(source, name[1:], extern, source.until(";")):
                if not self.scope.declare(variable.name, Symbol(variable.name)):
                    source.fail(f"{variable.name} is declared twice")
                self.variables.append(variable)
        elif name in (".func", ".alias"):
            source.unmodelled("device functions")
        else:
            source.fail(f"unknown directive {name}")


class _Function:
    """One entry: its header, then its statements in order."""

    def __init__(self, module: _Module) -> None:
        self.module = module
        self.source = module.source
        self.scope = Scope(module.scope)
        self.operands = Operands(self.source)
        self.begun = module.source.line
        self.opened = 0  # pairs of braces within the function so far
        self.registers: dict[str, str] = {}
        self.variables: list[Variable] = []
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.branches: list[tuple[int, Scope, str]] = []
        self.target_lists: dict[str, tuple[int, Scope, list[str]]] = {}
        self.last_label: tuple[str, int] = ("", -1)

    def parse(self) -> Entry:
        source = self.source
        match = source.take(_ENTRY_NAME)
        if match is None:
            source.fail(".entry takes a name and parameters in parentheses")
        name = match[1]
        parameters = declare.parameters(source, match[2] or "")
        for parameter in parameters:
            self._declare(parameter.name, Symbol(parameter.name))
        directives = self._header()
        self._body()
        targets = {
            label: tuple(self._label(scope, target, line) for target in listed)
            for label, (line, scope, listed) in self.target_lists.items()
        }
        self._resolve_branches(targets)
        return Entry(
            name,
            parameters,
            self.registers,
            tuple(self.instructions),
            {label: at for label, at in self.labels.items() if label not in targets},
            tuple(self.variables),
            directives,
            targets,
        )

    def _header(self) -> dict[str, tuple[int, ...]]:
        source = self.source
        found: dict[str, tuple[int, ...]] = {}
        while source.next() and source.text[source.here] != "{":
            match = source.take(_DIRECTIVE)
            if match is None:
                source.fail("directives or `{` follow an entry's parameters")
            name = match[0][1:]
            if name == "pragma":
                pragma(source)
                continue
            if name not in _HEADER:
                source.fail(f"unknown directive .{name} of an entry")
            numbers = source.take(_NUMBERS)
            listed = numbers[1] if numbers is not None else None
            values = tuple(map(int, listed.split(","))) if listed else ()
            if name in found or len(values) not in _HEADER[name]:
                source.fail(f".{name} is there twice or has {len(values)} values")
            found[name] = values
        if source.here == len(source.text):
            source.fail("the text ends before this entry's `{`", self.begun)
        source.position += 1
        return found

    def _body(self) -> None:
        source = self.source
        outer: list[Scope] = []
        while source.next():
            match = source.take(STATEMENT)
            if match is None:
                source.fail("no statement")
            kind = match.lastgroup
            if kind == "operands":
                self._instruction(match)
            elif kind == "label":
                self._new_label(match["label"])
            elif kind == "directive":
                self._directive(match["directive"])
            elif kind == "empty":
                pass
            elif match["brace"] == "{":
                outer.append(self.scope)
                self.opened += 1
                self.scope = Scope(self.scope, f"{self.module.separator}{self.opened}")
            elif outer:
                self.scope = outer.pop()
            else:
                return
        source.fail("the text ends within this entry: a `}` is missing", self.begun)

    def _instruction(self, match: re.Match[str]) -> None:
        source = self.source
        opcode = match["opcode"]
        guard = None
        if match["guard"] is not None:
            guard = self._guard(match["guard"], bool(match["not"]))
        written = match["operands"].strip()
        operands: tuple[Operand, ...] = ()
        if opcode in ("bra", "bra.uni"):
            self.branches.append((len(self.instructions), self.scope, written))
        elif opcode.startswith("brx"):
            index, _, targets = written.partition(",")
            operands = self.operands.all(index, self.scope)
            self.branches.append((len(self.instructions), self.scope, targets.strip()))
        elif opcode.startswith("call"):
            source.unmodelled("calls of functions")
        elif written:
            operands = self.operands.all(written, self.scope)
        text = " ".join(match[0].split())
        self.instructions.append(Instruction(source.line, text, opcode, operands, guard))

    def _guard(self, name: str, negated: bool) -> Guard:
        found = self.scope.find(name)
        if not isinstance(found, Register) or self.registers[found.name] != "pred":
            self.source.fail(f"the guard {name} is no predicate register here")
        return Guard(found.name, negated)

    def _declare(self, name: str, found: Register | Symbol) -> None:
        if isinstance(found, Symbol) and self.module.scope.find(name) is not None:
            self.source.unmodelled(f"{name}, which hides the module's variable of this name")
        if not self.scope.declare(name, found):
            self.source.fail(f"{name} is declared twice")

    def _directive(self, name: str) -> None:
        source = self.source
        if name == ".reg":
            suffix = self.scope.suffix
            for register, kind in declare.registers(source, source.until(";")):
                unique = register + suffix
                self._declare(register, Register(unique))
                self.registers[unique] = kind
        elif name in _SPACES:
            self._variables(name, extern=False)
        elif name == ".extern":
            following = source.take(_LINKAGE)
            if following is None or following[1] != ".shared":
                source.fail(".extern within a function is for .shared")
            self._variables(".shared", extern=True)
        elif name == ".branchtargets":
            self._target_list(source.until(";").strip())
        elif name in (".loc", ".file"):
            source.rest_of_line()
        elif name == ".pragma":
            pragma(source)
        elif name in (".param", ".callprototype", ".calltargets"):
            source.unmodelled(f"{name} within a function, which calls need")
        else:
            source.fail(f"unknown directive {name} within a function")

    def _variables(self, name: str, extern: bool) -> None:
        source = self.source
        for variable in declare.variables(source, name[1:], extern, source.until(";")):
            unique = variable.name + self.scope.suffix
            self._declare(variable.name, Symbol(unique))
            self.variables.append(replace(variable, name=unique))

    def _new_label(self, name: str) -> None:
        unique = name + self.scope.suffix
        if name in self.scope.labels:
            self.source.fail(f"label {name} is there twice")
        self.scope.labels[name] = unique
        self.labels[unique] = len(self.instructions)
        self.last_label = unique, self.source.position

    def _target_list(self, written: str) -> None:
        source = self.source
        label, end = self.last_label
        if end < 0 or source.text[end : source.here].strip():
            source.fail(".branchtargets needs a label of its own")
        if not _LABELS.fullmatch(written):
            source.fail(".branchtargets takes labels")
        listed = [target.strip() for target in written.split(",")]
        self.target_lists[label] = source.line, self.scope, listed

    def _label(self, scope: Scope, name: str, line: int) -> str:
        found = scope.find_label(name)
        if found is None:
            self.source.fail(f"no label {name!r} can be reached from here", line)
        return found

    def _resolve_branches(self, target_lists: dict[str, tuple[str, ...]]) -> None:
        for at, scope, target in self.branches:
            instruction = self.instructions[at]
            label = self._label(scope, target, instruction.line)
            if (label in target_lists) != instruction.opcode.startswith("brx"):
                self.source.fail("bra takes a label, brx.idx a list of them", instruction.line)
            operands = (*instruction.operands, Symbol(label))
            self.instructions[at] = replace(instruction, operands=operands)


def pragma(source: Source) -> None:
    """Step over a pragma that is only a hint."""
    match = source.take(_PRAGMA)
    if match is None:
        source.fail('.pragma takes a string: .pragma "nounroll";')
    for hint in re.findall(r'"([^"]*)"', match[1]):
        if hint.partition(" ")[0] not in _HINTS:
            source.unmodelled(f'the pragma "{hint}"')
