"""Tensor copies: `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor` and their prefetches.

Bytes move at once. A load's are stamped with its mbarrier and complete there, all of the box's,
whatever part is out of bounds; a store's reads are stamped with the thread's bulk group. Copies of
one warp may complete in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim import box as boxes
from flash_attn_fp8.sim import reduction
from flash_attn_fp8.sim.box import Box
from flash_attn_fp8.sim.errors import Finding, Misaligned, OutOfBounds, Unmodelled
from flash_attn_fp8.sim.groups import bulk_groups
from flash_attn_fp8.sim.isa.asyncform import (
    GROUP,
    MBARRIER,
    Form,
    SharedOperand,
    Target,
    check_one_process,
    each_lane,
    operands_of,
    own_shared,
    parse_form,
    signed32,
    targets,
)
from flash_attn_fp8.sim.isa.operands import AddressOperand, ValueOperand
from flash_attn_fp8.sim.isa.table import Handler, warp
from flash_attn_fp8.sim.memory import PARAM_WINDOW, WINDOW_MASK
from flash_attn_fp8.sim.ptx.program import Address, Instruction, Operand
from flash_attn_fp8.sim.state import Warp
from flash_attn_fp8.sim.tensormap import ALIGNMENT, NBYTES, TensorMap, decode

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

_DIMENSIONS = {f"{n}d": n for n in range(1, 6)}
_FOUR_ROWS = ("tile::gather4", "tile::scatter4")


# ------------------------------------------------------------------------------------- semantics


def tensor_map(w: Warp, address: int) -> TensorMap:
    """The map at a generic address; it must lie in parameter, constant or global memory."""
    if address % ALIGNMENT:
        raise Misaligned(f"tensor map at {address:#x}, not a multiple of {ALIGNMENT}")
    window = address & WINDOW_MASK
    if window == PARAM_WINDOW:
        at = address & ~WINDOW_MASK
        if at + NBYTES > w.cta.params.size:
            raise OutOfBounds(f"tensor map at parameter offset {at}, of {w.cta.params.size} bytes")
        return decode(w.cta.params[at : at + NBYTES].tobytes())
    if window:
        raise OutOfBounds(f"tensor map at {address:#x}, not in parameter, const or global memory")
    data, at = w.cluster.memory.find(address, NBYTES, False)
    return decode(data[at : at + NBYTES].tobytes())


def place(m: TensorMap, load_mode: str, coordinates: tuple[int, ...]) -> Box:
    """The box of a copy, or why there is none."""
    if m.interleave != "none":
        raise Unmodelled(f"a copy with interleave {m.interleave}: {m}")
    if m.element_strides[0] != 1:
        raise Unmodelled(f"element stride {m.element_strides[0]} of dimension 0: {m}")
    if load_mode in _FOUR_ROWS:
        return boxes.place_rows(m, coordinates)
    return boxes.place(m, coordinates)


def load(w: Warp, box: Box, into: list[Target]) -> None:
    """Global to shared memory, of one CTA or several."""
    m = box.map
    tile = boxes.load(w.cluster.memory, box)
    w.cta.counters["bulk tensor bytes global to shared"] += box.nbytes
    for target in into:
        places = boxes.placement(m, box.rows, target.offset)
        barrier, epoch = target.mbarrier, target.mbarrier.stamp()
        access = w.async_access(barrier.actor, epoch)
        target.cta.shared.write(places.offsets, tile.reshape(-1, places.unit), access)
        _complete(w, target, epoch, box.nbytes)


def _complete(w: Warp, target: Target, epoch: int, nbytes: int) -> None:
    who = f"a copy by {w.name}"
    barrier, waits = target.mbarrier, w.waits_before()
    w.cluster.pending.add(lambda: barrier.complete_tx(nbytes, epoch, who, waits))


def store(w: Warp, lane: int, box: Box, offset: int, operation: str | None) -> None:
    """Shared memory of the executing CTA to global memory, or reduced into it."""
    m, memory = box.map, w.cluster.memory
    if any(c < 0 for c in box.coordinates):
        # The manual forbids it; an H200 answers with an illegal instruction.
        raise OutOfBounds(f"a store or reduction at negative coordinates: {box}")
    if m.atom == "32B+8B":
        raise Unmodelled(f"a store with swizzle atom 32B+8B, which the manual excludes: {box}")
    box = boxes.in_units(box)
    groups = bulk_groups(w, lane)
    tile = _read_tile(w, box, offset, groups.actor, groups.open)
    if operation is not None:
        check_one_process(w)
        if np.unique(box.offsets).size != box.rows:
            raise Unmodelled(f"a reduction into rows that overlap: {box}")
        combine = reduction.reduction(operation, _reduction_type(m, operation))
        tile = combine(boxes.load(memory, box).reshape(-1, m.size), tile.reshape(-1, m.size))
        tile = tile.reshape(box.rows, box.row_bytes)
    boxes.store(memory, box, tile)
    kind = "shared to global" if operation is None else "reduced"
    w.cta.counters[f"bulk tensor bytes {kind}"] += box.nbytes
    groups.start(w.cluster.pending)


def _reduction_type(m: TensorMap, operation: str) -> str:
    type_ = m.type
    if operation in ("and", "or", "xor") and type_ in ("u32", "s32", "u64"):
        type_ = "b" + type_[1:]  # of s64 it is an illegal instruction on an H200
    listed = type_.removesuffix(".ftz")
    if listed == "f64" or listed not in reduction.GLOBAL[operation]:
        raise Unmodelled(f".{operation} of {type_}, which the manual's table does not have: {m}")
    return type_


def _read_tile(w: Warp, box: Box, offset: int, actor: int, epoch: int) -> np.ndarray:
    """The tile from shared memory; only what is in bounds is read."""
    places = boxes.placement(box.map, box.rows, offset)
    access = w.async_access(actor, epoch)
    shared = w.cta.shared
    if box.whole:
        return shared.read(places.offsets, places.unit, access).reshape(box.rows, -1)
    tile = np.zeros((box.rows, box.row_bytes), np.uint8)
    rows = np.arange(box.rows) if box.inside is None else np.flatnonzero(box.inside)
    where = places.offsets.reshape(box.rows, -1)[rows, : box.high // places.unit]
    if where.size:
        read = shared.read(np.ascontiguousarray(where).ravel(), places.unit, access)
        tile[rows, : box.high] = read.reshape(rows.size, -1)
    return tile


# --------------------------------------------------------------------------------------- binders


class _TensorOperand:
    """`[map, {coordinates}]`."""

    def __init__(self, ctx: Context, operand: Operand, rank: int, load_mode: str) -> None:
        if not isinstance(operand, Address) or operand.coordinates is None:
            ctx.fail("needs [tensorMap, {coordinates}]")
        wanted = 5 if load_mode in _FOUR_ROWS else rank
        if len(operand.coordinates) != wanted:
            ctx.fail(f"{len(operand.coordinates)} coordinates where {wanted} are needed")
        self._map = AddressOperand(ctx, operand)
        self._rows = [ctx.row(c, "b32") for c in operand.coordinates]
        self._rank, self._load_mode = rank, load_mode

    def box(self, w: Warp, lane: int) -> Box:
        m = tensor_map(w, self._map.one(w, 1 << lane))
        if m.rank != self._rank:
            raise Finding(f"a .{self._rank}d copy through a {m}")
        coordinates = tuple(signed32(int(w.registers[row, lane])) for row in self._rows)
        return place(m, self._load_mode, coordinates)


def _form(ctx: Context, also: frozenset[str] = frozenset()) -> tuple[int, Form]:
    dim, *suffixes = ctx.suffixes
    if dim not in _DIMENSIONS:
        ctx.fail(f"dimension .{dim}")
    form = parse_form(ctx, tuple(suffixes), also)
    if form.load_mode.startswith("im2col"):
        ctx.fail(f"load mode .{form.load_mode}")
    if form.load_mode in _FOUR_ROWS and dim != "2d":
        ctx.fail(f".{form.load_mode} of .{dim}")
    return _DIMENSIONS[dim], form


@warp("cp.async.bulk.tensor")
def copy_tensor(ctx: Context, instruction: Instruction) -> Handler:
    """`[dst], [map, {c}], [mbar]{, ctaMask}{, policy}` and `[map, {c}], [src]{, policy}`."""
    rank, form = _form(ctx)
    if form.destination == "global":
        return _bind_store(ctx, instruction, rank, form, None)
    if form.source != "global" or form.completion != MBARRIER:
        ctx.fail(f"copy from {form.source} to {form.destination} on {form.completion}")
    if form.load_mode == "tile::scatter4" or (form.multicast and form.destination == "shared::cta"):
        ctx.fail("this form of tensor copy")
    count = 3 + form.multicast
    operands = operands_of(ctx, instruction.operands, count, cache_hint=form.cache_hint)
    destination = SharedOperand(ctx, operands[0])
    tensor = _TensorOperand(ctx, operands[1], rank, form.load_mode)
    mbarrier = SharedOperand(ctx, operands[2])
    mask_operand = ValueOperand(ctx, operands[3], "b16") if form.multicast else None

    def handler(w: Warp, mask: int) -> None:
        for lane in each_lane(mask):
            cta_mask = None if mask_operand is None else mask_operand.one(w, 1 << lane) & 0xFFFF
            into = targets(w, form, destination.lane(w, lane), mbarrier.lane(w, lane), cta_mask)
            load(w, tensor.box(w, lane), into)

    return handler


@warp("cp.reduce.async.bulk.tensor")
def reduce_tensor(ctx: Context, instruction: Instruction) -> Handler:
    """`[map, {c}], [src]{, policy}`."""
    rank, form = _form(ctx, reduction.OPERATIONS)
    if len(form.rest) != 1 or form.load_mode != "tile":
        ctx.fail("this form of tensor reduction")
    return _bind_store(ctx, instruction, rank, form, form.rest[0])


def _bind_store(
    ctx: Context, instruction: Instruction, rank: int, form: Form, operation: str | None
) -> Handler:
    if (form.destination, form.source, form.completion) != ("global", "shared::cta", GROUP):
        ctx.fail(f"copy from {form.source} to {form.destination} on {form.completion}")
    if form.load_mode == "tile::gather4" or form.multicast or form.cta_group != 1:
        ctx.fail("this form of tensor copy")
    operands = operands_of(ctx, instruction.operands, 2, cache_hint=form.cache_hint)
    tensor = _TensorOperand(ctx, operands[0], rank, form.load_mode)
    source = SharedOperand(ctx, operands[1])

    def handler(w: Warp, mask: int) -> None:
        for lane in each_lane(mask):
            offset = own_shared(w, source.lane(w, lane), "the source")
            store(w, lane, tensor.box(w, lane), offset, operation)

    return handler


@warp("cp.async.bulk.prefetch.tensor")
def prefetch_tensor(ctx: Context, instruction: Instruction) -> Handler:
    """A hint; the map and the coordinates must be right nevertheless."""
    dim, *suffixes = ctx.suffixes
    modes = [part for part in suffixes if part.startswith(("tile", "im2col"))]
    hint = "L2::cache_hint" in suffixes
    known = {"L2", "global", "L2::cache_hint", "tile", "tile::gather4"}
    if dim not in _DIMENSIONS or not set(suffixes) <= known:
        ctx.fail("this form of tensor prefetch")
    (operand,) = operands_of(ctx, instruction.operands, 1, cache_hint=hint)
    tensor = _TensorOperand(ctx, operand, _DIMENSIONS[dim], modes[0] if modes else "tile")

    def handler(w: Warp, mask: int) -> None:
        for lane in each_lane(mask):
            tensor.box(w, lane)

    return handler
