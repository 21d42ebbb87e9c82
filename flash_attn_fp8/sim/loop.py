"""The inner loop: runs one warp until something needs Python.

SIMT by the rule "lowest program counter first": of the lanes that may run, those at the lowest pc
execute together, up to where the next ones wait, and merge there. This file is not imported: its
text becomes part of the generated module (`isa/compiled.py`), where `execute` and `execute_warp`
exist, so that one cached compilation holds all of it.
"""

# mypy: ignore-errors
# ruff: noqa: F821 -- names of the generated module

from __future__ import annotations

import numpy as np
from numba import njit

OP, DST, A, B, C, D, MODE, GUARD, TARGET, COUNTS = range(10)
TRAP, BRANCH, EXIT, UNPACK, FIRST_LANE_OPERATION = range(5)
EXITED = 0x7FFFFFFF  # the pc of a lane that has exited
DONE, TRAPPED, LIMIT, HELD = range(4)
FULL = 0xFFFFFFFF


@njit(cache=True, nogil=True, error_model="numpy")
def ballot(registers, row):
    """The lanes whose predicate is true."""
    found = 0
    for lane in range(32):
        found |= np.int64(registers[row + np.uint64(lane)] & np.uint64(1)) << lane
    return found


@njit(cache=True, nogil=True, error_model="numpy")
def unpack(registers, low, high, source, width, active):
    """Two parts of `width` bits of a register."""
    mask = np.uint64((1 << width) - 1)
    by = np.uint64(width)
    for lane in range(32):
        if (active >> lane) & 1:
            at = np.uint64(lane)
            word = registers[source + at]
            registers[low + at] = word & mask
            registers[high + at] = (word >> by) & mask


@njit(cache=True, nogil=True, error_model="numpy")
def run(micro, rows, pcs, held, advance, counts, limit):
    """See `engine.run`."""
    if advance:
        counted = False
        for lane in range(32):
            if (advance >> lane) & 1:
                at = np.int64(pcs[lane])
                if not counted:
                    counts[at] += micro[at, COUNTS]
                    counted = True
                pcs[lane] = at + 1
    registers = rows.reshape(-1)
    executed = 0
    while True:
        pc = EXITED
        for lane in range(32):
            if pcs[lane] < pc and not (held >> lane) & 1:
                pc = np.int64(pcs[lane])
        if pc == EXITED:
            for lane in range(32):
                if pcs[lane] != EXITED:
                    return HELD, EXITED, 0, executed
            return DONE, EXITED, 0, executed
        mask, following = 0, EXITED
        for lane in range(32):
            if (held >> lane) & 1:
                continue
            if pcs[lane] == pc:
                mask |= 1 << lane
            elif pcs[lane] < following:
                following = np.int64(pcs[lane])
        while mask and pc < following:
            if executed >= limit:
                for lane in range(32):
                    if (mask >> lane) & 1:
                        pcs[lane] = pc
                return LIMIT, pc, mask, executed
            active = mask
            guard = micro[pc, GUARD]
            if guard >= 0:
                true = ballot(registers, np.uint64((guard >> 1) * 32))
                active = mask & (~true if guard & 1 else true)
            op = micro[pc, OP]
            if op == TRAP and active:
                for lane in range(32):
                    if (active >> lane) & 1:
                        pcs[lane] = pc
                    elif (mask >> lane) & 1:
                        pcs[lane] = pc + 1
                return TRAPPED, pc, active, executed
            counts[pc] += micro[pc, COUNTS]
            executed += micro[pc, COUNTS]
            if active == 0:
                pc += 1
            elif op >= UNPACK:
                mode = np.int64(micro[pc, MODE])
                dst = np.uint64(micro[pc, DST] * 32)
                ra = np.uint64(micro[pc, A] * 32)
                rb = np.uint64(micro[pc, B] * 32)
                rc = np.uint64(micro[pc, C] * 32)
                rd = np.uint64(micro[pc, D] * 32)
                if op == UNPACK:
                    unpack(registers, dst, rb, ra, mode, active)
                elif active != FULL or not execute_warp(registers, op, mode, dst, ra, rb, rc):
                    execute(registers, op, mode, dst, ra, rb, rc, rd, active)
                pc += 1
            elif op == BRANCH:
                target = np.int64(micro[pc, TARGET])
                if active == mask and following == EXITED:
                    pc = target
                    continue
                for lane in range(32):
                    if (active >> lane) & 1:
                        pcs[lane] = target
                    elif (mask >> lane) & 1:
                        pcs[lane] = pc + 1
                mask = 0
            else:
                for lane in range(32):
                    if (active >> lane) & 1:
                        pcs[lane] = EXITED
                mask &= ~active
                pc += 1
        for lane in range(32):
            if (mask >> lane) & 1:
                pcs[lane] = pc
