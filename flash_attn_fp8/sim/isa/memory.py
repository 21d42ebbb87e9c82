"""Loads, stores and address conversions, in every space.

Volatile, relaxed, acquiring, releasing and atomic accesses also order: each hands on what its warp
has observed at that address and takes what others left there. That is more order than `.relaxed`
alone gives (fences next to it are taken as given), so flags built on them are not judged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flash_attn_fp8.sim.errors import Misaligned, OutOfBounds
from flash_attn_fp8.sim.isa.operands import AddressOperand
from flash_attn_fp8.sim.isa.table import WIDTH, Handler, warp
from flash_attn_fp8.sim.memory import (
    LOCAL_WINDOW,
    OFFSET_MASK,
    PARAM_WINDOW,
    RANK_SHIFT,
    SHARED_WINDOW,
    WINDOW_MASK,
    WINDOW_OFFSET,
)
from flash_attn_fp8.sim.ptx.program import Instruction, Operand, Sink
from flash_attn_fp8.sim.state import Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

_SPACES = {
    "global": "global", "const": "global", "shared": "shared", "shared::cta": "shared",
    "shared::cluster": "shared", "local": "local", "param": "param", "param::entry": "param",
}  # fmt: skip
_PLAIN = frozenset(["weak"])
_SYNCHRONISING = frozenset(["volatile", "relaxed", "acquire", "release", "acq_rel", "sc", "mmio"])
_SCOPES = frozenset(["cta", "cluster", "gpu", "sys"])
_CACHING = frozenset(["ca", "cg", "cs", "lu", "cv", "wb", "wt", "nc", "unified"])
_VECTORS = {"v2": 2, "v4": 4, "v8": 8}
_UNSIGNED = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}


class Form(NamedTuple):
    """An access: its space ("generic" if none is named), element type, and whether it orders."""

    space: str
    type: str
    elements: int
    synchronises: bool
    cache_hint: bool
    rest: tuple[str, ...]


def parse_form(ctx: Context, also: frozenset[str] = frozenset()) -> Form:
    """Of an access's qualifiers; those in `also` are left in `rest`."""
    space, elements, synchronises, hint = "generic", 1, False, False
    rest = []
    *suffixes, kind = ctx.suffixes
    for part in suffixes:
        if part in _SPACES:
            space = _SPACES[part]
        elif part in _SYNCHRONISING:
            synchronises = True
        elif part in _VECTORS:
            elements = _VECTORS[part]
        elif part == "L2::cache_hint":
            hint = True
        elif part in also:
            rest.append(part)
        elif part not in _PLAIN | _SCOPES | _CACHING and not part.startswith(("L1::", "L2::")):
            ctx.fail(f"modifier .{part}")
    if kind not in WIDTH or kind == "pred":
        ctx.fail(f"type .{kind}")
    return Form(space, kind, elements, synchronises, hint, tuple(rest))


# ------------------------------------------------------------------------------- the spaces


def read(w: Warp, space: str, addresses: np.ndarray, unit: int, lanes: np.ndarray) -> np.ndarray:
    """(lanes, unit) bytes."""
    out = np.empty((addresses.size, unit), np.uint8)
    for where, part in _by_space(space, addresses):
        out[part] = _read_one(w, where, addresses[part], unit, lanes[part])
    return out


def write(
    w: Warp, space: str, addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray
) -> None:
    """Store (lanes, unit) bytes; of lanes with one address the highest wins."""
    for where, part in _by_space(space, addresses):
        _write_one(w, where, addresses[part], values[part], lanes[part])


_WINDOWS = {SHARED_WINDOW: "shared", PARAM_WINDOW: "param", LOCAL_WINDOW: "local", 0: "global"}


def _by_space(space: str, addresses: np.ndarray):  # type: ignore[no-untyped-def]
    if space != "generic":
        yield space, slice(None)
        return
    windows = addresses & WINDOW_MASK
    for window in np.unique(windows).tolist():
        if window not in _WINDOWS:
            raise OutOfBounds(f"generic address {int(addresses[windows == window][0]):#x}")
        yield _WINDOWS[window], windows == window


def _read_one(
    w: Warp, space: str, addresses: np.ndarray, unit: int, lanes: np.ndarray
) -> np.ndarray:
    counters = w.cta.counters
    counters[f"{space} bytes read"] += addresses.size * unit
    if space == "global":
        _check_aligned(space, addresses, unit)
        return w.cluster.memory.read(addresses, unit)
    if space == "shared":
        out = np.empty((addresses.size, unit), np.uint8)
        for rank, part in _by_rank(addresses):
            cta = w.cluster.cta_of(rank << RANK_SHIFT)
            out[part] = cta.shared.read(addresses[part] & OFFSET_MASK, unit, w.access())
        return out
    if space == "param":
        return _from_array(w.cta.params[None], addresses & WINDOW_OFFSET, unit, lanes * 0, space)
    return _from_array(w.local, addresses & WINDOW_OFFSET, unit, lanes, space)


def _write_one(
    w: Warp, space: str, addresses: np.ndarray, values: np.ndarray, lanes: np.ndarray
) -> None:
    unit = values.shape[1]
    w.cta.counters[f"{space} bytes written"] += addresses.size * unit
    if space == "global":
        _check_aligned(space, addresses, unit)
        w.cluster.memory.write(addresses, values)
    elif space == "shared":
        for rank, part in _by_rank(addresses):
            cta = w.cluster.cta_of(rank << RANK_SHIFT)
            cta.shared.write(addresses[part] & OFFSET_MASK, values[part], w.access())
    elif space == "local":
        at = addresses & WINDOW_OFFSET
        _check_array(w.local, at, unit, space)
        w.local[lanes[:, None], at[:, None] + np.arange(unit)] = values
    else:
        raise OutOfBounds("a store to parameter space")


def _by_rank(addresses: np.ndarray):  # type: ignore[no-untyped-def]
    ranks = (addresses & 0xFFFFFFFF) >> RANK_SHIFT
    first = int(ranks[0])
    if (ranks == first).all():
        yield first, slice(None)
        return
    for rank in np.unique(ranks).tolist():
        yield rank, ranks == rank


def _from_array(
    data: np.ndarray, at: np.ndarray, unit: int, lanes: np.ndarray, space: str
) -> np.ndarray:
    _check_array(data, at, unit, space)
    found: np.ndarray = data[lanes[:, None], at[:, None] + np.arange(unit)]
    return found


def _check_array(data: np.ndarray, at: np.ndarray, unit: int, space: str) -> None:
    _check_aligned(space, at, unit)
    if int(at.min()) < 0 or int(at.max()) + unit > data.shape[1]:
        raise OutOfBounds(f"{unit} bytes at {space} offset {int(at.max())}, of {data.shape[1]}")


def _check_aligned(space: str, addresses: np.ndarray, unit: int) -> None:
    wrong = addresses & (unit - 1)
    if unit > 1 and wrong.any():
        raise Misaligned(
            f"{space} access of {unit} bytes at {int(addresses[wrong != 0][0]):#x} is not aligned"
        )


def sync_keys(space: str, addresses: np.ndarray) -> list[int]:
    """The places by generic address: one place has one key, however it is named."""
    if space == "shared":
        addresses = (addresses & 0xFFFFFFFF) | SHARED_WINDOW
    elif space not in ("global", "generic"):
        return []  # nobody else sees it
    keys: list[int] = np.unique(addresses).tolist()
    return keys


def take_order(w: Warp, keys: list[int]) -> None:
    """Before a strong access: its warp takes what those before it left there."""
    points = w.cluster.sync_points
    for point in {id(p): p for k in keys if (p := points.get(k)) is not None}.values():
        w.acquire(point)


def hand_order(w: Warp, keys: list[int]) -> None:
    """After it: others may take what its warp has observed, this access included.

    The warp has taken what was there, so that is covered. One snapshot serves all its places: a
    clock for each would be 8 KB an element of what a kernel reduces into.
    """
    if keys:
        w.cluster.sync_points.update(dict.fromkeys(keys, w.release()))


# ---------------------------------------------------------------------------- ld, st


@warp("ld", "ldu")
def load(ctx: Context, instruction: Instruction) -> Handler:
    """`ld{.sem}{.scope}{.space}{.cop}{.vec}.type d, [a]{, policy}`."""
    form = parse_form(ctx)
    operands = instruction.operands
    if len(operands) != 2 + form.cache_hint:
        ctx.fail(f"{len(operands)} operands")
    rows = _destination_rows(ctx, operands[0], form)
    source = AddressOperand(ctx, operands[1])
    store_rows = _unpacker(ctx, operands[0], form, rows)
    unit = form.elements * WIDTH[form.type] // 8

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        addresses = source.of(w, lanes)
        keys = sync_keys(form.space, addresses) if form.synchronises else []
        take_order(w, keys)
        store_rows(w, lanes, read(w, form.space, addresses, unit, lanes))
        hand_order(w, keys)
        w.polled = form.synchronises

    return handler


@warp("st")
def store(ctx: Context, instruction: Instruction) -> Handler:
    """`st{.sem}{.scope}{.space}{.cop}{.vec}.type [a], b{, policy}`."""
    form = parse_form(ctx)
    operands = instruction.operands
    if len(operands) != 2 + form.cache_hint:
        ctx.fail(f"{len(operands)} operands")
    target = AddressOperand(ctx, operands[0])
    pack = _packer(ctx, operands[1], form)

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        addresses = target.of(w, lanes)
        keys = sync_keys(form.space, addresses) if form.synchronises else []
        take_order(w, keys)
        write(w, form.space, addresses, pack(w, lanes), lanes)
        hand_order(w, keys)

    return handler


def _destination_rows(ctx: Context, operand: Operand, form: Form) -> list[int]:
    rows = ctx.destinations(operand)
    wanted = form.elements * (2 if form.type == "b128" else 1)
    if len(rows) != wanted:
        ctx.fail(f"{len(rows)} destinations for {form.elements} x .{form.type}")
    return rows


def _unpacker(
    ctx: Context, operand: Operand, form: Form, rows: list[int]
) -> Callable[[Warp, np.ndarray, np.ndarray], None]:
    """Bytes of memory into registers; signed types extend to the register's width."""
    size = min(8, WIDTH[form.type] // 8)
    signed = form.type[0] == "s"
    elements = operand.elements if hasattr(operand, "elements") else (operand,)
    widths = [ctx.width(e) or 64 for e in elements]
    if form.type == "b128":
        widths = [64] * len(rows)
    for e, width in zip(elements, widths, strict=False):
        if width < 8 * size and not isinstance(e, Sink):
            ctx.fail(f"a register of {width} bits for .{form.type}")
    kind: np.dtype[Any] = np.dtype(f"<{'i' if signed else 'u'}{size}")

    def unpack(w: Warp, lanes: np.ndarray, data: np.ndarray) -> None:
        values = np.ascontiguousarray(data).view(kind)
        for j, row in enumerate(rows):
            column = values[:, j]
            if signed:
                column = column.astype(np.int64).view(np.uint64)
                if widths[j] < 64:
                    column = column & np.uint64((1 << widths[j]) - 1)
            w.registers[row, lanes] = column

    return unpack


def _packer(ctx: Context, operand: Operand, form: Form) -> Callable[[Warp, np.ndarray], np.ndarray]:
    """Registers into bytes of memory."""
    kind = None if form.type == "b128" else form.type
    if kind is not None and WIDTH[kind] == 8:
        kind = None  # bytes live in wider registers
    elements = operand.elements if hasattr(operand, "elements") else (operand,)
    rows = [
        r
        for e in elements
        for r in (ctx.rows(e) if form.type == "b128" else [_source(ctx, e, kind)])
    ]
    wanted = form.elements * (2 if form.type == "b128" else 1)
    if len(rows) != wanted:
        ctx.fail(f"{len(rows)} sources for {form.elements} x .{form.type}")
    size = min(8, WIDTH[form.type] // 8)
    index = np.array(rows)

    def pack(w: Warp, lanes: np.ndarray) -> np.ndarray:
        values = w.registers[index[:, None], lanes].T.astype(_UNSIGNED[size])
        return np.ascontiguousarray(values).view(np.uint8)

    return pack


def _source(ctx: Context, operand: Operand, kind: str | None) -> int:
    if ctx.width(operand) is None:
        return ctx.row(operand, kind)
    return ctx.row(operand, kind, wider=True)


# --------------------------------------------------------------------------------- addresses

_WINDOW_OF = {
    "shared": SHARED_WINDOW, "shared::cta": SHARED_WINDOW, "shared::cluster": SHARED_WINDOW,
    "param": PARAM_WINDOW, "param::entry": PARAM_WINDOW, "local": LOCAL_WINDOW,
    "global": 0, "const": 0,
}  # fmt: skip


@warp("cvta")
def convert_address(ctx: Context, instruction: Instruction) -> Handler:
    """`cvta.space.u64`, `cvta.to.space.u64`: between generic addresses and those of a space."""
    *suffixes, kind = ctx.suffixes
    to = suffixes[:1] == ["to"]
    space = suffixes[-1]
    if space not in _WINDOW_OF or len(suffixes) != 1 + to or kind not in ("u64", "u32"):
        ctx.fail("this form of cvta")
    window = _WINDOW_OF[space]
    into = ctx.destination(instruction.operands[0])
    source = ctx.row(instruction.operands[1])

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        address = w.registers[source, lanes]
        if to and ((address & np.uint64(WINDOW_MASK)) != window).any():
            raise OutOfBounds(f"{int(address[0]):#x} is no generic address of {space} memory")
        moved = address & np.uint64(WINDOW_OFFSET) if to else address | np.uint64(window)
        w.registers[into, lanes] = moved

    return handler


@warp("mapa")
def map_address(ctx: Context, instruction: Instruction) -> Handler:
    """`mapa{.shared::cluster}.type d, a, b`: the address in the CTA of rank b."""
    shared = "shared::cluster" in ctx.suffixes
    into = ctx.destination(instruction.operands[0])
    source, rank = ctx.row(instruction.operands[1]), ctx.row(instruction.operands[2], "u32")

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        ranks = w.registers[rank, lanes]
        if (ranks >= len(w.cluster.ctas)).any():
            raise OutOfBounds(f"mapa to rank {int(ranks.max())} of {len(w.cluster.ctas)}")
        offset = w.registers[source, lanes] & np.uint64(OFFSET_MASK)
        mapped = offset | ranks << np.uint64(RANK_SHIFT)
        w.registers[into, lanes] = mapped if shared else mapped | np.uint64(SHARED_WINDOW)

    return handler


@warp("getctarank")
def get_cta_rank(ctx: Context, instruction: Instruction) -> Handler:
    """`getctarank{.shared::cluster}.type d, a`."""
    into, source = ctx.destination(instruction.operands[0]), ctx.row(instruction.operands[1])

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        address = w.registers[source, lanes] & np.uint64(0xFFFFFFFF)
        w.registers[into, lanes] = address >> np.uint64(RANK_SHIFT)

    return handler


@warp("isspacep")
def is_space(ctx: Context, instruction: Instruction) -> Handler:
    """`isspacep.space p, a`."""
    (space,) = ctx.suffixes
    if space not in _WINDOW_OF or space == "const":
        ctx.fail(f"space .{space}")
    into, source = ctx.destination(instruction.operands[0]), ctx.row(instruction.operands[1])

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        address = w.registers[source, lanes]
        inside = (address & np.uint64(WINDOW_MASK)) == _WINDOW_OF[space]
        if space == "shared::cta":
            inside &= (address >> np.uint64(RANK_SHIFT)) & np.uint64(0xFF) == w.cta.rank
        w.registers[into, lanes] = inside

    return handler


@warp("prefetch", "prefetchu", "applypriority", "discard")
def prefetch(ctx: Context, instruction: Instruction) -> Handler:
    """Caches are not modelled: nothing to do, with any level."""

    def handler(w: Warp, mask: int) -> None:
        return None

    return handler


@warp("createpolicy")
def create_policy(ctx: Context, instruction: Instruction) -> Handler:
    """A cache policy is a number that only caches read."""
    into = ctx.destination(instruction.operands[0], "b64")

    def handler(w: Warp, mask: int) -> None:
        w.registers[into, w.lanes(mask)] = 0

    return handler


@warp("st.async")
def store_async(ctx: Context, instruction: Instruction) -> Handler:
    """`st.async{.weak}{.space}.mbarrier::complete_tx::bytes{.vec}.type [a], b, [mbar]`."""
    known = {"mbarrier::complete_tx::bytes"}
    form = parse_form(ctx, frozenset(known))
    target = AddressOperand(ctx, instruction.operands[0])
    pack = _packer(ctx, instruction.operands[1], form)
    barrier = AddressOperand(ctx, instruction.operands[2], shared=True)

    def handler(w: Warp, mask: int) -> None:
        for lane in w.lanes(mask).tolist():
            one = np.array([lane])
            address = int(target.of(w, one)[0]) & 0xFFFFFFFF
            mbarrier = w.mbarrier(barrier.one(w, 1 << lane))
            epoch = mbarrier.stamp()
            access = w.async_access(mbarrier.actor, epoch)._replace(clock=w.clocks.generic)
            values = pack(w, one)
            w.cluster.cta_of(address).shared.write(
                np.array([address & OFFSET_MASK]), values, access
            )
            done = partial(mbarrier.complete_tx, values.size, epoch, w.name, w.waits_before())
            w.cluster.pending.add(done)

    return handler
