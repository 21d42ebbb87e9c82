"""The tile of the cache kernel: a pure choice by rows, head dims, bytes of an element, and memory.

K and V are billed at the cache's own element size: the rings of a CTA take

    stages * key_warps * n_block * (head_dim + head_dim_v) * bytes of an element,

so that a cache of 1-byte codes gets twice the keys a tile of a 2-byte one. How keys are divided
(`key_warps`, `n_block`) decides the bits of a row, and is the same for every number of rows that
decode has (up to 64).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from flash_attn_fp8.specs import ROWS_PER_MMA, WARP, CacheTile, WarpgroupTile

DECODE_ROWS = 64  # query heads of a KV head, times query tokens, that a CTA of decode takes
_BYTES_OF_NUMBERS = 12  # a key's scales and index
_MISCELLANY = 1024  # what a CTA takes of shared memory besides
_FEWEST_STAGES, _ENOUGH_STAGES, _MOST_STAGES = 2, 3, 6
_REGISTERS = 128  # of a thread, that queries and output may take
_REGISTERS_OF_THREAD, _REGISTERS_OF_SM = 255, 1 << 16
_LARGE_MEMORY = 160 * 1024  # from here on two CTAs share a multiprocessor
_TWO_CTAS = 32  # rows, at head dim 128, for which 128 registers a thread do
_KEY_WARPGROUPS = 2


@lru_cache(maxsize=1024)
def tile_for(
    rows: int, head_dim: int, head_dim_v: int, element: int, shared_memory: int
) -> CacheTile:
    """The tile for so many rows (query heads of a KV head, times query tokens)."""
    # Outputs of 32 rows would fill a thread's registers.
    wide = head_dim_v > 128
    m_tiles = 1 if wide or rows <= ROWS_PER_MMA else 2
    key_bytes = (head_dim + head_dim_v) * element + _BYTES_OF_NUMBERS
    queries = _query_bytes(head_dim, head_dim_v, m_tiles)
    if rows > DECODE_ROWS:
        m_warps, key_warps = 8 if wide else 4, 1
        left = _budget(shared_memory, m_warps) - queries * m_warps
        n_block = next((n for n in (32, 16) if _FEWEST_STAGES * n * key_bytes <= left), 16)
    else:
        key_warps, n_block = _division(head_dim, head_dim_v, key_bytes, shared_memory)
        m_warps = max(1, -(-rows // (ROWS_PER_MMA * m_tiles)))
        m_warps = 1 << (m_warps - 1).bit_length()
        left = _budget(shared_memory, m_warps * key_warps) - queries * m_warps
    stages = left // (key_warps * n_block * key_bytes)
    stages = max(_FEWEST_STAGES, min(stages, _MOST_STAGES))
    return CacheTile(m_warps, m_tiles, key_warps, n_block, stages)


def _division(
    head_dim: int, head_dim_v: int, key_bytes: int, shared_memory: int
) -> tuple[int, int]:
    """(key_warps, n_block) of decode: one for all rows, so that the most have to fit as well."""
    wide = head_dim_v > 128
    m_tiles = 1 if wide else 2
    warps = DECODE_ROWS // (ROWS_PER_MMA * m_tiles)
    few = _budget(shared_memory, 4)
    most = few - _query_bytes(head_dim, head_dim_v, m_tiles) * warps
    key_warps = 2 if wide or _FEWEST_STAGES * 4 * 16 * key_bytes > most else 4
    n_block = next((n for n in (32, 16) if _ENOUGH_STAGES * key_warps * n * key_bytes <= few), 16)
    if _FEWEST_STAGES * key_warps * n_block * key_bytes > most:
        n_block = 16
    return key_warps, n_block


def _budget(shared_memory: int, warps: int) -> int:
    """What a CTA may take: half of a large memory, if two fit a multiprocessor's registers."""
    two_fit = 2 * warps * WARP * _REGISTERS_OF_THREAD <= _REGISTERS_OF_SM
    ctas = 2 if shared_memory > _LARGE_MEMORY and two_fit else 1
    return shared_memory // ctas - _MISCELLANY


def _query_bytes(head_dim: int, head_dim_v: int, m_tiles: int) -> int:
    """Of a warp's queries in shared memory: none where they are in registers (`CacheGeometry`)."""
    fits = m_tiles * (head_dim // 4 + head_dim_v // 2) <= _REGISTERS
    return 0 if fits else 2 * ROWS_PER_MMA * m_tiles * head_dim


@lru_cache(maxsize=1024)
def warpgroup_tile_for(
    rows: int, head_dim: int, head_dim_v: int, shared_memory: int, *, full: bool, scattered: bool
) -> WarpgroupTile:
    """The tile of warpgroups for so many rows; beyond `DECODE_ROWS` equal parts of them.

    `full`: there are CTAs for two a multiprocessor. What both ask for is enough then: beyond some
    64 KB memory is read the slower, the more is asked for at once; where keys lie `scattered`, from
    half of that on.
    """
    parts = max(1, -(-rows // DECODE_ROWS))
    rows = max(1, -(-rows // (8 * parts))) * 8
    ctas = 2 if rows * max(head_dim, 128) <= _TWO_CTAS * 128 else 1
    tile = WarpgroupTile(rows, _KEY_WARPGROUPS, _FEWEST_STAGES, ctas)
    keys = tile.key_warps * tile.n_block
    left = shared_memory // ctas - _MISCELLANY
    left -= rows * (2 * head_dim + 2 * keys + 4 * (1 + 8 * tile.key_warps))
    stages = left // (keys * (head_dim + head_dim_v + _BYTES_OF_NUMBERS))
    most = _FEWEST_STAGES if scattered or (full and ctas > 1) else _ENOUGH_STAGES
    return replace(tile, stages=max(_FEWEST_STAGES, min(stages, most)))
