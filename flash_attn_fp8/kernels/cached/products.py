"""Tensor core products of the cache kernel: `mma.m16n8k16`, and its B from rows of V."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from flash_attn_fp8.kernels.ptx import asm

# Selectors of prmt: four bytes of (second word, first word), the highest first.
_LOW_HALVES, _HIGH_HALVES = 0x5410, 0x7632
_EVEN_CODES, _ODD_CODES = 0x5140, 0x7362


def interleaved(fmt: str, first: Uint32, second: Uint32) -> list[Uint32]:
    """Words of two rows as words of pairs: an element of the first row, then the second's."""
    selectors = _LOW_HALVES, _HIGH_HALVES
    if fmt not in ("bf16", "fp16"):
        selectors = _EVEN_CODES, _ODD_CODES
    return [cute.arch.prmt(first, second, s) for s in selectors]


_MMA = "mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 "
_MMA += "{{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9}}, {{$10, $11, $12, $13}};"


@dsl_user_op
def mma(fmt: str, a, b, c, *, loc=None, ip=None) -> tuple[Float32, ...]:
    """A (four words) times B (two) plus C (four numbers), 16 x 8 x 16, in bf16 or fp16."""
    text = _MMA.format(t={"bf16": "bf16", "fp16": "f16"}[fmt])
    operands = [Uint32(x).ir_value(loc=loc, ip=ip) for x in (*a, *b)]
    operands += [Float32(x).ir_value(loc=loc, ip=ip) for x in c]
    four = llvm.StructType.get_literal([T.f32()] * 4)
    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
    result = asm(four, operands, text, constraints, loc, ip)
    return tuple(Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(4))
