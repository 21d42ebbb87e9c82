"""Sizes of the SM90 forward kernel: tiles, buffers, registers. No compiler needed.

Everything that two roles must agree on is computed here, once, from the spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flash_attn_fp8.kernels.forward.geometry import ForwardGeometry
from flash_attn_fp8.specs import WARP, Sm90Spec

# CUDA programming guide, technical specifications of compute capability 9.0.
SHARED_MEMORY = 227 * 1024
WARPGROUP = 4 * WARP

# Warps of the first warpgroup, by role; the consumers are the warpgroups after it.
LOAD_WARP = 0
SCALE_WARP = 1
TAIL_WARP = 2
FILL_WARP = 3

_MOST_CONSUMERS = 3  # warpgroups with a query tile each
_NARROW = 64  # head dims up to which there are so many
ROLES = {LOAD_WARP: "load", SCALE_WARP: "scales", TAIL_WARP: "tail", FILL_WARP: "fill"} | {
    warp: f"attend {warp // 4 - 1}" for warp in range(4, 4 + 4 * _MOST_CONSUMERS)
}

ROWS = 64  # of a wgmma: the query rows of a warpgroup
SUM_COLUMNS = 8  # beside V's: they hold ones, so that P V has the sum of P. The least wgmma takes
_PART_IN_FP8 = {192: 96, 256: 128}  # columns of V that are multiplied at once, by their number
V_SHARE = 32  # columns of V that a quad of lanes has 8 neighbours each of

UNIT_SLOTS = 2  # units of work that the load warp has claimed and not all others have begun

_MISCELLANY = 6 * 1024  # barriers, per-token scales, alignment


@dataclass(frozen=True)
class Geometry(ForwardGeometry):
    """What the spec implies."""

    spec: Sm90Spec

    tile_m: ClassVar[int] = ROWS

    @property
    def tile_n(self) -> int:
        return self.spec.tile_n

    @property
    def in_sequence(self) -> bool:
        return self.spec.in_sequence

    @property
    def q_stage(self) -> int:
        """Consumer warpgroups, each with a query tile of its own."""
        return 3 if self._narrow else 2

    @property
    def _narrow(self) -> bool:
        """Whether a third consumer has registers: more warps hide more of what each waits for."""
        wide = max(self.head_dim, self.head_dim_v) > _NARROW
        return not (self.is_fp8 or self.scales_per_token or wide)

    @property
    def threads(self) -> int:
        return (1 + self.q_stage) * WARPGROUP

    @property
    def listeners(self) -> int:
        """Warps that learn from the load warp which unit of work is next."""
        return self.q_stage * WARPGROUP // WARP + int(self.scales_per_token) + int(self.cleans_tail)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread of the first warpgroup, and of a consumer: what 384 threads start with, 168.

        In fp8 consumers take all they can; in 16 bits they leave some to the addresses of pages.
        """
        if self._narrow:
            return 32, 160
        return (24, 240) if self.is_fp8 else (40, 232)

    @property
    def is_fp8(self) -> bool:
        return self.spec.is_fp8

    @property
    def transposes_v(self) -> bool:
        """Whether V comes transposed from the kernel before: wgmma reads fp8 K-major only."""
        return self.is_fp8

    @property
    def follows(self) -> bool:
        """Whether a kernel runs before that makes some of the operands."""
        return self.transposes_v or self.spec.widened

    @property
    def converts_q(self) -> bool:
        """Whether queries change their format in shared memory."""
        return self.spec.traits.q_format != self.spec.traits.kv_format

    @property
    def accumulates_in_mma(self) -> bool:
        """Whether the tensor core adds P V to O: in 16 bits it adds in fp32, in fp8 it does not."""
        return not self.is_fp8

    @property
    def sums_by_mma(self) -> bool:
        """Whether columns of ones beside V's sum up P as it was rounded."""
        return self.transposes_v and not self.spec.traits.exact_row_sum

    @property
    def sums_in_registers(self) -> bool:
        """Whether lanes sum up P as it was rounded."""
        return not (self.sums_by_mma or self.spec.traits.exact_row_sum)

    @property
    def v_rows(self) -> int:
        """Columns of the product P V: V's, and ones."""
        return self.head_dim_v + (SUM_COLUMNS if self.sums_by_mma else 0)

    @property
    def takes_turns(self) -> bool:
        """Whether warpgroups take turns to issue products (docs/kernel_sm90.md times both ways).

        Not where the exponential unit is the limit: it would idle at the end of each turn.
        """
        return not (self.is_fp8 or self._narrow)

    @property
    def v_columns(self) -> int:
        """Columns of V whose P V is made at once: all, where two accumulators fit registers."""
        return (
            _PART_IN_FP8.get(self.head_dim_v, self.head_dim_v) if self.is_fp8 else self.head_dim_v
        )

    @property
    def v_parts(self) -> int:
        """How many parts P V is made in."""
        return self.head_dim_v // self.v_columns

    def v_part_rows(self, part: int) -> int:
        """Columns of a part of P V: V's, and ones beside the last of them."""
        last = part == self.v_parts - 1
        return self.v_columns + (self.v_rows - self.head_dim_v if last else 0)

    @property
    def q_bytes(self) -> int:
        return ROWS * self.head_dim * self.element

    @property
    def k_bytes(self) -> int:
        return self.tile_n * self.head_dim * self.element

    @property
    def v_bytes(self) -> int:
        """A tile of V: whole swizzle atoms of 8 rows."""
        return self.tile_n * self.v_rows * self.element

    @property
    def stages(self) -> int:
        """Tiles of K, and of V, in shared memory."""
        left = SHARED_MEMORY - _MISCELLANY - self.q_stage * self.q_bytes
        return min(left // (self.k_bytes + self.v_bytes), 4)

    @property
    def cleans_tail(self) -> bool:
        """Whether V rows past a sequence's end can hold anything: then they are zeroed.

        P is 0 there, but 0 * NaN is not. Kernels that run before write zeros there.
        """
        partly = self.spec.traits.kv_layout != "dense" or self.spec.traits.seqused_k
        return partly and not self.follows
