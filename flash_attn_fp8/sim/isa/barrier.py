"""Mbarriers, CTA barriers and cluster barriers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim.barriers import Mbarrier, NamedBarrier, Vote, Wait
from flash_attn_fp8.sim.errors import BarrierMisuse
from flash_attn_fp8.sim.isa.operands import AddressOperand, ValueOperand, whole_warp
from flash_attn_fp8.sim.isa.table import Handler, warp
from flash_attn_fp8.sim.memory import OFFSET_MASK
from flash_attn_fp8.sim.ptx.program import Instruction, Operand, Sink
from flash_attn_fp8.sim.state import WARP_SIZE, Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

_MAX_COUNT = (1 << 20) - 1
_SHARED = frozenset(["shared", "shared::cta", "shared::cluster"])
_SEMANTICS = frozenset(["release", "acquire", "relaxed", "cta", "cluster", "b64"])
_PHASE_BITS = 40  # of an mbarrier's state; above them, the arrivals that were pending


def _only(ctx: Context, known: frozenset[str]) -> frozenset[str]:
    unknown = [part for part in ctx.suffixes if part not in known]
    if unknown:
        ctx.fail(f"modifier .{unknown[0]}")
    return frozenset(ctx.suffixes)


def _barrier_and_number(
    ctx: Context, instruction: Instruction
) -> tuple[AddressOperand, ValueOperand]:
    """The operands `[a], n`."""
    address, number = instruction.operands
    return AddressOperand(ctx, address), ValueOperand(ctx, number, "u32")


def _by_address(addresses: np.ndarray) -> list[tuple[int, int]]:
    """(address, how many lanes have it), in the order of addresses."""
    values, counts = np.unique(addresses & 0xFFFFFFFF, return_counts=True)
    return list(zip(values.tolist(), counts.tolist(), strict=True))


def _sums(w: Warp, mask: int, target: AddressOperand, value: ValueOperand) -> list[tuple[int, int]]:
    """(address, the sum of its lanes' values): each lane executes for itself."""
    lanes = w.lanes(mask)
    addresses, given = target.of(w, lanes) & 0xFFFFFFFF, value.of(w, lanes)
    return [(at, int(given[addresses == at].sum())) for at in np.unique(addresses).tolist()]


# --------------------------------------------------------------------------------- mbarriers


@warp("mbarrier.init")
def init(ctx: Context, instruction: Instruction) -> Handler:
    """`mbarrier.init{.shared{::cta}}.b64 [a], count`."""
    _only(ctx, _SHARED | {"b64"})
    target, count = _barrier_and_number(ctx, instruction)

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        addresses = target.of(w, lanes) & 0xFFFFFFFF
        for address, _ in _by_address(addresses):
            expected = int(count.of(w, lanes[addresses == address])[-1])
            offset = address & OFFSET_MASK
            if not 1 <= expected <= _MAX_COUNT:
                raise BarrierMisuse(f"mbarrier.init with count {expected}, not 1 to {_MAX_COUNT}")
            if address % 8:
                raise BarrierMisuse(f"mbarrier.init at {address:#x}, not a multiple of 8")
            cta = w.cluster.cta_of(address)
            if offset in cta.mbarriers:
                raise BarrierMisuse(f"{cta.mbarriers[offset].name} is initialised twice")
            cta.init_mbarrier(offset, expected, w)

    return handler


@warp("mbarrier.inval")
def invalidate(ctx: Context, instruction: Instruction) -> Handler:
    """`mbarrier.inval{.shared{::cta}}.b64 [a]`."""
    _only(ctx, _SHARED | {"b64"})
    target = AddressOperand(ctx, instruction.operands[0])

    def handler(w: Warp, mask: int) -> None:
        for address, _ in _by_address(target.of(w, w.lanes(mask))):
            barrier = w.mbarrier(address)
            if barrier.waiters:
                raise BarrierMisuse(f"{barrier.name} is invalidated while warps wait for it")
            del w.cluster.cta_of(address).mbarriers[address & OFFSET_MASK]

    return handler


@warp("mbarrier.arrive", "mbarrier.arrive_drop")
def arrive(ctx: Context, instruction: Instruction) -> Handler:
    """`mbarrier.arrive{_drop}{.expect_tx}{.sem.scope}{.space}.b64 {state,} [a]{, count}`.

    The state is the phase's number and what was pending before. Every executing lane arrives.
    """
    parts = _only(ctx, _SHARED | _SEMANTICS | {"expect_tx", "noComplete"})
    drops = instruction.parts[1] == "arrive_drop"
    operands = list(instruction.operands)
    state = None
    if not _is_address(operands[0]):
        into = operands.pop(0)
        state = None if isinstance(into, Sink) else ctx.destination(into, "b64")
    target = AddressOperand(ctx, operands[0])
    value = ValueOperand(ctx, operands[1], "u32") if len(operands) > 1 else None
    expects = "expect_tx" in parts
    if expects and value is None:
        ctx.fail("expect_tx without a count")

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        given = value.of(w, lanes) if value is not None else np.ones(lanes.size, np.uint64)
        clocks = w.relaxed_release() if "relaxed" in parts else w.release()
        addresses = target.of(w, lanes) & 0xFFFFFFFF
        for address, arrivals in _by_address(addresses):
            barrier = w.mbarrier(address)
            amount = int(given[addresses == address].sum())
            if state is not None:
                before = barrier.phase | barrier.pending << _PHASE_BITS
                w.registers[state, lanes[addresses == address]] = before
            if expects:
                barrier.expect_tx(amount, w.name)
            arrived = arrivals if expects else amount
            if "noComplete" in parts and arrived >= barrier.pending:
                raise BarrierMisuse(f"{w.name}: .noComplete completes {barrier.missing()}")
            if drops:
                barrier.count -= arrived
            barrier.arrive(arrived, clocks, w.name)

    return handler


@warp("mbarrier.expect_tx")
def expect_tx(ctx: Context, instruction: Instruction) -> Handler:
    """`mbarrier.expect_tx{.relaxed.scope}{.space}.b64 [a], bytes`."""
    _only(ctx, _SHARED | _SEMANTICS)
    target, nbytes = _barrier_and_number(ctx, instruction)

    def handler(w: Warp, mask: int) -> None:
        for address, total in _sums(w, mask, target, nbytes):
            w.mbarrier(address).expect_tx(total, w.name)

    return handler


@warp("mbarrier.complete_tx")
def complete_tx(ctx: Context, instruction: Instruction) -> Handler:
    """`mbarrier.complete_tx{.relaxed.scope}{.space}.b64 [a], bytes`: with no copy behind it."""
    _only(ctx, _SHARED | _SEMANTICS)
    target, nbytes = _barrier_and_number(ctx, instruction)

    def handler(w: Warp, mask: int) -> None:
        for address, total in _sums(w, mask, target, nbytes):
            barrier = w.mbarrier(address)
            barrier.complete_tx(total, barrier.stamp(), w.name, w.waits_before())

    return handler


@warp("mbarrier.try_wait", "mbarrier.test_wait")
def wait(ctx: Context, instruction: Instruction) -> Handler:
    """`mbarrier.{try,test}_wait{.parity}{.sem.scope}{.space}.b64 p, [a], state{, time}`.

    `try_wait` suspends until the phase is over, but gives up, as it may, the first time that a warp
    executes it in vain, and where nothing else in the cluster can go on. `test_wait` never does.
    """
    parts = _only(ctx, _SHARED | _SEMANTICS | {"parity"})
    done = ctx.destination(instruction.operands[0], "pred")
    target = AddressOperand(ctx, instruction.operands[1])
    by_parity, suspends = "parity" in parts, instruction.parts[1] == "try_wait"
    state = ValueOperand(ctx, instruction.operands[2], "b32" if by_parity else "b64")
    acquires = "relaxed" not in parts

    def handler(w: Warp, mask: int) -> Wait | None:
        lanes = w.lanes(mask)
        address = target.one(w, mask) & 0xFFFFFFFF
        barrier, phase = w.mbarrier(address), state.one(w, mask)
        if lanes.size > 1:
            _same(target.of(w, lanes), "mbarrier addresses")
            _same(state.of(w, lanes), "phases")
        over = _over(barrier, phase, by_parity)
        w.registers[done, lanes] = over
        if over:
            (w.acquire if acquires else w.relaxed_acquire)(barrier.completed)
            w.note_wait(barrier)
            return None
        gives_up = w.timed_out or w.pc not in w.gave_up
        if gives_up or not suspends:
            w.gave_up.add(w.pc)
            w.timed_out, w.polled = False, True
            return None
        return Wait(
            barrier,
            ready=lambda: _over(barrier, phase, by_parity),
            describe=lambda: f"for the end of phase {barrier.phase} of {barrier.missing()}",
            can_time_out=True,
        )

    return handler


def _over(barrier: Mbarrier, phase: int, by_parity: bool) -> bool:
    if by_parity:
        return barrier.passed(phase & 1)
    return barrier.phase != phase & ((1 << _PHASE_BITS) - 1)


def _same(values: np.ndarray, what: str) -> None:
    if (values != values[0]).any():
        raise BarrierMisuse(f"lanes of one wait have different {what}: not modelled")


@warp("mbarrier.pending_count")
def pending_count(ctx: Context, instruction: Instruction) -> Handler:
    """`mbarrier.pending_count.b64 count, state`: the arrivals pending before the one it is of."""
    _only(ctx, frozenset(["b64"]))
    into = ctx.destination(instruction.operands[0], "b32")
    state = ctx.row(instruction.operands[1], "b64")

    def handler(w: Warp, mask: int) -> None:
        lanes = w.lanes(mask)
        w.registers[into, lanes] = w.registers[state, lanes] >> np.uint64(_PHASE_BITS)

    return handler


def _is_address(operand: Operand) -> bool:
    return type(operand).__name__ == "Address"


# ---------------------------------------------------------------------------- CTA and cluster


@warp(
    "barrier.sync",
    "barrier.arrive",
    "barrier.cta.sync",
    "barrier.cta.arrive",
    "bar.sync",
    "bar.arrive",
    "bar.cta.sync",
    "bar.cta.arrive",
)
def cta_barrier(ctx: Context, instruction: Instruction) -> Handler:
    """`barrier{.cta}.{sync,arrive}{.aligned} a{, b}`: b threads meet at barrier a of the CTA."""
    _only(ctx, frozenset(["aligned"]))
    meet = _Meeting(ctx, instruction.operands[0], instruction.operands[1:])
    waits = "sync" in instruction.parts

    @whole_warp
    def handler(w: Warp, mask: int) -> Wait | None:
        if w.token is None:
            token = meet.arrive(w, mask)
            if not waits:
                return None
            w.token = token
        return _leave(w)

    return handler


class _Meeting:
    """The operands `a{, b}` of a barrier of the CTA."""

    def __init__(self, ctx: Context, number: Operand, threads: Sequence[Operand]) -> None:
        self._number = ValueOperand(ctx, number, "u32")
        self._threads = ValueOperand(ctx, threads[0], "u32") if threads else None

    def arrive(self, w: Warp, mask: int, vote: Vote | None = None) -> tuple[NamedBarrier, int]:
        """A warp arrives: the barrier, and the round to wait for."""
        at = self._number.one(w, mask)
        if at > 15:
            raise BarrierMisuse(f"barrier {at}: a CTA has 16")
        barrier = w.cta.named.setdefault(at, NamedBarrier(f"barrier {at}"))
        if self._threads is None:
            expected = barrier.of_all(w.cta.warps)
        else:
            expected = self._threads.one(w, mask)
        if expected % WARP_SIZE or not expected:
            raise BarrierMisuse(f"barrier {at} of {expected} threads: not a multiple of 32")
        round_ = barrier.rounds
        everyone = self._threads is None
        barrier.arrive(WARP_SIZE, expected, w.release(), w.name, everyone=everyone, vote=vote)
        return barrier, round_


def _leave(w: Warp) -> Wait | None:
    """Leave the barrier that the warp has arrived at, or wait for it."""
    if w.token is None:
        raise BarrierMisuse("a barrier is left that was not arrived at")
    barrier, round_ = w.token
    if barrier.rounds == round_:
        return Wait(barrier, ready=lambda: barrier.rounds != round_, describe=barrier.missing)
    w.acquire(barrier.completed)
    w.token = None
    return None


@warp("barrier.red", "bar.red", "barrier.cta.red", "bar.cta.red")
def cta_reduction(ctx: Context, instruction: Instruction) -> Handler:
    """`barrier{.cta}.red.popc{.aligned}.u32 d, a{, b}, {!}c`, `.and` and `.or` with `.pred`."""
    parts = [part for part in ctx.suffixes if part != "aligned"]
    if parts not in (["popc", "u32"], ["and", "pred"], ["or", "pred"]):
        ctx.fail("this form of barrier.red")
    operation, kind = parts
    into_operand, number_operand, *threads_operand, predicate = instruction.operands
    into = ctx.destination(into_operand, kind)
    meet = _Meeting(ctx, number_operand, threads_operand)
    source = ctx.row(predicate, "pred")

    @whole_warp
    def handler(w: Warp, mask: int) -> Wait | None:
        if w.token is None:
            lanes = w.lanes(mask)

            def receive(true: int, false: int) -> None:
                result = {"popc": true, "and": not false, "or": true > 0}[operation]
                w.registers[into, lanes] = int(result)

            true = int((w.registers[source, lanes] != 0).sum())
            w.token = meet.arrive(w, mask, Vote(true, lanes.size - true, receive))
        return _leave(w)

    return handler


@warp("barrier.cluster.arrive")
def cluster_arrive(ctx: Context, instruction: Instruction) -> Handler:
    """`barrier.cluster.arrive{.release,.relaxed}{.aligned}`."""
    parts = _only(ctx, frozenset(["release", "relaxed", "aligned"]))

    @whole_warp
    def handler(w: Warp, mask: int) -> None:
        if w.cluster_round is not None:
            raise BarrierMisuse("barrier.cluster.arrive twice without a wait between")
        barrier = w.cluster.barrier
        w.cluster_round = barrier.rounds
        clocks = w.relaxed_release() if "relaxed" in parts else w.release()
        warps = [other for cta in w.cluster.ctas for other in cta.warps]
        barrier.arrive(WARP_SIZE, barrier.of_all(warps), clocks, w.name, everyone=True)
        return None

    return handler


@warp("barrier.cluster.wait")
def cluster_wait(ctx: Context, instruction: Instruction) -> Handler:
    """`barrier.cluster.wait{.acquire}{.aligned}`."""
    _only(ctx, frozenset(["acquire", "aligned"]))

    @whole_warp
    def handler(w: Warp, mask: int) -> Wait | None:
        if w.cluster_round is None:
            raise BarrierMisuse("barrier.cluster.wait without an arrive before it")
        w.token = (w.cluster.barrier, w.cluster_round)
        waiting = _leave(w)
        if waiting is None:
            w.cluster_round = None
        else:
            w.token = None
        return waiting

    return handler
