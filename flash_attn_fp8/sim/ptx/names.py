"""What a name in PTX's text means at its place: scopes of registers, variables and labels.

Braces open a scope for all three. Registers and variables must be declared before their use;
labels may follow it, so branches are resolved when the whole function is known.
"""

from __future__ import annotations

import re

from flash_attn_fp8.sim.ptx.lex import IDENTIFIER, Source, immediate, integer, operands
from flash_attn_fp8.sim.ptx.program import (
    Address,
    Immediate,
    Negated,
    Operand,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

_NAME = re.compile(IDENTIFIER, re.ASCII)
_SUM = re.compile(rf"({IDENTIFIER})\s*([+-])\s*(-?\s*[\w$%]+)", re.ASCII)
_PAIR = re.compile(r"([\w$%]+)\s*\|\s*([\w$%]+)", re.ASCII)
_SPECIAL = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyzw]"
    r"|laneid|warpid|nwarpid|smid|nsmid|gridid|is_explicit_cluster"
    r"|cluster_ctarank|cluster_nctarank|lanemask_(?:eq|le|lt|ge|gt)"
    r"|clock|clock_hi|clock64|globaltimer|globaltimer_lo|globaltimer_hi|pm[0-7](?:_64)?"
    r"|envreg(?:[12]?\d|3[01])|reserved_smem_offset_(?:begin|end|cap|[01])"
    r"|total_smem_size|aggr_smem_size|dynamic_smem_size|current_graph_exec)"
)


class Scope:
    """The names that one pair of braces declares; `suffix` makes them unlike their neighbours'."""

    def __init__(self, parent: Scope | None, suffix: str = "") -> None:
        self.parent = parent
        self.suffix = suffix
        self.names: dict[str, Register | Symbol] = {}
        self.labels: dict[str, str] = {}
        # Texts of operands recur: what one means is worked out once, until a declaration shadows.
        self.known: dict[str, Operand] = {}

    def declare(self, name: str, found: Register | Symbol) -> bool:
        """Give a name its meaning; False if this very scope has it already."""
        if name in self.names:
            return False
        self.names[name] = found
        self.known.clear()
        return True

    def find(self, name: str) -> Register | Symbol | None:
        """What the innermost declaration of `name` says."""
        scope: Scope | None = self
        while scope is not None:
            found = scope.names.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None

    def find_label(self, name: str) -> str | None:
        """The unique name of the innermost label `name`; only once all labels are known."""
        scope: Scope | None = self
        while scope is not None:
            found = scope.labels.get(name)
            if found is not None:
                return found
            scope = scope.parent
        return None


class Operands:
    """Reads operands in the scope they stand in; what it can't read, `source` reports."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def all(self, text: str, scope: Scope) -> tuple[Operand, ...]:
        """The operands of an instruction, or the elements within braces."""
        pieces = operands(text)
        if pieces is None:
            self._source.fail(f"can't tell the operands in {text.strip()!r} apart")
        known = scope.known
        return tuple([known.get(piece) or self._new(piece, scope) for piece in pieces])

    def _new(self, text: str, scope: Scope) -> Operand:
        try:
            # Nearly every operand is a plain name, and no other text is a key.
            found = scope.find(text) or self._read(text, scope)
        except OverflowError as error:  # from a literal
            self._source.fail(str(error))
        scope.known[text] = found
        return found

    def _read(self, text: str, scope: Scope) -> Operand:
        first = text[:1]
        if first == "[" and text[-1] == "]":
            return self._address(text[1:-1].strip(), scope)
        if first == "{" and text[-1] == "}":
            return Vector(self.all(text[1:-1], scope))
        if first == "!":
            operand = self._scalar(text[1:].lstrip(), scope)
            if not isinstance(operand, Register):
                self._source.fail(f"`!` takes a predicate register, not {text[1:]!r}")
            return Negated(operand)
        pair = _PAIR.fullmatch(text)
        if pair is not None:
            return Pair(self._result(pair[1], scope), self._result(pair[2], scope))
        return self._scalar(text, scope)

    def _result(self, text: str, scope: Scope) -> Operand:
        operand = self._scalar(text, scope)
        if not isinstance(operand, Register | Sink):
            self._source.fail(f"each side of `|` is a register or `_`, not {text!r}")
        return operand

    def _scalar(self, text: str, scope: Scope) -> Operand:
        if text == "_":
            return Sink()
        found = scope.find(text)
        if found is not None:
            return found
        special = _SPECIAL.fullmatch(text)
        if special is not None:
            return Special(text)
        if text == "WARP_SZ":
            return Immediate(32)
        literal = immediate(text)
        if literal is not None:
            return literal
        return self._symbol(text, scope)

    def _symbol(self, text: str, scope: Scope) -> Symbol:
        base, offset = self._sum(text, scope)
        if not isinstance(base, Symbol):
            self._source.fail(f"{text!r} adds to a register outside brackets")
        return Symbol(base.name, offset)

    def _sum(self, text: str, scope: Scope) -> tuple[Register | Symbol, int]:
        """`name`, `name+8`, `name + 0x10`, `name+-8`, `name-8`."""
        match = _SUM.fullmatch(text)
        name = text if match is None else match[1]
        base = scope.find(name)
        if base is None:
            what = (
                f"{name} is not declared here" if _NAME.fullmatch(name) else f"no operand: {text!r}"
            )
            self._source.fail(what)
        if match is None:
            return base, 0
        offset = integer(match[3])
        if offset is None:
            self._source.fail(f"no offset: {match[3]!r} in {text!r}")
        return base, -offset if match[2] == "-" else offset

    def _address(self, text: str, scope: Scope) -> Address:
        base_text, comma, rest = text.partition(",")
        coordinates = None
        if comma:
            rest = rest.strip()
            if rest[:1] != "{" or rest[-1:] != "}":
                self._source.fail(f"behind the comma in [{text}] coordinates in braces belong")
            coordinates = self.all(rest[1:-1], scope)
        base_text = base_text.rstrip()
        absolute = integer(base_text)
        if absolute is not None:
            return Address(None, absolute, coordinates)
        base, offset = self._sum(base_text, scope)
        return Address(base, offset, coordinates)
