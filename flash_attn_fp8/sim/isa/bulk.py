"""Bulk copies without a tensor map, bulk groups, and instructions on tensor maps themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim import reduction, tensormap
from flash_attn_fp8.sim.barriers import Wait
from flash_attn_fp8.sim.errors import Finding, Misaligned
from flash_attn_fp8.sim.groups import bulk_groups
from flash_attn_fp8.sim.isa import memory
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
    targets,
)
from flash_attn_fp8.sim.isa.operands import AddressOperand, ValueOperand, whole_warp
from flash_attn_fp8.sim.isa.table import WIDTH, Handler, warp
from flash_attn_fp8.sim.isa.tma import tensor_map
from flash_attn_fp8.sim.ptx.program import Immediate, Instruction
from flash_attn_fp8.sim.state import Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

_UNIT = 16


# ------------------------------------------------------------------------------------- semantics


def _check_range(what: str, address: int, nbytes: int) -> None:
    if address % _UNIT:
        raise Misaligned(f"the {what} of a bulk copy at {address:#x}, not a multiple of {_UNIT}")
    if nbytes % _UNIT:
        raise Misaligned(f"a bulk copy of {nbytes} bytes, not a multiple of {_UNIT}")


def _units(offset: int, nbytes: int) -> np.ndarray:
    return np.arange(offset, offset + nbytes, _UNIT)


def copy_in(w: Warp, source: int, nbytes: int, into: list[Target]) -> None:
    """Global to shared memory, of one CTA or several."""
    _check_range("source", source, nbytes)
    data, at = w.cluster.memory.find(source, nbytes, False)
    values = data[at : at + nbytes].reshape(-1, _UNIT)
    w.cta.counters["bulk bytes global to shared"] += nbytes
    for target in into:
        _write_shared(w, target, values, in_order=False)


def copy_across(
    w: Warp, source: int, nbytes: int, target: Target, combine: reduction.Combine | None, size: int
) -> None:
    """Shared memory of the executing CTA to another's, or reduced into it.

    The mbarrier at the destination tells that the source was read, too.
    """
    _check_range("source", source, nbytes)
    barrier = target.mbarrier
    access = w.async_access(barrier.actor, barrier.stamp())
    values = w.cta.shared.read(_units(source, nbytes), _UNIT, access)
    if combine is not None:
        # Each element's reduction is atomic, so those that complete on one mbarrier may meet.
        access = access._replace(in_order=True)
        there = target.cta.shared.read(_units(target.offset, nbytes), _UNIT, access)
        values = combine(there.reshape(-1, size), values.reshape(-1, size)).reshape(-1, _UNIT)
    w.cta.counters["bulk bytes shared to cluster"] += nbytes
    _write_shared(w, target, values, in_order=combine is not None)


def _write_shared(w: Warp, target: Target, values: np.ndarray, *, in_order: bool) -> None:
    nbytes = values.size
    _check_range("destination", target.offset, nbytes)
    barrier, epoch = target.mbarrier, target.mbarrier.stamp()
    access = w.async_access(barrier.actor, epoch, in_order)
    target.cta.shared.write(_units(target.offset, nbytes), values, access)
    who, waits = f"a copy by {w.name}", w.waits_before()
    w.cluster.pending.add(lambda: barrier.complete_tx(nbytes, epoch, who, waits))


def copy_out(
    w: Warp,
    lane: int,
    destination: int,
    source: int,
    nbytes: int,
    combine: reduction.Combine | None = None,
    size: int = 1,
    byte_mask: int = 0xFFFF,
) -> None:
    """Shared memory of the executing CTA to global memory, or reduced into it."""
    _check_range("source", source, nbytes)
    _check_range("destination", destination, nbytes)
    groups = bulk_groups(w, lane)
    access = w.async_access(groups.actor, groups.open)
    values = w.cta.shared.read(_units(source, nbytes), _UNIT, access)
    data, at = w.cluster.memory.find(destination, nbytes, True)
    there = data[at : at + nbytes].reshape(-1, _UNIT)
    if combine is not None:
        check_one_process(w)
        values = combine(there.reshape(-1, size), values.reshape(-1, size)).reshape(-1, _UNIT)
    copied = (byte_mask >> np.arange(_UNIT) & 1).astype(np.bool_)
    there[:, copied] = values[:, copied]
    kind = "shared to global" if combine is None else "reduced"
    w.cta.counters[f"bulk bytes {kind}"] += nbytes
    groups.start(w.cluster.pending)


# --------------------------------------------------------------------------------- bulk copies


@warp("cp.async.bulk")
def copy_bulk(ctx: Context, instruction: Instruction) -> Handler:
    """`[dst], [src], size, [mbar]{, ctaMask}{, policy}`; to global memory with a group, no mbar."""
    form = parse_form(ctx, ctx.suffixes, frozenset(["cp_mask"]))
    return _bind(ctx, instruction, form, None, 1)


@warp("cp.reduce.async.bulk")
def reduce_bulk(ctx: Context, instruction: Instruction) -> Handler:
    """The same without masks, with `.redOp{.noftz}.type`."""
    also = reduction.OPERATIONS | {"noftz"} | frozenset(WIDTH)
    form = parse_form(ctx, ctx.suffixes, also)
    noftz = "noftz" in form.rest
    named = tuple(part for part in form.rest if part != "noftz")
    table = reduction.GLOBAL if form.destination == "global" else reduction.SHARED
    if len(named) != 2 or named[1] not in table.get(named[0], ()):
        ctx.fail(f"reduction .{'.'.join(named)} into {form.destination}")
    operation, kind = named
    if noftz != (operation == "add" and kind in ("f16", "bf16")):
        ctx.fail(".noftz is for .add of .f16 and .bf16, which need it")
    # The manual says that .add.f32 flushes subnormals; an H200 does not.
    combine = reduction.reduction(operation, kind)
    return _bind(ctx, instruction, form, combine, WIDTH[kind] // 8)


def _bind(
    ctx: Context,
    instruction: Instruction,
    form: Form,
    combine: reduction.Combine | None,
    size: int,
) -> Handler:
    way = (form.source, form.destination, form.completion)
    if form.load_mode != "tile" or form.cta_group != 1 or "tile" in ctx.suffixes:
        ctx.fail("this form of bulk copy")
    if way == ("shared::cta", "global", GROUP):
        return _bind_out(ctx, instruction, form, combine, size)
    across = way == ("shared::cta", "shared::cluster", MBARRIER)
    inward = form.source == "global" and form.destination != "global" and combine is None
    if not across and not (inward and form.completion == MBARRIER):
        ctx.fail(f"bulk copy from {form.source} to {form.destination} on {form.completion}")
    if form.rest[:1] == ("cp_mask",) or (form.multicast and form.destination == "shared::cta"):
        ctx.fail("this form of bulk copy")
    if across and (form.multicast or form.cache_hint):
        ctx.fail("this form of bulk copy")
    count = 4 + form.multicast
    operands = operands_of(ctx, instruction.operands, count, cache_hint=form.cache_hint)
    destination, mbarrier = SharedOperand(ctx, operands[0]), SharedOperand(ctx, operands[3])
    nbytes = ValueOperand(ctx, operands[2], "u32")
    source = AddressOperand(ctx, operands[1], shared=across)
    mask_operand = ValueOperand(ctx, operands[4], "b16") if form.multicast else None

    def handler(w: Warp, mask: int) -> None:
        for lane in each_lane(mask):
            one = 1 << lane
            cta_mask = None if mask_operand is None else mask_operand.one(w, one) & 0xFFFF
            into = targets(w, form, destination.lane(w, lane), mbarrier.lane(w, lane), cta_mask)
            if across:
                if into[0].cta is w.cta:
                    raise Finding("a copy from shared memory to shared memory of the same CTA")
                at = own_shared(w, source.one(w, one), "the source")
                copy_across(w, at, nbytes.one(w, one), into[0], combine, size)
            else:
                copy_in(w, source.one(w, one), nbytes.one(w, one), into)

    return handler


def _bind_out(
    ctx: Context,
    instruction: Instruction,
    form: Form,
    combine: reduction.Combine | None,
    size: int,
) -> Handler:
    masked = form.rest[:1] == ("cp_mask",)
    if form.multicast:
        ctx.fail("this form of bulk copy")
    given = instruction.operands[: -1 if masked else None]
    operands = operands_of(ctx, given, 3, cache_hint=form.cache_hint)
    destination, source = AddressOperand(ctx, operands[0]), SharedOperand(ctx, operands[1])
    nbytes = ValueOperand(ctx, operands[2], "u32")
    byte_mask = ValueOperand(ctx, instruction.operands[-1], "b16") if masked else None

    def handler(w: Warp, mask: int) -> None:
        for lane in each_lane(mask):
            one = 1 << lane
            at = own_shared(w, source.lane(w, lane), "the source")
            which = 0xFFFF if byte_mask is None else byte_mask.one(w, one)
            into, count = destination.one(w, one), nbytes.one(w, one)
            copy_out(w, lane, into, at, count, combine, size, which)

    return handler


@warp("cp.async.bulk.prefetch")
def prefetch_bulk(ctx: Context, instruction: Instruction) -> Handler:
    """`cp.async.bulk.prefetch.L2.global{.L2::cache_hint} [src], size{, policy}`: a hint."""
    hint = ctx.suffixes[2:] == ("L2::cache_hint",)
    if ctx.suffixes[:2] != ("L2", "global") or len(ctx.suffixes) != 2 + hint:
        ctx.fail("this form of prefetch")
    operands = operands_of(ctx, instruction.operands, 2, cache_hint=hint)
    source, nbytes = AddressOperand(ctx, operands[0]), ValueOperand(ctx, operands[1], "u32")

    def handler(w: Warp, mask: int) -> None:
        for lane in each_lane(mask):
            _check_range("source", source.one(w, 1 << lane), nbytes.one(w, 1 << lane))

    return handler


# ---------------------------------------------------------------------------------- bulk groups


@warp("cp.async.bulk.commit_group")
def commit_group(ctx: Context, instruction: Instruction) -> Handler:
    """Each lane has groups of its own."""
    if ctx.suffixes or instruction.operands:
        ctx.fail("this form of commit_group")

    def handler(w: Warp, mask: int) -> None:
        for lane in each_lane(mask):
            bulk_groups(w, lane).commit()

    return handler


@warp("cp.async.bulk.wait_group")
def wait_group(ctx: Context, instruction: Instruction) -> Handler:
    """`cp.async.bulk.wait_group{.read} N`."""
    if ctx.suffixes not in ((), ("read",)):
        ctx.fail("this form of wait_group")
    pending = group_count(ctx, instruction)
    reads_only = ctx.suffixes == ("read",)

    def handler(w: Warp, mask: int) -> Wait | None:
        for lane in each_lane(mask):
            if wait := bulk_groups(w, lane).wait(w, pending, reads_only):
                return wait
        return None

    return handler


def group_count(ctx: Context, instruction: Instruction) -> int:
    """The immediate N of `wait_group N`."""
    count = instruction.operands[0] if len(instruction.operands) == 1 else None
    if not isinstance(count, Immediate) or count.value < 0:
        ctx.fail("wait_group needs an integer constant")
    return count.value


# ------------------------------------------------------------------------------------ tensor maps


@warp("prefetch.tensormap", "prefetch.param.tensormap", "prefetch.const.tensormap")
def prefetch_map(ctx: Context, instruction: Instruction) -> Handler:
    """`prefetch{.param,.const}.tensormap [a]`: a hint; there must be a map."""
    if ctx.suffixes or ctx.instruction.opcode != "prefetch.tensormap":
        ctx.fail("this form of prefetch")
    address = AddressOperand(ctx, instruction.operands[0])

    def handler(w: Warp, mask: int) -> None:
        tensor_map(w, address.one(w, mask))

    return handler


@warp("tensormap.replace")
def replace(ctx: Context, instruction: Instruction) -> Handler:
    """`tensormap.replace.tile.field{.ss}.b1024.type [a], {ord,} new_val`, a weak generic access."""
    mode, field, *rest = ctx.suffixes
    space = {"global": "global", "shared::cta": "shared"}.get(rest[0], "generic")
    if mode != "tile" or rest[space != "generic" :] not in (["b1024", "b32"], ["b1024", "b64"]):
        ctx.fail("this form of tensormap.replace")
    operands = instruction.operands
    address = AddressOperand(ctx, operands[0], shared=space == "shared")
    ordinal = operands[1] if len(operands) == 3 else None
    if ordinal is not None and not isinstance(ordinal, Immediate):
        ctx.fail("the ordinal must be an immediate")
    value = ValueOperand(ctx, operands[-1], rest[-1])

    def handler(w: Warp, mask: int) -> None:
        for lane in each_lane(mask):
            at, lanes = np.array([address.one(w, 1 << lane)]), np.array([lane])
            raw = memory.read(w, space, at, tensormap.NBYTES, lanes).tobytes()
            which = None if ordinal is None else ordinal.value
            changed = tensormap.replace(raw, field, which, value.one(w, 1 << lane))
            memory.write(w, space, at, np.frombuffer(changed, np.uint8)[None], lanes)

    return handler


@warp("tensormap.cp_fenceproxy")
def copy_map(ctx: Context, instruction: Instruction) -> Handler:
    """`.global.shared::cta.tensormap::generic.release.scope.sync.aligned [dst], [src], 128`."""
    scope = ctx.suffixes[4:5]
    wanted = ("global", "shared::cta", "tensormap::generic", "release", *scope, "sync", "aligned")
    if ctx.suffixes != wanted or scope[0] not in ("cta", "cluster", "gpu", "sys"):
        ctx.fail("this form of tensormap.cp_fenceproxy")
    destination = AddressOperand(ctx, instruction.operands[0])
    source = AddressOperand(ctx, instruction.operands[1], shared=True)
    _check_map_size(ctx, instruction)

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        lane = np.array([0])
        raw = memory.read(w, "shared", np.array([source.one(w, mask)]), tensormap.NBYTES, lane)
        memory.write(w, "global", np.array([destination.one(w, mask)]), raw, lane)
        return None

    return handler


@warp("fence.proxy.tensormap::generic")
def fence_map(ctx: Context, instruction: Instruction) -> Handler:
    """`.release.scope` and `.acquire.scope [a], 128`: the order of maps in memory is not judged."""
    if len(ctx.suffixes) != 2 or ctx.suffixes[0] not in ("acquire", "release"):
        ctx.fail("this form of fence.proxy.tensormap")
    if ctx.suffixes[0] == "acquire":
        _check_map_size(ctx, instruction)

    def handler(w: Warp, mask: int) -> None:
        return None

    return handler


def _check_map_size(ctx: Context, instruction: Instruction) -> None:
    size = instruction.operands[-1]
    if not isinstance(size, Immediate) or size.value != tensormap.NBYTES:
        ctx.fail(f"the size must be {tensormap.NBYTES}")
