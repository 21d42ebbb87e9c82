"""V as fp8 wgmma reads it: rows are columns of V, keys run along them.

V^T (b, hkv, dv, columns), or (hkv, dv, columns) of packed sequences, whole key tiles a sequence.
What order rows and columns have suits the registers of the kernel that multiplies:

* Within 32 keys, position 16h + 4q + 2j + e holds key 16h + 8j + 2q + e: so a lane's scores of a
  row, as wgmma leaves them, are what it wants of P as the next wgmma's operand.
* Within 32 columns of V, row 8i + 2q + e holds column 8q + 2i + e: so a lane's part of a row of the
  output is 8 neighbours, as a wide store wants it.
"""

from __future__ import annotations

from flash_attn_fp8.specs import TILE

KEYS_AT_ONCE = 16  # a thread's, and COLUMNS_AT_ONCE of V
COLUMNS_AT_ONCE = 8


def first_column(work):  # type: ignore[no-untyped-def]
    """Where a packed sequence begins in V^T: at a key tile that no other sequence reaches."""
    return (work.offset_k // TILE + work.batch) * TILE
