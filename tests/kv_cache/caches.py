"""Caches in every layout, over memory that is all pattern, and what an append must make of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

import flash_attn_fp8 as fa
from flash_attn_fp8.formats import FORMATS

PATTERN = 0x7F  # NaN as a code, 3.4e38 as a scale
LAYOUTS = ("contiguous", "paged", "inline", "padded")


@dataclass(frozen=True)
class Layout:
    """A cache's shape. `inline`: scales behind their rows; `padded`: bytes between the pages."""

    kind: str = "paged"
    fmt: str = "e4m3"
    heads: int = 2
    dims: tuple[int, int] = (64, 64)
    pages: int = 7
    page_size: int = 3
    batch: int = 2
    per: str = "token_head"
    device: str = "cpu"

    @property
    def slots(self) -> int:
        return self.pages * self.page_size


def _codes(layout: Layout, width: int, pad: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of K or V."""
    dtype = FORMATS[layout.fmt].dtype
    row = -(-(width + 4) // 16) * 16 if layout.kind == "inline" else width
    rows = layout.page_size * layout.heads
    memory = torch.full((layout.pages, rows * row + pad), PATTERN, dtype=torch.uint8)
    memory = memory.to(layout.device)
    shape = layout.pages, layout.page_size, layout.heads, row
    pool = memory.as_strided(shape, (rows * row + pad, layout.heads * row, row, 1))
    codes = pool[..., :width].view(dtype)
    if layout.kind == "inline":
        return codes, pool[..., width : width + 4].view(torch.float32)[..., 0]
    between = 5 if pad else 0
    scales = torch.full((layout.pages, rows + between), 3e38, device=layout.device)
    return codes, scales.as_strided(shape[:-1], (rows + between, layout.heads, 1))


def static_scales(layout: Layout, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    count = layout.heads if layout.per == "head" else 1
    return torch.empty(count).uniform_(0.001, 0.01, generator=g).to(layout.device)


def cache_of(layout: Layout, table: Tensor | None = None) -> fa.QuantizedKVCache:
    """An empty cache; a page table that gives pages out in a scattered order."""
    pad = 48 if layout.kind == "padded" else 0
    (k, k_scale), (v, v_scale) = (_codes(layout, width, pad) for width in layout.dims)
    if layout.per != "token_head":
        k_scale, v_scale = static_scales(layout, 1), static_scales(layout, 2)
    if layout.kind != "contiguous" and table is None:
        columns = layout.pages // layout.batch
        order = torch.randperm(layout.pages, generator=torch.Generator().manual_seed(3))
        table = order[: layout.batch * columns].reshape(layout.batch, columns).int()
    table = None if table is None else table.to(layout.device)
    return fa.QuantizedKVCache.adopt(k, v, k_descale=k_scale, v_descale=v_scale, page_table=table)


def memory_of(cache: fa.QuantizedKVCache) -> list[Tensor]:
    """All bytes that a cache could have written, pads included, copied."""
    tensors = cache.k, cache.v, cache.k_descale, cache.v_descale, cache.seqlens
    found = []
    for t in tensors:
        storage = t.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=t.device)
        found.append(whole.set_(storage, 0, (storage.nbytes(),), (1,)).cpu().clone())
    return found


def assert_same_memory(a: list[Tensor], b: list[Tensor]) -> None:
    for mine, yours in zip(a, b, strict=True):
        differ = (mine != yours).nonzero().flatten()
        assert not len(differ), f"bytes {differ[:8].tolist()} of {len(mine)} differ"


def rows_of(cache: fa.QuantizedKVCache) -> dict[str, Tensor]:
    """Codes as bytes and scales as bits, a row a slot."""
    found = {"k": cache.k.view(torch.uint8), "v": cache.v.view(torch.uint8)}
    if cache.per == "token_head":
        found |= {"k_descale": cache.k_descale, "v_descale": cache.v_descale}
    return {name: _bits(t).flatten(0, 1).cpu() for name, t in found.items()}


def _bits(t: Tensor) -> Tensor:
    return t.clone().view(torch.int32) if t.dtype == torch.float32 else t.clone()


@dataclass
class Model:
    """A cache as a plain dictionary from slots to rows; it knows nothing of strides."""

    rows: dict[str, Tensor]
    written: set[int] = field(default_factory=set)

    def append(self, cache: fa.QuantizedKVCache, k: Tensor, v: Tensor, slots: list[int]) -> None:
        """Token by token, what `quantize` and static scales make of each."""
        for name, x in (("k", k), ("v", v)):
            for token, slot in zip(x.reshape(-1, *x.shape[-2:]), slots, strict=True):
                if slot < 0:
                    continue
                codes, scale = codes_of(cache, name, token[None])
                self.rows[name][slot] = codes[0].cpu()
                if f"{name}_descale" in self.rows:
                    self.rows[f"{name}_descale"][slot] = _bits(scale[0]).cpu()
                self.written.add(slot)

    def assert_is(self, cache: fa.QuantizedKVCache) -> None:
        for name, rows in rows_of(cache).items():
            assert torch.equal(rows, self.rows[name]), name


def codes_of(cache: fa.QuantizedKVCache, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """(bytes, scales) of (tokens, heads, d) rows, from the definition."""
    dtype = cache.k.dtype
    if cache.per == "token_head":
        made = fa.quantize(x, dtype=dtype)
        return made.values.view(torch.uint8), made.descale[0]
    scale = getattr(cache, f"{name}_descale")
    largest = {d: FORMATS[f].max for f, d in ((f, FORMATS[f].dtype) for f in FORMATS)}[dtype]
    scaled = x.float() / scale.reshape(-1, 1)
    scaled = scaled.clamp(-largest, largest)
    if dtype == torch.int8:
        scaled = scaled.nan_to_num(nan=0.0).round()
    return scaled.to(dtype).view(torch.uint8), scale


def model_of(cache: fa.QuantizedKVCache) -> Model:
    return Model(rows_of(cache))


def new_tokens(
    *shape: int, dims: tuple[int, int], source: str = "bf16", seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Rows of very different sizes, with zeros, denormals and the largest numbers among them."""
    g = torch.Generator().manual_seed(seed)
    dtype = FORMATS[source].dtype
    made = []
    for width in dims:
        x = torch.randn(*shape, width, generator=g)
        x = (x * 10 ** torch.empty(*shape, 1).uniform_(-4, 4, generator=g)).to(dtype)
        rows = x.reshape(-1, width)
        edges = (0.0, -0.0, torch.finfo(dtype).tiny / 4, torch.finfo(dtype).max)
        for i, edge in enumerate(edges[: len(rows) // 3]):
            rows[3 * i] = edge
            rows[3 * i, ::3] *= -1
        made.append(rows.reshape(*shape, width).to(device))
    return made[0], made[1]


def spoil(x: Tensor) -> Tensor:
    """Infinities and NaN of both signs into some rows."""
    rows = x.reshape(-1, x.shape[-1])
    for i, value in enumerate((float("inf"), float("nan"), -float("inf"), -float("nan"))):
        rows[(2 * i + 1) % len(rows), (5 * i) % x.shape[-1]] = value
    rows[0] = float("nan")
    return rows.reshape(x.shape)
