"""Specs of compiled kernels: frozen records that are their compile keys.

A spec says all that the generated code depends on and nothing else: two calls with equal specs run
the same code, whatever their sizes. Standard library only, so that planning loads no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flash_attn_fp8.problem import Traits

TILE = 128  # query rows of a tile, and keys of a tile
WARP = 32  # threads
ALIGNMENT = 16  # bytes, of rows: what TMA and 16-byte stores need


@dataclass(frozen=True)
class ForwardSpec:
    """A forward kernel of an architecture with TMA.

    `group` query heads share the rows of a tile (`pack_gqa`; 1: not packed). `page_size` of a
    paged cache. With `split` the kernel writes fp32 partial results, one per part of the keys,
    which `CombineSpec`'s kernel merges.
    """

    traits: Traits
    group: int = 1
    page_size: int | None = None
    split: bool = False

    @property
    def out_format(self) -> str:
        return "fp32" if self.split else self.traits.out_format

    @property
    def writes_lse(self) -> bool:
        return self.split or self.traits.lse

    @property
    def combine(self) -> CombineSpec:
        """The kernel that merges the parts of this one's results."""
        return _combine(self.traits, False)


@dataclass(frozen=True)
class Sm100Spec(ForwardSpec):
    """The SM100 forward kernel.

    With `pair` two CTAs work together: each has its own query tiles and half of every K and V tile,
    so that each reads less.
    """

    pair: bool = False


@dataclass(frozen=True)
class Sm90Spec(ForwardSpec):
    """The SM90 forward kernel.

    `widened`: K and V are what `WidenSpec`'s kernel makes, and the traits say so.
    """

    widened: bool = False

    @property
    def v_format(self) -> str:
        """Of V as the tensor core reads it: P's, where that has 16 bits. K's is `kv_format`."""
        return self.traits.kv_format if self.is_fp8 else self.traits.policy.p_format

    @property
    def claims_units(self) -> bool:
        """Whether CTAs claim units of work one by one, since these differ in length."""
        t = self.traits
        packed = "varlen" in (t.q_layout, t.kv_layout)
        return t.bounded_left or t.bounded_right or packed or t.seqused_q or t.seqused_k

    @property
    def is_fp8(self) -> bool:
        return self.traits.q_format in ("e4m3", "e5m2")

    @property
    def in_sequence(self) -> bool:
        """Whether a tile's products and softmax follow one another (`kernels/sm90/in_sequence.py`).

        With codes by FMA, where the softmax is as short as the products, large tiles pay more than
        overlap does; above head dim 128 there are no registers for anything else.
        """
        return self.is_fp8 and (self.traits.head_dim_v > 128 or self.traits.policy.exp2 != "exact")

    @property
    def tile_n(self) -> int:
        """Keys of a tile: more where no scores wait beside another tile's products.

        In 16 bits fewer, where registers, and shared memory for two, ask for it.
        """
        t = self.traits
        if self.is_fp8:
            promote = t.policy.promote_every
            seldom = promote is None or promote >= 2 * TILE
            free = seldom and not self.split  # parts end on tiles of the usual size
            return 2 * TILE if free and self.in_sequence and t.head_dim_v <= 128 else TILE
        return TILE // 2 if t.head_dim + t.head_dim_v > _WIDEST_IN_16_BITS else TILE

    @property
    def transpose(self) -> TransposeSpec | None:
        """The kernel that runs before, for fp8: wgmma reads V transposed."""
        if not self.is_fp8:
            return None
        t = self.traits
        return TransposeSpec(t.kv_layout, t.head_dim_v, self.tile_n, self.page_size, t.seqused_k)


_WIDEST_IN_16_BITS = 192 + 128  # head dims of K and V, whose tiles may have 128 keys


@dataclass(frozen=True)
class CombineSpec:
    """The kernel that merges the partial results of splits.

    With `overlaps` (sm_90 on) it is launched while the kernel before it ends, and waits for that.
    """

    out_format: str
    head_dim_v: int
    varlen: bool
    lse: bool
    output_scale: bool
    overlaps: bool = False


@dataclass(frozen=True)
class CacheTile:
    """How a CTA of the cache kernel divides its rows and keys among warps.

    A warp has `m_tiles` times 16 rows (query heads of a KV head, and query tokens), and takes
    `n_block` keys at a time. `m_warps` warps of different rows share a ring of `stages` tiles;
    `key_warps` such groups take key tiles in turn, and merge at the end.
    """

    m_warps: int
    m_tiles: int
    key_warps: int
    n_block: int
    stages: int

    @property
    def block_m(self) -> int:
        """Rows of a CTA."""
        return ROWS_PER_MMA * self.m_tiles * self.m_warps


@dataclass(frozen=True)
class WarpgroupTile:
    """How a CTA of the cache kernel divides rows and keys among warpgroups, on SM90.

    A warpgroup takes `n_block` keys at a time, as the rows of a product whose columns are all
    `rows` rows of the CTA: 8 to 64, in eights. `key_warps` of them take key tiles in turn, each
    with a ring of `stages` tiles. `ctas` are to fit a multiprocessor's registers.
    """

    rows: int
    key_warps: int
    stages: int
    ctas: int
    n_block: ClassVar[int] = 64  # what one product has of its first operand's rows
    m_warps: ClassVar[int] = 4
    m_tiles: ClassVar[int] = 1

    @property
    def block_m(self) -> int:
        """Rows of a CTA."""
        return self.rows


ROWS_PER_MMA = 16  # of mma.m16n8k16


@dataclass(frozen=True)
class CacheSpec:
    """The kernel for 16-bit queries over a cache of 8-bit codes, or of 16-bit numbers; any GPU.

    `has_fp8`: the architecture converts fp8 (sm_89 on). `overlaps`: see `CombineSpec`.
    """

    traits: Traits
    tile: CacheTile | WarpgroupTile
    split: bool = False
    has_fp8: bool = True
    overlaps: bool = True

    @property
    def out_format(self) -> str:
        return "fp32" if self.split else self.traits.out_format

    @property
    def writes_lse(self) -> bool:
        return self.split or self.traits.lse

    @property
    def combine(self) -> CombineSpec:
        """The kernel that merges the parts of this one's results."""
        return _combine(self.traits, self.overlaps)


def _combine(traits: Traits, overlaps: bool) -> CombineSpec:
    return CombineSpec(
        out_format=traits.out_format,
        head_dim_v=traits.head_dim_v,
        varlen=traits.q_layout == "varlen",
        lse=traits.lse,
        output_scale=traits.output_scale,
        overlaps=overlaps,
    )


@dataclass(frozen=True)
class AppendSpec:
    """The kernel that quantises new keys and values into a cache.

    `source` and `codes` are formats. `per`: a scale a (token, KV head), which the kernel finds and
    writes, or static ones, per head or tensor, which it reads. `source_bytes` and `code_bytes`:
    the alignment of every row, up to 16. `wide_slots`: slots are int64. `converts`: the
    architecture has instructions that round to fp8 (sm_89 on); else integers do.
    """

    source: str
    codes: str
    head_dim: int
    head_dim_v: int
    per: Literal["token_head", "head", "tensor"]
    source_bytes: int = 16
    code_bytes: int = 16
    wide_slots: bool = False
    converts: bool = True


@dataclass(frozen=True)
class TransposeSpec:
    """The kernel that transposes fp8 V for `Sm90Spec`'s, in whole tiles of `tile_n` keys."""

    kv_layout: str
    head_dim_v: int
    tile_n: int
    page_size: int | None = None
    seqused_k: bool = False


@dataclass(frozen=True)
class WidenSpec:
    """The kernel that makes rows in 16 bits of a cache's 8-bit codes for `Sm90Spec`'s.

    `k_scale`, `v_scale`: there is one a (token, KV head), which multiplies the codes.
    """

    kv_format: str
    k_format: str
    v_format: str
    head_dim: int
    head_dim_v: int
    kv_layout: str
    seqused_k: bool = False
    k_scale: bool = False
    v_scale: bool = False

    @property
    def scales(self) -> bool:
        """Whether any codes are multiplied, and tiles have units."""
        return self.k_scale or self.v_scale


# What a plan launches, and with appends all that is compiled.
Kernel = Sm90Spec | Sm100Spec | TransposeSpec | WidenSpec | CacheSpec | CombineSpec
Spec = Kernel | AppendSpec
