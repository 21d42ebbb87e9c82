"""`atom` and `red`: an operation on memory that nothing comes between, lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim import reduction
from flash_attn_fp8.sim.errors import Unmodelled
from flash_attn_fp8.sim.isa import memory
from flash_attn_fp8.sim.isa.operands import AddressOperand
from flash_attn_fp8.sim.isa.table import WIDTH, Handler, warp
from flash_attn_fp8.sim.memory import WINDOW_MASK
from flash_attn_fp8.sim.ptx.program import Instruction
from flash_attn_fp8.sim.state import Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

Operation = Callable[[int, int], int]

_NAMES = frozenset(["add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec", "noftz"])
# Types that add, and the type of the parts that are added.
_FLOATS = {
    "f32": "f32", "f64": "f64", "f16": "f16", "bf16": "bf16", "f16x2": "f16", "bf16x2": "bf16",
}  # fmt: skip


def _signed(f: Operation, bits: int) -> Operation:
    half, full = 1 << (bits - 1), 1 << bits

    def operate(a: int, b: int) -> int:
        return f((a + half) % full - half, (b + half) % full - half) % full

    return operate


def _integers(name: str, kind: str) -> Operation | None:
    bits = WIDTH[kind]
    modulus = 1 << bits
    arithmetic: dict[str, Operation] = {
        "add": lambda a, b: (a + b) % modulus,
        "min": min,
        "max": max,
    }
    if kind[0] == "s":
        known = {key: _signed(operate, bits) for key, operate in arithmetic.items()}
    elif kind[0] == "u":
        known = {
            **arithmetic,
            "inc": lambda a, b: 0 if a >= b else a + 1,
            "dec": lambda a, b: b if a == 0 or a > b else a - 1,
        }
    else:
        known = {
            "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
            "exch": lambda a, b: b,
        }  # fmt: skip
    return known.get(name) if bits in (32, 64) else None


def _sum(part: str, nbytes: int) -> Operation:
    combine = reduction.reduction("add", part)

    def operate(a: int, b: int) -> int:
        x, y = (np.frombuffer(v.to_bytes(nbytes, "little"), np.uint8)[None] for v in (a, b))
        return int.from_bytes(combine(x, y).tobytes(), "little")

    return operate


def _operations(ctx: Context, name: str, kind: str) -> tuple[Operation, Operation]:
    """In shared memory, and in global memory, where the sums of f32 flush subnormals."""
    nbytes = WIDTH[kind] // 8
    if kind in _FLOATS and name == "add":
        part = _FLOATS[kind]
        return _sum(part, nbytes), _sum("f32.ftz" if part == "f32" else part, nbytes)
    found = _integers(name, kind)
    if found is None:
        ctx.fail(f"atomic .{name}.{kind}")
    return found, found


def _in_global(space: str, addresses: np.ndarray) -> np.ndarray:
    """Which of the addresses are."""
    found: np.ndarray = addresses & WINDOW_MASK == 0
    return found if space == "generic" else np.full(addresses.size, space == "global")


@warp("atom", "red")
def atomic(ctx: Context, instruction: Instruction) -> Handler:
    """`atom{.sem}{.scope}{.space}.op{.noftz}.type d, [a], b{, c}`; `red` has no d."""
    form = memory.parse_form(ctx, _NAMES)
    names = [part for part in form.rest if part != "noftz"]
    returns = instruction.parts[0] == "atom"
    operands = instruction.operands[returns:]
    if len(names) != 1 or form.elements != 1 or form.cache_hint:
        ctx.fail("this form of atomic")
    name, kind = names[0], form.type
    if ("noftz" in form.rest) != (_FLOATS.get(kind) in ("f16", "bf16")):
        ctx.fail(".noftz is for .add of f16 and bf16, which need it")
    if len(operands) != (3 if name == "cas" else 2):
        ctx.fail(f"{len(operands)} operands")
    if name == "cas" and kind not in ("b16", "b32", "b64"):
        ctx.fail(f"atomic .cas.{kind}")
    into = ctx.destination(instruction.operands[0], kind) if returns else ctx.scratch("sink")
    target = AddressOperand(ctx, operands[0])
    b = ctx.row(operands[1], kind)
    c = ctx.row(operands[2], kind) if name == "cas" else 0
    operations = None if name == "cas" else _operations(ctx, name, kind)
    unit = WIDTH[kind] // 8

    def changed(w: Warp, lane: int, in_global: bool, old: int) -> int:
        given = int(w.registers[b, lane])
        if operations is None:
            return int(w.registers[c, lane]) if old == given else old
        return operations[in_global](old, given)

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        addresses = target.of(w, lanes)
        in_global = _in_global(form.space, addresses)
        if w.cluster.memory.processes and in_global.any():
            raise Unmodelled("atomics on global memory between processes: use workers=1")
        keys, changes = memory.sync_keys(form.space, addresses), False
        memory.take_order(w, keys)
        for i in range(lanes.size):
            lane, address = lanes[i : i + 1], addresses[i : i + 1]
            data = memory.read(w, form.space, address, unit, lane)
            old = int.from_bytes(data.tobytes(), "little")
            new = changed(w, int(lane[0]), bool(in_global[i]), old)
            stored = np.frombuffer(new.to_bytes(unit, "little"), np.uint8)[None]
            memory.write(w, form.space, address, stored, lane)
            w.registers[into, lane[0]] = old
            changes |= new != old
        memory.hand_order(w, keys)
        w.polled = returns and not changes  # a lock that is taken, a flag that is not set

    return handler
