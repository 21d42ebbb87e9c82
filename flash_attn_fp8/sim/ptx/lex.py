"""PTX's text cut into statements and operands, and its literals; no names are looked up here."""

from __future__ import annotations

import re
import struct
from bisect import bisect_left
from typing import NoReturn

from flash_attn_fp8.sim.errors import PtxSyntaxError, Unmodelled
from flash_attn_fp8.sim.ptx.program import Immediate

IDENTIFIER = r"(?:[A-Za-z][\w$]*|[_$%][\w$]+)"
OPCODE = r"[a-z]\w*(?:\.\w+(?:::\w+)*)*"
INTEGER = r"(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?"

# What may begin inside a function's braces. `lastgroup` tells which of the five it was.
STATEMENT = re.compile(
    rf"""
    (?P<label>{IDENTIFIER})\s*:(?!:)
  | (?:@\s*(?P<not>!?)\s*(?P<guard>{IDENTIFIER})\s+)?
    (?P<opcode>{OPCODE})(?=[\s;\[{{])(?P<operands>[^;]*);
  | (?P<brace>[{{}}])
  | (?P<directive>\.[a-z_]+)
  | (?P<empty>;)
    """,
    re.VERBOSE | re.ASCII,
)

_COMMENT_OR_STRING = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_BLACK = re.compile(r"\S")
_OPERAND = re.compile(r"\s*(\[[^\[\]]*\]|\{[^{}]*\}|[^,\[\]{}]+)\s*(,|$)")
_BRACED = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_ITEM = re.compile(rf"\s*((?:[^,{{}}=]+=\s*)?(?:{_BRACED}|[^,{{}}=]+))\s*(,|$)")

_INTEGER = re.compile(rf"(-?)\s*({INTEGER})", re.ASCII)
_FLOAT_BITS = re.compile(r"0(?:([fF])([0-9a-fA-F]{8})|([dD])([0-9a-fA-F]{16}))")
_FLOAT = re.compile(r"-?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][+-]?\d+)?", re.ASCII)


def _blank(match: re.Match[str]) -> str:
    found = match[0]
    # A comment separates tokens, and the lines behind it keep their numbers.
    return found if found[0] == '"' else " " + "\n" * found.count("\n")


class Source:
    """A text without its comments, read from left to right.

    `here` is where the current statement begins: errors name its line.
    """

    def __init__(self, text: str) -> None:
        self.text = _COMMENT_OR_STRING.sub(_blank, text) if "/" in text else text
        self._lines = text.split("\n")
        self._ends = [match.start() for match in re.finditer("\n", self.text)]
        self.here = 0
        self.position = 0

    def next(self) -> bool:
        """Skip space to the next statement; False at the end of the text."""
        match = _BLACK.search(self.text, self.position)
        self.here = self.position = len(self.text) if match is None else match.start()
        return match is not None

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Match at the position and step over it."""
        match = pattern.match(self.text, self.position)
        if match is not None:
            self.position = match.end()
        return match

    def until(self, end: str) -> str:
        """Everything before the next `end`, which is stepped over."""
        stop = self.text.find(end, self.position)
        if stop < 0:
            self.fail(f"no {end!r} follows")
        found = self.text[self.position : stop]
        self.position = stop + len(end)
        return found

    def rest_of_line(self) -> None:
        """Step over what is left of this line."""
        stop = self.text.find("\n", self.position)
        self.position = len(self.text) if stop < 0 else stop

    @property
    def line(self) -> int:
        """The number of the line where the current statement begins, from 1."""
        return bisect_left(self._ends, self.here) + 1

    def _where(self, message: str, line: int | None) -> str:
        number = self.line if line is None else line
        return f"PTX line {number}: {message}: {self._lines[number - 1].strip()}"

    def fail(self, message: str, line: int | None = None) -> NoReturn:
        """Raise `PtxSyntaxError` with the line's number and text."""
        raise PtxSyntaxError(self._where(message, line))

    def unmodelled(self, message: str) -> NoReturn:
        """Raise `Unmodelled` with the line's number and text."""
        raise Unmodelled(self._where(message, None))


def _cut(pattern: re.Pattern[str], text: str) -> list[str] | None:
    pieces = []
    position = 0
    while True:
        match = pattern.match(text, position)
        if match is None:
            return None
        pieces.append(match[1].rstrip())
        if not match[2]:
            return pieces
        position = match.end()


def operands(text: str) -> list[str] | None:
    """Cut at the commas outside brackets and braces; None if brackets do not match."""
    if "[" in text or "{" in text:
        return _cut(_OPERAND, text)
    return [piece.strip() for piece in text.split(",")]


def items(text: str) -> list[str] | None:
    """Cut `name = {...}, ...` or what is between braces at the outer commas; None if it can't be.

    Braces may be nested once.
    """
    return _cut(_ITEM, text)


def integer(text: str) -> int | None:
    """The value of an integer literal, None if it is none.

    Raises:
        OverflowError: its value does not fit into 64 bits.
    """
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    digits = match[2].rstrip("U")
    prefix = digits[:2].lower()
    if prefix in ("0x", "0b"):
        value = int(digits, 0)
    elif digits[0] == "0":
        value = int(digits, 8)  # PTX has C's octal: 010 is 8
    else:
        value = int(digits)
    if match[1]:
        value = -value
    if not -(1 << 63) <= value < 1 << 64:
        raise OverflowError(f"{text} does not fit into 64 bits")
    return value


def immediate(text: str) -> Immediate | None:
    """A literal, None if the text is none.

    Raises:
        OverflowError: as `integer` does.
    """
    value = integer(text)
    if value is not None:
        return Immediate(value)
    match = _FLOAT_BITS.fullmatch(text)
    if match is not None:
        if match[1]:
            return Immediate(int(match[2], 16), "f32")
        return Immediate(int(match[4], 16), "f64")
    if _FLOAT.fullmatch(text):
        (bits,) = struct.unpack("<Q", struct.pack("<d", float(text)))
        return Immediate(bits, "f64")
    return None
