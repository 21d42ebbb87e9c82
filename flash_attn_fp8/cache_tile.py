"""The tile of the cache kernel: a pure choice by rows, head dims, bytes of an element, and memory.

K and V are billed at the cache's own element size: the rings of a CTA take

    stages * key_warps * n_block * (head_dim + head_dim_v) * bytes of an element,

so that a cache of 1-byte codes gets twice the keys a tile of a 2-byte one. How keys are divided
(`key_warps`, `n_block`) decides the bits of a row, and is the same for every number of rows that
decode has (up to 64).
"""

from __future__ import annotations

from functools import lru_cache

from flash_attn_fp8.specs import ROWS_PER_MMA, WARP, CacheTile

DECODE_ROWS = 64  # query heads of a KV head, times query tokens, that a CTA of decode takes
_BYTES_OF_NUMBERS = 12  # a key's scales and index
_MISCELLANY = 1024  # what a CTA takes of shared memory besides
_FEWEST_STAGES, _ENOUGH_STAGES, _MOST_STAGES = 2, 3, 6
_REGISTERS = 128  # of a thread, that queries and output may take
_REGISTERS_OF_THREAD, _REGISTERS_OF_SM = 255, 1 << 16
_LARGE_MEMORY = 160 * 1024  # from here on two CTAs share a multiprocessor
_EXTEND_N_BLOCK = 32


@lru_cache(maxsize=1024)
def tile_for(
    rows: int, head_dim: int, head_dim_v: int, element: int, shared_memory: int
) -> CacheTile:
    """The tile for so many rows (query heads of a KV head, times query tokens)."""
    # Outputs of 32 rows would fill a thread's registers.
    wide = head_dim_v > 128
    m_tiles = 1 if wide or rows <= ROWS_PER_MMA else 2
    key_bytes = (head_dim + head_dim_v) * element + _BYTES_OF_NUMBERS
    ctas = 2 if shared_memory > _LARGE_MEMORY else 1
    budget = shared_memory // ctas - _MISCELLANY
    queries = _query_bytes(head_dim, head_dim_v, m_tiles)
    if rows > DECODE_ROWS:
        m_warps = 8 if wide else 4
        left = budget - queries * m_warps
        n_block = next((n for n in (32, 16) if _FEWEST_STAGES * n * key_bytes <= left), 16)
        return CacheTile(m_warps, m_tiles, 1, n_block, _clipped(left // (n_block * key_bytes)))
    # How keys are divided is the same for all rows, so that of the most.
    m_tiles_of_most = 1 if wide else 2
    warps_of_most = DECODE_ROWS // (ROWS_PER_MMA * m_tiles_of_most)
    most = budget - _query_bytes(head_dim, head_dim_v, m_tiles_of_most) * warps_of_most
    key_warps = 2 if wide or _FEWEST_STAGES * 4 * 16 * key_bytes > most else 4
    n_block = next(
        (n for n in (32, 16) if _ENOUGH_STAGES * key_warps * n * key_bytes <= budget), 16
    )
    while n_block > 16 and _FEWEST_STAGES * key_warps * n_block * key_bytes > most:
        n_block //= 2
    m_warps = max(1, -(-rows // (ROWS_PER_MMA * m_tiles)))
    m_warps = 1 << (m_warps - 1).bit_length()
    # As many threads leave room for one CTA alone.
    if m_warps * key_warps * WARP * _REGISTERS_OF_THREAD * 2 > _REGISTERS_OF_SM:
        budget = shared_memory - _MISCELLANY
    left = budget - queries * m_warps
    return CacheTile(
        m_warps, m_tiles, key_warps, n_block, _clipped(left // (key_warps * n_block * key_bytes))
    )


def _query_bytes(head_dim: int, head_dim_v: int, m_tiles: int) -> int:
    """Of a warp's queries in shared memory: none where they are in registers (`CacheGeometry`)."""
    fits = m_tiles * (head_dim // 4 + head_dim_v // 2) <= _REGISTERS
    return 0 if fits else 2 * ROWS_PER_MMA * m_tiles * head_dim


def _clipped(stages: int) -> int:
    return max(_FEWEST_STAGES, min(stages, _MOST_STAGES))
