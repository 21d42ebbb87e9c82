"""`cp.async`: copies of 4, 8 or 16 bytes a lane, in the generic proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim.barriers import Wait
from flash_attn_fp8.sim.errors import Finding, Misaligned
from flash_attn_fp8.sim.groups import copy_groups
from flash_attn_fp8.sim.isa.asyncform import operands_of
from flash_attn_fp8.sim.isa.bulk import group_count
from flash_attn_fp8.sim.isa.operands import AddressOperand, ValueOperand
from flash_attn_fp8.sim.isa.table import Handler, warp
from flash_attn_fp8.sim.memory import OFFSET_MASK, RANK_SHIFT
from flash_attn_fp8.sim.order import Access, Clocks
from flash_attn_fp8.sim.ptx.program import Immediate, Instruction
from flash_attn_fp8.sim.state import Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

_PREFETCHES = ("L2::64B", "L2::128B", "L2::256B")


def copy(
    w: Warp, mask: int, targets: np.ndarray, sources: np.ndarray, size: int, used: np.ndarray
) -> None:
    """Lane i of `mask` copies `used[i]` of `size` bytes to shared memory, and zeros after them."""
    values = np.zeros((sources.size, size), np.uint8)
    for count in np.unique(used).tolist():
        if count:
            which = used == count
            values[which, :count] = w.cluster.memory.read(sources[which], count)
    for rank in np.unique(targets >> RANK_SHIFT).tolist():
        if rank != w.cta.rank:
            raise Finding(f"cp.async by a CTA of rank {w.cta.rank} into memory of rank {rank}")
    groups, generic = copy_groups(w), w.clocks.generic
    access = Access(groups.actor, groups.epoch, generic, generic, False)
    w.cta.shared.write(targets & OFFSET_MASK, values, access)
    w.cta.counters["cp.async bytes"] += values.size
    groups.start(w.cluster.pending, mask)


@warp("cp.async")
def copy_async(ctx: Context, instruction: Instruction) -> Handler:
    """`cp.async.{ca,cg}.shared.global [dst], [src], size{, src-size or ignore-src}{, policy}`."""
    caching, *rest = ctx.suffixes
    hint = "L2::cache_hint" in rest
    if caching not in ("ca", "cg") or rest[1:2] != ["global"]:
        ctx.fail("this form of cp.async")
    if rest[0] not in ("shared", "shared::cta"):
        ctx.fail(f"cp.async into {rest[0]}")
    for part in rest[2:]:
        if part not in (*_PREFETCHES, "L2::cache_hint"):
            ctx.fail(f"qualifier .{part}")
    operands = instruction.operands
    if hint:
        operands = operands_of(ctx, operands, len(operands) - 1, cache_hint=True)
    if not 3 <= len(operands) <= 4 or not isinstance(operands[2], Immediate):
        ctx.fail("these operands of cp.async")
    size = operands[2].value
    if size not in (4, 8, 16) or (caching == "cg" and size != 16):
        ctx.fail(f"cp.async.{caching} of {size} bytes")
    target, source = AddressOperand(ctx, operands[0]), AddressOperand(ctx, operands[1])
    last = operands[3] if len(operands) == 4 else None
    ignores = last is not None and ctx.width(last) == 1
    amount = None if last is None else ValueOperand(ctx, last, "pred" if ignores else "u32")

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        targets, sources = target.of(w, lanes) & 0xFFFFFFFF, source.of(w, lanes)
        used = np.full(lanes.size, size)
        if amount is not None:
            given = amount.of(w, lanes).astype(np.int64)
            used = np.where(given != 0, 0, size) if ignores else given
        if (used > size).any():
            raise Finding(f"cp.async of {size} bytes with src-size {int(used.max())}")
        wrong = sources % size != 0
        if wrong.any():
            raise Misaligned(f"cp.async of {size} bytes from {int(sources[wrong][0]):#x}")
        copy(w, mask, targets, sources, size, used)

    return handler


@warp("cp.async.commit_group")
def commit_group(ctx: Context, instruction: Instruction) -> Handler:
    """A group of each lane's copies so far."""
    if ctx.suffixes or instruction.operands:
        ctx.fail("this form of commit_group")

    def handler(w: Warp, mask: int) -> None:
        copy_groups(w).commit(mask)

    return handler


@warp("cp.async.wait_group")
def wait_group(ctx: Context, instruction: Instruction) -> Handler:
    """`cp.async.wait_group N`."""
    if ctx.suffixes:
        ctx.fail("this form of wait_group")
    pending = group_count(ctx, instruction)

    def handler(w: Warp, mask: int) -> Wait | None:
        return copy_groups(w).wait(w, mask, pending)

    return handler


@warp("cp.async.wait_all")
def wait_all(ctx: Context, instruction: Instruction) -> Handler:
    """`cp.async.commit_group` and `cp.async.wait_group 0`."""
    if ctx.suffixes or instruction.operands:
        ctx.fail("this form of wait_all")

    def handler(w: Warp, mask: int) -> Wait | None:
        groups = copy_groups(w)
        if groups.uncommitted & mask:  # not again after waiting
            groups.commit(mask)
        return groups.wait(w, mask, 0)

    return handler


@warp("cp.async.mbarrier.arrive")
def arrive(ctx: Context, instruction: Instruction) -> Handler:
    """`cp.async.mbarrier.arrive{.noinc}.shared{::cta}.b64 [a]`, once the copies are complete.

    It hands on the copies and nothing else that the thread has done.
    """
    suffixes = ctx.suffixes
    no_increment = suffixes[:1] == ("noinc",)
    if suffixes[no_increment:] not in (("shared", "b64"), ("shared::cta", "b64")):
        ctx.fail("this form of cp.async.mbarrier.arrive")
    address = AddressOperand(ctx, instruction.operands[0])

    def handler(w: Warp, mask: int) -> None:
        addresses, counts = np.unique(address.of(w, w.lanes(mask)) & 0xFFFFFFFF, return_counts=True)
        for at, count in zip(addresses.tolist(), counts.tolist(), strict=True):
            arrive_after_copies(w, at, count, no_increment)

    return handler


def arrive_after_copies(w: Warp, address: int, count: int, no_increment: bool) -> None:
    """`count` lanes' arrivals at the mbarrier, when their copies so far are complete."""
    barrier, groups = w.mbarrier(address), copy_groups(w)
    if not no_increment:
        barrier.pending += count  # so that the arrival changes nothing but the time

    waits = w.waits_before()

    def arrival(epoch: int) -> None:
        clocks = Clocks.zero()
        for actor, event in waits:
            clocks.observe(actor, event)
        clocks.generic[groups.actor] = epoch
        barrier.arrive(count, clocks, f"cp.async of {w.name}")

    groups.arrive(w.cluster.pending, arrival)
