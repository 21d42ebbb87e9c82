"""The tile of the cache kernel: a pure choice by rows, head dims, bytes of an element, and memory.

K and V are billed at the cache's own element size: the rings of a CTA take

    stages * key_warps * n_block * (head_dim + head_dim_v) * bytes of an element,

so that a cache of 1-byte codes gets twice the keys a tile of a 2-byte one. How keys are divided
(`key_warps`, `n_block`) decides the bits of a row, and is the same for every number of rows that
decode has (up to 64).
"""

from __future__ import annotations

from functools import lru_cache

from flash_attn_fp8.specs import ROWS_PER_MMA, CacheTile

DECODE_ROWS = 64  # query heads of a KV head, times query tokens, that a CTA of decode takes
_BYTES_OF_NUMBERS = 12  # a key's scales and index
_MISCELLANY = 1024  # what a CTA takes of shared memory besides
_ENOUGH_STAGES, _MOST_STAGES = 3, 6
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
    if rows > DECODE_ROWS:
        m_warps = 8 if wide else 4
        left = budget - 4 * head_dim * ROWS_PER_MMA * m_tiles * m_warps // 2
        stages = left // (_EXTEND_N_BLOCK * key_bytes)
        return CacheTile(m_warps, m_tiles, 1, _EXTEND_N_BLOCK, _clipped(stages))
    key_warps = 2 if wide else 4
    n_block = next(
        (n for n in (32, 16) if _ENOUGH_STAGES * key_warps * n * key_bytes <= budget), 16
    )
    m_warps = max(1, -(-rows // (ROWS_PER_MMA * m_tiles)))
    m_warps = 1 << (m_warps - 1).bit_length()
    stages = budget // (key_warps * n_block * key_bytes)
    return CacheTile(m_warps, m_tiles, key_warps, n_block, _clipped(stages))


def _clipped(stages: int) -> int:
    return max(2, min(stages, _MOST_STAGES))
