"""PTX's declarations of registers, variables and kernel parameters."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from math import prod
from typing import cast

from flash_attn_fp8.sim.ptx.lex import IDENTIFIER, Source, immediate, integer, items
from flash_attn_fp8.sim.ptx.program import Immediate, Parameter, Space, Variable

BYTES = {
    **dict.fromkeys(("b8", "u8", "s8"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64"), 8),
    "b128": 16,
}

_TYPE = r"(?:\.v(?P<lanes>[248])\s*)?\.(?P<type>\w+)"
_ALIGN = r"(?:\.align\s+(?P<align>\d+)\s*)?"
_REGISTERS = re.compile(rf"\s*{_TYPE}\s+(?P<names>.*)", re.DOTALL | re.ASCII)
_REGISTER = re.compile(rf"({IDENTIFIER})(?:\s*<\s*(\d+)\s*>)?", re.ASCII)
_VARIABLE = re.compile(rf"\s*{_ALIGN}{_TYPE}\s+(?P<names>.*)", re.DOTALL | re.ASCII)
_DECLARATOR = re.compile(
    rf"(?P<name>{IDENTIFIER})\s*(?P<shape>(?:\[\s*\w*\s*\]\s*)*)(?:=\s*(?P<initial>.+))?",
    re.DOTALL | re.ASCII,
)
_DIMENSION = re.compile(r"\[\s*(\w*)\s*\]")
_PARAMETER = re.compile(
    rf"\s*\.param\s*{_ALIGN}{_TYPE}\s+"
    # What `.ptr` says is about the memory pointed to, not about the parameter.
    r"(?:\.ptr\s+(?:\.(?:const|global|local|shared)\s+)?(?:\.align\s+\d+\s+)?)?"
    rf"(?P<name>{IDENTIFIER})\s*(?:\[\s*(?P<count>\w+)\s*\])?\s*",
    re.DOTALL | re.ASCII,
)


def registers(source: Source, text: str) -> Iterator[tuple[str, str]]:
    """Name and type of each register of what follows `.reg`; `%r<3>` is %r0, %r1 and %r2."""
    match = _REGISTERS.fullmatch(text)
    if match is None:
        source.fail("`.reg` takes a type and names")
    kind = match["type"]
    if match["lanes"]:
        source.unmodelled("vector registers")
    if kind not in BYTES and kind != "pred":
        source.fail(f"no type of registers: .{kind}")
    for item in match["names"].split(","):
        name = _REGISTER.fullmatch(item.strip())
        if name is None:
            source.fail(f"no name of a register: {item.strip()!r}")
        if name[2] is None:
            yield name[1], kind
        else:
            yield from ((f"{name[1]}{i}", kind) for i in range(int(name[2])))


def _size(source: Source, match: re.Match[str]) -> tuple[int, int]:
    """Bytes and alignment of one element of a declaration."""
    kind = match["type"]
    if kind in ("texref", "samplerref", "surfref"):
        source.unmodelled(f".{kind}")
    if kind not in BYTES:
        source.fail(f"no type of memory: .{kind}")
    size = BYTES[kind] * int(match["lanes"] or 1)
    align = int(match["align"] or size)
    if align < 1 or align & (align - 1):
        source.fail(f".align {align} is no power of two")
    return size, align


def parameters(source: Source, text: str) -> tuple[Parameter, ...]:
    """The list between an entry's parentheses, laid out one behind the other."""
    found: list[Parameter] = []
    end = 0
    for item in text.split(",") if text.strip() else ():
        match = _PARAMETER.fullmatch(item)
        if match is None:
            source.fail(f"no parameter: {' '.join(item.split())!r}")
        size, align = _size(source, match)
        if match["count"]:
            size *= _count(source, match["count"])
        offset = -(-end // align) * align
        end = offset + size
        if any(match["name"] == other.name for other in found):
            source.fail(f"parameter {match['name']} is there twice")
        found.append(Parameter(match["name"], size, align, offset))
    return tuple(found)


def _count(source: Source, text: str) -> int:
    try:
        count = integer(text)
    except OverflowError as error:
        source.fail(str(error))
    if count is None or count < 0:
        source.fail(f"no number of elements: {text!r}")
    return count


def variables(source: Source, space: str, extern: bool, text: str) -> Iterator[Variable]:
    """The variables of what follows `.shared`, `.global`, `.const` or `.local`."""
    if ".attribute" in text:
        source.unmodelled("attributes of variables")
    match = _VARIABLE.fullmatch(text)
    if match is None:
        source.fail(f"`.{space}` takes a type and names")
    size, align = _size(source, match)
    inner = [int(match["lanes"])] if match["lanes"] else []
    declarators = items(match["names"])
    if declarators is None:
        source.fail(f"can't tell the variables in {match['names']!r} apart")
    for item in declarators:
        name = _DECLARATOR.fullmatch(item)
        if name is None:
            source.fail(f"no variable: {item!r}")
        dimensions = _DIMENSION.findall(name["shape"])
        initial = None
        if dimensions and not dimensions[0]:
            dimensions[0] = str(_open_length(source, space, extern, name))
        shape = [_count(source, d) for d in dimensions]
        if name["initial"] is not None:
            if space not in ("global", "const"):
                source.fail(f"a .{space} variable has no initialiser")
            initial = b"".join(_initial(source, name["initial"], [*shape, *inner], match["type"]))
        # An extern array without a length is as long as the launch makes it.
        nbytes = size * prod(shape)
        if extern and nbytes:
            source.unmodelled("an extern variable that another module defines")
        yield Variable(name["name"], cast("Space", space), align, nbytes, initial)


def _open_length(source: Source, space: str, extern: bool, name: re.Match[str]) -> int:
    """The first dimension of `a[]`."""
    if name["initial"] is not None:
        elements = items(name["initial"].strip()[1:-1])
        return 0 if elements is None else len(elements)
    if not (extern and space == "shared"):
        source.fail(f"only an extern .shared array may leave its length open, not {name['name']}")
    return 0


def _initial(source: Source, text: str, shape: list[int], kind: str) -> Iterator[bytes]:
    """The bytes of an initialiser; what its braces leave out is zero."""
    text = text.strip()
    if not shape:
        yield _encode(source, text, kind)
        return
    if text[:1] != "{" or text[-1:] != "}":
        source.fail(f"{shape[0]} elements need braces, not {text!r}")
    elements = items(text[1:-1])
    if elements is None or len(elements) > shape[0]:
        source.fail(f"{text!r} does not initialise {shape[0]} elements")
    for element in elements:
        yield from _initial(source, element, shape[1:], kind)
    yield bytes((shape[0] - len(elements)) * prod(shape[1:]) * BYTES[kind])


def _encode(source: Source, text: str, kind: str) -> bytes:
    try:
        literal = immediate(text)
    except OverflowError as error:
        source.fail(str(error))
    if literal is None:
        source.unmodelled(f"initialiser {text!r}, which is no literal")
    size = BYTES[kind]
    if literal.kind == "int":
        if kind[0] == "f":
            source.fail(f"{text} initialises a variable of type .{kind}")
        if not -(1 << 8 * size - 1) <= literal.value < 1 << 8 * size:
            source.fail(f"{text} does not fit into .{kind}")
        return (literal.value % (1 << 8 * size)).to_bytes(size, "little")
    return _encode_float(source, literal, kind)


def _encode_float(source: Source, literal: Immediate, kind: str) -> bytes:
    bits = 4 if literal.kind == "f32" else 8
    if kind in ("b32", "f32", "b64", "f64") and BYTES[kind] == bits:
        return literal.value.to_bytes(bits, "little")
    if kind == "f32":
        (value,) = struct.unpack("<d", literal.value.to_bytes(8, "little"))
        return struct.pack("<f", value)
    source.unmodelled(f"a float of {8 * bits} bits that initialises .{kind}")
