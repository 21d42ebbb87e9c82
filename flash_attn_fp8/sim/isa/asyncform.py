"""What the forms of bulk copies share: their qualifiers, their operands, lanes, and mbarriers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flash_attn_fp8.sim.barriers import Mbarrier
from flash_attn_fp8.sim.errors import BarrierMisuse, Finding, Unmodelled
from flash_attn_fp8.sim.isa.operands import AddressOperand
from flash_attn_fp8.sim.memory import OFFSET_MASK, RANK_SHIFT
from flash_attn_fp8.sim.ptx.program import Operand
from flash_attn_fp8.sim.state import Cta, Warp

if TYPE_CHECKING:
    from flash_attn_fp8.sim.decode import Context

_U32 = 0xFFFFFFFF
_SPACES = ("global", "shared::cta", "shared::cluster")
MBARRIER = "mbarrier::complete_tx::bytes"
GROUP = "bulk_group"


@dataclass(frozen=True)
class Form:
    """Qualifiers of a bulk copy. CuTe DSL does not write them in the manual's order."""

    destination: str
    source: str
    completion: str
    load_mode: str = "tile"
    cta_group: int = 1
    multicast: bool = False
    cache_hint: bool = False
    rest: tuple[str, ...] = ()


def parse_form(ctx: Context, suffixes: tuple[str, ...], also: frozenset[str]) -> Form:
    """Of the qualifiers after the opcode's own name; those in `also` are left in `rest`."""
    spaces = [part for part in suffixes if part in _SPACES]
    if len(spaces) != 2:
        ctx.fail(f"{len(spaces)} state spaces")
    completions = [part for part in suffixes if part in (MBARRIER, GROUP)]
    if len(completions) != 1:
        ctx.fail("needs one completion mechanism")
    load_mode, cta_group, rest = "tile", 1, []
    for part in suffixes:
        if part.startswith(("tile", "im2col")):
            load_mode = part
        elif part in ("cta_group::1", "cta_group::2"):
            cta_group = int(part[-1])
        elif part in also:
            rest.append(part)
        elif part not in (*spaces, *completions, "multicast::cluster", "L2::cache_hint"):
            ctx.fail(f"qualifier .{part}")
    return Form(
        spaces[0],
        spaces[1],
        completions[0],
        load_mode,
        cta_group,
        "multicast::cluster" in suffixes,
        "L2::cache_hint" in suffixes,
        tuple(rest),
    )


def operands_of(
    ctx: Context, operands: tuple[Operand, ...], count: int, *, cache_hint: bool
) -> tuple[Operand, ...]:
    """The `count` operands before a cache policy, which must be there if `.L2::cache_hint` is."""
    if len(operands) != count + cache_hint:
        ctx.fail(f"{len(operands)} operands where {count + cache_hint} are needed")
    if cache_hint:
        ctx.row(operands[-1], "b64")  # a hint: its value changes nothing
    return operands[:count]


class SharedOperand:
    """`[a]` in shared memory, 32 bits, the CTA's rank included."""

    def __init__(self, ctx: Context, operand: Operand) -> None:
        self._address = AddressOperand(ctx, operand, shared=True)

    def lane(self, warp: Warp, lane: int) -> int:
        return self._address.one(warp, 1 << lane)


def each_lane(mask: int) -> Iterator[int]:
    """The lanes of a mask; single-thread instructions usually have one."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def signed32(bits: int) -> int:
    """A register's low 32 bits as .s32."""
    return (int(bits) & _U32 ^ 0x80000000) - 0x80000000


class Target(NamedTuple):
    """Where a copy into shared memory goes, and the mbarrier that it completes on."""

    cta: Cta
    offset: int
    mbarrier: Mbarrier


def check_one_process(warp: Warp) -> None:
    """Reductions into global memory are atomic only within one process."""
    if warp.cluster.memory.processes:
        raise Unmodelled("reductions into global memory between processes: use workers=1")


def own_shared(warp: Warp, address: int, what: str) -> int:
    """The offset of an address that must be in the executing CTA's shared memory."""
    if address >> RANK_SHIFT != warp.cta.rank:
        raise Finding(
            f"{what} {address:#x} is in shared memory of rank {address >> RANK_SHIFT}; the "
            f"executing CTA has rank {warp.cta.rank}"
        )
    return address & OFFSET_MASK


def targets(
    warp: Warp, form: Form, destination: int, mbarrier: int, cta_mask: int | None
) -> list[Target]:
    """Destinations of a copy into shared memory; the manual says where mbarriers may be."""
    cluster = warp.cluster
    offset = destination & OFFSET_MASK
    if cta_mask is None:
        if form.destination == "shared::cta":
            own_shared(warp, destination, "the destination")
        cta = cluster.cta_of(destination)
        away = mbarrier >> RANK_SHIFT ^ cta.rank
        if away > form.cta_group - 1:
            allowed = "the destination's CTA" + (" or its peer" if form.cta_group == 2 else "")
            raise BarrierMisuse(
                f"a copy into shared memory of rank {cta.rank} completes on an mbarrier of rank "
                f"{mbarrier >> RANK_SHIFT}; it must be in {allowed}"
            )
        return [Target(cta, offset, warp.mbarrier(mbarrier, asynchronous=True))]
    if cta_mask == 0 or cta_mask >> len(cluster.ctas):
        raise Finding(f"multicast to CTAs {cta_mask:#06x} of a cluster of {len(cluster.ctas)}")
    parity = mbarrier >> RANK_SHIFT & 1
    found = []
    for rank in each_lane(cta_mask):
        # .cta_group::2: the one of the pair whose rank has the parity of the mbarrier's.
        at = rank & ~1 | parity if form.cta_group == 2 else rank
        at = at << RANK_SHIFT | mbarrier & OFFSET_MASK
        barrier = warp.mbarrier(at, asynchronous=True)
        found.append(Target(cluster.ctas[rank], offset, barrier))
    return found
