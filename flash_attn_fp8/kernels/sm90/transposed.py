"""V as fp8 wgmma reads it: rows are columns of V, keys run along them.

V^T (b, hkv, dv, columns), or (hkv, dv, columns) of packed sequences, whole key tiles a sequence.
What order rows and columns have suits the registers of the kernel that multiplies:

* Within 32 keys, position 16h + 4q + 2j + e holds key 16h + 8j + 2q + e: so a lane's scores of a
  row, as wgmma leaves them, are what it wants of P as the next wgmma's operand.
* Within 32 columns of V, row 8i + 2q + e holds column 8q + 2i + e: so a lane's part of a row of the
  output is 8 neighbours, as a wide store wants it.
"""

from __future__ import annotations

KEYS_AT_ONCE = 16  # a thread's, and COLUMNS_AT_ONCE of V
COLUMNS_AT_ONCE = 8


def first_column(tile_n: int, offset, sequence):  # type: ignore[no-untyped-def]
    """Where a packed sequence begins in V^T: at a tile that no other sequence reaches.

    `offset`: where it begins in V. Both may be values of the device.
    """
    return (offset // tile_n + sequence) * tile_n


def columns_of(tile_n: int, keys):  # type: ignore[no-untyped-def]
    """Columns of a sequence of so many keys: whole tiles."""
    return (keys + tile_n - 1) // tile_n * tile_n
