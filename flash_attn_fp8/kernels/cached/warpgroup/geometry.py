"""Sizes of the cache kernel whose products are warpgroups'. No compiler needed."""

from __future__ import annotations

from dataclasses import dataclass

from flash_attn_fp8.kernels.cached.geometry import CacheGeometry, Operand
from flash_attn_fp8.specs import WARP, WarpgroupTile

KEYS = WarpgroupTile.n_block
_PAD = 4  # numbers between rows of partial output, so that writers meet no bank twice


@dataclass(frozen=True)
class WarpgroupGeometry(CacheGeometry):
    """What the spec implies. Shared memory: rings, queries, P, and numbers of rows.

    Partial output of the groups lies over the rings.
    """

    @property
    def v(self) -> Operand:
        """A lane has 1 / 32 of a row, a warp a quarter; all four warps have all keys."""
        return Operand(self.head_dim_v, self.element, WARP)

    @property
    def rows(self) -> int:
        """Of the CTA, which all warpgroups have."""
        return self.spec.tile.rows

    @property
    def row_tiles(self) -> int:
        """Eights of rows: a lane has two rows of each."""
        return self.rows // 8

    @property
    def v_products(self) -> int:
        """Products of 64 columns of V each."""
        return self.head_dim_v // 64

    @property
    def columns(self) -> int:
        """Columns of V, neighbours, that a lane has."""
        return self.head_dim_v // WARP

    @property
    def q_bytes(self) -> int:
        return 2 * self.rows * self.spec.traits.head_dim

    @property
    def p_bytes(self) -> int:
        """Of a warpgroup."""
        return 2 * self.rows * KEYS

    @property
    def numbers_count(self) -> int:
        """Of 32 bits: a factor of each row, and from each warpgroup maxima and sums of 4 warps."""
        return self.rows * (1 + 8 * self.spec.tile.key_warps)

    @property
    def part_stride(self) -> int:
        """Numbers between rows of partial output."""
        return self.head_dim_v + _PAD

    @property
    def parts_bytes(self) -> int:
        return 4 * self.spec.tile.key_warps * self.rows * self.part_stride

    @property
    def rings_bytes(self) -> int:
        return max(super().rings_bytes, self.parts_bytes)

    @property
    def shared_bytes(self) -> int:
        p_bytes = self.p_bytes * self.spec.tile.key_warps
        return self.rings_bytes + self.q_bytes + p_bytes + 4 * self.numbers_count
