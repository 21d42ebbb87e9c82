"""Runs single instructions and small programs, written by hand, on the simulator's engine."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from flash_attn_fp8.sim import decode, engine
from flash_attn_fp8.sim.isa.table import WIDTH
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

_REGISTER_TYPES = {1: "pred", 8: "b16", 16: "b16", 32: "b32", 64: "b64", 128: "b128"}


def operand(text: str) -> Operand:
    text = text.strip()
    if text.startswith("{"):
        return Vector(tuple(operand(part) for part in text[1:-1].split(",")))
    if "|" in text:
        first, second = text.split("|")
        return Pair(operand(first), operand(second))
    if text == "_":
        return Sink()
    if text.startswith("!"):
        return Negated(Register(text[1:]))
    if re.match(r"%(tid|ctaid|laneid|clock|pm)", text):
        return Special(text)
    if text.startswith("%"):
        return Register(text)
    if re.match(r"0[fF][0-9a-fA-F]{8}$", text):
        return Immediate(int(text[2:], 16), "f32")
    if re.match(r"0[dD][0-9a-fA-F]{16}$", text):
        return Immediate(int(text[2:], 16), "f64")
    if re.match(r"-?(0x)?[0-9a-fA-F]+$", text):
        return Immediate(int(text, 0))
    return Symbol(text)


def program(text: str, registers: dict[str, str]) -> Entry:
    """A kernel of one instruction or label a line."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, raw in enumerate(text.strip().splitlines(), 1):
        line = raw.split("//")[0].strip().removesuffix(";")
        if not line:
            continue
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
            continue
        guard = None
        if line.startswith("@"):
            name, line = line[1:].split(None, 1)
            guard = Guard(name.removeprefix("!"), name.startswith("!"))
        opcode, _, rest = line.partition(" ")
        parts = re.findall(r"\s*(\{[^}]*\}|[^,]+)", rest) if rest.strip() else []
        operands = tuple(operand(part) for part in parts if part.strip())
        instructions.append(Instruction(number, raw, opcode, operands, guard))
    return Entry("test", (), registers, tuple(instructions), labels, ())


def run_lines(
    lines: Sequence[str],
    sources: Sequence[str],
    results: Sequence[str],
    inputs: npt.NDArray[np.uint64],
) -> npt.NDArray[np.uint64]:
    """`lines` on the inputs uint64[n, sources]: uint64[n, results].

    `%0` is the first source, `$0` the first result; types say how wide their registers are.
    """
    registers = {f"%s{i}": _REGISTER_TYPES[WIDTH[kind]] for i, kind in enumerate(sources)}
    registers |= {f"%d{i}": _REGISTER_TYPES[WIDTH[kind]] for i, kind in enumerate(results)}
    text = re.sub(r"%(\d)", r"%s\1", re.sub(r"\$(\d)", r"%d\1", "\n".join(lines)))
    code = decode.decode(program(text, registers))
    outputs = np.zeros((len(inputs), len(results)), dtype=np.uint64)
    for start in range(0, len(inputs), 32):
        rows = code.registers(lambda source: 0)
        part = inputs[start : start + 32]
        for index, kind in enumerate(sources):
            if f"%s{index}" in code.rows:
                kept = part[:, index] & np.uint64((1 << WIDTH[kind]) - 1)
                rows[code.rows[f"%s{index}"], : len(part)] = kept
        counts = np.zeros(len(code.micro), dtype=np.int64)
        pcs = engine.new_pcs(len(part))
        stop = engine.run(code.micro, rows, pcs, 0, 0, counts, 1 << 40)
        assert stop.status == engine.DONE
        for index in range(len(results)):
            if f"%d{index}" in code.rows:
                outputs[start : start + 32, index] = rows[code.rows[f"%d{index}"], : len(part)]
    return outputs
