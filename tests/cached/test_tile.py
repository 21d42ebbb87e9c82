"""The tile of the cache kernel: it fits every chip, and what decides a row's bits is one choice."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

import flash_attn_fp8 as fa
from flash_attn_fp8.cache_tile import DECODE_ROWS, tile_for
from flash_attn_fp8.formats import FORMATS
from flash_attn_fp8.kernels.cached.geometry import CacheGeometry
from flash_attn_fp8.specs import CacheSpec
from flash_attn_fp8.support import CACHE_HEAD_DIMS
from flash_attn_fp8.target import SHARED_MEMORY
from tests.cached.launch import spec_of

ROWS = (*range(1, 66), 71, 128, 142, 568, 9230)
KB = 1024


@lru_cache
def spec(head_dims: tuple[int, int], kv_format: str) -> CacheSpec:
    """Of some call with these."""
    q_name = kv_format if kv_format in ("bf16", "fp16") else "bf16"
    q, k, v = (torch.empty(1, 8, 1, n) for n in (head_dims[0], *head_dims))
    call = fa.flash_attn_with_kvcache.describe_call(
        q.to(FORMATS[q_name].dtype), k.to(FORMATS[kv_format].dtype), v.to(FORMATS[kv_format].dtype),
        selection=torch.zeros(1, 1, 8, dtype=torch.int32), impl="sim",
    )  # fmt: skip
    return spec_of(call)


def geometry(
    rows: int, head_dims: tuple[int, int], kv_format: str, shared_memory: int
) -> CacheGeometry:
    """Sizes of the tile for so many rows."""
    tile = tile_for(rows, *head_dims, FORMATS[kv_format].bits // 8, shared_memory)
    return CacheGeometry(replace(spec(head_dims, kv_format), tile=tile))


def share(shared_memory: int, threads: int = 128) -> int:
    """What a CTA's rings and queries may take: two CTAs share a large memory, if registers do."""
    both = shared_memory > 160 * KB and 2 * threads * 255 <= 1 << 16
    return shared_memory // (2 if both else 1) - KB


MEMORIES = pytest.mark.parametrize("shared_memory", sorted(set(SHARED_MEMORY.values())))
HEAD_DIMS = pytest.mark.parametrize("head_dims", CACHE_HEAD_DIMS, ids=str)
CACHES = pytest.mark.parametrize("kv_format", ["e4m3", "bf16"])


@CACHES
@HEAD_DIMS
@MEMORIES
def test_everything_fits(shared_memory: int, head_dims: tuple[int, int], kv_format: str) -> None:
    """In the shared memory of every architecture that there is a kernel for."""
    for rows in ROWS:
        g = geometry(rows, head_dims, kv_format, shared_memory)
        assert g.shared_bytes <= shared_memory, (rows, g.spec.tile)
        assert g.threads <= 1024
        tile = g.spec.tile
        assert tile.stages >= 2
        if rows <= DECODE_ROWS:
            assert tile.block_m >= rows, "decode reads a cache once"
        if tile.key_warps > 1:
            assert g.v_tiles_at_once % tile.key_warps == 0 == g.v_tiles % g.v_tiles_at_once


@CACHES
@HEAD_DIMS
@MEMORIES
def test_a_tile_takes_its_share(
    shared_memory: int, head_dims: tuple[int, int], kv_format: str
) -> None:
    """No more, unless it has the fewest stages; and another stage would not fit."""
    for rows in ROWS:
        g = geometry(rows, head_dims, kv_format, shared_memory)
        stages, one = g.spec.tile.stages, g.rings_bytes // g.spec.tile.stages
        room = share(shared_memory, g.threads)
        assert stages == 2 or g.shared_bytes <= room, (rows, g.spec.tile)
        assert stages == 6 or g.shared_bytes + one > room, (rows, g.spec.tile)


@CACHES
@HEAD_DIMS
@MEMORIES
def test_all_rows_of_decode_divide_keys_alike(
    shared_memory: int, head_dims: tuple[int, int], kv_format: str
) -> None:
    """So that a row's bits do not depend on how many come with it."""
    element = FORMATS[kv_format].bits // 8
    tiles = [tile_for(r, *head_dims, element, shared_memory) for r in range(1, DECODE_ROWS + 1)]
    assert len({(t.key_warps, t.n_block) for t in tiles}) == 1


@HEAD_DIMS
@pytest.mark.parametrize("shared_memory", [99 * KB, 227 * KB])
def test_two_byte_caches_are_billed_at_their_size(
    shared_memory: int, head_dims: tuple[int, int]
) -> None:
    """stages * key warps * keys * (d + dv) * 2 bytes stay in what a CTA has: at 99 KB, and 227."""
    tile = tile_for(1, *head_dims, 2, shared_memory)
    assert tile.stages * tile.key_warps * tile.n_block * sum(head_dims) * 2 <= share(shared_memory)


@HEAD_DIMS
@pytest.mark.parametrize("shared_memory", [99 * KB, 227 * KB])
def test_one_byte_caches_have_twice_the_keys(
    shared_memory: int, head_dims: tuple[int, int]
) -> None:
    """In flight, within a stage; unless they have the most stages."""
    one, two = (tile_for(1, *head_dims, element, shared_memory) for element in (1, 2))
    keys = [t.stages * t.key_warps * t.n_block for t in (one, two)]
    assert one.n_block >= two.n_block
    assert one.stages == 6 or keys[0] >= 2 * keys[1] - one.key_warps * one.n_block
