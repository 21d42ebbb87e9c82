"""Specs of compiled kernels: frozen records that are their compile keys.

A spec says all that the generated code depends on and nothing else: two calls with equal specs run
the same code, whatever their sizes. Standard library only, so that planning loads no compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flash_attn_fp8.problem import Traits

TILE = 128  # query rows of a tile, and keys of a tile


@dataclass(frozen=True)
class Sm100Spec:
    """The SM100 forward kernel.

    `group` query heads share the rows of a tile (`pack_gqa`; 1: not packed). `page_size` of a
    paged cache. With `split` the kernel writes fp32 partial results, one per part of the keys,
    which `CombineSpec`'s kernel merges. With `pair` two CTAs work together: each has its own query
    tiles and half of every K and V tile, so that each reads less.
    """

    traits: Traits
    group: int = 1
    page_size: int | None = None
    split: bool = False
    pair: bool = False

    @property
    def out_format(self) -> str:
        return "fp32" if self.split else self.traits.out_format

    @property
    def writes_lse(self) -> bool:
        return self.split or self.traits.lse

    @property
    def combine(self) -> CombineSpec:
        """The kernel that merges the parts of this one's results."""
        traits = self.traits
        return CombineSpec(
            out_format=traits.out_format,
            head_dim_v=traits.head_dim_v,
            varlen=traits.q_layout == "varlen",
            lse=traits.lse,
            output_scale=traits.output_scale,
        )


@dataclass(frozen=True)
class CombineSpec:
    """The kernel that merges the partial results of splits."""

    out_format: str
    head_dim_v: int
    varlen: bool
    lse: bool
    output_scale: bool


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
