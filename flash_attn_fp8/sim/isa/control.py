"""Warp-wide instructions, fences, and what only changes how fast something runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim.barriers import Wait
from flash_attn_fp8.sim.errors import BarrierMisuse, Finding
from flash_attn_fp8.sim.isa.operands import ValueOperand, lowest, missing_lanes
from flash_attn_fp8.sim.isa.table import Handler, warp
from flash_attn_fp8.sim.ptx.program import Instruction, Pair, Special
from flash_attn_fp8.sim.state import ALL_LANES, Converge, Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

_LANE = np.arange(32)
_SCOPES = ("cta", "cluster", "gpu", "sys")
_WITH_MASK = Callable[[Warp, int, np.ndarray], None]


def _synchronised(members: ValueOperand, effect: _WITH_MASK) -> Handler:
    """A `.sync` instruction: its effect once all of `members` are here, for the lanes that are."""

    def handler(w: Warp, mask: int) -> Converge | None:
        groups = _groups(members.of(w, w.lanes(mask)), mask, w)
        for group, member_mask in groups:
            if away := missing_lanes(w, group, member_mask):
                return away
            if group & ~member_mask:
                raise BarrierMisuse(
                    f"lanes {group & ~member_mask:#x} execute it and are not members"
                )
        for group, _ in groups:
            effect(w, group, w.lanes(group))
        return None

    return handler


def _groups(given: np.ndarray, mask: int, w: Warp) -> list[tuple[int, int]]:
    """(lanes, member mask) of those that name the same members: tiles of a warp may meet apart."""
    first = int(given[0])
    if (given == given[0]).all():
        return [(mask, first & ALL_LANES)]
    lanes = w.lanes(mask)
    return [(int((1 << lanes[given == m]).sum()), int(m) & ALL_LANES) for m in np.unique(given)]


@warp("elect.sync")
def elect(ctx: Context, instruction: Instruction) -> Handler:
    """`elect.sync d|p, membermask`: the lowest lane leads."""
    target, members = instruction.operands
    if not isinstance(target, Pair):
        ctx.fail("elect.sync without d|p")
    into, leads = ctx.destination(target.first), ctx.destination(target.second, "pred")

    def effect(w: Warp, mask: int, lanes: np.ndarray) -> None:
        leader = lowest(mask)
        w.registers[into, lanes] = leader
        w.registers[leads, lanes] = lanes == leader

    return _synchronised(ValueOperand(ctx, members, "b32"), effect)


@warp("activemask")
def active_mask(ctx: Context, instruction: Instruction) -> Handler:
    """`activemask.b32 d`."""
    into = ctx.destination(instruction.operands[0], "b32")

    def handler(w: Warp, mask: int) -> None:
        w.registers[into, w.lanes(mask)] = mask

    return handler


@warp("vote.sync")
def vote(ctx: Context, instruction: Instruction) -> Handler:
    """`vote.sync.{all,any,uni}.pred d, {!}a, membermask` and `.ballot.b32`."""
    mode = ctx.suffixes[0]
    d, a, members = instruction.operands
    into = ctx.destination(d, "b32" if mode == "ballot" else "pred")
    source = ctx.row(a, "pred")
    if mode not in ("all", "any", "uni", "ballot"):
        ctx.fail(f"mode .{mode}")

    def effect(w: Warp, mask: int, lanes: np.ndarray) -> None:
        given = w.registers[source, lanes] != 0
        result = {
            "all": given.all(),
            "any": given.any(),
            "uni": given.all() or not given.any(),
            "ballot": (1 << lanes[given]).sum(),
        }[mode]
        w.registers[into, lanes] = int(result)

    return _synchronised(ValueOperand(ctx, members, "b32"), effect)


@warp("match.sync")
def match(ctx: Context, instruction: Instruction) -> Handler:
    """`match.sync.{any,all}.b{32,64} d{|p}, a, membermask`."""
    mode, kind = ctx.suffixes
    target, a, members = instruction.operands
    first = target.first if isinstance(target, Pair) else target
    into = ctx.destination(first, "b32")
    equal = (
        ctx.destination(target.second, "pred") if isinstance(target, Pair) else ctx.scratch("sink")
    )
    source = ctx.row(a, kind)
    if mode not in ("any", "all"):
        ctx.fail(f"mode .{mode}")

    def effect(w: Warp, mask: int, lanes: np.ndarray) -> None:
        given = w.registers[source, lanes]
        if mode == "any":
            same = given[:, None] == given
            w.registers[into, lanes] = (same * (1 << lanes)).sum(1)
        else:
            all_equal = bool((given == given[0]).all())
            w.registers[into, lanes] = mask if all_equal else 0
            w.registers[equal, lanes] = all_equal

    return _synchronised(ValueOperand(ctx, members, "b32"), effect)


@warp("shfl.sync")
def shuffle(ctx: Context, instruction: Instruction) -> Handler:
    """`shfl.sync.{up,down,bfly,idx}.b32 d{|p}, a, b, c, membermask`, as the manual's pseudocode."""
    mode, _ = ctx.suffixes
    target, a, b, c, members = instruction.operands
    first = target.first if isinstance(target, Pair) else target
    into = ctx.destination(first, "b32")
    inside = (
        ctx.destination(target.second, "pred") if isinstance(target, Pair) else ctx.scratch("sink")
    )
    source, amount, limits = ctx.row(a, "b32"), ctx.row(b, "b32"), ctx.row(c, "b32")
    if mode not in ("up", "down", "bfly", "idx"):
        ctx.fail(f"mode .{mode}")

    def effect(w: Warp, mask: int, lanes: np.ndarray) -> None:
        by = (w.registers[amount] & np.uint64(31)).astype(np.int64)
        limit = w.registers[limits].astype(np.int64)
        segment = (limit >> 8) & 31
        last = (_LANE & segment) | (limit & 31 & ~segment)
        if mode == "up":
            j = _LANE - by
            ok = j >= last
        elif mode == "idx":
            j = (_LANE & segment) | (by & ~segment)
            ok = j <= last
        else:
            j = _LANE + by if mode == "down" else _LANE ^ by
            ok = j <= last
        j = np.where(ok, j, _LANE)
        values = w.registers[source][j]
        w.registers[into, lanes] = values[lanes]
        w.registers[inside, lanes] = ok[lanes]

    return _synchronised(ValueOperand(ctx, members, "b32"), effect)


@warp("redux.sync")
def reduce(ctx: Context, instruction: Instruction) -> Handler:
    """`redux.sync.op{.abs}{.NaN}.type d, a, membermask`."""
    *ops, kind = ctx.suffixes
    d, a, members = instruction.operands
    into, source = ctx.destination(d), ctx.row(a)
    op = ops[0]
    if len(ops) != 1 or (op, kind) not in {
        *((o, k) for o in ("add", "min", "max") for k in ("u32", "s32")),
        *((o, "b32") for o in ("and", "or", "xor")),
        *((o, "f32") for o in ("min", "max")),
    }:
        ctx.fail("this form of redux")
    dtype = {"u32": np.uint32, "b32": np.uint32, "s32": np.int32, "f32": np.float32}[kind]
    combine = {
        "add": np.add, "min": np.fmin if kind == "f32" else np.minimum,
        "max": np.fmax if kind == "f32" else np.maximum,
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[op]  # fmt: skip

    def effect(w: Warp, mask: int, lanes: np.ndarray) -> None:
        given = w.registers[source, lanes].astype(np.uint32).view(dtype)
        result = np.array([combine.reduce(given)]).astype(dtype).view(np.uint32)
        w.registers[into, lanes] = result[0]

    return _synchronised(ValueOperand(ctx, members, "b32"), effect)


@warp("bar.warp.sync")
def warp_barrier(ctx: Context, instruction: Instruction) -> Handler:
    """`bar.warp.sync membermask`."""
    return _synchronised(
        ValueOperand(ctx, instruction.operands[0], "b32"), lambda w, mask, lanes: None
    )


# ------------------------------------------------------------------------------------- fences


@warp("fence", "membar")
def fence(ctx: Context, instruction: Instruction) -> Handler:
    """`fence{.sem}.scope`, `membar`, `fence.mbarrier_init`, `fence.proxy.*`.

    `fence.proxy.async` and `.mbarrier_init` make what went before visible to other proxies; the
    others let relaxed arrivals and waits hand on order. Scopes are not told apart, nor is an
    acquiring fence from a releasing one.
    """
    parts = ctx.suffixes
    if parts[:2] == ("proxy", "async"):
        if parts[2:] not in ((), ("global",), ("shared::cta",), ("shared::cluster",)):
            ctx.fail("this form of proxy fence")
        if parts[2:] == ("global",):
            return _nothing
        return lambda w, mask: w.fence_proxy_async()
    known = {
        ("proxy", "alias"), ("mbarrier_init", "release", "cluster"),
        *((s,) for s in ("cta", "gl", "sys", "cluster", "gpu")),
        *((sem, s) for sem in ("sc", "acq_rel", "acquire", "release") for s in _SCOPES),
    }  # fmt: skip
    if parts not in known:
        ctx.fail("this form of fence")
    if parts[0] == "mbarrier_init":
        return lambda w, mask: w.fence_inits()
    return _nothing if parts[0] == "proxy" else lambda w, mask: w.fence()


def _nothing(w: Warp, mask: int) -> None:
    return None


@warp("griddepcontrol")
def grid_dependency(ctx: Context, instruction: Instruction) -> Handler:
    """Launches run one after the other: what came before is over."""
    if ctx.suffixes not in (("wait",), ("launch_dependents",)):
        ctx.fail("this form of griddepcontrol")
    return _nothing


# ------------------------------------------------------------------------ registers, time, traps


@warp("setmaxnreg")
def set_max_registers(ctx: Context, instruction: Instruction) -> Handler:
    """`setmaxnreg.{inc,dec}.sync.aligned.u32 n`: takes from, or gives to, the CTA's pool."""
    kind = ctx.suffixes[0]
    if ctx.suffixes not in (("inc", "sync", "aligned", "u32"), ("dec", "sync", "aligned", "u32")):
        ctx.fail("this form of setmaxnreg")
    wanted = ValueOperand(ctx, instruction.operands[0], "u32")

    def handler(w: Warp, mask: int) -> Wait | Converge | None:
        if away := missing_lanes(w, mask, ALL_LANES):
            return away
        count, cta = wanted.one(w, mask), w.cta
        if count % 8 or not 24 <= count <= 256:
            raise BarrierMisuse(f"setmaxnreg {count}: it must be a multiple of 8 from 24 to 256")
        if not w.launch_registers:
            return None
        change = count - w.launch_registers
        if (kind == "dec" and change > 0) or (kind == "inc" and change < 0):
            raise BarrierMisuse(f"setmaxnreg.{kind} from {w.launch_registers} to {count}")
        if change > cta.pool.free:
            return Wait(
                cta.pool,
                ready=lambda: change <= cta.pool.free,
                describe=lambda: f"for {change} registers a thread; {cta.pool.free} are free",
            )
        cta.pool.take(change)
        w.launch_registers = count
        return None

    return handler


@warp("nanosleep")
def nanosleep(ctx: Context, instruction: Instruction) -> Handler:
    """Time is not modelled; others go first."""

    def handler(w: Warp, mask: int) -> None:
        w.polled = True

    return handler


@warp("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
def clock(ctx: Context, instruction: Instruction) -> Handler:
    """Counts the cluster's visible operations: monotonic, and no measure of time."""
    name = next(o.name for o in instruction.operands if isinstance(o, Special))
    wide = name in ("%clock64", "%globaltimer")
    into = ctx.destination(instruction.operands[0], "b64" if wide else "b32")
    shift = 32 if name.endswith("_hi") else 0
    mask_of_width = (1 << 64) - 1 if wide else 0xFFFFFFFF

    def handler(w: Warp, mask: int) -> None:
        now = w.cluster.pending.now >> shift & mask_of_width
        w.registers[into, w.lanes(mask)] = now

    return handler


@warp("trap", "brkpt")
def trap(ctx: Context, instruction: Instruction) -> Handler:
    """The program found a fault of its own."""

    def handler(w: Warp, mask: int) -> None:
        raise Finding(f"the program executed `{instruction.opcode}` (an assertion of its own)")

    return handler
