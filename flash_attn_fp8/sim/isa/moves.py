"""Instructions that take several operations: moves of vectors, comparisons, carries."""
# ruff: noqa: D103 -- the opcode each function is registered for says what it does

from __future__ import annotations

from typing import TYPE_CHECKING

from flash_attn_fp8.sim.isa.bits import device, signed
from flash_attn_fp8.sim.isa.integer import lop3_bits
from flash_attn_fp8.sim.isa.table import (
    FTZ,
    FTZ_HALF,
    SELECTOR_SHIFT,
    WIDTH,
    lane,
    macro,
    selector,
)
from flash_attn_fp8.sim.ptx.program import Immediate, Pair, Sink, Vector

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context
    from flash_attn_fp8.sim.ptx.program import Instruction

# ------------------------------------------------------------------------------------- mov


@lane("_mov", "b64", "T", hot="b64")
def move(a: int) -> int:
    return a


@lane("_mov", "pred", "T")
def move_pred(a: int) -> int:
    return a


@lane("_join", "b64", "b64 b64", takes_mode=True, hot="b64")
def join(low: int, high: int, mode: int) -> int:
    """Two parts side by side; the mode holds the width of one."""
    return signed(low) | (signed(high) << (mode >> SELECTOR_SHIFT))


@lane("_part", "b64", "b64", takes_mode=True)
def part(a: int, mode: int) -> int:
    """The bits of one part; the mode holds its width and where it starts."""
    width, start = (mode >> SELECTOR_SHIFT) & 63, mode >> (SELECTOR_SHIFT + 6)
    return (signed(a) >> start) & ((1 << width) - 1)


_MOVABLE = frozenset(("b16", "b32", "b64", "b128", "u16", "u32", "u64", "s16", "s32", "s64"))
_MOVABLE |= {"f32", "f64", "pred"}


@macro("mov")
def mov(ctx: Context, instruction: Instruction) -> None:
    if len(ctx.suffixes) != 1 or ctx.suffixes[0] not in _MOVABLE or len(instruction.operands) != 2:
        ctx.fail("form of mov")
    type = ctx.suffixes[0]
    target, source = instruction.operands
    if type == "b128":
        targets, sources = ctx.destinations(target, "b64"), ctx.rows(source, "b64")
        if len(targets) != 2 or len(sources) != 2:
            ctx.fail("mov.b128 moves two b64 or one b128")
        first = targets[0]
        if first == sources[1]:
            ctx.emit("_mov.b64", ctx.scratch("first"), [sources[0]])
            ctx.emit("_mov.b64", targets[1], [sources[1]])
            ctx.emit("_mov.b64", first, [ctx.scratch("first")])
            return
        for row, given in zip(targets, sources, strict=True):
            ctx.emit("_mov.b64", row, [given])
    elif isinstance(source, Vector):
        _pack(ctx, ctx.destination(target, type), source, WIDTH[type])
    elif isinstance(target, Vector):
        _unpack(ctx, target, ctx.row(source, type), WIDTH[type])
    else:
        ctx.emit("_mov.b64", ctx.destination(target, type), [ctx.row(source, type)])


def _element_type(ctx: Context, vector: Vector, width: int) -> str:
    count = len(vector.elements)
    if count not in (2, 4) or width // count not in (8, 16, 32):
        ctx.fail(f"{count} parts of {width} bits")
    return f"b{width // count}"


def _pack(ctx: Context, target: int, vector: Vector, width: int) -> None:
    type = _element_type(ctx, vector, width)
    rows = [ctx.row(element, type) for element in vector.elements]
    mode = WIDTH[type] << SELECTOR_SHIFT
    if len(rows) == 4:
        low, high = ctx.scratch("low"), ctx.scratch("high")
        ctx.emit("_join.b64", low, rows[:2], mode)
        ctx.emit("_join.b64", high, rows[2:], mode)
        rows, mode = [low, high], mode * 2
    ctx.emit("_join.b64", target, rows, mode)


def _unpack(ctx: Context, vector: Vector, source: int, width: int) -> None:
    type = _element_type(ctx, vector, width)
    bits = WIDTH[type]
    if len(vector.elements) == 2 and not any(isinstance(e, Sink) for e in vector.elements):
        low, high = (ctx.destination(element, type) for element in vector.elements)
        if low != high:
            ctx.emit_unpack(low, high, source, bits)
            return
    for place, element in enumerate(vector.elements):
        if not isinstance(element, Sink):
            mode = (bits | (place * bits) << 6) << SELECTOR_SHIFT
            ctx.emit("_part.b64", ctx.destination(element, type), [source], mode)


# ------------------------------------------------------------------------------ comparisons

_INTEGER_COMPARISONS = selector("eq ne lt le gt ge")
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_FLOAT_COMPARISONS = selector("eq ne lt le gt ge equ neu ltu leu gtu geu num nan")


@device
def _compared(less: bool, equal: bool, comparison: int) -> bool:
    if comparison == 0:
        return equal
    if comparison == 1:
        return not equal
    if comparison == 2:
        return less
    if comparison == 3:
        return less or equal
    if comparison == 4:
        return not (less or equal)
    return not less


@lane("_compare", "u32 s32", "T T", result="pred", takes_mode=True, hot="u32 s32")
@lane("_compare", "s16 s64 u64", "T T", result="pred", takes_mode=True)
def compare_integers(a: int, b: int, mode: int) -> bool:
    return _compared(a < b, a == b, mode >> SELECTOR_SHIFT)


@lane("_compare", "f16 bf16 f32 f64", "T T", result="pred", takes_mode=True)
def compare_floats(a: float, b: float, mode: int) -> bool:
    """equ and its like are true of NaN as well, ne is not."""
    comparison = mode >> SELECTOR_SHIFT
    unordered = a != a or b != b
    if comparison == 12:
        return not unordered
    if comparison == 13:
        return unordered
    if unordered:
        return comparison >= 6
    return _compared(a < b, a == b, comparison - 6 if comparison >= 6 else comparison)


# Zero-extended, so that the comparison of a wider type is the same.
_COMPARED_AS = {"b16": "u32", "u16": "u32", "b32": "u32", "b64": "u64"}


def _comparison(ctx: Context, names: list[str], type: str) -> int:
    """The mode of a comparison by its name and type; takes its names off the list."""
    if not names:
        ctx.fail("no comparison")
    name = names.pop(0)
    ftz = "ftz" in names
    if ftz:
        names.remove("ftz")
    if type in ("f16", "bf16", "f32", "f64"):
        if name not in _FLOAT_COMPARISONS or (ftz and type not in ("f16", "f32")):
            ctx.fail(f"comparison .{name}{'.ftz' if ftz else ''} of {type}")
        return _FLOAT_COMPARISONS[name] | (0 if not ftz else FTZ if type == "f32" else FTZ_HALF)
    if name in _UNSIGNED_NAMES and type[0] == "u":
        name = _UNSIGNED_NAMES[name]
    allowed = ("eq", "ne") if type[0] == "b" else tuple(_INTEGER_COMPARISONS)
    if ftz or name not in allowed:
        ctx.fail(f"comparison .{name}{'.ftz' if ftz else ''} of {type}")
    return _INTEGER_COMPARISONS[name]


def _compare(
    ctx: Context, instruction: Instruction, type: str, names: list[str]
) -> tuple[int, str]:
    """Emit the comparison of sources 1 and 2 into a scratch row; the row, and and/or/xor or ""."""
    mode = _comparison(ctx, names, type)
    combined = names.pop(0) if names and names[0] in ("and", "or", "xor") else ""
    if names:
        ctx.fail(f"modifier .{names[0]}")
    if len(instruction.operands) != (4 if combined else 3):
        ctx.fail("wrong number of operands")
    rows = [ctx.row(operand, type) for operand in instruction.operands[1:3]]
    result = ctx.scratch("compared")
    ctx.emit(f"_compare.{_COMPARED_AS.get(type, type)}", result, rows, mode)
    return result, combined


@macro("setp")
def setp(ctx: Context, instruction: Instruction) -> None:
    """p = (a ? b) op c, q = !(a ? b) op c; of packed types, p and q for the halves."""
    *names, type = ctx.suffixes
    if type in ("f16x2", "bf16x2"):
        _setp_packed(ctx, instruction, type, names)
        return
    if type not in WIDTH:
        ctx.fail("setp without a type")
    target = instruction.operands[0]
    result, combined = _compare(ctx, instruction, type, names)
    if not combined and not isinstance(target, Pair):
        ctx.micro[-1][1] = ctx.destination(target, "pred")  # straight to where it goes
        return
    first, second = (target.first, target.second) if isinstance(target, Pair) else (target, Sink())
    inverse = ctx.scratch("not compared")
    if not isinstance(second, Sink):
        ctx.emit("not.pred", inverse, [result])
    if combined:
        c = ctx.row(instruction.operands[3], "pred")
        ctx.emit(f"{combined}.b64", result, [result, c])
        if not isinstance(second, Sink):
            ctx.emit(f"{combined}.b64", inverse, [inverse, c])
    if not isinstance(second, Sink):
        ctx.emit("_mov.pred", ctx.destination(second, "pred"), [inverse])
    ctx.emit("_mov.pred", ctx.destination(first, "pred"), [result])


def _setp_packed(ctx: Context, instruction: Instruction, type: str, names: list[str]) -> None:
    target = instruction.operands[0]
    mode = _comparison(ctx, names, type[:-2])
    if names or len(instruction.operands) != 3 or not isinstance(target, Pair):
        ctx.fail(f"form of setp.{type}")
    a, b = (ctx.row(operand, type) for operand in instruction.operands[1:])
    upper, sixteen = [ctx.scratch("upper"), ctx.scratch("upper b")], ctx.constant(16)
    ctx.emit("shr.u64", upper[0], [a, sixteen])
    ctx.emit("shr.u64", upper[1], [b, sixteen])
    ctx.emit(f"_compare.{type[:-2]}", ctx.destination(target.first, "pred"), [a, b], mode)
    ctx.emit(f"_compare.{type[:-2]}", ctx.destination(target.second, "pred"), upper, mode)


@macro("set")
def set_(ctx: Context, instruction: Instruction) -> None:
    """d = (a ? b) op c as a number: all ones, or 1.0 in a float's type."""
    types = [part for part in ctx.suffixes if part in WIDTH]
    names = [part for part in ctx.suffixes if part not in WIDTH]
    if len(types) != 2 or types[0] not in ("u32", "s32", "f32", "f16", "bf16", "u16", "s16"):
        ctx.fail("types of set")
    true = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80}.get(
        types[0], (1 << WIDTH[types[0]]) - 1
    )
    result, combined = _compare(ctx, instruction, types[1], names)
    if combined:
        ctx.emit(f"{combined}.b64", result, [result, ctx.row(instruction.operands[3], "pred")])
    target = ctx.destination(instruction.operands[0], types[0])
    ctx.emit("selp.b64", target, [ctx.constant(true), ctx.constant(0), result])


@macro("slct")
def slct(ctx: Context, instruction: Instruction) -> None:
    """d = c >= 0 ? a : b; NaN chooses b."""
    *ftz, type, chooser = ctx.suffixes
    if type not in WIDTH or WIDTH[type] < 16 or chooser not in ("s32", "f32"):
        ctx.fail("types of slct")
    if ftz not in ([], ["ftz"]) or (ftz and chooser != "f32") or len(instruction.operands) != 4:
        ctx.fail("form of slct")
    a, b = (ctx.row(operand, type) for operand in instruction.operands[1:3])
    c, result = ctx.row(instruction.operands[3], chooser), ctx.scratch("compared")
    mode = _FLOAT_COMPARISONS["ge"] | (FTZ if ftz else 0)
    ctx.emit(f"_compare.{chooser}", result, [c, ctx.constant(0)], mode)
    ctx.emit("selp.b64", ctx.destination(instruction.operands[0], type), [a, b, result])


# --------------------------------------------------------------------------------- carries


@macro("add.cc", "addc", "sub.cc", "subc")
def extended_add(ctx: Context, instruction: Instruction) -> None:
    """Sum or difference with the carry (borrow) flag, which .cc sets."""
    parts = instruction.parts
    *names, type = parts[1:]
    if type not in ("u32", "s32", "u64", "s64") or names not in ([], ["cc"]):
        ctx.fail("form of an extended-precision instruction")
    if len(instruction.operands) != 3:
        ctx.fail("wrong number of operands")
    rows = [ctx.row(operand, type) for operand in instruction.operands[1:]]
    carry_in = ctx.scratch("carry") if parts[0].endswith("c") else ctx.constant(0)
    target = ctx.destination(instruction.operands[0], type)
    _extended(ctx, parts[0][:3], type, target, [*rows, carry_in], bool(names))


def _extended(
    ctx: Context, operation: str, type: str, target: int, rows: list[int], sets: bool
) -> None:
    unsigned_type = "u" + type[1:]
    if sets:
        carry = "_carry3" if operation == "add" else "_borrow3"
        ctx.emit(f"{carry}.{unsigned_type}", ctx.scratch("carry out"), rows)
    ctx.emit(f"_{operation}3.{unsigned_type}", target, rows)
    if sets:
        ctx.emit("_mov.pred", ctx.scratch("carry"), [ctx.scratch("carry out")])


@macro("mad.lo.cc", "mad.hi.cc", "madc.lo", "madc.hi")
def extended_mad(ctx: Context, instruction: Instruction) -> None:
    """The lower or upper half of a product, plus c and the carry flag, which .cc sets."""
    stem, half, *names, type = instruction.parts
    if type not in ("u32", "s32", "u64", "s64") or names not in ([], ["cc"]):
        ctx.fail("form of an extended-precision instruction")
    if len(instruction.operands) != 4:
        ctx.fail("wrong number of operands")
    a, b, c = (ctx.row(operand, type) for operand in instruction.operands[1:])
    product = ctx.scratch("product")
    signed_type = "s" + type[1:]
    ctx.emit(f"mul.{half}.{signed_type if half == 'lo' else type}", product, [a, b])
    carry_in = ctx.scratch("carry") if stem == "madc" else ctx.constant(0)
    target = ctx.destination(instruction.operands[0], type)
    _extended(ctx, "add", type, target, [product, c, carry_in], bool(names))


# ------------------------------------------------------------------------------ lop3 with p


@lane("_lop3", "b32", "b32 b32 b32", takes_mode=True)
def lop3_mode(a: int, b: int, c: int, mode: int) -> int:
    return lop3_bits(a, b, c, mode >> SELECTOR_SHIFT)


@macro("lop3.or", "lop3.and")
def lop3_predicate(ctx: Context, instruction: Instruction) -> None:
    """`lop3.op.b32 d|p, a, b, c, table, q`: p = (d != 0) op q."""
    operands = instruction.operands
    combined = instruction.parts[1]
    if ctx.suffixes != ("b32",) or len(operands) != 6 or not isinstance(operands[0], Pair):
        ctx.fail("form of lop3")
    table = operands[4]
    if not isinstance(table, Immediate) or not 0 <= table.value < 256:
        ctx.fail("lop3 needs a table of 8 bits")
    rows = [ctx.row(operand, "b32") for operand in operands[1:4]]
    q = ctx.row(operands[5], "pred")
    value, result = ctx.scratch("product"), ctx.scratch("compared")
    ctx.emit("_lop3.b32", value, rows, table.value << SELECTOR_SHIFT)
    mode = _INTEGER_COMPARISONS["ne"]
    ctx.emit("_compare.u32", result, [value, ctx.constant(0)], mode)
    ctx.emit(f"{combined}.b64", result, [result, q])
    ctx.emit("_mov.b64", ctx.destination(operands[0].first, "b32"), [value])
    ctx.emit("_mov.pred", ctx.destination(operands[0].second, "pred"), [result])
