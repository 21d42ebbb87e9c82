"""`wgmma`: products of a warpgroup, accumulated in registers, in groups that complete later.

Each of the four warps does its own 16 rows of D, as an actor of its own that reads shared memory.
The hardware completes a group for the warpgroup as a whole, and programs let one warp release a
buffer for all: `wait_group` therefore waits until all four have committed as many groups, and
observes the reads of all four.

Until a `wait_group` the accumulators in registers are `POISON`, and the sums lie beside them; so
a kernel that reads them early computes NaN, and one that writes them is reported. Where the text
goes on to an instruction that uses them, without a wait in between, that is reported too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim import hopper
from flash_attn_fp8.sim.barriers import Wait, wake_all
from flash_attn_fp8.sim.errors import Race
from flash_attn_fp8.sim.isa.mma import a_index, read_accumulator, read_elements, result_words
from flash_attn_fp8.sim.isa.operands import ValueOperand, whole_warp
from flash_attn_fp8.sim.isa.table import Handler, warp
from flash_attn_fp8.sim.matrix import (
    FORMATS,
    K_BYTES,
    Format,
    decode_shared_sm90,
    multiply,
    read_shared,
)
from flash_attn_fp8.sim.order import Access
from flash_attn_fp8.sim.ptx.program import Immediate, Instruction, Operand, Register, Vector
from flash_attn_fp8.sim.state import Cta, Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

POISON = 0x7FBADBAD  # a NaN as f32, and as either f16
_WARPS = 4


@dataclass
class InFlight:
    """Sums that a `wait_group` will put into registers; `epoch` of the operation that made them."""

    words: np.ndarray
    epoch: int


@dataclass
class WarpState:
    """What one warp has started, by accumulator registers.

    `fenced` are all registers at the last `wgmma.fence`, `retired` the count of fences when
    registers got their sums.
    """

    flying: dict[tuple[int, ...], InFlight] = field(default_factory=dict)
    retired: dict[tuple[int, ...], int] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)  # last operation of each committed group
    started: int = 0
    fences: int = 0
    fenced: np.ndarray | None = None


@dataclass
class Warpgroup:
    """Four warps, and those of them that wait for the others to commit."""

    states: list[WarpState] = field(default_factory=lambda: [WarpState() for _ in range(_WARPS)])
    waiters: list[Warp] = field(default_factory=list)


def warpgroup(w: Warp) -> Warpgroup:
    """The warpgroup of a warp."""
    groups: dict[int, Warpgroup] = w.cta.warpgroups
    found = groups.get(w.index // _WARPS)
    if found is None:
        found = groups[w.index // _WARPS] = Warpgroup()
    return found


def state(w: Warp) -> WarpState:
    """The warp's part of its warpgroup's state."""
    return warpgroup(w).states[w.index % _WARPS]


# ----------------------------------------------------------------------------- mma_async


@dataclass(frozen=True)
class WgmmaForm:
    """What the instruction fixes; `negate` from `imm-scale`, `transpose` from `imm-trans`."""

    n: int
    a: Format
    b: Format
    d: str
    saturate: bool = False
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False

    @property
    def registers(self) -> int:
        return self.n // 4 if self.d == "f16" else self.n // 2


def mma_async(
    w: Warp, form: WgmmaForm, d: list[int], a: list[int] | int, b: int, accumulate: bool
) -> None:
    """D = A·B (+ D) of this warp's rows. `a`: four register rows, or a descriptor."""
    own = state(w)
    own.started += 1
    access = w.async_access(_actor(w), own.started, in_order=True)
    rows = tuple(d)
    _check_in_flight(w, rows, a)
    _check_fenced(w, rows, a, accumulate)
    old = _accumulators(w, form, rows) if accumulate else None
    left, right = _operands(w, form, a, b, access)
    if form.a.integer:
        value = multiply(left, right)
        if old is not None:
            value = value + old
    else:
        value = hopper.multiply(left, right, old, (form.a, form.b), form.d)
    own.flying[rows] = InFlight(result_words(value, form.d, form.saturate), own.started)
    w.registers[d] = POISON
    w.cta.counters[f"wgmma warps m64n{form.n} {form.a.name}"] += 1


def _operands(
    w: Warp, form: WgmmaForm, a: list[int] | int, b: int, access: Access
) -> tuple[np.ndarray, np.ndarray]:
    shared = w.cta.shared
    if isinstance(a, int):
        first = 16 * (w.index % _WARPS)
        where = decode_shared_sm90(a)
        left = read_shared(shared, where, 16, form.a, form.transpose_a, access, first)
    else:
        left = read_elements(w, a, a_index(K_BYTES // 4), form.a)
    right = read_shared(shared, decode_shared_sm90(b), form.n, form.b, form.transpose_b, access)
    return -left if form.negate_a else left, -right if form.negate_b else right


def _actor(w: Warp) -> int:
    return w.own_actor("wgmma", "the wgmma operations")


def _check_in_flight(w: Warp, d: tuple[int, ...], a: list[int] | int) -> None:
    """Other operations in flight must not concern these registers."""
    sources = set() if isinstance(a, int) else set(a)
    for rows in state(w).flying:
        if sources.intersection(rows) or (rows != d and set(rows).intersection(d)):
            raise Race(f"{w.name}: wgmma uses registers of an earlier wgmma that is in flight")


def _check_fenced(w: Warp, d: tuple[int, ...], a: list[int] | int, accumulate: bool) -> None:
    """What the warp did to these registers must come before a `wgmma.fence`.

    A write shows, as a changed value. A read does not; sums that have arrived are taken to be read
    before an operation that does not add to them begins.
    """
    own = state(w)
    if own.fenced is None:
        raise Race(f"{w.name}: wgmma.mma_async without any wgmma.fence before it")
    if d not in own.flying and not accumulate and own.retired.get(d) == own.fences:
        raise Race(f"{w.name}: accumulators begin anew without a wgmma.fence since the last wait")
    used = [] if isinstance(a, int) else list(a)
    if accumulate and d not in own.flying:
        used += d
    if not np.array_equal(w.registers[used], own.fenced[used]):
        raise Race(f"{w.name}: registers of this wgmma were written since the last wgmma.fence")


def _accumulators(w: Warp, form: WgmmaForm, rows: tuple[int, ...]) -> np.ndarray:
    """What the accumulators hold, in flight or in registers."""
    flying = state(w).flying.get(rows)
    if flying is not None:
        _check_poison(w, rows)
        w.registers[list(rows)] = flying.words
    return read_accumulator(w, list(rows), form.n, form.d)


def _check_poison(w: Warp, rows: tuple[int, ...]) -> None:
    if (w.registers[list(rows)] != POISON).any():
        raise Race(f"{w.name}: accumulators were written while their wgmma was in flight")


# ------------------------------------------------------------------ fence, commit and wait


def fence(w: Warp) -> None:
    """`wgmma.fence`: registers are as the warp left them."""
    own = state(w)
    own.fences += 1
    own.fenced = w.registers.copy()


def commit_group(w: Warp) -> None:
    """`wgmma.commit_group`."""
    group = warpgroup(w)
    group.states[w.index % _WARPS].groups.append(state(w).started)
    wake_all(group.waiters)


def wait_group(w: Warp, pending: int) -> Wait | None:
    """`wgmma.wait_group`: all but the last `pending` groups of the warpgroup are complete."""
    group, own = warpgroup(w), state(w)
    wanted = len(own.groups) - pending
    if wanted <= 0:
        return None
    base = w.index // _WARPS * _WARPS
    members = w.cta.warps[base : base + _WARPS]

    def behind() -> list[str]:
        return [
            member.name
            for member, theirs in zip(members, group.states, strict=False)
            if len(theirs.groups) < wanted
        ]

    if behind():
        return Wait(
            group,
            lambda: not behind(),
            lambda: (
                f"wgmma.wait_group {pending}, for {', '.join(behind())} to commit group {wanted}"
            ),
        )
    for member, theirs in zip(members, group.states, strict=False):
        w.clocks.observe(_actor(member), theirs.groups[wanted - 1])
    _land(w, own, own.groups[wanted - 1])
    return None


def _land(w: Warp, own: WarpState, epoch: int) -> None:
    """Put the sums of operations up to `epoch` into their registers."""
    for rows, flying in list(own.flying.items()):
        if flying.epoch <= epoch:
            _check_poison(w, rows)
            w.registers[list(rows)] = flying.words
            if own.fenced is not None:
                own.fenced[list(rows)] = flying.words
            own.retired[rows] = own.fences
            del own.flying[rows]


def check_end(cta: Cta) -> None:
    """A kernel that ends waits for what it started."""
    groups: dict[int, Warpgroup] = cta.warpgroups
    for index, group in groups.items():
        for within, own in enumerate(group.states):
            if own.flying:
                raise Race(
                    f"{cta.name} exits while sums of wgmma are in flight in warp "
                    f"{index * _WARPS + within}: {len(own.groups)} groups are committed"
                )


# --------------------------------------------------------------------------------- binders

_FLOATS = {
    "f16": ("f16", "f32"),
    "bf16": ("f32",),
    "tf32": ("f32",),
    "e4m3": ("f16", "f32"),
    "e5m2": ("f16", "f32"),
}
_INTEGERS = ("s8", "u8")


def _form(ctx: Context) -> WgmmaForm:
    parts = [part for part in ctx.suffixes if part != "satfinite"]
    if len(parts) != 6 or parts[:2] != ["sync", "aligned"] or not parts[2].startswith("m64n"):
        ctx.fail(f"form .{'.'.join(ctx.suffixes)}")
    shape, d, a, b = parts[2:]
    n, _, k = shape.removeprefix("m64n").partition("k")
    known = (a in _INTEGERS and b in _INTEGERS and d == "s32") or (
        d in _FLOATS.get(a, ()) and (a == b or {a, b} == {"e4m3", "e5m2"})
    )
    if not known:
        ctx.fail(f"types {d}.{a}.{b}")
    columns, size = int(n), FORMATS[a].size
    step = 16 if a in _INTEGERS and columns > 32 else 8
    if columns % step or not 0 < columns <= 256 or int(k) * size != K_BYTES:
        ctx.fail(f"shape {shape} of {a}")
    saturate = "satfinite" in ctx.suffixes
    if saturate and d != "s32":
        ctx.fail("satfinite of floats")
    return WgmmaForm(columns, FORMATS[a], FORMATS[b], d, saturate)


def _immediate(ctx: Context, operand: Operand, allowed: tuple[int, int]) -> int:
    if not isinstance(operand, Immediate) or operand.value not in allowed:
        ctx.fail(f"{operand!r} where one of {allowed} is needed")
    return operand.value


def _with_immediates(
    ctx: Context, form: WgmmaForm, rest: tuple[Operand, ...], a_in_registers: bool
) -> WgmmaForm:
    """`imm-scale-a, imm-scale-b` of floats, then of 16-bit types `imm-trans-a` and `-b`."""
    transposes = (1 if a_in_registers else 2) if form.a.size == 2 else 0
    wanted = 0 if form.a.integer else 2 + transposes
    if len(rest) != wanted:
        ctx.fail(f"{len(rest)} immediates, not {wanted}")
    if not rest:
        return form
    scales = [_immediate(ctx, operand, (1, -1)) for operand in rest[:2]]
    trans = [_immediate(ctx, operand, (0, 1)) for operand in rest[2:]]
    trans = [0] * (2 - len(trans)) + trans
    return WgmmaForm(
        form.n, form.a, form.b, form.d, form.saturate,
        scales[0] < 0, scales[1] < 0, bool(trans[0]), bool(trans[1]),
    )  # fmt: skip


@warp("wgmma.mma_async")
def bind_mma_async(ctx: Context, instruction: Instruction) -> Handler:
    """`wgmma.mma_async.sync.aligned.shape.d.a.b d, a, b, scale-d{, scales{, transposes}}`."""
    form = _form(ctx)
    operands = instruction.operands
    if len(operands) < 4:
        ctx.fail(f"{len(operands)} operands")
    d = ctx.destinations(operands[0], "b32")
    if len(d) != form.registers:
        ctx.fail(f"{len(d)} accumulators, not {form.registers}")
    a_rows = ctx.rows(operands[1], "b32") if isinstance(operands[1], Vector) else None
    if a_rows is not None and len(a_rows) != 4:
        ctx.fail(f"{len(a_rows)} registers of A, not 4")
    form = _with_immediates(ctx, form, operands[4:], a_rows is not None)
    a = a_rows if a_rows is not None else ValueOperand(ctx, operands[1], "b64")
    b = ValueOperand(ctx, operands[2], "b64")
    enable = ValueOperand(ctx, operands[3], "pred")
    early = _early_use(ctx, instruction)

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        if early is not None:
            raise Race(early)
        left = a if isinstance(a, list) else a.one(w, mask)
        mma_async(w, form, d, left, b.one(w, mask), bool(enable.one(w, mask)))

    return handler


def _early_use(ctx: Context, instruction: Instruction) -> str | None:
    """An instruction that uses the accumulators before any wait, where no branch is taken."""
    entry = ctx.entry
    accumulators = _registers(instruction.operands[:1])
    here = next(i for i, one in enumerate(entry.instructions) if one is instruction)
    for index in range(here + 1, len(entry.instructions)):
        later = entry.instructions[index]
        if later.parts[0] in ("bra", "brx", "ret", "exit") and later.guard is None:
            return None
        if later.parts[0] == "wgmma":
            if later.parts[1] == "wait_group":
                return None
            continue
        if found := accumulators & _registers(later.operands):
            return (
                f"{min(found)} is an accumulator of the wgmma of line {instruction.line}, and line "
                f"{later.line} uses it before any wgmma.wait_group: {later.text.strip()}"
            )
    return None


def _registers(operands: tuple[Operand, ...]) -> set[str]:
    found: set[str] = set()
    for operand in operands:
        if isinstance(operand, Register):
            found.add(operand.name)
        elif isinstance(operand, Vector):
            found |= _registers(operand.elements)
    return found


@warp("wgmma.fence")
def bind_fence(ctx: Context, instruction: Instruction) -> Handler:
    """`wgmma.fence.sync.aligned`."""
    if ctx.suffixes != ("sync", "aligned"):
        ctx.fail(f"form .{'.'.join(ctx.suffixes)}")

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        fence(w)

    return handler


@warp("wgmma.commit_group")
def bind_commit(ctx: Context, instruction: Instruction) -> Handler:
    """`wgmma.commit_group.sync.aligned`."""
    if ctx.suffixes != ("sync", "aligned"):
        ctx.fail(f"form .{'.'.join(ctx.suffixes)}")

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        commit_group(w)

    return handler


@warp("wgmma.wait_group")
def bind_wait(ctx: Context, instruction: Instruction) -> Handler:
    """`wgmma.wait_group.sync.aligned n`."""
    operand = instruction.operands[0]
    if ctx.suffixes != ("sync", "aligned") or not isinstance(operand, Immediate):
        ctx.fail(f"form .{'.'.join(ctx.suffixes)}")
    pending = operand.value

    return whole_warp(lambda w, mask: wait_group(w, pending))
