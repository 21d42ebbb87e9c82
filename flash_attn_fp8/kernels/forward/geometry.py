"""Sizes that every forward kernel derives from its spec. No compiler needed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.specs import ForwardSpec

TOKEN_SCALE_SLOTS = 2  # key tiles whose per-token scales are in shared memory
K_FACTOR, V_LOG2, V_INVERSE = range(3)  # the numbers of a key there: see token_scales.py
TOKEN_SCALE_KINDS = 3
# In V_LOG2 beside log2 of V's scale: the largest score stays positive beside such small scales as
# V's usually are, and positive numbers are in the order of their bits (sm90/softmax.py).
V_LOG2_BIAS = 16.0


@dataclass(frozen=True)
class ForwardGeometry:
    """What the spec implies on any architecture. `tile_m`: query rows of a tile; `tile_n`: keys."""

    spec: ForwardSpec

    tile_m: ClassVar[int]

    @property
    def element(self) -> int:
        """Bytes of an element of q, k and v."""
        return FORMATS[self.spec.traits.q_format].bits // 8

    @property
    def out_element(self) -> int:
        return FORMATS[self.spec.out_format].bits // 8

    @property
    def head_dim(self) -> int:
        return self.spec.traits.head_dim

    @property
    def head_dim_v(self) -> int:
        return self.spec.traits.head_dim_v

    @property
    def tokens(self) -> int:
        """Query tokens of a tile; each has `group` rows. Rows beyond tokens * group are unused."""
        return self.tile_m // self.spec.group

    @property
    def rows(self) -> int:
        """Rows of a query tile that are used."""
        return self.tokens * self.spec.group

    @property
    def q_stage(self) -> int:
        """Query tiles that a CTA works on at once."""
        raise NotImplementedError

    @property
    def ctas(self) -> int:
        """CTAs that work together."""
        return 1

    @property
    def unit_tokens(self) -> int:
        """Query tokens of a unit of work, all CTAs' that share it."""
        return self.q_stage * self.ctas * self.tokens

    def chunk(self, width: int) -> int:
        """Elements of a row that lie together in shared memory: one swizzle row."""
        row = width * self.element
        return next(w for w in (128, 64, 32) if row % w == 0) // self.element

    def key_rows(self, tile: int) -> int:
        """Keys of one TMA box of a tile of so many: all, or a page where pages are smaller."""
        page_size = self.spec.page_size
        return tile if page_size is None else min(tile, page_size)

    @property
    def scales_per_token(self) -> bool:
        traits = self.spec.traits
        return any(d is not None and d.per_token for d in (traits.k_descale, traits.v_descale))
