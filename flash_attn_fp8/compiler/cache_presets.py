"""Presets of the cache kernel: 16-bit queries over a quantised cache, and what fills the cache.

As in `presets.py`, a preset stands for calls on meta tensors, and its specs are those of their
plans. What differs is how many rows ride together; on SM90 also whether there are CTAs for two a
multiprocessor, and whether pages have one slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch

from flash_attn_fp8.call import Call, Operands, Options
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.plan import FEW_ROWS_OF_CODES
from flash_attn_fp8.specs import AppendSpec
from flash_attn_fp8.target import has_fp8

Scales = Literal["token_head", "tensor"]
_MANY = 512  # sequences
# Query rows of chunks of a prefill: whole CTAs; and so many that SM90 converts the cache first.
_CHUNKS = FEW_ROWS_OF_CODES, 2 * FEW_ROWS_OF_CODES


@dataclass(frozen=True)
class CachePreset:
    """Every combination of its fields is a call, with whole and with split keys.

    `tokens`: query tokens of a decode, besides chunks of a prefill. `groups`: query heads of a KV
    head.
    """

    about: str
    groups: tuple[int, ...]
    head_dims: tuple[int, int] = (128, 128)
    q_format: str = "bf16"
    formats: tuple[str, ...] = ("e4m3", "int8")
    tokens: tuple[int, ...] = (1, 4, 8)
    paged: tuple[bool, ...] = (False, True)
    scales: tuple[Scales, ...] = ("token_head",)
    selected: bool = False

    def calls(self) -> Iterator[Call]:
        """The calls, of two KV heads, in small batches and in such as fill a GPU."""
        pages = [size for paged in self.paged for size in ((16, 1) if paged else (None,))]
        kinds = product(self.groups, self.formats, pages, self.scales, (1, 2), (2, _MANY))
        for group, fmt, page_size, scales, parts, batch in kinds:
            for tokens in (*self.tokens, *(-(-rows // group) for rows in _CHUNKS)):
                yield self._call((group, tokens), fmt, page_size, scales, parts, batch)

    def appends(self, arch: str) -> Iterator[AppendSpec]:
        """The kernels that quantise into such a cache."""
        for fmt, scales in product(self.formats, self.scales):
            if fmt != self.q_format:
                converts = fmt == "int8" or has_fp8(arch)
                for wide in (False, True):
                    yield AppendSpec(
                        self.q_format, fmt, *self.head_dims, scales, wide_slots=wide,
                        converts=converts,
                    )  # fmt: skip

    def _call(
        self,
        rows: tuple[int, int],
        fmt: str,
        page_size: int | None,
        scales: Scales,
        parts: int,
        batch: int,
    ) -> Call:
        (group, tokens), (d, dv) = rows, self.head_dims
        lead = (16, page_size) if page_size else (batch, 1024)
        scale = None
        if FORMATS[fmt].is_8bit:
            shape = (1,) if scales == "tensor" else (*lead, 2)
            scale = _meta(torch.float32, *shape)
        operands = Operands(
            _meta(FORMATS[self.q_format].dtype, batch, tokens, 2 * group, d),
            _meta(FORMATS[fmt].dtype, *lead, 2, d),
            _meta(FORMATS[fmt].dtype, *lead, 2, dv),
            seqused_k=_meta(torch.int32, batch),
            page_table=_meta(torch.int32, batch, 64) if page_size else None,
            k_descale=scale,
            v_descale=scale,
            selection=_meta(torch.int32, batch, 2, 64) if self.selected else None,
        )
        options = Options(causal=True, num_splits=parts, impl="cute")
        return Call("flash_attn_with_kvcache", operands, options)


CACHE_PRESETS = {
    "kv-cache": CachePreset(
        "bf16 queries over e4m3 and int8 caches, head dim 128, 4 or 8 query heads a KV head", (4, 8)
    ),
    "kv-cache-smoke": CachePreset(
        "one small cache kernel", (1,), (64, 64), formats=("e4m3",), tokens=(1,), paged=(False,)
    ),
    "kv-selection": CachePreset(
        "decode over chosen keys of an int8 cache",
        (8,),
        formats=("int8",),
        tokens=(1, 2, 3, 4),
        paged=(True,),
        selected=True,
    ),
}


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
