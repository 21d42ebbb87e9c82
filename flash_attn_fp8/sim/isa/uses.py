"""Which instructions have a register of another's results: what waits for a `tcgen05.ld`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim.ptx.program import (
    Address,
    Entry,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Symbol,
    Vector,
)

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Code


def _registers(operand: Operand | Symbol | None) -> Iterator[str]:
    if isinstance(operand, Register):
        yield operand.name
    elif isinstance(operand, Negated):
        yield operand.operand.name
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers(element)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)
    elif isinstance(operand, Address):
        yield from _registers(operand.base)
        for coordinate in operand.coordinates or ():
            yield from _registers(coordinate)


def _mentions(instruction: Instruction) -> Iterator[str]:
    for operand in instruction.operands:
        yield from _registers(operand)
    if instruction.guard is not None:
        yield instruction.guard.register


_where: dict[int, tuple[Entry, dict[str, list[int]]]] = {}  # by the entry's identity


def _index(entry: Entry) -> dict[str, list[int]]:
    """The instructions that mention each register."""
    if id(entry) not in _where:
        if len(_where) >= 64:
            _where.clear()
        found: dict[str, list[int]] = {}
        for i, instruction in enumerate(entry.instructions):
            for name in _mentions(instruction):
                found.setdefault(name, []).append(i)
        _where[id(entry)] = entry, found
    return _where[id(entry)][1]


def users_of(entry: Entry, instruction: Instruction) -> Callable[[Code], np.ndarray]:
    """First micro-operations of the others that mention a result (the first operand)."""
    index = _index(entry)
    users = {i for name in _registers(instruction.operands[0]) for i in index[name]}
    others = {i for i in users if entry.instructions[i] is not instruction}
    cached: list[np.ndarray] = []

    def of(code: Code) -> np.ndarray:
        if not cached:
            first: dict[int, int] = {}
            for pc, i in enumerate(code.instructions):
                first.setdefault(i, pc)
            cached.append(np.array(sorted(first[i] for i in others), np.int64))
        return cached[0]

    return of
