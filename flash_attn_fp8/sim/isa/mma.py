"""`mma.sync`, `ldmatrix`, `stmatrix`, `movmatrix`: matrices in the registers of a warp.

Fragments are described in words of 32 bits, which makes them the same for every element size: lane
t holds of a row t / 4 its word t mod 4, and so on. `wgmma` has the same ones, of more columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim import hopper
from flash_attn_fp8.sim.isa import memory
from flash_attn_fp8.sim.isa.operands import AddressOperand, whole_warp
from flash_attn_fp8.sim.isa.table import Handler, warp
from flash_attn_fp8.sim.matrix import FORMATS, Format, accumulator, finish, multiply
from flash_attn_fp8.sim.ptx.program import Instruction
from flash_attn_fp8.sim.state import Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

Index = tuple[np.ndarray, np.ndarray]  # (register, lane) of each word of a matrix

# ------------------------------------------------------------------------------- fragments


@cache
def a_index(words: int) -> Index:
    """A: 16 rows of `words` words along K."""
    row, word = np.arange(16)[:, None], np.arange(words)[None, :]
    return row // 8 + 2 * (word // 4), 4 * (row % 8) + word % 4


@cache
def b_index(words: int) -> Index:
    """B transposed: 8 rows of `words` words along K."""
    row, word = np.arange(8)[:, None], np.arange(words)[None, :]
    return word // 4 + 0 * row, 4 * row + word % 4


@cache
def d_index(columns: int) -> Index:
    """D and C of 32-bit elements: 16 rows."""
    row, column = np.arange(16)[:, None], np.arange(columns)[None, :]
    return 4 * (column // 8) + 2 * (row // 8) + column % 2, 4 * (row % 8) + column % 8 // 2


@cache
def half_index(columns: int) -> Index:
    """D and C of f16: 16 rows of pairs of columns."""
    row, pair = np.arange(16)[:, None], np.arange(columns // 2)[None, :]
    return 2 * (pair // 4) + row // 8, 4 * (row % 8) + pair % 4


def read_words(w: Warp, rows: list[int], index: Index) -> np.ndarray:
    """The words of a fragment in registers `rows`, uint32 in the shape of the index."""
    words: np.ndarray = w.registers[rows].astype(np.uint32)[index]
    return np.ascontiguousarray(words)


def read_elements(w: Warp, rows: list[int], index: Index, format: Format) -> np.ndarray:
    """The values of an operand's fragment, float64 (rows, K)."""
    return format.decode(read_words(w, rows, index).view(np.uint8))


def read_accumulator(w: Warp, rows: list[int], columns: int, d: str) -> np.ndarray:
    """float64 (16, columns)."""
    if d == "f16":
        pairs = read_words(w, rows, half_index(columns))
        return pairs.view(np.float16).astype(np.float64)
    return accumulator(read_words(w, rows, d_index(columns)), d)


def result_words(value: np.ndarray, d: str, saturate: bool = False) -> np.ndarray:
    """float64 (16, columns) to the words of its fragment, uint64 (registers, 32)."""
    columns = value.shape[1]
    bits = finish(value, d, saturate)
    if d == "f16":
        index, bits = half_index(columns), bits[:, 0::2] | bits[:, 1::2] << 16
    else:
        index = d_index(columns)
    out = np.empty((bits.size // 32, 32), np.uint64)
    out[index] = bits
    return out


# -------------------------------------------------------------------------------- mma.sync


@dataclass(frozen=True)
class MmaForm:
    """m16n8 with `k_bytes` along K."""

    k_bytes: int
    a: Format
    b: Format
    d: str
    saturate: bool


def mma(w: Warp, form: MmaForm, d: list[int], a: list[int], b: list[int], c: list[int]) -> None:
    """D = A·B + C, by register rows."""
    words = form.k_bytes // 4
    left = read_elements(w, a, a_index(words), form.a)
    right = read_elements(w, b, b_index(words), form.b)
    start = read_accumulator(w, c, 8, form.d)
    if w.cluster.target == "sm_90a" and not form.a.integer:
        value = hopper.multiply_sync(left, right, start, (form.a, form.b), form.d)
    else:
        with np.errstate(invalid="ignore", over="ignore"):
            value = multiply(left, right) + start
    w.registers[d] = result_words(value, form.d, form.saturate)


_TYPES = {
    ("f16", "f16"): ("f16", "f32"),
    ("bf16", "bf16"): ("f32",),
    ("tf32", "tf32"): ("f32",),
    **{(a, b): ("f16", "f32") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")},
    **{(a, b): ("s32",) for a in ("s8", "u8") for b in ("s8", "u8")},
}


@warp("mma.sync")
def bind_mma(ctx: Context, instruction: Instruction) -> Handler:
    """`mma.sync.aligned.m16n8kK.row.col{.satfinite}.dtype.atype.btype.ctype d, a, b, c`."""
    parts = list(ctx.suffixes)
    saturate = "satfinite" in parts
    if saturate:
        parts.remove("satfinite")
    if len(parts) != 8 or parts[0] != "aligned" or parts[2:4] != ["row", "col"]:
        ctx.fail(f"mma.sync.{'.'.join(parts)}")
    shape, (d, a, b, c) = parts[1], parts[4:]
    if d not in _TYPES.get((a, b), ()) or c != d or (saturate and d != "s32"):
        ctx.fail(f"types {d}.{a}.{b}.{c}")
    if not shape.startswith("m16n8k"):
        ctx.fail(f"shape {shape}")
    k_bytes = int(shape.removeprefix("m16n8k")) * FORMATS[a].size
    if k_bytes not in (16, 32):
        ctx.fail(f"shape {shape} of {a}")
    form = MmaForm(k_bytes, FORMATS[a], FORMATS[b], d, saturate)
    into = ctx.destinations(instruction.operands[0])
    sources = [ctx.rows(operand) for operand in instruction.operands[1:]]
    counts = [len(into), *(len(rows) for rows in sources)]
    accumulators = 2 if d == "f16" else 4
    wanted = [accumulators, k_bytes // 8, k_bytes // 16, accumulators]
    if counts != wanted:
        ctx.fail(f"{counts} registers, not {wanted}")
    name = f"mma.sync {shape} {a}"

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        mma(w, form, into, *sources)
        w.cta.counters[name] += 1

    return handler


# ------------------------------------------------------------------- ldmatrix and the like


def load_matrix(
    w: Warp, space: str, addresses: np.ndarray, rows: list[int], transposed: bool
) -> None:
    """`ldmatrix`: 8 x 8 matrices of 16-bit elements; lane 8i + r has the address of row r of i."""
    lanes = np.arange(8 * len(rows))
    data = memory.read(w, space, addresses[lanes], 16, lanes)
    w.registers[rows] = _as_fragment(data.reshape(-1, 8, 16), transposed)


def store_matrix(
    w: Warp, space: str, addresses: np.ndarray, rows: list[int], transposed: bool
) -> None:
    """`stmatrix`, the reverse."""
    lanes = np.arange(8 * len(rows))
    words = w.registers[rows].astype(np.uint32).reshape(-1, 8, 4)
    halves = words.view(np.uint16)
    if transposed:
        halves = np.ascontiguousarray(halves.swapaxes(1, 2))
    memory.write(w, space, addresses[lanes], halves.view(np.uint8).reshape(-1, 16), lanes)


def _as_fragment(matrices: np.ndarray, transposed: bool) -> np.ndarray:
    """Bytes (matrices, 8, 16) to words (matrices, 32): lane t has word t mod 4 of row t / 4."""
    halves = np.ascontiguousarray(matrices).view(np.uint16)
    if transposed:
        halves = np.ascontiguousarray(halves.swapaxes(1, 2))
    return halves.view(np.uint32).reshape(-1, 32).astype(np.uint64)


def move_matrix(w: Warp, into: int, source: int) -> None:
    """`movmatrix.trans`: one matrix, transposed."""
    words = w.registers[source].astype(np.uint32).view(np.uint8)
    w.registers[into] = _as_fragment(words.reshape(1, 8, 16), True)[0]


_COUNTS = {"x1": 1, "x2": 2, "x4": 4}
_SPACES = {"shared": "shared", "shared::cta": "shared"}


def _matrix_form(ctx: Context) -> tuple[int, bool, str]:
    """Matrices, whether transposed, and the space."""
    parts = list(ctx.suffixes)
    if parts[:3] != ["sync", "aligned", "m8n8"] or parts[-1] != "b16":
        ctx.fail(f"form .{'.'.join(parts)}: only m8n8 of b16")
    count, transposed, space = 0, False, "generic"
    for part in parts[3:-1]:
        if part in _COUNTS:
            count = _COUNTS[part]
        elif part == "trans":
            transposed = True
        elif part in _SPACES:
            space = _SPACES[part]
        else:
            ctx.fail(f"modifier .{part}")
    return count, transposed, space


@warp("ldmatrix")
def bind_load(ctx: Context, instruction: Instruction) -> Handler:
    """`ldmatrix.sync.aligned.m8n8.num{.trans}{.shared}.b16 r, [p]`."""
    count, transposed, space = _matrix_form(ctx)
    rows = ctx.destinations(instruction.operands[0], "b32")
    if len(rows) != count:
        ctx.fail(f"{len(rows)} registers for {count} matrices")
    source = AddressOperand(ctx, instruction.operands[1])

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        load_matrix(w, space, source.of(w, w.lanes(mask)), rows, transposed)

    return handler


@warp("stmatrix")
def bind_store(ctx: Context, instruction: Instruction) -> Handler:
    """`stmatrix.sync.aligned.m8n8.num{.trans}{.shared}.b16 [p], r`."""
    count, transposed, space = _matrix_form(ctx)
    rows = ctx.rows(instruction.operands[1], "b32")
    if len(rows) != count:
        ctx.fail(f"{len(rows)} registers for {count} matrices")
    target = AddressOperand(ctx, instruction.operands[0])

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        store_matrix(w, space, target.of(w, w.lanes(mask)), rows, transposed)

    return handler


@warp("movmatrix")
def bind_move(ctx: Context, instruction: Instruction) -> Handler:
    """`movmatrix.sync.aligned.m8n8.trans.b16 d, a`."""
    if ctx.suffixes != ("sync", "aligned", "m8n8", "trans", "b16"):
        ctx.fail(f"form .{'.'.join(ctx.suffixes)}")
    into = ctx.destination(instruction.operands[0], "b32")
    source = ctx.row(instruction.operands[1], "b32")

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        move_matrix(w, into, source)

    return handler
