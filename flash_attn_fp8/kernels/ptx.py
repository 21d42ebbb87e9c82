"""Inline PTX, for what CuTe DSL has no name for."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass import select_ as select
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def asm(result, operands, text: str, constraints: str, loc, ip, side_effects: bool = False):
    """One statement of PTX; `result` is its type, None where it has none."""
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=side_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def kept(pointer, *, loc=None, ip=None):
    """A global pointer that stays in registers: ptxas must not compute it anew at each use."""
    address = Int64(pointer.toint(loc=loc, ip=ip)).ir_value(loc=loc, ip=ip)
    same = Int64(asm(T.i64(), [address], "mov.b64 $0, $1;", "=l,l", loc, ip, side_effects=True))
    space, alignment = pointer.memspace, pointer.alignment
    return cute.make_ptr(pointer.dtype, same, space, assumed_align=alignment, loc=loc, ip=ip)


@dsl_user_op
def mad_wide(a, b, c, *, loc=None, ip=None) -> Int64:
    """a * b + c, of numbers of 32 bits without a sign and one of 64: one instruction.

    ptxas makes three of products of 64 bits, whose upper halves it does not know to be zero.
    """
    operands = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)]
    operands.append(Int64(c).ir_value(loc=loc, ip=ip))
    return Int64(asm(T.i64(), operands, "mad.wide.u32 $0, $1, $2, $3;", "=l,r,r,l", loc, ip))


def once_if(condition: Boolean) -> Int32:
    """1 or 0, as the number of rounds of a loop that stands for a branch.

    ptxas predicates a branch of some hundred instructions, so that they are issued even where none
    is wanted. It must not see that there are two cases.
    """
    return opaque(select(condition, Int32(1), Int32(0)))


@dsl_user_op
def opaque(x: Int32, *, loc=None, ip=None) -> Int32:
    """x, of which compilers know nothing: what is computed with it stays behind this place."""
    operands = [Int32(x).ir_value(loc=loc, ip=ip)]
    return Int32(asm(T.i32(), operands, "mov.b32 $0, $1;", "=r,r", loc, ip, side_effects=True))
