"""What memory and barrier instructions share: address operands, and lanes that must be together."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim.ptx.program import Address, Operand
from flash_attn_fp8.sim.state import ALL_LANES, Converge, Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.barriers import Wait
    from flash_attn_fp8.sim.decode import Context
    from flash_attn_fp8.sim.isa.table import Handler

_U32 = 0xFFFFFFFF


class AddressOperand:
    """`[base + offset]`, bound to a register row."""

    def __init__(self, ctx: Context, operand: Operand, *, shared: bool = False) -> None:
        if not isinstance(operand, Address):
            ctx.fail(f"{operand!r} where an address is needed")
        self._row = ctx.constant(0) if operand.base is None else ctx.row(operand.base)
        self._offset = operand.offset
        self._mask = _U32 if shared else (1 << 64) - 1

    def of(self, warp: Warp, lanes: np.ndarray) -> np.ndarray:
        """Addresses of the lanes, int64."""
        found: np.ndarray = warp.registers[self._row, lanes].astype(np.int64) + self._offset
        return found

    def one(self, warp: Warp, mask: int) -> int:
        """The address of the lowest active lane."""
        return (int(warp.registers[self._row, lowest(mask)]) + self._offset) & self._mask


class ValueOperand:
    """A source register, immediate or special register."""

    def __init__(self, ctx: Context, operand: Operand, type: str | None = None) -> None:
        self.row = ctx.row(operand, type)

    def one(self, warp: Warp, mask: int) -> int:
        """The bits of the lowest active lane."""
        return int(warp.registers[self.row, lowest(mask)])

    def of(self, warp: Warp, lanes: np.ndarray) -> np.ndarray:
        found: np.ndarray = warp.registers[self.row, lanes]
        return found


def lowest(mask: int) -> int:
    """The lowest lane of a mask."""
    return (mask & -mask).bit_length() - 1


def whole_warp(handler: Handler) -> Handler:
    """A `.sync.aligned` instruction: its handler runs once all lanes that are left are here."""

    def together(w: Warp, mask: int) -> Converge | Wait | None:
        return missing_lanes(w, mask, ALL_LANES) or handler(w, mask)

    return together


def missing_lanes(warp: Warp, mask: int, members: int) -> Converge | None:
    """For `.sync` and `.aligned` instructions: what to wait for, if lanes of `members` are away."""
    if mask == warp.existing:
        return None
    required = members & warp.live
    return Converge(required) if required & ~mask else None
