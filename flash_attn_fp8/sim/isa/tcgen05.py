"""`tcgen05.mma` and `tcgen05.commit`, and the binders of all tcgen05 instructions.

Order. The tensor core does what one warp gives it (`mma`, `cp`) one after the other, as an actor of
its own; a commit hands the number of the last operation, with all that the warp had observed when
it committed, to an mbarrier, when the schedule lets it complete. `tcgen05.fence` adds nothing to
that: shipped kernels go without it where an mbarrier stands between, and so it is not asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from flash_attn_fp8.sim.barriers import Mbarrier, Wait
from flash_attn_fp8.sim.errors import OutOfBounds, TensorMemoryMisuse, Unmodelled
from flash_attn_fp8.sim.isa import tcgen05_alloc, tcgen05_copy
from flash_attn_fp8.sim.isa.operands import AddressOperand, ValueOperand, whole_warp
from flash_attn_fp8.sim.isa.table import Handler, warp
from flash_attn_fp8.sim.isa.tcgen05_alloc import group
from flash_attn_fp8.sim.isa.tcgen05_copy import mma_access
from flash_attn_fp8.sim.isa.uses import users_of
from flash_attn_fp8.sim.matrix import (
    K_BYTES,
    InstructionDescriptor,
    accumulator,
    decode_instruction,
    decode_shared_sm100,
    finish,
    multiply,
    read_shared,
)
from flash_attn_fp8.sim.memory import OFFSET_MASK, RANK_SHIFT, TMEM_LANES
from flash_attn_fp8.sim.order import Access, Clocks
from flash_attn_fp8.sim.ptx.program import Address, Immediate, Instruction, Operand, Vector
from flash_attn_fp8.sim.state import Cta, Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

Strip = tuple[int, int, int]  # first lane, lanes, first row of the CTA's part of D


@dataclass(frozen=True)
class MmaForm:
    """What the opcode says of a `tcgen05.mma`."""

    kind: str
    ctas: int
    a_in_tensor_memory: bool


@dataclass(frozen=True)
class MmaOperands:
    """The operands' values. `scale` halves D that often before the sum; `disabled` lanes of D."""

    d: int
    a: int
    b: int
    descriptor: int
    accumulate: bool
    scale: int = 0
    disabled: tuple[int, ...] = ()


def mma(warp: Warp, form: MmaForm, operands: MmaOperands) -> None:
    """One `tcgen05.mma`: D = A·B (+ D), in each CTA of the group.

    Each CTA brings its M/ctas rows of A and N/ctas rows of B, and holds its own rows of D.
    """
    shape = decode_instruction(operands.descriptor, form.kind, form.ctas)
    if form.a_in_tensor_memory and shape.transpose_a:
        raise Unmodelled(f"instruction descriptor {operands.descriptor:#x}: transposed A in lanes")
    if form.a_in_tensor_memory:
        _check_apart(operands, shape, form)
    members = group(warp.cta, form.ctas)
    access = mma_access(warp)
    where_b = decode_shared_sm100(operands.b)
    rows_b = shape.n // form.ctas
    parts = [
        read_shared(cta.shared, where_b, rows_b, shape.b, shape.transpose_b, access)
        for cta in members
    ]
    b = parts[0] if form.ctas == 1 else np.concatenate(parts)
    if shape.negate_b:
        b = -b
    for place, cta in enumerate(members):
        a = _read_a(cta, form, shape, operands, access)
        product = _multiply(-a if shape.negate_a else a, b, shape, form)
        disabled = operands.disabled[4 * place : 4 * place + 4]
        _write_d(cta, product, shape, form, operands, disabled, access)
    counters = warp.cta.counters
    counters[f"tcgen05.mma kind::{form.kind} {shape.m}x{shape.n}x{shape.k}"] += 1
    read = (0 if form.a_in_tensor_memory else shape.m) + shape.n
    counters["shared bytes read by tcgen05.mma"] += read * K_BYTES


def _check_apart(operands: MmaOperands, shape: InstructionDescriptor, form: MmaForm) -> None:
    """An operation must not write the columns that it reads A from."""
    a, d = operands.a & 0xFFFF, operands.d & 0xFFFF
    columns = shape.n // 2 if _halves(shape, form) else shape.n
    if a < d + columns and d < a + K_BYTES // 4:
        raise TensorMemoryMisuse(
            f"tcgen05.mma reads A from columns [{a}, {a + K_BYTES // 4}) and writes D to "
            f"[{d}, {d + columns}): they overlap"
        )


def _halves(shape: InstructionDescriptor, form: MmaForm) -> bool:
    """M = 128 of two CTAs: lanes 64 to 127 hold the upper half of N of rows 0 to 63."""
    return form.ctas == 2 and shape.m == 128


def _strips(address: int, shape: InstructionDescriptor, form: MmaForm) -> list[Strip]:
    """Where a CTA's rows lie: M = 64 leaves out every other 16 lanes."""
    lane = address >> 16
    sparse = form.ctas == 1 and shape.m == 64
    if lane not in ((0, 16) if sparse else (0,)):
        raise TensorMemoryMisuse(
            f"tcgen05.mma of M = {shape.m}, cta_group::{form.ctas}: {address:#x} is at lane {lane}"
        )
    if sparse:
        return [(lane + 32 * i, 16, 16 * i) for i in range(4)]
    return [(0, TMEM_LANES, 0)]


def _read_a(
    cta: Cta, form: MmaForm, shape: InstructionDescriptor, operands: MmaOperands, access: Access
) -> np.ndarray:
    """A of one CTA: float64 (rows, K). In tensor memory it has the lanes of the D that it makes."""
    if not form.a_in_tensor_memory:
        where = decode_shared_sm100(operands.a)
        rows = shape.m // form.ctas
        return read_shared(cta.shared, where, rows, shape.a, shape.transpose_a, access)
    if operands.a >> 16 != operands.d >> 16:
        raise Unmodelled(f"A at {operands.a:#x} and D at {operands.d:#x} have different lanes")
    words = [
        cta.tensor.read(lane, lanes, operands.a & 0xFFFF, K_BYTES // 4, access)
        for lane, lanes, _ in _strips(operands.a, shape, form)
    ]
    rows_of_words = np.ascontiguousarray(np.concatenate(words))
    return shape.a.decode(rows_of_words.view(np.uint8))


def _multiply(
    a: np.ndarray, b: np.ndarray, shape: InstructionDescriptor, form: MmaForm
) -> np.ndarray:
    """The product as it lies in lanes and columns."""
    if not _halves(shape, form):
        return multiply(a, b)
    low, high = (a, a) if a.shape[0] == 64 else (a[:64], a[64:])
    middle = shape.n // 2
    return np.concatenate([multiply(low, b[:middle]), multiply(high, b[middle:])])


def _write_d(
    cta: Cta,
    product: np.ndarray,
    shape: InstructionDescriptor,
    form: MmaForm,
    operands: MmaOperands,
    disabled: tuple[int, ...],
    access: Access,
) -> None:
    column, columns = operands.d & 0xFFFF, product.shape[1]
    for lane, lanes, row in _enabled(_strips(operands.d, shape, form), disabled):
        value = product[row : row + lanes]
        if operands.accumulate:
            old = accumulator(cta.tensor.read(lane, lanes, column, columns, access), shape.d)
            with np.errstate(invalid="ignore", over="ignore"):
                value = value + (np.ldexp(old, -operands.scale) if operands.scale else old)
        cta.tensor.write(lane, column, finish(value, shape.d, shape.saturate), access)


def _enabled(strips: list[Strip], disabled: tuple[int, ...]) -> Iterator[Strip]:
    """The strips without the lanes whose bit is set in `disabled`, 32 lanes a word."""
    if not any(disabled):
        yield from strips
        return
    words = np.array(disabled, np.uint32)
    off = (words[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(bool).reshape(-1)
    for first, lanes, row in strips:
        runs = np.flatnonzero(np.diff(np.concatenate([[True], off[first : first + lanes], [True]])))
        for start, end in zip(runs[::2].tolist(), runs[1::2].tolist(), strict=True):
            yield first + start, end - start, row + start


# ---------------------------------------------------------------------------------- commit


def commit(warp: Warp, address: int, cta_mask: int | None) -> None:
    """`tcgen05.commit`: one arrival at the mbarrier, or at its offset in each CTA of a mask."""
    addresses = [address]
    if cta_mask is not None:
        if not 0 < cta_mask < 1 << len(warp.cluster.ctas):
            raise OutOfBounds(
                f"tcgen05.commit to CTAs {cta_mask:#x} of a cluster of {len(warp.cluster.ctas)}"
            )
        ranks = [rank for rank in range(16) if cta_mask >> rank & 1]
        addresses = [rank << RANK_SHIFT | address & OFFSET_MASK for rank in ranks]
    barriers = [warp.mbarrier(one, asynchronous=True) for one in addresses]
    handed = _at_completion(warp)
    who = f"tcgen05.commit of {warp.name}"

    def complete(barrier: Mbarrier) -> Callable[[], None]:
        return lambda: barrier.arrive(1, handed, who)

    for barrier in barriers:
        warp.cluster.pending.add(complete(barrier), ("mma", warp.cta.rank, warp.index))


def _at_completion(warp: Warp) -> Clocks:
    """What is known once the tensor core has done all that this warp gave it.

    Its operations come after what the warp had observed, and after those of the warp's own writes
    that it had made visible to them.
    """
    warp.settle_loads()
    handed = warp.clocks.copy()
    handed.generic[warp.actor] = handed.async_[warp.actor]
    if warp.sequence["mma"]:
        handed.observe(tcgen05_copy.mma_actor(warp), warp.sequence["mma"])
    return handed


# --------------------------------------------------------------------------------- binders


def _ctas(ctx: Context) -> int:
    for part in ctx.suffixes:
        if part.startswith("cta_group::"):
            if part not in ("cta_group::1", "cta_group::2"):
                ctx.fail(f"modifier .{part}")
            return int(part[-1])
    return ctx.fail("no .cta_group")


def _check(ctx: Context, known: frozenset[str]) -> None:
    for part in ctx.suffixes:
        if part not in known and not part.startswith("cta_group::"):
            ctx.fail(f"modifier .{part}")


_MMA_KINDS = ("f16", "tf32", "f8f6f4", "i8")
_COLLECTOR = frozenset(f"collector::a::{use}" for use in ("fill", "use", "lastuse", "discard"))
# What would change the result; said by name.
_MMA_UNMODELLED = {
    "ws": "weight-stationary MMA",
    "sp": "sparse A",
    "block_scale": "block scaling",
    "ashift": "shifted A",
}


@warp("tcgen05.mma")
def bind_mma(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.mma.cta_group.kind [d], a, b, idesc, {disabled}, enable{, scale}`; a may be [a]."""
    kind = ""
    for part in ctx.suffixes:
        if part in _MMA_UNMODELLED:
            ctx.fail(f"{_MMA_UNMODELLED[part]} (.{part})")
        if part.startswith("kind::"):
            kind = part.removeprefix("kind::")
            if kind not in _MMA_KINDS:
                ctx.fail(f"kind::{kind}, block-scaled or unknown")
    _check(ctx, _COLLECTOR | {f"kind::{kind}"})
    ctas = _ctas(ctx)
    operands = list(instruction.operands)
    disabled: list[int] = []
    if len(operands) > 4 and isinstance(operands[4], Vector):
        disabled = ctx.rows(operands.pop(4), "b32")
        if len(disabled) != 4 * ctas:
            ctx.fail(f"{len(disabled)} words of disabled lanes, not {4 * ctas}")
    if len(operands) not in (5, 6):
        ctx.fail(f"{len(operands)} operands")
    scale = _scale(ctx, kind, operands[5]) if len(operands) == 6 else 0
    form = MmaForm(kind, ctas, isinstance(operands[1], Address))
    d, b = AddressOperand(ctx, operands[0], shared=True), ValueOperand(ctx, operands[2], "b64")
    a: AddressOperand | ValueOperand
    if form.a_in_tensor_memory:
        a = AddressOperand(ctx, operands[1], shared=True)
    else:
        a = ValueOperand(ctx, operands[1], "b64")
    descriptor = ValueOperand(ctx, operands[3], "b32")
    enable = ValueOperand(ctx, operands[4], "pred")

    def handler(w: Warp, mask: int) -> None:
        for lane in w.lanes(mask).tolist():
            one = 1 << lane
            words = tuple(int(word) for word in w.registers[disabled, lane])
            values = MmaOperands(
                d.one(w, one), a.one(w, one), b.one(w, one), descriptor.one(w, one),
                bool(enable.one(w, one)), scale, words,
            )  # fmt: skip
            mma(w, form, values)

    return handler


def _scale(ctx: Context, kind: str, operand: Operand) -> int:
    if not isinstance(operand, Immediate) or not 0 <= operand.value <= 15:
        ctx.fail("scale-input-d is an immediate from 0 to 15")
    if kind not in ("f16", "tf32"):
        ctx.fail(f"scale-input-d of kind::{kind}")
    return operand.value


@warp("tcgen05.commit")
def bind_commit(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.commit.cta_group.mbarrier::arrive::one{.space}{.multicast}.b64 [m]{, mask}`."""
    _check(
        ctx, frozenset(["mbarrier::arrive::one", "shared::cluster", "multicast::cluster", "b64"])
    )
    _ctas(ctx)
    multicast = "multicast::cluster" in ctx.suffixes
    if len(instruction.operands) != 1 + multicast:
        ctx.fail(f"{len(instruction.operands)} operands")
    # A generic address of shared memory has the shared address in its lower 32 bits.
    target = AddressOperand(ctx, instruction.operands[0], shared=True)
    cta_mask = ValueOperand(ctx, instruction.operands[1], "b16") if multicast else None

    def handler(w: Warp, mask: int) -> None:
        for lane in w.lanes(mask).tolist():
            one = 1 << lane
            commit(w, target.one(w, one), None if cta_mask is None else cta_mask.one(w, one))

    return handler


def _for_warp(run: Callable[[Warp], Wait | None]) -> Handler:
    """A `.sync.aligned` instruction: all lanes together."""
    return whole_warp(lambda w, mask: run(w))


@warp("tcgen05.alloc")
def bind_alloc(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.alloc.cta_group.sync.aligned{.shared::cta}.b32 [dst], columns`."""
    _check(ctx, frozenset(["sync", "aligned", "shared::cta", "b32"]))
    ctas = _ctas(ctx)
    target = AddressOperand(ctx, instruction.operands[0], shared=True)
    columns = ValueOperand(ctx, instruction.operands[1], "b32")
    return _for_warp(lambda w: tcgen05_alloc.allocate(w, ctas, target.one(w, 1), columns.one(w, 1)))


@warp("tcgen05.dealloc")
def bind_dealloc(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.dealloc.cta_group.sync.aligned.b32 taddr, columns`."""
    _check(ctx, frozenset(["sync", "aligned", "b32"]))
    ctas = _ctas(ctx)
    target, columns = (ValueOperand(ctx, operand, "b32") for operand in instruction.operands)
    return _for_warp(
        lambda w: tcgen05_alloc.deallocate(w, ctas, target.one(w, 1), columns.one(w, 1))
    )


@warp("tcgen05.relinquish_alloc_permit")
def bind_relinquish(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.relinquish_alloc_permit.cta_group.sync.aligned`."""
    _check(ctx, frozenset(["sync", "aligned"]))
    ctas = _ctas(ctx)
    return _for_warp(lambda w: tcgen05_alloc.relinquish(w, ctas))


def _fragment(ctx: Context, packing: str, registers: int) -> tcgen05_copy.Fragment:
    shape, num, packed = "", 0, False
    for part in ctx.suffixes:
        if part in tcgen05_copy.SHAPES:
            shape = part
        elif part == packing:
            packed = True
        elif part[:1] == "x" and part[1:].isdigit():
            num = int(part[1:])
        elif part not in ("sync", "aligned", "b32"):
            ctx.fail(f"modifier .{part}")
    if not shape or num & (num - 1) or not 0 < num <= tcgen05_copy.SHAPES[shape].most:
        ctx.fail(f"shape .{shape or 'none'} x{num}")
    found = tcgen05_copy.fragment(shape, num, packed)
    if registers != found.registers:
        ctx.fail(f"{registers} registers where .{shape}.x{num} has {found.registers}")
    return found


def _split(ctx: Context, operand: Operand) -> int | None:
    if not isinstance(operand, Immediate):
        ctx.fail("the second half of .16x32bx2 is an immediate away")
    return operand.value


def _same_address(w: Warp, source: AddressOperand) -> int:
    addresses = source.of(w, w.lanes(w.existing))
    if (addresses != addresses[0]).any():
        raise TensorMemoryMisuse(f"{w.name}: lanes differ in their tensor memory address")
    return int(addresses[0]) & 0xFFFFFFFF


@warp("tcgen05.ld")
def bind_load(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.ld.sync.aligned.shape.num{.pack::16b}.b32 r, [taddr]{, half}`."""
    rows = ctx.destinations(instruction.operands[0], "b32")
    f = _fragment(ctx, "pack::16b", len(rows))
    halves = "16x32bx2" in ctx.suffixes
    if len(instruction.operands) != 2 + halves:
        ctx.fail(f"{len(instruction.operands)} operands")
    source = AddressOperand(ctx, instruction.operands[1], shared=True)
    split = _split(ctx, instruction.operands[2]) if halves else None
    users = users_of(ctx.entry, instruction)
    return _for_warp(
        lambda w: tcgen05_copy.load(w, rows, _same_address(w, source), f, split, users)
    )


@warp("tcgen05.st")
def bind_store(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.st.sync.aligned.shape.num{.unpack::16b}.b32 [taddr], {half,} r`."""
    rows = ctx.rows(instruction.operands[-1], "b32")
    f = _fragment(ctx, "unpack::16b", len(rows))
    halves = "16x32bx2" in ctx.suffixes
    if len(instruction.operands) != 2 + halves:
        ctx.fail(f"{len(instruction.operands)} operands")
    target = AddressOperand(ctx, instruction.operands[0], shared=True)
    split = _split(ctx, instruction.operands[1]) if halves else None
    return _for_warp(lambda w: tcgen05_copy.store(w, rows, _same_address(w, target), f, split))


@warp("tcgen05.wait::st")
def bind_wait_store(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.wait::st.sync.aligned`."""
    _check(ctx, frozenset(["sync", "aligned"]))
    return _for_warp(tcgen05_copy.wait_stores)


@warp("tcgen05.wait::ld")
def bind_wait_load(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.wait::ld.sync.aligned`."""
    _check(ctx, frozenset(["sync", "aligned"]))
    return _for_warp(tcgen05_copy.wait_loads)


@warp("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def bind_fence(ctx: Context, instruction: Instruction) -> Handler:
    """Nothing; see the module's docstring."""
    _check(ctx, frozenset())
    return lambda w, mask: None


@warp("tcgen05.cp")
def bind_copy(ctx: Context, instruction: Instruction) -> Handler:
    """`tcgen05.cp.cta_group.shape{.multicast} [taddr], descriptor`."""
    ctas = _ctas(ctx)
    parts = [part for part in ctx.suffixes if not part.startswith("cta_group::")]
    shape = tcgen05_copy.COPY_SHAPES.get((parts[0], ".".join(parts[1:])))
    if shape is None:
        ctx.fail(f"shape .{'.'.join(parts)}")
    target = AddressOperand(ctx, instruction.operands[0], shared=True)
    source = ValueOperand(ctx, instruction.operands[1], "b64")

    def handler(w: Warp, mask: int) -> None:
        for lane in w.lanes(mask).tolist():
            tcgen05_copy.copy(w, ctas, shape, target.one(w, 1 << lane), source.one(w, 1 << lane))

    return handler


@warp("tcgen05.shift")
def bind_shift(ctx: Context, instruction: Instruction) -> Handler:
    """Not modelled."""
    ctx.fail("tcgen05.shift")
